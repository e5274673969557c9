"""Exploration, losses, gradient steps and optimizers of each algorithm, by hand."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from samples import quantised, random_weights, refused
from scipy import special, stats

from quarl_tf import agents, environments, networks, presets
from quarl_tf.agents import on_policy, tf_agents
from quarl_tf.environments import EnvSpec
from quarl_tf.environments.acting import Tick
from quarl_tf.foundation.keras import tf
from quarl_tf.networks.layers import unwrap
from quarl_tf.quantization import watching

CART_POLE = environments.env_spec("CartPole-v1")
STEERED = EnvSpec((3,), "float32", None, (-2.0, 0.0), (2.0, 10.0))
LOW, HIGH = STEERED.bounds
SEVERAL = EnvSpec((4,), "float32", (2, 3))
START = np.array([1.0, -2.0, 3.0, 0.5])
#: Of very different sizes, so that each epsilon has an effect.
GRADIENTS = np.array([[10.0, -1.0, 1e-3, 1e-6], [-2.0, 4.0, 2e-3, -3e-6], [5.0, 0.0, 1e-3, 1e-6]])

PRESET = presets.load("a2c", "CartPole-v1", {"learning_rate_decay": False})


def build(algo: str, spec: EnvSpec = CART_POLE, quantization: Any = None, **changes: Any) -> Any:
    env_id = "MountainCarContinuous-v0" if algo == "ddpg" else "CartPole-v1"
    preset = presets.load(algo, env_id, {"network": [8]} | changes)
    return agents.build(algo, spec, preset, 0, watching(quantization))


@pytest.mark.parametrize("algo", ["dqn", "ddpg", "ppo", "pqn"])
def test_an_agent_from_a_network_acts_as_it_and_keeps_its_statistics(algo: str) -> None:
    spec = STEERED if algo in ("ddpg", "ppo") else CART_POLE
    origin = build(algo, spec).network
    random_weights(origin)
    mean, deviation = np.arange(spec.observation_shape[0]), 0.5
    origin.get_layer("normalizer").mean.assign(mean)
    origin.get_layer("normalizer").inverse_deviation.assign(np.full(len(mean), 1 / deviation))
    agent = build(algo, spec, quantised())
    agent.start_from(networks.weights(origin), 100)
    inputs = np.random.default_rng(0).normal(size=(32, len(mean))).astype(np.float32)
    for network in (agent.network, *agent.targets):
        np.testing.assert_allclose(network(inputs), origin(inputs), rtol=1e-5, atol=1e-5)
    for model in agent._models if algo == "ppo" else ():  # Its critic, too.
        normalizer = unwrap(model.get_layer("normalizer"))
        np.testing.assert_allclose(normalizer.mean, mean, rtol=1e-5)
        np.testing.assert_allclose(normalizer.inverse_deviation, 1 / deviation, rtol=1e-5)
    # A hundred observations more, all of them 1 above the mean.
    agent._statistics.update(np.tile(np.float32(mean + 1), (100, 1)))
    assert agent._statistics.apply_to([origin])
    normalizer = [variable.numpy() for variable in origin.get_layer("normalizer").variables]
    expected = [mean + 0.5, np.full(len(mean), (deviation**2 / 2 + 0.25) ** -0.5)]
    np.testing.assert_allclose(normalizer, expected, rtol=1e-5)


def test_dqn_explores_less_and_less() -> None:
    changes = {"num_envs": 10_000, "train_frequency": 10_000, "learning_starts": 20_000}
    exploration = {"exploration_fraction": 0.2, "exploration_final": 0.2, "steps": 50_000}
    agent = build("dqn", **changes, **exploration)
    agent._greedy = lambda _: np.ones(10_000, np.int64)
    for progress, share in ((0.0, 1.0), (0.1, 0.6), (0.2, 0.2), (1.0, 0.2)):
        # Half of what is explored is the best action as well; four standard errors.
        assert abs((agent.act(None, progress) == 0).mean() - share / 2) < 4 * 0.5 / 100


def ddpg(num_envs: int, greedy: Any, **changes: Any) -> Any:
    sizes = {"num_envs": num_envs, "train_frequency": num_envs, "learning_starts": 2 * num_envs}
    agent = build("ddpg", STEERED, **sizes, **changes)
    agent._greedy = greedy
    return agent


def test_ddpg_acts_uniformly_until_the_replay_is_warm() -> None:
    actions = ddpg(2000, Mock(side_effect=AssertionError)).act(None, 0.0)
    for drawn, low, high in zip(actions.T, LOW, HIGH, strict=True):
        assert stats.kstest(drawn, stats.uniform(low, high - low).cdf).pvalue > 1e-4


@pytest.mark.parametrize(("correlated", "expected"), [(True, 0.85), (False, 0.0)])
def test_noise_is_as_wide_and_correlated_as_preset(correlated: bool, expected: float) -> None:
    best = np.array([1.0, 4.0], np.float32)
    agent = ddpg(400, lambda _: best, noise=0.05, correlated_noise=correlated)
    agent._agent.train_step_counter.assign(1)
    drawn = [agent.act(None, 0.0) for _ in range(200)]
    noise = (np.stack(drawn)[50:] - best) / [2, 5]  # In half ranges.
    np.testing.assert_allclose(noise.std(axis=(0, 1)), 0.05 / np.sqrt(1 - expected**2), rtol=0.05)
    before, after = noise[:-1].ravel(), noise[1:].ravel()
    assert np.corrcoef(before, after)[0, 1] == pytest.approx(expected, abs=0.03)


def test_ppo_samples_actions_in_proportion_to_their_probability() -> None:
    agent = build("ppo")
    agent.network.get_layer("head").kernel.assign(np.zeros((8, 2)))
    agent.network.get_layer("head").bias.assign(np.log([0.8, 0.2]))
    agent.refresh()
    share = agent.act(np.zeros((4000, 4), np.float32), 0.0).mean()
    assert abs(share - 0.2) < 4 * np.sqrt(0.8 * 0.2 / 4000)  # Four standard errors.


def test_continuous_actions_have_their_mean_deviation_and_density() -> None:
    agent = build("ppo", STEERED)
    distribution, deviations = agent._distribution, [0.5, 3.0]
    agent.network.get_layer("action").log_deviation.assign(np.log(deviations))
    distribution.refresh()
    means = np.tile(np.float32([1.5, 4.0]), (40_000, 1))
    actions, log_densities = distribution.draw(means, np.random.default_rng(0))
    assert actions.dtype == log_densities.dtype == np.float32
    # Four standard errors.
    np.testing.assert_allclose(actions.mean(axis=0), means[0], atol=4 * 3 / 200)
    np.testing.assert_allclose(actions.std(axis=0), deviations, rtol=4 / np.sqrt(2 * 40_000))
    expected = stats.norm.logpdf(actions, means, deviations).sum(axis=1)
    np.testing.assert_allclose(log_densities, expected, rtol=1e-4, atol=1e-4)
    tf_agents_densities = distribution.read(tf.constant(means)).log_prob(actions)
    np.testing.assert_allclose(log_densities, tf_agents_densities, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(distribution.variance(means[:3]), [(0.25 + 9) / 2] * 3, rtol=1e-6)
    clipped = agent.act(np.zeros((400, 3), np.float32), 0.0)
    np.testing.assert_array_equal(clipped, np.clip(clipped, LOW, HIGH))
    assert (clipped[:, 1].min(), clipped[:, 1].max()) == (LOW[1], HIGH[1])


def test_advantages_by_hand() -> None:
    def estimated(discount: float, gae_lambda: float, *columns: Any) -> np.ndarray:
        changes = {"discount": discount, "gae_lambda": gae_lambda}
        preset: Any = presets.load("ppo", "CartPole-v1", changes)
        kinds = np.float32, np.float32, np.bool_, np.bool_
        arrays = (np.array(x, kind)[:, None] for x, kind in zip(columns, kinds, strict=True))
        return on_policy.advantage_estimates(*arrays, preset)[:, 0]

    # Two steps, termination, the tick of the reset, one more step.
    advantages = estimated(0.5, 0.5, [1, 2, 0, 4], [10, 20, 99, 40, 50], [0, 1, 0, 0], [1, 1, 0, 1])
    second, last = 2 - 20, 4 + 0.5 * 50 - 40
    first = (1 + 0.5 * 20 - 10) + 0.25 * second
    np.testing.assert_allclose(advantages[[0, 1, 3]], [first, second, last], rtol=1e-6)
    # Truncation bootstraps from the last observation; of the next episode (reward 5) nothing
    # reaches the one before.
    advantages = estimated(0.9, 1.0, [1, 0, 5], [10, 30, 7, 8], [0, 0, 0], [1, 0, 1])
    np.testing.assert_allclose(advantages[0], 1 + 0.9 * 30 - 10, rtol=1e-6)


def test_ppo_learns_from_steps_with_their_actions_as_drawn() -> None:
    sizes = {"num_envs": 2, "train_frequency": 16, "minibatch_size": 16, "epochs": 1}
    agent, random = build("ppo", STEERED, **sizes), np.random.default_rng(0)
    agent.network.get_layer("action").log_deviation.assign(np.log([5.0, 20.0]))  # Some clip.
    agent.refresh()
    agent._round = Mock(return_value=(0.0, *agent._read_variables))
    observations = random.normal(size=(9, 2, 3)).astype(np.float32)
    rewards = random.normal(size=(8, 2)).astype(np.float32)
    terminated, starts = random.random((2, 8, 2)) < [[[0.3]], [[0.7]]]
    draws = []
    for row in zip(observations, rewards, terminated, starts, strict=False):
        actions = agent.act(row[0], 0.0)
        draws.append(agent._draws)
        agent.observe(Tick(row[0], actions, *row[1:]))
    drawn, _, values = map(np.stack, zip(*draws, strict=True))
    last_values = agent._predict(observations[-1])[1]
    agent.learn(observations[-1])
    columns = rewards, np.vstack([values, last_values]), terminated, starts
    advantages = on_policy.advantage_estimates(*columns, agent._preset)
    _, _, given_actions, _, *targets = agent._round.call_args.args
    np.testing.assert_array_equal(given_actions, drawn.reshape(-1, 2))
    expected = [(advantages + values).ravel(), advantages.ravel()]
    np.testing.assert_allclose(targets, expected, rtol=1e-5)
    seen = observations[:-1][starts].mean(axis=0)
    np.testing.assert_allclose(agent.network.get_layer("normalizer").mean, seen, rtol=1e-4)


def test_pqn_learns_pengs_returns_by_hand() -> None:
    settings = {"num_envs": 1, "train_frequency": 3, "minibatch_size": 3, "epochs": 1}
    agent = build("pqn", **settings, discount=0.5, gae_lambda=0.25)
    observations = np.random.default_rng(0).normal(size=(4, 1, 4)).astype(np.float32)
    heads, actions = agent.network(observations[:, 0]).numpy(), []
    for reward, row in zip([1.0, 2.0, 4.0], observations, strict=False):
        actions.append(agent.act(row, 0.1)[0])
        agent.observe(Tick(row, actions[-1:], np.float32([reward]), *np.bool_([[0], [1]])))
    best = heads.max(axis=1)
    third = 4 + 0.5 * best[3]
    second = 2 + 0.5 * (0.75 * best[2] + 0.25 * third)
    first = 1 + 0.5 * (0.75 * best[1] + 0.25 * second)
    errors = heads[range(3), actions] - [first, second, third]
    np.testing.assert_allclose(agent.learn(observations[3])["loss"], (errors**2).mean(), rtol=1e-5)


def test_dqn_learns_with_the_statistics_of_what_it_observed() -> None:
    sizes = {"num_envs": 2, "train_frequency": 16, "learning_starts": 16, "batch_size": 4}
    agent, nowhere = build("dqn", **sizes, gradient_steps=1), np.zeros(2, np.bool_)
    observations = np.random.default_rng(0).normal(3, 1, (8, 2, 4)).astype(np.float32)
    for batch in observations:
        agent.observe(Tick(batch, np.array([0, 1]), np.ones(2), nowhere, ~nowhere))
    assert agent.learn(observations[-1])
    mean = agent.network.get_layer("normalizer").mean
    np.testing.assert_allclose(mean, observations.mean(axis=(0, 1)), rtol=1e-4)


def transitions(spec: EnvSpec) -> tuple[Any, ...]:
    """Return observations, actions, rewards, discounts and next observations, and the batch."""
    random = np.random.default_rng(0)
    vectors = random.normal(size=(2, 64, *spec.observation_shape))
    observations, following = vectors.astype(np.float32)
    actions = random.integers(2, size=64).astype(np.int32)
    if spec.num_actions is None:
        actions = random.uniform(LOW, HIGH, size=(64, 2)).astype(np.float32)
    rewards = random.normal(size=64).astype(np.float32)
    discounts = np.where(random.random(64) < 0.3, 0, 0.9).astype(np.float32)  # Some end here.
    arrays = observations, actions, rewards, discounts, following
    return *arrays, tf_agents.transition(*map(tf.constant, arrays))


@pytest.mark.parametrize("double", [True, False])
def test_loss_of_dqn_by_hand(double: bool) -> None:
    agent = build("dqn", double=double)
    random_weights(agent.targets[0])
    observations, actions, rewards, discounts, following, batch = transitions(CART_POLE)
    values, target = agent.network(following).numpy(), agent.targets[0](following).numpy()
    chosen = (values if double else target).argmax(axis=1)
    assert (values.argmax(axis=1) != target.argmax(axis=1)).any()
    goal = rewards + 0.99 * discounts * target[np.arange(64), chosen]
    estimates = agent.network(observations).numpy()[np.arange(64), actions]
    loss = agent._gradient_step(batch)
    np.testing.assert_allclose(loss, ((goal - estimates) ** 2).mean(), rtol=1e-5)


def values_of(model: Any) -> np.ndarray:
    return np.concatenate([np.ravel(variable) for variable in model.trainable_variables])


def test_a_gradient_step_of_ddpg_by_hand() -> None:
    # The critic hardly changes, so that the actor's step must increase its value.
    rates = {"critic_learning_rate": 1e-7, "learning_rate": 1e-3, "learning_rate_decay": False}
    agent = build("ddpg", STEERED, target_tau=0.25, **rates)
    critic, target_critic = agent._normalised_networks[0], agent._agent._target_critic_network.model
    for target in (agent.targets[0], target_critic):
        random_weights(target)
    observations, actions, rewards, discounts, following, batch = transitions(STEERED)
    value = target_critic([following, agent.targets[0](following)]).numpy().ravel()
    goal = rewards + agent._preset.discount * discounts * value
    estimates = critic([observations, actions]).numpy().ravel()
    climbed = critic([observations, agent.network(observations)]).numpy().mean()
    pairs = ((agent.targets[0], agent.network), (target_critic, critic))
    before = [values_of(target) for target, _ in pairs]
    loss = agent._gradient_step(batch)
    np.testing.assert_allclose(loss, ((goal - estimates) ** 2).mean(), rtol=1e-5)
    assert critic([observations, agent.network(observations)]).numpy().mean() > climbed + 1e-5
    # Targets take over a quarter of what has been learned.
    for old, (target, network) in zip(before, pairs, strict=True):
        expected = 0.75 * old + 0.25 * values_of(network)
        np.testing.assert_allclose(values_of(target), expected, rtol=1e-5, atol=1e-6)


def stepped(agent: Any, batch: Any) -> tuple[Any, list[Any]]:
    """Return the loss and the clipped gradients of a step of PPO, which is not taken."""
    gradients = caught(agent._optimizer)
    return agent._gradient_step(*map(tf.constant, batch)), gradients


def caught(optimizer: Any) -> list[Any]:
    """Return a list that takes the clipped gradients of an optimizer in place of its variables."""
    gradients: list[Any] = []

    def catch(pairs: Any) -> None:
        gradients.extend(gradient for gradient, _ in optimizer._transform_gradients([*pairs]))

    optimizer.apply_gradients = catch
    return gradients


def test_gradients_of_dqn_are_clipped_alone_those_of_pqn_as_a_whole() -> None:
    *batch, transition = transitions(CART_POLE)
    dqn, pqn = (build(algo, gradient_clip=1e-3) for algo in ("dqn", "pqn"))
    each, whole = caught(dqn._steps[0][2]), caught(pqn._optimizer)
    dqn._gradient_step(transition)
    pqn._gradient_step(*map(tf.constant, batch[:4]))
    norms = [*map(tf.norm, each), tf.linalg.global_norm(whole)]
    np.testing.assert_allclose(norms, 1e-3, rtol=1e-3)


@pytest.mark.parametrize("algo", ["dqn", "pqn", "ppo", "a2c"])
def test_distance_from_a_teacher_by_hand_and_a_step_towards_it(algo: str) -> None:
    spec = {"ppo": STEERED, "a2c": SEVERAL}.get(algo, CART_POLE)
    agent, shift = build(algo, spec, distillation=1e3), 0.1
    random_weights(agent.network)
    agent.start_from(networks.weights(agent.network), 100)
    for variable in agent.network.trainable_variables:
        variable.assign_add(np.full(variable.shape, shift))
    observations, *batch = transitions(spec)

    def distance() -> float:
        heads = [model(observations).numpy() for model in (agent.teacher, agent.network)]
        if algo in ("dqn", "pqn") or spec.num_actions is None:
            return float(np.square(heads[0] - heads[1]).mean())
        choices = (np.split(np.exp(head), [2] * (spec is SEVERAL), axis=1) for head in heads)
        # The Kullback-Leibler divergence of each choice.
        return sum(stats.entropy(*pair, axis=1).mean() for pair in zip(*choices, strict=True))

    before, start = distance(), values_of(agent.teacher)
    assert before > 0
    loss = float(agent._with_distillation(1.0, observations))
    assert loss == pytest.approx(1 + 1e3 * before, rel=1e-4)
    actions = np.zeros((64, 2), np.int32) if spec is SEVERAL else batch[0]
    others = [batch[1]] * (2 if algo == "pqn" else 3)
    arguments = [tf.constant(field) for field in (observations, actions, *others)]
    for _ in range(5):
        agent._gradient_step(*([batch[-1]] if algo == "dqn" else arguments))
    assert distance() < before
    np.testing.assert_array_equal(values_of(agent.teacher), start)


@pytest.mark.parametrize("normalize", [True, False])
def test_loss_on_shared_layers_is_ppo_s_by_hand_and_its_gradient_is_taken(normalize: bool) -> None:
    changes = {"network": "li", "precision": "float32", "entropy_coefficient": 0.02}
    changes |= {"normalize_advantages": normalize, "gradient_clip": 1e9, "clip": 0.1}
    preset = presets.load("ppo", "BreakoutNoFrameskip-v4", changes)
    spec = EnvSpec((36, 36, 2), "uint8", 4)
    agent: Any = agents.build("ppo", spec, preset, 0)
    random = np.random.default_rng(0)
    observations = random.integers(0, 256, (32, 36, 36, 2), np.uint8)
    actions = random.integers(4, size=32).astype(np.int32)
    logits, values = agent._predict(observations)
    np.testing.assert_allclose(logits, agent.network(observations).numpy(), rtol=1e-4, atol=1e-6)
    assert len(np.unique(values)) == 32
    log_probabilities = special.log_softmax(logits, axis=1)
    chosen = np.take_along_axis(log_probabilities, actions[:, None], axis=1)[:, 0]
    # Of another policy, so that the ratio is clipped on both sides.
    old_log_probabilities = (chosen + random.normal(0, 0.3, 32)).astype(np.float32)
    returns, advantages = random.normal(size=(2, 32)).astype(np.float32)
    given = 3 + 5 * advantages if normalize else advantages
    if normalize:  # In each minibatch.
        advantages = (advantages - advantages.mean()) / advantages.std()
    ratio = np.exp(chosen - old_log_probabilities)
    assert ratio.min() < 0.9
    assert ratio.max() > 1.1
    gain = np.minimum(ratio * advantages, np.clip(ratio, 0.9, 1.1) * advantages)
    entropy = -(np.exp(log_probabilities) * log_probabilities).sum(axis=1)
    expected = 0.5 * ((returns - values) ** 2).mean() - gain.mean() - 0.02 * entropy.mean()
    batch = (observations, actions, old_log_probabilities, returns, given)
    loss, gradients = stepped(agent, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    norm = tf.linalg.global_norm(gradients)

    def moved(distance: float) -> float:
        for variable, gradient in zip(agent._trained, gradients, strict=True):
            variable.assign_add(distance / norm * gradient)
        return float(stepped(agent, batch)[0])

    ahead, behind = moved(1e-3), moved(-2e-3)
    np.testing.assert_allclose((ahead - behind) / 2e-3, norm, rtol=0.02)
    # The gradient is clipped as a whole.
    clipping = agents.build("ppo", spec, replace(preset, gradient_clip=float(norm / 4)), 0)
    for clipped, gradient in zip(stepped(clipping, batch)[1], gradients, strict=True):
        np.testing.assert_allclose(clipped, gradient / 4, rtol=1e-3, atol=1e-6)


def test_networks_of_other_observations_are_no_start() -> None:
    floats, integers = build("ppo"), build("ppo", replace(CART_POLE, observation_dtype="uint8"))
    wider = networks.weights(floats.network) | {"normalizer/mean:0": np.zeros(6, np.float32)}
    message = refused(floats.start_from, wider, 10)
    assert "('normalizer/mean:0', (4,)), ('normalizer/mean:0', (6,))" in message
    of_integers = networks.weights(integers.network)
    assert "normalizer/mean:0" in refused(floats.start_from, of_integers, 10)


def steps(make: Callable[[list[Any]], Any], gradients: np.ndarray) -> np.ndarray:
    """Take a step for each row of gradients; return two variables, joined, after each."""
    variables = [tf.Variable(part, dtype=tf.float32) for part in (START[:3], START[3:])]
    optimizer, places = make(variables), []
    for row in gradients.astype(np.float32):
        optimizer.apply_gradients(zip([row[:3], row[3:]], variables, strict=True))
        places.append(np.concatenate([variable.numpy() for variable in variables]))
    return np.stack(places)


def test_adams_first_step_by_hand() -> None:
    """The order at the end of section 2 of the paper (arXiv 1412.6980) changes epsilon."""
    (place,) = steps(partial(tf_agents.adam, 0.01, PRESET, epsilon=1e-5), (first := GRADIENTS[:1]))
    by_hand = START - 0.01 * first[0] / (np.abs(first[0]) + 1e-5 / np.sqrt(0.001))
    np.testing.assert_allclose(place, by_hand, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("epsilon", "clip"), [(1e-5, 100.0), (0.1, 0.5)])
def test_rmsprop_is_that_of_a2c_by_hand(epsilon: float, clip: float) -> None:
    """As OpenAI's baselines (a2c.py): decay 0.99, and epsilon under the root."""
    preset = replace(PRESET, learning_rate=0.01, epsilon=epsilon, gradient_clip=clip)
    place, square = START.copy(), np.zeros(4)
    places = steps(partial(tf_agents.rmsprop, preset), GRADIENTS)
    clipped = [gradient * min(1, clip / np.linalg.norm(gradient)) for gradient in GRADIENTS]
    for gradient, actual in zip(clipped, places, strict=True):
        square = 0.99 * square + 0.01 * gradient**2
        place = place - 0.01 * gradient / np.sqrt(square + epsilon)
        np.testing.assert_allclose(actual, place, rtol=0, atol=2e-6)


@pytest.mark.parametrize("make", [partial(tf_agents.adam, 0.5), tf_agents.rmsprop])
def test_step_size_falls_linearly_to_0_and_stays_there(make: Any) -> None:
    def moved(decay: bool) -> np.ndarray:
        size = {"learning_rate": 0.5, "steps": 5 * PRESET.minibatch_size}  # Five gradient steps.
        preset = replace(PRESET, learning_rate_decay=decay, **size)
        places = steps(partial(make, preset), np.full((7, 4), 3))
        return np.diff(places, axis=0, prepend=START[None].astype(np.float32))

    # All gradients are equal, so each step differs from that without decay by its size alone.
    moves = moved(True)
    share = np.array([1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0])[:, None]
    np.testing.assert_allclose(moves, share * moved(False), rtol=1e-3)
    assert not moves[5:].any()
