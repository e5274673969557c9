"""How the numbers of a network are represented, as plain data: formats, recipes, a schedule."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, Self

from quarl_tf.foundation.errors import UsageError, require_known
from quarl_tf.foundation.files import digest
from quarl_tf.foundation.kinds import COUNT, FLAG, Kind, one_of, require_all

INT4_BITS = 4  #: Widest grid of int4.
EDGE_BITS = 8  #: Default width of the observation and of the head.
QAT_BITS = range(2, 9)  #: Widths of a quantisation-aware training.
PTQ_BITS = range(2, 33)  #: Widths of weight-only grids; 32 bits are finer than float32 at the ends.

#: Names of the layers that scale the observation, and of those that end in the head.
SCALINGS, HEADS = ("normalizer", "byte_scaling"), ("head", "squash")

#: Ends of the names of layers that belong to the one they are named after.
_PARTS = ("norm", "relu", "tanh")


@dataclass(frozen=True, kw_only=True)
class TensorFormat:
    """The grid of a tensor's numbers; see `quantization.grid`.

    Attributes:
        bits: Width of a code.
        symmetric: Whether the range is as wide below 0 as above, without the lowest code.
        per_channel: Whether fully-connected kernels have a grid per output; convolutions always do.
        rounding: To the "nearest" code, down ("floor"), or to the code that changes the layer's
            output least ("gptq").
        step: A range over 2**bits, as the "paper" has it, or over 2**bits - 1, as the "runtime".
        ieee: Whether it is the float of so many bits instead of a grid.
    """

    bits: int
    symmetric: bool = False
    per_channel: bool = False
    rounding: str = "nearest"
    step: str = "runtime"
    ieee: bool = False

    @property
    def steps(self) -> int:
        """Steps between the lowest code and the highest."""
        missing = 0 if self.rounding == "floor" else 2 if self.symmetric else 1
        return (1 << self.bits) - missing


@dataclass(frozen=True, kw_only=True)
class LayerFormat:
    """The formats of a layer's weights and of its output; None for float32."""

    weights: TensorFormat | None = None
    activations: TensorFormat | None = None


def integers(bits: int, *, per_channel: bool = False, rounding: str = "nearest") -> LayerFormat:
    """Return the formats of integer kernels: weights are symmetric, activations are not."""
    weights = TensorFormat(bits=bits, symmetric=True, per_channel=per_channel, rounding=rounding)
    return LayerFormat(weights=weights, activations=TensorFormat(bits=bits))


