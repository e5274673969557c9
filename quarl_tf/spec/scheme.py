"""Schemes: how the numbers of a flatbuffer are represented, by name."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from quarl_tf.foundation.errors import unknown
from quarl_tf.spec.recipe import (
    EDGE_BITS,
    INT4_BITS,
    PTQ_BITS,
    QAT_BITS,
    LayerFormat,
    Quantization,
    Recipe,
    TensorFormat,
    integers,
)

REFERENCE = "fp32"  #: The scheme that all others are compared with; every plain training has it.
BASELINE = "random"  #: Name of the random policy's evaluations, which lie beside those of schemes.


def _uniform(form: LayerFormat, head: LayerFormat | None = None) -> Recipe:
    return Recipe(default=form, observation=replace(form, weights=None), head=head or form)


_GPTQ, _NEAREST = integers(8, per_channel=True, rounding="gptq"), integers(8, per_channel=True)

_NATIVE = {
    "fp32": Recipe(),
    "fp16": _uniform(LayerFormat(weights=TensorFormat(bits=16, ieee=True))),
    # The runtime quantises activations at each call.
    "dynamic_int8": _uniform(replace(_NEAREST, activations=None)),
    "int8": _uniform(_GPTQ),
    "int8_tensor": _uniform(integers(8)),
    "int8_head32": _uniform(_GPTQ, head=LayerFormat()),
    "int8_stock": _uniform(_NEAREST),
    "int8_auto": _uniform(_GPTQ),
    "qat_int8": _uniform(_NEAREST),
    "qat_int4": _uniform(integers(INT4_BITS)),
}

#: Schemes whose activations are integers after training, with ranges from observations.
CALIBRATED = ("int8", "int8_tensor", "int8_head32", "int8_stock", "int8_auto")

#: Schemes that `quarl run` exports by default.
DEFAULT_SCHEMES = ("fp32", "fp16", "dynamic_int8", "int8", *(f"ptq_w{n}" for n in range(8, 1, -1)))


@dataclass(frozen=True)
class Scheme:
    """How a policy's numbers are represented; decode the name with `Scheme.parse`.

    | name           | weights       | activations | kernels                                  |
    |----------------|---------------|-------------|------------------------------------------|
    | `fp32`         | float32       | float32     | native                                   |
    | `fp16`         | float16       | float32     | native storage, float arithmetic         |
    | `dynamic_int8` | int8          | float32     | native, activations quantised per call   |
    | `int8`         | int8          | int8        | native, calibrated on rollouts           |
    | `int8_tensor`  | int8          | int8        | native, one scale for a dense kernel     |
    | `int8_head32`  | int8          | int8        | native, but the last layer in float32    |
    | `int8_stock`   | int8          | int8        | native, by TensorFlow's converter alone  |
    | `int8_auto`    | int8          | int8        | native, the best of six recipes by rollouts |
    | `ptq_wN`       | N-bit grid    | float32     | simulated: float values on the N-bit grid |
    | `ptq_paper_wN` | as published  | float32     | simulated: floored, one code too many    |
    | `ptq_opt_wN`   | N-bit grid    | float32     | simulated: by GPTQ, the head at 8 bits   |
    | `ptq_opt_wNaN` | N-bit grid    | N-bit grid  | simulated: observation and head at 8 bits |
    | `ptq_wN-LAYER=M` | N-bit grid  | float32     | simulated: but M bits in a layer, or in more |
    | `qat_int8`     | int8          | int8        | native, of a training at 8 bits          |
    | `qat_int4`     | int4          | N-bit grid  | native storage, of a training at N <= 4  |
    | `qat_wNaN`     | N-bit grid    | N-bit grid  | simulated, of a training at N bits       |

    Attributes:
        name: The name, which determines the rest.
        recipe: The formats of the numbers. A training at fewer bits than `qat_int4`'s four, or with
            options, has its own recipe instead.
        native: Whether the flatbuffer stores weights in those bits.
        aware: Whether it belongs to a quantisation-aware training.
    """

    name: str
    recipe: Recipe
    native: bool
    aware: bool = False

    @property
    def weight_bits(self) -> int:
        """Width of a weight."""
        weights = self.recipe.default.weights
        return 32 if weights is None else weights.bits

    @property
    def rounding(self) -> str | None:
        """How weights are rounded without observations; None if they are not."""
        weights = self.recipe.default.weights
        if weights is None or self.native or self.aware or self.calibrated:
            return None
        return weights.rounding

    @property
    def calibrated(self) -> bool:
        """Whether it needs observations, after training."""
        return self.name in CALIBRATED or self.name.startswith("ptq_opt_")

    @property
    def centred(self) -> bool:
        """Whether values of actions lose their common part: what is left are advantages."""
        activations = self.recipe.default.activations is not None
        return self.calibrated and activations and self.name != "int8_stock"

    @property
    def post_training(self) -> bool:
        """Whether it can be made from a float flatbuffer, with observations if calibrated."""
        return self.calibrated or bool(self.rounding and not self.single_layers)

    @property
    def single_layers(self) -> bool:
        """Whether a layer has bits of its own."""
        differs = self.recipe.head != self.recipe.default or bool(self.recipe.by_layer)
        return differs and not self.calibrated

    @classmethod
    def parse(cls, name: str) -> Self:
        """Decode a scheme's name; a UsageError for an unknown one names the closest."""
        if name in _NATIVE:
            return cls(name, _NATIVE[name], native=True, aware=name.startswith("qat_"))
        match = re.fullmatch(r"qat_w([1-9])a\1", name)
        if match and int(match[1]) in QAT_BITS:
            return cls(name, _uniform(integers(int(match[1]))), native=False, aware=True)
        match = re.fullmatch(r"ptq_opt_w([1-9][0-9]*)(a\1)?", name)
        if match and int(match[1]) in (QAT_BITS if match[2] else PTQ_BITS):
            return cls(name, _optimised(int(match[1]), rounded=bool(match[2])), native=False)
        match = re.fullmatch(r"ptq_(paper_)?w([1-9][0-9]*)((?:-[a-z]\w*=[1-9][0-9]*)*)", name)
        if match and int(match[2]) in PTQ_BITS:
            rounding = "floor" if match[1] else "nearest"
            pairs = [part.split("=") for part in match[3].split("-")[1:]]
            widths = {layer: int(bits) for layer, bits in pairs}
            # Each scheme has one name: layers are unique and sorted.
            if pairs == sorted([k, f"{v}"] for k, v in widths.items() if v in PTQ_BITS):
                return cls(name, _on_grid(int(match[2]), rounding, widths), native=False)
        qat_names = (f"qat_w{bits}a{bits}" for bits in QAT_BITS)
        raise unknown("scheme", name, {*DEFAULT_SCHEMES, *_NATIVE, *qat_names})


