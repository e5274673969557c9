"""Quantisation-aware training with a delay, as functions from network to network.

Until the delay a `watched` network computes the same as the plain one, bit for bit, and records the
ranges of its activations. At the delay `quantized` builds a network that shares its variables, and
`freeze` sets the grids. From then on the forward pass is quantised, and the gradient passes as if
it were not (QuaRL, Krishnan et al., arXiv 1910.01055, Algorithm 2). The quantisers implement the
interface of TensorFlow's model optimisation toolkit, which has no delay, and whose wrapper writes
quantised kernels into the layer, so that two networks could not share it. "Following" ranges are
recorded after the delay, too, and frozen again after each burst of learning.

Quantised are the scaled observation, every kernel and every layer's output, the head's included;
biases stay in float, as the 32 bits that they have in int8 kernels. Inputs of a tanh have 8 bits at
any width (except by the papers' rule): on integer hardware tanh is a table of all 8-bit codes. Only
the exported network is quantised, not the critic of DDPG or the value head of PPO and A2C. Ranges
of kernels are those at the delay, also by the papers' rule, although the papers record them before.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.keras import keras
from quarl_tf.networks import acting
from quarl_tf.networks.layers import ActionScaling, ByteScaling, ObservationNormalizer
from quarl_tf.quantization.fake_quantizer import FakeQuantizer
from quarl_tf.quantization.grid import BYTE, TANH_END, Grid
from quarl_tf.quantization.layers import QuantizedLayer, WatchedLayer
from quarl_tf.spec import QatSchedule, Recipe, TensorFormat


def watched(network: keras.Model, recipe: Recipe, schedule: QatSchedule) -> keras.Model:
    """Return a network that computes the same and records the ranges that `quantized` needs.

    It shares the layers of `network`. A UsageError where a layer cannot be quantised.
    """
    # No choice depends on the others: a dueling network's value.
    acting_layers = {layer.name for layer in acting(network).layers}
    with_formats = {layer.name for layer in network.layers if isinstance(layer, _QUANTIZED)}
    recipe.require_layers(acting_layers & with_formats)
    before_tanh = {
        layer.inbound_nodes[0].inbound_layers.name for layer in network.layers if _is_tanh(layer)
    }

    def wrap(layer: Any) -> Any:
        if layer.name not in acting_layers or isinstance(layer, _PASSING):
            return layer
        formats = recipe.of(layer.name)
        form = formats.activations
        if isinstance(layer, ByteScaling) and form == BYTE:
            return layer  # Bytes are on this grid already.
        if not isinstance(layer, _QUANTIZED):
            raise UsageError(
                "Quantisation-aware training has no rule for this layer; train without it. "
                f"Received: layer={layer.name!r} ({type(layer).__name__})"
            )
        quantizers: dict[str, FakeQuantizer] = {}
        if (weights := formats.weights) is not None and isinstance(layer, _KERNELS):
            per_channel = isinstance(layer, keras.layers.Conv2D) or weights.per_channel
            kernel = FakeQuantizer(weights, schedule, kernel=True, per_channel=per_channel)
            quantizers["kernel"] = kernel
        if form is not None:
            feeds_tanh = layer.name in before_tanh
            quantizers["output"] = _for_output(layer, form, schedule, feeds_tanh=feeds_tanh)
        return WatchedLayer(layer, quantizers, schedule.ranges)

    return keras.models.clone_model(network, clone_function=wrap)


def quantized(network: keras.Model) -> keras.Model:
    """Return a watched network with quantised layers, whose grids `freeze` sets."""

    def change(layer: Any) -> Any:
        return QuantizedLayer(layer) if isinstance(layer, WatchedLayer) else layer

    return keras.models.clone_model(network, clone_function=change)


_SCALINGS: tuple[Any, ...] = (ByteScaling, ObservationNormalizer)
_KERNELS: tuple[Any, ...] = (keras.layers.Conv2D, keras.layers.Dense)
_QUANTIZED: tuple[Any, ...] = (*_SCALINGS, *_KERNELS, keras.layers.Activation)
#: Layers that only rearrange numbers or, behind the head, scale an action in float.
_PASSING: tuple[Any, ...] = (keras.layers.InputLayer, keras.layers.Flatten, ActionScaling)


def _is_tanh(layer: Any) -> bool:
    return isinstance(layer, keras.layers.Activation) and layer.activation is keras.activations.tanh


def _for_output(
    layer: Any, form: TensorFormat, schedule: QatSchedule, *, feeds_tanh: bool
) -> FakeQuantizer:
    if isinstance(layer, ByteScaling):
        return FakeQuantizer(form, schedule, fixed=layer.ends)
    if form.rounding != "floor":
        if _is_tanh(layer) and form.bits == BYTE.bits:
            return FakeQuantizer(form, schedule, fixed=(-1.0, 127 / 128))  # As in integer kernels.
        if feeds_tanh:
            # The sums of a saturated policy are far larger than the limit: one step would span most
            # of what tanh distinguishes.
            return FakeQuantizer(replace(form, bits=BYTE.bits), schedule, limit=TANH_END)
    return FakeQuantizer(form, schedule)


def quantized_layers(network: keras.Model) -> list[QuantizedLayer]:
    """Return the quantised layers of a network, in order."""
    return [layer for layer in network.layers if isinstance(layer, QuantizedLayer)]


def exported(network: keras.Model, *, rounded: bool) -> Callable[[Any], Any]:
    """Return the forward pass with constants, for the converter; `rounded` rounds activations.

    It ends before the scaling of an action, as in `networks.unscaled`.
    """
    steps = [
        layer.exported(rounded=rounded) if isinstance(layer, QuantizedLayer) else layer
        for layer in acting(network).layers[1:]
        if not isinstance(layer, ActionScaling) or layer.is_identity
    ]

    def call(hidden: Any) -> Any:
        for step in steps:
            hidden = step(hidden)
        return hidden

    return call


def grids(network: keras.Model) -> list[dict[str, Grid]]:
    """Return the grids of each quantised layer's "kernel" and "output", in order."""
    layers = quantized_layers(network)
    return [{part: layer.grid(part) for part in layer.quantizers} for layer in layers]


