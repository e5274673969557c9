"""What a training learns and writes, and what it refuses."""

import errno
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pandas
import pytest
from gymnasium.envs.registration import EnvSpec
from samples import Patch, products, refused, silent, snapshot

from quarl_tf import agents, environments, networks, presets
from quarl_tf.foundation.files import locked
from quarl_tf.foundation.seeding import environment_seed
from quarl_tf.networks import inference
from quarl_tf.quantization import quantizing
from quarl_tf.spec import Quantization, Run
from quarl_tf.store.records import TrainingRecord
from quarl_tf.store.workspace import Workspace
from quarl_tf.training import checkpoint, loop
from quarl_tf.training.loop import CALIBRATION_OBSERVATIONS, train
from quarl_tf.training.rollout import rollout

LENGTH = 6


class Corridor(gym.Env[Any, Any]):
    """Every step costs 1 until the right end; the place is shown as one of six."""

    observation_space = gym.spaces.Box(0, 1, (LENGTH,))
    action_space = gym.spaces.Discrete(2)

    def _observation(self) -> np.ndarray:
        return np.eye(LENGTH, dtype=np.float32)[min(self.place, LENGTH - 1)]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.place = max(0, self.place + 2 * int(action) - 1)
        return self._observation(), -1.0, self.place == LENGTH, False, {}


_COMMON: dict[str, Any] = {"steps": 3000, "num_envs": 4, "network": [32], "discount": 0.95}
_COMMON |= {"evaluation_every": 1000, "evaluation_episodes": 2, "checkpoint_every": 1000}
_COMMON |= {"learning_rate": 0.003, "learning_rate_decay": False}
_DQN = {"learning_starts": 200, "buffer_size": 3000, "batch_size": 32, "n_step": 1}
_DQN |= {"train_frequency": 32, "gradient_steps": 16, "target_update": 32}
_PPO = {"train_frequency": 128, "minibatch_size": 64, "epochs": 10, "gae_lambda": 0.95}
_A2C = {"train_frequency": 32, "minibatch_size": 32, "gae_lambda": 1.0, "steps": 6000}


@pytest.mark.parametrize(
    ("algo", "changes"),
    [("dqn", {**_DQN, "exploration_fraction": 0.5}), ("ppo", _PPO), ("a2c", _A2C)],
)
def test_every_one_learns_what_comes_later(
    algo: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: Patch
) -> None:
    spec = EnvSpec("Corridor-v0", Corridor, max_episode_steps=40)
    monkeypatch.setitem(gym.registry, spec.id, spec)
    preset = presets.load(algo, "CartPole-v1", {**_COMMON, **changes})
    run, workspace = Run(algo, spec.id, 0), Workspace(tmp_path)
    assert train(workspace, run, silent, preset).selection_return == -LENGTH
    network = trained_network(run, preset, workspace)
    heads = inference.forward(network)(np.eye(LENGTH, dtype=np.float32))
    assert (heads.argmax(axis=1) == 1).all()
    if algo == "dqn":
        # It also knows what every place is worth: its steps to the end, discounted.
        exact = [-sum(0.95**i for i in range(LENGTH - place)) for place in range(LENGTH)]
        np.testing.assert_allclose(heads.max(axis=1), exact, atol=0.25)


def trained_network(run: Run, preset: presets.Preset, workspace: Workspace) -> Any:
    network = agents.build_network(run.algo, environments.env_spec(run.env_id), preset, 0)
    weights = networks.load_weights(workspace.run_dir(run.run_id) / "network.npz")
    networks.set_weights(network, weights)
    return network


@pytest.fixture
def folder(trained: Workspace, tiny_run: Run) -> Path:
    """Return the folder of a finished training."""
    return trained.run_dir(tiny_run.run_id)


def curves(folder: Path) -> pandas.DataFrame:
    return pandas.read_csv(folder / "progress.csv")


@pytest.fixture
def cut_off(tiny_run: Run, tmp_path: Path) -> Workspace:
    """Return the workspace of a training that was killed after its last step."""

    def kill(step: int, steps: int, _: str) -> None:
        if step >= steps:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(Workspace(tmp_path), tiny_run, kill)
    return Workspace(tmp_path)


def test_kept_network_is_the_best_on_selection_seeds(tiny_run: Run, folder: Path) -> None:
    record = TrainingRecord.load(folder / "training.json")
    evaluated = curves(folder).dropna(subset="greedy_return")
    assert len(evaluated) >= tiny_run.overrides["steps"] // tiny_run.overrides["evaluation_every"]
    # The later of two that are equally good.
    best = max(zip(evaluated.greedy_return, evaluated.step, strict=True))
    assert (record.selection_return, record.best_step) == best
    assert evaluated.seconds.iloc[-1] <= record.seconds


