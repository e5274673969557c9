"""A layer with a quantised kernel and a quantised output, while it trains and when exported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from quarl_tf.foundation.keras import autocast_variable, tf
from quarl_tf.networks.inference import in_numpy
from quarl_tf.networks.layers import CLIP_DEVIATIONS, Floats, Forward, ObservationNormalizer
from quarl_tf.quantization.fake_quantizer import DelayedQuantizer
from quarl_tf.quantization.toolkit import quantize_config, quantize_wrapper


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


def _clipped(values: Any, end: float) -> Any:
    return values if np.isinf(end) else tf.clip_by_value(values, -end, end)
