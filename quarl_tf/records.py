"""Records on disk: where files live, how they are written whole or not at all, what they say.

Every file is written to a temporary name in its own folder and renamed, so *exists* means
*finished*.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import glob
import hashlib
import io
import json
import os
import re
import reprlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from quarl_tf import presets, processor
from quarl_tf.errors import QuarlError, UsageError
from quarl_tf.presets import Preset
from quarl_tf.spec import Run, digest

_RECORDED_PACKAGES = (
    "quarl-tf",
    "tensorflow",
    "tf-keras",
    "tf-agents",
    "tensorflow-model-optimization",
    "ai-edge-litert",
    "gymnasium",
    "numpy",
)

#: What stands between several commits or processors, and for one that is not known.
SEVERAL = "; "
UNKNOWN_COMMIT, UNKNOWN_PROCESSOR = "unknown", "an unknown processor"

#: What every record says about the run it belongs to, see `spec.Run`.
_RUN_FIELDS = {"algo": str, "env_id": str, "seed": int, "overrides": dict[str, Any]}

#: Seconds after which a temporary file is no longer being written.
_STALE_AFTER = 3600


@dataclass(frozen=True)
class Workspace:
    """The folder that holds `runs/`, `tflite_models/` and `reports/`."""

    root: Path

    def run_dir(self, run_id: str) -> Path:
        """Return the folder of one training.

        Raises:
            UsageError: The run id is no name of a folder.
        """
        return self.root / "runs" / _checked_run_id(run_id)

    def artifact_dir(self, run_id: str) -> Path:
        """Return the folder of one training's flatbuffers.

        Raises:
            UsageError: The run id is no name of a folder.
        """
        return self.root / "tflite_models" / _checked_run_id(run_id)

    def artifact(self, run_id: str, scheme: str) -> Path:
        """Return the path of one flatbuffer; its sidecar and evaluations lie beside it."""
        return self.artifact_dir(run_id) / f"{scheme}.tflite"

    def report_dir(self, name: str) -> Path:
        """Return the folder of one report."""
        return self.root / "reports" / name


def _checked_run_id(run_id: str) -> str:
    if run_id in ("", ".", "..") or "/" in run_id or os.sep in run_id:
        name = Path(run_id).name
        hint = f"give {name}" if name not in ("", "..") else "`quarl list` names the runs"
        raise UsageError(
            f"A run id is the name of a run, not a path and without a slash; {hint}. "
            f"Received: run={run_id!r}"
        )
    return run_id


def sidecar_path(artifact: Path) -> Path:
    """Return where the sidecar of a flatbuffer lies."""
    return artifact.with_suffix(".json")


def evaluation_path(artifact: Path, *, sample: bool = False) -> Path:
    """Return where the evaluation of a flatbuffer lies, the one by sampled actions apart."""
    return artifact.with_suffix(".sampled.eval.json" if sample else ".eval.json")


def reference_path(artifact: Path, sidecar: Sidecar) -> Path:
    """Return the fp32 flatbuffer that one is compared with.

    It lies beside it, but for a quantisation-aware training: there it is the plain training's.
    """
    run = Run.from_dict(sidecar.run)
    folder = artifact.parent
    if run.quantization is not None:
        folder = folder.parent / run.plain.run_id
    return folder / "fp32.tflite"


def checked_report_name(name: object) -> str:
    """Return the name of a report, which is that of its folder.

    Raises:
        UsageError: It is none.
    """
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
        raise UsageError(
            "The name of a report is a folder's: letters, digits, '.', '_' and '-', beginning with "
            f"a letter or digit. Received: name={name!r}"
        )
    return name


def report_name(name: str, *, sample: bool = False) -> str:
    """Return what a report named after its runs is called, the one on sampled actions apart."""
    return f"{name}-sampled" if sample else name


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
    #: Wall time of the training alone; of the last part only where it was interrupted, or went on
    #: from a trunk.
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
    #: What the head's numbers are: "q_values", "advantages" (Q-values less their mean over the
    #: actions), "logits" or "action".
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


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, renamed onto it when the block ends well.

    Raises:
        QuarlError: The folder cannot be written or the disk is full; nothing is left behind.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale_temporaries(path)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        # mkstemp makes files private; artifacts are for sharing.
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _remove_stale_temporaries(path: Path) -> None:
    """Remove what killed processes left of earlier writes; one that still writes is younger."""
    # As `mkstemp` names them: eight characters, so that no other file's are met.
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.????????.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - temporary.stat().st_mtime > _STALE_AFTER:
                temporary.unlink()


def _unwritable(path: Path, error: OSError) -> QuarlError:
    return QuarlError(
        f"Cannot write {path}: {error.strerror or error}; make the folder writable, free some "
        f"space, or choose another with --root. Received: path={str(path)!r}"
    )


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, content: str) -> None:
    """Write a text file, whole or not at all."""
    write_bytes(path, content.encode())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all; NaN and infinities are refused."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def write_artifact(path: Path, content: bytes, sidecar: Sidecar) -> None:
    """Write a flatbuffer and its sidecar.

    The old sidecar goes first and the new one comes last: between the two nothing claims that the
    flatbuffer is whole.
    """
    try:
        sidecar_path(path).unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    write_bytes(path, content)
    sidecar.save(sidecar_path(path))


def not_exported(workspace: Workspace, run_id: str, schemes: Sequence[str]) -> list[str]:
    """Return the schemes whose flatbuffer is missing, damaged or of an earlier network.

    Raises:
        QuarlError: The run does not exist or is not finished.
    """
    folder = workspace.run_dir(run_id)
    if not (folder / "training.json").exists():
        state = "is not finished" if folder.exists() else "does not exist"
        command = "quarl train --algo … --env … --seed …"
        if not folder.exists() and (exported := exported_run(workspace, run_id)):
            state = "is not here, only what was exported of it"
            command = f"{exported.command('train')} --root DIR"
        raise QuarlError(
            f"The run {state}; train it first ({command}). "
            f"Received: run={run_id!r} in {workspace.root.resolve()}"
        )
    network = TrainingRecord.load(folder / "training.json").network_sha256

    def current(scheme: str) -> bool:
        path = workspace.artifact(run_id, scheme)
        try:
            sidecar = Sidecar.load(sidecar_path(path))
            found = (sidecar.scheme, sidecar.sha256, sidecar.network_sha256)
            return found == (scheme, sha256(path), network)
        except QuarlError:
            return False

    return [scheme for scheme in schemes if not current(scheme)]


def exported_run(workspace: Workspace, run_id: str) -> Run | None:
    """Return the run that the flatbuffers under a run's id are of; None if there are none."""
    for path in sorted(workspace.artifact_dir(run_id).glob("*.tflite")):
        with contextlib.suppress(QuarlError):
            return Run.from_dict(Sidecar.load(sidecar_path(path)).run)
    return None


