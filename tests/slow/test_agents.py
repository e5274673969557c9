"""Every algorithm: what it computes, what it refuses, and that a resumed training is the same."""

from __future__ import annotations

import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from killing import train_and_kill
from scipy import stats
from scipy.special import log_softmax

from quarl_tf import agents, environments, networks, presets
from quarl_tf.agents import tf_agents
from quarl_tf.agents.distributions import Categorical, Gaussian
from quarl_tf.agents.on_policy import advantage_estimates
from quarl_tf.environments import EnvSpec
from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.foundation.seeding import environment_seed
from quarl_tf.networks import inference
from quarl_tf.networks.build import Design
from quarl_tf.quantization import preparing
from quarl_tf.spec import ALGORITHMS, STOCHASTIC_ALGORITHMS, Quantization, Run
from quarl_tf.spec.architectures import architecture
from quarl_tf.store.workspace import Workspace
from quarl_tf.training.loop import train

_COMMON = {
    "steps": 1200,
    "num_envs": 2,
    "network": [8],
    "train_frequency": 64,
    "evaluation_every": 400,
    "evaluation_episodes": 2,
    "checkpoint_every": 400,
}
_OFF_POLICY = {"learning_starts": 64, "batch_size": 16, "gradient_steps": 4}
_DQN = {**_OFF_POLICY, "exploration_fraction": 1.0}  # The schedule is under way at any cut.
_PPO = {"minibatch_size": 32, "epochs": 2}
_A2C = {"minibatch_size": 64}

#: A training of seconds for each algorithm, with several checkpoints.
RUNS = {
    "dqn": Run("dqn", "CartPole-v1", 3, {**_COMMON, **_DQN}),
    "ddpg": Run("ddpg", "MountainCarContinuous-v0", 3, {**_COMMON, **_OFF_POLICY}),
    "ppo": Run("ppo", "CartPole-v1", 3, {**_COMMON, **_PPO}),
    "a2c": Run("a2c", "CartPole-v1", 3, {**_COMMON, **_A2C}),
}


def silent(*_: Any) -> None:
    """Show no progress."""


def products(workspace: Workspace, run: Run) -> list[bytes]:
    folder = workspace.run_dir(run.run_id)
    names = ("network.npz", "calibration.npz", "progress.csv")
    return [(folder / name).read_bytes() for name in names]


def test_every_algorithm_is_tested_here() -> None:
    assert set(RUNS) == set(ALGORITHMS)


@pytest.mark.parametrize("algo", sorted(RUNS))
def test_killed_training_ends_with_the_same_bytes(algo: str, tmp_path: Path) -> None:
    run, whole, killed = RUNS[algo], Workspace(tmp_path / "whole"), Workspace(tmp_path / "killed")
    train(whole, run, silent)
    curve = (whole.run_dir(run.run_id) / "progress.csv").read_text()
    assert ("action_variance" in curve) == (algo in STOCHASTIC_ALGORITHMS)
    # What was seen has a mean and deviations, by which the network normalises.
    weights = networks.load_weights(whole.run_dir(run.run_id) / "network.npz")
    assert all(weights["normalizer/mean:0"] != 0)
    assert all(weights["normalizer/inverse_deviation:0"] != 1)
    delay = train_and_kill(killed, run)
    assert not (killed.run_dir(run.run_id) / "training.json").exists()
    steps: list[int] = []
    train(killed, run, lambda step, *_: steps.append(step))
    assert steps[0] > run.overrides["checkpoint_every"]  # It went on and did not begin again.
    assert products(killed, run) == products(whole, run), f"delay {delay}"


@pytest.mark.parametrize("algo", ["dqn", "ddpg"])
def test_what_is_forgotten_takes_no_memory(algo: str) -> None:
    run = RUNS[algo]
    preset = presets.load(run.algo, run.env_id, run.overrides)
    agent: Any = agents.build(algo, environments.env_spec(run.env_id), preset, 0)
    replay = weakref.ref(agent._replay)
    assert replay() is not None
    agent.forget()
    assert replay() is None


BREAKOUT = "BreakoutNoFrameskip-v4"
_BRIEF = {**_COMMON, "steps": 512, "evaluation_every": 256, "checkpoint_every": 256}
_IMAGES = {
    **_BRIEF,
    "steps": 256,
    "network": "li",
    "train_frequency": 32,
    "evaluation_every": 128,
    "checkpoint_every": 128,
}

