"""The shelf picks by selection seeds, and says where a policy is."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from samples import EVALUATION, SIDECAR, Patch, quantised, refused

from quarl_tf.evaluation.shelf import available, shelf, take
from quarl_tf.runtime import POLICIES
from quarl_tf.spec import Run
from quarl_tf.store.records import Evaluation, Protocol, Sidecar

NAME = "CartPole-v1/dqn/int8"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Two trainings of one task: the second did better on selection seeds."""
    for seed, greedy in ((0, 450.0), (1, 500.0)):
        folder = tmp_path / f"tflite_models/CartPole-v1/dqn/s{seed}"
        shutil.copytree(POLICIES / "CartPole-v1/dqn/s0", folder)
        sidecar = Sidecar.load(folder / "int8.json")
        run = replace(Run.from_dict(sidecar.run), seed=seed)
        replace(sidecar, run=run.to_dict(), run_id=run.run_id).save(folder / "int8.json")
        rows = f"step,greedy_return\n1000,{greedy}\n2000,\n3000,100.0\n"
        (folder / "progress.csv").write_text(rows)
    return tmp_path / "tflite_models"


def test_the_best_on_selection_seeds_stands_for_its_task(models: Path) -> None:
    (models / "CartPole-v1/dqn/s0/bench.json").write_text('{"artifacts": []}')  # No policy.
    (entry,) = shelf(models)
    assert (entry.name, entry.run.seed) == (NAME, 1)
    assert take(NAME, models) == models / "CartPole-v1/dqn/s1/int8.tflite"
    # A task in a namespace is named as its folder.
    (models / "CartPole-v1").rename(models / "mine_CartPole-v1")
    assert take(f"mine_{NAME}", models) == models / "mine_CartPole-v1/dqn/s1/int8.tflite"


def test_the_steadier_of_equals_comes_first_and_what_has_no_curve_last(models: Path) -> None:
    first, second = (models / f"CartPole-v1/dqn/s{seed}/progress.csv" for seed in (0, 1))
    before = first.read_bytes()
    first.write_bytes(b"step,greedy_return\n1000,450.0\n2000,\n3000,500.0\n")
    assert [entry.run.seed for entry in shelf(models)] == [0]
    first.write_bytes(before)
    for rows in (b"step,loss\n1,2\n", b"step,greedy_return\nten,500\n", b"step\n", b"step,\xe9"):
        second.write_bytes(rows)
        assert [entry.run.seed for entry in shelf(models)] == [0]


def test_a_damaged_policy_is_refused_and_hides_no_other(models: Path) -> None:
    names = [entry.name for entry in available(models)]
    (models / "CartPole-v1/dqn/s1/int8.json").write_text("{")
    (models / "CartPole-v1/dqn/s1/fp16.json").write_text('{"run_id": 1}')
    assert [entry.name for entry in available(models)] == [name for name in names if name != NAME]
    assert "s1/int8.json cannot be read as JSON" in refused(take, NAME, models)
    assert take("LunarLander-v3/ppo/int8", models).exists()


def test_what_a_network_earned_before_the_delay_does_not_count(models: Path) -> None:
    for folder in (models / "CartPole-v1/dqn").iterdir():
        sidecar = Sidecar.load(folder / "int8.json")
        run = replace(Run.from_dict(sidecar.run), quantization=quantised(bits=8, delay=1000))
        replace(sidecar, run=run.to_dict(), run_id=run.run_id).save(folder / "int8.json")
    # The burst that crosses the delay ends in float.
    rows = "step,greedy_return\n1000,450.0\n1001,450.0\n2000,\n3000,300.0\n"
    (models / "CartPole-v1/dqn/s0/progress.csv").write_text(rows)
    assert [entry.run.seed for entry in shelf(models)] == [0]


