"""The error of each layer, and recipes chosen by return."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from samples import Artifacts, Capsys, Copy, Patch, refusal

from quarl_tf.cli import main
from quarl_tf.evaluation.blame import _disagreement, blame
from quarl_tf.evaluation.compare import mean_interval
from quarl_tf.export import calibration
from quarl_tf.export.ptq import quantize
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import Scheme
from quarl_tf.store.workspace import Workspace, blame_path, sidecar_path


def test_each_layer_has_its_share_of_the_error(artifacts: Artifacts) -> None:
    path = artifacts["fp32"]
    found = blame(path.read_bytes(), Policy.load(path), episodes=2)
    assert [one.layer for one in found] == ["hidden_0", "hidden_1", "head"]
    assert sum(one.share for one in found) == pytest.approx(1)
    for one in found:
        assert 1 < one.codes <= 256
        assert one.low < one.high
        assert 0 <= one.saturated < 0.1
        assert one.noise > 30
        assert 0 <= one.disagreement < 0.2
        assert one.gain is not None


def test_layers_before_a_tanh_are_judged_up_to_where_int8_ends() -> None:
    path = Path(__file__).parents[2] / "tflite_models/CartPole-v1/ppo/s0/fp32.tflite"
    hidden = blame(path.read_bytes(), Policy.load(path), episodes=1)[:-1]
    assert max(max(-one.low, one.high) for one in hidden) == 3.5


def test_actions_beyond_their_bounds_agree(artifacts: Artifacts) -> None:
    policy = Policy.load(artifacts["steering"])  # One action between -1 and 1.
    found, wanted = np.array([[3.0], [-2.0], [0.5]]), np.array([[2.9], [-9.0], [0.4]])
    assert _disagreement(found, wanted, policy) == pytest.approx(1 / 3)


def test_gains_are_paired_with_an_interval(artifacts: Artifacts, monkeypatch: Patch) -> None:
    base, steady = np.arange(20.0) ** 2, np.tile([2.0, 4.0], 10)
    # Of int8 first, then of the layers by their share of the error.
    returns = [base, base + steady, base, base + 1]
    monkeypatch.setattr(calibration, "selection_returns", lambda *_: list(returns.pop(0)))
    path = artifacts["fp32"]
    found = sorted(blame(path.read_bytes(), Policy.load(path), 20), key=lambda one: -one.share)
    gained, same, all_one = (one.gain for one in found if one.gain)
    assert gained == mean_interval(steady)
    assert 2 < gained.low < gained.mean == 3 < gained.high < 4
    assert (same, all_one) == (mean_interval([0.0] * 20), mean_interval([1.0] * 20))


def test_the_recipe_that_earns_most_is_recorded_with_all_returns(copy_artifact: Copy) -> None:
    scheme, first = Scheme.parse("int8_auto"), copy_artifact("balancer")
    made = quantize(first, scheme)
    before = Policy.load(made).sidecar
    earned = before.check["selection_returns"]
    assert before.check["recipe"] == "int8"  # The first of equal ones.
    assert {"not equalised", "int8_tensor", "head in float"} < earned.keys()
    assert earned["int8"] == max(earned.values())
    assert quantize(copy_artifact("fp32"), scheme, made) == made
    after = Policy.load(made).sidecar
    assert after.sha256 != before.sha256
    assert after.check["selection_returns"] != earned
    # Nothing is written where nothing has changed.
    written = sidecar_path(made).read_bytes()
    quantize(first.with_name("fp32.tflite"), scheme, made)
    assert sidecar_path(made).read_bytes() == written


def test_blame_takes_the_id_of_a_run_or_a_float_file_and_writes_a_table(
    artifacts: Artifacts, copy_artifact: Copy, tmp_path: Path, capsys: Capsys
) -> None:
    path = Workspace(tmp_path).artifact("dqn-CartPole-v1-s0", "fp32")
    shutil.copytree(copy_artifact("fp32").parent, path.parent)
    words = ["blame", "--root", str(tmp_path), "--episodes", "2"]
    for policy in ("dqn-CartPole-v1-s0", str(path)):
        blame_path(path).unlink(missing_ok=True)
        assert main([*words, policy]) == 0
        shown = capsys.readouterr().out
        assert f"blame     {blame_path(path)}" in shown.replace("\n", "")
        assert "hidden_1" in shown
        assert "[95 %]" in shown
        table = pd.read_csv(blame_path(path))
        assert table["layer"].tolist() == ["hidden_0", "hidden_1", "head"]
        assert (table["gain_low"] <= table["gain"]).all()
        assert (table["gain"] <= table["gain_high"]).all()
        assert set(table["sha256"]) == {Policy.load(path).sidecar.sha256}
    assert "s7/fp32.tflite" in refusal(capsys, *words, "dqn-CartPole-v1-s7", code=1)
    assert "scheme='int8'" in refusal(capsys, *words, str(artifacts["int8"]))
