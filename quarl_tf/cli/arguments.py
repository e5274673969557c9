"""The parser of the command line: verbs, options and their help."""

import argparse
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from quarl_tf import __version__
from quarl_tf.foundation import kinds
from quarl_tf.foundation.errors import UsageError
from quarl_tf.foundation.kinds import Kind
from quarl_tf.presets import ALGORITHMS, PRECISIONS
from quarl_tf.spec import GREEDY, INT8_SCHEMES, REFERENCE, Chance
from quarl_tf.spec.run import DEFAULT_EPISODES, DEFAULT_MARGIN_PERCENT
from quarl_tf.store.workspace import Workspace

_Option = Callable[[argparse.ArgumentParser], object]


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See: {self.prog} -h")


def build() -> argparse.ArgumentParser:
    """Build the parser; `verb` is then the parsed verb, of a study with its action, or None."""
    parser = _Parser(
        prog="quarl",
        description="Shrink reinforcement-learning policies and prove what that costs.",
        epilog=f"example: quarl run {_TASK_EXAMPLE}",
    )
    parser.add_argument("--version", action="version", version=f"quarl_tf {__version__}")
    parser.set_defaults(verb=None, confident=False, modules=(), workspace=Workspace(Path()))
    groups: dict[str, Any] = {"": parser.add_subparsers(title="verbs", metavar="VERB")}
    for name, (help_, example, *options) in _VERBS.items():
        group, _, word = name.rpartition(" ")
        verb = groups[group].add_parser(
            word,
            help=help_,
            description=help_,
            epilog=f"example: quarl {name} {example}".rstrip(),
            # The example stays on one line, to be copied.
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.set_defaults(verb=name)
        if name in ("checkpoint", "study"):
            groups[name] = verb.add_subparsers(title="actions", required=True, metavar="ACTION")
        for add in options:
            add(verb)
    return parser


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"a shard is I/N, with I from 1 to N: {text!r}")
    return int(match[1]), int(match[2])


def _option(name: str, help_: str, **settings: Any) -> _Option:
    return lambda parser: parser.add_argument(name, help=help_, **settings)


def _number(number: Callable[[str], Any], kind: Kind) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = number(text)
        except ValueError:
            value = math.nan
        if not kind.fits(value):
            raise argparse.ArgumentTypeError(f"expected {kind.text}. Received: {text!r}")
        return value

    return read


def _int_or_float(text: str) -> float:
    """Read a number; 475.0 is 475, in a run's id too."""
    value = float(text)
    return int(value) if value.is_integer() else value


_COUNT = _number(int, kinds.COUNT)
_RETURN = _number(_int_or_float, Kind("a number", math.isfinite))
_PERCENT = _number(float, kinds.number("a percentage of 0 or more", lambda p: p >= 0))


def _list_option(name: str, help_: str, **settings: Any) -> _Option:
    return _option(name, f"{help_}; may be repeated", action="append", default=[], **settings)


def _chance(parser: argparse.ArgumentParser) -> None:
    add = partial(parser.add_mutually_exclusive_group().add_argument, dest="chance", default=GREEDY)
    probability = _number(float, kinds.PROBABILITY)
    about = "episodes by actions drawn from the policy's distribution (default: the best)"
    add("--sample", help=about, action="store_const", const=Chance("sampled"))
    about = "games that repeat the last action at a frame with this probability; usual is 0.25"
    add("--sticky", help=about, type=lambda p: Chance("sticky", probability(p)), metavar="P")
    about = "episodes in which an action is random with this probability"
    add("--epsilon", help=about, type=lambda p: Chance("epsilon", probability(p)), metavar="P")


def _task(parser: argparse.ArgumentParser) -> None:
    # Not as a group: a number behind an unknown option would be blamed on --env.
    parser.add_argument("task", nargs="?", metavar="ENV", help="Gymnasium id")
    parser.add_argument("--env", metavar="ID", help="the same, as an option")


