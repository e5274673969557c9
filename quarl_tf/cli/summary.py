"""Tables for the terminal, and the quality gate."""

import math
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Group, JustifyMethod, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from quarl_tf.cli.doctor import Finding
from quarl_tf.evaluation import compare
from quarl_tf.evaluation.blame import Blame
from quarl_tf.evaluation.compare import Comparison, Interval
from quarl_tf.evaluation.shelf import Entry, Outcome
from quarl_tf.export.boards import Fit
from quarl_tf.foundation import provenance
from quarl_tf.foundation.errors import GateError, QuarlError, UsageError
from quarl_tf.foundation.files import sha256
from quarl_tf.runtime.flatbuffer import FLOAT_TYPES, FlatbufferAudit
from quarl_tf.spec import REFERENCE, Scheme
from quarl_tf.store import state
from quarl_tf.store.records import Evaluation, Sidecar
from quarl_tf.store.workspace import Workspace, evaluation_path, has_sidecar, reference_path
from quarl_tf.study import State, Status

_right = partial(Column, justify="right", no_wrap=True)
_plain = partial(Table, box=None, padding=(0, 1, 0, 0))


def results_table(artifacts: Sequence[Path], args: Namespace, width: int) -> Group:
    """Return a table of the flatbuffers in one folder, without their sizes if it is too wide."""
    policies = [Entry.load(path) for path in artifacts]
    evaluations = [_evaluation(path, args) for path in artifacts]
    comparisons = [_comparison(policy, args) for policy in policies]
    counts = {comparison.episodes if comparison else args.episodes for comparison in comparisons}
    episodes = f"{min(counts)} episodes, the same for every scheme" if len(counts) == 1 else ""
    fewer = "fp32 has no more" if min(counts) < args.episodes else ""
    about = ", ".join(filter(None, (episodes, fewer, args.chance.words)))
    title = f"{policies[0].run.run_id}: {about}"
    means = [abs(comparison.reference_mean) for comparison in comparisons if comparison]
    digits = _digits(max(means, default=0))
    results = zip(policies, evaluations, comparisons, strict=True)
    rows = [_row(policy.sidecar, played, compared, digits) for policy, played, compared in results]
    names = [*rows[0]]
    widths = [max(len(text) for text in (name, *(row[name] for row in rows))) for name in names]
    if sum(widths) + len(names) > width:
        names = [name for name in names if name != "bytes" and "µs" not in name]
    table = _plain()
    for name in names:
        justify: JustifyMethod = "left" if name in ("scheme", "verdict") else "right"
        table.add_column(name, justify=justify, no_wrap=name != "verdict")
    for row in rows:
        table.add_row(*(row[name] for name in names))
    timed_on = {evaluation.processor or "an unknown processor" for evaluation in evaluations}
    others = sorted(timed_on - {provenance.processor()})
    lines: list[RenderableType] = [Text(title, style="italic"), table]
    if others and any(row[name] for row in rows for name in names if "µs" in name):
        text = f"timed on {' and '.join(others)}; `quarl bench FILE` times it here"
        lines.append(Text(text, style="dim"))
    return Group(*lines)


def bench_table(measurements: Mapping[str, Any]) -> Table:
    """Return the table of `bench`."""
    ways = dict.fromkeys(way for row in measurements["artifacts"] for way in row["latency_us"])
    columns = ["as C" if way == "C" else f"{way} thread{'s' * (way != '1')}" for way in ways]
    columns += ["load ms", "bytes", "arena", "process"]
    runs, title = {row["run_id"] for row in measurements["artifacts"]}, "µs of one call"
    title += ": median, 95 %, 99 %" if len(runs) > 1 else f" of {escape(*runs)}: median, 95 %, 99 %"
    first = Column("file", overflow="fold", min_width=6)
    table = _plain(first, *map(_right, columns), title=title, title_justify="left")
    for row in measurements["artifacts"]:
        percentiles = [row["latency_us"].get(way, {}).values() for way in ways]
        latencies = [" ".join(f"{us:.1f}" for us in values) for values in percentiles]
        sizes = [f"{row['bytes'][kind]:,}" for kind in ("file", "arena", "process")]
        if not row["native"]:  # A float file of numbers on a grid.
            sizes[0] = "simulated"
        name = row["scheme"] if len(runs) == 1 else f"{escape(row['run_id'])} {row['scheme']}"
        table.add_row(name, *latencies, f"{row['load_ms']:.1f}", *sizes)
    return table


