"""Atari games by the papers' protocol, single ones or vectors in ale-py's threads.

No sticky actions; frame skip 4 with the maximum of the last two frames; grey 84x84; the last four
stacked, oldest first; up to 30 no-op frames at the start; truncation after 108 000 frames.

As in the papers' wrappers (stable-baselines' `EpisodicLifeEnv`, `FireResetEnv`, `VecFrameStack`),
some steps are forced, without the agent: a no-op after a lost life and, in games with FIRE, FIRE
and action 2 after it and at the start. The next stack holds the frame after them, and zeros before:
a policy need not learn to press FIRE, and sees nothing of the lost life.

A single game takes forced steps within the step before them; in a vector each is a tick. A vector
for training clips rewards to [-1, 1] and ends an episode with each life; forced ticks then only
reset, with reward 0, and all but the last end an episode again. (ale-py's own option starts a new
game at every lost life, so that policies never see what follows the first.)

Vectors draw 0 to 29 no-ops with their own generators (single games: 1 to 30), and do not count them
among the 108 000 frames.
"""

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec as Registration
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TransformObservation

from quarl_tf.environments.registry import GAME
from quarl_tf.environments.spaces import VectorEnv
from quarl_tf.foundation.errors import UsageError

#: Keys of a training vector's `info`: the unclipped reward, and whether the game is over.
RAW_REWARD, GAME_OVER = "quarl_tf/raw_reward", "quarl_tf/game_over"

#: Key of a single game's `info` at a reset: the number of frames before it, 1 to 30. Emulators are
#: deterministic: the same start and actions give the same game.
START = "quarl_tf/start"

_NOOP_MAX = 30
_NOOP, _FIRE, _AFTER_FIRE = 0, 1, 2
_DEPTH = 4
_SPACE = gym.spaces.Box(0, 255, (84, 84, _DEPTH), np.uint8)

#: The rules of an evaluation, over whole games.
_RULES = {
    "sticky_actions": 0.0,
    "frame_skip": 4,
    "max_pooled_frames": 2,
    "frame_stack": _DEPTH,
    "frame_size": [84, 84],
    "noop_max": _NOOP_MAX,
    "max_frames": 108_000,
    "opening": f"FIRE and action {_AFTER_FIRE}",
    "after_lost_life": "no-op and opening, empty stack",
}


def rules(env_id: str, sticky: float = 0.0) -> dict[str, Any] | None:
    """Return the rules of a game's evaluation; None for other environments."""
    if not env_id.endswith(GAME):
        return None
    opening = {"opening": f"FIRE twice and action {_AFTER_FIRE}"} if sticky else {}
    return _RULES | {"sticky_actions": sticky} | opening


def plays(registration: Registration) -> bool:
    """Tell whether this is a game of the papers' protocol; a UsageError for other variants."""
    if not str(registration.entry_point).startswith("ale_py."):
        return False
    if not registration.id.endswith(GAME):
        name = registration.id.removeprefix("ALE/").split("-")[0].removesuffix("NoFrameskip") + GAME
        hint = f"name {name}" if name in gym.registry else f"this one has no id {name}"
        raise UsageError(
            f"Atari games are played by the papers' protocol; {hint} (--sticky 0.25 evaluates with "
            f"the chance of ALE/…-v5). Received: environment={registration.id!r}"
        )
    return True


def make(registration: Registration, sticky: float = 0.0, **options: Any) -> gym.Env[Any, Any]:
    """Make one game, which repeats its last action at a frame with probability `sticky`."""
    import ale_py

    # Without a banner of every emulator on standard error.
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    # AtariPreprocessing reads grey frames itself; colour ones would be wasted.
    env = gym.make(
        registration.id,
        disable_env_checker=True,
        obs_type="grayscale",
        repeat_action_probability=sticky,
        **options,
    )
    opening = _opening(env.get_wrapper_attr("ale").getMinimalActionSet())
    env = FrameStackObservation(AtariPreprocessing(env, noop_max=_NOOP_MAX), _DEPTH)
    # FIRE twice where actions are sticky, as a game may miss the first.
    env = _Game(env, opening[:1] * (sticky > 0) + opening)
    return TransformObservation(env, lambda planes: channels_last(planes[None])[0], _SPACE)


def make_vector(registration: Registration, num_envs: int, *, training: bool) -> VectorEnv:
    """Make a vector of games; its results do not depend on the timing of its threads."""
    from ale_py.vector_env import AtariVectorEnv

    envs = AtariVectorEnv(
        registration.kwargs["game"],
        num_envs,
        max_num_frames_per_episode=registration.kwargs["max_num_frames_per_episode"],
        repeat_action_probability=0.0,
        autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP,
        img_height=84,
        img_width=84,
        grayscale=True,
        stack_num=_DEPTH,
        frameskip=4,
        maxpool=True,
        noop_max=_NOOP_MAX,
        # `_Games` handles lives and clipping, and needs the raw rewards.
        episodic_life=False,
        life_loss_info=False,
        reward_clipping=False,
        use_fire_reset=False,
    )
    return _Games(envs, _opening(envs.ale.get_action_set()), training=training)


