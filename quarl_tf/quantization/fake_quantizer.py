"""The TensorFlow counterpart of `grid`: rounds tensors to grids, with gradients."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quarl_tf.foundation.keras import keras, tf
from quarl_tf.networks.layers import Floats
from quarl_tf.quantization.grid import Grid, frozen_grid, grid_between, snap
from quarl_tf.spec import QatSchedule, TensorFormat

with warnings.catch_warnings():
    # It compares versions by a deprecated module.
    warnings.simplefilter("ignore", DeprecationWarning)
    from tensorflow_model_optimization.python.core.quantization.keras import quantizers


@dataclass(frozen=True)
class FakeQuantizer(quantizers.Quantizer):  # type: ignore[misc]
    """Rounds a tensor to a grid; gradients pass as the schedule says."""

    form: TensorFormat
    schedule: QatSchedule
    kernel: bool = False  #: Whether the tensor is a kernel; else it is the output of a layer.
    per_channel: bool = False  #: Whether each index of the last axis has its own grid.
    fixed: tuple[float, float] | None = None  #: The range, where it is known in advance.
    limit: float = float("inf")  #: Bound of the range's ends, whatever was observed.

    def build(self, tensor_shape: Any, name: str, layer: Any) -> dict[str, Any]:
        """Create the ends of the grid as variables of the layer."""
        shape = self._shape(tensor_shape)
        low = add_variable(layer, f"{name}_low", -1.0, shape)
        return {"low": low, "high": add_variable(layer, f"{name}_high", 1.0, shape)}

    def build_stretch(self, tensor_shape: Any, name: str, layer: Any) -> dict[str, Any]:
        """Create the logarithm of the factor of a learned step, where the step is learned."""
        if not self.schedule.learned_steps or self.fixed is not None:
            return {}
        name, shape = f"{name}_log_stretch", self._shape(tensor_shape)
        return {"log_stretch": add_variable(layer, name, 0.0, shape, trainable=True)}

    def _shape(self, tensor_shape: Any) -> tuple[int, ...]:
        return (tensor_shape[-1],) if self.per_channel else ()

    def __call__(self, inputs: Any, training: bool, weights: Mapping[str, Any], **_: Any) -> Any:
        """Return the quantised tensor in its own dtype."""
        del training
        values = tf.cast(inputs, tf.float32)
        if "log_stretch" in weights:
            return tf.cast(self._by_learned_step(values, weights), inputs.dtype)
        low, high = weights["low"], weights["high"]
        rounded = tf.stop_gradient(self.snap(values, low, high))
        outputs = tf.grad_pass_through(lambda _: rounded)(values)
        # Beyond a known range lies no more than a rounding.
        if self.schedule.gradient == "clipped" and self.fixed is None:
            outputs = tf.where((values >= low) & (values <= high), outputs, rounded)
        return tf.cast(outputs, inputs.dtype)

    def snap(self, inputs: Any, low: Any, high: Any) -> Any:
        """Round to the grid, as `grid.snap`; without a gradient."""
        if self.form.rounding == "floor":
            return snap(inputs, frozen_grid(low, high, self.form), self.form, tf)
        operation = (
            tf.quantization.fake_quant_with_min_max_vars_per_channel
            if self.per_channel
            else tf.quantization.fake_quant_with_min_max_vars
        )
        return operation(inputs, low, high, self.form.bits, self.form.symmetric)

    def _by_learned_step(self, inputs: Any, weights: Mapping[str, Any]) -> Any:
        """Quantise by a learned step (Esser et al., arXiv 1902.08153).

        Unlike there, the step starts as that of the frozen range, and the logarithm of a factor is
        learned (Jain et al., arXiv 1903.08066): Adam moves every variable by about the learning
        rate, which may be more than a step and would make it negative.
        """
        # The step changes, the code of 0 does not.
        frozen_step = (weights["high"] - weights["low"]) / self.form.steps
        first_code = tf.round(weights["low"] / frozen_step)
        last_code = first_code + self.form.steps
        # Values that share the step: of a kernel, or of one observation's activations.
        shape = inputs.shape if self.kernel else inputs.shape[1:]
        count = np.prod(shape[:-1] if self.per_channel else shape)
        scale = tf.math.rsqrt(tf.maximum(-first_code, last_code) * np.float32(count))
        step = frozen_step * tf.exp(_scaled_gradient(weights["log_stretch"], scale))
        codes = tf.clip_by_value(inputs / step, first_code, last_code)
        return tf.grad_pass_through(tf.round)(codes) * step

    def freeze(self, weights: Mapping[str, Any], low: Floats, high: Floats) -> None:
        """Set the grid to a range, widened and moved so that 0 is on it."""
        if self.fixed is not None:
            low, high = (np.array(end, np.float32) for end in self.fixed)
        ends = np.clip(low, -self.limit, 0), np.clip(high, 0, self.limit)
        grid = grid_between(*ends, self.form)
        weights["low"].assign(grid.low)
        weights["high"].assign(grid.high)

    def grid(self, values: Mapping[str, Floats]) -> Grid:
        """Return the grid by the values of the variables, a learned step included."""
        stretch = np.exp(values.get("log_stretch", np.float32(0)))
        low, high = (values[end] * stretch for end in ("low", "high"))
        return frozen_grid(low, high, self.form)

    def get_config(self) -> dict[str, Any]:
        """Return nothing: networks are built by factories, not from configurations."""
        return {}


def add_variable(
    layer: Any, name: str, value: float, shape: tuple[int, ...] = (), *, trainable: bool = False
) -> Any:
    """Add a variable to a layer."""
    initial = keras.initializers.Constant(value)
    return layer.add_weight(name, shape, initializer=initial, trainable=trainable)


@tf.custom_gradient  # type: ignore[misc]
def with_zero_gradients(inputs: Any, *unused: Any) -> Any:
    """Return the inputs; give the others a gradient of 0, since optimizers refuse None."""
    return tf.identity(inputs), lambda upstream: (upstream, *map(tf.zeros_like, unused))


@tf.custom_gradient  # type: ignore[misc]
def _scaled_gradient(value: Any, scale: Any) -> Any:
    return tf.identity(value), lambda upstream: (upstream * scale, None)
