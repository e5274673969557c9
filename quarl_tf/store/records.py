"""What is kept of trainings, flatbuffers and evaluations, and whether a file says it."""

import json
import reprlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.files import digest, read_json, sha256, write_json
from quarl_tf.spec import Run

#: Version of the rules that evaluations are played by; those of another are played again.
PROTOCOL_VERSION = 1

#: What every record says about the run it belongs to, see `spec.Run`.
_RUN_FIELDS = {"algo": str, "env_id": str, "seed": int, "overrides": dict[str, Any]}


class _JsonRecord:
    """A dataclass kept as one JSON file."""

    def save(self, path: Path) -> None:
        """Write the record, whole or not at all."""
        write_json(path, asdict(self))  # type: ignore[call-overload]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the record; a QuarlError where the file does not hold this one, whole."""
        return cls.of(read_json(path), path)

    @classmethod
    def of(cls, values: dict[str, Any], path: Path) -> Self:
        """Build the record of what a file says; a QuarlError where that cannot be one."""
        kinds = get_type_hints(cls)
        if differing := kinds.keys() ^ values.keys():
            raise QuarlError(
                f"{path} is no {cls.__name__} of this version; delete it and run again what made "
                f"it. Received: fields that differ {', '.join(sorted(differing))}"
            )
        flaws = [
            (name, f"{name} must be {kind.__name__ if isinstance(kind, type) else kind}")
            for name, kind in kinds.items()
            if not _fits(values[name], kind)
        ]
        if not flaws:
            nested = {n: kind(**values[n]) for n, kind in kinds.items() if is_dataclass(kind)}
            record = cls(**values | nested)
            flaws = list(record._flaws())
            if not flaws:
                return record
        name, rule = flaws[0]
        raise QuarlError(
            f"{path} is no valid {cls.__name__} ({rule}); delete it and run again what made it. "
            f"Received: {name}={reprlib.repr(values[name])}"
        )

    def _flaws(self) -> Iterator[tuple[str, str]]:
        """Yield fields whose value cannot be, though its type is right, and the rule it broke."""
        return iter(())


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a JSON value is of the type that a record's field is declared with."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType or kind is Any:
        return kind is Any or any(_fits(value, one) for one in arguments)
    if origin in (list, dict):
        items = value.values() if isinstance(value, dict) else value
        return isinstance(value, origin) and all(_fits(item, arguments[-1]) for item in items)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        known = isinstance(value, dict) and value.keys() == hints.keys()
        return known and all(_fits(value[name], hint) for name, hint in hints.items())
    if isinstance(value, bool):  # To Python, True is an int.
        return kind is bool
    if kind is float:
        # Finite: json reads NaN and 1e999, which `write_json` never writes.
        return isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return isinstance(value, kind)