def _on_grid(bits: int, rounding: str, widths: Mapping[str, int]) -> Recipe:
    """Return the papers' weight-only recipe, with one grid per fully-connected kernel."""

    def form(width: int) -> LayerFormat:
        return LayerFormat(weights=TensorFormat(bits=width, rounding=rounding, step="paper"))

    by_layer = {layer: form(width) for layer, width in widths.items() if layer != "head"}
    return Recipe(default=form(bits), head=form(widths.get("head", bits)), by_layer=by_layer)


def _optimised(bits: int, *, rounded: bool) -> Recipe:
    def form(width: int) -> LayerFormat:
        formats = integers(width, per_channel=True, rounding="gptq")
        return formats if rounded else replace(formats, activations=None)

    edge = form(max(bits, EDGE_BITS))
    return Recipe(default=form(bits), observation=replace(edge, weights=None), head=edge)


def default_schemes(quantization: Quantization | None) -> tuple[str, ...]:
    """Return the names of the schemes that a training is exported as by default."""
    if quantization is None:
        return DEFAULT_SCHEMES
    simulated = f"qat_w{quantization.bits}a{quantization.bits}"
    native = quantization.recipe in (_NATIVE["qat_int8"], _NATIVE["int8_tensor"])
    return ("qat_int8", simulated) if native else (simulated,)


def possible_schemes(quantization: Quantization | None) -> tuple[str, ...]:
    """Return the names of the schemes that a training can be exported as."""
    names = default_schemes(quantization)
    if quantization is None or quantization.bits > INT4_BITS or quantization.rule == "paper":
        return names
    return ("qat_int4", *names)
