"""Tell how far a study's experiments are, from the files of the workspace alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from quarl_tf import presets
from quarl_tf.evaluation.play import is_evaluated
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.presets import Preset
from quarl_tf.spec import Run, Scheme
from quarl_tf.store.records import Sidecar, TrainingRecord
from quarl_tf.store.state import not_exported
from quarl_tf.store.workspace import Workspace, sidecar_path
from quarl_tf.study.design import Experiment, Study


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
    untrained: dict[str, Status | None] = {}
    found = []
    for experiment in experiments:
        run_id = experiment.run.run_id
        if _is_published(workspace, study, experiment):
            found.append(Status(experiment, State.EVALUATED))
            continue
        if run_id not in untrained:
            untrained[run_id] = _untrained(workspace, study, experiment)
        before = untrained[run_id]
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
        if not not_exported(workspace, run_id, [scheme.name]):
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
