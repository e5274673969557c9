"""Evaluation of networks: compiled, or in NumPy for small networks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.networks.layers import ActionScaling, Floats, Forward, Read, unwrap


def _is_dense_float32(network: keras.Model) -> bool:
    """Tell whether all layers are float32 and none is a convolution: XLA and NumPy are fast."""
    layers = [layer for layer in map(unwrap, network.layers) if hasattr(layer, "kernel")]
    has_images = any(isinstance(layer, keras.layers.Conv2D) for layer in layers)
    return not has_images and {layer.compute_dtype for layer in layers} <= {"float32"}


def compiled(function: Callable[..., Any], network: keras.Model) -> Callable[..., Any]:
    """Compile a function of arrays that uses a network: by XLA, or for oneDNN's kernels.

    XLA saves the calls between small operations, but is slow at convolutions on CPUs and at
    products in bfloat16.
    """
    traces: dict[tuple[Any, ...], Any] = {}

    def call(*arrays: npt.NDArray[Any]) -> Any:
        tensors = [tf.constant(array) for array in arrays]
        shapes = tuple(array.shape for array in arrays)
        if shapes not in traces:
            graph_function = tf.function(function, jit_compile=_is_dense_float32(network))
            traces[shapes] = graph_function.get_concrete_function(*tensors)
        # TensorFlow's own search for the trace takes 200 us a call, and its check of the arguments
        # as long again.
        trace = traces[shapes]
        return trace.inference_fn.call_preflattened([*tensors, *trace.captured_inputs])

    return call


def forward(network: keras.Model) -> Callable[[npt.NDArray[Any]], Any]:
    """Return the compiled forward pass: observations [n, ...] to heads [n, outputs]."""
    run = compiled(network, network)
    return lambda observations: tf.nest.map_structure(lambda x: x.numpy(), run(observations))


def _in_its_precision(network: keras.Model) -> keras.Model:
    """Return a copy, of zeros, with kernels in the precision that their layers compute in.

    The network itself where they have it already, and for layers that are not built from their
    configuration.
    """
    layers = network.layers
    if all(layer.compute_dtype == layer.variable_dtype for layer in layers):
        return network
    if any(unwrap(layer) is not layer or isinstance(layer, ActionScaling) for layer in layers):
        return network

    def copy(layer: Any) -> Any:
        settings = layer.get_config()
        # Layer normalisation computes with float32 weights in every precision.
        if hasattr(layer, "kernel"):
            # Orthogonal initial weights exist in float32 alone.
            settings |= {"dtype": layer.compute_dtype, "kernel_initializer": "zeros"}
        return type(layer).from_config(settings)

    return keras.models.clone_model(network, clone_function=copy)


class Snapshot:
    """The forward pass of a network with the weights of the last `refresh`.

    Float32 networks without convolutions are evaluated by NumPy: a call into TensorFlow costs 150
    us, ten times the arithmetic of a few observations. Others are compiled, in the arithmetic that
    learns: in a lower precision with weights that `refresh` casts, else with the current ones.
    """

    def __init__(self, network: keras.Model) -> None:
        copy = _in_its_precision(network)

        def cast() -> None:
            for variable, source in zip(copy.variables, network.variables, strict=True):
                variable.assign(tf.cast(source, variable.dtype))

        self._cast = None if copy is network else compiled(cast, network)
        self._compiled = None if _is_dense_float32(network) else forward(copy)
        # Kept, since Keras searches all layers whenever it lists variables.
        self.variables: Sequence[Any] = list(network.variables)
        #: The variables whose values `refresh` takes.
        self.read_variables = self.variables if self._compiled is None else []
        self._layers = network.layers[1:]
        self._steps: list[Forward] = []
        self.refresh()

    def refresh(self, values: Mapping[int, npt.NDArray[Any]] | None = None) -> None:
        """Take the current weights or, which saves reading them, values by variables' `id`."""
        if self._cast is not None:
            self._cast()
        if self._compiled is not None:
            return
        arrays = {id(v): v.numpy() for v in self.variables} if values is None else values
        self._steps = [in_numpy(layer, lambda v: arrays[id(v)]) for layer in self._layers]

    def __call__(self, observations: npt.NDArray[Any]) -> Any:
        """Return heads [n, outputs] of observations [n, ...]; a list if the network has several."""
        if self._compiled is not None:
            return self._compiled(observations)
        for step in self._steps:
            observations = step(observations)
        return observations


def in_numpy(layer: Any, read: Read) -> Forward:
    """Return the function of arrays that a layer computes; `read` gives its variables' values."""
    if hasattr(layer, "in_numpy"):
        return layer.in_numpy(read)  # type: ignore[no-any-return]
    if isinstance(layer, keras.layers.Dense):
        kernel, bias = read(layer.kernel), read(layer.bias)
        activation = _ACTIVATIONS[layer.activation.__name__]
        return lambda x: activation(x @ kernel + bias)
    if isinstance(layer, keras.layers.LayerNormalization):
        gamma, beta, epsilon = read(layer.gamma), read(layer.beta), layer.epsilon

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
