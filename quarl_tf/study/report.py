"""Write the report of a study."""

from pathlib import Path

from quarl_tf.report import write as report
from quarl_tf.report.results import Source
from quarl_tf.store.workspace import Workspace
from quarl_tf.study import State, Study, plan


def write_study_report(
    workspace: Workspace, study: Study, *, margin_percent: float, command: str, remedy: str
) -> Path:
    """Write the report of a study; return the path of index.html.

    The margin is in percent of the fp32 return. `command` writes the report, and `remedy` runs the
    missing experiments.
    """
    reasons = {
        (s.run.run_id, s.scheme.name): "failed: " * (s.state == State.FAILED) + s.reason
        for s in plan(workspace, study)
        if s.state != State.EVALUATED
    }
    source = Source(
        workspace=workspace,
        margin_percent=margin_percent,
        episodes=study.episodes,
        skip_episodes=study.skip_episodes,
        chance=study.chance,
        missing_reasons=reasons,
        remedy=remedy,
    )
    return report.write(
        source,
        study.cells,
        name=study.name,
        title=study.title,
        command=command,
        x="step" if study.x == "steps" else study.x,
        memory=study.memory,
    )
