"""Paths, records and checkpoints: read back as written, refused or passed over where damaged."""

import errno
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import EVALUATION, PRESET, RUN, SIDECAR, TRAINING, Patch, quantised, refused

from quarl_tf.store.records import Evaluation, Sidecar, TrainingRecord
from quarl_tf.store.state import require_same_settings
from quarl_tf.store.workspace import Workspace, sidecar_path, write_artifact
from quarl_tf.training import checkpoint

CONTINUOUS = replace(
    SIDECAR, head="action", num_actions=None, action_low=[-1.0], action_high=[1.0], action_std=[0.5]
)
OTHER = json.dumps(asdict(TRAINING) | {"minutes": 1})
NO_JSON = b"", b'{"run": ', b"[" * 100_000, b"\xff\xfe\x00"
RANDOM = np.random.default_rng(0)
#: Arrays larger than what is read at once, a scalar, an empty one, and bytes.
ARRAYS = {
    "variable/0": RANDOM.normal(size=2000),
    "best/kernel:0": RANDOM.normal(size=(100, 100)).astype(np.float32),
    "count": np.array(7.5),
    "nothing": np.zeros((0, 3), np.float32),
    "frames": RANDOM.integers(0, 256, (4, 4), np.uint8),
}
DTYPES = {name: array.dtype for name, array in ARRAYS.items()} | {"step": np.dtype(int)}
STATE = {"step": 20, "best": [float("-inf"), 0], "generator": RANDOM.bit_generator.state}


def test_runs_are_listed_by_their_ids(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    named = "adopted-CartPole-v1-s0-s3"  # An adopted policy may have the name of a seed.
    assert workspace.artifact_dir(named) == tmp_path / "tflite_models/CartPole-v1/adopted/s0-s3"
    aware = "dqn-CartPole-v1-s0-1c09e6d5-q4d50-0a1b2c3d"
    ids = ["a2c-a_b-v0-s1", named, aware, "ppo-Foo-s3-v1-s12"]
    # Folders of other names were moved away by hand.
    others = [tmp_path / "runs/old", tmp_path / "tflite_models/CartPole-v1/dqn/backup"]
    for folder in (*map(workspace.artifact_dir, ids), *others):
        folder.mkdir(parents=True)
    assert workspace.run_ids() == ids
    for run_id in ("", "..", "runs/dqn-A-v1-s0", "dqn-A-v1-s0/", "dqn-..-s0"):  # No paths.
        for place in (workspace.run_dir, workspace.artifact_dir):
            assert refused(place, run_id, code=2).endswith(f"Received: run={run_id!r}")


def test_no_sidecar_describes_another_flatbuffer(tmp_path: Path, monkeypatch: Patch) -> None:
    path, blocked = tmp_path / "int8.tflite", tmp_path / "blocked.tflite"
    blocked.mkdir()  # A folder cannot be replaced by a file.
    sidecar_path(blocked).write_text("{}")
    assert "Cannot write" in refused(write_artifact, blocked, b"new", SIDECAR)
    assert list(tmp_path.iterdir()) == [blocked]
    write_artifact(path, b"old", SIDECAR)
    write = Path.write_bytes

    def full(file: Path, content: bytes) -> int:
        if content == b"new":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    assert "No space left" in refused(write_artifact, path, b"new", replace(SIDECAR, scheme="int8"))
    assert (path.read_bytes(), Sidecar.load(sidecar_path(path))) == (b"old", SIDECAR)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((content, "/training.json cannot be read as JSON") for content in NO_JSON),
        *((content, "holds no JSON object. Received: ") for content in (b"[1, 2]", b"null")),
        (b"{}", "no valid TrainingRecord"),
        (OTHER.replace('"seconds"', '"second"').encode(), "that differ minutes, second, seconds"),
    ],
)
def test_damaged_records_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "training.json"
    path.write_bytes(content)
    assert message in refused(TrainingRecord.load, path)
    assert "(Is a directory)" in refused(TrainingRecord.load, tmp_path)


def test_sound_records_are_read_back(tmp_path: Path) -> None:
    path, with_successes = tmp_path / "record.json", replace(EVALUATION, successes=[True, False])
    for record in (TRAINING, SIDECAR, CONTINUOUS, with_successes, EVALUATION):
        record.save(path)
        assert type(record).load(path) == record
    assert "successes" not in json.loads(path.read_text())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"returns": [9.0, 99.0]}))
    assert "was changed or damaged" in refused(Evaluation.load, path)
    assert with_successes.first(1, skip=1).successes == [False]
    # JSON has one kind of number: a whole return comes back without its point from other writers.
    path.write_text(json.dumps(asdict(EVALUATION) | {"returns": [9, 10]}))
    assert Evaluation.load(path).returns == [9, 10]


@pytest.mark.parametrize(
    ("record", "name", "values"),
    [
        (EVALUATION, "ties", [0.5, True]),
        (EVALUATION, "seeds", ["12", [1, 2.5]]),
        (EVALUATION, "returns", [[9.0, bad] for bad in ("10", np.nan, np.inf, 10**400)]),
        (EVALUATION, "returns", [["ten"] * 10_000]),
        (EVALUATION, "latency_us", [{"median": "fast"}, [9.0]]),
        (EVALUATION, "protocol", [{"version": 1, "actions": 1, "game": None}]),
        (EVALUATION, "protocol", [{"actions": "greedy"}]),
        (CONTINUOUS, "action_std", [0.5, [-0.5]]),
        (SIDECAR, "run", [{}]),
        (SIDECAR, "observation_dtype", ["float3r", "float64"]),
        (TRAINING, "run", [{"algo": "dqn", "env_id": "CartPole-v1", "overrides": {}}]),
        (TRAINING, "run", [TRAINING.run | {"seed": "0"}, TRAINING.run | {"overrides": None}]),
    ],
)
def test_wrong_values_are_refused(tmp_path: Path, record: Any, name: str, values: Any) -> None:
    path = tmp_path / "record.json"
    for value in values:
        path.write_text(json.dumps(asdict(record) | {name: value}))
        message = refused(type(record).load, path)
        assert len(message) < 300 + len(str(path))
        assert f"{path} is no valid {type(record).__name__}" in message
        assert message.split("Received: ")[1].startswith(f"{name}=")


