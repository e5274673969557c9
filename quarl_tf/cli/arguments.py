"""What can be written on the command line: verbs, options and their help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from quarl_tf import __version__
from quarl_tf.evaluation.compare import DEFAULT_MARGIN_PERCENT
from quarl_tf.foundation import device
from quarl_tf.foundation.errors import UsageError
from quarl_tf.presets import ALGORITHMS
from quarl_tf.spec import CALIBRATED, DEFAULT_EPISODES


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See: {self.prog} -h")


def build() -> argparse.ArgumentParser:
    """Build the parser; what it parses tells the `verb`, of a study with its action."""
    parser = _Parser(
        prog="quarl",
        description="Shrink reinforcement-learning policies and prove what that costs.",
        epilog=f"example: quarl {_EXAMPLE_RUN}",
    )
    parser.add_argument("--version", action="version", version=f"quarl_tf {__version__}")
    parser.set_defaults(verb=None)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")

    verb = partial(_add_verb, verbs)

    run = verb("run", "train, export, evaluate and report", _EXAMPLE_RUN)
    _add_root(run)
    _add_run(run)
    _add_schemes(run)
    _add_evaluation(run)
    run.add_argument("--no-report", action="store_true", help="leave the report out")
    _add_dry_run(run)

    train = verb("train", "train a policy, or go on training it", f"train {_EXAMPLE_TRAIN}")
    _add_root(train)
    _add_run(train)
    _add_dry_run(train)

    export = verb("export", "export a trained policy to .tflite", _EXAMPLE_EXPORT)
    _add_root(export)
    _add_import(export)
    export.add_argument("run", metavar="RUN", help="run id, for example dqn-CartPole-v1-s0")
    _add_schemes(export)
    _add_dry_run(export)

    quantize = verb(
        "quantize", "quantise an fp32 .tflite file, without its training", _EXAMPLE_QUANTIZE
    )
    quantize.add_argument("artifact", metavar="ARTIFACT", type=Path)
    _add_import(quantize)
    quantize.add_argument(
        "--scheme",
        required=True,
        help=f"{', '.join(CALIBRATED)}, or ptq_wN and ptq_paper_wN for N = 2 ... 32",
    )
    quantize.add_argument(
        "-o", dest="output", type=Path, metavar="FILE", help="(default: SCHEME.tflite beside it)"
    )

    _add_blame(verb)

    evaluate = verb("evaluate", "replay .tflite files, compare with fp32", _EXAMPLE_EVAL)
    evaluate.add_argument(
        "artifacts",
        metavar="ARTIFACT",
        nargs="+",
        type=Path,
        help="a .tflite file, or the name of a policy on the shelf: ENVIRONMENT/ALGORITHM/SCHEME",
    )
    _add_shelf(evaluate)
    _add_import(evaluate)
    _add_evaluation(evaluate)
    _add_dry_run(evaluate)

    report = verb("report", "write the report of one or more runs", _EXAMPLE_REPORT)
    _add_root(report)
    report.add_argument("runs", metavar="RUN", nargs="+", help="run ids")
    report.add_argument("--name", help="name of the report's folder (default: after the runs)")
    _add_sample(report, "report on the evaluations by sampled actions instead of the greedy ones")
    _add_margin(report)
    _add_dry_run(report)

    _add_study(verbs)

    inspect = verb("inspect", "show what a .tflite file really holds", _EXAMPLE_INSPECT)
    inspect.add_argument("artifact", metavar="ARTIFACT", type=Path)
    listed = verb("list", "list the policies on the shelf, presets, schemes and runs", "list")
    _add_root(listed)
    _add_shelf(listed)
    verb("doctor", "check versions and known clashes", "doctor")
    return parser


_EXAMPLE_TRAIN = "--root mine --algo dqn --env CartPole-v1 --seed 0"
_EXAMPLE_RUN = f"run {_EXAMPLE_TRAIN}"
_EXAMPLE_EXPORT = "export --root mine dqn-CartPole-v1-s0 --schemes fp32,int8"
_EXAMPLE_QUANTIZE = "quantize tflite_models/CartPole-v1/dqn/s0/fp32.tflite --scheme ptq_w4"
_EXAMPLE_EVAL = "evaluate CartPole-v1/dqn/int8 --episodes 100 --gate 2"
_EXAMPLE_REPORT = "report dqn-CartPole-v1-s0 dqn-CartPole-v1-s1 --name cartpole"
_EXAMPLE_STUDY = "study run studies/qat.yaml --jobs 4"
_EXAMPLE_INSPECT = "inspect tflite_models/CartPole-v1/dqn/s0/int8.tflite"


def _add_verb(verbs: Any, name: str, help_: str, example: str) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=help_,
        description=help_,
        epilog=f"example: quarl {example}",
        # The example stays on one line, to be copied.
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    added.set_defaults(verb=name)
    return added


def _add_blame(verb: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    blame = verb("blame", "tell which layer int8 hurts", "blame LunarLander-v3/dqn/fp32")
    blame.add_argument(
        "artifact",
        metavar="ARTIFACT",
        type=Path,
        help="an fp32 .tflite file, or its name on the shelf",
    )
    _add_shelf(blame)
    _add_import(blame)
    blame.add_argument(
        "--episodes",
        type=int,
        default=20,
        help="episodes for each of the worst three (default: %(default)s)",
    )


def _add_study(verbs: Any) -> None:
    about = "plan, run and report the experiments that a file names"
    study = _add_verb(verbs, "study", about, _EXAMPLE_STUDY)
    actions = study.add_subparsers(title="actions", required=True, metavar="ACTION")

    def action(name: str, help_: str) -> argparse.ArgumentParser:
        added = _add_verb(actions, name, help_, f"study {name} studies/qat.yaml")
        added.set_defaults(verb=f"study {name}")
        added.add_argument("study", metavar="STUDY", type=Path, help="the study's file, in YAML")
        _add_root(added)
        return added

    action("plan", "list every experiment, and how far it is")
    run = action("run", "do what is missing, also what failed before")
    run.add_argument("--engine", choices=("local", "ray"), default="local", help="what runs them")
    run.add_argument("--jobs", type=int, metavar="N", help="local: processes (default: one a core)")
    run.add_argument("--address", help="ray: of a cluster (default: of this machine alone)")
    run.add_argument("--cores", type=int, default=1, metavar="N", help="ray: cores of each run")
    _add_dry_run(run)
    action("status", "count the experiments by how far they are, show failures")
    report = action("report", "write tables and figures, and what is missing")
    _add_margin(report)
    _add_dry_run(report)


def _add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder of runs/, tflite_models/ and reports/ (default: the current one)",
    )


def _add_shelf(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shelf",
        type=Path,
        default=Path("tflite_models"),
        metavar="DIR",
        help="folder of trained policies (default: %(default)s, and those of the package)",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("task", nargs="?", metavar="ENV", help="Gymnasium id")
    task.add_argument("--env", metavar="ID", help="the same")
    parser.add_argument(
        "--algo",
        help=f"algorithm: {', '.join(ALGORITHMS)} (default: the most robust one with a preset)",
    )
    _add_import(parser)
    parser.add_argument("--seed", type=int, default=0, help="training seed (default: 0)")
    parser.add_argument(
        "-p",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a value of the preset; may be repeated",
    )
    parser.add_argument(
        "--bits", type=int, metavar="N", help="train quantisation-aware at N bits, 2 to 8"
    )
    parser.add_argument(
        "--quant-delay",
        type=int,
        metavar="STEPS",
        help="environment steps before that starts (default: half of the training)",
    )
    parser.add_argument(
        "-q",
        dest="quantization",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="how: LAYER.bits (as head.bits=8), edge_bits, rule, ranges, gradient, per_channel, "
        "learned_steps; may be repeated",
    )
    parser.add_argument(
        "--presets",
        type=Path,
        metavar="FILE",
        help="presets of your own in YAML, by algorithm, then environment; they go before ours",
    )
    parser.add_argument(
        "--device",
        choices=device.DEVICES,
        default="cpu",
        help="what to train on (default: %(default)s; gpu is experimental)",
    )


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import a module that registers environments of your own; may be repeated",
    )


def _add_schemes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--schemes",
        metavar="LIST",
        help="schemes, separated by commas (default: all native ones and ptq_w8 to ptq_w2, or what "
        "a quantisation-aware training is for)",
    )


def _add_evaluation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--episodes", type=int, default=DEFAULT_EPISODES, help="episodes (default: %(default)s)"
    )
    _add_sample(parser, "draw actions from the policy's distribution (default: take the best)")
    _add_margin(parser)
    parser.add_argument(
        "--gate",
        type=float,
        metavar="PERCENT",
        help="exit with 3 if a scheme's reward error is larger",
    )


def _add_sample(parser: argparse.ArgumentParser, help_: str) -> None:
    parser.add_argument("--sample", action="store_true", help=help_)


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