_DQN_OF_IMAGES = presets.load(
    "dqn",
    BREAKOUT,
    {
        **_IMAGES,
        **_OFF_POLICY,
        "batch_size": 4,
        "gradient_steps": 1,
        "buffer_size": 100,
        "dueling": True,
    },
)

#: Kinds of networks and actions; the replay's ring wraps, and every training has a checkpoint.
MORE = {
    "dqn of images": (Run("dqn", BREAKOUT, 3), _DQN_OF_IMAGES),
    "quantised dqn of images": (
        Run("dqn", BREAKOUT, 3, {}, Quantization.from_mapping({"bits": 4, "delay": 100}, "dqn")),
        _DQN_OF_IMAGES,
    ),
    "ppo of images": (
        Run("ppo", BREAKOUT, 3),
        presets.load("ppo", BREAKOUT, {**_IMAGES, "minibatch_size": 16, "epochs": 1}),
    ),
    # One is cut after the delay, the other before it.
    "quantised ppo of images": (
        Run("ppo", BREAKOUT, 3, {}, Quantization(bits=4, delay=100)),
        presets.load(
            "ppo",
            BREAKOUT,
            {**_IMAGES, "minibatch_size": 16, "epochs": 1, "precision": "bfloat16"},
        ),
    ),
    "quantised a2c with learned steps": (
        Run(
            "a2c",
            "CartPole-v1",
            3,
            {},
            Quantization(bits=4, delay=350, gradient="clipped", learned_steps=True),
        ),
        presets.load("a2c", "CartPole-v1", {**_BRIEF, **_A2C}),
    ),
    "continuous ppo": (
        Run("ppo", "Pendulum-v1", 3),
        presets.load("ppo", "CartPole-v1", {**_BRIEF, **_PPO}),
    ),
    "continuous a2c": (
        Run("a2c", "Pendulum-v1", 3),
        presets.load("a2c", "CartPole-v1", {**_BRIEF, **_A2C}),
    ),
    "dueling dqn": (
        Run("dqn", "CartPole-v1", 3),
        presets.load("dqn", "CartPole-v1", {**_BRIEF, **_OFF_POLICY, "dueling": True}),
    ),
    "ddpg with layer norm": (
        Run("ddpg", "Pendulum-v1", 3),
        presets.load(
            "ddpg", "MountainCarContinuous-v0", {**_BRIEF, **_OFF_POLICY, "layer_norm": True}
        ),
    ),
}


@pytest.mark.parametrize("kind", sorted(MORE))
def test_resumed_training_of_any_kind_ends_with_the_same_bytes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Games of 60 ticks.
    monkeypatch.setitem(gym.spec(BREAKOUT).kwargs, "max_num_frames_per_episode", 240)
    run, preset = MORE[kind]
    whole, cut = Workspace(tmp_path / "whole"), Workspace(tmp_path / "cut")

    def keep(step: int, steps: int, _: str) -> None:
        if step >= steps:
            # As a kill after the last checkpoint leaves it.
            shutil.copytree(whole.root, cut.root)

    train(whole, run, keep, preset)
    started: list[int] = []
    train(cut, run, lambda done, *_: started.append(done), preset)
    assert preset.checkpoint_every < started[0] < 0.8 * preset.steps
    assert products(cut, run) == products(whole, run)
    # All that can be learned has been.
    factory = agents.network_factory(run.algo, environments.env_spec(run.env_id), preset, run.seed)
    learned = networks.load_weights(whole.run_dir(run.run_id) / "network.npz")
    for variable in factory().trainable_variables:
        assert not np.array_equal(learned[variable.name], variable.numpy()), variable.name


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
    ("algo", "env_id", "fitting"),
    [
        ("dqn", "MountainCarContinuous-v0", r"needs discrete .* a2c, ddpg and ppo fit it"),
        ("ddpg", "CartPole-v1", r"needs continuous .* a2c, dqn and ppo fit it"),
    ],
)
def test_spaces_that_do_not_fit_are_refused_with_the_algorithms_that_do(
    algo: str, env_id: str, fitting: str
) -> None:
    preset = presets.load(algo, RUNS[algo].env_id)
    with pytest.raises(UsageError, match=fitting):
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
    factory = networks.actor_factory(spec, Design(architecture((8,)), 2), seed=0)
    network = factory()
    observations = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    actions = inference.forward(network)(observations)
    assert (actions >= [-2.0, 0.0]).all()
    assert (actions <= [2.0, 10.0]).all()
    bias = network.get_layer("head").bias
    bias.assign([50.0, -50.0])
    extreme = inference.forward(network)(observations)
    np.testing.assert_allclose(extreme, np.broadcast_to([2.0, 0.0], (64, 2)), atol=1e-5)


