"""Tuned hyper-parameters: one YAML file per algorithm, keyed by environment.

A missing (algorithm, environment) is an error that names the closest, never a silent default.
"""

from __future__ import annotations

import math
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Self

from quarl_tf.foundation.errors import UsageError, unknown
from quarl_tf.presets import tables
from quarl_tf.spec.architectures import Architecture, architecture

PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Preset(ABC):
    """What every algorithm needs; build with `load`, which checks the values."""

    #: Environment steps of the whole training.
    steps: int
    #: Environments stepped together.
    num_envs: int
    #: Units of the hidden layers, or the name of one of `architectures.NAMED`.
    network: str | tuple[int, ...]
    #: The optimizer's step size at the start.
    learning_rate: float
    #: Whether the learning rate falls linearly to 0 over training; a little before its end, for
    #: the ticks that reset an environment are learned after but are no steps.
    learning_rate_decay: bool
    #: Discount of future reward, per environment step.
    discount: float
    #: Environment steps between bursts of learning.
    train_frequency: int
    #: Environment steps between greedy evaluations that choose the best network.
    evaluation_every: int
    #: Episodes of each such evaluation, played at once.
    evaluation_episodes: int
    #: Environment steps between checkpoints; environments start fresh episodes at each.
    checkpoint_every: int
    #: Whether every hidden fully-connected layer is followed by layer normalisation.
    layer_norm: bool = False
    #: Arithmetic of training, "float32", or "bfloat16" with float32 weights and head; what is
    #: exported computes in float32 either way.
    precision: str = "float32"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str) -> Self:
        """Check and convert raw values.

        Args:
            values: Raw values by field name.
            where: What the values are, for messages.

        Raises:
            UsageError: A field is missing, unknown, of another type or out of its range.
        """
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise unknown("preset key", name, known)
        required = {f.name for f in fields(cls) if f.default is MISSING}
        if missing := sorted(required - set(values)):
            raise UsageError(f"{where} lacks {', '.join(missing)}. Received: {sorted(values)}")
        types = typing.get_type_hints(cls)
        return cls(**{name: _convert(name, values[name], types[name]) for name in values})

    def __post_init__(self) -> None:
        """Refuse values that do not fit together.

        Raises:
            UsageError: Two values contradict each other, a fraction is above 1, or what nothing is
                learned without is 0.
        """
        self._require_above_zero("learning_rate")
        self._require_fraction("discount")
        self._require_multiple("train_frequency", "num_envs")
        architecture(self.network)
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        if self.precision != "float32" and not self.architecture.convolutions:
            # They act by NumPy, in float32: what acts and what learns would differ.
            raise UsageError(
                "Networks without convolutions train in float32: give precision=float32 too. "
                f"Received: precision={self.precision}, network={self.network}"
            )

    @property
    @abstractmethod
    def updates(self) -> int:
        """Gradient steps of the whole training."""

    @property
    def architecture(self) -> Architecture:
        """The hidden layers that `network` stands for."""
        return architecture(self.network)

    def _require_above_zero(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) == 0:
                raise UsageError(f"{name} must be above 0. Received: {name}=0.0")

    def _require_fraction(self, name: str) -> None:
        value = getattr(self, name)
        if value > 1:
            raise UsageError(f"{name} must be 1 or less. Received: {name}={value}")

    def _require_multiple(self, name: str, divisor: str) -> None:
        value, by = getattr(self, name), getattr(self, divisor)
        if value % by:
            raise UsageError(
                f"{name} must be a multiple of {divisor}. Received: {name}={value}, {divisor}={by}"
            )