def blame_table(layers: Sequence[Blame]) -> Table:
    """Return the table of `blame`."""
    columns = ("layer", "range", "codes", "at the ends", "signal to noise", "share of the error")
    gain = Column("return gained without it [95 %]", no_wrap=True)
    table = _plain(*columns, "other actions without it", gain)
    for blame in layers:
        table.add_row(
            blame.layer,
            f"{blame.low:.3g} … {blame.high:.3g}",
            str(blame.codes),
            f"{blame.saturated:.1%}",
            f"{blame.noise:.1f} dB",
            f"{blame.share:.1%}",
            f"{blame.disagreement:.1%}",
            "" if blame.gain is None else _difference_text(blame.gain, 2),
        )
    return table


def study_table(statuses: Sequence[Status]) -> Table:
    """Return a table of experiments and their progress."""
    table = Table("run", "scheme", "state")
    colours = {State.MISSING: "default", State.EVALUATED: "green", State.FAILED: "red"}
    for status in statuses:
        coloured_state = f"[{colours.get(status.state, 'yellow')}]{status.state}"
        table.add_row(status.run.run_id, status.scheme.name, coloured_state)
    return table


def counts(statuses: Sequence[Status]) -> str:
    """Return the numbers of experiments by state."""
    numbers = Counter(status.state for status in statuses)
    parts = [f"{numbers[state]} {state}" for state in State if numbers[state]]
    return f"{len(statuses)} experiments: {', '.join(parts)}"


def content_table(artifact: Path, audit: FlatbufferAudit) -> Table:
    """Return a table of what a flatbuffer holds and where it comes from."""
    table = Table(Column(no_wrap=True), Column(overflow="fold"), show_header=False)
    table.add_row("size", f"{artifact.stat().st_size:,} bytes")
    for kind, tensors in (("input", audit.inputs), ("output", audit.outputs)):
        for tensor in tensors:
            text = f"{tensor.name} {list(tensor.shape)} {tensor.dtype}"
            if tensor.scales.size == 1:
                text += f", scale {tensor.scales[0]:g}, zero point {tensor.zero_points[0]}"
            table.add_row(kind, escape(text))
    table.add_row("operators", escape("\n".join(audit.operators)))
    table.add_row("tensors", ", ".join(f"{n} {t}" for t, n in audit.tensor_dtypes.items()))
    table.add_row("weights", ", ".join(f"{n:,} {t}" for t, n in audit.weight_dtypes.items()))
    if any(audit.kernel_scales):
        table.add_row("scales of each kernel", ", ".join(map(str, audit.kernel_scales)))
    if not has_sidecar(artifact):
        is_float = audit.weight_dtypes.keys() <= FLOAT_TYPES
        remedy = "can be adopted (quarl adopt)" if is_float else "needs the .json it came with"
        table.add_row("sidecar", f"none: this file {remedy}, and cannot be evaluated")
        return table
    sidecar = Entry.load(artifact).sidecar
    table.add_row("run", escape(f"{sidecar.run_id} (commit {sidecar.commit})"))
    kind = "native" if sidecar.native else "simulated"
    table.add_row("scheme", f"{escape(sidecar.scheme)}, {kind}")
    changed = sha256(artifact) != sidecar.sha256
    digest = "does not match the sidecar: changed or damaged" if changed else sidecar.sha256
    table.add_row("sha256", digest)
    table.add_row("check", escape(", ".join(f"{k} {v}" for k, v in sidecar.check.items())))
    return table