def published(bits: int, *, per_channel: bool = False) -> LayerFormat:
    """Return the formats of the papers' formula."""
    form = TensorFormat(bits=bits, rounding="floor", step="paper")
    return LayerFormat(weights=replace(form, per_channel=per_channel), activations=form)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The formats of a network's layers.

    Attributes:
        default: Of all layers but those below.
        observation: Of the layer that scales the observation.
        head: Of the last layer.
        by_layer: Of single layers, by name; also of their `_PARTS` (`hidden_0_tanh`).
    """

    default: LayerFormat = LayerFormat()
    observation: LayerFormat = LayerFormat()
    head: LayerFormat = LayerFormat()
    by_layer: Mapping[str, LayerFormat] = field(default_factory=dict, hash=False)

    def of(self, layer: str) -> LayerFormat:
        """Return the formats of a layer by its name."""
        stem, _, part = layer.rpartition("_")
        for name in (layer, stem if part in _PARTS else layer):
            if name in self.by_layer:
                return self.by_layer[name]
        if layer in SCALINGS:
            return self.observation
        return self.head if layer in HEADS else self.default

    def without(self, layer: str) -> Self:
        """Return the recipe with a layer left in float."""
        return replace(self, by_layer={**self.by_layer, layer: LayerFormat()})

    def require_layers(self, layers: Collection[str]) -> None:
        """Raise a UsageError if the recipe names a layer which is not there."""
        for name in self.by_layer:
            require_known("layer", name, layers)


def _without_defaults(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_defaults(item) for key, item in value.items()}
    if not is_dataclass(value):
        return value
    pairs = [(f, getattr(value, f.name)) for f in fields(value)]
    return {f.name: _without_defaults(item) for f, item in pairs if item not in (f.default, {})}


@dataclass(frozen=True, kw_only=True)
class QatSchedule:
    """When and how a training becomes quantised.

    Attributes:
        delay: Environment steps before quantisation; it begins with the next burst of training.
        ranges: What activations' ranges are at the delay: the "extremes" seen until then, a
            "moving_average" of each batch's extremes, or one of its 0.1 % and 99.9 % "percentile";
            or "following", a moving average that continues after the delay. Kernels' ranges, at
            the delay or "following", are those of their weights.
        gradient: "straight_through" everywhere, or "clipped" to within what was observed.
        learned_steps: Whether steps are learned from the delay on; gradients are clipped then.
    """

    delay: int
    ranges: str = "extremes"
    gradient: str = "straight_through"
    learned_steps: bool = False


_RULES: Mapping[str, Callable[..., LayerFormat]] = {"nearest": integers, "paper": published}

#: Value of `per_channel`: a grid per output at 2 and 3 bits only (studies/options.yaml).
_FEW, _FEW_BITS = "few", 3

#: Options that change the defaults of others.
_LEADING = (("rule", "paper"), ("learned_steps", True))

_WIDTH = Kind("a whole number from 2 to 8", lambda value: type(value) is int and value in QAT_BITS)

#: Options of a quantisation-aware training by name, beside the bits of single layers.
_OPTIONS = {
    **dict.fromkeys(("bits", "edge_bits", "head.bits"), _WIDTH),
    "rule": one_of(tuple(_RULES)),
    "ranges": one_of(("extremes", "moving_average", "percentile", "following")),
    "gradient": one_of(("straight_through", "clipped")),
    "delay": COUNT,
    "per_channel": Kind("true, false or few", lambda value: type(value) is bool or value == _FEW),
    "learned_steps": FLAG,
}


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """A quantisation-aware training; see `quantization.qat`.

    Attributes:
        bits: Width of the weights and activations of most layers.
        widths: Those of the "observation", the "head" and single layers, by name.
        rule: "nearest", or "paper" for the published formula.
        per_channel: Whether fully-connected kernels have a grid per output.
        schedule: When and how it becomes quantised.
    """

    bits: int
    widths: Mapping[str, int] = field(hash=False)
    rule: str
    per_channel: bool
    schedule: QatSchedule

    def __post_init__(self) -> None:
        """Raise a UsageError for steps that cannot be learned."""
        ranges, gradient = self.schedule.ranges, self.schedule.gradient
        fits = self.rule == "nearest" and ranges != "following" and gradient == "clipped"
        if self.schedule.learned_steps and not fits:
            raise UsageError(
                "Steps are learned only where values are rounded to the nearest, gradients clipped "
                "and ranges frozen; leave those options or learned_steps out. Received: "
                f"ranges={ranges}, gradient={gradient}, rule={self.rule}, learned_steps=true"
            )

    @property
    def delay(self) -> int:
        """Environment steps before quantisation."""
        return self.schedule.delay

    @property
    def recipe(self) -> Recipe:
        """The formats of the network's layers."""
        form = partial(_RULES[self.rule], per_channel=self.per_channel)
        by_layer = {layer: form(width) for layer, width in self.widths.items()}
        return Recipe(
            default=form(self.bits),
            observation=replace(by_layer.pop("observation"), weights=None),
            head=by_layer.pop("head"),
            by_layer=by_layer,
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from options by name; `presets.quantization` adds an algorithm's defaults.

        | option | meaning |
        |---|---|
        | `bits`, `delay` | must be given |
        | `edge_bits`, or `observation.bits` and `head.bits` | of the ends of the network, 8 |
        | `LAYER.bits` | of a single layer |
        | `rule` | "nearest", or "paper": the published formula, at the edges too |
        | `per_channel` | a grid per output of fully-connected kernels; at 8 bits, and up to 3 |
        | `ranges`, `gradient`, `learned_steps` | see `QatSchedule`; learned steps clip |

        Raises:
            UsageError: A name is unknown, or a value of another type or meaning.
        """
        layers = {name: _WIDTH for name in values if re.fullmatch(r"[a-z]\w*\.bits", name)}
        require_all(values, layers | _OPTIONS, "quantisation option")
        if missing := " and no ".join(name for name in ("bits", "delay") if name not in values):
            raise UsageError(f"A quantisation needs bits and a delay. Received: no {missing}")
        bits, rule = values["bits"], values.get("rule", "nearest")
        few = bits <= _FEW_BITS and rule != "paper"
        # Integer kernels have 8 bits and a grid per output.
        per_channel = values.get("per_channel", few or (bits == 8 and rule != "paper"))
        edge = values.get("edge_bits", bits if rule == "paper" else EDGE_BITS)
        widths = {name.removesuffix(".bits"): values[name] for name in sorted(layers)}
        schedule: dict[str, Any] = {"gradient": "clipped"} if values.get("learned_steps") else {}
        schedule |= {f.name: values[f.name] for f in fields(QatSchedule) if f.name in values}
        return cls(
            bits=bits,
            widths={"observation": edge, "head": edge} | widths,
            rule=rule,
            per_channel=few if per_channel == _FEW else per_channel,
            schedule=QatSchedule(**schedule),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe and the schedule as JSON-ready values."""
        return {"recipe": _without_defaults(self.recipe), "schedule": asdict(self.schedule)}

    @classmethod
    def restore(cls, values: Mapping[str, Any]) -> Self:
        """Invert `to_dict`; a UsageError for a record of another version."""
        try:
            recipe, weights = values["recipe"], values["recipe"]["default"]["weights"]
            ends = {name: recipe[name] for name in ("observation", "head")}
            layers = ends | recipe.get("by_layer", {})
            options = {f"{name}.bits": form["activations"]["bits"] for name, form in layers.items()}
            options["rule"] = "paper" if weights.get("rounding") == "floor" else "nearest"
            options |= {"per_channel": weights.get("per_channel", False), "bits": weights["bits"]}
            quantization = cls.from_mapping(options | values["schedule"])
        except (AttributeError, KeyError, TypeError):
            quantization = None
        if quantization is None or quantization.to_dict() != values:
            raise UsageError(
                f"The quantisation was recorded by another version. Received: {sorted(values)}"
            )
        return quantization

    @property
    def tag(self) -> str:
        """Name it for run ids: bits and delay, and a digest unless the rest is default."""
        name = f"q{self.bits}d{self.delay}"
        # The defaults of the first version, whatever the algorithm, so that names never change.
        default = self.from_mapping({"bits": self.bits, "delay": self.delay, "per_channel": _FEW})
        return name if self == default else f"{name}-{digest(self.to_dict())}"

    def options(self) -> dict[str, Any]:
        """Return the options of `from_mapping`: bits, delay, and those that are not default."""
        values = self._values()
        given = {"bits": self.bits, "delay": self.delay}
        given |= {n: v for n, v in values.items() if (n, v) in _LEADING}
        default = self.from_mapping(given)._values()
        return given | {n: v for n, v in values.items() if default.get(n) != v}

    def _values(self) -> dict[str, Any]:
        widths = {f"{layer}.bits": width for layer, width in self.widths.items()}
        if widths["head.bits"] == widths["observation.bits"]:
            widths = {"edge_bits": widths.pop("head.bits"), **widths}
            del widths["observation.bits"]
        values = {"rule": self.rule, "per_channel": self.per_channel, **widths}
        return values | asdict(self.schedule)
