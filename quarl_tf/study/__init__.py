"""A study: many experiments from one file, and what of them exists.

An experiment is one run in one scheme. Which ones a study has follows from its file, and how far
each is from the files of the workspace alone: nothing else is remembered, so a study that was
killed goes on where it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from quarl_tf import environments, presets, records
from quarl_tf.errors import QuarlError, UsageError, unknown
from quarl_tf.evaluation import is_evaluated
from quarl_tf.presets import Preset, tables
from quarl_tf.records import Sidecar, TrainingRecord, Workspace, sidecar_path
from quarl_tf.spec import PTQ_BITS, REFERENCE, Quantization, Run, Scheme, default_schemes

_Choice = TypeVar("_Choice")

_DEFAULT_SCHEMES = (REFERENCE, "int8")
_DEFAULT_EPISODES = 100
_DEFAULT_DELAYS = (0.5,)

#: What stands at the top of a file; those of a cell may stand in it, too, and go before these.
_OF_A_CELL = ("seeds", "schemes", "bits", "delays", "quantization", "overrides")
_AT_THE_TOP = (
    "name",
    "title",
    "cells",
    "episodes",
    "presets",
    "import",
    "memory",
    "x",
    *_OF_A_CELL,
)

#: What the report may draw returns in training against.
X_AXES = ("steps", "episodes")


@dataclass(frozen=True)
class Precision:
    """One column of a study: a scheme of plain trainings, or of those at some bits and delay.

    Attributes:
        label: Its name as in the papers' figure: Fp, 8* after training, 8, 7, … in training; with
            the delay where a cell has several. Weights alone after training are w8, w7, …
    """

    label: str
    scheme: Scheme
    quantization: Quantization | None = None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One algorithm on one environment, in every seed and precision.

    Attributes:
        given_env_id: Id of the environment as the file has it, which may be an old one.
        overrides: Values that take the place of the preset's.
        steps: Environment steps of a training.
        seeds: Seeds of the trainings.
        schemes: Names of what plain trainings are exported in, fp32 first.
        options: What the file says of how trainings are quantised, beside bits and delays.
        quantizations: Those of the quantisation-aware trainings.
        remark: What else the report should say of it.
        telling: What tells it from the study's other cells of the same algorithm and environment.
    """

    algo: str
    env_id: str
    given_env_id: str
    overrides: Mapping[str, Any]
    steps: int
    seeds: tuple[int, ...]
    schemes: tuple[str, ...]
    options: Mapping[str, Any]
    quantizations: tuple[Quantization, ...]
    remark: str = ""
    telling: str = ""

    @property
    def task(self) -> str:
        """Return what is trained where, which several cells may share."""
        return f"{self.algo} on {self.env_id}"

    @property
    def title(self) -> str:
        """Return what readers know it by."""
        return f"{self.task} ({self.telling})" if self.telling else self.task

    def run(self, seed: int, quantization: Quantization | None) -> Run:
        """Return the training of a seed."""
        return Run(self.algo, self.env_id, seed, self.overrides, quantization)

    def precisions(self) -> list[Precision]:
        """Return the columns, plain ones first."""
        marks = {REFERENCE: "Fp", "int8": "8*"}
        marks |= {f"ptq_w{bits}": f"w{bits}" for bits in PTQ_BITS}
        found = [Precision(marks.get(name, name), Scheme.parse(name)) for name in self.schemes]
        several = len({one.delay for one in self.quantizations}) > 1
        for one in self.quantizations:
            label = f"{one.bits} from {one.delay:,}" if several else str(one.bits)
            found += [Precision(label, Scheme.parse(name), one) for name in default_schemes(one)]
        return found


@dataclass(frozen=True, kw_only=True)
class Study:
    """What a study's file says, checked; read it with `read`.

    Attributes:
        name: Name of the report's folder.
        title: Heading of the report.
        episodes: Episodes of every evaluation.
        presets: A file of the user's presets, which go before the package's.
        modules: Modules that register environments of the user's own.
        memory: Whether the report tells the memory that the flatbuffers take.
        x: What the report draws returns in training against, one of `X_AXES`.
    """

    name: str
    title: str
    cells: tuple[Cell, ...]
    episodes: int
    presets: Path | None = None
    modules: tuple[str, ...] = ()
    memory: bool = False
    x: str = X_AXES[0]

    def experiments(self) -> Iterator[Experiment]:
        """Yield every experiment; cells may share those of plain trainings, which come once."""
        seen = set()
        for cell in self.cells:
            for precision in cell.precisions():
                for seed in cell.seeds:
                    run = cell.run(seed, precision.quantization)
                    key = run.run_id, precision.scheme.name
                    if key not in seen:
                        seen.add(key)
                        yield Experiment(run, precision.scheme)


