"""The shelf: for each task, algorithm and scheme the policy with the best selection return.

A shelf is a folder of flatbuffers by environment, algorithm and run, such as `tflite_models/`.
"""

import contextlib
import csv
import glob
import math
from itertools import groupby
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import NamedTuple, Self

from quarl_tf.evaluation.compare import Comparison, compare
from quarl_tf.foundation.errors import QuarlError, UsageError, unknown
from quarl_tf.foundation.files import sha256, write_bytes
from quarl_tf.runtime import POLICIES
from quarl_tf.spec import ADOPTED, DEFAULT_MARGIN_PERCENT, GREEDY, REFERENCE, Chance, Run
from quarl_tf.store.records import Evaluation, Sidecar
from quarl_tf.store.state import sources
from quarl_tf.store.workspace import (
    evaluation_path,
    has_sidecar,
    reference_path,
    sidecar_path,
    write_artifact,
)

#: The pattern of all names.
_ANY = "*/*/*"


class Outcome(NamedTuple):
    """What an evaluation tells, None where it is unknown.

    Compared with fp32, returns are means over the episodes that both played.
    """

    episodes: int | None = None
    mean_return: float | None = None
    reference_mean: float | None = None
    error_percent: float | None = None
    verdict: str | None = None


class Entry(NamedTuple):
    """A policy on the shelf; its sidecar exists even if its file is not kept."""

    artifact: Path
    sidecar: Sidecar
    run: Run

    @classmethod
    def load(cls, artifact: Path) -> Self:
        """Load its sidecar; a QuarlError where that is missing or damaged."""
        sidecar = Sidecar.load(sidecar_path(artifact))
        return cls(artifact, sidecar, Run.from_dict(sidecar.run))

    @property
    def name(self) -> str:
        """Its name: the folders of its task and algorithm, and its scheme."""
        return _name(self.artifact)

    def evaluation(self, chance: Chance = GREEDY) -> Evaluation | None:
        """Return its evaluation, if there is one of this flatbuffer."""
        path = evaluation_path(self.artifact, chance)
        evaluation = Evaluation.load(path) if path.exists() else None
        valid = evaluation and evaluation.artifact_sha256 == self.sidecar.sha256
        return evaluation if valid else None

    def comparison(
        self,
        margin_percent: float = DEFAULT_MARGIN_PERCENT,
        chance: Chance = GREEDY,
        episodes: int | None = None,
    ) -> Comparison | None:
        """Compare it with its fp32 by the first episodes of both; None if those differ."""
        fp32, scheme = reference_path(self.artifact, self.sidecar), self.evaluation(chance)
        path, fp32_sidecar = evaluation_path(fp32, chance), sidecar_path(fp32)
        if scheme is None or not path.exists():
            return None
        reference = Evaluation.load(path)
        if (reference.scheme, reference.run_id) != (REFERENCE, self.run.plain.run_id):
            return None
        # The fp32 that this one was compared with, that is here, or (adopted) that it was made of.
        known = {scheme.reference_sha256} - {None}
        known |= {Sidecar.load(fp32_sidecar).sha256} if fp32_sidecar.exists() else set()
        known |= {self.sidecar.network_sha256} if self.run.adopted else set()
        if known - {reference.artifact_sha256}:
            return None
        count = min(len(scheme.seeds), len(reference.seeds), episodes or len(scheme.seeds))
        pair = reference.first(count), scheme.first(count)
        played = [(one.seeds, one.protocol) for one in pair]
        alike = played[0] == played[1] and scheme.shares_environment(reference)
        return compare(*pair, None, margin_percent) if alike else None

    def outcome(self) -> Outcome:
        """Return what its greedy evaluation tells."""
        evaluation, is_reference = self.evaluation(), self.sidecar.scheme == REFERENCE
        if evaluation is None:
            return Outcome()
        comparison = None
        if not is_reference:
            with contextlib.suppress(QuarlError):  # A damaged evaluation of fp32.
                comparison = self.comparison()
        if comparison is None:
            verdict = "reference" if is_reference else None
            return Outcome(len(evaluation.seeds), fmean(evaluation.returns), verdict=verdict)
        return Outcome(
            comparison.episodes,
            comparison.returns.mean,
            comparison.reference_mean,
            comparison.reward_error_percent,
            comparison.verdict,
        )

    def command(self) -> str:
        """Return the command that plays it or, if the file is not kept, makes it."""
        if self.artifact.exists():
            # Several adopted policies may have its name.
            name = quote(str(self.artifact)) if self.run.adopted else self.name
            return f"quarl evaluate {name}{self.run.imports}"
        if (made := quantised_by(self.artifact, self.run)) is not None:
            return made
        return self.run.commands(self.sidecar.scheme)


def quantised_by(artifact: Path, run: Run) -> str | None:
    """Return the command that makes a flatbuffer of a float one beside it, if there is one."""
    if not (found := sources(artifact)):
        return None
    command = f"quarl quantize {quote(str(found[0]))} --scheme {artifact.stem}"
    with contextlib.suppress(QuarlError):
        if "recorded_sha256" in Sidecar.load(sidecar_path(artifact)).check:
            command += " --observations FILE"
    return command + run.imports


