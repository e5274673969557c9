"""Random generators and environment seeds by purpose; evaluation seeds are distinct from all."""

import zlib

import numpy as np

_SPLIT = 2**30


def generator(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    """Return the generator of one purpose, e.g. `generator(0, "replay")`."""
    entropy = [seed, zlib.crc32(purpose.encode()), *indices]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def environment_seed(seed: int, purpose: str, *indices: int) -> int:
    """Return an environment seed below 2**30: for training, selection and calibration."""
    return int(generator(seed, purpose, *indices).integers(_SPLIT))


def evaluation_seeds(seed: int, episodes: int) -> list[int]:
    """Return distinct environment seeds from 2**30 up, for the final evaluation only.

    A longer list begins with the shorter ones.
    """
    draws = generator(seed, "evaluation").integers(_SPLIT, 2 * _SPLIT, size=2 * episodes + 64)
    return list(dict.fromkeys(draws.tolist()))[:episodes]
