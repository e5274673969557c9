"""Vectors of environments that Gymnasium does not vectorise: loops, divided among processes.

Gymnasium's AsyncVectorEnv has a process and a message for every environment, which costs more than
it saves. Here every process steps its share in a loop, and a message carries the whole share. The
results are those of one loop.
"""

import signal
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec as Registration
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import batch_space

from quarl_tf.foundation import processes
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.provenance import available_cores

_Factory = Callable[[], gym.Env[Any, Any]]

#: Environments whose step takes longer than a message. They compute nothing with TensorFlow, whose
#: threads a forked process does not have: users' own environments stay in one loop.
_SLOW = (
    "gymnasium.envs.box2d.",
    "gymnasium.envs.classic_control.acrobot",
    "pybullet_envs_gymnasium.",
)
_SMALLEST_SHARE = 4  #: Environments of a process.
_SPIN_SECONDS = 0.002  #: Longer than the choice of actions.


def make_loop(
    registration: Registration, create: _Factory, num_envs: int, *, once: bool
) -> gym.vector.VectorEnv[Any, Any, Any]:
    """Make a vector of environments; `once` if only one episode of each counts."""
    factories = [lambda: _Looped(create(), once)] * num_envs
    count = min(len(available_cores()), num_envs // _SMALLEST_SHARE)
    quick = not str(registration.entry_point).startswith(_SLOW)
    if count < 2 or quick or not processes.may_start():
        return SyncVectorEnv(factories)
    return Divided(factories, count)


class _Looped(gym.Wrapper[Any, Any, Any, Any]):
    """Gives empty infos: none is read, and Gymnasium's vector fails where their shapes vary.

    If `once`, it stands still from the end of an episode to the next seeded reset.
    """

    def __init__(self, env: gym.Env[Any, Any], once: bool) -> None:
        super().__init__(env)
        self._once, self._over = once, False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        if seed is not None or not self._over:
            self._observation, _ = self.env.reset(seed=seed, options=options)
            self._over = False
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self._over:
            return self._observation, 0.0, False, False, {}
        self._observation, reward, terminated, truncated, _ = self.env.step(action)
        self._over = self._once and (terminated or truncated)
        return self._observation, reward, terminated, truncated, {}


class Divided(gym.vector.VectorEnv[Any, Any, Any]):
    """Steps the first share of its environments itself, the others in forked processes.

    Its infos are empty.
    """

    def __init__(self, factories: Sequence[_Factory], processes: int) -> None:
        self.num_envs = len(factories)
        bounds = [i * self.num_envs // processes for i in range(processes + 1)]
        self._shares = [slice(*pair) for pair in pairwise(bounds)]
        self._pipes: list[Connection] = []
        # Its processes end when their pipes are closed, also by the end of this process.
        weakref.finalize(self, _close, self._pipes)
        context = get_context("fork")
        for share in self._shares[1:]:
            pipe, worker_pipe = context.Pipe()
            self._pipes.append(pipe)
            arguments = worker_pipe, self._pipes[:], factories[share]
            context.Process(target=_serve, args=arguments, daemon=True).start()
            worker_pipe.close()
        self._local_envs = SyncVectorEnv(factories[self._shares[0]])
        self.metadata = self._local_envs.metadata
        self.single_observation_space = self._local_envs.single_observation_space
        self.single_action_space = self._local_envs.single_action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start episodes with the seeds `seed`, `seed + 1` and so on."""
        seeds = [None if seed is None else seed + share.start for share in self._shares]
        (observations,) = self._call("reset", [{"seed": s, "options": options} for s in seeds])
        return observations, {}

    def step(self, actions: npt.NDArray[Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all environments at once."""
        fields = self._call("step", [{"actions": actions[share]} for share in self._shares])
        observations, rewards, terminated, truncated = fields
        return observations, rewards, terminated, truncated, {}

    def _call(self, name: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        """Call a method in all processes; return its results but the infos, put together."""
        with _naming_a_kill():
            for pipe, share_arguments in zip(self._pipes, arguments[1:], strict=True):
                pipe.send((name, share_arguments))
        local_answer = getattr(self._local_envs, name)(**arguments[0])[:-1]
        with _naming_a_kill():
            answers = [local_answer, *map(_receive, self._pipes)]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return [np.concatenate(field) for field in zip(*answers, strict=True)]

    def close_extras(self, **kwargs: Any) -> None:
        """End the processes."""
        del kwargs
        _close(self._pipes)
        self._local_envs.close()


@contextmanager
def _naming_a_kill() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise QuarlError(
            "A process that steps environments was killed, perhaps for want of memory; repeat "
            f"the command, which goes on from the last checkpoint. Received: {error!r}"
        ) from error


def _close(pipes: Sequence[Connection]) -> None:
    for pipe in pipes:
        pipe.close()


def _receive(pipe: Connection) -> Any:
    """Wait for a message, at first without sleep: to wake a core takes longer than a step."""
    deadline = time.monotonic() + _SPIN_SECONDS
    while not pipe.poll() and time.monotonic() < deadline:
        pass
    return pipe.recv()


def _serve(pipe: Connection, others: Sequence[Connection], factories: Sequence[_Factory]) -> None:
    """Answer calls of a vector's methods until the pipe is closed."""
    _close(others)  # A forked process inherits them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The other process answers an interrupt.
    envs = SyncVectorEnv(factories)
    with suppress(EOFError, OSError):
        while True:
            name, arguments = _receive(pipe)
            answer: Any
            try:
                answer = getattr(envs, name)(**arguments)[:-1]
            except Exception as error:  # Raised in the other process.
                answer = error
            pipe.send(answer)
