"""Tuned hyper-parameters: one YAML file per algorithm, keyed by environment.

A missing (algorithm, environment) is an error that names the closest, never a silent default.
"""

import json
import math
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from quarl_tf.foundation.errors import UsageError, unknown
from quarl_tf.presets import tables
from quarl_tf.spec import Quantization, Run
from quarl_tf.spec.architectures import Architecture, architecture

#: Of the arithmetic in hidden layers; weights, heads and losses are float32.
PRECISIONS = ("float32", "bfloat16", "float16")


class _Kind(NamedTuple):
    """What a value must be."""

    text: str
    fits: Callable[[Any], bool]


def _number(text: str, fits: Callable[[float], bool]) -> _Kind:
    return _Kind(text, lambda value: type(value) is float and value < math.inf and fits(value))


def _is_network(value: Any) -> bool:
    if type(value) is tuple:
        return all(type(units) is int and units > 0 for units in value)
    return type(value) is str


_Count = Annotated[int, _Kind("a whole number above 0", lambda v: type(v) is int and v > 0)]
_Flag = Annotated[bool, _Kind("true or false", lambda v: type(v) is bool)]
_Number = Annotated[float, _number("a number of 0 or more", lambda v: v >= 0)]
_Positive = Annotated[float, _number("a number above 0", lambda v: v > 0)]
_Fraction = Annotated[float, _number("a number from 0 to 1", lambda v: 0 <= v <= 1)]
_Share = Annotated[float, _number("a number above 0, at most 1", lambda v: 0 < v <= 1)]
_Network = Annotated[
    str | tuple[int, ...], _Kind("a list of whole numbers above 0, or a name", _is_network)
]
_Goal = Annotated[
    float | None,
    _Kind("a number", lambda v: v is None or (type(v) in (int, float) and abs(v) < math.inf)),
]
_Precision = Annotated[str, _Kind(" or ".join(PRECISIONS), lambda v: v in PRECISIONS)]


class _Rule(NamedTuple):
    """What values must be to each other."""

    text: str
    holds: Callable[[Any], bool]
    #: Names of the values.
    about: tuple[str, ...]


def _multiple(name: str, divisor: str) -> _Rule:
    return _Rule(
        f"{name} must be a multiple of {divisor}",
        lambda preset: getattr(preset, name) % getattr(preset, divisor) == 0,
        (name, divisor),
    )


