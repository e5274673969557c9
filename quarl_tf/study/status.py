"""Tell how far a study's experiments are, from the files of the workspace alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quarl_tf import presets
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.presets import Preset
from quarl_tf.spec import Run, Scheme
from quarl_tf.store.state import State, state
from quarl_tf.store.workspace import Workspace
from quarl_tf.study.design import Experiment, Study


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
    return [_status(workspace, study, experiment) for experiment in experiments]


def _status(workspace: Workspace, study: Study, experiment: Experiment) -> Status:
    run, scheme = experiment.run, experiment.scheme
    try:
        preset = preset_of(study, run)
    except QuarlError as error:
        return Status(experiment, State.FAILED, str(error))
    found = state(workspace, run, scheme.name, episodes=study.episodes, preset=preset)
    if found.state != State.EVALUATED:
        for failure in (failure_path(workspace, run, None), failure_path(workspace, run, scheme)):
            if failure.exists():
                return Status(experiment, State.FAILED, _first_line(failure), failure)
    return Status(experiment, found.state, found.reason if found.state == State.FAILED else "")


def _first_line(path: Path) -> str:
    return path.read_text().partition("\n")[0]
