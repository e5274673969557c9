"""A study: many experiments from one file, and their progress.

An experiment is one run in one scheme. The file says which ones there are, the files of the
workspace how far each is, so that a killed study resumes where it stopped.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quarl_tf.spec import Run, Scheme
from quarl_tf.store.state import State, state
from quarl_tf.store.workspace import Workspace
from quarl_tf.study.file import Study, read

__all__ = ["State", "Status", "Study", "plan", "read", "write_study_report"]


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
    return [
        _status(workspace, study, run, scheme)
        for run, scheme in study.experiments()
        if run_id in (None, run.run_id)
    ]


def _status(workspace: Workspace, study: Study, run: Run, scheme: Scheme) -> Status:
    episodes = study.episodes + study.skip_episodes
    status = state(
        workspace, run, scheme.name, chance=study.chance, episodes=episodes, current=True
    )
    failure = failure_path(workspace, run)
    if status.state != State.EVALUATED:
        with suppress(FileNotFoundError):  # Another worker may retry it at any time.
            last = failure.read_text(errors="replace").rstrip().rpartition("\n")[2] or "no output"
            return Status(run, scheme, State.FAILED, last.removeprefix("quarl: "), failure)
    return Status(run, scheme, status.state, status.reason)


def write_study_report(
    workspace: Workspace, study: Study, *, margin_percent: float, command: str, remedy: str
) -> Path:
    """Write the report of a study; return the path of index.html.

    The margin is in percent of the fp32 return. `command` writes the report, and `remedy` runs the
    missing experiments.
    """
    from quarl_tf.report import write as report
    from quarl_tf.report.results import Source

    reasons = {
        (s.run.run_id, s.scheme.name): "failed: " * (s.state == State.FAILED) + s.reason
        for s in plan(workspace, study)
        if s.state != State.EVALUATED
    }
    source = Source(
        workspace=workspace,
        margin_percent=margin_percent,
        command=command,
        chance=study.chance,
        x="step" if study.x == "steps" else study.x,
        memory=study.memory,
        episodes=study.episodes,
        skip_episodes=study.skip_episodes,
        missing_reasons=reasons,
        remedy=remedy,
    )
    return report.write(source, study.cells, study.name, study.title)