def test_lists_have_a_value_for_each_episode_and_runs_their_id(tmp_path: Path) -> None:
    path = tmp_path / "int8.eval.json"
    for change in ({"returns": [9.0]}, {"seeds": [], "returns": []}, {"starts": []}):
        values = asdict(EVALUATION) | change
        path.write_text(json.dumps(values))
        assert f"of {len(values['seeds'])} seeds" in refused(Evaluation.load, path)
    path.write_text(json.dumps(asdict(SIDECAR) | {"run_id": "dqn-CartPole-v1-s9"}))
    assert "its run is" in refused(Sidecar.load, path)


def test_other_settings_or_versions_are_refused_old_presets_get_defaults(tmp_path: Path) -> None:
    record, run = asdict(TRAINING), replace(RUN, quantization=quantised())
    older = {name: value for name, value in TRAINING.preset.items() if name != "dueling"}
    require_same_settings(tmp_path, record | {"preset": older}, RUN, PRESET)
    preset = replace(PRESET, steps=20_000, dueling=True)
    message = refused(require_same_settings, tmp_path, record, run, preset)
    assert f"{tmp_path} was trained with other settings" in message
    for difference in ("dueling=True for False", "steps=20000 for 50000", "bits=4 for None"):
        assert difference in message.split("Received: ")[1]
    unknown = {"preset": TRAINING.preset | {"dithered": True}}
    for other, received in ((record | unknown, "dithered"), ({"step": 5}, "run")):
        message = refused(require_same_settings, tmp_path, other, RUN, PRESET)
        assert f"{tmp_path} was trained by another version" in message
        assert received in message


def save(folder: Path, step: int) -> None:
    checkpoint.save(folder, step, {**ARRAYS, "step": np.array(step)}, {**STATE, "step": step})


def loaded(folder: Path) -> int:
    """Load the newest good checkpoint, check its content, and return its step."""
    arrays, state = checkpoint.load_newest(folder)
    step = int(state["step"])
    assert state == {**STATE, "step": step}
    np.testing.assert_equal(arrays, {**ARRAYS, "step": np.array(step)})
    assert {name: array.dtype for name, array in arrays.items()} == DTYPES
    return step


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with checkpoints of steps 10 and 20."""
    save(tmp_path, 10)
    save(tmp_path, 20)
    return tmp_path


def test_the_newest_two_are_kept_and_loaded_as_they_were_saved(tmp_path: Path) -> None:
    assert checkpoint.load_newest(tmp_path) is None
    assert checkpoint.load_newest(tmp_path / "nowhere") is None
    for step in (900, 1000, 99_999, 100_000, 2_000_000_000):
        save(tmp_path, step)
        assert loaded(tmp_path) == step
    assert len(list(tmp_path.iterdir())) == 2
    newest = max(tmp_path.iterdir())
    # What kill -9 in the middle of a save leaves.
    (tmp_path / ".003000000000.npz.abc.tmp").write_bytes(newest.read_bytes()[:1000])
    assert loaded(tmp_path) == 2_000_000_000
    newest.unlink()
    assert loaded(tmp_path) == 100_000


def test_what_is_damaged_is_passed_over(folder: Path) -> None:
    newest = max(folder.iterdir())
    content = newest.read_bytes()

    def loaded_with(newest_content: bytes) -> int:
        newest.write_bytes(newest_content)
        return loaded(folder)

    def flipped(position: int, bit: int) -> bytes:
        damaged = bytearray(content)
        damaged[position] ^= 1 << bit
        return bytes(damaged)

    ends = [0, 1, 3, *range(4, len(content), 997), *range(len(content) - 200, len(content))]
    foreign = [b"\x00" * 5000, b"not an archive", b"PK\x05\x06" + b"\x00" * 18]
    for damaged in [*(content[:end] for end in ends), *foreign]:
        assert loaded_with(damaged) == 10
    second, directory = content.index(b"best/kernel:0.npy"), content.index(b"PK\x01\x02")
    # The headers of the first member and of the second, the archive's directory, and numbers.
    headers = [*range(200), *range(second - 30, second + 150), *range(directory, len(content))]
    # Zip archives have bits that mean nothing, dates for example.
    assert {loaded_with(flipped(position, position % 8)) for position in headers} == {10, 20}
    assert {loaded_with(flipped(position, 4)) for position in range(500, second - 30, 499)} == {10}


def test_closed_and_damaged_ones_do_not_take_the_place_of_good_ones(folder: Path) -> None:
    unreadable = folder / "000000000030.npz"
    unreadable.mkdir()
    assert "cannot be opened (Is a directory)" in refused(checkpoint.load_newest, folder)
    unreadable.rmdir()
    assert loaded(folder) == 20
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-30])
    for step in (5, 8):
        save(folder, step)
        assert loaded(folder) == step
    assert sorted(path.stem.lstrip("0") for path in folder.iterdir()) == ["5", "8"]
