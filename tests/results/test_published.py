"""The published results match each other, and flatbuffers their records."""

import csv
import hashlib
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from samples import MODELS, heads

from quarl_tf import agents, environments, networks, presets
from quarl_tf.cli import arguments, verbs
from quarl_tf.evaluation.play import evaluate
from quarl_tf.evaluation.shelf import shelf
from quarl_tf.export.ptq import quantized
from quarl_tf.networks import inference
from quarl_tf.runtime import POLICIES
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import REFERENCE, Run, Scheme
from quarl_tf.store.records import Evaluation, Sidecar
from quarl_tf.store.state import exported_run
from quarl_tf.store.workspace import Workspace, evaluation_path, sidecar_path
from quarl_tf.training.exported import variables

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
    words = [*git, "rev-parse", "--is-shallow-repository"]
    if subprocess.run(words, check=False, capture_output=True).stdout != b"false\n":
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
    if run.quantization and run.quantization.delay > 1 and trained_on(run) == trained_on(run.plain)
]


def curve(run: Run, before: int) -> list[tuple[str, ...]]:
    """Return the learning curve before a step."""
    with (WORKSPACE.artifact_dir(run.run_id) / "progress.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if int(row["step"]) < before]
    columns = ("step", "episode_return", "greedy_return", "loss")  # Old curves lack `episodes`.
    return [tuple(row[column] for column in columns) for row in rows]


def test_there_are_results() -> None:
    assert {run.algo for run in RUNS} == {"a2c", "adopted", "ddpg", "dqn", "ppo", "pqn"}
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


#: What is kept of each run, of 8 trained bits the integers; of others the hash is enough.
KEPT = {REFERENCE, "int8", "qat_int8", "qat_w4a4", "qat_w2a2"}

#: Larger files need not be kept; of smaller ones beyond the second limit one for each cell.
LARGE, MEDIUM = 2_700_000, 400_000


@pytest.mark.parametrize(
    "path", sorted(POLICIES.rglob("*.tflite")), ids=lambda path: path.parent.parent.name
)
def test_policies_of_the_package_earn_their_recorded_returns(path: Path) -> None:
    sidecar = Policy.load(path).sidecar
    published = WORKSPACE.artifact(sidecar.run_id, sidecar.scheme)
    assert Sidecar.load(sidecar_path(published)).sha256 == sidecar.sha256
    recorded = Evaluation.load(evaluation_path(published))
    reference = published.with_name(f"{REFERENCE}.tflite")
    shipped = Evaluation.load(evaluation_path(path.with_name(reference.name)))
    assert shipped == Evaluation.load(evaluation_path(reference)).first(100)
    played = evaluate(path, recorded.seeds[:5])
    assert (played.returns, played.lengths) == (recorded.returns[:5], recorded.lengths[:5])


def test_kept_files_exist_and_others_have_the_hash_of_their_record_when_made() -> None:
    records = [p for p in MODELS.rglob("*.json") if not p.name.endswith(".eval.json")]
    assert records
    for path in records:
        sidecar, reference = Sidecar.load(path), path.with_name(f"{REFERENCE}.tflite")
        scheme = Scheme.parse(sidecar.scheme)
        if path.with_suffix(".tflite").exists():
            continue
        # Native files may be of a former way.
        if scheme.kind == "weights" and not scheme.native and reference.exists():
            content = quantized(reference.read_bytes(), scheme)
            assert hashlib.sha256(content).hexdigest() == sidecar.sha256, path
        elif sidecar.scheme in KEPT and sidecar.size_bytes <= LARGE:
            assert sidecar.size_bytes > MEDIUM, path
            assert list(path.parents[1].glob(f"*/{path.stem}.tflite")), path


def test_trainings_of_the_shelf_are_made_by_their_commands() -> None:
    trained = [entry for entry in shelf(MODELS) if entry.command().startswith("quarl run")]
    assert trained
    for entry in trained:
        *first, command = entry.command().split(" && ")
        assert len(first) == bool(entry.run.quantization or entry.run.origin)
        args = arguments.build().parse_args(shlex.split(command)[1:])
        # Of another root, where a run to start from would have to be trained first.
        args.origin, args.presets = None, args.presets and WORKSPACE.root / args.presets
        run, _ = verbs._requested_run(args)
        assert replace(run, origin=entry.run.origin) == entry.run, entry.name


CELLS = ("AirNav-v0/dqn", "HalfCheetahBulletEnv-v0/ppo", "MountainCarContinuous-v0/ddpg")
STARTS = [f"{cell}/*/{REFERENCE}" for cell in (*CELLS, "PongNoFrameskip-v4/ppo")]


@pytest.mark.parametrize("start", [*STARTS, "BreakoutNoFrameskip-v4/dqn/*/fp16"])
def test_constants_of_a_flatbuffer_are_a_network_to_start_from(start: str) -> None:
    path = min(MODELS.glob(f"{start}.tflite"))
    policy = Policy.load(path)
    run, spec = Run.from_dict(policy.sidecar.run), environments.env_spec(policy.sidecar.env_id)
    preset = replace(presets.restore(run.algo, policy.sidecar.preset), precision="float32")
    network = agents.build_network(run.algo, spec, preset, run.seed)
    networks.set_weights(network, variables(path, preset, policy.sidecar.action_std))
    observations = 255 * np.random.default_rng(0).random((9, *spec.observation_shape))
    observations = observations.astype(spec.observation_dtype)
    actual = inference.forward(network)(observations)
    np.testing.assert_allclose(actual, heads(path, observations), rtol=1e-4, atol=1e-4)
