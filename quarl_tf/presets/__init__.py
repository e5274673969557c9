"""Tuned hyper-parameters: one YAML file per algorithm, keyed by environment.

A missing (algorithm, environment) is an error that names the closest; there are no defaults.
"""

import json
import math
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from quarl_tf.foundation.errors import UsageError, require_known, unknown
from quarl_tf.foundation.kinds import COUNT, FLAG, MAPPING, PROBABILITY, Kind, number, one_of
from quarl_tf.presets import tables
from quarl_tf.spec import Quantization, Run
from quarl_tf.spec.architectures import Architecture, architecture

#: Of the arithmetic in hidden layers during training; all else, and exported files, are float32.
PRECISIONS = ("float32", "bfloat16")

_Count = Annotated[int, COUNT]
_Flag = Annotated[bool, FLAG]
_Number = Annotated[float, number("a number of 0 or more", lambda v: v >= 0)]
_Positive = Annotated[float, number("a number above 0", lambda v: v > 0)]
_Fraction = Annotated[float, number("a number from 0 to 1", lambda v: 0 <= v <= 1)]
_Share = Annotated[float, PROBABILITY]
_Network = Annotated[
    str | tuple[int, ...],
    Kind(
        "a list of whole numbers above 0, or a name",
        lambda v: type(v) is str or (type(v) is tuple and all(map(COUNT.fits, v))),
    ),
]
_Goal = Annotated[
    float | None,
    Kind("a number", lambda v: v is None or (type(v) in (int, float) and abs(v) < math.inf)),
]
_Byte = Annotated[int, Kind("a byte", lambda v: type(v) is int and 0 <= v <= 255)]
_Precision = Annotated[str, one_of(PRECISIONS)]