def boards_table(board: str, fits: Sequence[Fit]) -> Table:
    """Return a table of the ways to run a flatbuffer on a board, and whether it holds them."""
    table = Table(f"on {board}", "flash", "RAM", "lacks", "verdict")
    for fit in fits:
        pairs = zip(fit.taken or (), fit.there, strict=False)
        sizes = [f"{used:,} of {available:,}" for used, available in pairs] or ["", ""]
        verdict = "[green]fits" if fit.holds else "[red]does not fit"
        table.add_row(fit.route, *sizes, escape("\n".join(fit.lacking)), verdict)
    return table


def shelf_table(entries: Sequence[Entry]) -> Table:
    """Return a table of the policies on the shelf."""
    first, numbers = Column("policy", no_wrap=True), map(_right, ("return", "fp32", "error"))
    table = _plain(first, "run", *numbers, "verdict", _right("bytes"))
    for entry in entries:
        outcome = Outcome()
        with suppress(QuarlError):  # A damaged evaluation hides no other policy.
            outcome = entry.outcome()
        returns = (outcome.mean_return, outcome.reference_mean)
        table.add_row(
            entry.name,
            entry.artifact.parent.name,
            *("" if value is None else f"{value:,.1f}" for value in returns),
            "" if outcome.error_percent is None else f"{outcome.error_percent:z.2f} %",
            outcome.verdict or "",
            f"{entry.sidecar.size_bytes:,}" if entry.sidecar.native else "simulated",
        )
    return table


def doctor_table(findings: Sequence[Finding]) -> Table:
    """Return the table of `doctor`."""
    table = Table("", "package", "found", "what to do")
    for finding in findings:
        mark = "[red]no" if finding.remedy else "[green]ok"
        table.add_row(mark, finding.package, escape(finding.observation), escape(finding.remedy))
    return table


def _row(
    sidecar: Sidecar, evaluation: Evaluation, comparison: Comparison | None, digits: int
) -> dict[str, str]:
    latency = (evaluation.latency_us or {}).get("median")
    returns = comparison.returns if comparison else compare.mean_return(evaluation)
    error, difference, verdict = "", "", "no fp32 to compare with"
    if comparison is not None and comparison.scheme == REFERENCE:
        verdict = "reference"
    elif comparison is not None:
        percent = comparison.reward_error_percent
        error = "undefined" if percent is None else f"{percent:+.2f} %"
        difference, verdict = _difference_text(comparison.difference, digits), comparison.verdict
    return {
        "scheme": sidecar.scheme,
        "bytes": f"{sidecar.size_bytes:,}" if sidecar.native else "simulated",
        "sample µs" if evaluation.protocol.actions == "sampled" else "act µs": (
            f"{latency:.1f}" if latency is not None and sidecar.native else ""
        ),
        "return": f"{returns.mean:.{digits}f}",
        "[95 %]": _limits_text(returns, digits),
        "error": error,
        "difference [95 %]": difference,
        "verdict": verdict,
    }


def notes(artifact: Path, args: Namespace) -> Iterator[str]:
    """Yield what else a reader of the table of a file should know."""
    policy = Entry.load(artifact)
    fp32, run = reference_path(artifact, policy.sidecar), policy.run.plain
    if policy.run.quantization is not None:
        yield (
            "note: a quantisation-aware training and its reference differ by chance as well; a "
            "report on several seeds tells more"
        )
    if _comparison(policy, args) is None:
        return
    evaluation = _evaluation(fp32, args)
    random = state.baseline(fp32, run, evaluation.seeds)
    if random is not None and compare.is_as_random(evaluation, random):
        yield (
            f"note: fp32 of {run.run_id} ({fmean(evaluation.returns):.4g}) is not shown to earn "
            f"more than a random policy ({fmean(random.returns):.4g}) and has little to lose; "
            "train it longer or, if others trained it, check its inputs and outputs"
        )


def check_text(artifact: Path) -> str:
    """Return how a calibrated file agrees with fp32 on its observations; else ""."""
    sidecar = Entry.load(artifact).sidecar
    check = sidecar.check
    # An export compares each file with the network that it was made of.
    if not Scheme.parse(sidecar.scheme).calibrated or check.get("tolerance") is not None:
        return ""
    if (agreement := check.get("action_agreement")) is not None:
        return f"  (fp32's action in {agreement:.1%} of {check['observations']:,} observations)"
    difference, head = check["max_abs_difference"], check["max_abs_head"]
    return f"  (differs from fp32 by {difference:.2g} at most, of up to {head:.2g})"


