"""Files are whole or absent, and say what they are."""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import os
import re
import stat
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quarl_tf import presets, records
from quarl_tf.errors import QuarlError, UsageError
from quarl_tf.records import Evaluation, Sidecar, TrainingRecord, Workspace, atomic_path
from quarl_tf.spec import Quantization, Run

RUN = Run("dqn", "CartPole-v1", 0)

PRESET = presets.load("dqn", "CartPole-v1")
TRAINING = TrainingRecord(
    run=RUN.to_dict(),
    run_id="dqn-CartPole-v1-s0",
    # Tuples are lists once they have been through JSON.
    preset=json.loads(json.dumps(asdict(PRESET))),
    best_step=10,
    selection_return=9.5,
    network_sha256=hashlib.sha256(b"network").hexdigest(),
    calibration_sha256=hashlib.sha256(b"calibration").hexdigest(),
    seconds=0.1,
    versions={"numpy": "2"},
    commit=None,
)

SIDECAR = Sidecar(
    run=TRAINING.run,
    run_id=TRAINING.run_id,
    env_id="CartPole-v1",
    scheme="fp32",
    native=True,
    sha256=hashlib.sha256(b"flatbuffer").hexdigest(),
    size_bytes=10,
    head="q_values",
    num_actions=2,
    action_low=None,
    action_high=None,
    observation_shape=[4],
    observation_dtype="float32",
    tensor_dtypes={"float32": 12},
    weight_dtypes={"float32": 58},
    operators=["FULLY_CONNECTED float32"],
    check={"max_abs_difference": 0.0},
    network_sha256=TRAINING.network_sha256,
    calibration_sha256=None,
    preset=TRAINING.preset,
    versions={},
    commit=None,
)

CONTINUOUS = replace(
    SIDECAR,
    head="action",
    num_actions=None,
    action_low=[-1.0],
    action_high=[1.0],
    action_std=[0.5],
)

EVALUATION = Evaluation(
    run_id=TRAINING.run_id,
    env_id="CartPole-v1",
    scheme="fp32",
    artifact_sha256=SIDECAR.sha256,
    protocol={"action": "greedy"},
    seeds=[1, 2],
    returns=[9.0, 10.0],
    lengths=[9, 10],
    ties=0,
    latency_us={"median": 9.0, "p95": 11.5},
    reference_sha256=None,
    agreement={"fraction": 1.0, "states": 19},
    versions={},
)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing reach the disk any more."""

    def fsync(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Return the folder of a finished training."""
    (tmp_path / "network.npz").write_bytes(b"network")
    (tmp_path / "calibration.npz").write_bytes(b"calibration")
    TRAINING.save(tmp_path / "training.json")
    return tmp_path


