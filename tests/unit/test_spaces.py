"""Spaces: observations become one array of numbers, actions indices or a vector."""

from copy import deepcopy
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import Network
from gymnasium import spaces
from samples import Describe, Drawn, Patch, refused, register
from scipy.special import log_softmax

from quarl_tf import Policy, environments
from quarl_tf.agents.distributions import Categorical
from quarl_tf.environments import EnvSpec, env_spec, make, make_vector
from quarl_tf.environments.acting import ticks
from quarl_tf.foundation.keras import tf
from quarl_tf.spec.actions import agreement, best

THREE, TWO = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)
WORDS = spaces.MultiDiscrete([2, 3], start=[1, 0])
HAND = spaces.Box(np.float32([[-1, 0], [0, 1]]), np.float32([[1, 2], [4, 3]]))

#: Observation spaces and what they become.
OBSERVATION_SPACES = [
    (spaces.Dict(b=spaces.Box(0, 9, (2, 2), np.int64), a=spaces.Discrete(3)), (7,)),
    (spaces.Tuple([spaces.Box(0, 255, (2,), np.uint8), spaces.MultiBinary(3)]), (5,)),
    (spaces.Dict(x=spaces.Tuple([spaces.Box(-1e30, 1e30, (2,), np.float64), TWO])), (4,)),
    (WORDS, (5,)),
    (spaces.MultiBinary([2, 2]), (4,)),
    (spaces.Discrete(5, start=-2), (5,)),
    (spaces.Box(0, 2**16 - 1, (3, 2), np.uint16), (3, 2)),
    (spaces.Box(0, np.inf, (2,), np.float64), (2,)),
    (spaces.Box(-1, 1, ()), (1,)),
]

#: Action spaces, what they become, and pairs of an action and what the environment gets.
ACTION_SPACES = [
    (spaces.Discrete(3, start=1), 3, [(0, 1), (2, 3)]),
    (WORDS, (2, 3), [([0, 0], [1, 0]), ([1, 2], [2, 2])]),
    (spaces.MultiDiscrete([[2, 3]]), (2, 3), [([1, 2], [[1, 2]])]),
    (spaces.MultiBinary([2, 1]), (2, 2), [([1, 0], [[1], [0]])]),
    (HAND, None, [([0, 1, 2, 3], [[0, 1], [2, 3]])]),
    (spaces.Box(-1, 1, (), np.float64), None, [([0.5], 0.5)]),
    # The ends in float32, which lie beyond these.
    (spaces.Box(-0.1, 0.1, (2,), np.float64), None, [(np.float32([0.1, -0.1]), [0.1, -0.1])]),
]
SEVERAL = EnvSpec((3,), "float32", (2, 3))
HEADS = np.float32([[0, 1, 5, 2, 5], [3, 3, -1, -2, -3], [1, 0, 0, 0, 1]])


def registered(patch: Patch, observation: Any, action: Any, mode: Any = None) -> str:
    """Register an environment, with a vector entry point if that has a mode; return its id."""
    create = partial(Drawn, observation, action)

    def create_vector(num_envs: int, **_: Any) -> Any:
        return gym.vector.SyncVectorEnv([create] * num_envs, **mode)

    vector = None if mode is None else create_vector
    return register(patch, "Drawn-v0", create, vector_entry_point=vector)


@pytest.mark.parametrize("mode", [None, {}], ids=["single", "vector"])
@pytest.mark.parametrize(("space", "shape"), OBSERVATION_SPACES)
def test_observations_become_floats(space: Any, shape: Any, mode: Any, monkeypatch: Patch) -> None:
    env_id = registered(monkeypatch, space, TWO, mode)
    assert env_spec(env_id) == EnvSpec(shape, "float32", 2)
    envs, singles = make_vector(env_id, 2), [make(env_id) for _ in range(2)]
    assert envs.single_observation_space == singles[0].observation_space
    drawn = deepcopy(space)
    drawn.seed(7)
    rows = [[env.reset(seed=7 + i)[0] for i, env in enumerate(singles)]]
    flat = spaces.flatten(space, drawn.sample()).reshape(shape)
    np.testing.assert_allclose(rows[0][0], flat, rtol=1e-7)
    rows += [[env.step(0)[0] for env in singles] for _ in range(3)]
    observations, _ = envs.reset(seed=7)
    stream = islice(ticks(envs, lambda _: np.zeros(2, int), observations), 4)
    for row, tick in zip(rows, stream, strict=True):
        assert tick.observations.dtype == np.float32
        np.testing.assert_array_equal(tick.observations, row)
        assert all(observation in singles[0].observation_space for observation in row)


@pytest.mark.parametrize("mode", [None, {}], ids=["single", "vector"])
@pytest.mark.parametrize(("space", "choices", "pairs"), ACTION_SPACES)
def test_actions_become_the_environment_s_in_single_and_vector(
    space: Any, choices: Any, pairs: Any, mode: Any, monkeypatch: Patch
) -> None:
    env_id = registered(monkeypatch, THREE, space, mode)
    spec = env_spec(env_id)
    assert spec.num_actions == choices
    if choices is None:
        assert spec.action_low == tuple(np.float32(space.low).ravel().tolist())
        assert spec.action_high == tuple(np.float32(space.high).ravel().tolist())
    env: Any = make(env_id)
    envs: Any = make_vector(env_id, 2)
    assert env.action_space == envs.single_action_space
    for action, expected in pairs:
        for player, given in ((env, action), (envs, [action] * 2)):
            player.reset(seed=0)
            player.step(np.array(given))
        for single in (env.unwrapped, *envs.unwrapped.envs):
            received = single.unwrapped.received
            np.testing.assert_array_equal(received, np.array(expected, space.dtype))
    env.reset(seed=0)
    env.step(env.action_space.sample())
    assert np.asarray(env.unwrapped.received) in space


