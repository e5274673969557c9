"""Quantisation-aware training with a delay: a network becomes one whose numbers are quantised.

Until the delay the network computes what the plain one does, bit for bit, and its activations'
ranges are watched. At the delay the ranges, widened to contain 0, freeze (`freeze`). From then on
the forward pass is quantised, and the gradient passes as if it were not (QuaRL, Krishnan et al.,
arXiv 1910.01055, Algorithm 2). TensorFlow's model optimisation toolkit, whose wrappers are used,
has neither a delay nor ranges that freeze, and starts its ranges at ±6. That ranges go on following
what they hold, as there, is an option: they are frozen anew after each burst of learning.

What is quantised: the observation behind its scaling, every kernel (one grid per output channel for
a convolution, and with `per_channel` for a fully-connected one, which else has one for all of it),
and every layer's output, the head's included;
biases stay in float, as the 32 bits that they have in int8 kernels. What feeds a tanh has 8 bits at
any width (not so by the papers' rule): on integer hardware tanh is a table of that many entries.
Only what is exported is quantised: neither the critic of DDPG nor the value head of PPO and A2C,
which no board will run. Kernels' ranges are those they have at the delay, by the papers' rule too,
where the papers watch weights before it as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf.errors import QuarlError, UsageError
from quarl_tf.keras import autocast_variable, keras, tf
from quarl_tf.networks import (
    CLIP_DEVIATIONS,
    ActionScaling,
    ByteScaling,
    Floats,
    Forward,
    ObservationNormalizer,
    in_numpy,
    within,
)
from quarl_tf.quantization.affine import grid_within, snap
from quarl_tf.spec import Quantization

with warnings.catch_warnings():
    # It compares versions by what Python has given up. It sees Keras 2, which has been chosen.
    warnings.simplefilter("ignore", DeprecationWarning)
    from tensorflow_model_optimization.python.core.quantization.keras import (
        quantize_config,
        quantize_wrapper,
        quantizers,
    )

#: Bits of what feeds a tanh, and where it ends: from there on an int8 tanh has its last code. A
#: saturated policy's sums reach far beyond, and one step would span all that tanh tells apart.
_TABLE_BITS, _TABLE_END = 8, 3.5

#: Weight of what a moving average had before.
_KEPT = 0.99

_BYTE_BITS = 8

#: Observations watched at once.
_WATCHED = 250

#: Share of a batch below and above a range by percentiles.
_TAIL = 0.001


class DelayedQuantizer(quantizers.Quantizer):  # type: ignore[misc]
    """Quantises a tensor once its range is frozen; until then it watches, and on if it follows.

    Attributes:
        bits: Width of a code.
        kernel: Whether it is a kernel's: its range is read at a freeze, others are watched.
        fixed: Range of an activation whose range is known; it is watched as others are, for other
            bits that may go on from here.
        narrow: Whether the lowest code is left out, so that the grid is symmetric.
    """

    def __init__(
        self,
        quantization: Quantization,
        bits: int,
        *,
        kernel: bool = False,
        per_channel: bool = False,
        fixed: tuple[float, float] | None = None,
        limit: float = float("inf"),
        dtype: str = "float32",
    ) -> None:
        """Describe a quantiser.

        Args:
            quantization: Rule, ranges and gradient.
            bits: Width of a code.
            dtype: Arithmetic of the layer; the grid itself is always float32.
            kernel: Whether it is for a kernel: then symmetric but by the papers' rule.
            per_channel: Whether each index of the last axis has a grid of its own.
            fixed: Range of an activation whose range is known.
            limit: Largest end of the range when it freezes, whatever was watched.
        """
        self._quantization, self.bits = quantization, bits
        self.fixed, self._limit, self._dtype = fixed, limit, dtype
        self._paper = quantization.rule == "paper"
        self._follows = quantization.ranges == "following"
        self.kernel, self.per_channel = kernel, per_channel
        self.narrow = kernel and not self._paper

    @property
    def levels(self) -> int:
        """Steps between the lowest and the highest code."""
        codes: int = 2**self.bits
        return codes if self._paper else codes - (2 if self.narrow else 1)

    def build(self, tensor_shape: Any, name: str, layer: Any) -> dict[str, Any]:
        """Create the range, and whether it is frozen, as variables of the layer."""
        shape = (tensor_shape[-1],) if self.per_channel else ()

        def variable(suffix: str, value: float, shape: tuple[int, ...], **options: Any) -> Any:
            initial = keras.initializers.Constant(value)
            return layer.add_weight(f"{name}_{suffix}", shape, initializer=initial, **options)

        # The wrong way round: nothing was watched yet.
        created = {"low": variable("low", 1.0, shape, trainable=False)}
        created["high"] = variable("high", -1.0, shape, trainable=False)
        if self._follows and not self.kernel:
            # Those in force stay as they are until the next freeze.
            created["seen_low"] = variable("seen_low", 1.0, (), trainable=False)
            created["seen_high"] = variable("seen_high", -1.0, (), trainable=False)
        if self._quantization.learned_steps and self.fixed is None:
            created["log_stretch"] = variable("log_stretch", 0.0, shape, trainable=True)
        return {**created, "frozen": variable("frozen", 0.0, (), trainable=False)}

    def __call__(
        self, inputs: Any, training: bool, weights: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        """Return the tensor as it is, or quantised."""
        del kwargs
        inputs = tf.cast(inputs, tf.float32)
        return tf.cast(self._quantized(inputs, training, weights), self._dtype)

    def _quantized(self, inputs: Any, training: bool, weights: Mapping[str, Any]) -> Any:
        # Asked while tracing, so that neither side of the delay pays for the other.
        with tf.init_scope():
            frozen = bool(weights["frozen"] > 0)
        follows = self._follows and self.fixed is None
        if training and not self.kernel and (follows or not frozen):
            self._watch(inputs, *_watched(weights))
        if not frozen:
            stretch = weights.get("log_stretch")
            return inputs if stretch is None else _past_stretch(inputs, stretch)
        if "log_stretch" in weights:
            return self._by_learned_step(inputs, weights)
        low, high = weights["low"], weights["high"]
        clipped = self._quantization.gradient == "clipped"
        inside = (inputs >= low) & (inputs <= high) if clipped else None
        return _with_gradient(inputs, self._snap(inputs, low, high), inside)

    def _snap(self, inputs: Any, low: Any, high: Any) -> Any:
        if self._paper:
            step = (high - low) / self.levels
            return tf.floor(tf.clip_by_value(inputs, low, high) / step) * step
        operation = (
            tf.quantization.fake_quant_with_min_max_vars_per_channel
            if self.per_channel
            else tf.quantization.fake_quant_with_min_max_vars
        )
        return operation(inputs, low, high, self.bits, self.narrow)

    def _by_learned_step(self, inputs: Any, weights: Mapping[str, Any]) -> Any:
        """Quantise by a step that is learned (Esser et al., arXiv 1902.08153).

        Two things are not as there. It starts as the step of the frozen range. And what is learned
        is the logarithm of a factor, as Jain et al. do (arXiv 1903.08066): Adam moves whatever it
        learns by about the learning rate, which may be more than a step, and would take it below 0.
        """
        # The step changes; which code is 0 does not.
        frozen = (weights["high"] - weights["low"]) / self.levels
        first = tf.round(weights["low"] / frozen)
        last = first + self.levels
        # As many as share the step: of a kernel, or of one observation's activations.
        shape = inputs.shape if self.kernel else inputs.shape[1:]
        count = np.prod(shape[:-1] if self.per_channel else shape)
        scale = tf.math.rsqrt(tf.maximum(-first, last) * np.float32(count))
        step = frozen * tf.exp(_scaled_gradient(weights["log_stretch"], scale))
        codes = tf.clip_by_value(inputs / step, first, last)
        return _with_gradient(codes, tf.round(codes), None) * step

    def _watch(self, inputs: Any, low: Any, high: Any) -> None:
        """Take the range of a batch in."""
        if self._quantization.ranges == "percentile":
            values = tf.sort(tf.reshape(inputs, (-1,)))
            last = tf.cast(tf.size(values) - 1, tf.float32)
            places = [tf.cast(tf.round(share * last), tf.int32) for share in (_TAIL, 1 - _TAIL)]
            lowest, highest = (values[place] for place in places)
        else:
            lowest, highest = tf.reduce_min(inputs), tf.reduce_max(inputs)
        first = low > high
        if self._quantization.ranges == "extremes":
            ends = tf.minimum(low, lowest), tf.maximum(high, highest)
        else:
            ends = tuple(
                _KEPT * end + (1 - _KEPT) * now for end, now in ((low, lowest), (high, highest))
            )
        low.assign(tf.where(first, lowest, ends[0]))
        high.assign(tf.where(first, highest, ends[1]))

    def freeze(self, variables: Mapping[str, Any], kernel: npt.NDArray[Any] | None) -> None:
        """Set and freeze the range, widened to contain 0 and moved so that 0 is on the grid.

        One that follows may be frozen again.

        Args:
            variables: As `build` made them.
            kernel: The kernel, if it is one's quantiser.
        """
        low, high = (end.numpy() for end in _watched(variables))
        if kernel is not None:
            others = tuple(range(kernel.ndim - 1)) if self.per_channel else None
            low, high = kernel.min(axis=others), kernel.max(axis=others)
        if self.fixed is not None:
            low, high = (np.float32(end) for end in self.fixed)
        elif kernel is None and low > high:
            raise UsageError(
                "Nothing was learned from before the delay, so no range is known; make it longer. "
                f"Received: delay={self._quantization.delay}"
            )
        low, high = np.clip(low, -self._limit, 0), np.clip(high, 0, self._limit)
        # Nothing but 0: any step will do.
        high = np.where(high > low, high, low + 1)
        if self.narrow:
            high = np.maximum(-low, high)
            low = -high
        elif not self._paper:
            low, high = grid_within(low, high, self.levels)
        variables["low"].assign(low)
        variables["high"].assign(high)
        variables["frozen"].assign(1.0)

    def in_numpy(self, values: Mapping[str, Floats]) -> Forward:
        """Return the same for arrays, with given values of the variables."""
        if values["frozen"] == 0:
            return lambda x: x
        low, high = self.ends(values)
        return lambda x: snap(x, low, high, self.levels, floored=self._paper)

    def ends(self, values: Mapping[str, Floats]) -> tuple[Floats, Floats]:
        """Return the ends of the frozen range, stretched where its step is learned."""
        stretch = np.exp(values.get("log_stretch", np.float32(0)))
        return values["low"] * stretch, values["high"] * stretch

    def exported(self, inputs: Any, low: Floats, high: Floats, *, native: bool) -> Any:
        """Quantise a tensor for the converter, by constants.

        Args:
            inputs: Tensor.
            low: Lower end of the range.
            high: Upper end.
            native: Whether as the operation that the converter makes an integer tensor of; else in
                elementary operations, in the order of `affine.snap`.
        """
        if native:
            return self._snap(inputs, tf.constant(low), tf.constant(high))
        step = (high - low) / np.float32(self.levels)
        clipped = tf.minimum(tf.maximum(inputs, low), high)
        if self._paper:
            return self._snap(inputs, low, high)
        inverse = np.float32(1) / step
        zero = np.floor(-low * inverse + np.float32(0.5))
        return tf.floor((clipped - low) * inverse - zero + 0.5) * step

    def get_config(self) -> dict[str, Any]:
        """Return nothing: networks are built by factories, never from a configuration."""
        return {}


class QuantizedLayer(quantize_wrapper.QuantizeWrapperV2):  # type: ignore[misc]
    """A layer with a quantised kernel, if it has one, and a quantised output.

    It has the name of the layer within, so that both kinds of network are addressed alike.
    """

    def __init__(
        self, layer: Any, kernel: DelayedQuantizer | None, output: DelayedQuantizer
    ) -> None:
        """Wrap a layer."""
        if layer.compute_dtype != "float32":
            layer.call = _in_its_own_arithmetic(layer)
        super().__init__(layer, _Config(kernel, output), name=layer.name)

    def quantizers(self) -> Iterator[tuple[DelayedQuantizer, dict[str, Any], Any]]:
        """Yield each quantiser with its variables, and with the kernel or None."""
        for kernel, quantizer, variables in self._weight_vars:
            yield quantizer, variables, kernel
        yield self._output_quantizers[0], self._output_quantizer_vars, None

    def in_numpy(self, *values: Floats) -> Forward:
        """Return the same for arrays, with given values of the layer's variables."""
        order, inner_order = self._order
        by_variable = dict(zip(order, values, strict=True))

        def twin(quantizer: DelayedQuantizer, variables: Mapping[str, Any]) -> Forward:
            return quantizer.in_numpy({name: by_variable[id(v)] for name, v in variables.items()})

        (*of_kernel, of_output) = self.quantizers()
        for quantizer, variables, kernel in of_kernel:
            by_variable[id(kernel)] = twin(quantizer, variables)(by_variable[id(kernel)])
        inner = in_numpy(self.layer, [by_variable[v] for v in inner_order])
        output = twin(*of_output[:2])
        return lambda x: output(inner(x))

    def exported(self, kernel_scale: float, *, native: bool) -> Callable[[Any], Any]:
        """Return what the frozen layer computes, for the converter.

        Args:
            kernel_scale: Factor of the kernel, whose codes stay as they are.
            native: Whether for integer kernels; see `DelayedQuantizer.exported`.
        """
        scale = np.float32(kernel_scale)
        (*of_kernel, of_output) = [
            (quantizer, quantizer.ends({name: v.numpy() for name, v in variables.items()}))
            for quantizer, variables, _ in self.quantizers()
        ]
        # On their grids already: training leaves weights right between two codes, where another
        # order of operations would round to the other one.
        kernels = [
            quantizer(kernel, training=False, weights=variables).numpy() * scale
            for quantizer, variables, kernel in self.quantizers()
            if kernel is not None
        ]
        compute = self._by_constants(native=native)

        def call(inputs: Any) -> Any:
            for (quantizer, (low, high)), kernel in zip(of_kernel, kernels, strict=True):
                constant = tf.constant(kernel)
                ends = low * scale, high * scale
                self.layer.kernel = quantizer.exported(constant, *ends, native=native)
            quantizer, ends = of_output
            return quantizer.exported(compute(inputs), *ends, native=native)

        return call

    def _by_constants(self, *, native: bool) -> Callable[[Any], Any]:
        """Return what the layer within computes; the converter keeps signatures of those only."""
        if isinstance(self.layer, ObservationNormalizer):
            mean, scale = (variable.numpy() for variable in self.layer.variables)
            # The range of an integer input ends before the cut, which would be one more operator.
            end = np.inf if native else CLIP_DEVIATIONS
            return lambda x: _clipped((x - mean) * scale, end)
        if self._weight_vars:
            bias = self.layer.bias.numpy()

            def with_bias(inputs: Any) -> Any:
                self.layer.bias = tf.constant(bias)
                return self.layer.call(inputs)

            return with_bias
        return self.layer.call  # type: ignore[no-any-return]

    @cached_property
    def _order(self) -> tuple[list[int], list[int]]:
        """Return the ids of the layer's variables, and of those of the one within, in order.

        Kept, for Keras walks through all it contains whenever it is asked for variables.
        """
        # The wrapper takes the kernel from the layer within.
        inner = (
            [self._weight_vars[0][0], self.layer.bias]
            if self._weight_vars
            else self.layer.variables
        )
        return [id(v) for v in self.variables], [id(v) for v in inner]


