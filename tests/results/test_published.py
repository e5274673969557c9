"""The results that are published here belong together."""

import csv
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from quarl_tf.spec import Run
from quarl_tf.store.records import Sidecar
from quarl_tf.store.state import exported_run, reported_runs
from quarl_tf.store.workspace import Workspace

WORKSPACE = Workspace(Path(__file__).parents[2])
RUNS = [
    run
    for run_id in sorted(reported_runs(WORKSPACE))
    if (run := exported_run(WORKSPACE, run_id)) is not None
]


@cache
def history() -> set[str] | None:
    """Return all commits, of 12 digits; None for a copy that has not all, or none."""
    git = ["git", "-C", str(WORKSPACE.root)]
    kind = subprocess.run(
        [*git, "rev-parse", "--is-shallow-repository"], check=False, capture_output=True
    )
    if kind.stdout != b"false\n":
        return None
    found = subprocess.run([*git, "rev-list", "HEAD"], capture_output=True, text=True, check=True)
    return {commit[:12] for commit in found.stdout.split()}


def trained_on(run: Run) -> set[str]:
    """Return the processors it was trained on; another rounds sums otherwise."""
    paths = WORKSPACE.artifact_dir(run.run_id).glob("*.json")
    sidecars = [Sidecar.load(path) for path in paths if not path.name.endswith(".eval.json")]
    return {name for sidecar in sidecars for name in sidecar.trained_on}


QUANTISED = [
    run for run in RUNS if run.quantization is not None and trained_on(run) == trained_on(run.plain)
]


def curve(run: Run, before: int) -> list[tuple[str, ...]]:
    """Return what was seen in training before a step."""
    with (WORKSPACE.artifact_dir(run.run_id) / "progress.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if int(row["step"]) < before]
    # Curves of before episodes were counted are among them.
    columns = ("step", "episode_return", "greedy_return", "loss")
    return [tuple(row[column] for column in columns) for row in rows]


def test_there_are_results() -> None:
    assert {run.algo for run in RUNS} == {"a2c", "adopted", "ddpg", "dqn", "ppo"}
    assert QUANTISED


@pytest.mark.parametrize("run", QUANTISED, ids=lambda run: run.run_id)
def test_quantised_trainings_are_their_plain_twins_until_the_delay(run: Run) -> None:
    assert run.quantization is not None
    delay = run.quantization.delay
    assert len(curve(run, delay)) > 5
    assert curve(run, delay) == curve(run.plain, delay)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.run_id)
def test_results_come_from_committed_code(run: Run) -> None:
    paths = WORKSPACE.artifact_dir(run.run_id).glob("*.json")
    sidecars = [Sidecar.load(path) for path in paths if not path.name.endswith(".eval.json")]
    assert sidecars
    for sidecar in sidecars:
        # Of older trainings it was not recorded.
        commits = [sidecar.commit, *sidecar.trained_commits]
        assert all(re.fullmatch("[0-9a-f]{12}", str(one)) for one in commits), sidecar.scheme
        assert set(commits) <= (history() or set(commits)), sidecar.scheme
