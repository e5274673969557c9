"""Quantisation-aware training with a delay: a network becomes one whose numbers are quantised.

Until the delay the network computes what the plain one does, bit for bit, and its activations'
ranges are watched. At the delay the ranges, widened to contain 0, freeze (`freeze`). From then on
the forward pass is quantised, and the gradient passes as if it were not (QuaRL, Krishnan et al.,
arXiv 1910.01055, Algorithm 2). TensorFlow's model optimisation toolkit, whose wrappers are used,
has neither a delay nor ranges that freeze, and starts its ranges at ±6. That ranges go on following
what they hold, as there, is an option, and usual for DQN: they are frozen anew after each burst of
learning.

What is quantised: the observation behind its scaling, every kernel (one grid per output channel for
a convolution, and with `per_channel` for a fully-connected one, which else has one for all of it),
and every layer's output, the head's included;
biases stay in float, as the 32 bits that they have in int8 kernels. What feeds a tanh has 8 bits at
any width (not so by the papers' rule): on integer hardware tanh is a table of all 8-bit codes.
Only what is exported is quantised: neither the critic of DDPG nor the value head of PPO and A2C,
which no board will run. Kernels' ranges are those they have at the delay, by the papers' rule too,
where the papers watch weights before it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.networks.layers import ActionScaling, ByteScaling, ObservationNormalizer, unwrap
from quarl_tf.quantization.fake_quantizer import DelayedQuantizer
from quarl_tf.quantization.layer import QuantizedLayer
from quarl_tf.spec import Quantization

#: Bits of what feeds a tanh, and where it ends: from there on an int8 tanh has its last code. A
#: saturated policy's sums reach far beyond, and one step would span all that tanh tells apart.
_TABLE_BITS, _TABLE_END = 8, 3.5

_BYTE_BITS = 8

#: Observations watched at once.
_WATCHED = 250


def quantize(
    network: keras.Model, quantization: Quantization, left: tuple[Any, ...] = ()
) -> keras.Model:
    """Return a network that trains quantisation-aware; it takes over the layers of `network`.

    Args:
        network: A policy network.
        quantization: What to quantise to.
        left: Kinds of layers that are left in float.

    Raises:
        UsageError: A layer cannot be quantised.
    """
    plain = _plain_layers(network)
    feeding = {
        layer.inbound_nodes[0].inbound_layers.name for layer in network.layers if _is_tanh(layer)
    }

    def wrap(layer: Any) -> Any:
        if layer.name in plain or isinstance(layer, (*_PASSING, *left)):
            return layer
        if isinstance(layer, ByteScaling) and quantization.edge_bits == _BYTE_BITS:
            return layer  # Bytes lie on their grid already.
        if not isinstance(layer, _QUANTIZED):
            raise UsageError(
                "Quantisation-aware training has no rule for this layer; train without it. "
                f"Received: layer={layer.name!r} ({type(layer).__name__})"
            )
        return _wrapped(layer, quantization, feeds_table=layer.name in feeding)

    return keras.models.clone_model(network, clone_function=wrap)


_SCALINGS: tuple[Any, ...] = (ByteScaling, ObservationNormalizer)
_KERNELS: tuple[Any, ...] = (keras.layers.Conv2D, keras.layers.Dense)
_QUANTIZED: tuple[Any, ...] = (*_SCALINGS, *_KERNELS, keras.layers.Activation)
#: Layers that only move numbers about or, behind the head, scale an action in float.
_PASSING: tuple[Any, ...] = (keras.layers.InputLayer, keras.layers.Flatten, ActionScaling)


def _plain_layers(network: keras.Model) -> set[str]:
    """Return the names of the layers behind which no choice stands: a dueling network's value."""
    needed = {layer.name for layer in keras.Model(network.input, _choice(network)).layers}
    return {layer.name for layer in network.layers} - needed


def _choice(network: keras.Model) -> Any:
    """Return what acts: the head, with what scales it where it is a continuous action."""
    names = {layer.name for layer in network.layers}
    return network.output if "action" in names else network.get_layer("head").output


def _is_tanh(layer: Any) -> bool:
    return isinstance(layer, keras.layers.Activation) and layer.activation is keras.activations.tanh