@dataclass(frozen=True, kw_only=True)
class Preset(ABC):
    """What every algorithm needs."""

    RULES: ClassVar[tuple[_Rule, ...]] = (_multiple("train_frequency", "num_envs"),)

    #: The actions that the algorithm needs: "discrete" or "continuous"; None if it takes both.
    ACTIONS: ClassVar[str | None] = None

    #: Whether its policies are distributions over actions, which `--sample` can draw from.
    STOCHASTIC: ClassVar[bool] = False

    #: Environment steps of the whole training.
    steps: _Count
    #: Environments stepped together.
    num_envs: _Count
    #: Units of the hidden layers, or the name of one of `architectures.NAMED`.
    network: _Network
    #: The optimizer's step size at the start.
    learning_rate: _Positive
    #: Whether the learning rate falls linearly to 0 over training; a little before its end, for
    #: the ticks that reset an environment are learned after but are no steps.
    learning_rate_decay: _Flag
    #: Discount of future reward, per environment step.
    discount: _Fraction
    #: Environment steps between bursts of learning.
    train_frequency: _Count
    #: Environment steps between greedy evaluations that choose the best network.
    evaluation_every: _Count
    #: Episodes of each such evaluation, played at once.
    evaluation_episodes: _Count
    #: Environment steps between checkpoints; environments start fresh episodes at each.
    checkpoint_every: _Count
    #: Whether every hidden fully-connected layer is followed by layer normalisation.
    layer_norm: _Flag = False
    #: Arithmetic of training in the hidden layers, one of `PRECISIONS`; what is exported computes
    #: in float32 whatever it is.
    precision: _Precision = "float32"
    #: Greedy return on selection seeds at which the training ends early; quantised, if it is
    #: quantisation-aware.
    until: _Goal = None
    #: Weight in the loss of how far the head is from that of the network that the training starts
    #: from: squared difference of values and actions, divergence of probabilities.
    distillation: _Number = 0.0

    def __post_init__(self) -> None:
        """Refuse values of another kind, and such that do not fit together (UsageError)."""
        for name, hint in typing.get_type_hints(type(self), include_extras=True).items():
            kind = next((k for k in getattr(hint, "__metadata__", ()) if type(k) is _Kind), None)
            if kind is None:
                continue
            value = getattr(self, name)
            if hint.__origin__ is float and type(value) is int:
                value = float(value)
            value = tuple(value) if type(value) is list else value
            if not kind.fits(value):
                raise UsageError(f"{name} must be {kind.text}. Received: {name}={value!r}")
            object.__setattr__(self, name, value)
        architecture(self.network)
        for rule in (rule for base in type(self).__mro__ for rule in vars(base).get("RULES", ())):
            if not rule.holds(self):
                values = ", ".join(f"{name}={getattr(self, name)}" for name in rule.about)
                raise UsageError(f"{rule.text}. Received: {values}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str) -> Self:
        """Build from raw values; a UsageError, which says of `where`, for any that is unfit."""
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise unknown("preset key", name, known)
        required = {f.name for f in fields(cls) if f.default is MISSING}
        if missing := sorted(required - set(values)):
            raise UsageError(f"{where} lacks {', '.join(missing)}. Received: {sorted(values)}")
        return cls(**values)

    @property
    @abstractmethod
    def updates(self) -> int:
        """Gradient steps of the whole training."""

    @property
    def architecture(self) -> Architecture:
        """The hidden layers that `network` stands for."""
        return architecture(self.network)


@dataclass(frozen=True, kw_only=True)
class OffPolicyPreset(Preset):
    """Hyper-parameters of learning from a replay."""

    RULES: ClassVar[tuple[_Rule, ...]] = (
        _Rule(
            "learning_starts must be at least 2 * num_envs, and buffer_size at least "
            "learning_starts + num_envs",
            lambda p: 2 * p.num_envs <= p.learning_starts <= p.buffer_size - p.num_envs,
            ("learning_starts", "buffer_size", "num_envs"),
        ),
        _Rule(
            "A training must have a burst left (train_frequency) once learning starts; make "
            "steps more or learning_starts less",
            lambda p: p.steps >= p.learning_starts + p.train_frequency,
            ("steps", "learning_starts", "train_frequency"),
        ),
    )

    #: Transitions in one gradient step.
    batch_size: _Count
    #: Observations kept for replay.
    buffer_size: _Count
    #: Observations in the replay before learning starts.
    learning_starts: _Count
    #: Gradient steps in one burst.
    gradient_steps: _Count
    #: Steps whose rewards are summed before bootstrapping.
    n_step: _Count = 1

    @property
    def updates(self) -> int:
        """Gradient steps of the whole training."""
        learning = max(1, self.steps - self.learning_starts)
        return learning * self.gradient_steps // self.train_frequency


@dataclass(frozen=True, kw_only=True)
class DqnPreset(OffPolicyPreset):
    """Hyper-parameters of DQN."""

    ACTIONS: ClassVar[str | None] = "discrete"

    #: Gradient steps between copies to the target network.
    target_update: _Count
    #: Fraction of training over which exploration falls from 1 to `exploration_final`.
    exploration_fraction: _Share
    #: Probability of a random action after that.
    exploration_final: _Fraction
    #: Largest norm of each variable's gradient.
    gradient_clip: _Positive
    #: Whether values of states and advantages of actions have last layers of their own.
    dueling: _Flag = False
    #: Whether the network itself chooses the next action that its target values (Double DQN), not
    #: the target.
    double: _Flag = True


@dataclass(frozen=True, kw_only=True)
class PpoPreset(Preset):
    """Hyper-parameters of PPO; a rollout is `train_frequency` steps long."""

    STOCHASTIC: ClassVar[bool] = True
    RULES: ClassVar[tuple[_Rule, ...]] = (_multiple("train_frequency", "minibatch_size"),)

    #: Passes over each rollout.
    epochs: _Count
    #: Transitions in one gradient step; a divisor of `train_frequency`.
    minibatch_size: _Count
    #: Largest change of the probability ratio that is rewarded; 0 for no limit (A2C).
    clip: _Number
    #: Whether advantages are brought to mean 0 and deviation 1 in each minibatch.
    normalize_advantages: _Flag
    #: Lambda of the advantage estimates; 1 for n-step returns.
    gae_lambda: _Fraction
    #: Weight of the policy's entropy in the loss.
    entropy_coefficient: _Number
    #: Weight of the value's error in the loss.
    value_coefficient: _Number
    #: Largest norm of the whole gradient.
    gradient_clip: _Positive

    @property
    def updates(self) -> int:
        """Gradient steps of the whole training."""
        return self.steps // self.minibatch_size * self.epochs


@dataclass(frozen=True, kw_only=True)
class A2cPreset(PpoPreset):
    """Hyper-parameters of A2C."""

    RULES: ClassVar[tuple[_Rule, ...]] = (
        _Rule(
            "a2c takes one step on all of a rollout, unclipped: minibatch_size as "
            "train_frequency, epochs=1, clip=0.0; else train by ppo",
            lambda p: (p.epochs, p.clip, p.minibatch_size) == (1, 0.0, p.train_frequency),
            ("epochs", "clip", "minibatch_size"),
        ),
    )

    #: What keeps RMSprop's quotient finite, under its root.
    epsilon: _Positive = 1e-5


@dataclass(frozen=True, kw_only=True)
class DdpgPreset(OffPolicyPreset):
    """Hyper-parameters of DDPG; `learning_rate` is the actor's."""

    ACTIONS: ClassVar[str | None] = "continuous"

    #: Adam's step size for the critic.
    critic_learning_rate: _Positive
    #: Share of the network that the target takes over in each gradient step.
    target_tau: _Share
    #: Standard deviation of the exploration noise's draws, in half action ranges.
    noise: _Number
    #: Whether the noise is an Ornstein-Uhlenbeck process instead of independent draws.
    correlated_noise: _Flag


#: The algorithms by name.
ALGORITHMS: dict[str, type[Preset]] = {
    "a2c": A2cPreset,
    "ddpg": DdpgPreset,
    "dqn": DqnPreset,
    "ppo": PpoPreset,
}


def require_possible_delay(delay: int, preset: Preset) -> None:
    """Refuse a quantisation delay before which, or after which, nothing is learned."""
    if delay > preset.steps - preset.train_frequency:
        raise UsageError(
            "The delay must leave a burst of training (train_frequency) behind it; make it "
            f"shorter or train longer. Received: delay={delay}, steps={preset.steps}, "
            f"train_frequency={preset.train_frequency}"
        )
    if isinstance(preset, OffPolicyPreset) and delay < preset.learning_starts:
        raise UsageError(
            "Ranges are watched while the network learns, which begins at learning_starts; make "
            f"the delay longer. Received: delay={delay}, learning_starts={preset.learning_starts}"
        )


def require_teacher(run: Run, preset: Preset) -> None:
    """Refuse distillation where a training starts from no network."""
    if preset.distillation and run.origin is None:
        raise UsageError(
            "Distillation holds the head to that of the network that a training starts from; name "
            f"it (--from RUN). Received: distillation={preset.distillation}"
        )


def quantization(algo: str, values: Mapping[str, Any]) -> Quantization:
    """Build a quantisation from options by name, with what is usual for an algorithm.

    The papers' rule and learned steps bring what belongs to them instead.
    """
    published = values.get("rule") == "paper" or values.get("learned_steps")
    usual = {} if published else tables.quantization(algo)
    return Quantization.from_mapping({**usual, **values})


def load(
    algo: str, env_id: str, overrides: Mapping[str, Any] | None = None, file: Path | None = None
) -> Preset:
    """Load the preset of an (algorithm, environment); those of a user's `file` go before ours.

    A UsageError says that there is none, that the file is of no use, or that a value does not fit.
    """
    table = _table(algo) | own_table(algo, file)
    if env_id not in table:
        elsewhere = "Any other needs an entry in a file of yours, given with --presets."
        raise unknown(f"{algo} preset", env_id, table, elsewhere)
    values = {**table[env_id], **(overrides or {})}
    return ALGORITHMS[algo].from_mapping(values, where=f"The {algo} preset of {env_id}")


def restore(algo: str, values: Mapping[str, Any]) -> Preset:
    """Rebuild the preset that a record of a training keeps."""
    return ALGORITHMS[algo].from_mapping(values, where=f"The recorded {algo} preset")


def settings(run: Run, preset: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that a training goes by, JSON-ready: its preset, and how it is quantised.

    What is null says nothing and is left out.

    A key that the preset has not, as one recorded by an earlier version, has its default; one that
    is not known any more is a UsageError. Of an adopted policy nobody knows.
    """
    if run.adopted:
        return {}
    how = run.quantization
    options = {} if how is None else {"bits": how.bits, "delay": how.delay, **how.options()}
    found = {f"quantization.{name}": value for name, value in options.items()}
    # Tuples are lists once they have been through JSON.
    values: dict[str, Any] = json.loads(json.dumps(asdict(restore(run.algo, preset))))
    return {name: value for name, value in {**values, **found}.items() if value is not None}


def available() -> list[tuple[str, str]]:
    """List every (algorithm, environment) that has a preset."""
    return [(algo, env_id) for algo in sorted(ALGORITHMS) for env_id in sorted(_table(algo))]


def best(env_id: str, file: Path | None = None) -> str:
    """Return the algorithm for an environment: of those with a preset the most robust one."""
    for algo in dict.fromkeys((*_BY_ROBUSTNESS, *ALGORITHMS)):
        if env_id in _table(algo) or env_id in own_table(algo, file):
            return algo
    known = {name for _, name in available()}
    raise unknown("environment with a preset", env_id, known, "Or give --algo and --presets.")


#: Algorithms by how little their policies lose when quantised (reports/ptq), the least first.
_BY_ROBUSTNESS = ("ppo", "a2c", "ddpg", "dqn")


def _table(algo: str) -> tables.Table:
    if algo not in ALGORITHMS:
        raise unknown("algorithm", algo, ALGORITHMS)
    return tables.shipped(algo)


def own_table(algo: str, file: Path | None) -> tables.Table:
    """Read an algorithm's presets in a file of the user's; none without a file."""
    return {} if file is None else tables.read(file, ALGORITHMS).get(algo, {})
