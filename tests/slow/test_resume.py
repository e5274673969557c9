"""An interrupted and resumed training ends with the same bytes as an uninterrupted one."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import Patch, products, silent

from quarl_tf import agents, environments, networks, pipeline, presets
from quarl_tf.environments import airnav, registry
from quarl_tf.spec import Quantization, Run
from quarl_tf.store.workspace import Workspace
from quarl_tf.training.loop import train

BREAKOUT = "BreakoutNoFrameskip-v4"
_BRIEF: dict[str, Any] = {"steps": 512, "num_envs": 2, "network": [8], "train_frequency": 64}
_BRIEF |= {"evaluation_every": 256, "evaluation_episodes": 2, "checkpoint_every": 256}
_OFF_POLICY = {"learning_starts": 64, "batch_size": 16, "gradient_steps": 4}
#: The ring wraps, and the exploration's schedule is under way at any cut.
_DQN = {**_OFF_POLICY, "exploration_fraction": 1.0, "buffer_size": 400}
_DDPG = {**_OFF_POLICY, "layer_norm": True}
_PPO = {"minibatch_size": 32, "epochs": 2}
_A2C = {"minibatch_size": 64}
_IMAGES: dict[str, Any] = {"steps": 256, "network": "li", "train_frequency": 32}
_IMAGES |= {"evaluation_every": 128, "checkpoint_every": 128}
_DQN_IMAGES = {**_IMAGES, "batch_size": 4, "gradient_steps": 1, "buffer_size": 100, "dueling": True}
_PPO_IMAGES = {**_IMAGES, "minibatch_size": 16, "epochs": 1, "precision": "bfloat16"}


def aware(delay: int, **options: Any) -> Quantization:
    return Quantization.from_mapping({"bits": 4, "delay": delay, **options})


_FEW_BITS = presets.quantization("dqn", {"bits": 4, "delay": 100})

#: Algorithm, environment, changes of the preset of another environment, and quantisation; the
#: checkpoint that is resumed lies behind a delay of 100, before one of 350.
KINDS: dict[str, tuple[str, str, dict[str, Any], str, Quantization | None]] = {
    "dqn": ("dqn", "CartPole-v1", {**_DQN, "dueling": True}, "CartPole-v1", None),
    "dqn of images at 4 bits": ("dqn", BREAKOUT, {**_DQN, **_DQN_IMAGES}, BREAKOUT, _FEW_BITS),
    "dqn of a task that rises": ("dqn", "AirNav-v0", _DQN, "AirNav-v0", None),
    "ppo of images": ("ppo", BREAKOUT, {**_PPO, **_PPO_IMAGES}, BREAKOUT, None),
    "a2c at 4 bits": ("a2c", "CartPole-v1", _A2C, "CartPole-v1", aware(350)),
    "continuous ppo": ("ppo", "Pendulum-v1", _PPO, "CartPole-v1", None),
    "learned steps": ("ppo", "CartPole-v1", _PPO, "CartPole-v1", aware(100, learned_steps=True)),
    "ddpg": ("ddpg", "Pendulum-v1", _DDPG, "MountainCarContinuous-v0", None),
    "ddpg at 4 bits": ("ddpg", "Pendulum-v1", _OFF_POLICY, "MountainCarContinuous-v0", aware(350)),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_resumed_trainings_give_same_bytes(kind: str, tmp_path: Path, monkeypatch: Patch) -> None:
    # A game takes 60 ticks.
    monkeypatch.setitem(registry.find(BREAKOUT).kwargs, "max_num_frames_per_episode", 240)
    # The task becomes harder during the training.
    monkeypatch.setattr(airnav, "REACHED", 12.0)
    monkeypatch.setattr(airnav, "_SUCCESSES", 2)
    algo, env_id, changes, preset_of, quantization = KINDS[kind]
    preset = presets.load(algo, preset_of, {**_BRIEF, **changes})
    run = Run(algo, env_id, 3, {}, quantization)
    uncut = cut_and_resumed(run, preset, tmp_path)
    # Every trainable variable has changed.
    initial = agents.build_network(run.algo, environments.env_spec(run.env_id), preset, run.seed)
    learned = networks.load_weights(uncut.run_dir(run.run_id) / "network.npz")
    for variable in initial.trainable_variables:
        assert not np.array_equal(learned[variable.name], variable.numpy()), variable.name
    curve = (uncut.run_dir(run.run_id) / "progress.csv").read_text()
    assert ("action_variance" in curve) == (run.algo in ("a2c", "ppo"))


def cut_and_resumed(run: Run, preset: Any, folder: Path) -> Workspace:
    """Train without and with an interruption after the last checkpoint; return the former."""
    uncut, cut = Workspace(folder / "uncut"), Workspace(folder / "cut")

    def keep(step: int, steps: int, _: str) -> None:
        if step >= steps:
            shutil.copytree(uncut.root, cut.root)

    train(uncut, run, keep, preset)
    started: list[int] = []
    train(cut, run, lambda done, *_: started.append(done), preset)
    assert preset.checkpoint_every < started[0] < 0.8 * preset.steps
    assert products(cut.run_dir(run.run_id)) == products(uncut.run_dir(run.run_id))
    return uncut


def test_a_resumed_distillation_gives_same_bytes(tmp_path: Path) -> None:
    first = Run("dqn", "CartPole-v1", 3, {**_BRIEF, **_DQN})
    train(Workspace(tmp_path / "uncut"), first, silent)
    run = replace(first, overrides={**first.overrides, "distillation": 5.0}, quantization=_FEW_BITS)
    preset = pipeline.preset_of(run)
    run = pipeline.with_origin(Workspace(tmp_path / "uncut"), first.run_id, run, preset)
    cut_and_resumed(run, preset, tmp_path)