class _Games(gym.vector.VectorWrapper):
    """Adds the forced steps, and clips rewards and ends episodes for training."""

    def __init__(self, envs: VectorEnv, opening: tuple[int, ...], *, training: bool) -> None:
        super().__init__(envs)
        self.single_observation_space = _SPACE
        self.observation_space = gym.vector.utils.batch_space(_SPACE, envs.num_envs)
        self._training = training
        # At a game's end ale-py resets at the next tick, whatever its action.
        self._forced_actions = np.array([_NOOP, *opening])
        #: Remaining forced steps, frames shown of the current life, and lives.
        self._steps_left, self._age, self._lives = np.zeros((3, envs.num_envs), np.int32)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, Any]:
        planes, info = self.env.reset(seed=seed, options=options)
        for action in self._forced_actions[1:]:
            planes, *_, info = self.env.step(np.full(self.num_envs, action))
        self._steps_left[:], self._age[:], self._lives = 0, 1, info["lives"]
        return channels_last(_life_frames(planes, self._age)), info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        forced = self._steps_left > 0
        actions = np.where(forced, self._forced_actions[-self._steps_left], actions)
        planes, rewards, terminated, truncated, info = self.env.step(actions)
        rewards, over = rewards.astype(np.float64), terminated | truncated
        lost = _life_lost(self._lives, info["lives"]) & ~over
        self._lives = info["lives"]
        fewer = np.maximum(self._steps_left - 1, 0)
        self._steps_left = np.where(over | lost, len(self._forced_actions), fewer)
        self._age = np.where(forced, 1, np.minimum(self._age + 1, _DEPTH))
        if self._training:
            info[RAW_REWARD], info[GAME_OVER] = rewards, over
            rewards = np.where(forced, 0.0, np.clip(rewards, -1, 1))
            terminated = (self._steps_left > 0) & ~truncated
        return channels_last(_life_frames(planes, self._age)), rewards, terminated, truncated, info

    def close(self, **kwargs: Any) -> None:
        super().close(**kwargs)
        vars(self.env).pop("ale", None)  # ale-py's own keeps the emulators and their threads.


class _Game(gym.Wrapper[Any, Any, Any, Any]):
    """Adds the forced steps, and the number of a game's start."""

    def __init__(self, env: gym.Env[Any, Any], opening: tuple[int, ...]) -> None:
        super().__init__(env)
        self._opening = opening

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        planes, info = self.env.reset(seed=seed, options=options)
        start = {START: info["episode_frame_number"]}
        for action in self._opening:
            planes, *_, info = self.env.step(action)
        self._age, self._lives = 1, info["lives"]
        return _life_frames(planes, self._age), info | start

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        total, actions = 0.0, [action]
        self._age = min(self._age + 1, _DEPTH)
        while actions:
            planes, reward, terminated, truncated, info = self.env.step(actions.pop(0))
            total += float(reward)
            if terminated or truncated:
                break
            if _life_lost(self._lives, info["lives"]):
                self._age, actions = 1, [_NOOP, *self._opening]
            self._lives = info["lives"]
        return _life_frames(planes, self._age), total, terminated, truncated, info


def _opening(actions: list[Any]) -> tuple[int, ...]:
    """Return the forced steps at the start of a life: FIRE, if the game has it, is action 1."""
    return (_FIRE, _AFTER_FIRE) if actions[_FIRE].name == "FIRE" else ()


def _life_lost(before: Any, lives: Any) -> Any:
    """Tell whether a life was lost, but not the last: some games stay at 0 before they end."""
    return (lives < before) & (lives > 0)


def _life_frames(planes: npt.NDArray[np.uint8], ages: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """Blank the frames [..., 4, 84, 84] from before the current lives."""
    if np.min(ages) == _DEPTH:
        return planes
    planes = planes.copy()
    planes[np.arange(_DEPTH - 1, -1, -1) >= np.expand_dims(ages, -1)] = 0
    return planes


def channels_last(planes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Turn frames [n, 4, 84, 84] into images [n, 84, 84, 4], the layout of CPU kernels.

    OpenCV takes 12 us for eight, NumPy's transposed copy 150.
    """
    import cv2

    count, channels, height, width = planes.shape
    columns = [np.ascontiguousarray(planes[:, c]).reshape(-1, width) for c in range(channels)]
    image: npt.NDArray[Any] = cv2.merge(columns)
    return image.reshape(count, height, width, channels)
