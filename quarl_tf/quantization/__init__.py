"""Quantisers: the affine mathematics and what applies it to networks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from quarl_tf.spec import Quantization


def preparing(quantization: Quantization | None) -> Callable[[Any], Any]:
    """Return what makes networks quantisation-aware, or leaves them as they are for None."""
    if quantization is None:
        return lambda network: network
    # It loads a second Keras: seconds and 70 MB that plain trainings do without.
    from quarl_tf.quantization import qat

    return partial(qat.quantize, quantization=quantization)