def _wrapped(layer: Any, quantization: Quantization, *, feeds_table: bool) -> QuantizedLayer:
    at_edge = isinstance(layer, _SCALINGS) or layer.name in ("head", "squash")
    bits = quantization.edge_bits if at_edge else quantization.bits
    kernel = None
    if isinstance(layer, _KERNELS):
        per_channel = isinstance(layer, keras.layers.Conv2D) or quantization.per_channel
        kernel = DelayedQuantizer(
            quantization, bits, kernel=True, per_channel=per_channel, dtype=layer.compute_dtype
        )
    fixed: tuple[float, float] | None = None
    if isinstance(layer, ByteScaling):
        fixed = 0.0, 1.0
    elif _is_tanh(layer) and bits == _TABLE_BITS and quantization.rule == "nearest":
        fixed = -1.0, 127 / 128  # As integer kernels have it.
    limit = float("inf")
    if feeds_table and quantization.rule == "nearest":
        bits, limit = _TABLE_BITS, _TABLE_END
    output = DelayedQuantizer(
        quantization, bits, fixed=fixed, limit=limit, dtype=layer.compute_dtype
    )
    return QuantizedLayer(layer, kernel, output)


def quantized_layers(network: keras.Model) -> list[QuantizedLayer]:
    """Return the quantised layers of a network, in order."""
    return [layer for layer in network.layers if isinstance(layer, QuantizedLayer)]


def exported(network: keras.Model, *, native: bool) -> Callable[[Any], Any]:
    """Return the forward pass of a frozen network for the converter.

    Args:
        network: A network whose ranges are frozen; it is of no use afterwards.
        native: Whether for integer kernels, which take bytes (as floats) without scaling; else
            quantisers are spelled out in float operations.
    """
    steps: list[Callable[[Any], Any]] = []
    kernel_scale = 1.0
    for layer in keras.Model(network.input, _choice(network)).layers[1:]:
        if native and isinstance(unwrap(layer), ByteScaling):
            steps.append(lambda x: tf.quantization.fake_quant_with_min_max_args(x, 0.0, 255.0))
            kernel_scale = 1.0 / 255.0
        elif isinstance(layer, QuantizedLayer):
            steps.append(layer.exported(kernel_scale, native=native))
            kernel_scale = 1.0
        else:
            steps.append(layer)

    def call(hidden: Any) -> Any:
        for step in steps:
            hidden = step(hidden)
        return hidden

    return call


def kernel_grids(network: keras.Model) -> list[tuple[int, bool]]:
    """Return each kernel's bits and whether each output has a grid of its own, in order."""
    return [
        (quantizer.bits, quantizer.per_channel)
        for layer in quantized_layers(network)
        for quantizer, _, kernel in layer.quantizers()
        if kernel is not None
    ]


def watch(network: keras.Model, observations: npt.NDArray[Any]) -> None:
    """Show observations to a network whose ranges are not frozen yet."""
    for start in range(0, len(observations), _WATCHED):
        network(observations[start : start + _WATCHED], training=True)


def head_step(network: keras.Model) -> float:
    """Return the largest step of a frozen network's head, in the head's own unit."""
    quantizer, variables, _ = list(quantized_layers(network)[-1].quantizers())[-1]
    low, high = quantizer.ends({name: v.numpy() for name, v in variables.items()})
    step = (high - low) / quantizer.steps
    last = network.layers[-1]
    return float(np.max(step * last.half if isinstance(last, ActionScaling) else step))


def freeze(network: keras.Model, copies: Sequence[keras.Model] = ()) -> None:
    """Freeze all ranges of a network, and give them to copies such as target networks.

    Raises:
        QuarlError: A range is not finite.
    """
    layers = quantized_layers(network)
    for layer in layers:
        for quantizer, variables, kernel in layer.quantizers():
            quantizer.freeze(variables, None if kernel is None else kernel.numpy())
            if not all(np.isfinite(variables[end].numpy()).all() for end in ("low", "high")):
                raise QuarlError(
                    "A range is not finite; train again with a lower learning rate "
                    f"(-p learning_rate=…). Received: layer={layer.name!r}"
                )
    for copy in copies:
        for layer, twin in zip(layers, quantized_layers(copy), strict=True):
            for (_, variables, _), (_, others, _) in zip(
                layer.quantizers(), twin.quantizers(), strict=True
            ):
                for name, variable in variables.items():
                    others[name].assign(variable)
