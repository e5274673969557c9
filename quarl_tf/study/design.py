"""What a study is: cells, each in every seed and scheme, and the experiments they make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quarl_tf.spec import Quantization, Run, Scheme, default_schemes

#: What the report may draw returns in training against.
X_AXES = ("steps", "episodes")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One algorithm on one environment, in every seed and scheme.

    Attributes:
        given_env_id: Id of the environment as the file has it, which may be an old one.
        overrides: Values that take the place of the preset's.
        steps: Environment steps of a training.
        seeds: Seeds of the trainings.
        schemes: Names of what plain trainings are exported in, fp32 first.
        options: What the file says of how trainings are quantised, beside bits and delays.
        quantizations: Those of the quantisation-aware trainings.
        remark: What else the report should say of it.
        modules: Modules that register environments of the user's own.
        presets: A file of the user's presets.
        telling: What tells it from the study's other cells of the same algorithm and environment.
    """

    algo: str
    env_id: str
    given_env_id: str
    overrides: Mapping[str, Any]
    steps: int
    seeds: tuple[int, ...]
    schemes: tuple[str, ...]
    options: Mapping[str, Any]
    quantizations: tuple[Quantization, ...]
    remark: str = ""
    telling: str = ""
    modules: tuple[str, ...] = ()
    presets: str | None = None

    @property
    def task(self) -> str:
        """Return what is trained where, which several cells may share."""
        return f"{self.algo} on {self.env_id}"

    @property
    def title(self) -> str:
        """Return what readers know it by."""
        return f"{self.task} ({self.telling})" if self.telling else self.task

    def run(self, seed: int, quantization: Quantization | None) -> Run:
        """Return the training of a seed."""
        return Run(
            self.algo,
            self.env_id,
            seed,
            self.overrides,
            quantization,
            self.modules,
            self.presets,
        )

    def columns(self) -> list[tuple[Scheme, Quantization | None]]:
        """Return schemes, and how they are trained quantisation-aware; plain ones first."""
        plain = [(Scheme.parse(name), None) for name in self.schemes]
        aware = [(Scheme.parse(n), q) for q in self.quantizations for n in default_schemes(q)]
        return [*plain, *aware]


@dataclass(frozen=True, kw_only=True)
class Study:
    """What a study's file says, checked; read it with `read`.

    Attributes:
        name: Name of the report's folder.
        title: Heading of the report.
        episodes: Episodes of every evaluation that are reported.
        skip_episodes: Episodes in front of those, which something was chosen by.
        presets: A file of the user's presets, which go before the package's.
        modules: Modules that register environments of the user's own.
        memory: Whether the report tells the memory that the flatbuffers take.
        x: What the report draws returns in training against, one of `X_AXES`.
    """

    name: str
    title: str
    cells: tuple[Cell, ...]
    episodes: int
    skip_episodes: int = 0
    presets: Path | None = None
    modules: tuple[str, ...] = ()
    memory: bool = False
    x: str = X_AXES[0]

    def experiments(self) -> Iterator[Experiment]:
        """Yield every experiment; cells may share those of plain trainings, which come once."""
        seen = set()
        for cell in self.cells:
            for scheme, quantization in cell.columns():
                for seed in cell.seeds:
                    run = cell.run(seed, quantization)
                    key = run.run_id, scheme.name
                    if key not in seen:
                        seen.add(key)
                        yield Experiment(run, scheme)


@dataclass(frozen=True)
class Experiment:
    """One run in one scheme."""

    run: Run
    scheme: Scheme


def differing_settings(settings: Mapping[str, Any], alike: Iterable[Mapping[str, Any]]) -> str:
    """Write those of a cell's settings that are not the same in all cells that are alike."""
    others = list(alike)
    return ", ".join(
        f"{key}={value}"
        for key, value in settings.items()
        if any(one.get(key) != value for one in others)
    )
