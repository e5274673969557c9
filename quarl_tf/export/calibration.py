"""Observations to calibrate with, recorded or of rollouts, and returns to choose recipes by.

The seeds of rollouts are used in no training and no evaluation.
"""

import io
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quarl_tf import environments
from quarl_tf.environments.acting import play
from quarl_tf.foundation.errors import QuarlError, one_line
from quarl_tf.foundation.files import read_bytes
from quarl_tf.foundation.seeding import environment_seed
from quarl_tf.runtime.policy import Policy
from quarl_tf.store.records import Sidecar
from quarl_tf.training.rollout import IMAGE_RANK, rollout

#: Most observations returned, and episodes played; images are large and games long.
_VECTORS, _IMAGES = 2000, 1000
_EPISODES, _GAMES = 32, 8

#: Probability that games to choose recipes by repeat an action: greedy games are a few, repeated.
_STICKY = 0.25


def observations(policy: Policy) -> NDArray[Any]:
    """Return observations [n, ...] of a policy's rollouts (see `training.rollout`).

    A QuarlError if the environment has other spaces than the policy.
    """
    sidecar = policy.sidecar
    environments.require_spaces(sidecar.env_id, sidecar.run_id, vars(sidecar))
    is_image = len(sidecar.observation_shape) == IMAGE_RANK
    episodes, keep = (_GAMES, _IMAGES) if is_image else (_EPISODES, _VECTORS)
    seed = environment_seed(int(sidecar.run["seed"]), "calibration")
    with closing(environments.make_vector(sidecar.env_id, episodes, once=True)) as envs:
        found = rollout(envs, lambda batch, _: np.array([*map(policy.act, batch)]), seed, keep)
    return found.observations


def recorded(path: Path, sidecar: Sidecar) -> NDArray[Any]:
    """Return a user's observations [n, ...] from a `.npy` file; a QuarlError where they are unfit.

    Floats may be of any float type; they have to be finite.
    """
    shape, dtype = tuple(sidecar.observation_shape), np.dtype(sidecar.observation_dtype)
    content = read_bytes(path)
    try:
        array = np.lib.format.read_array(io.BytesIO(content))  # type: ignore[no-untyped-call]
    except Exception as error:  # A foreign file may raise anything.
        raise QuarlError(
            f"{path} is no array in .npy; write one with numpy.save. Received: {one_line(error)}"
        ) from error
    same_kind = array.dtype == dtype or (array.dtype.kind == dtype.kind == "f")
    if not (same_kind and array.shape[1:] == shape and array.size):
        raise QuarlError(
            f"Observations of this policy are an array of {dtype}, [n, {str([*shape])[1:]}. "
            f"Received: {array.dtype}, {[*array.shape]} in {path}"
        )
    with np.errstate(over="ignore"):  # Numbers beyond float32 become infinite and are refused.
        converted: NDArray[Any] = array.astype(dtype)
    if dtype.kind == "f" and not np.isfinite(converted).all():
        raise QuarlError(f"Observations are finite numbers of {dtype}. Received: others in {path}")
    return converted


def selection_returns(policy: Policy, episodes: int) -> list[float]:
    """Return the returns of a policy in episodes that are the same for all policies of a run.

    Games have sticky actions.
    """
    run, returns = policy.sidecar.run, []
    with closing(environments.make(policy.sidecar.env_id, sticky=_STICKY)) as env:
        for number in range(episodes):
            seed = environment_seed(int(run["seed"]), "recipe selection", number)
            observation, _ = env.reset(seed=seed)
            returns.append(play(env, policy.act, observation, seed).result)
    return returns
