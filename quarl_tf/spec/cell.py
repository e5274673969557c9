"""Trainings that are compared with each other, as plain data."""

from dataclasses import dataclass

from quarl_tf.spec.run import Run
from quarl_tf.spec.scheme import Scheme


@dataclass(frozen=True)
class Column:
    """One scheme of a cell, with one training for each seed."""

    label: str
    scheme: Scheme
    runs: tuple[Run, ...]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Columns over the same seeds, fp32 first, with which all others are compared."""

    columns: tuple[Column, ...]
    distinction: str = ""  #: What differs from other cells of the same algorithm and environment.
    remark: str = ""

    @property
    def references(self) -> tuple[Run, ...]:
        """Return the trainings of fp32, one for each seed."""
        return self.columns[0].runs

    @property
    def task(self) -> str:
        """Return the algorithm and the environment."""
        return f"{self.references[0].algo} on {self.references[0].env_id}"

    @property
    def title(self) -> str:
        """Return the task and the distinction."""
        return f"{self.task} ({self.distinction})" if self.distinction else self.task
