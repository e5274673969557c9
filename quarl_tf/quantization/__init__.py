"""Quantisers: grids, and what applies them to networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quarl_tf.spec import Quantization

Change = Callable[[Any], Any]


def watching(quantization: Quantization | None) -> Change:
    """Return what makes a network one that trains until the delay; for None it stays as it is."""
    if quantization is None:
        return lambda network: network
    # It loads a second Keras: seconds and 70 MB that plain trainings do without.
    from quarl_tf.quantization import qat

    return lambda network: qat.watched(network, quantization.recipe, quantization.schedule)


def quantizing(quantization: Quantization | None) -> Change:
    """Return what makes a network one as it is at the end of a training, but for its variables."""
    if quantization is None:
        return lambda network: network
    from quarl_tf.quantization import qat

    watch = watching(quantization)
    return lambda network: qat.quantized(watch(network))
