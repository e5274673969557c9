"""Environments of any spaces from training to evaluation."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from samples import Patch, register, write_presets

from quarl_tf import presets
from quarl_tf.cli import verbs
from quarl_tf.store.records import Evaluation
from quarl_tf.store.workspace import Workspace, evaluation_path


class Copying(gym.Env[Any, Any]):
    """Wants an action that follows from the observation; ten steps, at most 1 for each."""

    def __init__(self, observed: Any, chosen: Any, draw: Any, show: Any, reward: Any) -> None:
        self.observation_space, self.action_space = observed, chosen
        self.draw, self.show, self.reward = draw, show, reward

    def observe(self) -> Any:
        self.target = self.draw(self.np_random)
        return self.show(self.target)

    def reset(self, *, seed: int | None = None, **_: Any) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        reward = float(self.reward(action, self.target))
        self.steps += 1
        return self.observe(), reward, self.steps == 10, False, {}


#: Spaces of observations and actions, what to draw and how to show it, and the reward.
ENVIRONMENTS: dict[str, tuple[Any, ...]] = {
    # Two switches; the second is one-hot.
    "Switches-v0": (
        spaces.Dict(first=spaces.MultiBinary(1), second=spaces.Discrete(3)),
        spaces.MultiDiscrete([2, 3]),
        lambda random: random.integers([2, 3]),
        lambda target: {"first": target[:1].astype(np.int8), "second": target[1]},
        lambda action, target: np.mean(action == target),
    ),
    "Echo-v0": (
        spaces.Tuple([spaces.MultiDiscrete([3]), spaces.MultiBinary(1)]),
        spaces.Discrete(3, start=1),
        lambda random: random.integers(1, 4),
        lambda target: (np.array([target - 1]), np.zeros(1, np.int8)),
        lambda action, target: action == target,
    ),
    "Hand-v0": (
        spaces.Box(-1, 1, (2, 2), np.float64),
        spaces.Box(-1, 1, (2, 2), np.float32),
        lambda random: random.uniform(-0.8, 0.8, (2, 2)),
        lambda target: target,
        lambda action, target: 1 - np.abs(action - target).mean(),
    ),
}


@pytest.fixture(autouse=True)
def registered(monkeypatch: Patch) -> None:
    for name, parts in ENVIRONMENTS.items():
        register(monkeypatch, name, partial(Copying, *parts), max_episode_steps=20)


SHORT = {"steps": 4096, "evaluation_every": 2048, "evaluation_episodes": 8, "discount": 0.1}
PPO = {"epochs": 10, "learning_rate": 0.01}
CASES = [
    ("ppo", "Switches-v0", PPO, 8, 5),
    ("dqn", "Echo-v0", {"n_step": 1}, 9, 4),
    ("ddpg", "Hand-v0", {"batch_size": 64, "num_envs": 4}, 8, 6),
]


@pytest.mark.parametrize(("algo", "env_id", "changes", "least", "chance"), CASES)
def test_a_policy_is_trained_quantised_and_played(
    algo: str, env_id: str, changes: dict[str, Any], least: float, chance: float, tmp_path: Path
) -> None:
    base = presets.load(algo, "MountainCarContinuous-v0" if algo == "ddpg" else "CartPole-v1")
    values = {**asdict(base), **SHORT, **changes, "network": [32]}
    file = write_presets(tmp_path / "presets.yaml", algo, env_id, values)
    words = ["run", env_id, "--algo", algo, "--presets", str(file), "--root", str(tmp_path)]
    assert verbs.main([*words, "--schemes", "fp32,int8", "--episodes", "20", "--no-report"]) == 0
    artifact = Workspace(tmp_path).artifact(f"{algo}-{env_id}-s0", "int8")
    evaluation = Evaluation.load(evaluation_path(artifact))
    assert np.mean(evaluation.returns) > least
    random = Evaluation.load(evaluation_path(artifact.with_name("random.tflite")))
    assert np.mean(random.returns) < chance
    if algo == "ppo":
        assert verbs.main(["evaluate", str(artifact), "--sample", "--episodes", "3"]) == 0
    if env_id == "Switches-v0":
        assert verbs.main(["evaluate", str(artifact), "--epsilon", "0.5", "--episodes", "3"]) == 0
