"""Read the network of an exported float flatbuffer, as of a training that is not here."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quarl_tf.presets import Preset
from quarl_tf.runtime.flatbuffer import WEIGHTED, Graph, decode, dequantized, parsed


def variables(
    source: Path, preset: Preset, action_std: Sequence[float] | None = None
) -> dict[str, NDArray[np.float32]]:
    """Return the variables of the network of an exported fp32 or fp16 flatbuffer, by their names.

    The scaling of bytes is taken out of the first layer. The deviation of a normal distribution
    comes from the sidecar. Variables that acting does not need are missing, and those of layer
    normalisation.
    """
    arrays: dict[str, NDArray[np.float32]] = {}
    if action_std is not None:
        arrays["action/log_deviation:0"] = np.log(np.array(action_std, np.float32))
    graph = parsed(source)[0]
    scales_bytes, origins = _scales_bytes(graph), dequantized(graph)
    for op in graph.operators:
        constants = [graph.tensors[origins.get(i, i)] for i in op.inputs[1:]]
        values = [decode(t, t.data) for t in constants if t.data is not None and t.shape]
        layer = re.search(r"policy/(\w+)/", constants[0].name) if constants else None
        if layer is None:
            continue
        if op.name in WEIGHTED:
            kernel, bias = np.moveaxis(values[0], 0, -1), values[1]
            if scales_bytes:
                bias = bias + preset.byte_zero * kernel.reshape(-1, len(bias)).sum(axis=0)
                kernel, scales_bytes = kernel * np.float32(preset.byte_unit), False
            arrays |= {f"{layer[1]}/kernel:0": kernel, f"{layer[1]}/bias:0": bias}
        elif layer[1] == "normalizer" and op.name in ("SUB", "MUL"):
            name = {"SUB": "mean", "MUL": "inverse_deviation"}[op.name]
            arrays[f"normalizer/{name}:0"] = values[0]
    return arrays


def _scales_bytes(graph: Graph) -> bool:
    """Return whether bytes are scaled within the first layer, and not by an operator."""
    casts = {i for op in graph.operators if op.name == "CAST" for i in op.outputs}
    scaled = {i for op in graph.operators if op.name in ("SUB", "MUL") for i in op.inputs}
    return bool(casts - scaled)
