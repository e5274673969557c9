"""The quantiser of quantisation-aware training: transparent until its range freezes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf.foundation.errors import UsageError
from quarl_tf.foundation.keras import keras, tf
from quarl_tf.networks.layers import Floats, Forward
from quarl_tf.quantization.grid import frozen_grid, grid_between, snap
from quarl_tf.quantization.toolkit import quantizers
from quarl_tf.spec import Quantization, TensorFormat

#: Weight of what a moving average had before.
_KEPT = 0.99

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
        self.form = (
            TensorFormat(bits=bits, rounding="floor", step="paper")
            if self._paper
            else TensorFormat(bits=bits, symmetric=kernel)
        )

    @property
    def steps(self) -> int:
        """Steps between the lowest and the highest code."""
        return self.form.steps

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
            step = (high - low) / self.steps
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
        frozen = (weights["high"] - weights["low"]) / self.steps
        first = tf.round(weights["low"] / frozen)
        last = first + self.steps
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
        grid = grid_between(low, high, self.form)
        variables["low"].assign(grid.low)
        variables["high"].assign(grid.high)
        variables["frozen"].assign(1.0)

    def in_numpy(self, values: Mapping[str, Floats]) -> Forward:
        """Return the same for arrays, with given values of the variables."""
        if values["frozen"] == 0:
            return lambda x: x
        low, high = self.ends(values)
        grid = frozen_grid(low, high, self.form)
        return lambda x: snap(x, grid, self.form)

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
        if native or self._paper:
            return self._snap(inputs, tf.constant(low), tf.constant(high))
        step = (high - low) / np.float32(self.steps)
        clipped = tf.minimum(tf.maximum(inputs, low), high)
        inverse = np.float32(1) / step
        zero = np.floor(-low * inverse + np.float32(0.5))
        return tf.floor((clipped - low) * inverse - zero + 0.5) * step

    def get_config(self) -> dict[str, Any]:
        """Return nothing: networks are built by factories, never from a configuration."""
        return {}


def _watched(variables: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the ends of what is being watched."""
    prefix = "seen_" if "seen_low" in variables else ""
    return variables[f"{prefix}low"], variables[f"{prefix}high"]


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