def require_gated(schemes: Iterable[str], args: Namespace) -> None:
    """Refuse a gate on fp32 alone, which it would compare with itself."""
    if args.gate is not None and set(schemes) == {REFERENCE}:
        raise UsageError(
            f"--gate compares other schemes with {REFERENCE}; name another scheme, or leave out "
            f"--gate. Received: {REFERENCE} alone"
        )


def require_gate(artifacts: Sequence[Path], args: Namespace) -> None:
    """Raise a GateError for flatbuffers that lose more of the fp32 return than the gate allows."""
    if args.gate is None:
        return
    failures = []
    for path in artifacts:
        policy = Entry.load(path)
        if (comparison := _comparison(policy, args)) is None:
            raise _without_reference(policy)
        if comparison.episodes < args.episodes:
            raise GateError(
                "fp32 was evaluated on fewer episodes than the gate is to judge; give --episodes "
                f"{comparison.episodes}, or evaluate with fp32.tflite beside the file. "
                f"Received: {path}, --episodes {args.episodes}"
            )
        error = comparison.reward_error_percent
        if error is None:
            error = _lost(0.0, comparison.difference.mean)
        flaw = "undefined, fp32 earns 0"
        if error is not None and args.confident and comparison.scheme != REFERENCE:
            # The worse end of the interval counts.
            difference, fp32 = comparison.difference, comparison.reference_mean
            low = difference.mean if difference.alike >= compare.MIN_EPISODES else difference.low
            error = _lost(fp32, low) if math.isfinite(low) else None
            if fp32 != 0:
                flaw = "no interval, which takes more episodes that differ (--episodes, --sticky)"
        if error is None or error > args.gate:
            failures.append(f"{path.stem} {flaw if error is None else f'{error:.2f} %'}")
    if failures:
        raise GateError(
            f"Some schemes are not within the gate of {args.gate:g} % reward error. "
            f"Received: {', '.join(failures)}"
        )


def _lost(fp32: float, difference: float) -> float | None:
    """Return the reward error of a difference; where fp32 earns 0, 0 unless something is lost."""
    return 0.0 if fp32 == 0 <= difference else compare.reward_error(fp32, fp32 + difference)


def _without_reference(policy: Entry) -> GateError:
    run, reference = policy.run.plain, reference_path(policy.artifact, policy.sidecar)
    remedy = f"copy {REFERENCE}.tflite and its .json beside it"
    if not run.adopted:
        command = f"quarl export {run.run_id} --schemes {REFERENCE}"
        folder = reference.absolute().parent
        if folder.parts[-4:-3] == ("tflite_models",):
            command = Workspace(folder.parents[3]).command(command)
        remedy += f" (`{command}`)"
    return GateError(
        "There is no fp32 result on the same seeds, by the same rules, to compare the file with; "
        f"{remedy} and evaluate again. Received: {policy.artifact}, fp32 is expected at {reference}"
    )


def _evaluation(artifact: Path, args: Namespace) -> Evaluation:
    return Evaluation.load(evaluation_path(artifact, args.chance)).first(args.episodes)


def _comparison(policy: Entry, args: Namespace) -> Comparison | None:
    return policy.comparison(args.margin, args.chance, args.episodes)


def _digits(mean: float) -> int:
    """Return the decimals that show a positive mean, and a hundredth of it: two from ten on."""
    return 2 if mean >= 10 or mean == 0 else min(3 - math.floor(math.log10(mean)), 9)


def _limits_text(interval: Interval, digits: int, sign: str = "") -> str:
    ends = f"[{interval.low:{sign}.{digits}f}, {interval.high:{sign}.{digits}f}]"
    return ends if interval.bounded else "all equal" if interval.alike else ""


def _difference_text(difference: Interval, digits: int) -> str:
    return f"{difference.mean:+.{digits}f} {_limits_text(difference, digits, sign='+')}"