def test_curves_have_a_row_per_hundredth_of_the_training(tiny_run: Run, folder: Path) -> None:
    curve, overrides = curves(folder), tiny_run.overrides
    columns = ["step", "seconds", "episodes", "episode_return", "greedy_return", "loss"]
    assert list(curve) == columns
    assert any((folder / "tensorboard").iterdir())
    last = curve.step.iloc[-1]
    assert overrides["steps"] <= last < overrides["steps"] + overrides["train_frequency"]
    # A hundredth is less than a burst here, so every burst has its row; resets are no steps.
    assert np.diff(curve.step, prepend=0).min() > 0
    assert np.diff(curve.step, prepend=0).max() <= overrides["train_frequency"]
    assert (np.diff(curve.seconds, prepend=0) >= 0).all()
    # CartPole pays 1 a step, and an episode is 1 to 500 steps long.
    assert curve.episode_return.dropna().between(1, 500).all()
    assert 1 <= last / curve.episodes.iloc[-1] <= 500
    losses = curve.loss.dropna()
    assert len(losses) >= (curve.step > overrides["learning_starts"]).sum()
    assert np.isfinite(losses).all()


def test_training_stops_at_the_return_that_was_asked_for(tiny_run: Run, tmp_path: Path) -> None:
    # Any policy reaches this return at the first evaluation.
    run = replace(tiny_run, overrides={**tiny_run.overrides, "until": 1})
    record = train(Workspace(tmp_path), run, silent)
    last = curves(Workspace(tmp_path).run_dir(run.run_id)).iloc[-1]
    assert record.best_step == last.step < run.overrides["steps"]
    assert record.selection_return == last.greedy_return >= 1


def test_calibration_is_of_what_the_kept_network_sees(
    trained: Workspace, tiny_run: Run, folder: Path
) -> None:
    observations = networks.load_weights(folder / "calibration.npz")["observations"]
    assert 0 < len(observations) <= CALIBRATION_OBSERVATIONS
    assert observations.dtype == np.float32
    preset = presets.load("dqn", "CartPole-v1", tiny_run.overrides)
    head = inference.Snapshot(trained_network(tiny_run, preset, trained))
    envs = environments.make_vector("CartPole-v1", preset.evaluation_episodes)
    seed = environment_seed(tiny_run.seed, "calibration", int(curves(folder).step.iloc[-1]))
    played = rollout(envs, lambda x, _: head(x).argmax(axis=1), seed, CALIBRATION_OBSERVATIONS)
    np.testing.assert_allclose(observations, played.observations, rtol=1e-6)


@pytest.mark.parametrize("change", ["a variable less", "another shape", "a state less"])
def test_checkpoints_of_others_are_kept(cut_off: Workspace, tiny_run: Run, change: str) -> None:
    folder = cut_off.run_dir(tiny_run.run_id) / "checkpoints"
    newest = max(folder.glob("*.npz"))
    arrays, state = checkpoint.load(newest) or ({}, {})
    if change == "a state less":
        del state["sources"]
    else:
        del arrays["variable/0"]
    if change == "another shape":
        arrays["variable/0"] = np.zeros([3, 3, 3], np.float32)
    checkpoint.save(folder, int(newest.stem), arrays, state)
    content = newest.read_bytes()
    assert "Another version" in refused(train, cut_off, tiny_run, silent)
    assert newest.read_bytes() == content


def test_unfinished_run_of_another_preset_is_refused(cut_off: Workspace, tiny_run: Run) -> None:
    other = replace(tiny_run, overrides={**tiny_run.overrides, "discount": 0.5})
    cut_off.run_dir(tiny_run.run_id).rename(cut_off.run_dir(other.run_id))
    before = snapshot(cut_off.root)
    assert "discount=0.5 for 0." in refused(train, cut_off, other, silent)
    assert snapshot(cut_off.root) == before


def test_damage_costs_a_checkpoint_and_a_record_names_all_commits_and_processors(
    cut_off: Workspace, tiny_run: Run, folder: Path, monkeypatch: Patch
) -> None:
    resumed = cut_off.run_dir(tiny_run.run_id)
    before, newest = sorted((resumed / "checkpoints").glob("*.npz"))
    newest.write_bytes(newest.read_bytes()[:-9])
    monkeypatch.setattr(loop.provenance, "source_commit", lambda: "fedcba987654")
    monkeypatch.setattr(loop.provenance, "processor", lambda: "Beta with asimd")
    steps = []
    record = train(cut_off, tiny_run, lambda step, *_: steps.append(step))
    # It resumed the checkpoint before the damaged one.
    assert int(before.stem) < steps[0] <= int(newest.stem)
    assert products(resumed) == products(folder)
    expected = TrainingRecord.load(folder / "training.json")
    assert record.commits == [*expected.commits, "fedcba987654"]
    assert record.processors == [*expected.processors, "Beta with asimd"]


