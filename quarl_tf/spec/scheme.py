"""Schemes: how the numbers of a flatbuffer are represented, by name."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from quarl_tf.foundation.errors import UsageError, unknown
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


@dataclass(frozen=True)
class Scheme:
    """How a policy's numbers are represented; decode the name with `Scheme.parse`.

    Attributes:
        name: The name, which determines the rest.
        kind: "float" if the converter alone makes it; "weights" if kernels are rounded after
            training; "integer", by us, or "stock", by the converter, if activations become
            integers, and "optimised" if kernels are rounded by GPTQ, which needs observations;
            "trained" if it belongs to a quantisation-aware training.
        recipe: The formats of the numbers. A training at fewer bits than `qat_int4`'s four, or with
            options, has its own recipe instead.
        native: Whether the flatbuffer stores weights in those bits.
    """

    name: str
    kind: str
    recipe: Recipe
    native: bool = False

    @property
    def aware(self) -> bool:
        """Whether it belongs to a quantisation-aware training."""
        return self.kind == "trained"

    @property
    def weight_bits(self) -> int:
        """Width of a weight."""
        weights = self.recipe.default.weights
        return 32 if weights is None else weights.bits

    @property
    def calibrated(self) -> bool:
        """Whether it needs observations, after training."""
        return self.kind in ("integer", "stock", "optimised")

    @property
    def centred(self) -> bool:
        """Whether values of actions lose their common part: what is left are advantages."""
        activations = self.recipe.default.activations is not None
        return self.kind in ("integer", "optimised") and activations

    @property
    def post_training(self) -> bool:
        """Whether it can be made from a float flatbuffer, with observations if calibrated."""
        return self.calibrated or self.kind == "weights"

    @property
    def single_layers(self) -> bool:
        """Whether the name gives layers bits of their own."""
        return "=" in self.name

    @classmethod
    def parse(cls, name: str) -> "Scheme":
        """Decode a scheme's name; a UsageError for an unknown one names the closest."""
        match = re.fullmatch(r"(int8|ptq_(paper_)?w([0-9]+))((?:-[a-z]\w*=[1-9][0-9]*)+)", name)
        if match and match[1] in _SCHEMES:
            pairs = [part.split("=") for part in match[4].split("-")[1:]]
            widths = {layer: int(bits) for layer, bits in pairs}
            possible = PTQ_BITS if match[3] else (_FLOAT_BITS,)
            # Each scheme has one name: layers are unique and sorted.
            in_order = sorted([k, f"{v}"] for k, v in widths.items() if v in possible)
            if len(pairs) == len(in_order) and pairs != in_order:
                sorted_name = "-".join([match[1], *map("=".join, in_order)])
                raise UsageError(
                    f"A scheme's layers are in alphabetical order; name {sorted_name}. "
                    f"Received: scheme={name!r}"
                )
            if pairs == in_order:
                if match[3]:
                    rounding = "floor" if match[2] else "nearest"
                    return cls(name, "weights", _on_grid(int(match[3]), rounding, widths))
                if {*widths} != {"head"}:  # That is int8_head32.
                    return cls(name, "integer", _in_float(widths), native=True)
        if name not in _SCHEMES:
            usual = {one for one, scheme in _SCHEMES.items() if scheme.native or scheme.aware}
            raise unknown("scheme", name, {*usual, *DEFAULT_SCHEMES})
        return _SCHEMES[name]


def _uniform(form: LayerFormat, edge: LayerFormat | None = None) -> Recipe:
    edge = edge or form
    return Recipe(default=form, observation=replace(edge, weights=None), head=edge)


def _on_grid(bits: int, rounding: str, widths: Mapping[str, int] | None = None) -> Recipe:
    """Return the papers' weight-only recipe, with one grid per fully-connected kernel."""

    def form(width: int) -> LayerFormat:
        return LayerFormat(weights=TensorFormat(bits=width, rounding=rounding, step="paper"))

    by_layer = {layer: form(width) for layer, width in (widths or {}).items()}
    head = by_layer.pop("head", form(bits))
    return Recipe(default=form(bits), head=head, by_layer=by_layer)


