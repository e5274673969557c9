"""Atari games by the papers' protocol, one alone or many in ale-py's threads.

No sticky actions; frame skip 4 with the maximum of the last two frames; grey 84x84; the last four
stacked, oldest first, zeros before a game's first; up to 30 no-ops at the start; stopped after
108 000 frames. Games that have FIRE are started by it, and after a lost life FIRE takes the place
of the first action: the papers' wrappers pressed it at each life, so a policy trained under them
never learns to and would wait until the game is stopped (Breakout).

One environment alone, and a vector not for training, play whole games for the game's own rewards.
A vector for training clips them to [-1, 1] and ends an episode with each life: the tick after it
is a step of the running game, whose action (FIRE, or no-op) is not the agent's and whose reward is
0, so it looks like the reset that it stands for. ale-py's own option starts a new game at every
lost life: a policy trained under it never sees what comes after its first.

Vectors show the same frames as single games, but draw 0 to 29 no-ops, one of which FIRE replaces,
with generators of their own (single games: 1 to 30), and do not count them among the 108 000.

Deviations from the papers' wrappers, beside FIRE after a lost life: they press it after the no-ops,
for four frames, and then action 2; here, as in ale-py, it is pressed for one frame before them. And
in training they empty the stack at a lost life, where here the game's frames go on.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec as Registered
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TransformObservation

from quarl_tf.foundation.errors import UsageError

#: Keys of a training vector's `info`, for reports: what the game gave, and whether it is over.
RAW_REWARD, GAME_OVER = "quarl_tf/raw_reward", "quarl_tf/game_over"

#: Key of a single game's `info` at a reset: the frames before it, one of 30 numbers. Emulators have
#: no chance, so games from the same start go alike as long as their actions do.
START = "quarl_tf/start"

#: The rules of an evaluation: whole games, not lives.
_RULES = {
    "sticky_actions": 0.0,
    "frame_skip": 4,
    "max_pooled_frames": 2,
    "frame_stack": 4,
    "frame_size": [84, 84],
    "noop_max": 30,
    "max_frames": 108_000,
    "fire": "at the start and after a lost life",
}

_NOOP_MAX = 30
_NOOP, _FIRE = 0, 1
_SPACE = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)


def rules(env_id: str) -> dict[str, Any] | None:
    """Return the rules by which a game is evaluated; None for other environments."""
    return dict(_RULES) if env_id.endswith("NoFrameskip-v4") else None


def plays(registered: Registered) -> bool:
    """Tell whether an environment is a game to be played by the papers' protocol.

    Raises:
        UsageError: It is a game registered with another protocol.
    """
    if not str(registered.entry_point).startswith("ale_py."):
        return False
    if not registered.id.endswith("NoFrameskip-v4"):
        raise UsageError(
            "Atari games are played by the papers' protocol; name the game's id that ends in "
            f"NoFrameskip-v4. Received: environment={registered.id!r}"
        )
    return True


def make(registered: Registered, noop_max: int = _NOOP_MAX) -> gym.Env[Any, Any]:
    """Make one game."""
    import ale_py

    # Else every emulator introduces itself on standard error.
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    # AtariPreprocessing takes its grey frames itself; colour ones would be made for nothing.
    env = gym.make(registered.id, disable_env_checker=True, obs_type="grayscale")
    fires = _has_fire(env.get_wrapper_attr("ale").getMinimalActionSet())
    env = AtariPreprocessing(_FireAtStart(env) if fires else env, noop_max=noop_max)
    env = FrameStackObservation(_Game(env, fires=fires), 4, padding_type="zero")
    return TransformObservation(env, lambda planes: channels_last(planes[None])[0], _SPACE)


def make_vector(
    registered: Registered, num_envs: int, *, training: bool, noop_max: int = _NOOP_MAX
) -> gym.vector.VectorEnv[Any, Any, Any]:
    """Make a vector of games; its results do not depend on the timing of its threads."""
    from ale_py.vector_env import AtariVectorEnv

    envs = AtariVectorEnv(
        registered.kwargs["game"],
        num_envs,
        batch_size=0,
        num_threads=0,
        thread_affinity_offset=-1,
        max_num_frames_per_episode=registered.kwargs["max_num_frames_per_episode"],
        repeat_action_probability=0.0,
        full_action_space=False,
        continuous=False,
        autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP,
        img_height=84,
        img_width=84,
        grayscale=True,
        stack_num=4,
        frameskip=4,
        maxpool=True,
        noop_max=noop_max,
        # Lives and clipping are seen to in `_Games`, which needs the raw rewards.
        episodic_life=False,
        life_loss_info=False,
        reward_clipping=False,
        use_fire_reset=True,
    )
    return _Games(envs, fires=_has_fire(envs.ale.get_action_set()), training=training)


class _Games(gym.vector.VectorWrapper):
    """Puts channels last, presses FIRE after lost lives, and shapes what training sees."""

    def __init__(
        self, envs: gym.vector.VectorEnv[Any, Any, Any], *, fires: bool, training: bool
    ) -> None:
        super().__init__(envs)
        self.single_observation_space = _SPACE
        self.observation_space = gym.vector.utils.batch_space(_SPACE, envs.num_envs)
        self._training = training
        # The action after a lost life that takes the place of the agent's.
        self._instead = _FIRE if fires else _NOOP
        self._replaces = fires or training
        self._lives = np.zeros(envs.num_envs, np.int32)
        self._life_lost = np.zeros(envs.num_envs, np.bool_)

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        planes, info = self.env.reset(seed=seed, options=options)
        self._lives = info["lives"]
        self._life_lost = np.zeros_like(self._life_lost)
        return channels_last(planes), info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        resumes = self._life_lost
        if self._replaces:
            actions = np.where(resumes, self._instead, actions)
        planes, rewards, terminated, truncated, info = self.env.step(actions)
        rewards = rewards.astype(np.float64)
        over = terminated | truncated
        # At the start of a new game lives go up; some games sit at 0 lives before they end.
        self._life_lost = (info["lives"] < self._lives) & (info["lives"] > 0) & ~over
        self._lives = info["lives"]
        if self._training:
            info[RAW_REWARD], info[GAME_OVER] = rewards, over
            rewards = np.where(resumes, 0.0, np.clip(rewards, -1, 1))
            terminated = terminated | self._life_lost
        return channels_last(planes), rewards, terminated, truncated, info


class _FireAtStart(gym.Wrapper[Any, Any, Any, Any]):
    """Presses FIRE for one frame before the no-ops, as ale-py's vectors do."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self.env.reset(seed=seed, options=options)
        observation, _, _, _, info = self.env.step(_FIRE)
        return observation, info


