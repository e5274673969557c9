"""The shelf: for each task, algorithm and scheme the policy with the best selection return.

A shelf is a folder of flatbuffers by environment, algorithm and run, such as `tflite_models/`.
"""

import contextlib
import csv
import math
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from quarl_tf.evaluation.compare import Comparison, compare_saved
from quarl_tf.foundation.errors import QuarlError, unknown
from quarl_tf.foundation.files import sha256, write_bytes
from quarl_tf.runtime import POLICIES
from quarl_tf.spec import REFERENCE, Run, Scheme
from quarl_tf.store.records import Evaluation, Sidecar
from quarl_tf.store.workspace import evaluation_path, has_sidecar, sidecar_path, write_artifact


@dataclass(frozen=True)
class Entry:
    """A policy on the shelf; its sidecar exists even if its file is not kept."""

    artifact: Path
    sidecar: Sidecar
    run: Run

    @property
    def name(self) -> str:
        """Its name: task, algorithm and scheme."""
        return "/".join((self.run.env_id, self.run.algo, self.sidecar.scheme))

    def evaluation(self) -> Evaluation | None:
        """Return its greedy evaluation, if there is one of this flatbuffer."""
        path = evaluation_path(self.artifact)
        evaluation = Evaluation.load(path) if path.exists() else None
        valid = evaluation and evaluation.artifact_sha256 == self.sidecar.sha256
        return evaluation if valid else None

    def comparison(self) -> Comparison | None:
        """Compare it with its fp32, if both played the same episodes by the same rules."""
        return compare_saved(self.artifact, self.sidecar)

    def command(self) -> str:
        """Return the command that plays it or, if the file is not kept, makes it."""
        scheme = Scheme.parse(self.sidecar.scheme)
        if self.artifact.exists():
            return f"quarl evaluate {self.name}"
        reference = self.artifact.with_name(f"{REFERENCE}.tflite")
        if reference.exists() and scheme.post_training:
            return f"quarl quantize {reference} --scheme {scheme.name}"
        return f"{self.run.command('run')} --schemes {scheme.name}"


def entries(models: Path) -> list[Entry]:
    """Return all policies of a folder, by name, the best on selection seeds first."""
    policies = []
    for path in sorted(models.glob("*/*/*/*.json")):
        if path.name.endswith(".eval.json") or not has_sidecar(path):
            continue
        sidecar = Sidecar.load(path)
        policies.append(Entry(path.with_suffix(".tflite"), sidecar, Run.from_dict(sidecar.run)))
    scores = {entry.artifact.parent: _selection_return(entry) for entry in policies}
    return sorted(policies, key=lambda entry: (entry.name, -scores[entry.artifact.parent]))


def shelf(models: Path) -> list[Entry]:
    """Return one policy for each task, algorithm and scheme: the best on selection seeds."""
    groups = groupby(entries(models), key=lambda entry: entry.name)
    return [next(group) for _, group in groups]


def available(models: Path) -> list[Entry]:
    """Return the policies of a folder and of the package whose files are kept."""
    return [entry for _, entry in sorted(_by_name(models).items()) if entry.artifact.exists()]


def _by_name(models: Path) -> dict[str, Entry]:
    return {entry.name: entry for folder in (POLICIES, models) for entry in shelf(folder)}


def find(name: str, models: Path) -> Entry:
    """Find a policy of the shelf `models` or of the package; a QuarlError if its file is not kept.

    Its name is such as CartPole-v1/dqn/int8: task, algorithm and scheme.
    """
    policies = _by_name(models)
    if name not in policies:
        raise unknown("policy on the shelf", name, policies)
    entry = policies[name]
    if not entry.artifact.exists():
        raise QuarlError(
            f"The file of {name} is not kept; `{entry.command()}` makes it. "
            f"Received: {entry.artifact}"
        )
    return entry


def take(name: str, models: Path, default: Path) -> Path:
    """Return the flatbuffer of a name, beside which results can be written.

    A policy of the package that the shelf `models` lacks is copied to `default`, with the
    evaluation of its fp32. Errors are those of `find`.
    """
    entry = find(name, models)
    if not entry.artifact.is_relative_to(POLICIES):
        return entry.artifact
    target = default / entry.artifact.relative_to(POLICIES)
    if target.exists() and sha256(target) != entry.sidecar.sha256:
        raise QuarlError(
            f"{name} of the package would replace another file; work in another folder. "
            f"Received: {target}"
        )
    if not (target.exists() and sidecar_path(target).exists()):
        write_artifact(target, entry.artifact.read_bytes(), entry.sidecar)
    if not target.with_name(f"{REFERENCE}.tflite").exists():
        # An fp32 of the user's own keeps its evaluation.
        source = evaluation_path(entry.artifact.with_name(f"{REFERENCE}.tflite"))
        copy = default / source.relative_to(POLICIES)
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            write_bytes(copy, source.read_bytes())
    return target


def _selection_return(entry: Entry) -> float:
    """Return the highest greedy return on selection seeds in the curve beside a file.

    Up to the delay it was another network.
    """
    path, quantization = entry.artifact.with_name("progress.csv"), entry.run.quantization
    delay = 0 if quantization is None else quantization.delay
    returns = [-math.inf]
    # Missing, not a learning curve, or cut off.
    with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
        rows = csv.DictReader(path.read_text().splitlines())
        greedy_returns = (row["greedy_return"] for row in rows if int(row["step"]) > delay)
        returns += [float(value) for value in greedy_returns if value]
    return max(returns)