_TASK_EXAMPLE = "--root mine --algo dqn --env CartPole-v1 --seed 0"
_ROOT = _option(
    "--root",
    "folder of runs/, tflite_models/ and reports/ (default: the current one)",
    dest="workspace",
    type=lambda text: Workspace(Path(text)),
    metavar="DIR",
    default=Workspace(Path()),
)
_IMPORT_HELP = "import a module that registers environments of your own"
_IMPORT = _list_option("--import", _IMPORT_HELP, metavar="MODULE", dest="modules")
_RUN_ID = _option("run", "run id, for example dqn-CartPole-v1-s0", metavar="RUN")
_FILE_HELP = "a .tflite file, or the name of a policy on the shelf: ENVIRONMENT/ALGORITHM/SCHEME"
_ARTIFACT = _option("artifact", _FILE_HELP, metavar="ARTIFACT")
_ARTIFACTS = _option("artifacts", _FILE_HELP, metavar="ARTIFACT", nargs="+")
_SCHEMES = _option(
    "--schemes",
    "schemes, separated by commas (default: fp32, fp16, dynamic_int8, int8 and ptq_w8 to ptq_w2, "
    "or what a quantisation-aware training is for; of what was trained elsewhere, those that can "
    "be made)",
    metavar="LIST",
)
_MARGIN_HELP = "acceptable loss, in %% of fp32's return (default: %(default)s)"
_IN_PERCENT: dict[str, Any] = {"type": _PERCENT, "metavar": "PERCENT"}
_MARGIN = _option("--margin", _MARGIN_HELP, default=DEFAULT_MARGIN_PERCENT, **_IN_PERCENT)
_DRY_RUN = _option("--dry-run", "print what would run", action="store_true")
_PRECISION_HELP = "of hidden layers in training (-p precision=…); weights stay float32"
_ORIGIN_HELP = "start with a finished training's network, or resume a saved training (FILE.npz)"
_PRESETS_HELP = "your own in YAML, by algorithm and environment; used before ours"
_Q_HELP = (
    "a detail of --bits: LAYER.bits (as head.bits=8), edge_bits, rule, ranges, gradient, "
    "per_channel, learned_steps"
)
_RUN = (
    _task,
    _option("--algo", f"{', '.join(ALGORITHMS)} (default: the most robust with a preset)"),
    _IMPORT,
    _option("--seed", "training seed (default: 0)", type=int, default=0),
    _list_option("-p", "override a value of the preset", metavar="KEY=VALUE", dest="overrides"),
    _option("--until", "stop at a greedy return (-p until=…)", type=_RETURN, metavar="RETURN"),
    _option("--precision", _PRECISION_HELP, choices=PRECISIONS),
    _option("--from", _ORIGIN_HELP, dest="origin", metavar="RUN"),
    _option("--bits", "train quantisation-aware at N bits, 2 to 8", type=int, metavar="N"),
    _option("--quant-delay", "float steps at first (default: half)", type=int, metavar="STEPS"),
    _list_option("-q", _Q_HELP, metavar="KEY=VALUE", dest="quantization"),
    _option("--presets", _PRESETS_HELP, type=Path, metavar="FILE"),
)
_SHOW = (
    *(_ROOT, _IMPORT),
    _option("policies", "run ids, files or names on the shelf", metavar="POLICY", nargs="+"),
    _option("--schemes", "schemes of run ids (default: %(default)s)", default="fp32,int8"),
    _option("--seed", "seed of the episode (default: %(default)s)", type=int, default=0),
    _option("--max-steps", "steps at most (default: %(default)s)", type=int, default=1000),
)
_SIDE_BY_SIDE = "policies side by side on one episode"
_SHOW_EXAMPLE = "ppo-LunarLander-v3-s5 --schemes fp32,int8"
_EVALUATION = (
    _option("--episodes", "episodes (default: %(default)s)", type=_COUNT, default=DEFAULT_EPISODES),
    *(_chance, _MARGIN),
    _option("--gate", "exit with 3 if a scheme loses more", **_IN_PERCENT),
    _option("--confident", "apply the gate to the interval's worse end", action="store_true"),
)
_TARGET_HELP = "c: C99 of --schemes (default: int8, qat_int8); RUN may be such a file, or its name"
_NO_FLOAT_HELP = "C in integers alone: observations, heads and actions in Q16.16 (65536 is 1)"
_ADOPTED_HELP = "one observation in, one head out; FILE.json may describe it"
_PTQ_NAMES = "int8-LAYER=32, ptq_wN, ptq_opt_wN, ptq_opt_wNaN, ptq_paper_wN"
_SAVE_EXAMPLE = "dqn-CartPole-v1-s0 dqn.npz --root mine"
_SAVE_HELP = "what to write, .npz, 20 MB at most: no replay"
_OUT_HELP = "the .gif to write, below 2 MB (default: %(default)s)"
_COMMANDS_HELP = "print a command for each unfinished run, those that wait for others last"
_JOBS_HELP = "processes for long evaluations (default: one per core)"
_ENGINE = (
    _option("--engine", "where runs are executed", choices=("local", "ray"), default="local"),
    _option("--jobs", "local: processes (default: one per core)", type=_COUNT, metavar="N"),
    _option("--address", "ray: address of a cluster (default: start one here)"),
    _option("--cores", "ray: cores of each run (default: 1)", type=_COUNT, metavar="N"),
    _option("--gather", "ray: nodes share no folder", action="store_true"),
    _option("--shard", "be worker I of N on one file system", type=_shard, metavar="I/N"),
)
_OBSERVATIONS_HELP = "calibrate on these as well as on rollouts: an array [n, ...] in .npy"
_BOARD_HELP = "check that it fits this board, else exit with 3 (esp32, nano33ble, pico and others)"
_STUDY_EXAMPLE = "studies/qat.yaml"
_STUDY = (_option("study", "the study's file, in YAML", type=Path, metavar="STUDY"), _ROOT)

