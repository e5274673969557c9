"""The published results match each other."""

import csv
import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from quarl_tf.spec import Run
from quarl_tf.store.records import Sidecar
from quarl_tf.store.state import exported_run
from quarl_tf.store.workspace import Workspace

WORKSPACE = Workspace(Path(__file__).parents[2])
REPORTED = {
    row["run_id"]
    for path in WORKSPACE.root.glob("reports/*/results.json")
    for row in json.loads(path.read_text())["runs"]
    if row["status"] == "ok"
}
RUNS = [run for run_id in sorted(REPORTED) if (run := exported_run(WORKSPACE, run_id)) is not None]


@cache
def history() -> set[str] | None:
    """Return all commits, in 12 digits; None for a shallow copy, or one without history."""
    git = ["git", "-C", str(WORKSPACE.root)]
    shallow = subprocess.run(
        [*git, "rev-parse", "--is-shallow-repository"], check=False, capture_output=True
    )
    if shallow.stdout != b"false\n":
        return None
    log = subprocess.run([*git, "rev-list", "HEAD"], capture_output=True, text=True, check=True)
    return {commit[:12] for commit in log.stdout.split()}


def sidecars(run: Run) -> Iterator[Sidecar]:
    for path in WORKSPACE.artifact_dir(run.run_id).glob("*.json"):
        if not path.name.endswith(".eval.json"):
            yield Sidecar.load(path)


def trained_on(run: Run) -> set[str]:
    """Return the processors it was trained on, which may round differently."""
    return {name for sidecar in sidecars(run) for name in sidecar.trained_on}


#: Trainings quantised after a part in float, on the processor of their references.
QUANTISED = [
    run
    for run in RUNS
    if run.quantization is not None
    and run.quantization.delay > 1
    and trained_on(run) == trained_on(run.plain)
]


def curve(run: Run, before: int) -> list[tuple[str, ...]]:
    """Return the learning curve before a step."""
    with (WORKSPACE.artifact_dir(run.run_id) / "progress.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if int(row["step"]) < before]
    # Old curves lack the number of episodes.
    columns = ("step", "episode_return", "greedy_return", "loss")
    return [tuple(row[column] for column in columns) for row in rows]


def test_there_are_results() -> None:
    assert {run.algo for run in RUNS} == {"a2c", "adopted", "ddpg", "dqn", "ppo"}
    assert QUANTISED


@pytest.mark.parametrize("run", QUANTISED, ids=lambda run: run.run_id)
def test_quantised_trainings_equal_their_references_until_the_delay(run: Run) -> None:
    assert run.quantization is not None
    delay = run.quantization.delay
    assert len(curve(run, delay)) > 5
    assert curve(run, delay) == curve(run.plain, delay)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.run_id)
def test_results_come_from_committed_code(run: Run) -> None:
    assert list(sidecars(run))
    for sidecar in sidecars(run):
        commits = [sidecar.commit, *sidecar.trained_commits]
        assert all(re.fullmatch("[0-9a-f]{12}", str(commit)) for commit in commits), sidecar.scheme
        assert set(commits) <= (history() or set(commits)), sidecar.scheme