class _Game(gym.Wrapper[Any, Any, Any, Any]):
    """Tells from which start a game goes on; presses FIRE, if there is, after a lost life."""

    def __init__(self, env: gym.Env[Any, Any], *, fires: bool) -> None:
        super().__init__(env)
        self._fires = fires
        self._lives, self._life_lost = 0, False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._lives, self._life_lost = info["lives"], False
        return observation, info | {START: info["episode_frame_number"]}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.env.step(_FIRE if self._fires and self._life_lost else action)
        lives = result[4]["lives"]
        self._lives, self._life_lost = lives, 0 < lives < self._lives
        return result


def _has_fire(actions: list[Any]) -> bool:
    """Tell whether a game has FIRE, as the papers' wrappers did; ale-py puts it at 1."""
    return bool(actions[_FIRE].name == "FIRE")


def channels_last(planes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Turn frames [n, 4, 84, 84] into images [n, 84, 84, 4], as TensorFlow's CPU kernels want them.

    OpenCV does eight in 12 us; NumPy's transposed copy takes 150.
    """
    import cv2

    count, channels, height, width = planes.shape
    tall = [np.ascontiguousarray(planes[:, c]).reshape(-1, width) for c in range(channels)]
    image: npt.NDArray[Any] = cv2.merge(tall)
    return image.reshape(count, height, width, channels)