@dataclass(frozen=True, kw_only=True)
class Preset(ABC):
    """Hyper-parameters of every algorithm."""

    #: The actions that the algorithm needs: "discrete" or "continuous"; None for any.
    ACTIONS: ClassVar[str | None] = None

    #: Whether its policies are distributions over actions, which `--sample` can draw from.
    STOCHASTIC: ClassVar[bool] = False

    steps: _Count  #: Environment steps of the whole training.
    num_envs: _Count  #: Environments stepped together.
    network: _Network  #: Units of the hidden layers, or the name of one of `architectures.NAMED`.
    learning_rate: _Positive  #: The optimizer's step size at the start.
    #: Whether the learning rate falls linearly to 0, before the end of training by at most a round
    #: of learning (off-policy two), and the share of ticks that only reset: 1 in n + 1 for episodes
    #: of n steps, in games up to 3 in n + 3 for lives of n.
    learning_rate_decay: _Flag
    discount: _Fraction  #: Discount of future reward, per environment step.
    train_frequency: _Count  #: Environment steps between bursts of learning.
    evaluation_every: _Count  #: Steps between greedy evaluations that choose the best network.
    evaluation_episodes: _Count  #: Episodes of each such evaluation, played in parallel.
    checkpoint_every: _Count  #: Steps between checkpoints; new episodes start at each.
    layer_norm: _Flag = False  #: Whether layer normalisation follows hidden fully-connected layers.
    precision: _Precision = "float32"  #: Of hidden layers in training, one of `PRECISIONS`.
    byte_zero: _Byte = 0  #: Observations of bytes x are scaled to (x - byte_zero) / byte_unit.
    byte_unit: _Positive = 255.0
    #: Greedy return on selection seeds, of the quantised network if any, that ends training.
    until: _Goal = None
    #: Weight in the loss of the distance to the head of the network that the training starts from:
    #: squared difference of values and actions, divergence of probabilities.
    distillation: _Number = 0.0

    def __post_init__(self) -> None:
        """Raise a UsageError for values of another kind, or that contradict each other."""
        for name, hint in typing.get_type_hints(type(self), include_extras=True).items():
            for kind in getattr(hint, "__metadata__", ()):
                value = getattr(self, name)
                if hint.__origin__ is float and type(value) is int:
                    value = float(value)
                value = tuple(value) if type(value) is list else value
                kind.require(name, value)
                object.__setattr__(self, name, value)
        architecture(self.network)
        self._check()

    def _check(self) -> None:
        self._require_multiple("train_frequency", "num_envs")
        judged = self.until is None or self.evaluation_every < self.steps
        text = "until is judged at evaluations before the end; make evaluation_every smaller"
        self._require(judged, text, "until", "evaluation_every", "steps")

    def _require_multiple(self, name: str, divisor: str) -> None:
        fits = getattr(self, name) % getattr(self, divisor) == 0
        self._require(fits, f"{name} must be a multiple of {divisor}", name, divisor)

    def _require(self, holds: bool, text: str, *names: str) -> None:
        if not holds:
            values = ", ".join(f"{name}={getattr(self, name)}" for name in names)
            raise UsageError(f"{text}. Received: {values}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str) -> Self:
        """Build from raw values; a UsageError names `where` they are from."""
        names = {f.name for f in fields(cls)}
        for name in values:
            require_known("preset key", name, names)
        required = {f.name for f in fields(cls) if f.default is MISSING}
        if missing := sorted(required - set(values)):
            raise UsageError(f"{where} lacks {', '.join(missing)}. Received: {sorted(values)}")
        return cls(**values)

    @property
    @abstractmethod
    def updates(self) -> int:
        """Gradient steps until a decaying learning rate is 0."""

    @property
    def architecture(self) -> Architecture:
        """The hidden layers that `network` stands for."""
        return architecture(self.network)


@dataclass(frozen=True, kw_only=True)
class OffPolicyPreset(Preset):
    """Hyper-parameters of learning from a replay buffer."""

    batch_size: _Count  #: Transitions in one gradient step.
    buffer_size: _Count  #: Observations in the replay, at least nine of each environment.
    learning_starts: _Count  #: Observations in the buffer before learning starts.
    gradient_steps: _Count  #: Gradient steps in one burst.
    n_step: _Count = 1  #: Steps whose rewards are summed before bootstrapping.

    @property
    def updates(self) -> int:
        """Gradient steps until a decaying learning rate is 0."""
        return (self.steps - self.learning_starts) * self.gradient_steps // self.train_frequency

    def _check(self) -> None:
        # Of 9 rows of a game 3 lack overwritten frames, 3 may only reset, and the newest and a
        # break have no successor.
        least = max(self.learning_starts + self.num_envs, 9 * self.num_envs)
        self._require(
            2 * self.num_envs <= self.learning_starts and least <= self.buffer_size,
            "learning_starts must be at least 2 * num_envs, and buffer_size at least "
            "learning_starts + num_envs and 9 * num_envs",
            *("learning_starts", "buffer_size", "num_envs"),
        )
        self._require(
            self.steps >= self.learning_starts + self.train_frequency,
            "A training must have a burst left (train_frequency) once learning starts; make "
            "steps more or learning_starts less",
            *("steps", "learning_starts", "train_frequency"),
        )
        super()._check()


@dataclass(frozen=True, kw_only=True)
class EpsilonGreedyPreset(Preset):
    """Hyper-parameters of epsilon-greedy exploration."""

    ACTIONS: ClassVar[str | None] = "discrete"

    #: Fraction of training over which exploration falls from 1 to `exploration_final`.
    exploration_fraction: _Share
    exploration_final: _Fraction  #: Probability of a random action after that.


@dataclass(frozen=True, kw_only=True)
class DqnPreset(EpsilonGreedyPreset, OffPolicyPreset):
    """Hyper-parameters of DQN."""

    target_update: _Count  #: Gradient steps between copies to the target network.
    gradient_clip: _Positive  #: Largest norm of each variable's gradient.
    dueling: _Flag = False  #: Whether state values and action advantages have separate last layers.
    #: Whether the network, not its target, chooses the next action that the target values.
    double: _Flag = True


@dataclass(frozen=True, kw_only=True)
class OnPolicyPreset(Preset):
    """Hyper-parameters of learning from each rollout, which is `train_frequency` steps long."""

    epochs: _Count  #: Passes over each rollout.
    minibatch_size: _Count  #: Transitions in one gradient step; a divisor of `train_frequency`.
    #: Lambda of the advantage estimates, of the returns in PQN; 1 for n-step returns.
    gae_lambda: _Fraction
    gradient_clip: _Positive  #: Largest norm of the whole gradient.

    @property
    def updates(self) -> int:
        """Gradient steps until a decaying learning rate is 0."""
        return self.steps // self.minibatch_size * self.epochs

    def _check(self) -> None:
        self._require_multiple("train_frequency", "minibatch_size")
        super()._check()


@dataclass(frozen=True, kw_only=True)
class PqnPreset(EpsilonGreedyPreset, OnPolicyPreset):
    """Hyper-parameters of PQN."""


@dataclass(frozen=True, kw_only=True)
class PpoPreset(OnPolicyPreset):
    """Hyper-parameters of PPO."""

    STOCHASTIC: ClassVar[bool] = True

    clip: _Number  #: Clipping of the probability ratio; 0 for none (A2C).
    normalize_advantages: _Flag  #: Whether advantages are standardised in each minibatch.
    entropy_coefficient: _Number  #: Weight of the policy's entropy in the loss.
    value_coefficient: _Number  #: Weight of the value's error in the loss.

    def _check(self) -> None:
        fits = self.minibatch_size > 1 or not self.normalize_advantages
        text = "One advantage alone is standardised to 0; make minibatch_size 2 or more"
        self._require(fits, text, "minibatch_size", "normalize_advantages")
        super()._check()


@dataclass(frozen=True, kw_only=True)
class A2cPreset(PpoPreset):
    """Hyper-parameters of A2C."""

    epsilon: _Positive = 1e-5  #: Added to RMSprop's mean square, under the root.

    def _check(self) -> None:
        self._require(
            (self.epochs, self.clip, self.minibatch_size) == (1, 0.0, self.train_frequency),
            "a2c takes one step on all of a rollout, unclipped: minibatch_size as "
            "train_frequency, epochs=1, clip=0.0; else train by ppo",
            *("epochs", "clip", "minibatch_size"),
        )
        super()._check()


@dataclass(frozen=True, kw_only=True)
class DdpgPreset(OffPolicyPreset):
    """Hyper-parameters of DDPG; `learning_rate` is the actor's."""

    ACTIONS: ClassVar[str | None] = "continuous"

    critic_learning_rate: _Positive  #: Adam's step size for the critic.
    target_tau: _Share  #: Weight of the network in each update of the target (Polyak averaging).
    noise: _Number  #: Standard deviation of the exploration noise, in half action ranges.
    #: Whether the noise is an Ornstein-Uhlenbeck process instead of independent draws.
    correlated_noise: _Flag


#: The algorithms by name; those whose policies lose less when quantised (reports/ptq) come first.
ALGORITHMS: dict[str, type[Preset]] = {
    "ppo": PpoPreset,
    "a2c": A2cPreset,
    "ddpg": DdpgPreset,
    "dqn": DqnPreset,
    "pqn": PqnPreset,
}


def require_possible_delay(delay: int, preset: Preset) -> None:
    """Raise a UsageError for a delay before which, or after which, nothing is learned."""
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


def quantization(algo: str, values: Mapping[str, Any]) -> Quantization:
    """Build a quantisation from options by name, with an algorithm's defaults.

    The papers' rule and learned steps have defaults of their own instead. A UsageError for an
    unknown algorithm, or as `Quantization.from_mapping`.
    """
    require_known("algorithm", algo, ALGORITHMS)
    MAPPING.require("options of quantisation", values)
    has_defaults = values.get("rule") == "paper" or values.get("learned_steps")
    defaults = {} if has_defaults else tables.shipped(algo).get("quantization", {})
    return Quantization.from_mapping({**defaults, **values})


def load(
    algo: str, env_id: str, overrides: Mapping[str, Any] | None = None, file: Path | None = None
) -> Preset:
    """Load the preset of an (algorithm, environment); a user's `file` takes precedence.

    A UsageError if there is none, or if the file or a value is invalid.
    """
    table = _table(algo, file)
    place = "a file of yours, given with --presets" if file is None else file
    hint = f"Any other needs an entry in {place}."
    require_known(f"{algo} preset", env_id, table, hint)
    values = {**table[env_id], **(overrides or {})}
    return ALGORITHMS[algo].from_mapping(values, where=f"The {algo} preset of {env_id}")


def of(run: Run) -> Preset:
    """Return the hyper-parameters of a run, of its own file or the package's."""
    file = None if run.presets is None else Path(run.presets)
    return load(run.algo, run.env_id, run.overrides, file)


def restore(algo: str, values: Mapping[str, Any]) -> Preset:
    """Rebuild the preset of a training's record."""
    return ALGORITHMS[algo].from_mapping(values, where=f"The recorded {algo} preset")


def settings(run: Run, preset: Mapping[str, Any]) -> dict[str, Any]:
    """Return a training's preset and quantisation options that are not None, JSON-ready.

    A missing key, as in a record of an earlier version, has its default; an unknown one is a
    UsageError. The settings of adopted policies are unknown and empty.
    """
    if run.adopted:
        return {}
    # As JSON has them: tuples become lists.
    values: dict[str, Any] = json.loads(json.dumps(asdict(restore(run.algo, preset))))
    if run.quantization is not None:
        options = run.quantization.options().items()
        values |= {f"quantization.{name}": value for name, value in options}
    return {name: value for name, value in values.items() if value is not None}


def available() -> list[tuple[str, str]]:
    """List every (algorithm, environment) with a preset."""
    return [(algo, env_id) for algo in sorted(ALGORITHMS) for env_id in sorted(_table(algo))]


def best(env_id: str, file: Path | None = None) -> str:
    """Return the most robust algorithm with a preset of an environment."""
    for algo in ALGORITHMS:
        if env_id in _table(algo, file):
            return algo
    env_ids = {name for algo in ALGORITHMS for name in _table(algo, file)}
    raise unknown("environment with a preset", env_id, env_ids, "Or give --algo and --presets.")


def _table(algo: str, file: Path | None = None) -> tables.Table:
    require_known("algorithm", algo, ALGORITHMS)
    own = {} if file is None else tables.read(file, ALGORITHMS).get(algo, {})
    return {k: v for k, v in (tables.shipped(algo) | own).items() if k != "quantization"}
