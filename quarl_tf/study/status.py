"""Progress of a study's experiments, from the files of the workspace."""

from dataclasses import dataclass
from pathlib import Path

from quarl_tf import pipeline
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.spec import Chance, Run, Scheme
from quarl_tf.store.state import State, state
from quarl_tf.store.workspace import Workspace
from quarl_tf.study.file import Study


@dataclass(frozen=True)
class Status:
    """An experiment and its progress; the reason if it is not evaluated, the log of a failure."""

    run: Run
    scheme: Scheme
    state: State
    reason: str = ""
    failure: Path | None = None


def failure_path(workspace: Workspace, run: Run) -> Path:
    """Return the path of the log of a failed run."""
    return workspace.run_dir(run.run_id) / "failure.log"


def plan(workspace: Workspace, study: Study, run_id: str | None = None) -> list[Status]:
    """Return the progress of all experiments, or of those of one run, in the study's order."""
    episodes = study.episodes + study.skip_episodes
    wanted = (one for one in study.experiments() if run_id in (None, one.run.run_id))
    return [_status(workspace, *one, episodes, study.chance) for one in wanted]


def _status(
    workspace: Workspace, run: Run, scheme: Scheme, episodes: int, chance: Chance
) -> Status:
    try:
        preset = pipeline.preset_of(run)
    except QuarlError as error:
        return Status(run, scheme, State.FAILED, str(error))
    found = state(workspace, run, scheme.name, episodes=episodes, chance=chance, preset=preset)
    failure = failure_path(workspace, run)
    if found.state != State.EVALUATED and failure.exists():
        lines = failure.read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        return Status(run, scheme, State.FAILED, last.removeprefix("quarl: "), failure)
    return Status(run, scheme, found.state, found.reason)
