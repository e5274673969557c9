"""The loop of acting that training, selection and evaluation share."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from quarl_tf import environments
from quarl_tf.foundation.errors import QuarlError, UsageError


class Tick(NamedTuple):
    """One step; in a vector environment every field is [num_envs, ...]."""

    observations: Any  #: Before the actions.
    actions: Any
    rewards: Any
    terminated: Any
    starts: Any  #: False where the observation was its episode's last: this tick only resets.
    truncated: Any = False
    following: Any = None  #: The observations after the actions.
    info: Mapping[str, Any] = {}

    @property
    def done(self) -> Any:
        """Whether the episode was terminated or truncated."""
        return self.terminated | self.truncated


def ticks(env: Any, act: Callable[[Any], Any], observations: Any) -> Iterator[Tick]:
    """Act in an environment or a vector without end, from the `observations` of a reset.

    A UsageError for a vector whose step writes into the observations of the step before.
    """
    starts: Any = np.ones(getattr(env, "num_envs", ()), np.bool_)
    while True:
        actions = act(observations)
        following, rewards, *ends, info = env.step(actions)
        # Of ends that are numbers, ~ would be -1 and -2.
        terminated, truncated = (np.asarray(end, np.bool_) for end in ends)
        if starts.ndim and np.shares_memory(observations, following):
            raise UsageError(
                "A vector environment must return observations of their own at each step; copy "
                f"them. Received: the array of the step before, of {env.unwrapped}"
            )
        yield Tick(observations, actions, rewards, terminated, starts, truncated, following, info)
        starts = np.logical_not(terminated | truncated)
        observations = following


class Episode(NamedTuple):
    """The outcome of an episode."""

    result: float
    length: int
    success: bool | None  #: None where the environment does not report it.
    ties: int = 0  #: Steps at which several actions shared the best value.
    start: int | None = None  #: What it starts with, as in `records.Evaluation.starts`.


def play(env: Any, act: Callable[[Any], Any], observation: Any, seed: int) -> Episode:
    """Play an episode to its end, from the `observation` of a reset with this seed.

    Raises:
        UsageError: It does not end.
        QuarlError: Its return is not finite, or its success no truth value.
    """
    total, length = 0.0, 0
    success: Any = None
    for length, tick in enumerate(ticks(env, act, observation), start=1):
        environments.require_end(length)
        total += float(tick.rewards)
        if tick.done:
            success = tick.info.get(environments.SUCCESS)
            break
    environments.require_finite(total, f"seed={seed}")
    if np.ndim(success) or success not in (None, False, True):
        raise QuarlError(
            f"info[{environments.SUCCESS!r}] is True or False; correct the environment. "
            f"Received: {success!r}, seed={seed}"
        )
    return Episode(total, length, None if success is None else bool(success))
