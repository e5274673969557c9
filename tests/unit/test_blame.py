"""The error of each layer, and recipes chosen by return."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import compiled
import numpy as np
import pandas as pd
import pytest
from samples import MODELS, Artifacts, Capsys, Copy, Patch, printed, refusal, refused

from quarl_tf import environments
from quarl_tf.evaluation.blame import _disagreement, blame
from quarl_tf.evaluation.compare import mean_interval
from quarl_tf.export import auto, calibration, integer
from quarl_tf.export.ptq import quantize
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import Scheme, actions
from quarl_tf.store.records import Sidecar
from quarl_tf.store.workspace import Workspace, blame_path, sidecar_path


def test_layers_before_a_tanh_are_judged_up_to_where_int8_ends(monkeypatch: Patch) -> None:
    path = MODELS / "CartPole-v1/ppo/s0/fp32.tflite"
    monkeypatch.setattr(calibration, "observations", lambda _: compiled.around(path, 500))
    hidden = blame(path.read_bytes(), Policy.load(path), episodes=1)[:-1]
    assert max(max(-row.low, row.high) for row in hidden) == 3.5


def test_heads_in_two_stages_are_judged_as_wholes(artifacts: Artifacts, monkeypatch: Patch) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (200, 6, 6, 2), np.uint8)
    monkeypatch.setattr(calibration, "observations", lambda _: frames)
    monkeypatch.setattr(calibration, "selection_returns", lambda *_: [1.0] * 20)
    path = artifacts["frames"]
    policy = Policy.load(path)
    row = blame(path.read_bytes(), policy, 20)[-1]
    heads = actions.centred(np.array([policy.head(frame) for frame in frames]), 2)
    assert (row.low, row.high) == pytest.approx((heads.min(), heads.max()), rel=1e-3)
    assert row.saturated == 0
    assert row.codes > 256


def test_actions_agree_beyond_their_bounds_and_differ_if_one_does() -> None:
    ends = {"num_actions": None, "action_low": [-1.0, 0.0], "action_high": [1.0, 10.0]}
    policy: Any = Mock(sidecar=Mock(**ends))
    heads = np.array([[3.0, 5.0], [-2.0, 5.0], [0.5, 5.0], [0.5, 5.0]])
    reference_heads = np.array([[2.9, 5.0], [-9.0, 5.0], [0.5, 5.2], [0.5, 5.05]])
    assert _disagreement(heads, reference_heads, policy) == 1 / 4


def test_gains_are_paired_with_an_interval(copy_artifact: Copy, monkeypatch: Patch) -> None:
    base, steady = np.arange(20.0) ** 2, np.tile([2.0, 4.0], 10)
    # Of int8 first, then of the layers by their share of the error.
    returns = [base, base + steady, base, base + 1]
    monkeypatch.setattr(calibration, "selection_returns", lambda *_: list(returns.pop(0)))
    path = copy_artifact("fp32")
    files, write = list[bytes](), integer.quantized
    monkeypatch.setattr(integer, "quantized", lambda *a: files.append(write(*a)) or files[-1])
    rows = sorted(blame(path.read_bytes(), Policy.load(path), 20), key=lambda row: -row.share)
    # One of them is the int8 file that users get.
    assert quantize(path, Scheme.parse("int8")).read_bytes() in files
    steady_gain, no_gain, gain_of_one = (row.gain for row in rows if row.gain)
    assert steady_gain == mean_interval(steady)
    assert 2 < steady_gain.low < steady_gain.mean == 3 < steady_gain.high < 4
    assert (no_gain, gain_of_one) == (mean_interval([0.0] * 20), mean_interval([1.0] * 20))


def test_recipe_and_returns_are_recorded(copy_artifact: Copy, monkeypatch: Patch) -> None:
    monkeypatch.setattr(auto, "_ROLLOUTS", 2)
    scheme = Scheme.parse("int8_auto")
    artifact = quantize(copy_artifact("balancer"), scheme)
    before = Policy.load(artifact).sidecar
    returns = before.check["selection_returns"]
    assert before.check["recipe"] == "int8"  # The first of equal ones.
    assert {"not equalised", "int8_tensor", "head in float"} < returns.keys()
    assert returns["int8"] == max(returns.values())
    other = copy_artifact("fp32")
    elsewhere = Policy(other.read_bytes(), replace(before, env_id="Acrobot-v1"))
    assert "observation_shape=[6]" in refused(calibration.observations, elsewhere, code=1)
    # Recipes are chosen on different episodes, of games with chance.
    with patch.object(environments, "make", wraps=environments.make) as made:
        assert len(set(calibration.selection_returns(Policy.load(other), 5))) > 1
    assert made.call_args.kwargs == {"sticky": 0.25}
    replace(Sidecar.load(sidecar_path(other)), network_sha256="ab" * 32).save(sidecar_path(other))
    assert quantize(other, scheme) == artifact
    after = Policy.load(artifact).sidecar
    assert after.sha256 != before.sha256
    assert after.check["selection_returns"] != returns


@pytest.mark.parametrize(  # No recipe beside int8 is larger than fp32.
    ("noise", "more", "recipe"),
    [(0.5, 0, "hidden_0 and head in float"), (100, 0, "int8"), (0.5, 10**6, "int8")],
)
def test_a_certain_gain_keeps_the_worst_layer_in_float(
    copy_artifact: Copy, monkeypatch: Patch, noise: float, more: int, recipe: str
) -> None:
    random, quantized = np.random.default_rng(0), integer.quantized
    returns = (random.normal(rise, noise, 20) for rise in range(6))
    monkeypatch.setattr(calibration, "selection_returns", lambda *_: next(returns))
    monkeypatch.setattr(integer, "quantized", lambda *a: quantized(*a) + bytes(more))
    monkeypatch.setattr(auto, "errors", lambda *_: {"hidden_0": 2.0, "hidden_1": 1.0, "head": 9.0})
    artifact = quantize(copy_artifact("fp32"), Scheme.parse("int8_auto"))
    assert Policy.load(artifact).sidecar.check["recipe"] == recipe


def test_blame_of_runs_and_float_files(copy_artifact: Copy, tmp_path: Path, capsys: Capsys) -> None:
    path = Workspace(tmp_path).artifact("dqn-CartPole-v1-s0", "fp32")
    copies = [copy_artifact(name).parent for name in ("fp32", "fp16")]
    shutil.copytree(copies[0], path.parent)
    words = ["blame", "--root", str(tmp_path), "--episodes", "2"]
    for policy in ("dqn-CartPole-v1-s0", str(path), str(path.with_name("fp16.tflite"))):
        blame_path(path).unlink(missing_ok=True)
        output = printed(capsys, *words, policy)
        assert f"blame     {blame_path(path)}" in output.replace("\n", "")
        assert all(text in output for text in ("hidden_1", "[95 %]", "quarl quantize"))
        table = pd.read_csv(blame_path(path))
        assert table["layer"].tolist() == ["hidden_0", "hidden_1", "head"]
        assert table["share"].sum() == pytest.approx(1)
        assert (table["low"] < table["high"]).all()
        limits = {"codes": (2, 257), "saturated": (0, 0.1), "noise": (30, 200)}
        for column, ends in (limits | {"disagreement": (0, 0.2)}).items():
            assert table[column].between(*ends, inclusive="left").all()
        assert table["gain"].between(table["gain_low"], table["gain_high"]).all()
        assert set(table["network_sha256"]) == {Policy.load(path).sidecar.network_sha256}
    line = refusal(capsys, *words, "dqn-CartPole-v1-s7", code=1)
    assert "s7/fp32.tflite is not there; make it (quarl export" in line
    assert "scheme='int8'" in refusal(capsys, *words, str(copy_artifact("int8")))