def _run_flaws(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, kind in _RUN_FIELDS.items():
        if name not in run or not _fits(run[name], kind):
            yield "run", f"run needs {', '.join(_RUN_FIELDS)}, and {name} is missing or odd"
            return
    try:
        Run.from_dict(run)
    except (KeyError, TypeError, UsageError) as error:
        yield "run", str(error)


@dataclass(frozen=True)
class TrainingRecord(_JsonRecord):
    """What a finished training was and made, kept as `training.json` in its run folder."""

    run: dict[str, Any]
    run_id: str
    preset: dict[str, Any]
    #: Environment step of the network that was kept.
    best_step: int
    #: Its mean greedy return on selection seeds: biased upwards, never a result.
    selection_return: float
    network_sha256: str
    calibration_sha256: str
    #: Wall time of the training alone, of every part that its network comes from.
    seconds: float
    versions: dict[str, str]
    #: What trained it, each part of a resumed training once: commits, digests of the sources, and
    #: processors.
    commits: list[str]
    sources: list[str]
    processors: list[str]

    def _flaws(self) -> Iterator[tuple[str, str]]:
        return _run_flaws(self.run)

    def verify(self, folder: Path) -> None:
        """Raise a QuarlError where a file of the run folder is missing or was changed."""
        for name, expected in (
            ("network.npz", self.network_sha256),
            ("calibration.npz", self.calibration_sha256),
        ):
            if sha256(folder / name) != expected:
                raise QuarlError(
                    f"{folder / name} was changed or damaged after training; delete the run folder "
                    f"and train again. Received: path={str(folder / name)!r}"
                )


@dataclass(frozen=True, kw_only=True)
class Sidecar(_JsonRecord):
    """The truth about one flatbuffer, kept beside it as `<scheme>.json`."""

    run: dict[str, Any]
    run_id: str
    env_id: str
    scheme: str
    native: bool
    sha256: str
    size_bytes: int
    #: What the head's numbers are: "q_values", "advantages" (Q-values less a part that all
    #: actions share), "logits" or "action".
    head: str
    #: Actions of a discrete space, of each of several (MultiDiscrete) a list, or null.
    num_actions: int | list[int] | None
    #: Bounds of a continuous action space, or null.
    action_low: list[float] | None
    action_high: list[float] | None
    #: Standard deviation of each component of a continuous action around the head, where the policy
    #: is such a distribution; null where it is none, and for discrete actions.
    action_std: list[float] | None
    observation_shape: list[int]
    observation_dtype: str
    #: Tensors in the file by dtype, read back from the flatbuffer.
    tensor_dtypes: dict[str, int]
    #: Weights (elements of constant tensors) in the file by dtype, read back from the flatbuffer.
    weight_dtypes: dict[str, int]
    #: Operators in the file, in order, with the dtype each computes.
    operators: list[str]
    #: Checks made at export against the network the flatbuffer came from.
    check: dict[str, Any]
    #: Hash of the trained network file the flatbuffer was made from.
    network_sha256: str
    #: Hash of the calibration observations, for schemes that need them.
    calibration_sha256: str | None
    preset: dict[str, Any]
    #: Commits and processors of the training, as its record has them.
    trained_commits: list[str]
    trained_on: list[str]
    #: Of the export.
    versions: dict[str, str]
    commit: str | None
    sources: str

    def save(self, path: Path) -> None:
        """Write the sidecar with a checksum over it, whole or not at all."""
        values = json.loads(json.dumps(asdict(self)))
        write_json(path, values | {"checksum": digest(values)})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the sidecar; a QuarlError where the file does not hold this one, unchanged."""
        values = read_json(path)
        # Former versions wrote none.
        if "checksum" in values and (said := values.pop("checksum")) != (found := digest(values)):
            raise QuarlError(
                f"{path} was changed or damaged; make its flatbuffer again. "
                f"Received: checksum={found!r}, the file says {reprlib.repr(said)}"
            )
        return cls.of(values, path)

    def _flaws(self) -> Iterator[tuple[str, str]]:
        if self.size_bytes < 1:
            yield "size_bytes", "a flatbuffer has at least 1 byte"
        std = self.action_std
        if std is not None and (len(std) != len(self.action_low or ()) or min(std, default=-1) < 0):
            yield "action_std", "action_std is 0 or more for each component of the action, or null"
        yield from _run_flaws(self.run)


@dataclass(frozen=True)
class Protocol:
    """The rules that episodes are played by: whole ones, their rewards unclipped and summed.

    Actions are "greedy", the best value and the lowest index on ties; "sampled" from the policy's
    distribution; or "random". The rules of an Atari game are `environments.rules`; null elsewhere.
    """

    version: int
    actions: str
    game: dict[str, Any] | None = None


@dataclass(frozen=True)
class Evaluation(_JsonRecord):
    """Every episode of one policy on given seeds, kept at `evaluation_path`."""

    run_id: str
    env_id: str
    #: A scheme's name, or "random" for the baseline that samples the action space.
    scheme: str
    #: Hash of the flatbuffer that acted; null for the random baseline.
    artifact_sha256: str | None
    protocol: Protocol
    seeds: list[int]
    returns: list[float]
    lengths: list[int]
    #: Which of the game's starts each episode went on from; null where episodes are not told apart.
    starts: list[int] | None
    #: Steps at which two or more actions shared the best value.
    ties: int
    #: Microseconds of one `Policy.act` or `Policy.sample` call, whichever chose the actions:
    #: {"median": ..., "p95": ..., "p99": ...}; null for random.
    latency_us: dict[str, float] | None
    #: Hash of the fp32 flatbuffer it was compared with; null where there was none.
    reference_sha256: str | None
    #: Actions equal to the fp32 policy's on the states that the fp32 policy visits:
    #: {"fraction": ..., "states": ...}; null where there is nothing to compare with.
    agreement: dict[str, float] | None
    versions: dict[str, str]
    #: What it was measured on.
    processor: str
    sources: str
    #: Whether each episode succeeded, where the environment tells (`info["is_success"]`); else
    #: null, and not in the file.
    successes: list[bool] | None = None

    def save(self, path: Path) -> None:
        """Write the record, whole or not at all."""
        values = asdict(self)
        if self.successes is None:
            del values["successes"]
        write_json(path, values)

    def first(self, episodes: int | None, *, skip: int = 0) -> Self:
        """Return it with its first episodes behind those skipped; ties and latency are of all."""
        part = slice(skip, None if episodes is None else skip + episodes)
        return replace(
            self,
            seeds=self.seeds[part],
            returns=self.returns[part],
            lengths=self.lengths[part],
            starts=None if self.starts is None else self.starts[part],
            successes=None if self.successes is None else self.successes[part],
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the record; a QuarlError where the file does not hold this one, whole."""
        return cls.of({"successes": None} | read_json(path), path)

    def _flaws(self) -> Iterator[tuple[str, str]]:
        if not self.seeds:
            yield "seeds", "an evaluation has at least one episode"
        for name in ("returns", "lengths", "starts", "successes"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.seeds):
                yield name, f"{name} must be as many as the {len(self.seeds)} seeds"
        if self.agreement is not None and "fraction" not in self.agreement:
            yield "agreement", "agreement needs a fraction"
