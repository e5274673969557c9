"""How networks are evaluated: compiled, or as a snapshot in NumPy where they are small."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.networks.layers import Floats, Forward, unwrap


def _is_plain(network: keras.Model) -> bool:
    """Tell whether a network is dense layers in float32, which XLA and NumPy are fast at."""
    kernels = [layer for layer in map(unwrap, network.layers) if hasattr(layer, "kernel")]
    images = any(isinstance(layer, keras.layers.Conv2D) for layer in kernels)
    return not images and {layer.compute_dtype for layer in kernels} <= {"float32"}


def compiled(function: Callable[..., Any], network: keras.Model) -> Callable[..., Any]:
    """Compile a function of arrays about a network: by XLA, or for oneDNN's kernels.

    XLA saves the calls between small operations, but has slow convolutions on CPUs, and slow
    products in bfloat16.
    """
    by_kind: dict[tuple[Any, ...], Any] = {}

    def call(*arrays: npt.NDArray[Any]) -> Any:
        tensors = [tf.constant(array) for array in arrays]
        kind = tuple(array.shape for array in arrays)
        if kind not in by_kind:
            traced = tf.function(function, jit_compile=_is_plain(network))
            by_kind[kind] = traced.get_concrete_function(*tensors)
        # TensorFlow's own search for the trace that fits takes 200 us a call, and to match the
        # arguments with its signature as long again.
        trace = by_kind[kind]
        return trace.inference_fn.call_preflattened([*tensors, *trace.captured_inputs])

    return call


def forward(network: keras.Model) -> Forward:
    """Return the compiled forward pass: observations [n, ...] to heads [n, outputs]."""
    run = compiled(network, network)

    def call(observations: npt.NDArray[Any]) -> Floats:
        heads: Floats = run(observations).numpy()
        return heads

    return call


class Snapshot:
    """The forward pass of a network, up to date after each `refresh`.

    Networks without convolutions in float32 are evaluated by NumPy as they stood then: a call into
    TensorFlow costs 150 us however small the network, which is ten times what the arithmetic of a
    few observations takes. Others are evaluated as they stand, in the arithmetic that learns.
    """

    def __init__(self, network: keras.Model) -> None:
        self._compiled = None if _is_plain(network) else forward(network)
        # Kept, for Keras walks through all it contains whenever it is asked for variables.
        self.variables: Sequence[Any] = list(network.variables)
        self._layers = [(layer, list(layer.variables)) for layer in network.layers[1:]]
        self._steps: list[Forward] = []
        self.refresh()

    def refresh(self, values: Sequence[npt.NDArray[Any]] | None = None) -> None:
        """Bring the snapshot up to date, by the values of all variables if they are at hand.

        To read them one by one takes longer than to evaluate a small network.
        """
        if self._compiled is not None:
            return
        arrays = [variable.numpy() for variable in self.variables] if values is None else values
        by_variable = {id(v): array for v, array in zip(self.variables, arrays, strict=True)}
        self._steps = [
            in_numpy(layer, [by_variable[id(v)] for v in variables])
            for layer, variables in self._layers
        ]

    def __call__(self, observations: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return heads [n, outputs] of observations [n, ...]."""
        if self._compiled is not None:
            return self._compiled(observations)
        for step in self._steps:
            observations = step(observations)
        return observations


def in_numpy(layer: Any, values: Sequence[npt.NDArray[Any]]) -> Forward:
    """Return what a layer computes with given values of its variables."""
    if hasattr(layer, "in_numpy"):
        forward_pass: Forward = layer.in_numpy(*values)
        return forward_pass
    if isinstance(layer, keras.layers.Dense):
        kernel, bias = values
        activation = _ACTIVATIONS[layer.activation.__name__]
        return lambda x: activation(x @ kernel + bias)
    if isinstance(layer, keras.layers.LayerNormalization):
        (gamma, beta), epsilon = values, layer.epsilon

        def normalise(x: Floats) -> Any:
            centred = x - x.mean(axis=-1, keepdims=True)
            variance = (centred * centred).mean(axis=-1, keepdims=True)
            return centred / np.sqrt(variance + epsilon) * gamma + beta

        return normalise
    if isinstance(layer, keras.layers.Activation):
        return _ACTIVATIONS[layer.activation.__name__]
    if isinstance(layer, keras.layers.Flatten):
        return lambda x: x.reshape(len(x), -1)
    raise QuarlError(f"NumPy has no such layer. Received: {layer.name} ({type(layer)})")


_ACTIVATIONS: Mapping[str, Forward] = {
    "linear": lambda x: x,
    "relu": lambda x: np.maximum(x, 0.0),
    "tanh": np.tanh,
}
