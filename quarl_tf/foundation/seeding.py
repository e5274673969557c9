"""One random generator per purpose, derived by name; evaluation seeds apart from all others."""

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
    """Return distinct environment seeds from 2**30 up, never used before the final evaluation.

    The first n of a longer list are the list of n, so a longer evaluation begins with
    the episodes of a shorter one.
    """
    draws = generator(seed, "evaluation").integers(_SPLIT, 2 * _SPLIT, size=2 * episodes + 64)
    return list(dict.fromkeys(draws.tolist()))[:episodes]
