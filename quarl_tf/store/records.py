"""Records of trainings, flatbuffers and evaluations, and their checks when they are read."""

import reprlib
import sys
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from quarl_tf.foundation.errors import QuarlError, one_line
from quarl_tf.foundation.files import digest, read_json, sha256, write_json
from quarl_tf.spec import Run

PROTOCOL_VERSION = 1  #: Of the evaluation rules; evaluations of another version are repeated.
AGREEMENT_EPISODES = 10  #: Episodes in which actions are compared with those of fp32.


@dataclass(frozen=True)
class _JsonRecord:
    """A dataclass stored as one JSON file; a field with a default is stored where it differs."""

    _REMEDY = "delete it and run again what made it"  #: About a file that cannot be used.

    def save(self, path: Path) -> None:
        """Write the record and its checksum atomically."""
        defaults = self._defaults()
        stored = {k: v for k, v in asdict(self).items() if v != defaults.get(k, MISSING)}
        write_json(path, stored | {"checksum": digest(stored)})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the record; a QuarlError where the file was changed or holds no valid one."""
        values = read_json(path)
        if "checksum" in values:  # Earlier versions wrote none.
            recorded, checksum = values.pop("checksum"), digest(values)
            if recorded != checksum:
                raise QuarlError(
                    f"{path} was changed or damaged; {cls._REMEDY}. "
                    f"Received: checksum={checksum!r}, the file says {reprlib.repr(recorded)}"
                )
        return cls.of(values, path)

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        return {f.name: f.default for f in fields(cls) if f.default is not MISSING}

    @classmethod
    def of(cls, stored: dict[str, Any], path: Path) -> Self:
        """Build the record of the values in a file; a QuarlError where they are not valid."""
        kinds, values = get_type_hints(cls), cls._defaults() | stored
        if differing_fields := kinds.keys() ^ values.keys():
            names = ", ".join(sorted(differing_fields))
            raise cls._invalid(path, f"fields that differ {names}")
        for name, kind in kinds.items():
            if not _check(kind)(values[name]):
                raise cls._invalid(path, f"{name}={reprlib.repr(values[name])}")
        if "run" in values:
            try:
                run_id = Run.from_dict(values["run"]).run_id
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                text = f"run={reprlib.repr(values['run'])} ({one_line(error)})"
                raise cls._invalid(path, text) from error
            if values.get("run_id", run_id) != run_id:
                raise cls._invalid(path, f"run_id={values['run_id']!r}, its run is {run_id!r}")
        nested = {n: kind(**values[n]) for n, kind in kinds.items() if is_dataclass(kind)}
        record = cls(**values | nested)
        if flaw := record._flaw():
            raise cls._invalid(path, flaw)
        return record

    def _flaw(self) -> str:
        return ""

    @classmethod
    def _invalid(cls, path: Path, received: str) -> QuarlError:
        return QuarlError(f"{path} is no valid {cls.__name__}; {cls._REMEDY}. Received: {received}")


@cache
def _check(kind: Any) -> Callable[[Any], bool]:
    """Return a function that tells whether a JSON value has the declared type of a field."""
    origin, checks = get_origin(kind), [_check(argument) for argument in get_args(kind)]
    if origin is UnionType:
        return lambda value: any(check(value) for check in checks)
    if origin is list:
        return lambda value: type(value) is list and all(map(checks[0], value))
    if origin is dict:
        return lambda value: type(value) is dict and all(map(checks[1], value.values()))
    if is_dataclass(kind):
        fields_of = {name: _check(hint) for name, hint in get_type_hints(kind).items()}
        return lambda value: (
            type(value) is dict
            and value.keys() == fields_of.keys()
            and all(check(value[name]) for name, check in fields_of.items())
        )
    if kind is float:
        # Finite: json reads NaN and 1e999, which `write_json` never writes.
        return lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max
    return lambda value: kind is Any or type(value) is kind


@dataclass(frozen=True)
class TrainingRecord(_JsonRecord):
    """A finished training, stored as `training.json` in its run folder."""

    _REMEDY = "delete the run folder and that of its flatbuffers, and train again"

    run: dict[str, Any]
    run_id: str
    preset: dict[str, Any]
    best_step: int  #: Environment step of the selected network.
    #: Its mean greedy return on selection seeds: biased upwards, never a result.
    selection_return: float
    network_sha256: str
    calibration_sha256: str
    #: Wall time of the training alone, summed over the parts that its network comes from.
    seconds: float
    versions: dict[str, str]
    #: Of every part of a resumed training: commits, digests of the sources, processors.
    commits: list[str]
    sources: list[str]
    processors: list[str]
    #: Hash of the environment's code (`registry.source_sha256`), where `versions` do not tell it.
    environment_sha256: str | None = None

    def verify(self, folder: Path) -> None:
        """Raise a QuarlError where a file of the run folder is missing or was changed."""
        for name in ("network", "calibration"):
            path = folder / f"{name}.npz"
            if sha256(path) != getattr(self, f"{name}_sha256"):
                raise QuarlError(
                    f"{path} was changed or damaged after training; {self._REMEDY}. "
                    f"Received: path={str(path)!r}"
                )


@dataclass(frozen=True, kw_only=True)
class Sidecar(_JsonRecord):
    """Description of one flatbuffer, stored beside it as `<scheme>.json`."""

    _REMEDY = "make its flatbuffer again"

    run: dict[str, Any]
    run_id: str
    env_id: str
    scheme: str
    native: bool
    sha256: str
    size_bytes: int
    #: Meaning of the head: "q_values", "advantages" (Q-values up to an offset that all actions
    #: share), "logits" or "action".
    head: str
    num_actions: int | list[int] | None  #: Discrete ones, a list for MultiDiscrete, or null.
    action_low: list[float] | None  #: Bounds of a continuous action space, or null.
    action_high: list[float] | None
    #: Standard deviation of each component of a continuous action around the head; null for
    #: deterministic policies and discrete actions.
    action_std: list[float] | None
    observation_shape: list[int]
    observation_dtype: str
    #: Numbers of tensors and of weights (elements of constant tensors) by dtype, and operators in
    #: order with the dtype each computes, all read back from the flatbuffer.
    tensor_dtypes: dict[str, int]
    weight_dtypes: dict[str, int]
    operators: list[str]
    #: Results of the checks at export against the network or, after training, against fp32. Also
    #: what a copy was made from, but for fp32 and rollouts (`source`, `recorded_sha256`).
    check: dict[str, Any]
    network_sha256: str  #: Hash of the network file that was exported.
    #: Hash of the calibration observations, for schemes that need them.
    calibration_sha256: str | None
    preset: dict[str, Any]
    #: Commits and processors of the training, from its record.
    trained_commits: list[str]
    trained_on: list[str]
    #: Of the export.
    versions: dict[str, str]
    commit: str | None
    sources: str

    @property
    def quantized_from(self) -> int:
        """A step from which on greedy returns in training are of networks of this kind.

        The burst of learning that crosses the delay is in float to its end.
        """
        quantization = Run.from_dict(self.run).quantization
        frequency: int = self.preset.get("train_frequency", 0)
        return 0 if quantization is None else quantization.delay + frequency

    def _flaw(self) -> str:
        if self.observation_dtype not in ("float32", "uint8"):
            return f"observation_dtype={self.observation_dtype!r}"
        std = self.action_std  # One for each component of the action, if any.
        fits = std is None or (len(std) == len(self.action_low or ()) and min(std, default=0) >= 0)
        return "" if fits else f"action_std={std}"


@dataclass(frozen=True)
class Protocol:
    """The rules of an evaluation: whole episodes, unclipped rewards.

    Actions are "greedy" (the best value; the lowest index on ties), "sampled" from the policy's
    distribution, "random", or greedy but for a share, as "0.05 random, else greedy". `game` holds
    the rules of an Atari game (`environments.rules`).
    """

    version: int
    actions: str
    game: dict[str, Any] | None = None


@dataclass(frozen=True)
class Evaluation(_JsonRecord):
    """Episodes of one policy on given seeds, stored at `evaluation_path`."""

    run_id: str
    env_id: str
    scheme: str  #: Name of a scheme, or "random" for the random policy.
    artifact_sha256: str | None  #: Hash of the flatbuffer; null for the random policy.
    protocol: Protocol
    seeds: list[int]
    returns: list[float]
    lengths: list[int]
    #: What each episode starts with: the frame of a game, elsewhere a digest of the observation;
    #: null where all differ.
    starts: list[int] | None
    ties: int  #: Steps at which several actions had the best value.
    #: Microseconds of one `Policy.act` or `Policy.sample` call: {"median": ..., "p95": ...,
    #: "p99": ..., "fp32": the median of the fp32 policy's in turns with them, where there is one};
    #: null for the random policy.
    latency_us: dict[str, float] | None
    #: Hash of the fp32 flatbuffer it is compared with; null where there was none.
    reference_sha256: str | None
    #: Actions equal to the fp32 policy's on the states that the fp32 policy visits:
    #: {"fraction": ..., "states": ...}; null without an fp32 policy.
    agreement: dict[str, float] | None
    versions: dict[str, str]
    processor: str
    sources: str  #: Of the last episodes, if they were added to others.
    #: Success of each episode, where the environment reports it (`info["is_success"]`).
    successes: list[bool] | None = None
    environment_sha256: str | None = None  #: As that of `TrainingRecord`.

    def _flaw(self) -> str:
        n, lists = len(self.seeds), [(k, v) for k, v in vars(self).items() if type(v) is list]
        return next((f"{len(v)} {k} of {n} seeds" for k, v in lists if not len(v) == n > 0), "")

    def shares_environment(self, other: "Evaluation") -> bool:
        """Tell whether another one was played in the same environment, as far as recorded."""
        hashes = {self.environment_sha256, other.environment_sha256} - {None}
        return self.env_id == other.env_id and len(hashes) < 2

    def first(self, episodes: int | None, *, skip: int = 0) -> Self:
        """Return the first episodes after those skipped; ties and latency stay those of all."""
        part = slice(skip, None if episodes is None else skip + episodes)
        lists: dict[str, Any] = {k: v[part] for k, v in vars(self).items() if isinstance(v, list)}
        return replace(self, **lists)
