"""Store kernels that lie on a grid of 4 bits or fewer as int4, by litert-quantizer.

The float flatbuffer of a quantisation-aware training has such kernels. As int4 two weights share a
byte; the runtime converts them back to the same floats but for rounding, which the grids behind
them absorb. Kernels on finer grids, as those of the head usually are, become int8. Like fp16 it
saves size and not time.
"""

import re
from collections.abc import Sequence

import numpy as np

from quarl_tf.export.graph import Graph
from quarl_tf.foundation import native_output
from quarl_tf.foundation.errors import QuarlError, one_line
from quarl_tf.runtime import flatbuffer
from quarl_tf.spec import INT4_BITS

#: Largest relative change of a weight: a wrong step changes some by 1/127 or more, rounding by
#: 1e-5.
_ROUNDING = 1e-3


def pack(content: bytes, grids: Sequence[tuple[int, bool]]) -> bytes:
    """Return a float flatbuffer with its kernels as integers.

    They lie on symmetric grids; `grids` has the bits of each and whether each output has its own. A
    QuarlError where litert-quantizer is not installed, a kernel lies on no such grid, or its values
    are too few to find the step.
    """
    try:
        from litert_quantizer import algorithm_manager, qtyping, quantizer, recipe_manager
    except ImportError as error:
        raise QuarlError(
            "int4 needs litert-quantizer; install it in the folder of quarl_tf: "
            f"pip install '.[int4]'. Received: {error}"
        ) from error
    recipe, graph = recipe_manager.RecipeManager(), Graph(content)
    for layer, (bits, per_channel) in zip(graph.layers().values(), grids, strict=True):
        output = graph.tensors[layer.outputs[0]].name.decode()
        recipe.add_weight_only_config(
            f"^{re.escape(output)};?$",
            qtyping.TFLOperationName[graph.name(layer)],
            num_bits=4 if bits <= INT4_BITS else 8,
            granularity=qtyping.QuantGranularity["CHANNELWISE" if per_channel else "TENSORWISE"],
            algorithm_key=algorithm_manager.AlgorithmName.DEQUANTIZED_WEIGHT_RECOVERY,
        )
    packer = quantizer.Quantizer(bytearray(content), recipe.get_quantization_recipe())
    try:
        with native_output.silenced():
            packed_content = bytes(packer.quantize(enable_progress_report=False).quantized_model)
    except (RuntimeError, ValueError) as error:
        raise _refusal(one_line(error)[:300]) from error
    # The library takes the least difference between weights for the step, and limits errors by an
    # absolute number, which small steps never exceed.
    kernels = (flatbuffer.weights(source).values() for source in (packed_content, content))
    for packed_kernel, kernel in zip(*kernels, strict=True):
        if not np.allclose(packed_kernel, kernel, rtol=_ROUNDING, atol=0):
            raise _refusal(f"other weights in a kernel of shape {kernel.shape}")
    return packed_content


def _refusal(received: str) -> QuarlError:
    return QuarlError(
        "litert-quantizer cannot express this network's kernels as integers; use qat_wNaN. "
        f"Received: {received}"
    )
