"""Store kernels that lie on a grid of 4 bits or fewer as int4, by litert-quantizer.

The float flatbuffer of a quantisation-aware training has such kernels, spelled out as floats. As
int4 two of them share a byte; the runtime turns them back into the same floats but for rounding,
which the grids behind them absorb. Kernels on finer grids, as those at the edges of a network
usually are, become int8. Like fp16 it saves size and not time.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from quarl_tf.foundation import native_output
from quarl_tf.foundation.errors import QuarlError, one_line
from quarl_tf.runtime import flatbuffer
from quarl_tf.spec import INT4_BITS

#: Most that a weight may change, relative to it: a step that was guessed wrong moves some by a
#: 127th or more, rounding by a hundred-thousandth.
_ROUNDING = 1e-3


def pack(content: bytes, grids: Sequence[tuple[int, bool]]) -> bytes:
    """Return a float flatbuffer with its kernels as integers.

    Args:
        content: A flatbuffer whose kernels lie on symmetric grids.
        grids: Bits of each kernel's grid and whether each output has one of its own, from the
            first layer to the last.

    Raises:
        QuarlError: litert-quantizer is not installed, a kernel lies on no such grid, or has too
            few values on one to tell its step by.
    """
    quantizer, recipes, types, algorithms = _library()
    recipe = recipes.RecipeManager()
    for layer, (bits, per_channel) in zip(flatbuffer.layers(content), grids, strict=True):
        recipe.add_weight_only_config(
            f"^{re.escape(layer.output)};?$",
            types.TFLOperationName[layer.operator],
            num_bits=4 if bits <= INT4_BITS else 8,
            granularity=types.QuantGranularity["CHANNELWISE" if per_channel else "TENSORWISE"],
            algorithm_key=algorithms.AlgorithmName.DEQUANTIZED_WEIGHT_RECOVERY,
        )
    work = quantizer.Quantizer(bytearray(content), recipe.get_quantization_recipe())
    try:
        with native_output.silenced():
            packed = work.quantize(enable_progress_report=False).quantized_model
    except (RuntimeError, ValueError) as error:
        raise _inexpressible(one_line(error)[:300]) from error
    _require_same_weights(bytes(packed), content)
    return bytes(packed)


def _require_same_weights(packed: bytes, content: bytes) -> None:
    """Refuse kernels whose steps were guessed wrong.

    The library takes the least difference between weights for the step, and bounds errors by an
    absolute number, which small steps never exceed.
    """
    both = (flatbuffer.weights(source).values() for source in (packed, content))
    for found, wanted in zip(*both, strict=True):
        if not np.allclose(found, wanted, rtol=_ROUNDING, atol=0):
            raise _inexpressible(f"other weights in a kernel of shape {wanted.shape}")


def _inexpressible(received: str) -> QuarlError:
    return QuarlError(
        "litert-quantizer cannot express this network's kernels as integers; use qat_wNaN. "
        f"Received: {received}"
    )


def _library() -> tuple[Any, Any, Any, Any]:
    try:
        from litert_quantizer import algorithm_manager, qtyping, quantizer, recipe_manager
    except ImportError as error:
        raise QuarlError(
            "int4 needs litert-quantizer; install it with `pip install litert-quantizer`. "
            f"Received: {error}"
        ) from error
    return quantizer, recipe_manager, qtyping, algorithm_manager