@dataclass(frozen=True, kw_only=True)
class OffPolicyPreset(Preset):
    """Hyper-parameters of learning from a replay."""

    #: Transitions in one gradient step.
    batch_size: int
    #: Observations kept for replay.
    buffer_size: int
    #: Observations in the replay before learning starts.
    learning_starts: int
    #: Gradient steps in one burst.
    gradient_steps: int
    #: Steps whose rewards are summed before bootstrapping.
    n_step: int = 1

    @property
    def updates(self) -> int:
        """Gradient steps of the whole training."""
        learning = max(1, self.steps - self.learning_starts)
        return learning * self.gradient_steps // self.train_frequency

    def __post_init__(self) -> None:
        """Check what a replay adds; see `Preset.__post_init__`.

        Raises:
            UsageError: There are not two rows before learning starts, the replay cannot hold what
                it waits for, or no burst is left after it.
        """
        super().__post_init__()
        starts, size = self.learning_starts, self.buffer_size
        if starts < 2 * self.num_envs or size < starts + self.num_envs:
            raise UsageError(
                "learning_starts must be at least 2 * num_envs, and buffer_size at least "
                f"learning_starts + num_envs. Received: learning_starts={starts}, "
                f"buffer_size={size}, num_envs={self.num_envs}"
            )
        if self.steps < starts + self.train_frequency:
            raise UsageError(
                "A training must have a burst left (train_frequency) once learning starts; make "
                "steps more or learning_starts less (-p learning_starts=…). Received: "
                f"steps={self.steps}, learning_starts={starts}, "
                f"train_frequency={self.train_frequency}"
            )


@dataclass(frozen=True, kw_only=True)
class DqnPreset(OffPolicyPreset):
    """Hyper-parameters of DQN."""

    #: Gradient steps between copies to the target network.
    target_update: int
    #: Fraction of training over which exploration falls from 1 to `exploration_final`.
    exploration_fraction: float
    #: Probability of a random action after that.
    exploration_final: float
    #: Largest norm of each variable's gradient.
    gradient_clip: float
    #: Whether values of states and advantages of actions have last layers of their own.
    dueling: bool = False
    #: Whether the network itself chooses the next action that its target values (Double DQN), not
    #: the target.
    double: bool = True

    def __post_init__(self) -> None:
        """Check what DQN adds; see `OffPolicyPreset.__post_init__`."""
        super().__post_init__()
        self._require_above_zero("exploration_fraction", "gradient_clip")
        self._require_fraction("exploration_fraction")
        self._require_fraction("exploration_final")


@dataclass(frozen=True, kw_only=True)
class PpoPreset(Preset):
    """Hyper-parameters of PPO; a rollout is `train_frequency` steps long."""

    #: Passes over each rollout.
    epochs: int
    #: Transitions in one gradient step; a divisor of `train_frequency`.
    minibatch_size: int
    #: Largest change of the probability ratio that is rewarded; 0 for no limit (A2C).
    clip: float
    #: Whether advantages are brought to mean 0 and deviation 1 in each minibatch.
    normalize_advantages: bool
    #: Lambda of the advantage estimates; 1 for n-step returns.
    gae_lambda: float
    #: Weight of the policy's entropy in the loss.
    entropy_coefficient: float
    #: Weight of the value's error in the loss.
    value_coefficient: float
    #: Largest norm of the whole gradient.
    gradient_clip: float

    @property
    def updates(self) -> int:
        """Gradient steps of the whole training."""
        return self.steps // self.minibatch_size * self.epochs

    def __post_init__(self) -> None:
        """Check what PPO adds; see `Preset.__post_init__`."""
        super().__post_init__()
        self._require_above_zero("gradient_clip")
        self._require_fraction("gae_lambda")
        self._require_multiple("train_frequency", "minibatch_size")


@dataclass(frozen=True, kw_only=True)
class A2cPreset(PpoPreset):
    """Hyper-parameters of A2C."""

    #: What keeps RMSprop's quotient finite, under its root.
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        """Check what makes it A2C; see `PpoPreset.__post_init__`."""
        super().__post_init__()
        wanted = {"epochs": 1, "clip": 0.0, "minibatch_size": self.train_frequency}
        received = {name: getattr(self, name) for name in wanted}
        if received != wanted:
            raise UsageError(
                "a2c takes one step on all of a rollout, unclipped: minibatch_size as "
                "train_frequency, epochs=1, clip=0.0; else train by ppo. Received: "
                + ", ".join(f"{name}={value}" for name, value in received.items())
            )
        self._require_above_zero("epsilon")


