"""Gymnasium environments by id: single ones for evaluation, vectors for training.

Vector environments use Gymnasium's NEXT_STEP autoreset: the step after an episode's last
observation ignores its action and returns the first observation of the next episode with reward 0.
Learners must skip that step.

After `reset(seed=...)` everything depends on the seed and the actions alone, not on earlier
episodes; a user's own environment must ensure this itself (`require_seeded`).
"""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any, Protocol, cast, runtime_checkable

import gymnasium as gym
import numpy as np
import numpy.typing as npt

import quarl_tf.environments.airnav  # Registers AirNav-v0.
from quarl_tf.environments import atari, loops, registry, spaces, wrappers
from quarl_tf.environments.atari import GAME_OVER, RAW_REWARD, START, channels_last, rules
from quarl_tf.environments.registry import canonical_id, import_environments
from quarl_tf.foundation.errors import QuarlError, UsageError, require_known
from quarl_tf.presets import ALGORITHMS
from quarl_tf.spec import Chance, actions

SUCCESS = "is_success"  #: Key of a step's info for success, as in robotics environments.
LONGEST_EPISODE = 100_000  #: In steps; Atari games end after 27 000.


@dataclass(frozen=True)
class EnvSpec:
    """Shapes and bounds of an environment's observations and actions."""

    observation_shape: tuple[int, ...]  #: Without a batch dimension.
    observation_dtype: str  #: "float32" or "uint8".
    #: A tuple for several actions at once (MultiDiscrete); None if actions are continuous.
    num_actions: int | tuple[int, ...] | None
    action_low: tuple[float, ...] | None = None  #: Bounds of continuous actions.
    action_high: tuple[float, ...] | None = None
    frame_stack: int = 1  #: Frames in an observation, newest last; 1 if it is no stack of frames.

    @property
    def action_size(self) -> int:
        """Return the number of discrete actions, or of components of a continuous one."""
        choices = self.num_actions
        return len(self.action_low or ()) if choices is None else int(np.sum(choices))

    @property
    def facts(self) -> dict[str, Any]:
        """Return what sidecars record, JSON-ready."""
        facts = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        del facts["frame_stack"]
        return facts

    @cached_property
    def bounds(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return lowest and highest continuous actions, in float32 as the spaces require."""
        low, high = self.action_low or (), self.action_high or ()
        return np.array(low, np.float32), np.array(high, np.float32)

    def greedy(self, heads: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return the best actions of heads [n, outputs]; the first of equal values."""
        if self.num_actions is None:
            return np.clip(heads, *self.bounds)
        return actions.best(heads, self.num_actions)


@runtime_checkable
class Rising(Protocol):
    """A vector environment with a curriculum: its task becomes harder during a training."""

    def train_from(self, state: Any) -> None:
        """Continue from a `training_state`, or start with the easiest task for None."""

    def training_state(self) -> Any:
        """Return the state for a checkpoint, JSON-ready."""


def require_actions(algo: str, spec: EnvSpec) -> None:
    """Raise a UsageError for actions that an algorithm does not support."""
    require_known("algorithm", algo, ALGORITHMS)
    kinds = {int: "discrete", tuple: "multi-discrete", type(None): "continuous"}
    kind = kinds[type(spec.num_actions)]
    algos = [name for name, preset in ALGORITHMS.items() if preset.ACTIONS in (None, kind)]
    if algo not in algos:
        raise UsageError(
            f"{algo} needs {ALGORITHMS[algo].ACTIONS} actions; take {' or '.join(algos)}. "
            f"Received: actions={kind!r}"
        )


def require_chance(env_id: str, chance: Chance, algo: str | None = None) -> None:
    """Raise a UsageError for chance that an environment or an algorithm does not support."""
    if chance.sticky and rules(env_id) is None:
        flaw = "Only Atari games repeat actions by chance"
    elif chance.kind == "epsilon" and env_spec(env_id).num_actions is None:
        flaw = "Only discrete actions are replaced by random ones"
    elif chance.kind == "sampled" and algo is not None and not ALGORITHMS[algo].STOCHASTIC:
        flaw = f"Policies of {algo} are no distribution to sample actions from"
    else:
        return
    option = chance.option.split()[0]
    raise UsageError(f"{flaw}; leave out {option}. Received: environment={env_id!r}")


def require_spaces(env_id: str, run_id: str, recorded: Mapping[str, Any]) -> None:
    """Raise a QuarlError if an environment's spaces are not those recorded of a training in it."""
    for name, value in env_spec(env_id).facts.items():
        if value != recorded[name]:
            raise QuarlError(
                f"{env_id} is not the environment that {run_id} was trained in; use the version "
                "it was trained in, or train again. "
                f"Received: {name}={value}, the policy's is {recorded[name]}"
            )


def require_seeded(env_id: str) -> None:
    """Raise a UsageError for a user's own environment that starts the same seed in two ways."""
    if registry.is_versioned(env_id):
        return
    creates: list[Callable[[], Any]] = [partial(make, env_id)]
    if registry.find(env_id).vector_entry_point is not None:
        creates.append(partial(make_vector, env_id, 2))
    for create in creates:
        with closing(create()) as env:
            # Copied, as an environment may write into one array.
            first, second = (np.array(env.reset(seed=0)[0]) for _ in range(2))
        if not np.array_equal(first, second):
            raise UsageError(
                "The environment starts the same seed in two ways, so that schemes would play "
                "other episodes; call super().reset(seed=seed) and draw from self.np_random "
                f"alone, in a vector from one of each. Received: environment={env_id!r}"
            )


def require_end(steps: int) -> None:
    """Raise a UsageError for an episode of so many steps that it may never end."""
    if steps > LONGEST_EPISODE:
        raise UsageError(
            "An episode is too long to be played to its end; register the environment with a time "
            f"limit of at most {LONGEST_EPISODE} (max_episode_steps=…). Received: steps={steps}"
        )


def require_finite(rewards: float, where: str) -> None:
    """Raise a QuarlError for a sum of rewards that is not finite; the message names `where`."""
    if not math.isfinite(rewards):
        raise QuarlError(
            "The environment gave a reward that is not finite; fix it before training or "
            f"comparing policies. Received: sum={rewards}, {where}"
        )


def make(env_id: str, *, sticky: float = 0.0, **options: Any) -> gym.Env[Any, Any]:
    """Make one environment with plain spaces (see `environments.spaces`).

    Atari games follow the papers' evaluation protocol (see `environments.atari`), but repeat their
    last action at a frame with probability `sticky`. Options are those of `gymnasium.make`. A
    UsageError if the environment is unknown, cannot be made, or needs a missing package.
    """
    registration = registry.find(env_id)
    with registry.making(env_id):
        if atari.plays(registration):
            return atari.make(registration, sticky, **options)
        create = partial(gym.make, env_id, disable_env_checker=True, **options)
        keeps_state = str(registration.entry_point).startswith(wrappers.KEEPS_STATE)
        env = wrappers.RebuildOnReset(create) if keeps_state else create()
        return spaces.plain(env if registry.is_versioned(env_id) else wrappers.UserEnvironment(env))


def make_vector(
    env_id: str, num_envs: int, *, training: bool = False, once: bool = False
) -> spaces.VectorEnv:
    """Make a vector environment: NumPy-vectorised where Gymnasium has one, else loops.

    For `training`, Atari games are shaped as in the papers (see `environments.atari`), and a
    curriculum starts with its easiest task. If only one episode of each environment counts
    (`once`), loops do not go on after it. Errors are those of `make`.
    """
    registration = registry.find(env_id)
    with registry.making(env_id):
        if atari.plays(registration):
            return atari.make_vector(registration, num_envs, training=training)
        if registration.vector_entry_point is None:
            create = partial(make, env_id)
            return loops.make_loop(registration, create, num_envs, once=once)
        envs = gym.make_vec(env_id, num_envs, vectorization_mode="vector_entry_point")
    mode = envs.metadata.get("autoreset_mode")
    if mode != gym.vector.AutoresetMode.NEXT_STEP:
        raise UsageError(
            "A vector environment must reset at the step after an episode's end "
            f"(AutoresetMode.NEXT_STEP). Received: {env_id} with {mode}"
        )
    if training and isinstance(envs.unwrapped, Rising):
        envs.unwrapped.train_from(None)
        _require_json(env_id, envs.unwrapped.training_state())
    return spaces.plain_vector(envs if registry.is_versioned(env_id) else wrappers.UserVector(envs))


def _require_json(env_id: str, state: Any) -> None:
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise UsageError(
            "The training state of a curriculum is stored as JSON; return lists of plain numbers "
            f"(int(…)). Received: environment={env_id!r}, {error}"
        ) from error


def env_spec(env_id: str) -> EnvSpec:
    """Read the spaces of an environment; a UsageError if they are not supported."""
    with closing(make(env_id)) as env:
        observation, action = env.observation_space, env.action_space
    if (flaw := spaces.flaw(observation, action)) is not None:
        raise UsageError(f"{flaw}. Received: {env_id} with {observation} and {action}")
    shape, dtype = observation.shape or (), str(observation.dtype)
    if isinstance(action, gym.spaces.MultiDiscrete):
        return EnvSpec(shape, dtype, tuple(action.nvec.tolist()))
    if isinstance(action, gym.spaces.Discrete):
        depth = shape[-1] if atari.plays(registry.find(env_id)) else 1
        return EnvSpec(shape, dtype, int(action.n), frame_stack=depth)
    box = cast(gym.spaces.Box, action)
    return EnvSpec(shape, dtype, None, tuple(box.low.tolist()), tuple(box.high.tolist()))
