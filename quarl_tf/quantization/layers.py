"""A layer of a policy network before and behind the delay: watched, and quantised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quarl_tf.foundation.keras import keras, tf
from quarl_tf.networks.inference import in_numpy
from quarl_tf.networks.layers import CLIP_DEVIATIONS, Floats, Forward, ObservationNormalizer
from quarl_tf.quantization.fake_quantizer import FakeQuantizer, Watcher, past
from quarl_tf.quantization.grid import Grid


class _Wrapper(keras.layers.Layer):  # type: ignore[misc]
    """A layer around another of the same name, so that both kinds of network are addressed alike.

    `autocast` is off: what is inside casts to its own arithmetic, ranges are float32.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__(name=layer.name, autocast=False)
        self.layer = layer
        self._order: list[int] = []

    def _by_id(self, values: tuple[Floats, ...]) -> dict[int, Floats]:
        # Kept, for Keras walks through all it contains whenever it is asked for variables.
        self._order = self._order or [id(variable) for variable in self.variables]
        return dict(zip(self._order, values, strict=True))

    def in_numpy(self, *values: Floats) -> Forward:
        """Return what the layer inside computes, with given values of all variables."""
        by_id = self._by_id(values)
        return in_numpy(self.layer, [by_id[id(variable)] for variable in self.layer.variables])


class WatchedLayer(_Wrapper):
    """Computes what the layer inside does, and takes in the range of its output in training."""

    def __init__(
        self, layer: Any, kernel: FakeQuantizer | None, output: FakeQuantizer | None, ranges: str
    ) -> None:
        """Wrap a layer.

        Args:
            layer: The layer, built.
            kernel: What will quantise its kernel.
            output: What will quantise its output.
            ranges: How ranges are made of batches; see `QatSchedule.ranges`.
        """
        super().__init__(layer)
        both = {"kernel": kernel, "output": output}
        self.quantizers = {part: quantizer for part, quantizer in both.items() if quantizer}
        self.watcher = Watcher(ranges)
        #: Whether it is watched behind the delay, too.
        self.follows = ranges == "following"

    def build(self, input_shape: Any) -> None:
        """Create the range, and the factors of steps that will be learned."""
        self.seen = self.watcher.build(None, "output", self)
        self.stretches = {
            part: quantizer.build_stretch(self.shape_of(part), part, self)
            for part, quantizer in self.quantizers.items()
        }
        super().build(input_shape)

    def shape_of(self, part: str) -> Any:
        """Return the shape of the kernel, or none for the output: it has one grid."""
        return self.layer.kernel.shape if part == "kernel" else None

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Return the layer's output."""
        outputs = self.watcher(self.layer(inputs), training, self.seen)
        stretches = [v for stretch in self.stretches.values() for v in stretch.values()]
        return past(outputs, *stretches) if stretches else outputs


class QuantizedLayer(_Wrapper):
    """Computes what a watched layer does with kernel and output on grids; it shares its variables.

    The grids are variables of its own.
    """

    def __init__(self, watched: WatchedLayer) -> None:
        """Take over a watched layer."""
        super().__init__(watched.layer)
        self._watched = watched
        self.quantizers = watched.quantizers

    def build(self, input_shape: Any) -> None:
        """Create the ends of the grids."""
        watched = self._watched
        self.variables_of = {
            part: {
                **quantizer.build(watched.shape_of(part), part, self),
                **watched.stretches[part],
            }
            for part, quantizer in self.quantizers.items()
        }
        super().build(input_shape)

    def _quantized(self, part: str, tensor: Any) -> Any:
        quantizer = self.quantizers.get(part)
        return tensor if quantizer is None else quantizer(tensor, False, self.variables_of[part])

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Return the quantised output."""
        if hasattr(self.layer, "kernel"):
            kernel = self._quantized("kernel", self.layer.kernel)
            outputs = _computed(self.layer, inputs, kernel, self.layer.bias)
        else:
            outputs = self.layer(inputs)
        if self._watched.follows:
            outputs = self._watched.watcher(outputs, training, self._watched.seen)
        return self._quantized("output", outputs)

    def freeze(self) -> None:
        """Set the grids to the range that was seen, and to the kernel's."""
        for part, quantizer in self.quantizers.items():
            if part == "output":
                low, high = (self._watched.seen[end].numpy() for end in ("low", "high"))
            else:
                kernel = self.layer.kernel.numpy()
                others = tuple(range(kernel.ndim - 1)) if quantizer.per_channel else None
                low, high = kernel.min(axis=others), kernel.max(axis=others)
            quantizer.freeze(self.variables_of[part], low, high)

    def take_grids(self, other: QuantizedLayer) -> None:
        """Set the grids to those of the same layer of another network, with what it has seen."""
        for mine, theirs in zip(self._ranges(), other._ranges(), strict=True):
            mine.assign(theirs)

    def _ranges(self) -> list[Any]:
        grids = (v for grid in self.variables_of.values() for v in grid.values())
        return [*self._watched.seen.values(), *grids]

    def in_numpy(self, *values: Floats) -> Forward:
        """Return the same for arrays, with given values of all variables."""
        by_id = self._by_id(values)

        def on_grid(part: str) -> Forward:
            if (quantizer := self.quantizers.get(part)) is None:
                return lambda x: x
            return quantizer.in_numpy({n: by_id[id(v)] for n, v in self.variables_of[part].items()})

        inner = [by_id[id(variable)] for variable in self.layer.variables]
        if "kernel" in self.quantizers:
            inner[0] = on_grid("kernel")(inner[0])
        compute, output = in_numpy(self.layer, inner), on_grid("output")
        return lambda x: output(compute(x))

    def grid(self, part: str) -> Grid:
        """Return the grid of the "kernel" or the "output"."""
        values = {name: variable.numpy() for name, variable in self.variables_of[part].items()}
        return self.quantizers[part].grid(values)

    def exported(self, *, rounded: bool) -> Callable[[Any], Any]:
        """Return what the layer computes, by constants, for the converter.

        Args:
            rounded: Whether the output is put on its grid.
        """
        compute = self._by_constants()
        quantizer = self.quantizers.get("output") if rounded else None
        if quantizer is None:
            return compute
        grid = self.grid("output")
        return lambda x: quantizer.exported(compute(x), grid)

    def _by_constants(self) -> Callable[[Any], Any]:
        layer = self.layer
        if isinstance(layer, ObservationNormalizer):
            mean, factor = (variable.numpy() for variable in layer.variables)
            ends = -CLIP_DEVIATIONS, CLIP_DEVIATIONS
            return lambda x: tf.clip_by_value((x - mean) * factor, *ends)
        if not hasattr(layer, "kernel"):
            return layer.call  # type: ignore[no-any-return]
        # On its grid already: training leaves weights right between two codes, where another order
        # of operations would round to the other one.
        kernel = self._quantized("kernel", layer.kernel).numpy()
        bias = layer.bias.numpy()
        return lambda x: _computed(layer, x, tf.constant(kernel), tf.constant(bias))


def _computed(layer: Any, inputs: Any, kernel: Any, bias: Any) -> Any:
    """Return what a convolution or a fully-connected layer computes with another kernel."""
    inputs, kernel, bias = (tf.cast(x, layer.compute_dtype) for x in (inputs, kernel, bias))
    convolve = isinstance(layer, keras.layers.Conv2D)
    product = layer.convolution_op(inputs, kernel) if convolve else tf.matmul(inputs, kernel)
    return layer.activation(tf.nn.bias_add(product, bias))