@pytest.mark.parametrize(
    ("observation", "action"),
    [
        (spaces.Text(3), TWO),
        (spaces.Dict(), TWO),
        (spaces.Dict(x=THREE, y=spaces.Sequence(THREE)), TWO),
        (spaces.Box(-1, 1, (0,)), TWO),
        (THREE, spaces.Dict(x=TWO)),
        (THREE, spaces.MultiDiscrete([])),
        (THREE, spaces.Box(0, np.inf, (2,))),
        (THREE, spaces.Box(-1, 1, (0,))),
        (THREE, spaces.Box(0, 2**31 - 1, (2,), np.int32)),  # An end that float32 rounds.
        (THREE, spaces.Box(np.float32([-1, 2]), np.float32([1, 2]))),
    ],
)
def test_other_spaces_are_refused(observation: Any, action: Any, monkeypatch: Patch) -> None:
    env_id = registered(monkeypatch, observation, action)
    assert "Received: Drawn-v0 with " in refused(env_spec, env_id, code=2)


def test_what_does_not_fit_is_refused(monkeypatch: Patch) -> None:
    env_id = registered(monkeypatch, THREE, TWO, {"autoreset_mode": "SameStep"})
    assert "SAME_STEP" in refused(make_vector, env_id, 2, code=2)
    registered(monkeypatch, THREE, TWO, {})
    environments.require_seeded(env_id)
    unseeded = partial(Drawn.reset, seed=None)
    monkeypatch.setattr(Drawn, "reset", lambda env, **_: unseeded(env))
    message = refused(environments.require_seeded, env_id, code=2)
    assert "Received: environment='Drawn-v0'" in message
    monkeypatch.undo()
    # A vector that overwrites its observations.
    envs = make_vector(registered(monkeypatch, THREE, TWO, {"copy": False}), 2)
    stream = ticks(envs, lambda _: np.zeros(2, int), envs.reset(seed=0)[0])
    assert "copy them" in refused(next, stream, code=2)
    # One whose ends are numbers, of which ~ would be -1 and -2.
    numbers = SimpleNamespace(step=lambda _: (np.ones(2), np.ones(2), [0, 1], [1, 0], {}))
    tick = next(ticks(numbers, np.asarray, np.zeros(2)))
    assert (tick.terminated.tolist(), tick.truncated.tolist()) == ([False, True], [True, False])
    for algo in ("dqn", "pqn", "ddpg"):
        message = refused(environments.require_actions, algo, SEVERAL, code=2)
        assert message.endswith("take ppo or a2c. Received: actions='multi-discrete'")
    environments.require_actions("ppo", SEVERAL)


def test_the_best_action_of_each_choice_by_hand() -> None:
    assert best(HEADS, 5).tolist() == [2, 0, 0]
    assert best(HEADS, [2, 3]).tolist() == [[1, 0], [0, 0], [0, 2]]
    assert SEVERAL.greedy(HEADS).tolist() == best(HEADS, [2, 3]).tolist()
    shifted = HEADS + np.float32([0, 0, 0, 0, 1])
    # One of the two actions of the first row differs.
    assert agreement(HEADS, shifted, [2, 3]) == pytest.approx(2 / 3)
    assert agreement(HEADS, shifted, 5) == pytest.approx(1 / 3)


def test_a_policy_chooses_several_actions_at_once(describe: Describe) -> None:
    network = Network([(np.eye(4, 5, dtype=np.float32), HEADS[0] * 0)], np.eye(4))
    changes = {"head": "logits", "num_actions": [2, 3]}
    policy: Any = Policy.load(describe(network.convert("fp32"), **changes))
    observation, random = np.float32([0, 1, 0, 2]), np.random.default_rng(0)
    assert (policy.act(observation).tolist(), policy.ties) == ([1, 1], 0)
    assert (policy.act(np.float32([1, 1, 0, 2])).tolist(), policy.ties) == ([0, 1], 1)
    drawn = np.array([policy.sample(observation, random) for _ in range(5000)])
    weights = np.exp(policy.head(observation))
    for column, part in zip(drawn.T, (weights[:2], weights[2:]), strict=True):
        shares = np.bincount(column, minlength=len(part)) / len(drawn)
        np.testing.assert_allclose(shares, part / part.sum(), atol=0.03)
    other = describe(network.convert("fp32"), **changes | {"num_actions": [2, 2]})
    assert "output shapes" in refused(Policy.load, other)


def test_the_distribution_of_several_actions_is_the_product_of_each() -> None:
    distribution = Categorical((2, 3))
    actions, log_probs = distribution.draw(HEADS, np.random.default_rng(0))
    parts = log_softmax(HEADS[:, :2], axis=1), log_softmax(HEADS[:, 2:], axis=1)
    expected = sum(part[np.arange(3), actions[:, i]] for i, part in enumerate(parts))
    logits = tf.Variable(HEADS)
    with tf.GradientTape() as tape:
        in_tf = distribution.read(logits)
        entropy = in_tf.entropy()
    for actual in (log_probs, in_tf.log_prob(actions)):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
    expected_entropy = -sum((np.exp(part) * part).sum(axis=1) for part in parts)
    np.testing.assert_allclose(entropy, expected_entropy, rtol=1e-5)
    assert np.isfinite(tape.gradient(entropy, logits)).all()
    variances = [np.exp(part).var(axis=1) for part in parts]
    np.testing.assert_allclose(distribution.variance(HEADS), np.mean(variances, axis=0), rtol=1e-5)
