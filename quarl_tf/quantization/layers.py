"""Layers of a policy network before the delay (watched) and after it (quantised)."""

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import numpy as np

from quarl_tf.foundation.keras import keras, tf
from quarl_tf.networks.inference import in_numpy
from quarl_tf.networks.layers import CLIP_DEVIATIONS, Floats, Forward, ObservationNormalizer, Read
from quarl_tf.quantization.fake_quantizer import FakeQuantizer, add_variable, with_zero_gradients
from quarl_tf.quantization.grid import Grid, snap

_value: Read = methodcaller("numpy")

#: Weight of earlier batches in a moving average.
_DECAY = 0.99

#: Share of a batch beyond each end of a range by percentiles.
_TAIL = 0.001


class _Wrapper(keras.layers.Layer):  # type: ignore[misc]
    """A layer around another of the same name, so that both have the same address.

    `autocast` is off: the inner layer casts to its own dtype, ranges are float32.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__(name=layer.name, autocast=False)
        self.layer = layer

    def in_numpy(self, read: Read) -> Forward:
        """Return the inner layer's function of arrays."""
        return in_numpy(self.layer, read)


class WatchedLayer(_Wrapper):
    """Computes the inner layer and, in training, records the range of its output."""

    def __init__(self, layer: Any, quantizers: dict[str, FakeQuantizer], ranges: str) -> None:
        """Wrap a built layer, whose "kernel" and "output" the quantisers are for.

        `QatSchedule.ranges` explains `ranges`.
        """
        super().__init__(layer)
        self.quantizers = quantizers
        self.ranges = ranges

    def build(self, input_shape: Any) -> None:
        """Create the range (low above high until something is seen) and learned steps."""
        self.output_range = {
            "low": add_variable(self, "output_seen_low", 1.0),
            "high": add_variable(self, "output_seen_high", -1.0),
        }
        self.stretches = {
            part: quantizer.build_stretch(self.shape_of(part), part, self)
            for part, quantizer in self.quantizers.items()
        }
        super().build(input_shape)

    def shape_of(self, part: str) -> Any:
        """Return the shape of the kernel, or None for the output, which has one grid."""
        return self.layer.kernel.shape if part == "kernel" else None

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Return the layer's output."""
        outputs = self.layer(inputs)
        if training:
            self.watch(outputs)
        stretches = [v for variables in self.stretches.values() for v in variables.values()]
        return with_zero_gradients(outputs, *stretches) if stretches else outputs

    def watch(self, outputs: Any) -> None:
        """Update the range by a batch of outputs."""
        low, high = self.output_range["low"], self.output_range["high"]
        values = tf.cast(outputs, tf.float32)
        if self.ranges == "percentile":
            sorted_values = tf.sort(tf.reshape(values, (-1,)))
            last = tf.cast(tf.size(sorted_values) - 1, tf.float32)
            places = [tf.cast(tf.round(share * last), tf.int32) for share in (_TAIL, 1 - _TAIL)]
            batch_low, batch_high = (sorted_values[place] for place in places)
        else:
            batch_low, batch_high = tf.reduce_min(values), tf.reduce_max(values)
        is_first = low > high
        if self.ranges == "extremes":
            ends = tf.minimum(low, batch_low), tf.maximum(high, batch_high)
        else:
            pairs = (low, batch_low), (high, batch_high)
            ends = tuple(_DECAY * end + (1 - _DECAY) * batch_end for end, batch_end in pairs)
        low.assign(tf.where(is_first, batch_low, ends[0]))
        high.assign(tf.where(is_first, batch_high, ends[1]))


