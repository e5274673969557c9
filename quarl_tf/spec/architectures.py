"""Architectures of networks by name, the papers' among them; plain data."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quarl_tf.foundation.errors import unknown

#: Features that deviate by less are normalised by this: what never moved is not blown up.
LEAST_DEVIATION = 1e-2


class Convolution(NamedTuple):
    """A convolution without padding, over square windows."""

    filters: int
    kernel: int
    stride: int


class Architecture(NamedTuple):
    """Hidden layers: convolutions first, then fully-connected ones by their units."""

    hidden_layers: tuple[int, ...]
    convolutions: tuple[Convolution, ...] = ()


def _nature(filters: tuple[int, int, int], units: int) -> Architecture:
    """Return Nature's three convolutions (Mnih et al., 2015) with other widths."""
    windows = ((8, 4), (4, 2), (3, 1))
    layers = (Convolution(n, *window) for n, window in zip(filters, windows, strict=True))
    return Architecture((units,), tuple(layers))


NAMED: Mapping[str, Architecture] = {
    "nature": _nature((32, 64, 64), 512),
    # Li's study of quantisation-aware training of DQN; the network of Mnih et al., 2013.
    "li": Architecture((256,), (Convolution(16, 8, 4), Convolution(32, 4, 2))),
    # QuaRL's policies of growing size: A to C for mixed precision, I to III for deployment.
    "policy_a": _nature((128, 128, 128), 128),
    "policy_b": _nature((512, 512, 512), 512),
    "policy_c": _nature((1024, 1024, 1024), 2048),
    "policy_i": Architecture((64, 64, 64)),
    "policy_ii": Architecture((256, 256, 256)),
    "policy_iii": Architecture((4096, 512, 1024)),
}


def architecture(network: str | Sequence[int]) -> Architecture:
    """Return a preset's architecture: by name, else a UsageError, or by the units of its layers."""
    if not isinstance(network, str):
        return Architecture(tuple(network))
    if network not in NAMED:
        raise unknown("network", network, NAMED)
    return NAMED[network]