def _in_float(layers: Collection[str]) -> Recipe:
    """Return the recipe of int8 with layers in float."""
    recipe = _FLOAT_HEAD if "head" in layers else _uniform(_GPTQ)
    return replace(recipe, by_layer=dict.fromkeys({*layers} - {"head"}, LayerFormat()))


def _optimised(bits: int, *, rounded: bool = True) -> Recipe:
    """Return a recipe by GPTQ, with `rounded` activations, and more bits at the ends."""

    def form(width: int) -> LayerFormat:
        formats = integers(width, per_channel=True, rounding="gptq")
        return formats if rounded else replace(formats, activations=None)

    return _uniform(form(bits), edge=form(max(bits, EDGE_BITS)))


_GPTQ, _NEAREST = integers(8, per_channel=True, rounding="gptq"), integers(8, per_channel=True)
_HALF = LayerFormat(weights=TensorFormat(bits=16, ieee=True))
_FLOAT_HEAD = replace(_uniform(_GPTQ), head=LayerFormat())

_FLOAT_BITS = 32  #: Of a layer that `int8` leaves in float.

#: All but those with bits of their own in single layers.
_SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp32", "float", Recipe(), native=True),
        Scheme("fp16", "weights", _uniform(_HALF), native=True),
        # The runtime quantises activations at each call.
        Scheme("dynamic_int8", "float", _uniform(replace(_NEAREST, activations=None)), native=True),
        Scheme("int8", "integer", _uniform(_GPTQ), native=True),
        # With one scale for a fully-connected kernel, for runtimes that know no more.
        Scheme("int8_tensor", "integer", _uniform(integers(8)), native=True),
        # With the last layer in float.
        Scheme("int8_head32", "integer", _FLOAT_HEAD, native=True),
        # By TensorFlow's converter alone.
        Scheme("int8_stock", "stock", _uniform(_NEAREST), native=True),
        # The best of several recipes, by rollouts.
        Scheme("int8_auto", "integer", _uniform(_GPTQ), native=True),
        Scheme("qat_int8", "trained", _uniform(_NEAREST), native=True),
        Scheme("qat_int4", "trained", _uniform(integers(INT4_BITS)), native=True),
        *(Scheme(f"qat_w{n}a{n}", "trained", _uniform(integers(n))) for n in QAT_BITS),
        *(Scheme(f"ptq_w{n}", "weights", _on_grid(n, "nearest")) for n in PTQ_BITS),
        # As published: rounded down, one code too many.
        *(Scheme(f"ptq_paper_w{n}", "weights", _on_grid(n, "floor")) for n in PTQ_BITS),
        *(Scheme(f"ptq_opt_w{n}", "optimised", _optimised(n, rounded=False)) for n in PTQ_BITS),
        *(Scheme(f"ptq_opt_w{n}a{n}", "optimised", _optimised(n)) for n in QAT_BITS),
    )
}

#: Schemes that others are made from.
FLOAT_SCHEMES = (REFERENCE, "fp16")

#: Schemes whose activations are int8 after training, with ranges from observations.
INT8_SCHEMES = tuple(
    name for name, scheme in _SCHEMES.items() if scheme.kind in ("integer", "stock")
)

#: Schemes that `quarl run` exports by default.
DEFAULT_SCHEMES = ("fp32", "fp16", "dynamic_int8", "int8", *(f"ptq_w{n}" for n in range(8, 1, -1)))

#: Those of a float training that lists name one by one.
LISTED_SCHEMES = tuple(dict.fromkeys((*DEFAULT_SCHEMES, *INT8_SCHEMES)))


def default_schemes(quantization: Quantization | None) -> tuple[str, ...]:
    """Return the names of the schemes that a training is exported as by default."""
    if quantization is None:
        return DEFAULT_SCHEMES
    simulated = f"qat_w{quantization.bits}a{quantization.bits}"
    native = quantization.recipe in [_SCHEMES[name].recipe for name in ("qat_int8", "int8_tensor")]
    return ("qat_int8", simulated) if native else (simulated,)


def possible_schemes(quantization: Quantization | None) -> tuple[str, ...]:
    """Return the names of the schemes that a training can be exported as."""
    names = default_schemes(quantization)
    if quantization is None or quantization.bits > INT4_BITS or quantization.rule == "paper":
        return names
    return ("qat_int4", *names)
