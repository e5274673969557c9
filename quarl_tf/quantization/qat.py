"""Quantisation-aware training with a delay, as functions from network to network.

Until the delay a `watched` network computes what the plain one does, bit for bit, and takes in the
ranges of its activations. At the delay a `quantized` one is built from it, which shares its
variables, and `freeze` sets its grids. From then on the forward pass is quantised, and the gradient
passes as if it were not (QuaRL, Krishnan et al., arXiv 1910.01055, Algorithm 2). TensorFlow's model
optimisation toolkit, whose quantisers are used, has no delay, and its wrapper writes quantised
kernels into the layer, which two networks could then not share. Ranges may go on following what
they hold: they are frozen anew after each burst of learning.

What is quantised: the observation behind its scaling, every kernel, and every layer's output, the
head's included; biases stay in float, as the 32 bits that they have in int8 kernels. What feeds a
tanh has 8 bits at any width (not so by the papers' rule): on integer hardware tanh is a table of
all 8-bit codes. Only what is exported is quantised: neither the critic of DDPG nor the value head
of PPO and A2C, which no board will run. Kernels' ranges are those they have at the delay, by the
papers' rule too, where the papers watch weights before it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.keras import keras
from quarl_tf.networks.layers import ActionScaling, ByteScaling, ObservationNormalizer
from quarl_tf.quantization.fake_quantizer import FakeQuantizer
from quarl_tf.quantization.grid import Grid
from quarl_tf.quantization.layers import QuantizedLayer, WatchedLayer
from quarl_tf.spec import LayerFormat, QatSchedule, Recipe, require_layers

#: Bits of what feeds a tanh, and where it ends: from there on an int8 tanh has its last code. A
#: saturated policy's sums reach far beyond, and one step would span all that tanh tells apart.
_TABLE_BITS, _TABLE_END = 8, 3.5

_BYTE_BITS = 8


def watched(network: keras.Model, recipe: Recipe, schedule: QatSchedule) -> keras.Model:
    """Return a network that computes the same, and watches what `quantized` needs to know.

    Args:
        network: A policy network; its layers are shared.
        recipe: What will be quantised to what.
        schedule: How it trains.

    Raises:
        UsageError: A layer cannot be quantised.
    """
    require_layers(recipe, {layer.name for layer in network.layers})
    plain = _plain_layers(network)
    feeding = {
        layer.inbound_nodes[0].inbound_layers.name for layer in network.layers if _is_tanh(layer)
    }

    def wrap(layer: Any) -> Any:
        if layer.name in plain or isinstance(layer, _PASSING):
            return layer
        form = recipe.of(layer.name)
        if isinstance(layer, ByteScaling) and _bits(form) == _BYTE_BITS:
            return layer  # Bytes lie on their grid already.
        if not isinstance(layer, _QUANTIZED):
            raise UsageError(
                "Quantisation-aware training has no rule for this layer; train without it. "
                f"Received: layer={layer.name!r} ({type(layer).__name__})"
            )
        return WatchedLayer(
            layer,
            _for_kernel(layer, form, schedule),
            _for_output(layer, form, schedule, feeds_table=layer.name in feeding),
            schedule.ranges,
        )

    return keras.models.clone_model(network, clone_function=wrap)


def quantized(network: keras.Model) -> keras.Model:
    """Return a watched network with its numbers on grids, which `freeze` sets."""

    def change(layer: Any) -> Any:
        return QuantizedLayer(layer) if isinstance(layer, WatchedLayer) else layer

    return keras.models.clone_model(network, clone_function=change)


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


def _bits(form: LayerFormat) -> int | None:
    return None if form.activations is None else form.activations.bits


def _for_kernel(layer: Any, form: LayerFormat, schedule: QatSchedule) -> FakeQuantizer | None:
    if form.weights is None or not isinstance(layer, _KERNELS):
        return None
    per_channel = isinstance(layer, keras.layers.Conv2D) or form.weights.per_channel
    return FakeQuantizer(form.weights, schedule, kernel=True, per_channel=per_channel)


def _for_output(
    layer: Any, form: LayerFormat, schedule: QatSchedule, *, feeds_table: bool
) -> FakeQuantizer | None:
    grid = form.activations
    if grid is None:
        return None
    published = grid.rounding == "floor"
    if isinstance(layer, ByteScaling):
        return FakeQuantizer(grid, schedule, fixed=(0.0, 1.0))
    if _is_tanh(layer) and grid.bits == _TABLE_BITS and not published:
        return FakeQuantizer(grid, schedule, fixed=(-1.0, 127 / 128))  # As integer kernels have it.
    if feeds_table and not published:
        return FakeQuantizer(replace(grid, bits=_TABLE_BITS), schedule, limit=_TABLE_END)
    return FakeQuantizer(grid, schedule)


def quantized_layers(network: keras.Model) -> list[QuantizedLayer]:
    """Return the quantised layers of a network, in order."""
    return [layer for layer in network.layers if isinstance(layer, QuantizedLayer)]


def exported(network: keras.Model, *, rounded: bool) -> Callable[[Any], Any]:
    """Return the forward pass of a quantised network by constants, for the converter.

    Args:
        network: A network whose grids are set.
        rounded: Whether activations are put on their grids, by float operations; kernels are.
    """
    steps = [
        layer.exported(rounded=rounded) if isinstance(layer, QuantizedLayer) else layer
        for layer in keras.Model(network.input, _choice(network)).layers[1:]
    ]

    def call(hidden: Any) -> Any:
        for step in steps:
            hidden = step(hidden)
        return hidden

    return call


def kernel_grids(network: keras.Model) -> list[tuple[int, bool]]:
    """Return each kernel's bits and whether each output has a grid of its own, in order."""
    found = (layer.quantizers.get("kernel") for layer in quantized_layers(network))
    return [(q.form.bits, q.per_channel) for q in found if q is not None]


def grids(network: keras.Model) -> list[dict[str, Grid]]:
    """Return the grids of each quantised layer's "kernel" and "output", in order."""
    layers = quantized_layers(network)
    return [{part: layer.grid(part) for part in layer.quantizers} for layer in layers]


def head_step(network: keras.Model) -> float:
    """Return the largest step of a quantised network's head, in the head's own unit."""
    layer = quantized_layers(network)[-1]
    step = layer.grid("output").step
    last = network.layers[-1]
    return float(np.max(step * last.half if isinstance(last, ActionScaling) else step))


def freeze(network: keras.Model, copies: Sequence[keras.Model] = ()) -> None:
    """Set all grids of a quantised network, and those of copies such as target networks.

    Raises:
        QuarlError: A range is not finite.
    """
    layers = quantized_layers(network)
    for layer in layers:
        layer.freeze()
        if not all(np.isfinite(layer.grid(part)).all() for part in layer.quantizers):
            raise QuarlError(
                "A range is not finite; train again with a lower learning rate "
                f"(-p learning_rate=…). Received: layer={layer.name!r}"
            )
    for copy in copies:
        for layer, twin in zip(layers, quantized_layers(copy), strict=True):
            twin.take_grids(layer)


def require_watched(network: keras.Model, delay: int) -> None:
    """Refuse to quantise a network that has seen nothing.

    Raises:
        UsageError: It has not.
    """
    layers = (layer for layer in network.layers if isinstance(layer, WatchedLayer))
    if any(layer.seen["low"] > layer.seen["high"] for layer in layers):
        raise UsageError(
            "Nothing was learned from before the delay, so no range is known; make it longer. "
            f"Received: delay={delay}"
        )
