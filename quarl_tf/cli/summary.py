"""Tables for the terminal, and the quality gate."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import JustifyMethod
from rich.markup import escape
from rich.table import Table

from quarl_tf.evaluation import compare
from quarl_tf.evaluation.compare import Comparison, Interval
from quarl_tf.foundation.errors import GateError
from quarl_tf.spec import REFERENCE, Run
from quarl_tf.store.records import Evaluation, Sidecar
from quarl_tf.store.state import export_command
from quarl_tf.store.workspace import evaluation_path, sidecar_path, workspace_of

if TYPE_CHECKING:
    from quarl_tf.evaluation.blame import Blame


def table(artifacts: Sequence[Path], args: Namespace, *, narrow: bool) -> Table:
    """Return a table of the flatbuffers in one folder, a narrow one without intervals."""
    run_id = Sidecar.load(sidecar_path(artifacts[0])).run_id
    compared = [_comparison(path, args) for path in artifacts]
    counts = {args.episodes if one is None else one.episodes for one in compared}
    same = f"{counts.pop()} episodes, the same for every scheme" if len(counts) == 1 else ""
    title = f"{escape(run_id)}: {', '.join(filter(None, (same, args.chance.words)))}"
    made = Table(title=title, title_justify="left")
    rows = [_row(path, one, args) for path, one in zip(artifacts, compared, strict=True)]
    names = [name for name in rows[0] if not (narrow and "[95 %]" in name)]
    for name in names:
        justify: JustifyMethod = "left" if name in ("scheme", "verdict") else "right"
        made.add_column(name, justify=justify, no_wrap=True)
    for row in rows:
        made.add_row(*(row[name] for name in names))
    return made


def bench_table(found: Mapping[str, Any]) -> Table:
    """Return the table of `bench`."""
    ways = dict.fromkeys(way for one in found["artifacts"] for way in one["latency_us"])
    made = Table(title="µs of one call: median, 95 %, 99 %", title_justify="left")
    made.add_column("file")
    timed = ["as C" if way == "C" else f"threads: {way}" for way in ways]
    for name in (*timed, "load ms", "bytes", "arena", "process"):
        made.add_column(name, justify="right")
    for one in found["artifacts"]:
        us = [one["latency_us"].get(way, {}) for way in ways]
        latencies = [" ".join(f"{v:.1f}" for v in of_way.values()) for of_way in us]
        sizes = [f"{one['bytes'][what]:,}" for what in ("file", "arena", "process")]
        name = f"{escape(one['run_id'])} {one['scheme']}"
        made.add_row(name, *latencies, f"{one['load_ms']:.1f}", *sizes)
    return made


def blame_table(layers: Sequence[Blame]) -> Table:
    """Return the table of `blame`."""
    columns = ("layer", "range", "codes", "at the ends", "signal to noise", "share of the error")
    made = Table(*columns, "other actions without it", "return gained without it [95 %]")
    for one in layers:
        made.add_row(
            one.layer,
            f"{one.low:.3g} … {one.high:.3g}",
            str(one.codes),
            f"{one.saturated:.1%}",
            f"{one.noise:.1f} dB",
            f"{one.share:.1%}",
            f"{one.disagreement:.1%}",
            "" if one.gain is None else _difference_text(one.gain),
        )
    return made


def blame_row(layer: Blame) -> dict[str, Any]:
    """Return the row of a layer in the file of `blame`."""
    gain = layer.gain
    low, mean, high = (gain.low, gain.mean, gain.high) if gain else (None, None, None)
    return asdict(layer) | {"gain": mean, "gain_low": low, "gain_high": high}


def _row(artifact: Path, comparison: Comparison | None, args: Namespace) -> dict[str, str]:
    """Return the cells of a flatbuffer by column."""
    sidecar = Sidecar.load(sidecar_path(artifact))
    evaluation = Evaluation.load(evaluation_path(artifact, args.chance)).first(args.episodes)
    latency = (evaluation.latency_us or {}).get("median")
    returns = comparison.returns if comparison else compare.mean_return(evaluation)
    error, difference, verdict = "", "", "no fp32 to compare with"
    if comparison is not None and comparison.scheme == REFERENCE:
        verdict = "reference"
    elif comparison is not None:
        percent = comparison.reward_error
        error = "undefined" if percent is None else f"{percent:+.2f} %"
        difference, verdict = _difference_text(comparison.difference), comparison.verdict
    return {
        "scheme": sidecar.scheme,
        "bytes": f"{sidecar.size_bytes:,}" if sidecar.native else "simulated",
        "sample µs" if args.chance.kind == "sampled" else "act µs": (
            f"{latency:.1f}" if latency is not None and sidecar.native else ""
        ),
        "return": f"{returns.mean:.2f}",
        "[95 %]": _limits_text(returns),
        "error": error,
        "difference [95 %]": difference,
        "verdict": verdict,
    }


def hold(artifacts: Sequence[Path], args: Namespace) -> None:
    """Raise a GateError for flatbuffers that lose more of the fp32 return than the gate allows."""
    if args.gate is None or args.dry_run:
        return
    failing = []
    for path in artifacts:
        comparison = _comparison(path, args)
        if comparison is None:
            run = Run.from_dict(Sidecar.load(sidecar_path(path)).run).plain
            command = export_command(workspace_of(path), run.run_id, f" --schemes {REFERENCE}")
            raise GateError(
                "There is no fp32 result on the same seeds, by the same rules, to compare the "
                f"file with; export fp32 too ({command}) and evaluate again. Received: {path}"
            )
        error = comparison.reward_error
        if error is not None and args.confident and comparison.scheme != REFERENCE:
            # The worse end of the interval counts.
            difference, reference = comparison.difference, comparison.reference_mean
            worst = difference.mean if difference.alike else difference.low
            error = compare.reward_error(reference, reference + worst)
        if error is None or error > args.gate:
            text = "undefined, fp32 earns 0" if error is None else f"{error:.2f} %"
            failing.append(f"{path.stem} {text}")
    if failing:
        raise GateError(
            f"Some schemes lose more than the gate of {args.gate:g} % reward error allows. "
            f"Received: {', '.join(failing)}"
        )


def _comparison(artifact: Path, args: Namespace) -> Comparison | None:
    sidecar, how = Sidecar.load(sidecar_path(artifact)), (args.margin, args.chance, args.episodes)
    return compare.compare_saved(artifact, sidecar, *how)


def _limits_text(interval: Interval, sign: str = "") -> str:
    ends = f"[{interval.low:{sign}.2f}, {interval.high:{sign}.2f}]"
    return ends if interval.bounded else "all equal" if interval.alike else ""


def _difference_text(difference: Interval) -> str:
    return f"{difference.mean:+.2f} {_limits_text(difference, sign='+')}"
