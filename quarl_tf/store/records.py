"""What is kept of trainings, flatbuffers and evaluations, and whether a file says it."""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from quarl_tf import presets
from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.files import read_json, sha256, write_json
from quarl_tf.presets import Preset
from quarl_tf.spec import Run

#: How an evaluation's protocol says that it took the best actions.
GREEDY = "greedy: the best value, the lowest index on ties; continuous heads clipped"

#: What every record says about the run it belongs to, see `spec.Run`.
_RUN_FIELDS = {"algo": str, "env_id": str, "seed": int, "overrides": dict[str, Any]}


class _JsonRecord:
    """A dataclass kept as one JSON file."""

    def save(self, path: Path) -> None:
        """Write the record, whole or not at all."""
        write_json(path, asdict(self))  # type: ignore[call-overload]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the record; a field with a default may be absent, as it is from older files.

        Raises:
            QuarlError: The file is missing, damaged, or its fields or their values are not this
                record's.
        """
        values = read_json(path)
        declared = fields(cls)  # type: ignore[arg-type]
        optional = {f.name for f in declared if f.default is not MISSING}
        differing = ({f.name for f in declared} ^ set(values)) - optional
        if differing:
            odd = ", ".join(sorted(differing))
            raise QuarlError(
                f"{path} is not a {cls.__name__} of this version (fields that differ: {odd}); "
                f"delete it and run again what made it. Received: path={str(path)!r}"
            )
        for name, kind in get_type_hints(cls).items():
            if name in values and not _fits(values[name], kind):
                wanted = kind.__name__ if isinstance(kind, type) else kind
                raise _not_so(path, cls, f"{name} must be {wanted}", name, values[name])
        record = cls(**values)
        flaw = record._flaw()
        if flaw is not None:
            name, rule = flaw
            raise _not_so(path, cls, rule, name, values[name])
        return record

    def _flaw(self) -> tuple[str, str] | None:
        """Return a field whose value cannot be, though its type is right, and the rule it broke."""
        return None


def _not_so(path: Path, record: type, rule: str, name: str, value: Any) -> QuarlError:
    return QuarlError(
        f"{path} is no sound {record.__name__} ({rule}); delete it and run again what made it. "
        f"Received: {name}={reprlib.repr(value)}"
    )


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a JSON value is of the type that a record's field is declared with."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_fits(value, one) for one in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(one, arguments[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(v, arguments[1]) for v in value.values())
    if isinstance(value, bool):  # To Python, True is an int.
        return kind in (bool, Any)
    if kind is float:
        # Finite: json reads NaN and 1e999, which `write_json` never writes.
        return isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return kind is Any or isinstance(value, kind)


def _run_flaw(run: Mapping[str, Any]) -> tuple[str, str] | None:
    for name, kind in _RUN_FIELDS.items():
        if name not in run or not _fits(run[name], kind):
            return "run", f"run needs {', '.join(_RUN_FIELDS)}, and {name} is missing or odd"
    try:
        Run.from_dict(run)
    except (TypeError, UsageError) as error:
        return "run", str(error)
    return None


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
    #: All that trained a part of it, with `SEVERAL` between.
    commit: str | None
    #: All that it was trained on, likewise; empty in older files.
    processor: str = ""

    def _flaw(self) -> tuple[str, str] | None:
        return _run_flaw(self.run)

    @classmethod
    def finished(cls, folder: Path, run: Run, preset: Preset) -> Self | None:
        """Return the record of a finished training, or None if it is not finished.

        Raises:
            QuarlError: It was trained with another preset or quantisation, or its files were
                changed.
        """
        if not (folder / "training.json").exists():
            return None
        record = cls.load(folder / "training.json")
        record.verify(folder)
        require_same_settings(folder, {"run": record.run, "preset": record.preset}, run, preset)
        return record

    def verify(self, folder: Path) -> None:
        """Check the files of the run folder against their hashes.

        Raises:
            QuarlError: A file is missing or was changed.
        """
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
    #: Actions of a discrete space, or null.
    num_actions: int | None
    #: Bounds of a continuous action space, or null.
    action_low: list[float] | None
    action_high: list[float] | None
    #: Standard deviation of each component of a continuous action around the head, where the policy
    #: is such a distribution; null where it is none, and for discrete actions.
    action_std: list[float] | None = None
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
    #: Commits and processors of the training, as its record names them; null and empty in older
    #: files.
    trained_commit: str | None = None
    trained_on: str = ""
    #: Those of the export.
    versions: dict[str, str]
    commit: str | None

    def _flaw(self) -> tuple[str, str] | None:
        if self.size_bytes < 1:
            return "size_bytes", "a flatbuffer has at least 1 byte"
        std = self.action_std
        if std is not None and (len(std) != len(self.action_low or ()) or min(std, default=-1) < 0):
            return "action_std", "action_std is 0 or more for each component of the action, or null"
        return _run_flaw(self.run)


@dataclass(frozen=True)
class Evaluation(_JsonRecord):
    """Every episode of one policy on given seeds, kept at `evaluation_path`."""

    run_id: str
    env_id: str
    #: A scheme's name, or "random" for the baseline that samples the action space.
    scheme: str
    #: Hash of the flatbuffer that acted; null for the random baseline.
    artifact_sha256: str | None
    #: Protocol in words, e.g. {"action": "greedy", "return": "unclipped", ...}.
    protocol: dict[str, str]
    seeds: list[int]
    returns: list[float]
    lengths: list[int]
    #: Steps at which two or more actions shared the best value.
    ties: int
    #: Microseconds of one `Policy.act` or `Policy.sample` call, whichever chose the actions:
    #: {"median": ..., "p95": ...}; null for random.
    latency_us: dict[str, float] | None
    #: Hash of the fp32 flatbuffer it was compared with; null where there was none.
    reference_sha256: str | None
    #: Actions equal to the fp32 policy's on the states that the fp32 policy visits:
    #: {"fraction": ..., "states": ...}; null where there is nothing to compare with.
    agreement: dict[str, float] | None
    versions: dict[str, str]
    #: What it was measured on; empty in older files.
    processor: str = ""

    def first(self, episodes: int | None) -> Evaluation:
        """Return it with its first episodes alone, or all; ties and latency stay those of all."""
        return replace(
            self,
            seeds=self.seeds[:episodes],
            returns=self.returns[:episodes],
            lengths=self.lengths[:episodes],
        )

    def _flaw(self) -> tuple[str, str] | None:
        if not self.seeds:
            return "seeds", "an evaluation has at least one episode"
        for name in ("returns", "lengths"):
            if len(getattr(self, name)) != len(self.seeds):
                return name, f"{name} must be as many as the {len(self.seeds)} seeds"
        if self.agreement is not None and "fraction" not in self.agreement:
            return "agreement", "agreement needs a fraction"
        return None


def settings(run: Run, preset: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that a training goes by, JSON-ready: its preset, and how it is quantised.

    What a preset has learned to say since it was recorded was then as it is where unsaid.

    Raises:
        UsageError: The preset has a key that is not known any more.
    """
    quantization = run.to_dict().get("quantization", {})
    found = {f"quantization.{name}": value for name, value in quantization.items()}
    # Tuples are lists once they have been through JSON.
    values: dict[str, Any] = json.loads(json.dumps(asdict(presets.restore(run.algo, preset))))
    return {**values, **found}


def require_same_settings(
    folder: Path, recorded: Mapping[str, Any], run: Run, preset: Preset
) -> None:
    """Refuse to go on in a run folder with other `settings` than its own.

    Args:
        folder: The run folder.
        recorded: Its `run` and `preset`, as a record or a checkpoint keeps them.
        run: What is asked for.
        preset: Its preset.

    Raises:
        QuarlError: The two differ; the keys that do are named.
    """
    asked = settings(run, asdict(preset))
    try:
        found = settings(Run.from_dict(recorded["run"]), recorded["preset"])
    except (KeyError, UsageError) as error:
        raise QuarlError(
            f"{folder} was trained by another version; move it away or use another --root. "
            f"Received: {error}"
        ) from error
    keys = sorted(k for k in {*found, *asked} if found.get(k) != asked.get(k))
    if keys:
        received = ", ".join(f"{k}={asked.get(k)!r} for {found.get(k)!r}" for k in keys)
        raise QuarlError(
            f"{folder} was trained with other settings; move it away or use another --root. "
            f"Received: {received}"
        )