@dataclass(frozen=True)
class Experiment:
    """One run in one scheme."""

    run: Run
    scheme: Scheme


class State(StrEnum):
    """How far an experiment is."""

    MISSING = "missing"
    TRAINED = "trained"
    EXPORTED = "exported"
    EVALUATED = "evaluated"
    FAILED = "failed"


@dataclass(frozen=True)
class Status:
    """An experiment and how far it is.

    Attributes:
        reason: Why it failed, in a line.
        failure: The file that says more, if there is one.
    """

    experiment: Experiment
    state: State
    reason: str = ""
    failure: Path | None = None


# Reading.


def read(path: Path) -> Study:
    """Read a study's file and check it.

    Raises:
        UsageError: It cannot be read, or a value in it is missing, unknown or of no use.
    """
    content = tables.parse_file(path, "a study")
    try:
        return _study(content, path.parent)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _study(content: Any, folder: Path) -> Study:
    values = _mapping(content, "a study", _AT_THE_TOP)
    for key in ("name", "cells", "seeds"):
        if key not in values and not (key == "seeds" and _all_have_seeds(values.get("cells"))):
            raise UsageError(f"A study needs {key}. Received: {', '.join(values) or 'nothing'}")
    name = records.checked_report_name(values["name"])
    modules = _items(values.get("import", []), "import", str, may_be_empty=True)
    environments.import_environments(modules)
    own = values.get("presets")
    if own is not None and not isinstance(own, str):
        raise UsageError(f"presets must be the path of a file. Received: presets={own!r}")
    presets_file = None if own is None else folder / own
    shared = {key: values[key] for key in _OF_A_CELL if key in values}
    cells = []
    for number, entry in enumerate(_list(values["cells"], "cells"), start=1):
        try:
            given = _mapping(entry, "a cell", ("algo", "env", "remark", *_OF_A_CELL))
            cell = _cell({**shared, **given}, presets_file)
            if not cell.quantizations:
                _require_no_bits_needed(given)
        except UsageError as error:
            raise UsageError(f"cell {number}: {error}") from error
        cells.append(cell)
    if not any(cell.quantizations for cell in cells):
        _require_no_bits_needed(shared)
    _require_no_repetition(cells)
    title = values.get("title", name)
    if not isinstance(title, str):
        raise UsageError(f"title must be the report's heading. Received: title={title!r}")
    return Study(
        name=name,
        title=title,
        cells=tuple(_titled(_titled(cells, _settings), _extent)),
        episodes=_whole(values.get("episodes", _DEFAULT_EPISODES), "episodes", least=1),
        presets=presets_file,
        modules=modules,
        memory=_one_of((False, True), values.get("memory", False), "memory"),
        x=_one_of(X_AXES, values.get("x", X_AXES[0]), "x"),
    )


def _titled(cells: Sequence[Cell], told: Callable[[Cell], Mapping[str, Any]]) -> list[Cell]:
    """Tell cells of the same title apart by what differs in what is told of each."""
    titled = []
    for cell in cells:
        telling = telling_settings(told(cell), [told(c) for c in cells if c.title == cell.title])
        more = [one for one in (cell.telling, telling) if one]
        titled.append(replace(cell, telling=", ".join(more)))
    return titled


def _settings(cell: Cell) -> dict[str, Any]:
    return {**cell.overrides, **cell.options}


def _extent(cell: Cell) -> dict[str, str]:
    several = {
        "bits": [one.bits for one in cell.quantizations],
        "delays": [one.delay for one in cell.quantizations],
        "seeds": cell.seeds,
        "schemes": cell.schemes,
    }
    return {name: "/".join(map(str, dict.fromkeys(all_))) for name, all_ in several.items()}


def telling_settings(settings: Mapping[str, Any], alike: Iterable[Mapping[str, Any]]) -> str:
    """Write those of a cell's settings that are not the same in all cells that are alike."""
    others = list(alike)
    return ", ".join(
        f"{key}={value}"
        for key, value in settings.items()
        if any(one.get(key) != value for one in others)
    )