def test_a_run_that_another_process_trains_is_refused(tiny_run: Run, tmp_path: Path) -> None:
    folder = Workspace(tmp_path).run_dir(tiny_run.run_id)
    with locked(folder, "held by the test"):
        message = refused(train, Workspace(tmp_path), tiny_run, silent)
        assert "Received: run='dqn-" in message
        assert not any(folder.iterdir())


def test_full_disk_is_one_line_and_training_goes_on_later(
    tiny_run: Run, folder: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    workspace, fsync = Workspace(tmp_path), os.fsync
    # A run folder half written, without a checkpoint to resume.
    unfinished = workspace.run_dir(tiny_run.run_id)
    (unfinished / "checkpoints").mkdir(parents=True)
    (unfinished / "progress.csv").write_text("step,episode_return\n64,1")
    (unfinished / "network.npz").write_bytes(b"PK\x03\x04")

    def fills_up(handle: int) -> None:
        # The disk is full after the first checkpoint.
        if any((unfinished / "checkpoints").glob("*.npz")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fills_up)
        assert "No space left" in refused(train, workspace, tiny_run, silent)
    assert not list(unfinished.rglob("*.tmp"))
    assert not (unfinished / "training.json").exists()
    steps: list[int] = []
    train(workspace, tiny_run, lambda done, *_: steps.append(done))
    assert steps[0] > tiny_run.overrides["checkpoint_every"]
    assert products(unfinished) == products(folder)


@pytest.mark.parametrize("name", ["network.npz", "calibration.npz"])
def test_changed_network_is_refused(
    trained: Workspace, tiny_run: Run, tmp_path: Path, name: str
) -> None:
    copy = Workspace(shutil.copytree(trained.root, tmp_path / "copy"))
    path = copy.run_dir(tiny_run.run_id) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    before = snapshot(copy.root)
    assert f"{path} was changed or damaged" in refused(train, copy, tiny_run, silent)
    path.unlink()
    assert f"Received: path='{path}'" in refused(train, copy, tiny_run, silent)
    del before[str(path.relative_to(copy.root))]
    assert snapshot(copy.root) == before


@pytest.mark.parametrize("steps_between_evaluations", [64, 5000])
def test_a_reward_that_is_not_finite_is_not_called_divergence(
    steps_between_evaluations: int, tiny_run: Run, broken_reward: str, tmp_path: Path
) -> None:
    overrides = {**tiny_run.overrides, "evaluation_every": steps_between_evaluations}
    preset = presets.load("dqn", "CartPole-v1", overrides)
    run = Run("dqn", broken_reward, 0)
    assert "return=nan" in refused(train, Workspace(tmp_path), run, silent, preset)


def begun(folder: Path, run: Run) -> loop._Training:
    return loop._Training(folder, run, presets.load(run.algo, run.env_id, run.overrides))


def test_actions_and_heads_beyond_numbers_are_divergence(tiny_run: Run, tmp_path: Path) -> None:
    state = begun(tmp_path, tiny_run)
    state.collector._actions = np.array([[np.nan]])
    state.collector._running_returns[:] = np.nan  # Whatever they earn.
    assert "Training diverged" in refused(state._require_finite_loss, math.nan)
    weights = networks.weights(state.agent.network)
    networks.set_weights(state.agent.network, {n: v * np.nan for n, v in weights.items()})
    assert "a head that is not finite at step 0" in refused(state.greedy, "selection")


def test_only_states_of_the_episodes_count_for_the_action_variance(tmp_path: Path) -> None:
    run = Run("ppo", "CartPole-v1", 0, {"network": [8], "evaluation_episodes": 6})
    state = begun(tmp_path, run)
    lengths = state.greedy("selection").returns  # A reward of 1 for every state.
    assert len(set(lengths)) > 1
    assert sum(map(len, state._variances)) == sum(lengths)


def test_what_is_chosen_by_is_the_network_as_exported(tmp_path: Path, monkeypatch: Patch) -> None:
    overrides = {"network": "li", "precision": "bfloat16", "evaluation_episodes": 1}
    quantization = Quantization.from_mapping({"bits": 3, "delay": 1})
    run = Run("ppo", "PongNoFrameskip-v4", 0, overrides, quantization)
    state = begun(tmp_path, run)
    frames = np.random.default_rng(0).integers(0, 256, (200, 84, 84, 4), np.uint8)
    state.agent.network(frames, training=True)
    state._start_quantization(1)

    played = np.ones(len(frames), np.bool_)
    monkeypatch.setattr(loop.rollout, "rollout", lambda _, act, *__: act(frames, played))
    preset = replace(state._preset, precision="float32")
    network = agents.build_network(run.algo, state._spec, preset, run.seed)
    network = quantizing(quantization)(network)
    networks.set_weights(network, networks.weights(state.agent.network))
    heads = inference.forward(network)(frames)
    np.testing.assert_array_equal(state.greedy("selection"), heads.argmax(axis=1))
    # In bfloat16, as trained, some differ.
    assert not np.array_equal(inference.forward(state.agent.network)(frames), heads)
