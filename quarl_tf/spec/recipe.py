"""How the numbers of a network are represented, as plain data: formats, recipes, a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any

from quarl_tf.foundation.errors import UsageError, unknown
from quarl_tf.foundation.files import digest

#: Widest grid that int4 holds.
INT4_BITS = 4


#: Widest grid of which a fully-connected kernel gets one per output unless told otherwise: at 2
#: bits on a robot, two such trainings had the highest mean of all options (reports/options). 3 bits
#: go with 2 untried; at 4 no option is known to be better than another.
FEW_BITS = 3


#: Widths that a quantisation-aware training may have.
QAT_BITS = range(2, 9)


#: Widths of weights alone on a grid; at 32 bits it is finer than float32 at the ends of its range.
PTQ_BITS = range(2, 33)


@dataclass(frozen=True, kw_only=True)
class TensorFormat:
    """The grid that a tensor's numbers lie on; see `quantization.grid`.

    Attributes:
        bits: Width of a code.
        symmetric: Whether the range is as wide below 0 as above, without the lowest code.
        per_channel: Whether fully-connected kernels have a grid per output, as convolutions do
            always.
        rounding: To the "nearest" code, or to the next below, "floor".
        step: A range over 2**bits, as the "paper" has it, or over 2**bits - 1, as the "runtime".
        ieee: Whether it is the float of so many bits instead of a grid.
    """

    bits: int
    symmetric: bool = False
    per_channel: bool = False
    rounding: str = "nearest"
    step: str = "runtime"
    ieee: bool = False

    def __post_init__(self) -> None:
        """Refuse values that mean nothing.

        Raises:
            UsageError: The width is not 2 ... 32, a name is unknown, or two values contradict each
                other.
        """
        if self.bits not in PTQ_BITS:
            raise UsageError(f"bits must be 2 to 32. Received: bits={self.bits}")
        _require_known(self, rounding=("nearest", "floor"), step=("runtime", "paper"))
        if self.symmetric and self.step == "paper":
            raise UsageError("The papers' grids are not symmetric. Received: symmetric=True")
        if self.rounding == "floor" and self.step != "paper":
            raise UsageError(f"Only the papers round down. Received: step={self.step!r}")

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


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How each layer of a network is represented.

    Attributes:
        default: Of all layers but those below.
        observation: Of what scales the observation.
        head: Of the last layer.
        by_layer: Of single layers, by name; what follows a layer by name (`hidden_0_tanh`) has its
            format, too.
    """

    default: LayerFormat = LayerFormat()
    observation: LayerFormat = LayerFormat()
    head: LayerFormat = LayerFormat()
    by_layer: Mapping[str, LayerFormat] = field(default_factory=dict, hash=False)

    def of(self, layer: str) -> LayerFormat:
        """Return the formats of a layer by its name."""
        for name, form in self.by_layer.items():
            if layer == name or layer.startswith(f"{name}_"):
                return form
        return {**dict.fromkeys(SCALINGS, self.observation), **dict.fromkeys(HEADS, self.head)}.get(
            layer, self.default
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """Take `to_dict` back."""
        entries = {name: _layer(values[name]) for name in ("default", "observation", "head")}
        by_layer = {name: _layer(form) for name, form in values["by_layer"].items()}
        return cls(**entries, by_layer=by_layer)


#: Names of the layers that scale the observation, and of those that end in the head.
SCALINGS, HEADS = ("normalizer", "byte_scaling"), ("head", "squash")


@dataclass(frozen=True, kw_only=True)
class QatSchedule:
    """When and how a training becomes quantised.

    Attributes:
        delay: Environment steps before which numbers are not quantised; they are from the first
            burst of training after it.
        ranges: What activations' ranges are at the delay: the "extremes" seen until then, a
            "moving_average" of each batch's extremes, or one of its 0.1 % and 99.9 % "percentile";
            or "following", a moving average that goes on behind the delay, kernels' ranges too.
        gradient: "straight_through" everywhere, or "clipped" to within the range.
        learned_steps: Whether steps are learned from the delay on; gradients are clipped then.
    """

    delay: int
    ranges: str = "moving_average"
    gradient: str = "straight_through"
    learned_steps: bool = False

    def __post_init__(self) -> None:
        """Refuse values that mean nothing.

        Raises:
            UsageError: The delay is not positive, a name is unknown, or two options contradict each
                other.
        """
        if self.delay < 1:
            raise UsageError(
                "The delay must be 1 step or more: ranges are watched until then. "
                f"Received: delay={self.delay}"
            )
        ranges = ("extremes", "moving_average", "percentile", "following")
        _require_known(self, ranges=ranges, gradient=("straight_through", "clipped"))
        if self.learned_steps and (self.ranges == "following" or self.gradient != "clipped"):
            raise UsageError(
                "Steps are learned only where gradients are clipped and ranges frozen; leave "
                "ranges, gradient or learned_steps out. Received: "
                f"ranges={self.ranges}, gradient={self.gradient}, learned_steps=true"
            )


def integers(bits: int, *, per_channel: bool = False) -> LayerFormat:
    """Return the formats of integer kernels: weights are symmetric, activations are not."""
    weights = TensorFormat(bits=bits, symmetric=True, per_channel=per_channel)
    return LayerFormat(weights=weights, activations=TensorFormat(bits=bits))


def _layer(values: Mapping[str, Any]) -> LayerFormat:
    forms = {name: value and TensorFormat(**value) for name, value in values.items()}
    return LayerFormat(**forms)


def _require_known(owner: Any, **choices: tuple[str, ...]) -> None:
    for name, known in choices.items():
        if (value := getattr(owner, name)) not in known:
            raise unknown(name, value, known)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How a training is quantisation-aware; see `quantization.qat`.

    Attributes:
        bits: Width of weights and activations.
        delay: Environment steps before which numbers are not quantised; they are from the first
            burst of training after it.
        edge_bits: Width of the observation and of the last layer.
        rule: "nearest" as integer kernels round, or "paper", the published formula.
        ranges: What activations' ranges are at the delay: the "extremes" seen until then, a
            "moving_average" of each batch's extremes, or one of its 0.1 % and 99.9 % "percentile";
            or "following", a moving average that goes on behind the delay, kernels' ranges too.
        gradient: "straight_through" everywhere, or "clipped" to within the range.
        per_channel: Whether fully-connected kernels have one grid per output, as convolutions do.
        learned_steps: Whether steps are learned from the delay on; gradients are clipped then.
    """

    bits: int
    delay: int
    edge_bits: int = 8
    rule: str = "nearest"
    ranges: str = "moving_average"
    gradient: str = "straight_through"
    per_channel: bool = False
    learned_steps: bool = False

    def __post_init__(self) -> None:
        """Refuse values that mean nothing.

        Raises:
            UsageError: A width is not 2 ... 8, the delay is not positive, a name is unknown, or
                two options contradict each other.
        """
        for name in ("bits", "edge_bits"):
            if (width := getattr(self, name)) not in QAT_BITS:
                raise UsageError(f"{name} must be 2 to 8. Received: {name}={width}")
        _require_known(self, rule=("nearest", "paper"))
        if self.schedule.learned_steps and self.rule == "paper":
            raise UsageError(
                "Steps are learned only where values are rounded to the nearest; leave rule or "
                f"learned_steps out. Received: rule={self.rule}, learned_steps=true"
            )

    @property
    def schedule(self) -> QatSchedule:
        """When and how it becomes quantised."""
        return QatSchedule(**{f.name: getattr(self, f.name) for f in fields(QatSchedule)})

    @property
    def recipe(self) -> Recipe:
        """What is quantised to what."""

        def form(bits: int) -> LayerFormat:
            if self.rule == "paper":
                kind = TensorFormat(bits=bits, rounding="floor", step="paper")
                weights = replace(kind, per_channel=self.per_channel)
                return LayerFormat(weights=weights, activations=kind)
            return integers(bits, per_channel=self.per_channel)

        edge = form(self.edge_bits)
        return Recipe(default=form(self.bits), observation=edge, head=edge)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], algo: str = "") -> Quantization:
        """Build from what is asked for, by name; what is not follows from it.

        Up to 3 bits `per_channel` is meant unless another is given. `rule=paper` stands for the
        papers' ranges, edges and grids as well, `learned_steps` for the clipped gradient of its
        paper. Else the ranges of a `dqn` follow: where its values still grow at the delay, they
        outgrow frozen ranges and it forgets what it knew (CartPole-v0 in the study `li`). And the
        gradient of a `ddpg` is clipped, as in the papers' code: else its critic drives weights on
        for good that are beyond their range, where they change no action any more (the study
        `qat`).

        Raises:
            UsageError: A name is unknown, or a value of another type or meaning.
        """
        cls._require_sound(values)
        usual: dict[str, Any] = {}
        if values.get("rule") == "paper":
            usual = {"edge_bits": values["bits"], "ranges": "extremes"}
        else:
            usual["per_channel"] = values["bits"] <= FEW_BITS
            if values.get("learned_steps"):
                usual["gradient"] = "clipped"
            elif algo == "dqn":
                usual["ranges"] = "following"
            elif algo == "ddpg":
                usual["gradient"] = "clipped"
        return cls(**{**usual, **values})

    @classmethod
    def restore(cls, values: Mapping[str, Any]) -> Quantization:
        """Rebuild what a record keeps.

        Raises:
            UsageError: As `from_mapping`.
        """
        cls._require_sound(values)
        return cls(**values)

    @classmethod
    def _require_sound(cls, values: Mapping[str, Any]) -> None:
        types = {f.name: type(f.default) for f in fields(cls) if f.default is not MISSING}
        types = {"bits": int, "delay": int, **types}
        for name, value in values.items():
            if name not in types:
                raise unknown("quantisation option", name, types)
            if type(value) is not types[name]:
                kind = {int: "a whole number", bool: "true or false", str: "a name"}[types[name]]
                raise UsageError(f"{name} must be {kind}. Received: {name}={value!r}")
        if missing := [name for name in ("bits", "delay") if name not in values]:
            raise UsageError(
                f"A quantisation needs bits and a delay. Received: no {' and no '.join(missing)}"
            )

    @property
    def tag(self) -> str:
        """Name it for run ids: bits and delay, and a digest where more is not as usual."""
        name = f"q{self.bits}d{self.delay}"
        # Whatever the algorithm, so that names last when what is usual for one changes.
        return f"{name}-{digest(asdict(self))}" if self.options() else name

    def options(self, algo: str = "") -> dict[str, Any]:
        """Return what must be given beside bits and delay to mean it, of an algorithm if one is."""
        values, plain = asdict(self), Quantization(bits=self.bits, delay=self.delay)
        # What is usual follows from these.
        leading = {name: values[name] for name in ("rule", "learned_steps")}
        given = {name: value for name, value in leading.items() if value != getattr(plain, name)}
        usual = asdict(self.from_mapping({"bits": self.bits, "delay": self.delay, **given}, algo))
        return given | {name: value for name, value in values.items() if value != usual[name]}