def _all_have_seeds(cells: Any) -> bool:
    return isinstance(cells, list) and all("seeds" in c for c in cells if isinstance(c, dict))


def _cell(values: Mapping[str, Any], own: Path | None) -> Cell:
    for key in ("algo", "env"):
        if not isinstance(values.get(key), str):
            raise UsageError(f"A cell needs {key}, a name. Received: {key}={values.get(key)!r}")
    remark = values.get("remark", "")
    if not isinstance(remark, str):
        raise UsageError(f"remark must be what the report should say. Received: remark={remark!r}")
    algo, env_id = values["algo"], environments.canonical_id(values["env"])
    overrides = tables.mapping(values.get("overrides", {}), "overrides")
    preset = presets.load(algo, env_id, overrides, own)
    seeds = tuple(_whole(seed, "seeds", least=0) for seed in _items(values["seeds"], "seeds", int))
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"A seed comes twice; keep one. Received: seeds={list(seeds)}")
    schemes = _items(values.get("schemes", list(_DEFAULT_SCHEMES)), "schemes", str)
    for name in schemes:
        if Scheme.parse(name).trained:
            raise UsageError(
                f"{name} is of quantisation-aware trainings, which `bits` asks for; leave it out "
                f"of schemes. Received: schemes={list(schemes)}"
            )
    options = tables.mapping(values.get("quantization", {}), "quantization")
    quantizations = tuple(_quantizations(values, options, preset))
    return Cell(
        algo=algo,
        env_id=env_id,
        given_env_id=values["env"],
        overrides=overrides,
        steps=preset.steps,
        seeds=seeds,
        schemes=tuple(dict.fromkeys((REFERENCE, *schemes))),
        options=options if quantizations else {},
        quantizations=quantizations,
        remark=remark,
    )


def _quantizations(
    values: Mapping[str, Any], options: Mapping[str, Any], preset: Preset
) -> Iterator[Quantization]:
    """Yield those of all bits and delays; a delay is a number of steps or a share of them."""
    widths = _items(values.get("bits", []), "bits", int, may_be_empty=True)
    delays = _items(values.get("delays", list(_DEFAULT_DELAYS)), "delays", int, float)
    if odd := sorted({"bits", "delay"} & set(options)):
        raise UsageError(
            "The key `bits` says the bits and `delays` the delays, quantization the rest. "
            f"Received: quantization={odd}"
        )
    for delay in delays if widths else ():
        share = isinstance(delay, float)
        # Whole steps, but 0.29 of 100, which is 28.999999999999996, is 29.
        steps = int(round(delay * preset.steps, 6)) if share else delay
        if steps < 1:
            raise UsageError(
                "A delay is a number of steps, or a share of the training between 0 and 1. "
                f"Received: delay={delay}, steps={preset.steps}"
            )
        presets.require_possible_delay(steps, preset)
        for bits in widths:
            given = {**options, "bits": bits, "delay": steps}
            yield Quantization.from_mapping(given, values["algo"])


def _require_no_bits_needed(values: Mapping[str, Any]) -> None:
    needing = sorted({"delays", "quantization"} & set(values))
    if needing:
        raise UsageError(
            "Delays and quantization are for trainings at `bits`; give bits or leave them out. "
            f"Received: {', '.join(needing)} without bits"
        )


def _require_no_repetition(cells: Sequence[Cell]) -> None:
    """Refuse a quantisation-aware training that comes twice; plain ones may be shared."""
    wanted = Counter(
        cell.run(seed, quantization).run_id
        for cell in cells
        for quantization in cell.quantizations
        for seed in cell.seeds
    )
    for run_id, times in wanted.items():
        if times > 1:
            raise UsageError(
                "The same training comes twice; keep one of the cells, bits or delays that ask "
                f"for it. Received: run={run_id}"
            )


def _mapping(value: Any, what: str, known: Sequence[str]) -> dict[str, Any]:
    """Require a mapping of known words."""
    values = tables.mapping(value, what)
    for key in values:
        if key not in known:
            raise unknown(f"key of {what}", key, known)
    return values


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UsageError(f"{name} must be a list of one or more. Received: {name}={value!r}")
    return value


