"""Everything has its place, and what is there is whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from samples import SIDECAR, TRAINING, refused

from quarl_tf.foundation.errors import UsageError
from quarl_tf.store.state import not_exported
from quarl_tf.store.workspace import Workspace, evaluation_path, sidecar_path, write_artifact


def test_every_file_has_its_own_place(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    artifact = workspace.artifact("dqn-CartPole-v1-s0", "ptq_w8")
    assert artifact.relative_to(tmp_path).parts == (
        "tflite_models",
        "CartPole-v1",
        "dqn",
        "s0",
        "ptq_w8.tflite",
    )
    assert sidecar_path(artifact).name == "ptq_w8.json"
    assert evaluation_path(artifact).name == "ptq_w8.eval.json"
    assert evaluation_path(artifact, sample=True).name == "ptq_w8.sampled.eval.json"
    assert workspace.run_dir("x") == tmp_path / "runs" / "x"
    assert workspace.report_dir("x") == tmp_path / "reports" / "x"


@pytest.mark.parametrize(
    "run_id", ["ppo-Foo-s3-v1-s12", "dqn-CartPole-v1-s0-1c09e6d5-q4d50-0a1b2c3d", "a2c-a_b-v0-s1"]
)
def test_runs_are_listed_by_their_ids(tmp_path: Path, run_id: str) -> None:
    workspace = Workspace(tmp_path)
    workspace.artifact_dir(run_id).mkdir(parents=True)
    assert workspace.run_ids() == [run_id]


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


def test_flatbuffer_that_cannot_be_replaced_has_no_sidecar(tmp_path: Path) -> None:
    path = tmp_path / "int8.tflite"
    path.mkdir()  # A folder cannot be replaced by a file.
    sidecar_path(path).write_text("{}")
    assert "Cannot write" in refused(write_artifact, path, b"new", SIDECAR)
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def exported(tmp_path: Path) -> Workspace:
    """Return a workspace with a finished run and one flatbuffer, "fp32"."""
    workspace = Workspace(tmp_path)
    folder = workspace.run_dir(TRAINING.run_id)
    TRAINING.save(folder / "training.json")
    artifact = workspace.artifact(TRAINING.run_id, "fp32")
    write_artifact(artifact, b"flatbuffer", SIDECAR)
    return workspace


def missing(workspace: Workspace, *schemes: str) -> list[str]:
    return not_exported(workspace, TRAINING.run_id, schemes)


def test_what_is_there_and_whole_need_not_be_exported(exported: Workspace) -> None:
    assert missing(exported, "fp32") == []
    assert missing(exported, "int8", "fp32", "fp16") == ["int8", "fp16"]


def test_damage_has_to_be_exported_again(exported: Workspace) -> None:
    artifact = exported.artifact(TRAINING.run_id, "fp32")
    sidecar = sidecar_path(artifact)
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
    sidecar_path(target).write_bytes(sidecar_path(source).read_bytes())
    assert missing(exported, "int8") == ["int8"]


def test_only_finished_runs_can_be_exported(exported: Workspace) -> None:
    message = refused(not_exported, exported, "dqn-CartPole-v1-s1", ["fp32"])
    assert "The run does not exist; train it first (quarl train" in message
    assert "run='dqn-CartPole-v1-s1'" in message
    (exported.run_dir(TRAINING.run_id) / "training.json").unlink()
    assert "The run is not finished; train it first" in refused(missing, exported, "fp32")
