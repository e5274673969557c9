"""Records are read back, and refused where they are damaged or of other settings."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from samples import EVALUATION, PRESET, RUN, SIDECAR, TRAINING, refused

from quarl_tf.foundation.files import write_bytes
from quarl_tf.spec import Quantization
from quarl_tf.store.records import Evaluation, Sidecar, TrainingRecord
from quarl_tf.store.state import finished_training, require_same_settings
from quarl_tf.store.workspace import Workspace

QUANTIZATION = Quantization.from_mapping({"bits": 4, "delay": 5})
CONTINUOUS = replace(
    SIDECAR, head="action", num_actions=None, action_low=[-1.0], action_high=[1.0], action_std=[0.5]
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(
            (content, "/training.json cannot be read as JSON")
            for content in (b"", b'{"run": ', b"[" * 100_000, b"\xff\xfe\x00")
        ),
        *((content, "holds no JSON object. Received: ") for content in (b"[1, 2]", b"null")),
        (b"{}", "no valid TrainingRecord"),
        (
            json.dumps(asdict(TRAINING) | {"minutes": 1}).replace('"seconds"', '"second"').encode(),
            "fields that differ minutes, second, seconds",
        ),
    ],
)
def test_damaged_records_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "training.json"
    path.write_bytes(content)
    assert message in refused(TrainingRecord.load, path)
    assert "(Is a directory)" in refused(TrainingRecord.load, tmp_path)


def test_sound_records_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    with_successes = replace(EVALUATION, successes=[True, False])
    for record in (TRAINING, SIDECAR, CONTINUOUS, with_successes, EVALUATION):
        record.save(path)
        assert type(record).load(path) == record
    # The file has the bytes of earlier versions where an environment reports none.
    assert "successes" not in json.loads(path.read_text())
    assert with_successes.first(1, skip=1).successes == [False]
    # JSON has one kind of number: a whole return comes back without its point from other writers.
    path.write_text(json.dumps(asdict(EVALUATION) | {"returns": [9, 10]}))
    assert Evaluation.load(path).returns == [9, 10]


@pytest.mark.parametrize(
    ("record", "name", "values"),
    [
        (EVALUATION, "ties", [0.5, True]),
        (EVALUATION, "seeds", ["12", [1, 2.5]]),
        (EVALUATION, "returns", [[9.0, bad] for bad in ("10", math.nan, math.inf, 10**400)]),
        (EVALUATION, "returns", [["ten"] * 10_000]),
        (EVALUATION, "latency_us", [{"median": "fast"}, [9.0]]),
        (EVALUATION, "protocol", [{"version": 1, "actions": 1, "game": None}]),
        (EVALUATION, "protocol", [{"actions": "greedy"}]),
        (CONTINUOUS, "action_std", [0.5]),
        (SIDECAR, "run", [{}]),
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


def test_training_with_other_settings_is_refused_naming_what_differs(tmp_path: Path) -> None:
    run = replace(RUN, quantization=QUANTIZATION)
    preset = replace(PRESET, steps=20_000, dueling=True)
    message = refused(require_same_settings, tmp_path, asdict(TRAINING), run, preset)
    assert f"{tmp_path} was trained with other settings" in message
    for difference in ("dueling=True for False", "steps=20000 for 50000", "bits=4 for None"):
        assert difference in message.split("Received: ")[1]


def test_older_presets_have_defaults_and_unknown_settings_are_refused(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    folder = workspace.run_dir(RUN.run_id)
    path = folder / "training.json"
    for name in ("network", "calibration"):
        write_bytes(folder / f"{name}.npz", name.encode())
    older = replace(TRAINING, preset={k: v for k, v in TRAINING.preset.items() if k != "dueling"})
    older.save(path)
    assert finished_training(workspace, RUN, PRESET) == older
    replace(TRAINING, preset={**TRAINING.preset, "dithered": True}).save(path)
    message = refused(finished_training, workspace, RUN, PRESET)
    assert f"{folder} was trained by another version" in message
    assert "dithered" in message
    assert "another version" in refused(require_same_settings, folder, {"step": 5}, RUN, PRESET)
