"""Environments of any spaces from training to evaluation."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml
from gymnasium import spaces
from samples import Capsys, refusal

from quarl_tf import presets
from quarl_tf.cli import verbs
from quarl_tf.store.records import Evaluation
from quarl_tf.store.workspace import Workspace, evaluation_path


class Copying(gym.Env[Any, Any]):
    """Asks for an action that follows from the observation; ten steps, at most 1 for each."""

    observe: Any
    reward: Any

    def reset(self, *, seed: int | None = None, **_: Any) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        reward = float(self.reward(action))
        self.steps += 1
        return self.observe(), reward, self.steps == 10, False, {}


class Switches(Copying):
    """Two switches to set as a dictionary says; the second is told one-hot."""

    observation_space = spaces.Dict(first=spaces.MultiBinary(1), second=spaces.Discrete(3))
    action_space = spaces.MultiDiscrete([2, 3])

    def observe(self) -> Any:
        self.wanted = self.np_random.integers([2, 3])
        return {"first": self.wanted[:1].astype(np.int8), "second": self.wanted[1]}

    def reward(self, action: Any) -> Any:
        return np.mean(action == self.wanted)


class Echo(Copying):
    """Actions are 1 to 3, in a tuple of two halves."""

    observation_space = spaces.Tuple([spaces.MultiDiscrete([3]), spaces.MultiBinary(1)])
    action_space = spaces.Discrete(3, start=1)

    def observe(self) -> Any:
        self.wanted = self.np_random.integers(1, 4)
        return np.array([self.wanted - 1]), np.zeros(1, np.int8)

    def reward(self, action: Any) -> Any:
        return action == self.wanted


class Hand(Copying):
    """Follows a matrix of targets."""

    observation_space = spaces.Box(-1, 1, (2, 2), np.float64)
    action_space = spaces.Box(-1, 1, (2, 2), np.float32)

    def observe(self) -> Any:
        self.wanted = self.np_random.uniform(-0.8, 0.8, (2, 2))
        return self.wanted

    def reward(self, action: Any) -> Any:
        return 1 - np.abs(action - self.wanted).mean()


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    names = [f"{kind.__name__}-v0" for kind in (Switches, Echo, Hand)]
    for name, kind in zip(names, (Switches, Echo, Hand), strict=True):
        gym.register(name, kind, max_episode_steps=20)
    yield
    for name in names:
        del gym.registry[name]


SHORT = {"steps": 4096, "evaluation_every": 2048, "evaluation_episodes": 8, "discount": 0.1}
PPO = {"epochs": 10, "learning_rate": 0.01}
CASES = [
    ("ppo", Switches, PPO, 8, 5),
    ("a2c", Switches, {"learning_rate": 0.02, "steps": 8192}, 8, 5),
    ("dqn", Echo, {"n_step": 1}, 9, 4),
    ("ddpg", Hand, {"batch_size": 64, "num_envs": 4}, 8, 6),
    ("ppo", Hand, PPO, 7, 6),
]


def described(path: Path, algo: str, env_id: str, **changes: Any) -> list[str]:
    """Write a preset; return the options of a run with it."""
    like = presets.load(algo, "MountainCarContinuous-v0" if algo == "ddpg" else "CartPole-v1")
    file = path / "presets.yaml"
    own = {**asdict(like), **SHORT, **changes, "network": [32]}
    file.write_text(yaml.safe_dump({algo: {env_id: own}}))
    return [env_id, "--algo", algo, "--presets", str(file), "--root", str(path)]


@pytest.mark.parametrize(("algo", "kind", "changes", "least", "chance"), CASES)
def test_a_policy_is_trained_quantised_and_played(
    algo: str,
    kind: type[Copying],
    changes: dict[str, Any],
    least: float,
    chance: float,
    tmp_path: Path,
) -> None:
    env_id = f"{kind.__name__}-v0"
    words = ["run", *described(tmp_path, algo, env_id, **changes), "--schemes", "fp32,int8"]
    assert verbs.main([*words, "--episodes", "20", "--no-report"]) == 0
    artifact = Workspace(tmp_path).artifact(f"{algo}-{env_id}-s0", "int8")
    evaluation = Evaluation.load(evaluation_path(artifact))
    assert np.mean(evaluation.returns) > least
    random = Evaluation.load(evaluation_path(artifact.with_name("random.tflite")))
    assert np.mean(random.returns) < chance
    reference = str(artifact.with_name("fp32.tflite"))
    assert verbs.main(["quantize", reference, "--scheme", "ptq_w8"]) == 0
    if algo in ("ppo", "a2c"):
        assert verbs.main(["evaluate", str(artifact), "--sample", "--episodes", "3"]) == 0
    if kind is Switches:
        assert verbs.main(["evaluate", str(artifact), "--epsilon", "0.5", "--episodes", "3"]) == 0


def test_several_actions_are_refused_to_dqn(tmp_path: Path, capsys: Capsys) -> None:
    line = refusal(capsys, "train", *described(tmp_path, "dqn", "Switches-v0"))
    assert line.endswith("Received: actions='multi-discrete'\n")