def test_ppo_samples_actions_in_proportion_to_their_probability() -> None:
    spec = environments.env_spec("CartPole-v1")
    preset = presets.load("ppo", "CartPole-v1", {"network": [4]})
    agent = agents.build("ppo", spec, preset, environment_seed(0, "test"))
    agent.network.get_layer("head").kernel.assign(np.zeros((4, 2)))
    agent.network.get_layer("head").bias.assign(np.log([0.8, 0.2]))
    agent.restore(agent.arrays())  # What acts are the weights as last learned or restored.
    observations = np.zeros((4000, 4), np.float32)
    share = agent.act(observations, 0.0).mean()
    # Four standard errors.
    assert abs(share - 0.2) < 4 * np.sqrt(0.8 * 0.2 / 4000)


# Continuous actions of PPO.

STEERED = EnvSpec((3,), "float32", None, (-2.0, 0.0), (2.0, 10.0))
_ROUND = {
    "network": [8],
    "num_envs": 16,
    "train_frequency": 64,
    "minibatch_size": 64,
    "epochs": 4,
    "learning_rate": 0.01,
    "learning_rate_decay": False,
    "entropy_coefficient": 0.0,
}


def test_variance_of_discrete_actions_is_that_over_their_probabilities() -> None:
    three_to_one = np.log(np.float32([[3, 1]]))  # 0.75 and 0.25: each 0.25 from their mean.
    assert Categorical().variance(three_to_one + 7) == pytest.approx(0.0625)
    certain, even = np.float32([[1000, 0]]), np.float32([[5, 5]])
    assert Categorical().variance(even) == 0
    both = Categorical().variance(np.concatenate([certain, even]))
    np.testing.assert_allclose(both, [0.25, 0])


def test_variance_of_continuous_actions_is_the_squared_deviation() -> None:
    distribution, _ = gaussian([0.5, 2.0])
    np.testing.assert_allclose(distribution.variance(np.zeros((3, 2), np.float32)), [2.125] * 3)


def gaussian(deviations: list[float]) -> tuple[Gaussian, Any]:
    """Return a distribution of given widths, and the variable of their logarithms."""
    design = Design(architecture((4,)), 2, "tanh", 0.01)
    network = networks.actor_factory(STEERED, design, seed=0, stochastic=True)()
    logarithm = network.get_layer("action").log_deviation
    logarithm.assign(np.log(deviations))
    return Gaussian(STEERED, network), logarithm


def test_drawn_actions_have_their_mean_deviation_and_density() -> None:
    distribution, logarithm = gaussian([0.5, 3.0])
    means = np.tile(np.array([[1.5, -4.0]], np.float32), (40_000, 1))
    actions, log_densities = distribution.draw(means, np.random.default_rng(0))
    assert actions.dtype == log_densities.dtype == np.float32
    # Four standard errors.
    np.testing.assert_allclose(actions.mean(axis=0), means[0], atol=4 * 3 / 200)
    np.testing.assert_allclose(actions.std(axis=0), [0.5, 3.0], rtol=4 / np.sqrt(2 * 40_000))
    assert abs(np.corrcoef(actions.T)[0, 1]) < 4 / 200
    expected = stats.norm.logpdf(actions, means, [0.5, 3.0]).sum(axis=1)
    np.testing.assert_allclose(log_densities, expected, rtol=1e-4, atol=1e-4)
    # Widths are those of the last refresh.
    logarithm.assign(np.log([5.0, 1.0]))
    again, _ = distribution.draw(means, np.random.default_rng(0))
    np.testing.assert_array_equal(again, actions)
    distribution.refresh()
    wider, _ = distribution.draw(means, np.random.default_rng(0))
    np.testing.assert_allclose(wider.std(axis=0), [5.0, 1.0], rtol=4 / np.sqrt(2 * 40_000))


