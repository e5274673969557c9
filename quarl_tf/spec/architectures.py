"""Network architectures by name, including the papers', as plain data."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quarl_tf.foundation.errors import require_known


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
    first, second, third = filters
    windows = Convolution(first, 8, 4), Convolution(second, 4, 2), Convolution(third, 3, 1)
    return Architecture((units,), windows)


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
    """Return an architecture by name (UsageError if unknown) or by the units of its layers."""
    if not isinstance(network, str):
        return Architecture(tuple(network))
    require_known("network", network, NAMED)
    return NAMED[network]
