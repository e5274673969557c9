"""Store kernels that lie on a grid of 4 bits or fewer as int4, two weights to a byte.

The float flatbuffer of a quantisation-aware training has such kernels. The runtime converts them
back to the same floats but for rounding, which the grids behind them absorb. Kernels on finer
grids, as those of the head usually are, become int8. Like fp16 it saves size and not time.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from quarl_tf.export.graph import INT4, Graph
from quarl_tf.export.integer import coded
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.quantization.grid import Array, Grid
from quarl_tf.spec import Recipe, TensorFormat
from quarl_tf.spec.recipe import INT4_BITS

_ROUNDING = 1e-3  #: Largest error of a weight that rounding explains, as a share of the step.


def pack(
    content: bytes, recipe: Recipe, grids: Sequence[Mapping[str, Grid]], byte_unit: float
) -> bytes:
    """Return a float flatbuffer with its kernels as integers on the grids of its training.

    The grids are symmetric, in the order of `integer.trained`; `byte_unit` as there. A QuarlError
    where a kernel is on none.
    """
    graph = Graph(content)
    # What scales the input of a layer; bytes have no grid.
    factors = [1 / byte_unit, *(float(grid["output"].step) for grid in grids)]
    pairs = zip(grids, factors, strict=False)
    kernels = [(grid["kernel"].step, factor) for grid, factor in pairs if "kernel" in grid]
    for (name, layer), (step, factor) in zip(graph.layers().items(), kernels, strict=True):
        form: Any = recipe.of(name).weights
        _pack_kernel(graph, layer, form, np.asarray(step, np.float64), factor)
    return graph.pack()


def _pack_kernel(graph: Graph, layer: Any, form: TensorFormat, step: Array, factor: float) -> None:
    """Store a kernel as integers; the converter may have moved the input's factor into it."""
    kernel: Any = graph.constant(layer.inputs[1])
    last_code, options = form.steps // 2, []
    for steps in (step, step * factor):
        # Without the clip, a finer grid could contain the kernel's.
        codes = np.clip(coded(kernel, steps), -last_code, last_code).astype(np.int8)
        error = np.abs((codes.T * steps).T - kernel).max() / steps.max()
        options.append((float(error), steps, codes))
    error, steps, codes = min(options, key=itemgetter(0))
    if error > _ROUNDING:
        name = graph.tensors[layer.inputs[1]].name.decode()
        raise QuarlError(f"A kernel is on no grid of its training; use qat_wNaN. Received: {name=}")
    index = graph.add_integers(layer.inputs[1], np.int8, steps, 0, codes)
    if form.bits <= INT4_BITS:  # Two in a byte, the first in its lower half.
        halves = np.resize(codes, (-(-codes.size // 2), 2))
        graph.tensors[index].type = INT4
        graph.set_constant(index, halves[:, 0] & 15 | halves[:, 1] << 4)
    floats = graph.add(layer.inputs[1], b"_float")
    dequantize = graph.operator("DEQUANTIZE", [index], [floats])
    graph.operators.insert(graph.operators.index(layer), dequantize)
    layer.inputs[1] = floats
