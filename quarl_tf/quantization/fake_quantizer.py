"""What watches the range of a tensor, and what quantises it: TensorFlow's side of `grid`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from quarl_tf.foundation.keras import keras, tf
from quarl_tf.networks.layers import Floats, Forward
from quarl_tf.quantization.grid import Grid, frozen_grid, grid_between, snap
from quarl_tf.spec import QatSchedule, TensorFormat

with warnings.catch_warnings():
    # It compares versions by what Python has given up.
    warnings.simplefilter("ignore", DeprecationWarning)
    from tensorflow_model_optimization.python.core.quantization.keras import quantizers

#: Weight of what a moving average had before.
_KEPT = 0.99

#: Share of a batch below and above a range by percentiles.
_TAIL = 0.001


class Watcher(quantizers.Quantizer):  # type: ignore[misc]
    """Takes in the range of what passes in training, and changes nothing."""

    def __init__(self, ranges: str) -> None:
        """Keep how ranges are made of batches; see `QatSchedule.ranges`."""
        self._ranges = ranges

    def build(self, tensor_shape: Any, name: str, layer: Any) -> dict[str, Any]:
        """Create the ends as variables of the layer; the wrong way round: nothing was seen yet."""
        del tensor_shape
        return {
            "low": _variable(layer, f"{name}_seen_low", 1.0),
            "high": _variable(layer, f"{name}_seen_high", -1.0),
        }

    def __call__(
        self, inputs: Any, training: bool, weights: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        """Return the tensor as it is."""
        del kwargs
        if training:
            self._watch(tf.cast(inputs, tf.float32), weights["low"], weights["high"])
        return inputs

    def _watch(self, values: Any, low: Any, high: Any) -> None:
        if self._ranges == "percentile":
            ordered = tf.sort(tf.reshape(values, (-1,)))
            last = tf.cast(tf.size(ordered) - 1, tf.float32)
            places = [tf.cast(tf.round(share * last), tf.int32) for share in (_TAIL, 1 - _TAIL)]
            lowest, highest = (ordered[place] for place in places)
        else:
            lowest, highest = tf.reduce_min(values), tf.reduce_max(values)
        first = low > high
        if self._ranges == "extremes":
            ends = tf.minimum(low, lowest), tf.maximum(high, highest)
        else:
            pairs = (low, lowest), (high, highest)
            ends = tuple(_KEPT * end + (1 - _KEPT) * now for end, now in pairs)
        low.assign(tf.where(first, lowest, ends[0]))
        high.assign(tf.where(first, highest, ends[1]))

    def get_config(self) -> dict[str, Any]:
        """Return nothing: networks are built by factories, never from a configuration."""
        return {}


class FakeQuantizer(quantizers.Quantizer):  # type: ignore[misc]
    """Puts a tensor on the grid of a range; gradients pass as if it did not.

    Attributes:
        form: The grid.
        kernel: Whether the tensor is a kernel; else the output of a layer.
        per_channel: Whether each index of the last axis has a grid of its own.
    """

    def __init__(
        self,
        form: TensorFormat,
        schedule: QatSchedule,
        *,
        kernel: bool = False,
        per_channel: bool = False,
        fixed: tuple[float, float] | None = None,
        limit: float = float("inf"),
    ) -> None:
        """Describe a quantiser.

        Args:
            form: The grid.
            schedule: Says the gradient, and whether the step is learned.
            kernel: Whether the tensor is a kernel.
            per_channel: Whether each index of the last axis has a grid of its own.
            fixed: The range, where it is known.
            limit: Largest end of the range, whatever was seen.
        """
        self.form, self.kernel, self.per_channel = form, kernel, per_channel
        self._clips = schedule.gradient == "clipped"
        self.learns = schedule.learned_steps and fixed is None
        self._fixed, self._limit = fixed, limit

    def build(self, tensor_shape: Any, name: str, layer: Any) -> dict[str, Any]:
        """Create the ends of the grid as variables of the layer."""
        shape = self._shape(tensor_shape)
        low = _variable(layer, f"{name}_low", -1.0, shape)
        return {"low": low, "high": _variable(layer, f"{name}_high", 1.0, shape)}

    def build_stretch(self, tensor_shape: Any, name: str, layer: Any) -> dict[str, Any]:
        """Create the logarithm of the factor by which the step is learned, if it is."""
        if not self.learns:
            return {}
        shape = self._shape(tensor_shape)
        return {"log_stretch": _variable(layer, f"{name}_log_stretch", 0.0, shape, trainable=True)}

    def _shape(self, tensor_shape: Any) -> tuple[int, ...]:
        return (tensor_shape[-1],) if self.per_channel else ()

    def __call__(
        self, inputs: Any, training: bool, weights: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        """Return the quantised tensor, in the arithmetic that it had."""
        del training, kwargs
        values = tf.cast(inputs, tf.float32)
        if "log_stretch" in weights:
            return tf.cast(self._by_learned_step(values, weights), inputs.dtype)
        low, high = weights["low"], weights["high"]
        inside = (values >= low) & (values <= high) if self._clips else None
        return tf.cast(_with_gradient(values, self.snap(values, low, high), inside), inputs.dtype)

    def snap(self, inputs: Any, low: Any, high: Any) -> Any:
        """Return the values on the grid, as `grid.snap`; without a gradient."""
        if self.form.rounding == "floor":
            step = (high - low) / self.form.steps
            return tf.floor(tf.clip_by_value(inputs, low, high) / step) * step
        operation = (
            tf.quantization.fake_quant_with_min_max_vars_per_channel
            if self.per_channel
            else tf.quantization.fake_quant_with_min_max_vars
        )
        return operation(inputs, low, high, self.form.bits, self.form.symmetric)

    def _by_learned_step(self, inputs: Any, weights: Mapping[str, Any]) -> Any:
        """Quantise by a step that is learned (Esser et al., arXiv 1902.08153).

        Two things are not as there. It starts as the step of the frozen range. And what is learned
        is the logarithm of a factor, as Jain et al. do (arXiv 1903.08066): Adam moves whatever it
        learns by about the learning rate, which may be more than a step, and would take it below 0.
        """
        # The step changes; which code is 0 does not.
        frozen = (weights["high"] - weights["low"]) / self.form.steps
        first = tf.round(weights["low"] / frozen)
        last = first + self.form.steps
        # As many as share the step: of a kernel, or of one observation's activations.
        shape = inputs.shape if self.kernel else inputs.shape[1:]
        count = np.prod(shape[:-1] if self.per_channel else shape)
        scale = tf.math.rsqrt(tf.maximum(-first, last) * np.float32(count))
        step = frozen * tf.exp(_scaled_gradient(weights["log_stretch"], scale))
        codes = tf.clip_by_value(inputs / step, first, last)
        return _with_gradient(codes, tf.round(codes), None) * step

    def freeze(self, weights: Mapping[str, Any], low: Floats, high: Floats) -> None:
        """Set the grid to a range, widened to contain 0 and moved so that 0 is on it."""
        if self._fixed is not None:
            low, high = (np.array(end, np.float32) for end in self._fixed)
        ends = np.clip(low, -self._limit, 0), np.clip(high, 0, self._limit)
        grid = grid_between(*ends, self.form)
        weights["low"].assign(grid.low)
        weights["high"].assign(grid.high)

    def in_numpy(self, values: Mapping[str, Floats]) -> Forward:
        """Return the same for arrays, with given values of the variables."""
        grid = self.grid(values)
        return lambda x: snap(x, grid, self.form)

    def grid(self, values: Mapping[str, Floats]) -> Grid:
        """Return the grid, stretched where its step is learned."""
        stretch = np.exp(values.get("log_stretch", np.float32(0)))
        low, high = (values[end] * stretch for end in ("low", "high"))
        return frozen_grid(low, high, self.form)

    def exported(self, inputs: Any, grid: Grid) -> Any:
        """Quantise a tensor by constants, in elementary operations in the order of `grid.snap`."""
        low, high, step = grid
        if self.form.rounding == "floor":
            return self.snap(inputs, tf.constant(low), tf.constant(high))
        clipped = tf.minimum(tf.maximum(inputs, low), high)
        inverse = 1 / step
        zero = np.floor(-low * inverse + np.float32(0.5))
        return tf.floor((clipped - low) * inverse - zero + 0.5) * step

    def get_config(self) -> dict[str, Any]:
        """Return nothing: networks are built by factories, never from a configuration."""
        return {}


def _variable(
    layer: Any, name: str, value: float, shape: tuple[int, ...] = (), *, trainable: bool = False
) -> Any:
    initial = keras.initializers.Constant(value)
    return layer.add_weight(name, shape, initializer=initial, trainable=trainable)


@tf.custom_gradient  # type: ignore[misc]
def past(inputs: Any, *unused: Any) -> Any:
    """Return the inputs; the others have a gradient of 0, where optimizers would miss one."""
    return tf.identity(inputs), lambda upstream: (upstream, *map(tf.zeros_like, unused))


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
