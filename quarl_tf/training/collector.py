"""The stream of a training: an agent's steps in its vector of environments, episode by episode."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf import environments
from quarl_tf.agents import Agent
from quarl_tf.foundation.seeding import environment_seed

_RECENT_EPISODES = 20


class Collector:
    """Acts tick by tick, and counts steps, episodes and returns."""

    def __init__(self, env_id: str, num_envs: int, seed: int) -> None:
        """Make the environments; `restart` begins."""
        self.envs = environments.make_vector(env_id, num_envs, training=True)
        #: Steps of the environments so far, over all of them.
        self.step = 0
        self.episodes = 0
        #: Returns of the latest episodes.
        self.recent: deque[float] = deque(maxlen=_RECENT_EPISODES)
        self._seed = seed
        self.observations: npt.NDArray[Any] = np.empty(0)
        self._actions: npt.NDArray[Any] = np.empty(0)
        self._starts = np.ones(num_envs, np.bool_)
        self._running = np.zeros(num_envs)

    def restart(self) -> None:
        """Begin fresh episodes, on seeds that follow from the step."""
        seed = environment_seed(self._seed, "training", self.step)
        self.observations, _ = self.envs.reset(seed=seed)
        self._starts[:] = True
        self._running[:] = 0.0

    def tick(self, agent: Agent, progress: float) -> None:
        """Let the agent act once in every environment and see what comes of it.

        Args:
            agent: Who acts.
            progress: Share of the training that is done.
        """
        observations, starts = self.observations, self._starts
        actions = agent.act(observations, progress)
        self._actions = actions
        following, rewards, terminated, truncated, info = self.envs.step(actions)
        agent.observe(observations, actions, rewards, terminated, starts)
        done = terminated | truncated
        # Atari: an episode is a life with clipped rewards; what is reported is the game's score.
        self._running += info.get(environments.RAW_REWARD, rewards)
        over = info.get(environments.GAME_OVER, done)
        self.recent.extend(self._running[over].tolist())
        self.episodes += int(np.count_nonzero(over))
        self._running[over] = 0.0
        # Where an episode had ended, this tick was its reset, not a step of the environment.
        self.step += int(np.count_nonzero(starts))
        self.observations, self._starts = following, ~done

    def mean_return(self) -> float | None:
        """Return the mean return of the latest episodes; None before the first has ended."""
        return float(np.mean(self.recent)) if self.recent else None

    def require_finite_returns(self) -> None:
        """Refuse rewards that are not finite, where they are not the answer to such actions.

        Raises:
            QuarlError: There are such.
        """
        # A network that has diverged may ask for actions that are answered by such rewards.
        if np.isfinite(self._actions).all():
            for episode_return in (*self.recent, *self._running.tolist()):
                environments.require_finite(episode_return, f"step={self.step}")

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: counts and returns; the episodes under way are lost."""
        return {"step": self.step, "recent": list(self.recent), "episodes": self.episodes}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take `state` back; `restart` goes on."""
        self.step, self.episodes = state["step"], state["episodes"]
        self.recent.extend(state["recent"])
