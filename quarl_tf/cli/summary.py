"""Sum up evaluations for the terminal, and hold them to a gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from quarl_tf.evaluation.compare import Comparison, Interval, compare, mean_return
from quarl_tf.foundation.errors import GateError
from quarl_tf.spec import REFERENCE, Run
from quarl_tf.store.records import Evaluation, Sidecar
from quarl_tf.store.workspace import evaluation_path, reference_path, sidecar_path


@dataclass(frozen=True)
class Summary:
    """What evaluated flatbuffers earn beside their run's fp32, as asked for on the command line."""

    #: As if only these many episodes had been played.
    episodes: int
    #: Loss that does not matter, in percent of the fp32 return.
    margin_percent: float
    #: Whether by sampled actions instead of greedy ones.
    sample: bool

    def table(self, artifacts: Sequence[Path], *, narrow: bool) -> Table:
        """Return a table of flatbuffers in one folder; a narrow one has no intervals."""
        run_id = Sidecar.load(sidecar_path(artifacts[0])).run_id
        title = f"{escape(run_id)}: {self.episodes} episodes, the same for every scheme"
        title += ", sampled actions" if self.sample else ""
        table = Table(title=title, title_justify="left")
        call = "sample µs" if self.sample else "act µs"
        wide = ("scheme", "bytes", call, "return", "[95 %]", "error", "difference [95 %]")
        for column in (*(one for one in wide if not (narrow and "[95 %]" in one)), "verdict"):
            named = column in ("scheme", "verdict")
            table.add_column(column, justify="left" if named else "right", no_wrap=True)
        for path in artifacts:
            table.add_row(*self._row(path, narrow))
        return table

    def _row(self, artifact: Path, narrow: bool) -> list[str]:
        sidecar = Sidecar.load(sidecar_path(artifact))
        evaluation = self._evaluation(artifact)
        latency = (evaluation.latency_us or {}).get("median")
        comparison = self._comparison(artifact)
        returns = comparison.returns if comparison else mean_return(evaluation)
        error, difference, verdict = _comparison_texts(comparison)
        return [
            sidecar.scheme,
            f"{sidecar.size_bytes:,}" if sidecar.native else "simulated",
            f"{latency:.1f}" if latency is not None and sidecar.native else "",
            f"{returns.mean:.2f}",
            *([] if narrow else [_limits_text(returns)]),
            error,
            *([] if narrow else [difference]),
            verdict,
        ]

    def hold(self, artifacts: Sequence[Path], gate_percent: float) -> None:
        """Refuse flatbuffers that lose more than a share of the fp32 return.

        Raises:
            GateError: A reward error is larger than allowed, or cannot be told.
        """
        failing = []
        for path in artifacts:
            comparison = self._comparison(path)
            if comparison is None:
                run = Run.from_dict(Sidecar.load(sidecar_path(path)).run).plain
                raise GateError(
                    "There is no fp32 result on the same seeds, by the same rules, to compare the "
                    f"file with; export fp32 too (quarl export {run.run_id} --schemes {REFERENCE}) "
                    f"and evaluate again. Received: {path}"
                )
            error = comparison.reward_error
            if error is None or error > gate_percent:
                text = "undefined, fp32 earns 0" if error is None else f"{error:.2f} %"
                failing.append(f"{path.stem} {text}")
        if failing:
            raise GateError(
                f"Some schemes lose more than the gate of {gate_percent:g} % reward error allows. "
                f"Received: {', '.join(failing)}"
            )

    def _comparison(self, artifact: Path) -> Comparison | None:
        """Compare with the run's fp32, if that played the same episodes by the same rules."""
        fp32 = reference_of(artifact)
        if not evaluation_path(fp32, sample=self.sample).exists():
            return None
        evaluation, reference = self._evaluation(artifact), self._evaluation(fp32)
        if (reference.seeds, reference.protocol) != (evaluation.seeds, evaluation.protocol):
            return None
        return compare(reference, evaluation, None, self.margin_percent)

    def _evaluation(self, artifact: Path) -> Evaluation:
        path = evaluation_path(artifact, sample=self.sample)
        return Evaluation.load(path).first(self.episodes)


def reference_of(artifact: Path) -> Path:
    """Return the fp32 flatbuffer that one is compared with, by its sidecar."""
    return reference_path(artifact, Sidecar.load(sidecar_path(artifact)))


def _comparison_texts(comparison: Comparison | None) -> tuple[str, str, str]:
    if comparison is None:
        return "", "", "no fp32 to compare with"
    if comparison.scheme == REFERENCE:
        return "", "", "reference"
    error = comparison.reward_error
    return (
        "undefined" if error is None else f"{error:+.2f} %",
        f"{comparison.difference.mean:+.2f} {_limits_text(comparison.difference, sign='+')}",
        comparison.verdict,
    )


def _limits_text(interval: Interval, sign: str = "") -> str:
    ends = f"[{interval.low:{sign}.2f}, {interval.high:{sign}.2f}]"
    return ends if interval.bounded else ""