def refused(function: Any, *arguments: Any) -> str:
    with pytest.raises(QuarlError) as error:
        function(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


# Writing.


def test_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    with atomic_path(path) as temporary:
        temporary.write_bytes(b"content")
        assert not path.exists()
        assert temporary.parent == path.parent  # A rename is atomic within one file system only.
    assert path.read_bytes() == b"content"
    assert list(path.parent.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_failing_block_leaves_the_old_file(tmp_path: Path, failure: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write() -> None:
        with atomic_path(path) as temporary:
            temporary.write_bytes(b"half of the n")
            raise failure

    with pytest.raises(failure):
        write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_leaves_the_old_file_and_is_one_line(tmp_path: Path, full_disk: None) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    message = refused(records.write_bytes, path, b"new")
    assert f"Cannot write {path}: No space left on device" in message
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_disk_that_fills_up_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write() -> None:
        with atomic_path(path) as temporary:
            temporary.write_bytes(b"half")
            # The device that is always full.
            Path("/dev/full").write_bytes(b"the other half")

    assert "No space left on device" in refused(write)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_killed_processes_left_is_removed_in_time(tmp_path: Path) -> None:
    path = tmp_path / "file[1].json"
    long_ago = time.time() - 2 * 3600
    old, young = (tmp_path / f".file[1].json.{end}.tmp" for end in ("abcd_123", "efgh_456"))
    others = [tmp_path / name for name in (".file1.json.abcd_123.tmp", ".file[1].abcd_123.tmp")]
    for left in (old, young, *others):
        left.write_bytes(b"half")
        if left != young:
            os.utime(left, (long_ago, long_ago))
    records.write_bytes(path, b"whole")
    assert sorted(tmp_path.iterdir()) == sorted([path, young, *others])


@pytest.mark.parametrize("folder", ["file", "file/deeper"])
def test_folder_that_is_a_file_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_bytes(b"a file")
    message = refused(records.write_bytes, tmp_path / folder / "x", b"new")
    assert "Cannot write" in message
    assert "choose another with --root" in message
    assert (tmp_path / "file").read_bytes() == b"a file"


@pytest.mark.parametrize("path", ["/proc/x", "/proc/quarl/x", "/sys/x"])
def test_folder_that_takes_no_files_is_refused(path: str) -> None:
    assert f"Cannot write {path}" in refused(records.write_bytes, Path(path), b"new")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_has_not_are_not_written(tmp_path: Path, value: float) -> None:
    path = tmp_path / "file.json"
    records.write_json(path, {"x": 1.0})
    with pytest.raises(ValueError, match="JSON"):
        records.write_json(path, {"x": value})
    assert records.read_json(path) == {"x": 1.0}
    assert list(tmp_path.iterdir()) == [path]


def test_csv_is_read_back_by_the_csv_module(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows = [{"step": 1, "loss": None, "note": 'a "b", c'}, {"step": 2, "loss": 0.1, "note": "é\n"}]
    records.write_csv(path, rows)
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert found == [
        {"step": "1", "loss": "", "note": 'a "b", c'},
        {"step": "2", "loss": "0.1", "note": "é\n"},
    ]
    records.write_csv(path, [])
    with path.open(newline="") as file:
        assert list(csv.DictReader(file)) == []


def test_flatbuffer_that_cannot_be_replaced_has_no_sidecar(tmp_path: Path) -> None:
    path = tmp_path / "int8.tflite"
    path.mkdir()  # A folder cannot be replaced by a file.
    records.sidecar_path(path).write_text("{}")
    assert "Cannot write" in refused(records.write_artifact, path, b"new", SIDECAR)
    assert list(tmp_path.iterdir()) == [path]


# Reading.


@given(st.binary(max_size=200))
def test_hash_is_of_the_content(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "hashed"
    path.write_bytes(content)
    assert records.sha256(path) == hashlib.sha256(content).hexdigest()


def test_folder_cannot_be_hashed(tmp_path: Path) -> None:
    message = refused(records.sha256, tmp_path)
    assert f"{tmp_path} cannot be read (Is a directory)" in message
    assert message.endswith(f"Received: path='{tmp_path}'")


def test_missing_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "nothing.json"
    for function in (records.sha256, records.read_json, TrainingRecord.load):
        assert f"no such file. Received: path='{path}'" in refused(function, path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as JSON"),
        (b'{"run": ', "cannot be read as JSON"),
        (b"\xff\xfe\x00", "cannot be read as JSON"),
        (b"[1, 2]", "holds no JSON object. Received: list"),
        (b"null", "holds no JSON object"),
        (b"{}", "not a TrainingRecord of this version"),
    ],
)
def test_damaged_records_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "training.json"
    path.write_bytes(content)
    assert message in refused(TrainingRecord.load, path)


def test_record_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    assert "cannot be read as JSON" in refused(TrainingRecord.load, tmp_path)


def test_fields_of_another_version_are_named(tmp_path: Path) -> None:
    path = tmp_path / "training.json"
    values = asdict(TRAINING)
    del values["seconds"]
    records.write_json(path, values | {"minutes": 1})
    message = refused(TrainingRecord.load, path)
    assert "fields that differ: minutes, seconds" in message


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(FINITE, min_size=1), st.text(), st.none() | st.dictionaries(st.text(), FINITE))
def test_records_survive_their_file(
    tmp_path_factory: pytest.TempPathFactory,
    returns: list[float],
    name: str,
    latency: dict[str, float] | None,
) -> None:
    path = tmp_path_factory.getbasetemp() / "record.json"
    record = replace(
        EVALUATION,
        run_id=name,
        protocol={name: name},
        seeds=list(range(len(returns))),
        returns=returns,
        lengths=[1] * len(returns),
        latency_us=latency,
    )
    record.save(path)
    assert Evaluation.load(path) == record


def test_sound_records_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    for record in (TRAINING, SIDECAR, CONTINUOUS, EVALUATION):
        record.save(path)
        assert type(record).load(path) == record
    # JSON has one kind of number: a whole return comes back without its point from other writers.
    path.write_text(json.dumps(asdict(EVALUATION) | {"returns": [9, 10]}))
    assert Evaluation.load(path).returns == [9, 10]


def test_fields_that_older_files_lack_have_their_default(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    values = asdict(SIDECAR)
    del values["action_std"]
    records.write_json(path, values)
    assert Sidecar.load(path) == SIDECAR


@pytest.mark.parametrize(
    ("record", "name", "value"),
    [
        (EVALUATION, "run_id", None),
        (EVALUATION, "ties", 0.5),
        (EVALUATION, "ties", True),
        (EVALUATION, "artifact_sha256", 7),
        (EVALUATION, "seeds", "12"),
        (EVALUATION, "seeds", [1, 2.5]),
        (EVALUATION, "returns", [9.0, "10"]),
        (EVALUATION, "returns", [9.0, None]),
        (EVALUATION, "returns", [9.0, float("nan")]),
        (EVALUATION, "returns", [9.0, float("inf")]),
        (EVALUATION, "returns", [9.0, 10**400]),
        (EVALUATION, "latency_us", {"median": "fast"}),
        (EVALUATION, "latency_us", [9.0]),
        (EVALUATION, "protocol", {"action": 1}),
        (EVALUATION, "seeds", []),
        (EVALUATION, "returns", [9.0]),
        (EVALUATION, "lengths", [9, 10, 11]),
        (EVALUATION, "agreement", {}),
        (SIDECAR, "native", 1),
        (SIDECAR, "size_bytes", "10"),
        (SIDECAR, "size_bytes", 0),
        (SIDECAR, "action_low", ["-1"]),
        (SIDECAR, "action_std", [0.5]),  # Discrete actions have none.
        (CONTINUOUS, "action_std", []),
        (CONTINUOUS, "action_std", [0.5, 0.5]),
        (CONTINUOUS, "action_std", [-0.5]),
        (CONTINUOUS, "action_std", 0.5),
        (SIDECAR, "check", [1]),
        (SIDECAR, "weight_dtypes", {"int8": None}),
        (SIDECAR, "run", {}),
        (TRAINING, "run", {"algo": "dqn", "env_id": "CartPole-v1", "overrides": {}}),
        (TRAINING, "run", TRAINING.run | {"seed": "0"}),
        (TRAINING, "run", TRAINING.run | {"overrides": None}),
        (TRAINING, "selection_return", float("nan")),
        (TRAINING, "preset", None),
    ],
)
def test_values_that_a_field_cannot_have_are_refused(
    tmp_path: Path, record: Any, name: str, value: Any
) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(asdict(record) | {name: value}))
    message = refused(type(record).load, path)
    assert f"{path} is no sound {type(record).__name__}" in message
    assert "run again what made it. Received: " in message
    assert message.split("Received: ")[1].startswith(f"{name}=")


def test_what_was_received_is_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(asdict(EVALUATION) | {"returns": ["ten"] * 10_000}))
    assert len(refused(Evaluation.load, path)) < 300 + len(str(path))


# Finished trainings.


def test_finished_training_is_found(run_folder: Path) -> None:
    assert TrainingRecord.finished(run_folder, RUN, PRESET) == TRAINING


def test_what_presets_did_not_say_then_was_as_it_is_unsaid(run_folder: Path) -> None:
    older = replace(TRAINING, preset={k: v for k, v in TRAINING.preset.items() if k != "dueling"})
    older.save(run_folder / "training.json")
    assert TrainingRecord.finished(run_folder, RUN, PRESET) == older
    message = refused(TrainingRecord.finished, run_folder, RUN, replace(PRESET, dueling=True))
    assert message.endswith("Received: dueling=True for False")


def test_training_without_record_is_not_finished(run_folder: Path) -> None:
    (run_folder / "training.json").unlink()
    assert TrainingRecord.finished(run_folder, RUN, PRESET) is None
    assert TrainingRecord.finished(run_folder / "nowhere", RUN, PRESET) is None


@pytest.mark.parametrize("name", ["network.npz", "calibration.npz"])
def test_changed_files_of_a_training_are_refused(run_folder: Path, name: str) -> None:
    (run_folder / name).write_bytes(b"other")
    message = refused(TrainingRecord.finished, run_folder, RUN, PRESET)
    assert f"{run_folder / name} was changed or damaged after training" in message
    (run_folder / name).unlink()
    message = refused(TrainingRecord.finished, run_folder, RUN, PRESET)
    assert f"no such file. Received: path='{run_folder / name}'" in message


def test_training_with_another_preset_is_refused_naming_what_differs(run_folder: Path) -> None:
    preset = replace(PRESET, steps=20_000, discount=0.9)
    message = refused(TrainingRecord.finished, run_folder, RUN, preset)
    assert "was trained with other settings" in message
    assert message.endswith("Received: discount=0.9 for 0.99, steps=20000 for 50000")


def test_a_training_by_another_version_is_refused(run_folder: Path) -> None:
    replace(TRAINING, preset={**TRAINING.preset, "dithered": True}).save(
        run_folder / "training.json"
    )
    message = refused(TrainingRecord.finished, run_folder, RUN, PRESET)
    assert f"{run_folder} was trained by another version; move it away" in message
    assert "dithered" in message
    with pytest.raises(QuarlError, match="another version"):
        records.require_same_settings(run_folder, {"step": 5}, RUN, PRESET)


def test_training_at_other_bits_is_refused_naming_them(run_folder: Path) -> None:
    run = replace(RUN, quantization=Quantization(bits=4, delay=5))
    message = refused(TrainingRecord.finished, run_folder, run, PRESET)
    assert "quantization.bits=4 for None" in message
    at_four = replace(TRAINING, run=run.to_dict())
    at_four.save(run_folder / "training.json")
    assert TrainingRecord.finished(run_folder, run, PRESET) == at_four
    other = replace(RUN, quantization=Quantization(bits=8, delay=5))
    message = refused(TrainingRecord.finished, run_folder, other, PRESET)
    assert message.endswith("Received: quantization.bits=8 for 4")


def test_a_sidecar_with_an_unknown_option_of_quantisation_is_refused(run_folder: Path) -> None:
    odd = {**TRAINING.run, "quantization": {"bits": 4, "delay": 5, "dithered": True}}
    replace(TRAINING, run=odd).save(run_folder / "training.json")
    assert "dithered" in refused(TrainingRecord.load, run_folder / "training.json")


# Names and versions.


def test_every_file_has_its_own_place(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    artifact = workspace.artifact("dqn-CartPole-v1-s0", "ptq_w8")
    assert artifact.relative_to(tmp_path).parts == (
        "tflite_models",
        "dqn-CartPole-v1-s0",
        "ptq_w8.tflite",
    )
    assert records.sidecar_path(artifact).name == "ptq_w8.json"
    assert records.evaluation_path(artifact).name == "ptq_w8.eval.json"
    assert records.evaluation_path(artifact, sample=True).name == "ptq_w8.sampled.eval.json"
    folders = {workspace.run_dir("x"), workspace.artifact_dir("x"), workspace.report_dir("x")}
    assert {folder.parent.name for folder in folders} == {"runs", "tflite_models", "reports"}


@pytest.mark.parametrize(
    ("run_id", "hint"),
    [
        ("dqn-CartPole-v1-s0/", "give dqn-CartPole-v1-s0"),
        ("runs/dqn-CartPole-v1-s0/", "give dqn-CartPole-v1-s0"),
        ("/", "`quarl list` names the runs"),
        ("", "`quarl list` names the runs"),
        (".", "`quarl list` names the runs"),
        ("..", "`quarl list` names the runs"),
        ("../..", "`quarl list` names the runs"),
    ],
)
def test_run_ids_are_no_paths(tmp_path: Path, run_id: str, hint: str) -> None:
    workspace = Workspace(tmp_path)
    for place in (workspace.run_dir, workspace.artifact_dir):
        with pytest.raises(UsageError) as caught:
            place(run_id)
        assert hint in str(caught.value)
        assert str(caught.value).endswith(f"Received: run={run_id!r}")


def test_versions_are_those_imported() -> None:
    versions = records.package_versions()
    assert versions["numpy"] == np.__version__
    assert "quarl-tf" in versions


def test_commit_is_one_or_unknown() -> None:
    commit = records.source_commit()
    assert commit is None or re.fullmatch(r"[0-9a-f]{12,40}(-dirty)?", commit)


# What has to be exported.


@pytest.fixture
def exported(run_folder: Path) -> Workspace:
    """Return a workspace with a finished run and one flatbuffer, "fp32"."""
    workspace = Workspace(run_folder / "root")
    folder = workspace.run_dir(TRAINING.run_id)
    TRAINING.save(folder / "training.json")
    artifact = workspace.artifact(TRAINING.run_id, "fp32")
    records.write_artifact(artifact, b"flatbuffer", SIDECAR)
    return workspace


def missing(workspace: Workspace, *schemes: str) -> list[str]:
    return records.not_exported(workspace, TRAINING.run_id, schemes)


def test_what_is_there_and_whole_need_not_be_exported(exported: Workspace) -> None:
    assert missing(exported, "fp32") == []
    assert missing(exported, "int8", "fp32", "fp16") == ["int8", "fp16"]


def test_damage_has_to_be_exported_again(exported: Workspace) -> None:
    artifact = exported.artifact(TRAINING.run_id, "fp32")
    sidecar = records.sidecar_path(artifact)
    whole = artifact.read_bytes(), sidecar.read_text()

    artifact.write_bytes(b"flatbuffes")
    assert missing(exported, "fp32") == ["fp32"]
    artifact.unlink()
    assert missing(exported, "fp32") == ["fp32"]
    artifact.write_bytes(whole[0])
    sidecar.write_text(whole[1][:50])
    assert missing(exported, "fp32") == ["fp32"]
    sidecar.unlink()
    assert missing(exported, "fp32") == ["fp32"]
    sidecar.write_text(json.dumps(json.loads(whole[1]) | {"network_sha256": "0" * 64}))
    assert missing(exported, "fp32") == ["fp32"]
    sidecar.write_text(whole[1])
    assert missing(exported, "fp32") == []


def test_flatbuffers_of_an_earlier_training_have_to_be_exported_again(
    exported: Workspace,
) -> None:
    record = replace(TRAINING, network_sha256="1" * 64)
    record.save(exported.run_dir(TRAINING.run_id) / "training.json")
    assert missing(exported, "fp32") == ["fp32"]


def test_flatbuffer_of_another_scheme_has_to_be_exported_again(exported: Workspace) -> None:
    source = exported.artifact(TRAINING.run_id, "fp32")
    target = exported.artifact(TRAINING.run_id, "int8")
    target.write_bytes(source.read_bytes())
    records.sidecar_path(target).write_bytes(records.sidecar_path(source).read_bytes())
    assert missing(exported, "int8") == ["int8"]


def test_only_finished_runs_can_be_exported(exported: Workspace) -> None:
    message = refused(records.not_exported, exported, "dqn-CartPole-v1-s1", ["fp32"])
    assert "The run does not exist; train it first (quarl train" in message
    assert "run='dqn-CartPole-v1-s1'" in message
    (exported.run_dir(TRAINING.run_id) / "training.json").unlink()
    assert "The run is not finished; train it first" in refused(missing, exported, "fp32")