def head_step(network: keras.Model) -> float:
    """Return the largest step of a quantised network's head, in units of the network's output."""
    step = quantized_layers(network)[-1].grid("output").step
    last_layer = network.layers[-1]
    is_scaled = isinstance(last_layer, ActionScaling)
    return float(np.max(step * last_layer.half if is_scaled else step))


def freeze(network: keras.Model, copies: Sequence[keras.Model] = ()) -> None:
    """Set all grids of a network and of its copies; a QuarlError where a range is not finite."""
    layers = quantized_layers(network)
    for layer in layers:
        layer.freeze()
        if not all(np.isfinite(layer.grid(part)).all() for part in layer.quantizers):
            raise QuarlError(
                "A range is not finite; train again with a lower learning rate "
                f"(-p learning_rate=…). Received: layer={layer.name!r}"
            )
    for copy in copies:
        for layer, layer_copy in zip(layers, quantized_layers(copy), strict=True):
            pairs = zip(layer.range_variables, layer_copy.range_variables, strict=True)
            for variable, variable_copy in pairs:
                variable_copy.assign(variable)


def require_watched(network: keras.Model, delay: int) -> None:
    """Refuse to quantise a network that has recorded no range (UsageError)."""
    layers = (layer for layer in network.layers if isinstance(layer, WatchedLayer))
    if any(layer.output_range["low"] > layer.output_range["high"] for layer in layers):
        raise UsageError(
            "Nothing was learned from before the delay, so no range is known; make it longer. "
            f"Received: delay={delay}"
        )
