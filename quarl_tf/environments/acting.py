"""The one loop that acts: to collect experience, to choose networks and to evaluate."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from quarl_tf import environments


class Tick(NamedTuple):
    """What one action came to; in a vector environment every field is [num_envs, ...]."""

    #: What was acted on.
    observations: Any
    actions: Any
    rewards: Any
    #: Whether the episode terminated by it; truncation does not count.
    terminated: Any
    #: False where the observation was its episode's last: this tick only resets.
    starts: Any
    truncated: Any = False
    #: The observations after it.
    following: Any = None
    info: Mapping[str, Any] = {}

    @property
    def done(self) -> Any:
        """Whether the episode ended by it, in either way."""
        return self.terminated | self.truncated


def ticks(env: Any, act: Callable[[Any], Any], observations: Any) -> Iterator[Tick]:
    """Act in an environment, or a vector, for as long as ticks are taken.

    `act` maps observations to actions; the first `observations` are those of the reset.
    """
    starts: Any = np.ones(getattr(env, "num_envs", ()), np.bool_)
    while True:
        actions = act(observations)
        following, rewards, terminated, truncated, info = env.step(actions)
        yield Tick(observations, actions, rewards, terminated, starts, truncated, following, info)
        starts = np.logical_not(terminated | truncated)
        observations = following


class Episode(NamedTuple):
    """What an episode came to, and which of the game's starts it went on from."""

    result: float
    length: int
    #: None where the environment does not tell.
    success: bool | None
    #: Steps at which several actions shared the best value.
    ties: int = 0
    start: int | None = None


def play(env: Any, act: Callable[[Any], Any], observation: Any, seed: int) -> Episode:
    """Play on from the reset by a seed to the end of the episode, its rewards summed.

    Raises:
        UsageError: It does not end.
        QuarlError: Its return is not finite.
    """
    total, length, success = 0.0, 0, None
    for length, tick in enumerate(ticks(env, act, observation), start=1):
        environments.require_end(length)
        total += float(tick.rewards)
        if tick.done:
            success = tick.info.get(environments.SUCCESS)
            break
    environments.require_finite(total, f"seed={seed}")
    return Episode(total, length, None if success is None else bool(success))