def _in_its_own_arithmetic(layer: Any) -> Callable[[Any], Any]:
    """Return the call of a layer for a wrapper that computes in float32, as quantisers must.

    The wrapper calls `call` itself, past what would cast inputs and variables.
    """
    call = layer.call

    def cast(inputs: Any) -> Any:
        with autocast_variable.enable_auto_cast_variables(tf.as_dtype(layer.compute_dtype)):
            return call(tf.cast(inputs, layer.compute_dtype))

    return cast


class _Config(quantize_config.QuantizeConfig):  # type: ignore[misc]
    """What of a layer is quantised, as the toolkit asks for it."""

    def __init__(self, kernel: DelayedQuantizer | None, output: DelayedQuantizer) -> None:
        self._kernel, self._output = kernel, output

    def get_weights_and_quantizers(self, layer: Any) -> list[tuple[Any, DelayedQuantizer]]:
        return [] if self._kernel is None else [(layer.kernel, self._kernel)]

    def set_quantize_weights(self, layer: Any, quantize_weights: Sequence[Any]) -> None:
        for kernel in quantize_weights:
            layer.kernel = kernel

    def get_activations_and_quantizers(self, layer: Any) -> list[Any]:
        return []

    def set_quantize_activations(self, layer: Any, quantize_activations: Any) -> None:
        del layer, quantize_activations  # Outputs are quantised behind the activation.

    def get_output_quantizers(self, layer: Any) -> list[DelayedQuantizer]:
        return [self._output]

    def get_config(self) -> dict[str, Any]:
        return {}


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
        if native and isinstance(within(layer), ByteScaling):
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
    step = (high - low) / quantizer.levels
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


