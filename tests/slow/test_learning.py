"""How each algorithm explores, and what its gradient steps do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quarl_tf import agents, environments, presets
from quarl_tf.agents import tf_agents
from quarl_tf.environments import EnvSpec
from quarl_tf.foundation.keras import tf

CART_POLE = environments.env_spec("CartPole-v1")
STEERED = EnvSpec((3,), "float32", None, (-2.0, 0.0), (2.0, 10.0))


# Exploration.


@pytest.mark.parametrize(("progress", "share"), [(0.0, 1.0), (0.1, 0.6), (0.2, 0.2), (1.0, 0.2)])
def test_dqn_explores_less_and_less(progress: float, share: float) -> None:
    changes = {"network": [4], "exploration_fraction": 0.2, "exploration_final": 0.2}
    preset = presets.load("dqn", "CartPole-v1", changes)
    agent: Any = agents.build("dqn", CART_POLE, preset, 0)
    agent.network.get_layer("head").kernel.assign(np.zeros((4, 2)))
    agent.network.get_layer("head").bias.assign([0.0, 1.0])
    agent.refresh()
    actions = agent.act(np.zeros((10_000, 4), np.float32), progress)
    # Half of what is explored is the best action as well; four standard errors.
    assert abs((actions == 0).mean() - share / 2) < 4 * 0.5 / 100


def steering(num_envs: int = 1, **changes: Any) -> Any:
    """Return DDPG's agent for two actions."""
    sizes = {"num_envs": num_envs, "train_frequency": num_envs, "learning_starts": 2 * num_envs}
    changes = {"network": [8], "learning_rate_decay": False, **sizes, **changes}
    preset = presets.load("ddpg", "MountainCarContinuous-v0", changes)
    return agents.build("ddpg", STEERED, preset, 0)


def test_ddpg_acts_uniformly_until_the_replay_is_warm() -> None:
    agent = steering(num_envs=2000)
    actions = agent.act(np.zeros((2000, 3), np.float32), 0.0)
    for drawn, low, high in zip(actions.T, (-2, 0), (2, 10), strict=True):
        # Four standard errors of a mean and of a share.
        assert abs(drawn.mean() - (low + high) / 2) < 4 * (high - low) / np.sqrt(12 * 2000)
        assert abs((drawn < low + (high - low) / 4).mean() - 0.25) < 4 * np.sqrt(0.1875 / 2000)