class Recorder:
    """Keeps what an agent's learner is given."""

    def __init__(self, agent: Any) -> None:
        self._learn, agent._round = agent._round, self

    def __call__(self, index: Any, *fields: Any) -> Any:
        self.fields = [np.asarray(field) for field in fields]
        return self._learn(index, *fields)


def test_environments_get_actions_within_bounds_and_the_learner_those_that_were_drawn() -> None:
    agent = agents.build("ppo", STEERED, presets.load("ppo", "CartPole-v1", _ROUND), 0)
    learner, observations = Recorder(agent), np.ones((16, 3), np.float32)
    mean = agent.network(observations[:1]).numpy()[0]
    seen_by_tf_agents, _ = agent._distribution.actor(
        agent._model.network, agent._model.features_spec
    )(tf.constant(observations[:1]))
    given, never = [], np.zeros(16, np.bool_)
    for _ in range(4):
        given.append(agent.act(observations, 0.0))
        agent.observe(observations, given[-1], np.zeros(16, np.float32), never, ~never)
    agent.learn(observations)
    within = np.concatenate(given)
    _, drawn, log_densities, *_ = learner.fields
    assert (within >= [-2, 0]).all()
    assert (within <= [2, 10]).all()
    # As wide as half the range, a third is beyond the bounds.
    beyond = drawn != within
    assert 0.2 < beyond.mean() < 0.45
    np.testing.assert_allclose(within, np.clip(drawn, [-2, 0], [2, 10]))
    for expected in (
        stats.norm.logpdf(drawn, mean, [2, 5]).sum(axis=1),
        seen_by_tf_agents.log_prob(drawn).numpy(),
    ):
        np.testing.assert_allclose(log_densities, expected, rtol=1e-4, atol=1e-4)


def test_continuous_actions_are_of_the_type_of_the_action_space() -> None:
    """Spaces refuse float64 for float32, and NumPy computes differently with it."""
    agent = agents.build("ppo", STEERED, presets.load("ppo", "CartPole-v1", _ROUND), 0)
    assert agent.act(np.zeros((16, 3), np.float32), 0.0).dtype == np.float32


def test_ppo_learns_where_to_steer_and_how_surely() -> None:
    """One step an episode; the reward falls with the distance from (1, 2)."""
    preset = presets.load("ppo", "CartPole-v1", {**_ROUND, "discount": 0.0})
    agent = agents.build("ppo", STEERED, preset, 0)
    observations, always = np.zeros((16, 3), np.float32), np.ones(16, np.bool_)
    (name,) = (name for name in networks.weights(agent.network) if "log_deviation" in name)
    first = np.exp(networks.weights(agent.network)[name])
    np.testing.assert_allclose(first, [2, 5], rtol=1e-6)
    for _ in range(60):
        for _ in range(4):
            actions = agent.act(observations, 0.0)
            rewards = -np.abs((actions - [1, 2]) / [2, 5]).sum(axis=1)
            agent.observe(observations, actions, rewards.astype(np.float32), always, always)
        agent.learn(observations)
    mean = inference.forward(agent.network)(observations[:1])[0]
    assert np.abs((mean - [1, 2]) / [2, 5]).max() < 0.25
    last = np.exp(networks.weights(agent.network)[name])
    assert (last < 0.7 * first).all()
    # It draws from what it has learned.
    drawn = np.concatenate([agent.act(observations, 0.0) for _ in range(200)])
    np.testing.assert_allclose(drawn.std(axis=0), last, rtol=0.1)


# Policy and value on the same convolutions.

IMAGES = EnvSpec((36, 36, 2), "uint8", 4)
STEERED_IMAGES = EnvSpec((36, 36, 2), "uint8", None, (-2.0, 0.0), (2.0, 10.0))


@pytest.fixture(scope="module")
def shared() -> Any:
    """Return PPO's agent for images."""
    changes = {"network": "li", "precision": "float32", "entropy_coefficient": 0.02}
    return agents.build("ppo", IMAGES, presets.load("ppo", BREAKOUT, changes), 0)


