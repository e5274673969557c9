"""What is trained and how its numbers are represented: `Run` and `Scheme`.

Both are plain data whose *name is the specification*: every path of the project follows from a
`run_id` and a scheme's name alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, Literal

from quarl_tf.errors import UsageError, unknown

ALGORITHMS = ("a2c", "ddpg", "dqn", "ppo")

#: Those whose policies are distributions over actions, which `--sample` can draw from.
STOCHASTIC_ALGORITHMS = ("a2c", "ppo")

#: Episodes of an evaluation, as in the papers.
DEFAULT_EPISODES = 100

#: The scheme that all others are compared with; every plain training has it.
REFERENCE = "fp32"

#: What evaluations of the random policy are called, which stand beside those of schemes.
BASELINE = "random"

#: Widths of weights alone on a grid; at 32 bits it is finer than float32 at the ends of its range.
PTQ_BITS = range(2, 33)

_NATIVE_SCHEMES = {
    "fp32": 32,
    "fp16": 16,
    "dynamic_int8": 8,
    "int8": 8,
    "qat_int8": 8,
    "qat_int4": 4,
}

#: What `quarl run` exports when nothing else is asked for.
DEFAULT_SCHEMES = (
    *("fp32", "fp16", "dynamic_int8", "int8"),
    *(f"ptq_w{bits}" for bits in range(8, 1, -1)),
)


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


@dataclass(frozen=True)
class Run:
    """One training: an algorithm on an environment from a seed, with overrides of its preset.

    With a `quantization` it is quantisation-aware.
    """

    algo: str
    env_id: str
    seed: int
    overrides: Mapping[str, Any] = field(default_factory=dict)
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        """Refuse an unknown algorithm and a negative seed."""
        if self.algo not in ALGORITHMS:
            raise unknown("algorithm", self.algo, ALGORITHMS)
        if self.seed < 0:
            raise UsageError(f"The seed must be 0 or more. Received: seed={self.seed}")

    @property
    def run_id(self) -> str:
        """Name the run; overrides enter as a digest, so another preset is another run."""
        return "-".join([self._task, f"s{self.seed}", *self._settings])

    @property
    def seedless_id(self) -> str:
        """Name the runs that differ from this one in their seed alone."""
        return "-".join([self._task, *self._settings])

    @property
    def _task(self) -> str:
        return f"{self.algo}-{file_name(self.env_id)}"

    @property
    def _settings(self) -> list[str]:
        overridden = [digest(self.overrides)] if self.overrides else []
        return [*overridden, self.quantization.tag] if self.quantization else overridden

    @property
    def plain(self) -> Run:
        """The same training without quantisation."""
        return replace(self, quantization=None)

    def command(self, verb: str) -> str:
        """Write the command line of a verb for this run."""
        words = ["quarl", verb, "--algo", self.algo, "--env", self.env_id, "--seed", f"{self.seed}"]
        for name, value in self.overrides.items():
            words += ["-p", f"{name}={json.dumps(value)}"]
        if self.quantization is not None:
            words += ["--bits", f"{self.quantization.bits}"]
            words += ["--quant-delay", f"{self.quantization.delay}"]
            for name, value in self.quantization.options(self.algo).items():
                words += ["-q", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
        return shlex.join(words)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values; a plain training has no `quantization`."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Run:
        """Take `to_dict` back."""
        quantization = values.get("quantization")
        known = None if quantization is None else Quantization.restore(quantization)
        return cls(**{**values, "quantization": known})


def file_name(env_id: str) -> str:
    """Return an environment's id as part of a file's name."""
    return re.sub("[/:]", "_", env_id)


def digest(values: Mapping[str, Any]) -> str:
    """Return eight characters that tell JSON-ready values from others."""
    canonical = json.dumps(dict(values), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Scheme:
    """How a policy's numbers are represented; decode the name with `Scheme.parse`.

    | name           | weights       | activations | kernels                                  |
    |----------------|---------------|-------------|------------------------------------------|
    | `fp32`         | float32       | float32     | native                                   |
    | `fp16`         | float16       | float32     | native storage, float arithmetic         |
    | `dynamic_int8` | int8          | float32     | native, activations quantised per call   |
    | `int8`         | int8          | int8        | native, calibrated on rollouts           |
    | `ptq_wN`       | N-bit grid    | float32     | simulated: float values on the N-bit grid |
    | `ptq_paper_wN` | as published  | float32     | simulated: floored, one code too many    |
    | `qat_int8`     | int8          | int8        | native, of a training at 8 bits          |
    | `qat_int4`     | int4          | N-bit grid  | native storage, of a training at N <= 4  |
    | `qat_wNaN`     | N-bit grid    | N-bit grid  | simulated, of a training at N bits       |

    Attributes:
        name: The name, which says all the rest.
        weight_bits: Width of a weight.
        native: Whether the flatbuffer stores weights in those bits.
        mode: Rule of the affine quantiser (`quantization.affine`), for `ptq_…` schemes.
        aware: Whether it is of a quantisation-aware training.
    """

    name: str
    weight_bits: int
    native: bool
    mode: Literal["code", "paper"] | None = None
    aware: bool = False

    @classmethod
    def parse(cls, name: str) -> Scheme:
        """Decode a scheme's name.

        Raises:
            UsageError: No scheme has that name; the closest are named.
        """
        if name in _NATIVE_SCHEMES:
            aware = name.startswith("qat_")
            return cls(name, _NATIVE_SCHEMES[name], native=True, aware=aware)
        match = re.fullmatch(r"qat_w([1-9])a\1", name)
        if match and int(match[1]) in QAT_BITS:
            return cls(name, int(match[1]), native=False, aware=True)
        match = re.fullmatch(r"ptq_(paper_)?w([1-9][0-9]*)", name)
        if match and int(match[2]) in PTQ_BITS:
            mode: Literal["code", "paper"] = "paper" if match[1] else "code"
            return cls(name, int(match[2]), native=False, mode=mode)
        raise unknown("scheme", name, {*DEFAULT_SCHEMES, *_NATIVE_SCHEMES, *_QAT_SCHEMES})


_QAT_SCHEMES = tuple(f"qat_w{bits}a{bits}" for bits in QAT_BITS)


def default_schemes(quantization: Quantization | None) -> tuple[str, ...]:
    """Return the names of what is exported of a training when nothing else is asked for."""
    if quantization is None:
        return DEFAULT_SCHEMES
    simulated = f"qat_w{quantization.bits}a{quantization.bits}"
    eight = quantization.bits == 8 and quantization.edge_bits == 8
    # The converter takes no fully-connected kernels with several grids.
    native = eight and quantization.rule == "nearest" and not quantization.per_channel
    return ("qat_int8", simulated) if native else (simulated,)


def require_possible(run: Run, schemes: Iterable[Scheme]) -> None:
    """Refuse schemes of another kind of training, or of other bits.

    Raises:
        UsageError: A scheme cannot be exported of the run.
    """
    possible = possible_schemes(run.quantization)
    for scheme in schemes:
        fits = not scheme.aware if run.quantization is None else scheme.name in possible
        if not fits:
            raise UsageError(
                f"{run.run_id} can be exported as {', '.join(possible)}. "
                f"Received: scheme={scheme.name!r}"
            )


def possible_schemes(quantization: Quantization | None) -> tuple[str, ...]:
    """Return the names of what can be exported of a training; for a plain one, the usual ones."""
    usual = default_schemes(quantization)
    if quantization is None or quantization.bits > INT4_BITS:
        return usual
    # The papers' grids are not symmetric.
    return ("qat_int4", *usual) if quantization.rule == "nearest" else usual