@dataclass(frozen=True, kw_only=True)
class DdpgPreset(OffPolicyPreset):
    """Hyper-parameters of DDPG; `learning_rate` is the actor's."""

    #: Adam's step size for the critic.
    critic_learning_rate: float
    #: Share of the network that the target takes over in each gradient step.
    target_tau: float
    #: Standard deviation of the exploration noise's draws, in half action ranges.
    noise: float
    #: Whether the noise is an Ornstein-Uhlenbeck process instead of independent draws.
    correlated_noise: bool

    def __post_init__(self) -> None:
        """Check what DDPG adds; see `OffPolicyPreset.__post_init__`."""
        super().__post_init__()
        self._require_above_zero("critic_learning_rate", "target_tau")
        self._require_fraction("target_tau")


_CLASSES: dict[str, type[Preset]] = {
    "a2c": A2cPreset,
    "ddpg": DdpgPreset,
    "dqn": DqnPreset,
    "ppo": PpoPreset,
}


def require_possible_delay(delay: int, preset: Preset) -> None:
    """Refuse a quantisation delay before which, or after which, nothing is learned.

    Raises:
        UsageError: The training is off policy, and the delay ends before it has learned, so that no
            range is known; or no burst is left behind it.
    """
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


def load(
    algo: str,
    env_id: str,
    overrides: Mapping[str, Any] | None = None,
    own: Path | None = None,
) -> Preset:
    """Load the preset of an (algorithm, environment), with overrides.

    Args:
        algo: Name of the algorithm.
        env_id: Id of the environment.
        overrides: Values that take the place of the preset's, by name.
        own: A file of the user's presets (see `tables.read`), which go before the package's.

    Raises:
        UsageError: There is no such preset, the user's file is of no use, or a value does not fit.
    """
    table = _table(algo)
    if own is not None:
        table.update(_own_table(algo, own))
    if env_id not in table:
        elsewhere = "Any other needs an entry in a file of yours, given with --presets."
        raise unknown(f"{algo} preset", env_id, table, elsewhere)
    values = {**table[env_id], **(overrides or {})}
    return _CLASSES[algo].from_mapping(values, where=f"The {algo} preset of {env_id}")


def has_own(algo: str, env_id: str, own: Path) -> bool:
    """Tell whether a file of the user's presets has one of an (algorithm, environment).

    Raises:
        UsageError: The file is of no use.
    """
    return env_id in _own_table(algo, own)


def restore(algo: str, values: Mapping[str, Any]) -> Preset:
    """Rebuild the preset that a record of a training keeps."""
    return _CLASSES[algo].from_mapping(values, where=f"The recorded {algo} preset")


def available() -> list[tuple[str, str]]:
    """List every (algorithm, environment) that has a preset."""
    return [(algo, env_id) for algo in sorted(_CLASSES) for env_id in sorted(_table(algo))]


def _table(algo: str) -> tables.Table:
    if algo not in _CLASSES:
        raise unknown("algorithm", algo, _CLASSES)
    return tables.shipped(algo)


def _own_table(algo: str, own: Path) -> tables.Table:
    return tables.read(own, _CLASSES).get(algo, {})


def _convert(name: str, value: Any, wanted: Any) -> Any:
    """Check one value against its field's type; a whole number may stand for a float."""
    if wanted is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = float(value)
    elif wanted == str | tuple[int, ...]:
        if isinstance(value, str):
            return value
        if isinstance(value, (list, tuple)):
            value = tuple(value)
            if all(type(item) is int and item > 0 for item in value):
                return value
    elif wanted is str and isinstance(value, str):
        return value
    if type(value) is wanted and (1 if wanted is int else 0) <= value < math.inf:
        return value
    kinds = {
        int: "a whole number above 0",
        float: "a number of 0 or more",
        bool: "true or false",
        str: "a name",
    }
    kind = kinds.get(wanted, "a list of whole numbers above 0, or a name")
    raise UsageError(f"{name} must be {kind}. Received: {name}={value!r}")