@pytest.fixture(scope="module")
def batch(shared: Any) -> list[Any]:
    """Return observations, actions, log probabilities, returns and advantages."""
    random = np.random.default_rng(0)
    seen = random.integers(0, 256, (32, 36, 36, 2), np.uint8)
    actions = random.integers(4, size=32).astype(np.int32)
    logits, _ = shared._model.predict(seen)
    # As of another policy than today's, so that the ratio is clipped on both sides.
    old = np.take_along_axis(log_softmax(logits, axis=1), actions[:, None], axis=1)[:, 0]
    old = old + random.normal(0, 0.3, 32)
    returns, advantages = random.normal(size=(2, 32))
    return [seen, actions, *(x.astype(np.float32) for x in (old, returns, advantages))]


def losses(shared: Any, agent: Any, seen: Any, batch: list[Any]) -> Any:
    _, actions, old, returns, advantages = map(tf.constant, batch)
    return agent.get_loss(
        tf_agents.time_steps(seen),
        actions,
        old,
        returns,
        advantages,
        action_distribution_parameters=None,
        weights=tf.ones_like(returns),
        train_step=agent.train_step_counter,
        debug_summaries=False,
        training=True,
    )


@pytest.mark.parametrize("double", [True, False])
def test_loss_of_dqn_by_hand(double: bool) -> None:
    preset = presets.load("dqn", "CartPole-v1", {"network": [8], "double": double})
    agent: Any = agents.build("dqn", environments.env_spec("CartPole-v1"), preset, 0)
    random = np.random.default_rng(0)
    for variable in agent.targets[0].trainable_variables:
        variable.assign(random.normal(size=variable.shape))
    seen, following = random.normal(size=(2, 64, 4)).astype(np.float32)
    actions = random.integers(2, size=64).astype(np.int32)
    rewards = random.normal(size=64).astype(np.float32)
    # Some episodes end here.
    discounts = np.where(random.random(64) < 0.3, 0, 0.9).astype(np.float32)
    batch = map(tf.constant, (seen, actions, rewards, discounts, following))
    found = agent._agent._loss(
        tf_agents.transition(*batch),
        td_errors_loss_fn=tf_agents.element_wise_squared_loss,
        gamma=preset.discount,
    )

    values, target = agent.network(following).numpy(), agent.targets[0](following).numpy()
    chosen = (values if double else target).argmax(axis=1)
    assert (values.argmax(axis=1) != target.argmax(axis=1)).any()
    following_values = np.take_along_axis(target, chosen[:, None], axis=1)[:, 0]
    goal = rewards + 0.99 * discounts * following_values
    estimates = np.take_along_axis(agent.network(seen).numpy(), actions[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(found.loss, ((goal - estimates) ** 2).mean(), rtol=1e-5)


def test_heads_on_shared_layers_are_those_of_the_policy_network(
    shared: Any, batch: list[Any]
) -> None:
    logits, values = shared._model.predict(batch[0])
    np.testing.assert_allclose(logits, shared.network(batch[0]).numpy(), rtol=1e-4, atol=1e-6)
    assert values.shape == (32,)
    assert len(np.unique(values)) == 32
    # All of the policy network is among what is learned and saved, and the value's head beside it.
    names = [variable.name for variable in shared._model.variables]
    assert len(set(names)) == len(names)
    own = {variable.name for variable in shared.network.variables}
    assert set(names) - own == {"value/kernel:0", "value/bias:0"}


def test_loss_on_shared_layers_is_ppo_s_by_hand(shared: Any, batch: list[Any]) -> None:
    seen, actions, old, returns, advantages = batch
    found = losses(shared, shared._agent, shared._model.features(tf.constant(seen)), batch)
    logits, values = shared._model.predict(seen)
    every = log_softmax(logits, axis=1)
    ratio = np.exp(np.take_along_axis(every, actions[:, None], axis=1)[:, 0] - old)
    assert (ratio < 0.9).any()
    assert (ratio > 1.1).any()
    gain = np.minimum(ratio * advantages, np.clip(ratio, 0.9, 1.1) * advantages)
    entropy = -(np.exp(every) * every).sum(axis=1)
    error = (returns - values) ** 2
    expected = -gain.mean() + 0.5 * error.mean() - 0.02 * entropy.mean()
    np.testing.assert_allclose(found.loss, expected, rtol=1e-4)
    np.testing.assert_allclose(found.extra.policy_gradient_loss, -gain.mean(), rtol=1e-3)


def test_loss_and_gradients_through_the_split_are_those_of_whole_networks(
    shared: Any, batch: list[Any]
) -> None:
    model, spec = shared._model, tf_agents.observation_spec(IMAGES)
    network, tail = shared.network, shared._model.critic.model
    torso = network.get_layer("hidden_0").output
    value = keras.Model(network.input, tail(torso))
    whole = tf_agents.ppo_agent.PPOAgent(
        tf_agents.time_step_spec(IMAGES),
        tf_agents.action_spec(IMAGES),
        optimizer=keras.optimizers.SGD(),
        actor_net=tf_agents.CategoricalNetwork(lambda: network, spec, "Actor"),
        value_net=tf_agents.ValueNetwork(lambda: value, spec, "Value"),
        importance_ratio_clipping=0.1,
        entropy_regularization=0.02,
        value_pred_loss_coef=0.5,
        compute_value_and_advantage_in_train=False,
        normalize_rewards=False,
        normalize_observations=False,
        initial_adaptive_kl_beta=0.0,
        kl_cutoff_factor=0.0,
        train_step_counter=tf.Variable(0, dtype=tf.int64),
    )
    whole.initialize()
    seen, variables = tf.constant(batch[0]), model.trainable_variables
    with tf.GradientTape(persistent=True) as tape:
        split = losses(shared, shared._agent, model.features(seen), batch)
        expected = losses(shared, whole, seen, batch)
    np.testing.assert_allclose(split.loss, expected.loss, rtol=1e-5)
    wanted = tape.gradient(expected.loss, variables)
    for variable, one, other in zip(
        variables, tape.gradient(split.loss, variables), wanted, strict=True
    ):
        scale = np.abs(other).max()
        np.testing.assert_allclose(one, other, atol=1e-4 * scale, err_msg=variable.name)
        assert scale > 0


def test_policy_and_value_both_teach_the_convolutions(shared: Any, batch: list[Any]) -> None:
    model, seen = shared._model, tf.constant(batch[0])
    variables = {variable.name: variable for variable in model.trainable_variables}
    with tf.GradientTape(persistent=True) as tape:
        extra = losses(shared, shared._agent, model.features(seen), batch).extra
    for loss, own, other in (
        (extra.policy_gradient_loss, "head", "value"),
        (extra.value_estimation_loss, "value", "head"),
    ):
        gradients = tape.gradient(loss, variables)
        for name in ("convolution_0", "convolution_1", "hidden_0", own):
            assert np.abs(gradients[f"{name}/kernel:0"]).max() > 0
        assert gradients[f"{other}/kernel:0"] is None


def test_continuous_policies_for_images_learn_all_their_variables() -> None:
    changes = {"network": "li", "num_envs": 4, "train_frequency": 16, "minibatch_size": 8}
    preset = presets.load("ppo", BREAKOUT, {**changes, "precision": "float32", "epochs": 1})
    agent = agents.build("ppo", STEERED_IMAGES, preset, 0)
    before = {variable.name: variable.numpy() for variable in agent._model.variables}
    random, never = np.random.default_rng(0), np.zeros(4, np.bool_)
    for _ in range(4):
        seen = random.integers(0, 256, (4, 36, 36, 2), np.uint8)
        actions = agent.act(seen, 0.0)
        assert actions.shape == (4, 2)
        agent.observe(seen, actions, random.normal(size=4).astype(np.float32), never, ~never)
    agent.learn(seen)
    assert any("log_deviation" in name for name in before)
    for variable in agent._model.variables:
        assert not np.array_equal(variable.numpy(), before[variable.name]), variable.name


def test_diverged_training_is_refused(tmp_path: Path) -> None:
    run = Run("dqn", "CartPole-v1", 0, {**RUNS["dqn"].overrides, "learning_rate": 1e30})
    with pytest.raises(QuarlError, match="diverged"):
        train(Workspace(tmp_path), run, silent)
    assert not (tmp_path / "runs" / run.run_id / "training.json").exists()


def test_a2c_takes_its_preset_s_epsilon() -> None:
    preset = replace(presets.load("a2c", "CartPole-v1"), epsilon=0.125)
    agent = agents.build("a2c", environments.env_spec("CartPole-v1"), preset, 0, preparing(None))
    assert agent._optimizer.epsilon == 0.125
