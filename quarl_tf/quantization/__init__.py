"""Quantisation: grids, and functions that apply them to networks."""

from collections.abc import Callable
from typing import Any

from quarl_tf.spec import Quantization

Change = Callable[[Any], Any]


def watching(quantization: Quantization | None) -> Change:
    """Return the function that makes a network record ranges; the identity for None."""
    if quantization is None:
        return lambda network: network
    # This loads a second Keras: seconds and 70 MB that plain trainings save.
    from quarl_tf.quantization import qat

    return lambda network: qat.watched(network, quantization.recipe, quantization.schedule)


def quantizing(quantization: Quantization | None) -> Change:
    """Return the function that quantises the layers of a network; the identity for None."""
    if quantization is None:
        return lambda network: network
    from quarl_tf.quantization import qat

    watch = watching(quantization)
    return lambda network: qat.quantized(watch(network))