def _items(value: Any, name: str, *kinds: type, may_be_empty: bool = False) -> tuple[Any, ...]:
    """Require a list of values of these types; True is no number."""
    if may_be_empty and value == []:
        return ()
    for item in _list(value, name):
        if isinstance(item, bool) or not isinstance(item, kinds):
            wanted = "names" if str in kinds else "numbers" if float in kinds else "whole numbers"
            raise UsageError(f"{name} must be a list of {wanted}. Received: {name}={value!r}")
    return tuple(value)


def _one_of(known: Sequence[_Choice], value: Any, name: str) -> _Choice:
    for choice in known:
        # 1 is equal to true, but is not what the file should say.
        if type(value) is type(choice) and value == choice:
            return choice
    words = " or ".join(str(choice).lower() for choice in known)
    raise UsageError(f"{name} must be {words}. Received: {name}={value!r}")


def _whole(value: Any, name: str, *, least: int) -> int:
    if type(value) is not int or value < least:
        raise UsageError(f"{name} must be {least} or more. Received: {name}={value!r}")
    return value


# What exists.


def failure_path(workspace: Workspace, run: Run, scheme: Scheme | None) -> Path:
    """Return where it is written why a run's training, or one of its schemes, failed."""
    name = "failure" if scheme is None else f"failure-{scheme.name}"
    return workspace.run_dir(run.run_id) / f"{name}.txt"


def preset_of(study: Study, run: Run) -> Preset:
    """Load the hyper-parameters of one of the study's runs."""
    return presets.load(run.algo, run.env_id, run.overrides, study.presets)


def plan(workspace: Workspace, study: Study) -> list[Status]:
    """Tell of every experiment how far it is, in the order of `Study.experiments`."""
    return statuses(workspace, study, study.experiments())


def statuses(workspace: Workspace, study: Study, experiments: Iterable[Experiment]) -> list[Status]:
    """Tell of some of a study's experiments how far they are."""
    trained: dict[str, Status | None] = {}
    found = []
    for experiment in experiments:
        run_id = experiment.run.run_id
        if _is_published(workspace, study, experiment):
            found.append(Status(experiment, State.EVALUATED))
            continue
        if run_id not in trained:
            trained[run_id] = _untrained(workspace, study, experiment)
        before = trained[run_id]
        found.append(
            _status_of_trained(workspace, study, experiment)
            if before is None
            else replace(before, experiment=experiment)
        )
    return found


def _is_published(workspace: Workspace, study: Study, experiment: Experiment) -> bool:
    """Tell whether a result came without the run folder that it is of, as in a fresh clone."""
    run = experiment.run
    artifact = workspace.artifact(run.run_id, experiment.scheme.name)
    # Not the folder: a failure is written there, too.
    if (workspace.run_dir(run.run_id) / "run.json").exists():
        return False
    try:
        sidecar = Sidecar.load(sidecar_path(artifact))
        made = Run.from_dict(sidecar.run), presets.restore(run.algo, sidecar.preset)
        return made == (run, preset_of(study, run)) and is_evaluated(artifact, study.episodes)
    except QuarlError:
        return False


def _untrained(workspace: Workspace, study: Study, experiment: Experiment) -> Status | None:
    """Return the status that all schemes of a run share that is not trained; None if it is."""
    run = experiment.run
    try:
        preset = preset_of(study, run)
        record = TrainingRecord.finished(workspace.run_dir(run.run_id), run, preset)
    except QuarlError as error:
        return Status(experiment, State.FAILED, str(error))
    if record is not None:
        return None
    failure = failure_path(workspace, run, None)
    if failure.exists():
        return Status(experiment, State.FAILED, _first_line(failure), failure)
    return Status(experiment, State.MISSING)


def _status_of_trained(workspace: Workspace, study: Study, experiment: Experiment) -> Status:
    run_id, scheme = experiment.run.run_id, experiment.scheme
    state = State.TRAINED
    try:
        if not records.not_exported(workspace, run_id, [scheme.name]):
            done = is_evaluated(workspace.artifact(run_id, scheme.name), study.episodes)
            state = State.EVALUATED if done else State.EXPORTED
    except QuarlError as error:
        return Status(experiment, State.FAILED, str(error))
    failure = failure_path(workspace, experiment.run, scheme)
    if state != State.EVALUATED and failure.exists():
        return Status(experiment, State.FAILED, _first_line(failure), failure)
    return Status(experiment, state)


def _first_line(path: Path) -> str:
    return path.read_text().partition("\n")[0]
