"""The command `quarl`: parse, call one function per verb, print where the result is.

Exit codes: 0 done, 1 failed, 2 wrong use, 3 a quality gate did not hold, 130 interrupted.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import yaml
from rich.console import Console
from rich.table import Table

from quarl_tf import presets, records
from quarl_tf.display import progress_bar, spinner
from quarl_tf.errors import GateError, QuarlError, UsageError
from quarl_tf.records import Evaluation, Sidecar, TrainingRecord, Workspace
from quarl_tf.spec import ALGORITHMS, DEFAULT_SCHEMES, Run, Scheme
from quarl_tf.statistics import (
    DEFAULT_MARGIN_PERCENT,
    Comparison,
    Interval,
    compare,
    mean_interval,
)

#: Episodes of an evaluation, as in the papers.
DEFAULT_EPISODES = 100

#: Wide enough for the tables when nobody's terminal sets a width.
_console = Console(highlight=False, width=None if sys.stdout.isatty() else 130)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    try:
        given = sys.argv[1:] if arguments is None else list(arguments)
        parsed = _parser().parse_args(given)
        parsed.command = shlex.join(["quarl", *given])
        parsed.function(parsed)
    except QuarlError as error:
        print(f"quarl: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("quarl: interrupted; the same command goes on where it was.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output (head, less) has seen enough; Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See: {self.prog} -h")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="quarl",
        description="Shrink reinforcement-learning policies and prove what that costs.",
        epilog="example: quarl run --algo dqn --env CartPole-v1 --seed 0",
    )
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    def verb(name: str, function: Any, help_: str, example: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(
            name,
            help=help_,
            description=help_,
            epilog=f"example: quarl {example}",
            # The example stays on one line, to be copied.
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(function=function)
        return added

    run = verb("run", _run, "train, export, evaluate and report", _EXAMPLE_RUN)
    _add_root(run)
    _add_run(run)
    _add_schemes(run)
    _add_evaluation(run)
    _add_dry_run(run)

    train = verb("train", _train, "train a policy, or go on training it", f"train {_EXAMPLE_TRAIN}")
    _add_root(train)
    _add_run(train)
    _add_dry_run(train)

    export = verb("export", _export, "export a trained policy to .tflite", _EXAMPLE_EXPORT)
    _add_root(export)
    export.add_argument("run", metavar="RUN", help="run id, for example dqn-CartPole-v1-s0")
    _add_schemes(export)
    _add_dry_run(export)

    evaluate = verb("evaluate", _evaluate, "replay .tflite files, compare with fp32", _EXAMPLE_EVAL)
    evaluate.add_argument("artifacts", metavar="ARTIFACT", nargs="+", type=Path)
    _add_evaluation(evaluate)
    _add_dry_run(evaluate)

    report = verb("report", _report, "write the report of one or more runs", _EXAMPLE_REPORT)
    _add_root(report)
    report.add_argument("runs", metavar="RUN", nargs="+", help="run ids")
    report.add_argument("--name", help="name of the report's folder (default: after the runs)")
    _add_margin(report)
    _add_dry_run(report)

    inspect = verb("inspect", _inspect, "show what a .tflite file really holds", _EXAMPLE_INSPECT)
    inspect.add_argument("artifact", metavar="ARTIFACT", type=Path)
    _add_root(verb("list", _list, "list presets, schemes and runs", "list --root results"))
    verb("doctor", _doctor, "check versions and known clashes", "doctor")
    return parser


_EXAMPLE_TRAIN = "--algo dqn --env CartPole-v1 --seed 0"
_EXAMPLE_RUN = f"run {_EXAMPLE_TRAIN}"
_EXAMPLE_EXPORT = "export dqn-CartPole-v1-s0 --schemes fp32,int8"
_EXAMPLE_EVAL = "evaluate tflite_models/dqn-CartPole-v1-s0/int8.tflite --episodes 100 --gate 2"
_EXAMPLE_REPORT = "report dqn-CartPole-v1-s0 dqn-CartPole-v1-s1 --name cartpole"
_EXAMPLE_INSPECT = "inspect tflite_models/dqn-CartPole-v1-s0/int8.tflite"


def _add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder of runs/, tflite_models/ and reports/ (default: the current one)",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--algo", required=True, help=f"algorithm: {', '.join(ALGORITHMS)}")
    parser.add_argument("--env", required=True, metavar="ID", help="Gymnasium id")
    parser.add_argument("--seed", type=int, default=0, help="training seed (default: 0)")
    parser.add_argument(
        "-p",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a value of the preset; may be repeated",
    )


def _add_schemes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--schemes",
        default=",".join(DEFAULT_SCHEMES),
        metavar="LIST",
        help="schemes, separated by commas (default: all native ones and ptq_w8 to ptq_w2)",
    )


def _add_evaluation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--episodes", type=int, default=DEFAULT_EPISODES, help="episodes (default: %(default)s)"
    )
    _add_margin(parser)
    parser.add_argument(
        "--gate",
        type=float,
        metavar="PERCENT",
        help="exit with 3 if a scheme's reward error is larger",
    )


def _add_margin(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--margin",
        type=float,
        default=DEFAULT_MARGIN_PERCENT,
        metavar="PERCENT",
        help="loss that does not matter to you, in %% of fp32's return (default: %(default)s)",
    )


def _add_dry_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="print what would run")


def _run(args: argparse.Namespace) -> None:
    run, schemes = _requested_run(args), _schemes(args)
    workspace = Workspace(args.root)
    artifacts = [workspace.artifact(run.run_id, scheme.name) for scheme in schemes]
    if args.dry_run:
        _plan(
            f"train    {workspace.run_dir(run.run_id)}",
            *(f"export   {path}" for path in artifacts),
            *(f"evaluate {records.evaluation_path(path)}" for path in artifacts),
            f"report   {workspace.report_dir(run.run_id)}",
        )
        return
    _check_evaluation(args)
    _train_one(workspace, run)
    _export_all(workspace, run.run_id, schemes)
    _evaluate_all(artifacts, args)
    _write_report(workspace, [run.run_id], run.run_id, args)
    _gate(artifacts, args)


def _train(args: argparse.Namespace) -> None:
    run, workspace = _requested_run(args), Workspace(args.root)
    if args.dry_run:
        _plan(f"train    {workspace.run_dir(run.run_id)}")
        return
    _train_one(workspace, run)


def _export(args: argparse.Namespace) -> None:
    workspace, schemes = Workspace(args.root), _schemes(args)
    if args.dry_run:
        _plan(*(f"export   {workspace.artifact(args.run, scheme.name)}" for scheme in schemes))
        return
    _export_all(workspace, args.run, schemes)


def _evaluate(args: argparse.Namespace) -> None:
    if args.dry_run:
        _plan(*(f"evaluate {records.evaluation_path(path)}" for path in args.artifacts))
        return
    _check_evaluation(args)
    _evaluate_all(args.artifacts, args)
    _gate(args.artifacts, args)


def _report(args: argparse.Namespace) -> None:
    workspace = Workspace(args.root)
    for run_id in args.runs:
        workspace.artifact_dir(run_id)  # Refuses what is no run id.
    name = args.name or (args.runs[0] if len(args.runs) == 1 else None)
    if args.dry_run:
        _plan(f"report   {workspace.report_dir(name or '(after the runs)')}")
        return
    _check_percent("--margin", args.margin)
    _write_report(workspace, args.runs, name, args)


def _inspect(args: argparse.Namespace) -> None:
    from quarl_tf import flatbuffer

    audit = flatbuffer.audit(args.artifact)
    table = Table(title=str(args.artifact), show_header=False, title_justify="left")
    size = args.artifact.stat().st_size
    table.add_row("size", f"{size:,} bytes")
    for kind, tensors in (("input", audit.inputs), ("output", audit.outputs)):
        for tensor in tensors:
            text = f"{tensor.name} {list(tensor.shape)} {tensor.dtype}"
            if tensor.scale is not None:
                text += f", scale {tensor.scale:g}, zero point {tensor.zero_point}"
            table.add_row(kind, text)
    table.add_row("operators", "\n".join(audit.operators))
    table.add_row("tensors", ", ".join(f"{n} {t}" for t, n in audit.tensor_dtypes.items()))
    table.add_row("weights", ", ".join(f"{n:,} {t}" for t, n in audit.weight_dtypes.items()))
    for name, value in _provenance(args.artifact):
        table.add_row(name, value)
    _console.print(table)


def _provenance(artifact: Path) -> list[tuple[str, str]]:
    path = records.sidecar_path(artifact)
    if not path.exists():
        return [("sidecar", "none: this file cannot be evaluated")]
    sidecar = Sidecar.load(path)
    whole = sidecar.sha256 == records.sha256(artifact)
    return [
        ("run", f"{sidecar.run_id} (commit {sidecar.commit})"),
        ("scheme", f"{sidecar.scheme}, {'native' if sidecar.native else 'simulated'}"),
        ("sha256", sidecar.sha256 if whole else "does not match the sidecar: changed or damaged"),
        ("check", ", ".join(f"{k} {v}" for k, v in sidecar.check.items())),
    ]


def _list(args: argparse.Namespace) -> None:
    table = Table("algorithm", "environment with a preset", title_justify="left")
    for algo, env_id in presets.available():
        table.add_row(algo, env_id)
    _console.print(table)
    more = "ptq_wN and ptq_paper_wN for N = 2 ... 32"
    _console.print(f"schemes: {', '.join(DEFAULT_SCHEMES)}; {more}")
    workspace = Workspace(args.root)
    found = Table("run", "trained", "exported", "evaluated", "report")
    for run_id in _run_ids(workspace):
        folder = workspace.artifact_dir(run_id)
        found.add_row(
            run_id,
            "yes" if (workspace.run_dir(run_id) / "training.json").exists() else "no",
            str(len(list(folder.glob("*.tflite")))),
            str(len([p for p in folder.glob("*.eval.json") if p.name != "random.eval.json"])),
            "yes" if (workspace.report_dir(run_id) / "index.html").exists() else "no",
        )
    _console.print(found if found.rows else f"no runs in {workspace.root.resolve()}")


def _run_ids(workspace: Workspace) -> list[str]:
    parents = (workspace.run_dir("x").parent, workspace.artifact_dir("x").parent)
    return sorted({p.name for parent in parents for p in parent.glob("*") if p.is_dir()})


def _doctor(args: argparse.Namespace) -> None:
    del args
    with spinner("doctor"):
        from quarl_tf.doctor import examine

        findings = examine()
    table = Table("", "check", "found", "what to do")
    for finding in findings:
        mark, remedy = ("[green]ok", "") if finding.good else ("[red]no", finding.remedy)
        table.add_row(mark, finding.name, finding.found, remedy)
    _console.print(table)
    bad = [finding.name for finding in findings if not finding.good]
    if bad:
        raise QuarlError(f"{len(bad)} checks failed; see the table. Received: {', '.join(bad)}")


def _requested_run(args: argparse.Namespace) -> Run:
    """Build the run asked for, and see that its environment and preset exist."""
    from quarl_tf import environments

    env_id = environments.canonical_id(args.env)
    if env_id != args.env:
        print(f"quarl: {args.env} is {env_id} today; going on with that.", file=sys.stderr)
    overrides = dict(_override(text) for text in args.overrides)
    run = Run(args.algo, env_id, args.seed, overrides)
    environments.env_spec(run.env_id)
    presets.load(run.algo, run.env_id, run.overrides)
    return run


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise UsageError(f"An override is KEY=VALUE. Received: -p {text!r}")
    try:
        # YAML takes 1e-3 for a word: it wants a point in it.
        return key, float(value) if re.fullmatch(r"\d+[eE]-?\d+", value) else yaml.safe_load(value)
    except yaml.YAMLError:
        raise UsageError(f"The value of an override is not readable. Received: {text!r}") from None


def _schemes(args: argparse.Namespace) -> list[Scheme]:
    names = list(dict.fromkeys(name for name in args.schemes.split(",") if name))
    if not names:
        raise UsageError(f"Name at least one scheme. Received: --schemes {args.schemes!r}")
    return [Scheme.parse(name) for name in names]


def _check_evaluation(args: argparse.Namespace) -> None:
    if args.episodes < 1:
        raise UsageError(f"Evaluate at least one episode. Received: episodes={args.episodes}")
    _check_percent("--margin", args.margin)
    if args.gate is not None:
        _check_percent("--gate", args.gate)


def _check_percent(option: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise UsageError(f"{option} must be a percentage of 0 or more. Received: {option} {value}")


def _train_one(workspace: Workspace, run: Run) -> None:
    preset = presets.load(run.algo, run.env_id, run.overrides)
    # Looked up here, so that what is finished costs no import of TensorFlow.
    record = TrainingRecord.finished(workspace.run_dir(run.run_id), asdict(preset))
    if record is None:
        from quarl_tf.training import train

        with progress_bar(f"train {run.run_id}") as update:
            record = train(workspace, run, update)
    _console.print(
        f"trained   {workspace.run_dir(run.run_id)}  (kept the network of step "
        f"{record.best_step:,}: greedy return {record.selection_return:.1f} on selection seeds)"
    )


def _export_all(workspace: Workspace, run_id: str, schemes: Sequence[Scheme]) -> None:
    if records.not_exported(workspace, run_id, [scheme.name for scheme in schemes]):
        from quarl_tf.export import export

        with progress_bar(f"export {run_id}") as update:
            export(workspace, run_id, schemes, update)
    else:
        records.copy_curve(workspace, run_id)
    _console.print(f"exported  {workspace.artifact_dir(run_id)}  ({len(schemes)} schemes)")


def _evaluate_all(artifacts: Sequence[Path], args: argparse.Namespace) -> None:
    from quarl_tf.evaluation import evaluate_and_save

    # What there is to compare with comes first.
    references = [p.with_name("fp32.tflite") for p in artifacts]
    present = [path for path in references if path.exists()]
    for path in dict.fromkeys([*present, *artifacts]):
        with progress_bar(f"evaluate {path.stem}") as update:
            evaluate_and_save(path, args.episodes, update)
    folders = dict.fromkeys(path.parent for path in artifacts)
    for folder in folders:
        _console.print(_results_table([p for p in artifacts if p.parent == folder], args))


def _write_report(
    workspace: Workspace, run_ids: Sequence[str], name: str | None, args: argparse.Namespace
) -> None:
    with spinner("report"):
        from quarl_tf.report import write_report

        page = write_report(
            workspace, run_ids, name=name, margin_percent=args.margin, command=args.command
        )
    _console.print(f"report    {page}")


def _results_table(artifacts: Sequence[Path], args: argparse.Namespace) -> Table:
    title = f"{artifacts[0].parent.name}: {args.episodes} episodes, the same for every scheme"
    table = Table(title=title, title_justify="left")
    numbers = ("bytes", "act µs", "return [95 %]", "error", "difference [95 %]")
    for column in ("scheme", *numbers, "verdict"):
        table.add_column(column, justify="right" if column in numbers else "left")
    for path in artifacts:
        sidecar = Sidecar.load(records.sidecar_path(path))
        evaluation = Evaluation.load(records.evaluation_path(path))
        latency = (evaluation.latency_us or {}).get("median")
        comparison = _compare_with_fp32(path, args.margin)
        returns = comparison.returns if comparison else mean_interval(evaluation.returns)
        table.add_row(
            sidecar.scheme,
            f"{sidecar.size_bytes:,}" if sidecar.native else "simulated",
            f"{latency:.1f}" if latency is not None and sidecar.native else "",
            _interval_text(returns),
            *_comparison_texts(comparison),
        )
    return table


def _comparison_texts(comparison: Comparison | None) -> tuple[str, str, str]:
    if comparison is None:
        return "", "", "no fp32 beside it to compare with"
    if comparison.scheme == "fp32":
        return "", "", "reference"
    error = comparison.reward_error
    return (
        "undefined" if error is None else f"{error:+.2f} %",
        _interval_text(comparison.difference, signed=True),
        comparison.verdict,
    )


def _interval_text(interval: Interval, *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    text = f"{interval.mean:{sign}.2f}"
    return (
        f"{text} [{interval.low:{sign}.2f}, {interval.high:{sign}.2f}]"
        if interval.bounded
        else text
    )


def _compare_with_fp32(path: Path, margin: float) -> Comparison | None:
    """Compare with the run's fp32, if that was evaluated on the same seeds."""
    reference_path = records.evaluation_path(path.with_name("fp32.tflite"))
    if not reference_path.exists():
        return None
    evaluation = Evaluation.load(records.evaluation_path(path))
    reference = Evaluation.load(reference_path)
    if reference.seeds != evaluation.seeds:
        return None
    return compare(reference, evaluation, None, margin)


def _gate(artifacts: Sequence[Path], args: argparse.Namespace) -> None:
    """Hold every evaluated scheme to the gate.

    Raises:
        GateError: A reward error is larger than allowed, or cannot be told.
    """
    if args.gate is None:
        return
    failing = []
    for path in artifacts:
        comparison = _compare_with_fp32(path, args.margin)
        if comparison is None:
            raise GateError(
                "There is no fp32 beside the file to compare with; export it too (quarl export "
                f"{path.parent.name} --schemes fp32). Received: {path}"
            )
        error = comparison.reward_error
        if error is None or error > args.gate:
            text = "undefined, fp32 earns 0" if error is None else f"{error:.2f} %"
            failing.append(f"{path.stem} {text}")
    if failing:
        raise GateError(
            f"Some schemes lose more than the gate of {args.gate:g} % reward error allows. "
            f"Received: {', '.join(failing)}"
        )


def _plan(*lines: str) -> None:
    for line in lines:
        print(line)


if __name__ == "__main__":
    sys.exit(main())
