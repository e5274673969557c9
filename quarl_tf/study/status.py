"""Tell how far a study's experiments are, from the files of the workspace alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quarl_tf import presets
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.presets import Preset
from quarl_tf.spec import Run
from quarl_tf.store.state import State, state
from quarl_tf.store.workspace import Workspace
from quarl_tf.study.design import Experiment, Study


@dataclass(frozen=True)
class Status:
    """An experiment and how far it is.

    Attributes:
        reason: Why it failed, in a line.
        failure: The log of the run that failed, if there is one.
    """

    experiment: Experiment
    state: State
    reason: str = ""
    failure: Path | None = None


def log_path(workspace: Workspace, run: Run) -> Path:
    """Return where it is written what a run of a study says."""
    return workspace.run_dir(run.run_id) / "run.log"


def failure_path(workspace: Workspace, run: Run) -> Path:
    """Return where that lies if the run failed."""
    return workspace.run_dir(run.run_id) / "failure.log"


def preset_of(study: Study, run: Run) -> Preset:
    """Load the hyper-parameters of one of the study's runs."""
    return presets.load(run.algo, run.env_id, run.overrides, study.presets)


def plan(workspace: Workspace, study: Study) -> list[Status]:
    """Tell of every experiment how far it is, in the order of `Study.experiments`."""
    return [_status(workspace, study, experiment) for experiment in study.experiments()]


def _status(workspace: Workspace, study: Study, experiment: Experiment) -> Status:
    run, scheme = experiment.run, experiment.scheme
    try:
        preset = preset_of(study, run)
    except QuarlError as error:
        return Status(experiment, State.FAILED, str(error))
    episodes = study.episodes + study.skip_episodes
    found = state(workspace, run, scheme.name, episodes=episodes, preset=preset)
    failure = failure_path(workspace, run)
    if found.state != State.EVALUATED and failure.exists():
        lines = failure.read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        return Status(experiment, State.FAILED, last.removeprefix("quarl: "), failure)
    return Status(experiment, found.state, found.reason if found.state == State.FAILED else "")
