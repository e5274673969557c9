"""Layers are judged one by one, and recipes chosen by return."""

import pandas as pd
import pytest
from samples import Artifacts, Capsys, Copy

from quarl_tf.cli import main
from quarl_tf.export.blame import blame
from quarl_tf.export.ptq import quantize
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import Scheme


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


def test_the_recipe_that_earns_most_is_taken_and_the_others_are_told(copy_artifact: Copy) -> None:
    made = quantize(copy_artifact("balancer"), Scheme.parse("int8_auto"))
    check = Policy.load(made).sidecar.check
    earned = check["selection_returns"]
    assert check["recipe"] == "int8"  # The first of those that are equal.
    assert earned["int8"] == max(earned.values())


def test_blame_is_a_verb_for_float_files_and_keeps_its_table(
    artifacts: Artifacts, capsys: Capsys
) -> None:
    path = artifacts["fp32"]
    assert main(["blame", str(path), "--episodes", "1"]) == 0
    assert "hidden_1" in capsys.readouterr().out
    table = pd.read_csv(path.with_name("fp32.blame.csv"))
    assert table["layer"].tolist() == ["hidden_0", "hidden_1", "head"]
    assert set(table["sha256"]) == {Policy.load(path).sidecar.sha256}
    assert main(["blame", str(artifacts["int8"])]) == 2
    assert "scheme='int8'" in capsys.readouterr().err