def test_returns_stand_beside_those_of_its_fp32_in_the_same_episodes(models: Path) -> None:
    (entry,) = shelf(models)
    fp32, int8 = (entry.artifact.with_name(f"{name}.eval.json") for name in ("fp32", "int8"))
    values = {"seeds": [1, 2, 3], "returns": [9.0, 10.0, 99.0], "lengths": [9, 10, 99]}
    reference = replace(EVALUATION, run_id=entry.run.run_id, **values)
    reference.save(fp32)
    played = replace(EVALUATION, returns=[7.0, 9.0], artifact_sha256=entry.sidecar.sha256)
    for changes, mean, percent in (
        ({"seeds": [1, 3]}, None, None),
        ({"protocol": Protocol(0, "greedy")}, None, None),
        ({"env_id": "CartPole-v0"}, None, None),
        ({}, 9.5, 100 * 1.5 / 9.5),
    ):
        replace(played, scheme="int8", **changes).save(int8)
        outcome = entry.outcome()
        assert (outcome.mean_return, outcome.reference_mean) == (8.0, mean)
        assert outcome.error_percent == (percent and pytest.approx(percent))
    # Those of another flatbuffer are not compared.
    for fp32_sha256, compared in (("0" * 64, False), (SIDECAR.sha256, True)):
        replace(SIDECAR, sha256=fp32_sha256).save(entry.artifact.with_name("fp32.json"))
        assert (entry.comparison() is not None) == compared
    replace(played, scheme="int8", reference_sha256="0" * 64).save(int8)  # Beside another fp32.
    assert entry.comparison() is None
    replace(played, scheme="int8").save(int8)
    for changes in ({"run_id": "dqn-CartPole-v1-s0"}, {"scheme": "int8"}):
        replace(reference, **changes).save(fp32)
        assert entry.comparison() is None
    EVALUATION.save(int8)
    assert entry.comparison() is entry.evaluation() is None


def test_policies_of_the_package_are_copied_to_where_results_can_lie(tmp_path: Path) -> None:
    where, file = (NAME, tmp_path / "mine"), "CartPole-v1/dqn/s0/int8.tflite"
    fp32, advice = NAME.replace("int8", "fp32"), "The repository has more policies"
    assert advice in refused(take, fp32, where[1])
    artifact = take(*where)
    assert advice in refused(take, fp32, where[1])
    reference = artifact.with_name("fp32.eval.json")
    assert artifact == tmp_path / "mine" / file
    assert artifact.read_bytes() == (POLICIES / file).read_bytes()
    assert reference.exists()
    assert take(*where) == artifact
    artifact.with_suffix(".json").unlink()  # What a killed copy has left is fixed.
    EVALUATION.save(reference)
    assert take(*where) == artifact
    assert Sidecar.load(artifact.with_suffix(".json")).scheme == "int8"
    assert Evaluation.load(reference) != EVALUATION
    artifact.write_bytes(b"mine")  # A file of one's own is not replaced.
    artifact.with_suffix(".json").unlink()
    assert "among the files of another training" in refused(take, *where)
    assert artifact.read_bytes() == b"mine"
    artifact.unlink()  # Nor does one of the package join another training.
    SIDECAR.save(artifact.with_name("ptq_w4.json"))
    assert "among the files of another training" in refused(take, *where)
    assert not artifact.exists()


def test_what_is_not_there_names_the_closest_or_the_command_that_makes_it(
    models: Path, monkeypatch: Patch
) -> None:
    assert NAME in refused(take, "CartPole-v1/dqn/int9", models, code=2)
    folder = models / "CartPole-v1/dqn/s1"
    (folder / "int8.tflite").unlink()
    # One that is kept comes before a better one.
    others = [path for path in folder.parent.rglob("int8.tflite") if take(NAME, models) == path]
    assert len(others) == 1
    others[0].unlink()
    assert take(NAME, models) == others[0]  # The package has it.
    others[0].unlink()
    monkeypatch.setattr("quarl_tf.evaluation.shelf.POLICIES", models / "none")
    assert re.search("quarl run .*--seed 1 --schemes int8", refused(take, NAME, models))
    (folder / "fp32.tflite").touch()
    for check, option in (({}, ""), ({"recorded_sha256": "ab"}, " --observations FILE")):
        replace(Sidecar.load(folder / "int8.json"), check=check).save(folder / "int8.json")
        command = f"quarl quantize {folder / 'fp32.tflite'} --scheme int8{option}"
        assert [entry.command() for entry in shelf(models)] == [command]
