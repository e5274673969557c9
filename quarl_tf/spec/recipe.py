"""How the numbers of a network are represented in training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
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
        if self.delay < 1:
            raise UsageError(
                "The delay must be 1 step or more: ranges are watched until then. "
                f"Received: delay={self.delay}"
            )
        for name, known in _CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise unknown(name, value, known)
        learnable = self.rule != "paper" and self.ranges != "following"
        if self.learned_steps and not (learnable and self.gradient == "clipped"):
            raise UsageError(
                "Steps are learned only where values are rounded to the nearest, gradients clipped "
                "and ranges frozen; leave ranges, rule, gradient or learned_steps out. Received: "
                f"ranges={self.ranges}, rule={self.rule}, gradient={self.gradient}, "
                "learned_steps=true"
            )

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


_CHOICES = {
    "rule": ("nearest", "paper"),
    "ranges": ("extremes", "moving_average", "percentile", "following"),
    "gradient": ("straight_through", "clipped"),
}