#: Help, example and options of every verb; its actions follow a verb that has some.
_VERBS: dict[str, tuple[Any, ...]] = {
    "run": (
        "train, export, evaluate and report",
        _TASK_EXAMPLE,
        *(_ROOT, *_RUN, _SCHEMES, *_EVALUATION),
        _option("--no-report", "leave the report out", action="store_true"),
        _DRY_RUN,
    ),
    "train": ("train a policy, or resume its training", _TASK_EXAMPLE, _ROOT, *_RUN, _DRY_RUN),
    "export": (
        "export a trained policy to .tflite",
        "--root mine dqn-CartPole-v1-s0 --schemes fp32,int8",
        *(_ROOT, _IMPORT, _RUN_ID, _SCHEMES),
        _option("--target", _TARGET_HELP, choices=("tflite", "c"), default="tflite"),
        _option("--no-float", _NO_FLOAT_HELP, action="store_true"),
    ),
    "checkpoint": ("save a training in progress, to resume it elsewhere", f"save {_SAVE_EXAMPLE}"),
    "checkpoint save": (
        "save the newest checkpoint; `quarl train … --from FILE` resumes it",
        _SAVE_EXAMPLE,
        *(_RUN_ID, _option("file", _SAVE_HELP, type=Path, metavar="FILE"), _ROOT),
    ),
    "adopt": (
        "import a float policy trained elsewhere: .tflite, .keras, .h5, or a SavedModel",
        "policy.tflite --env CartPole-v1 --head logits --name mine --schemes fp32,int8",
        *(_ROOT, _IMPORT),
        _option("file", _ADOPTED_HELP, type=Path, metavar="FILE"),
        _option("--trust", "run a SavedModel, which is a program", action="store_true"),
        _option("--env", "Gymnasium id (default: from FILE.json)", metavar="ID"),
        _option("--head", "(default: from FILE.json)", choices=("logits", "q_values", "action")),
        _option("--name", "name of the run (default: 12 digits of the flatbuffer's sha256)"),
        _option("--seed", "seed of the run (default: 0)", type=int, default=0),
        _option("--schemes", "comma-separated (default: fp32)", metavar="LIST", default=REFERENCE),
        *_EVALUATION,
    ),
    "quantize": (
        "quantise an fp32 or fp16 .tflite file, without its training",
        "mine/tflite_models/CartPole-v1/ppo/s0/fp32.tflite --scheme ptq_w4",
        *(_ARTIFACT, _IMPORT),
        _option("--scheme", f"fp16, {', '.join(INT8_SCHEMES)}, or {_PTQ_NAMES}", required=True),
        _option("--observations", _OBSERVATIONS_HELP, type=Path, metavar="FILE"),
    ),
    "blame": (
        "show how much int8 hurts each layer",
        "ppo-CartPole-v1-s0 --root mine",
        _option("policy", "a run id, a file of fp32 or fp16, or its name", metavar="POLICY"),
        *(_ROOT, _IMPORT),
        _option("--episodes", "of each of the worst three (default: 20)", type=_COUNT, default=20),
    ),
    "evaluate": (
        "replay .tflite files, compare with fp32",
        "CartPole-v1/dqn/int8 --episodes 100 --gate 2",
        *(_ARTIFACTS, _IMPORT, *_EVALUATION),
        _option("--jobs", _JOBS_HELP, type=_COUNT, metavar="N"),
    ),
    "bench": (
        "time .tflite files: latency, loading, memory",
        "CartPole-v1/dqn/int8",
        _ARTIFACTS,
        _option("--calls", "calls (default: %(default)s)", type=_COUNT, default=2000),
        _option("--json", "write the numbers to a file, too", type=Path, metavar="FILE"),
    ),
    "record": (
        f"film {_SIDE_BY_SIDE}",
        _SHOW_EXAMPLE,
        *_SHOW,
        _option("--out", _OUT_HELP, type=Path, metavar="FILE", default=Path("episode.gif")),
    ),
    "watch": (f"show {_SIDE_BY_SIDE}, in a window", _SHOW_EXAMPLE, *_SHOW),
    "report": (
        "write the report of one or more runs",
        "dqn-CartPole-v1-s0 dqn-CartPole-v1-s1 --name cartpole",
        _ROOT,
        _option("runs", "run ids", metavar="RUN", nargs="+"),
        _option("--name", "name of the report's folder (default: after the runs)"),
        *(_chance, _MARGIN, _IMPORT),
    ),
    "study": (
        "plan, run and report the experiments that a file names",
        f"run {_STUDY_EXAMPLE} --jobs 4",
    ),
    "study plan": (
        "list all experiments and their states",
        _STUDY_EXAMPLE,
        *_STUDY,
        _option("--commands", _COMMANDS_HELP, action="store_true"),
    ),
    "study run": ("run missing and failed experiments", _STUDY_EXAMPLE, *_STUDY, *_ENGINE),
    "study status": ("count the experiments by state, show failures", _STUDY_EXAMPLE, *_STUDY),
    "study report": (
        "write tables, figures, and the missing experiments",
        *(_STUDY_EXAMPLE, *_STUDY, _MARGIN),
    ),
    "inspect": (
        "show the content of a .tflite file",
        "CartPole-v1/dqn/int8",
        *(_ARTIFACT, _option("--board", _BOARD_HELP, metavar="NAME")),
    ),
    "list": ("list the policies on the shelf, presets, schemes and runs", "", _ROOT),
    "doctor": ("check versions and known clashes", ""),
}
