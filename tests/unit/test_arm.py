"""The benchmark of another processor: what is compared, without the emulator."""

import json
from pathlib import Path

import arm
import gymnasium as gym
import numpy as np
import pytest
from samples import Artifacts, Patch

from quarl_tf import Policy
from quarl_tf.foundation.seeding import environment_seed


def test_heads_are_compared_state_by_state_in_steps_of_codes(artifacts: Artifacts) -> None:
    here = {"actions": np.array([1, 0, 0]), "heads": np.array([[1.0, 2.5], [3, 2], [1, 1]])}
    board = {"actions": np.array([1, 1, 0]), "heads": np.array([[1.0, 2.5], [2, 3], [1, 1]])}
    comparison = arm.comparison(here, board, unit=0.5)
    assert comparison == {"equal_actions": 2, "difference": 2, "lead": 2}
    assert arm.comparison(here, here, None) == {"equal_actions": 3, "difference": 0, "lead": 0}
    # An action of several numbers is equal where all are; it has no lead.
    heads, others = np.array([[0.0, 1.0], [0.25, 0.5]]), np.array([[0.0, 1.0], [0.25, 0.0]])
    here, board = ({"actions": x, "heads": x} for x in (heads, others))
    assert arm.comparison(here, board, 0.25) == {"equal_actions": 1, "difference": 2}
    assert arm.step(artifacts["fp32"].read_bytes()) is None
    assert arm.step(artifacts["steering_int8_io"].read_bytes()) == 1 / 128


@pytest.mark.parametrize("side", arm.HERE)
def test_a_side_replays_through_policy(artifacts: Artifacts, tmp_path: Path, side: str) -> None:
    path, policy = artifacts["int8"], Policy.load(artifacts["int8"])
    states = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    np.save(tmp_path / "states.npy", states)
    jobs = [(path, tmp_path / "states.npy", tmp_path / "replayed.npz")]
    assert arm.replay(side, tmp_path, jobs)["numpy"] == np.__version__
    replayed, step = np.load(tmp_path / "replayed.npz"), arm.step(path.read_bytes())
    heads = [policy.head(state) for state in states]
    np.testing.assert_allclose(replayed["heads"], heads, atol=(side == "built_in") * 1.01 * step)
    assert replayed["actions"].shape == (20,)


def test_each_tenth_state_of_play_is_recorded(artifacts: Artifacts, monkeypatch: Patch) -> None:
    monkeypatch.setattr(arm, "STATES", 3)
    policy = Policy.load(artifacts["balancer"])
    env = gym.make("CartPole-v1")
    state, _ = env.reset(seed=environment_seed(0, "another board", 0))
    states = [state] + [state := env.step(policy.act(state))[0] for _ in range(20)]
    np.testing.assert_array_equal(arm.states(policy), states[::10])


def test_one_run_is_taken_of_each_network(tmp_path: Path) -> None:
    for name, network in (("s1", [64]), ("s0", [64]), ("s0-wide", [256])):
        folder = tmp_path / "Task-v0/dqn" / name
        folder.mkdir(parents=True)
        (folder / "int8.json").write_text(json.dumps({"preset": {"network": network}}))
        for scheme in ("fp32", "int8"):
            (folder / f"{scheme}.tflite").touch()
    (tmp_path / "Task-v0/dqn/s0/fp32.tflite").unlink()
    assert [folder.name for folder in arm.chosen(tmp_path)] == ["s0-wide", "s1"]


def test_rows_that_are_not_measured_again_stay() -> None:
    row, other_row = ({"run_id": run, "env_id": "a", "scheme": "int8", "n": 1} for run in "xy")
    assert arm.merged([other_row, row], [{**row, "n": 2}]) == [{**row, "n": 2}, other_row]


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="apt-get install qemu-user-static debootstrap"):
        arm.file_system(tmp_path / "arm")
    assert not (tmp_path / "arm").exists()
