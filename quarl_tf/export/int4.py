"""Store kernels that lie on a grid of 4 bits or fewer as int4.

The float flatbuffer of a quantisation-aware training has such kernels. As int4 two weights share a
byte; the runtime converts them back to the same floats but for rounding, which the grids behind
them absorb. Kernels on finer grids, as those of the head usually are, become int8. Like fp16 it
saves size and not time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quarl_tf.export.graph import INT4, Graph
from quarl_tf.export.integer import coded
from quarl_tf.quantization.grid import Array, Grid
from quarl_tf.spec import INT4_BITS, Recipe


def pack(content: bytes, recipe: Recipe, grids: Sequence[Mapping[str, Grid]]) -> bytes:
    """Return a float flatbuffer with its kernels as integers on the grids of its training.

    The grids are symmetric, in the order of `integer.trained`.
    """
    graph, factor = Graph(content), 1 / 255
    layers = iter(graph.layers().items())
    for grid in grids:
        if "kernel" in grid:
            _pack_kernel(graph, *next(layers), recipe, grid["kernel"].step, factor)
        factor = float(grid["output"].step)
    return graph.pack()


def _pack_kernel(
    graph: Graph, name: str, layer: Any, recipe: Recipe, step: Array, factor: float
) -> None:
    """Store a kernel as integers.

    The converter may have moved the `factor` that scales the layer's input into the kernel.
    """
    kernel: Any = graph.constant(layer.inputs[1])
    form: Any = recipe.of(name).weights
    candidates = [np.asarray(step, np.float64) * f for f in (1.0, factor)]
    codes, steps = min(
        ((coded(kernel, steps), steps) for steps in candidates),
        key=lambda pair: np.abs((pair[0].T * pair[1]).T - kernel).max(),
    )
    values = codes.astype(np.int8)
    index = graph.add_integers(layer.inputs[1], np.int8, steps, 0, values)
    if form.bits <= INT4_BITS:  # Two in a byte, the first in its lower half.
        pairs = np.resize(values, (-(-values.size // 2), 2))
        graph.tensors[index].type = INT4
        graph.set_constant(index, pairs[:, 0] & 15 | pairs[:, 1] << 4)
    floats = graph.add(layer.inputs[1], b"_float")
    dequantize = graph.operator("DEQUANTIZE", [index], [floats])
    graph.operators.insert(graph.operators.index(layer), dequantize)
    layer.inputs[1] = floats