@pytest.mark.parametrize(("correlated", "expected"), [(True, 0.85), (False, 0.0)])
def test_noise_of_ddpg_is_as_wide_and_as_correlated_as_the_preset_says(
    correlated: bool, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = steering(num_envs=400, noise=0.05, correlated_noise=correlated)
    monkeypatch.setattr(type(agent), "_warming_up", False)
    observations = np.zeros((400, 3), np.float32)
    drawn = np.stack([agent.act(observations, 0.0) for _ in range(200)])[50:]
    noise = (drawn - agent.network(observations).numpy()) / [2, 5]  # In half ranges.
    deviation = 0.05 / np.sqrt(1 - expected**2)
    np.testing.assert_allclose(noise.std(axis=(0, 1)), [deviation] * 2, rtol=0.05)
    before, after = noise[:-1].ravel(), noise[1:].ravel()
    assert np.corrcoef(before, after)[0, 1] == pytest.approx(expected, abs=0.03)


# Gradient steps.


class Recorder:
    """Takes the place of an optimizer, and keeps the gradients that it is given."""

    def apply_gradients(self, pairs: Any) -> None:
        self.flat = np.concatenate([np.ravel(gradient) for gradient, _ in pairs])


def ppo_gradient(advantages: Any, **changes: Any) -> Any:
    """Return the gradient that PPO goes by on a minibatch with these advantages."""
    small = {"network": [8], "train_frequency": 64, "minibatch_size": 32, "epochs": 1}
    agent: Any = agents.build(
        "ppo", CART_POLE, presets.load("ppo", "CartPole-v1", small | changes), 0
    )
    random = np.random.default_rng(1)
    seen = random.normal(size=(32, 4)).astype(np.float32)
    actions = random.integers(2, size=32).astype(np.int32)
    old, returns = random.normal(size=(2, 32)).astype(np.float32) * 0.1
    agent._optimizer = recorder = Recorder()
    given = (seen, actions, old - 0.7, returns, np.asarray(advantages, np.float32))
    agent._gradient_step(*map(tf.constant, given))
    return recorder.flat


ADVANTAGES = np.random.default_rng(2).normal(size=32)


def test_ppo_normalises_advantages_in_each_minibatch() -> None:
    unclipped: dict[str, Any] = {"gradient_clip": 1e9}
    normal = (ADVANTAGES - ADVANTAGES.mean()) / ADVANTAGES.std()
    by_hand = ppo_gradient(normal, normalize_advantages=False, **unclipped)
    for moved in (ADVANTAGES, 3 + 5 * ADVANTAGES):
        found = ppo_gradient(moved, normalize_advantages=True, **unclipped)
        np.testing.assert_allclose(found, by_hand, rtol=1e-3, atol=1e-5)
    plain = ppo_gradient(3 + 5 * ADVANTAGES, normalize_advantages=False, **unclipped)
    assert np.abs(plain - by_hand).max() > 0.1


def test_ppo_clips_the_norm_of_the_whole_gradient() -> None:
    whole = ppo_gradient(ADVANTAGES, gradient_clip=1e9)
    norm = np.linalg.norm(whole)
    clipped = ppo_gradient(ADVANTAGES, gradient_clip=float(norm / 4))
    np.testing.assert_allclose(clipped, whole / 4, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(ppo_gradient(ADVANTAGES, gradient_clip=float(norm * 4)), whole)


def values(model: Any) -> list[Any]:
    return [variable.numpy() for variable in model.trainable_variables]


def test_a_gradient_step_of_ddpg_by_hand() -> None:
    # Hardly a step of the critic, so that the actor is seen to climb it.
    agent = steering(target_tau=0.25, critic_learning_rate=1e-7, learning_rate=1e-3)
    random, learner = np.random.default_rng(0), agent._agent
    target_critic = learner._target_critic_network.model
    for variable in (*agent.targets[0].trainable_variables, *target_critic.trainable_variables):
        variable.assign(random.normal(size=variable.shape))
    seen, following = random.normal(size=(2, 64, 3)).astype(np.float32)
    actions = random.uniform((-2, 0), (2, 10), size=(64, 2)).astype(np.float32)
    rewards = random.normal(size=64).astype(np.float32)
    discounts = np.where(random.random(64) < 0.3, 0, 0.9).astype(np.float32)  # Some end here.

    after = agent.targets[0](following)
    value = target_critic([following, after]).numpy().ravel()
    goal = rewards + agent._preset.discount * discounts * value
    estimates = agent._critic([seen, actions]).numpy().ravel()
    climbed = agent._critic([seen, agent.network(seen)]).numpy().mean()
    before = [values(model) for model in (agent.targets[0], target_critic)]
    batch = map(tf.constant, (seen, actions, rewards, discounts, following))
    loss = agent._gradient_step(tf_agents.transition(*batch))

    np.testing.assert_allclose(loss, ((goal - estimates) ** 2).mean(), rtol=1e-5)
    assert agent._critic([seen, agent.network(seen)]).numpy().mean() > climbed + 1e-5
    # Targets take over a quarter of what has been learned.
    pairs = ((agent.targets[0], agent.network), (target_critic, agent._critic))
    for old, (target, network) in zip(before, pairs, strict=True):
        for one, was, now in zip(values(target), old, values(network), strict=True):
            np.testing.assert_allclose(one, 0.75 * was + 0.25 * now, rtol=1e-5, atol=1e-6)
