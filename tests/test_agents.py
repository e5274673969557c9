"""Every algorithm: what it computes, what it refuses, and that a resumed training is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quarl_tf import agents, environments, networks, presets
from quarl_tf.agents.ppo import advantage_estimates
from quarl_tf.errors import QuarlError, UsageError
from quarl_tf.records import Workspace
from quarl_tf.seeding import environment_seed
from quarl_tf.spec import ALGORITHMS, Run
from quarl_tf.training import train

_COMMON = {
    "steps": 1200,
    "num_envs": 2,
    "hidden_layers": [8],
    "train_frequency": 64,
    "evaluation_every": 400,
    "evaluation_episodes": 2,
    "checkpoint_every": 400,
}
_OFF_POLICY = {"learning_starts": 64, "batch_size": 16, "gradient_steps": 4}
_ON_POLICY = {"minibatch_size": 32, "epochs": 2}

#: A training of seconds for each algorithm, with several checkpoints.
RUNS = {
    "dqn": Run("dqn", "CartPole-v1", 3, {**_COMMON, **_OFF_POLICY}),
    "ddpg": Run("ddpg", "MountainCarContinuous-v0", 3, {**_COMMON, **_OFF_POLICY}),
    "ppo": Run("ppo", "CartPole-v1", 3, {**_COMMON, **_ON_POLICY}),
    "a2c": Run("a2c", "CartPole-v1", 3, {**_COMMON, **_ON_POLICY}),
}


def silent(*_: Any) -> None:
    """Show no progress."""


class _CutError(Exception):
    """Stands for a kill."""


def products(workspace: Workspace, run: Run) -> list[bytes]:
    folder = workspace.run_dir(run.run_id)
    names = ("network.npz", "calibration.npz", "progress.csv")
    return [(folder / name).read_bytes() for name in names]


def test_every_algorithm_is_tested_here() -> None:
    assert set(RUNS) == set(ALGORITHMS)


@pytest.mark.parametrize("algo", sorted(RUNS))
def test_resumed_training_ends_with_the_same_bytes(algo: str, tmp_path: Path) -> None:
    run, whole, cut = RUNS[algo], Workspace(tmp_path / "whole"), Workspace(tmp_path / "cut")
    train(whole, run, silent)

    def cut_after(step: int) -> Any:
        def update(done: int, *_: Any) -> None:
            if done > step:
                raise _CutError

        return update

    for step in (300, 600, 1000):
        with pytest.raises(_CutError):
            train(cut, run, cut_after(step))
    assert list(cut.run_dir(run.run_id).glob("checkpoints/*.npz"))
    train(cut, run, silent)
    assert products(cut, run) == products(whole, run)


@pytest.mark.parametrize("algo", sorted(RUNS))
def test_training_changes_the_network_and_another_seed_gives_another(
    algo: str, tmp_path: Path
) -> None:
    found = []
    for seed in (3, 4):
        run = Run(algo, RUNS[algo].env_id, seed, RUNS[algo].overrides)
        train(Workspace(tmp_path), run, silent)
        found.append(networks.load_weights(tmp_path / "runs" / run.run_id / "network.npz"))
    first, second = found
    assert any(not np.array_equal(first[name], second[name]) for name in first)
    spec = environments.env_spec(RUNS[algo].env_id)
    preset = presets.load(algo, RUNS[algo].env_id, RUNS[algo].overrides)
    start = networks.weights(agents.network_factory(algo, spec, preset, 3)())
    assert any(not np.array_equal(first[name], start[name]) for name in first if "head" in name)


@pytest.mark.parametrize(
    ("algo", "env_id"),
    [
        ("dqn", "MountainCarContinuous-v0"),
        ("ppo", "MountainCarContinuous-v0"),
        ("a2c", "MountainCarContinuous-v0"),
        ("ddpg", "CartPole-v1"),
    ],
)
def test_spaces_that_do_not_fit_are_refused_with_the_algorithms_that_do(
    algo: str, env_id: str
) -> None:
    preset = presets.load(algo, RUNS[algo].env_id)
    with pytest.raises(UsageError, match=r"continuous|discrete"):
        agents.network_factory(algo, environments.env_spec(env_id), preset, 0)


def _on_policy(discount: float, gae_lambda: float) -> Any:
    overrides = {"discount": discount, "gae_lambda": gae_lambda}
    return presets.load("ppo", "CartPole-v1", overrides)


def test_advantages_by_hand() -> None:
    """One environment: two steps, termination, the tick of the reset, one more step."""
    rewards = np.array([[1.0], [2.0], [0.0], [4.0]], np.float32)
    values = np.array([[10.0], [20.0], [99.0], [40.0], [50.0]], np.float32)
    terminated = np.array([[False], [True], [False], [False]])
    starts = np.array([[True], [True], [False], [True]])
    found = advantage_estimates(rewards, values, terminated, starts, _on_policy(0.5, 0.5))
    last = 4 + 0.5 * 50 - 40
    second = 2 - 20
    first = (1 + 0.5 * 20 - 10) + 0.25 * second
    np.testing.assert_allclose(found[[0, 1, 3], 0], [first, second, last], rtol=1e-6)


def test_truncation_bootstraps_from_the_last_observation() -> None:
    rewards = np.array([[1.0], [0.0], [5.0]], np.float32)
    values = np.array([[10.0], [30.0], [7.0], [8.0]], np.float32)
    terminated = np.zeros((3, 1), np.bool_)
    starts = np.array([[True], [False], [True]])
    found = advantage_estimates(rewards, values, terminated, starts, _on_policy(0.9, 1.0))
    # Nothing of the next episode (reward 5) reaches the one before.
    np.testing.assert_allclose(found[0, 0], 1 + 0.9 * 30 - 10, rtol=1e-6)


def test_lambda_one_is_the_discounted_sum_of_rewards() -> None:
    random = np.random.default_rng(0)
    rewards = random.normal(size=(6, 3)).astype(np.float32)
    values = random.normal(size=(7, 3)).astype(np.float32)
    never = np.zeros((6, 3), np.bool_)
    found = advantage_estimates(rewards, values, never, ~never, _on_policy(0.9, 1.0))
    expected = sum(0.9**k * rewards[k] for k in range(6)) + 0.9**6 * values[6] - values[0]
    np.testing.assert_allclose(found[0], expected, rtol=1e-5)


def test_ddpg_acts_within_bounds_and_the_actor_reaches_them() -> None:
    spec = environments.EnvSpec((3,), "float32", None, (-2.0, 0.0), (2.0, 10.0))
    factory = networks.actor_factory(spec, networks.Mlp((8,), 2), seed=0)
    network = factory()
    observations = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    actions = networks.forward(network)(observations)
    assert (actions >= [-2.0, 0.0]).all()
    assert (actions <= [2.0, 10.0]).all()
    bias = network.get_layer("head").bias
    bias.assign([50.0, -50.0])
    extreme = networks.forward(network)(observations)
    np.testing.assert_allclose(extreme, np.broadcast_to([2.0, 0.0], (64, 2)), atol=1e-5)


def test_ppo_samples_actions_in_proportion_to_their_probability() -> None:
    spec = environments.env_spec("CartPole-v1")
    preset = presets.load("ppo", "CartPole-v1", {"hidden_layers": [4]})
    agent = agents.build("ppo", spec, preset, environment_seed(0, "test"))
    agent.network.get_layer("head").kernel.assign(np.zeros((4, 2)))
    agent.network.get_layer("head").bias.assign(np.log([0.8, 0.2]))
    observations = np.zeros((4000, 4), np.float32)
    share = agent.act(observations, 0.0).mean()
    # Four standard errors.
    assert abs(share - 0.2) < 4 * np.sqrt(0.8 * 0.2 / 4000)


def test_diverged_training_is_refused(tmp_path: Path) -> None:
    run = Run("dqn", "CartPole-v1", 0, {**RUNS["dqn"].overrides, "learning_rate": 1e30})
    with pytest.raises(QuarlError, match="diverged"):
        train(Workspace(tmp_path), run, silent)
    assert not (tmp_path / "runs" / run.run_id / "training.json").exists()