def entries(models: Path, name: str = _ANY) -> list[Entry]:
    """Return the policies of a folder by name, first those that are kept, the best of them first.

    That is the one of the best selection return. A QuarlError where a sidecar is damaged.
    """
    *folders, scheme = name.split("/")
    policies = [
        Entry.load(path.with_suffix(".tflite"))
        for path in sorted(models.glob("/".join([*folders, "*", f"{scheme}.json"])))
        if not path.name.endswith(".eval.json") and has_sidecar(path)
    ]
    policies.sort(key=_selection_returns, reverse=True)
    return sorted(policies, key=lambda entry: (entry.name, not entry.artifact.exists()))


def _name(artifact: Path) -> str:
    return "/".join([*artifact.parts[-4:-2], artifact.stem])


def shelf(models: Path, name: str = _ANY) -> list[Entry]:
    """Return one policy for each task, algorithm and scheme: the first of its `entries`."""
    groups = groupby(entries(models, name), key=lambda entry: entry.name)
    return [next(group) for _, group in groups]


def available(models: Path) -> list[Entry]:
    """Return the policies of each name of a folder and of the package whose file is kept.

    There is one of each name, the best, but for adopted ones, of which none is known to be.
    """
    policies = []
    for name in _names(models):
        with contextlib.suppress(QuarlError):
            policies += _candidates(name, models)
    return policies


def _names(models: Path) -> list[str]:
    paths = [path for folder in (POLICIES, models) for path in folder.glob(f"{_ANY}/*.tflite")]
    return sorted({_name(path) for path in paths if sidecar_path(path).exists()})


def find(name: str, models: Path) -> Entry:
    """Find a policy of the shelf `models` or of the package; a QuarlError if its file is not kept.

    Its name is such as CartPole-v1/dqn/int8: task, algorithm and scheme. A UsageError where several
    adopted policies have it, of which none is known to be the best.
    """
    policies = _candidates(name, models)
    if len(policies) > 1:
        raise UsageError(
            f"{name} is the name of {len(policies)} adopted policies; give the path of one. "
            f"Received: {', '.join(str(entry.artifact) for entry in policies)}"
        )
    return policies[0]


def _candidates(name: str, models: Path) -> list[Entry]:
    """Return the best policy of a name, or all adopted ones; a QuarlError if no file is kept."""
    pattern = glob.escape(name)
    if name.split("/")[1:2] == [ADOPTED]:
        kept = [entry for entry in entries(models, pattern) if entry.artifact.exists()]
        if kept:
            return kept
    found = [entry for folder in (models, POLICIES) for entry in shelf(folder, pattern)]
    if not found:
        # The repository's shelf has an index.
        is_whole = (models / "README.md").exists()
        hint = "" if is_whole else "The repository has more policies; work in its folder."
        raise unknown("policy on the shelf", name, _names(models), hint)
    entry = next((entry for entry in found if entry.artifact.exists()), found[0])
    if not entry.artifact.exists():
        raise QuarlError(
            f"The file of {name} is not kept; `{entry.command()}` makes it. "
            f"Received: {entry.artifact}"
        )
    return [entry]


def take(name: str, models: Path) -> Path:
    """Return the flatbuffer of a name, beside which results can be written.

    A policy of the package that the shelf `models` lacks is copied there, with the evaluation of
    its fp32. Errors are those of `find`.
    """
    entry = find(name, models)
    if not entry.artifact.is_relative_to(POLICIES):
        return entry.artifact
    target = models / entry.artifact.relative_to(POLICIES)
    others = entries(models, f"{glob.escape(name.rpartition('/')[0])}/*")
    networks = {o.sidecar.network_sha256 for o in others if o.artifact.parent == target.parent}
    if (target.exists() and sha256(target) != entry.sidecar.sha256) or (
        networks - {entry.sidecar.network_sha256}
    ):
        raise QuarlError(
            f"{name} of the package would be among the files of another training; work in another "
            f"folder. Received: {target.parent}"
        )
    if not (target.exists() and sidecar_path(target).exists()):
        write_artifact(target, entry.artifact.read_bytes(), entry.sidecar)
    if not target.with_name(f"{REFERENCE}.tflite").exists():
        # An fp32 of the user's own keeps its evaluation.
        source = evaluation_path(entry.artifact.with_name(f"{REFERENCE}.tflite"))
        copy = models / source.relative_to(POLICIES)
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            write_bytes(copy, source.read_bytes())
    return target


def _selection_returns(entry: Entry) -> tuple[float, float]:
    """Return the highest and the mean greedy return on selection seeds in the curve beside a file.

    Of equally good networks, that of the steadier training comes first.
    """
    path, first = entry.artifact.with_name("progress.csv"), entry.sidecar.quantized_from
    # Missing, not a learning curve, or cut off.
    with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
        rows = csv.DictReader(path.read_text().splitlines())
        greedy_returns = (row["greedy_return"] for row in rows if int(row["step"]) >= first)
        returns = [float(value) for value in greedy_returns if value]
        return max(returns), fmean(returns)
    return -math.inf, -math.inf
