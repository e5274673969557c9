"""Does it learn? Every algorithm, end to end, on a task of seconds, and several choices at once."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from samples import train, write_presets

from quarl_tf import Run, agents, environments, networks, presets
from quarl_tf.cli import verbs
from quarl_tf.networks import inference
from quarl_tf.store.records import Evaluation
from quarl_tf.store.workspace import Workspace, evaluation_path

LENGTH = 6


class Corridor(gym.Env[Any, Any]):
    """Every step costs 1 until the right end; the place is shown as one of six."""

    observation_space, action_space = gym.spaces.Box(0, 1, (LENGTH,)), gym.spaces.Discrete(2)

    def _observation(self) -> np.ndarray:
        return np.eye(LENGTH, dtype=np.float32)[min(self.place, LENGTH - 1)]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.place = max(0, self.place + 2 * int(action) - 1)
        return self._observation(), -1.0, self.place == LENGTH, False, {}


class Approach(gym.Env[Any, Any]):
    """Every step costs the distance from 0, which the action changes."""

    observation_space, action_space = gym.spaces.Box(-2, 2, (1,)), gym.spaces.Box(-0.5, 0.5, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = self.np_random.choice([-1.0, 1.0])
        return np.array([self.place], np.float32), {}

    def step(self, action: Any) -> Any:
        self.place = float(np.clip(self.place + action[0], -2, 2))
        return np.array([self.place], np.float32), -abs(self.place), False, False, {}


gym.register("Corridor-v0", Corridor, max_episode_steps=40)
gym.register("Approach-v0", Approach, max_episode_steps=10)

_COMMON: dict[str, Any] = {"steps": 3000, "num_envs": 4, "network": [32], "discount": 0.95}
_COMMON |= {"evaluation_every": 1000, "evaluation_episodes": 2, "checkpoint_every": 1000}
_COMMON |= {"learning_rate": 0.003, "learning_rate_decay": False}
_OFF_POLICY = {"learning_starts": 200, "buffer_size": 3000, "batch_size": 32, "n_step": 1}
_OFF_POLICY |= {"train_frequency": 32, "gradient_steps": 16}
_DQN = {"target_update": 32, "exploration_fraction": 0.5}
_DDPG = {"critic_learning_rate": 0.003, "target_tau": 0.05, "noise": 0.2, "layer_norm": False}
_PPO = {"train_frequency": 128, "minibatch_size": 64, "epochs": 10, "gae_lambda": 0.95}
_A2C = {"train_frequency": 32, "minibatch_size": 32, "gae_lambda": 1.0, "steps": 6000}


@pytest.mark.parametrize(
    ("algo", "env_id", "changes"),
    [
        ("dqn", "Corridor-v0", {**_OFF_POLICY, **_DQN}),
        ("ppo", "Corridor-v0", _PPO),
        ("pqn", "Corridor-v0", _PPO),
        ("a2c", "Corridor-v0", _A2C),
        ("ddpg", "Approach-v0", {**_OFF_POLICY, **_DDPG}),
        ("ppo", "Approach-v0", _PPO),
    ],
)
def test_every_one_learns(algo: str, env_id: str, changes: dict[str, Any], tmp_path: Path) -> None:
    preset_of = "MountainCarContinuous-v0" if algo == "ddpg" else "CartPole-v1"
    preset = presets.load(algo, preset_of, {**_COMMON, **changes})
    run, workspace = Run(algo, env_id, 0), Workspace(tmp_path)
    record = train(workspace, run, settings=preset)
    network = agents.build_network(algo, environments.env_spec(env_id), preset, seed=0)
    weights = networks.load_weights(workspace.run_dir(run.run_id) / "network.npz")
    networks.set_weights(network, weights)
    head = inference.forward(network)
    if env_id == "Approach-v0":
        assert record.selection_return > -1.5  # The best is -0.5; to stay costs 10.
        steps = head(np.array([[-1], [1]], np.float32)).ravel()
        assert steps[1] < -0.3 < 0.3 < steps[0]
        return
    assert record.selection_return == -LENGTH
    heads = head(np.eye(LENGTH, dtype=np.float32))
    assert (heads.argmax(axis=1) == 1).all()
    if algo == "dqn":  # It also knows what every place is worth: its steps to the end, discounted.
        exact = [-sum(0.95**i for i in range(LENGTH - place)) for place in range(LENGTH)]
        np.testing.assert_allclose(heads.max(axis=1), exact, atol=0.25)


class Switches(gym.Env[Any, Any]):
    """Wants two switches set as they are shown, the second one-hot; at most 1 for each step."""

    observation_space = spaces.Dict(first=spaces.MultiBinary(1), second=spaces.Discrete(3))
    action_space = spaces.MultiDiscrete([2, 3])

    def _observation(self) -> dict[str, Any]:
        self.target = self.np_random.integers([2, 3])
        return {"first": self.target[:1].astype(np.int8), "second": self.target[1]}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        reward = float(np.mean(action == self.target))
        self.steps += 1
        return self._observation(), reward, self.steps == 10, False, {}


gym.register("Switches-v0", Switches, max_episode_steps=20)


def test_a_policy_of_two_choices_is_trained_quantised_and_played(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"steps": 4096, "evaluation_every": 2048, "evaluation_episodes": 8}
    changes |= {"discount": 0.1, "epochs": 10, "learning_rate": 0.01, "network": [32]}
    values = asdict(presets.load("ppo", "CartPole-v1")) | changes
    file = write_presets(tmp_path / "presets.yaml", "ppo", "Switches-v0", values)
    words = ["run", "Switches-v0", "--algo", "ppo", "--presets", str(file), "--root", str(tmp_path)]
    assert verbs.main([*words, "--schemes", "fp32,int8", "--episodes", "20", "--no-report"]) == 0
    artifact = Workspace(tmp_path).artifact("ppo-Switches-v0-s0", "int8")
    assert np.mean(Evaluation.load(evaluation_path(artifact)).returns) > 8
    random = Evaluation.load(evaluation_path(artifact.with_name("random.tflite")))
    assert np.mean(random.returns) < 5
    for chance in (["--sample"], ["--epsilon", "0.5"]):
        assert verbs.main(["evaluate", str(artifact), *chance, "--episodes", "3"]) == 0