def _watched(variables: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the ends of what is being watched."""
    prefix = "seen_" if "seen_low" in variables else ""
    return variables[f"{prefix}low"], variables[f"{prefix}high"]


def _clipped(values: Any, end: float) -> Any:
    return values if np.isinf(end) else tf.clip_by_value(values, -end, end)


@tf.custom_gradient  # type: ignore[misc]
def _past_stretch(inputs: Any, stretch: Any) -> Any:
    """Return the inputs; the stretch has a gradient of 0, where optimizers would miss one."""
    return tf.identity(inputs), lambda upstream: (upstream, tf.zeros_like(stretch))


def _with_gradient(inputs: Any, value: Any, inside: Any) -> Any:
    """Return `value`, through which gradients reach `inputs` where `inside`, or everywhere."""
    value = tf.stop_gradient(value)

    @tf.custom_gradient  # type: ignore[misc]
    def passed(x: Any) -> Any:
        del x

        def gradient(upstream: Any) -> Any:
            return upstream if inside is None else tf.where(inside, upstream, 0.0)

        return tf.identity(value), gradient

    return passed(inputs)


def _scaled_gradient(value: Any, scale: Any) -> Any:
    """Return a value whose gradient is scaled."""

    @tf.custom_gradient  # type: ignore[misc]
    def scaled(x: Any) -> Any:
        return tf.identity(x), lambda upstream: upstream * scale

    return scaled(value)