class QuantizedLayer(_Wrapper):
    """Computes a watched layer with kernel and output on grids, and shares its variables."""

    def __init__(self, watched: WatchedLayer) -> None:
        super().__init__(watched.layer)
        self._watched = watched
        self.quantizers = watched.quantizers

    def build(self, input_shape: Any) -> None:
        """Create the ends of the grids."""
        watched = self._watched
        self.grid_variables = {
            part: {**quantizer.build(watched.shape_of(part), part, self), **watched.stretches[part]}
            for part, quantizer in self.quantizers.items()
        }
        super().build(input_shape)

    def _quantized(self, part: str, tensor: Any) -> Any:
        quantizer = self.quantizers.get(part)
        return tensor if quantizer is None else quantizer(tensor, False, self.grid_variables[part])

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Return the quantised output."""
        if hasattr(self.layer, "kernel"):
            kernel = self._quantized("kernel", self.layer.kernel)
            outputs = _computed(self.layer, inputs, kernel, self.layer.bias)
        else:
            outputs = self.layer(inputs)
        if training and self._watched.ranges == "following":
            self._watched.watch(outputs)
        return self._quantized("output", outputs)

    def freeze(self) -> None:
        """Set the grids to the observed range, and to the range of the kernel."""
        for part, quantizer in self.quantizers.items():
            if part == "output":
                low, high = (self._watched.output_range[end].numpy() for end in ("low", "high"))
            else:
                kernel = self.layer.kernel.numpy()
                axes = tuple(range(kernel.ndim - 1)) if quantizer.per_channel else None
                low, high = kernel.min(axis=axes), kernel.max(axis=axes)
            quantizer.freeze(self.grid_variables[part], low, high)

    @property
    def range_variables(self) -> list[Any]:
        """The variables of the observed range and of the grids."""
        grids = (v for grid in self.grid_variables.values() for v in grid.values())
        return [*self._watched.output_range.values(), *grids]

    def in_numpy(self, read: Read) -> Forward:
        """Return the function of arrays, rounded to the grids."""
        round_kernel, round_output = (self._rounding(part, read) for part in ("kernel", "output"))

        def read_rounded(variable: Any) -> Floats:
            is_kernel = variable is getattr(self.layer, "kernel", None)
            return round_kernel(read(variable)) if is_kernel else read(variable)

        compute = in_numpy(self.layer, read_rounded)
        return lambda x: round_output(compute(x))

    def _rounding(self, part: str, read: Read, library: Any = np) -> Forward:
        """Return the function that rounds the "kernel" or the "output"; see `grid.snap`."""
        quantizer = self.quantizers.get(part)
        if quantizer is None:
            return lambda x: x
        grid = self.grid(part, read)
        return lambda x: snap(x, grid, quantizer.form, library)

    def grid(self, part: str, read: Read = _value) -> Grid:
        """Return the grid of the "kernel" or the "output"."""
        values = {name: read(variable) for name, variable in self.grid_variables[part].items()}
        return self.quantizers[part].grid(values)

    def exported(self, *, rounded: bool) -> Callable[[Any], Any]:
        """Return the layer as a function with constants; `rounded` rounds its output."""
        compute = self._by_constants()
        if not rounded:
            return compute
        round_output = self._rounding("output", _value, tf)
        return lambda x: round_output(compute(x))

    def _by_constants(self) -> Callable[[Any], Any]:
        layer = self.layer
        if isinstance(layer, ObservationNormalizer):
            mean, factor = (variable.numpy() for variable in layer.variables)
            ends = -CLIP_DEVIATIONS, CLIP_DEVIATIONS
            return lambda x: tf.clip_by_value((x - mean) * factor, *ends)
        if not hasattr(layer, "kernel"):
            return layer.call  # type: ignore[no-any-return]
        # Rounded here: weights may lie halfway between two codes, where the converter's order of
        # operations could choose the other one.
        kernel = self._quantized("kernel", layer.kernel).numpy()
        bias = layer.bias.numpy()
        return lambda x: _computed(layer, x, tf.constant(kernel), tf.constant(bias))


def _computed(layer: Any, inputs: Any, kernel: Any, bias: Any) -> Any:
    """Compute a convolution or a fully-connected layer with another kernel and bias."""
    inputs, kernel, bias = (tf.cast(x, layer.compute_dtype) for x in (inputs, kernel, bias))
    convolve = isinstance(layer, keras.layers.Conv2D)
    product = layer.convolution_op(inputs, kernel) if convolve else tf.matmul(inputs, kernel)
    return layer.activation(tf.nn.bias_add(product, bias))
