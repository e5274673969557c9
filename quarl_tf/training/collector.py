"""Collect experience: the agent's steps in a vector of environments."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf import environments
from quarl_tf.agents import Agent
from quarl_tf.environments.acting import ticks
from quarl_tf.foundation.seeding import environment_seed
from quarl_tf.presets import Preset

_RECENT_EPISODES = 20


class Collector:
    """Steps an agent through environments; counts steps, episodes and returns."""

    def __init__(self, agent: Agent, env_id: str, preset: Preset, seed: int) -> None:
        self.envs = environments.make_vector(env_id, preset.num_envs, training=True)
        #: Steps so far, the sum over all environments.
        self.step = 0
        self.episodes = 0
        #: Returns of the latest episodes.
        self.recent_returns: deque[float] = deque(maxlen=_RECENT_EPISODES)
        self.observations: npt.NDArray[Any] = np.empty(0)
        self._agent, self._steps, self._seed = agent, preset.steps, seed
        self._running_returns = np.zeros(preset.num_envs)

    def restart(self) -> None:
        """Start new episodes, with seeds that follow from the step."""
        seed = environment_seed(self._seed, "training", self.step)
        self.observations, _ = self.envs.reset(seed=seed)

        def act(observations: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return self._agent.act(observations, self.step / self._steps)

        self._ticks = ticks(self.envs, act, self.observations)
        self._running_returns[:] = 0.0

    def tick(self) -> None:
        """Let the agent act once in every environment and observe the results."""
        tick = next(self._ticks)
        total = float(tick.rewards.sum())
        # Of actions that are not finite the training is to blame, which its loss will tell.
        if not math.isfinite(total) and np.isfinite(tick.actions).all():
            environments.require_finite(total, f"step={self.step}")
        self._agent.observe(tick)
        self.observations = tick.following
        # In Atari an episode is a life with clipped rewards; the score of the game is reported.
        self._running_returns += tick.info.get(environments.RAW_REWARD, tick.rewards)
        ended = tick.info.get(environments.GAME_OVER, tick.done)
        self.recent_returns.extend(self._running_returns[ended].tolist())
        self.episodes += int(np.count_nonzero(ended))
        self._running_returns[ended] = 0.0
        # Ticks that only reset are no steps.
        self.step += int(np.count_nonzero(tick.starts))

    def mean_return(self) -> float | None:
        """Return the mean return of the latest episodes; None before the first has ended."""
        return float(np.mean(self.recent_returns)) if self.recent_returns else None

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, without the current episodes."""
        state = {"step": self.step, "recent": list(self.recent_returns), "episodes": self.episodes}
        if isinstance(self.envs.unwrapped, environments.Rising):
            state["task"] = self.envs.unwrapped.training_state()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; `restart` must follow."""
        self.step, self.episodes = state["step"], state["episodes"]
        self.recent_returns.extend(state["recent"])
        if isinstance(self.envs.unwrapped, environments.Rising):
            self.envs.unwrapped.train_from(state["task"])