def reported_runs(workspace: Workspace) -> set[str]:
    """Return the ids of all runs whose results are in a report."""
    found: set[str] = set()
    for path in workspace.report_dir("x").parent.glob("*/results.json"):
        # Whatever else has that name is none of ours.
        with contextlib.suppress(QuarlError, AttributeError, KeyError, TypeError):
            rows = read_json(path)["runs"]
            found |= {row["run_id"] for row in rows if row["status"] == "ok"}
    return found


def is_trained(workspace: Workspace, run_id: str) -> bool:
    """Tell whether a training is finished, or its flatbuffers came without it, as in a clone."""
    folder = workspace.run_dir(run_id)
    if (folder / "run.json").exists():
        return (folder / "training.json").exists()
    return any(workspace.artifact_dir(run_id).glob("*.tflite"))


def require_untaken(workspace: Workspace, run_id: str) -> None:
    """Refuse to begin a training whose flatbuffers would take the place of another one's.

    Raises:
        QuarlError: There are flatbuffers under the run's id and no training, as in a clone of
            published results.
    """
    folder = workspace.artifact_dir(run_id)
    begun = (workspace.run_dir(run_id) / "run.json").exists()
    if not begun and any(folder.glob("*.tflite")):
        raise QuarlError(
            f"{folder} has what an earlier training was exported to, which is not here; work "
            f"elsewhere (--root DIR) or delete that folder. Received: run={run_id!r}"
        )


def copy_curve(workspace: Workspace, run_id: str) -> None:
    """Bring the run's learning curve to its flatbuffers, where the report looks for it."""
    name = "progress.csv"
    try:
        curve = (workspace.run_dir(run_id) / name).read_bytes()
    except FileNotFoundError:
        return  # The report says that there is none.
    copy = workspace.artifact_dir(run_id) / name
    if not copy.exists() or copy.read_bytes() != curve:
        write_bytes(copy, curve)


@contextlib.contextmanager
def locked(folder: Path, refusal: str) -> Iterator[None]:
    """Keep other processes out while the block runs; the lock ends with the process at the latest.

    Args:
        folder: What is locked, itself, without a file in it; made if it is not there.
        refusal: What to say where another process has the lock.

    Raises:
        QuarlError: Another process has the lock, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise QuarlError(refusal) from error
        except OSError:
            pass  # A file system that cannot lock folders, such as NFS: all go unlocked.
        yield
    finally:
        os.close(handle)


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


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with one header, whole or not at all."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, buffer.getvalue())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        QuarlError: The file is missing or damaged.
    """
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise QuarlError(f"There is no such file. Received: path={str(path)!r}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise QuarlError(
            f"{path} cannot be read as JSON ({error}); delete it and run again what made it. "
            f"Received: path={str(path)!r}"
        ) from error
    if not isinstance(value, dict):
        raise QuarlError(f"{path} holds no JSON object. Received: {type(value).__name__}")
    return value


def sha256(path: Path) -> str:
    """Hash a file's content.

    Raises:
        QuarlError: The file is missing, a folder or cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise QuarlError(f"There is no such file. Received: path={str(path)!r}") from None
    except OSError as error:
        raise QuarlError(
            f"{path} cannot be read ({error.strerror or error}); it must be a readable file. "
            f"Received: path={str(path)!r}"
        ) from error


@cache
def package_versions() -> dict[str, str]:
    """Return the versions of the packages that shape a result, those that are installed."""
    versions = {}
    for name in _RECORDED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


@cache
def source_digest() -> str:
    """Return what tells this code, and the packages and processor under it, from any other."""
    package = Path(__file__).parent
    files = sorted(path for path in package.rglob("*") if path.suffix in (".py", ".yaml"))
    found = {str(path.relative_to(package)): sha256(path) for path in files}
    return digest({**found, **package_versions(), "processor": processor.description()})


@cache
def source_commit() -> str | None:
    """Return the commit this code runs from, with `-dirty` for local changes; None if unknown."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
