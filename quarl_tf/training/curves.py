"""Curves of a training, as `progress.csv` and for TensorBoard."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.files import write_csv
from quarl_tf.foundation.keras import tf


class Progress:
    """Keeps one row per point of the curves, and writes the files with each new row."""

    def __init__(self, folder: Path) -> None:
        self.rows: list[dict[str, Any]] = []
        self._folder = folder
        self._writer: Any = None

    def start(self, rows: Sequence[dict[str, Any]]) -> None:
        """Rewrite TensorBoard's curves: a killed training may have gone further."""
        self.rows = [*rows]
        board = self._folder / "tensorboard"
        for stale in board.glob("*"):
            stale.unlink()
        self._writer = tf.summary.create_file_writer(str(board))
        for row in self.rows:
            self._to_board(row)

    def log(self, row: dict[str, Any]) -> None:
        """Add a row: its `step` and values by name, None if missing."""
        self.rows.append(row)
        self._to_board(row)
        write_csv(self._folder / "progress.csv", self.rows)

    def _to_board(self, row: Mapping[str, Any]) -> None:
        try:
            with self._writer.as_default(step=row["step"]):
                for name, value in row.items():
                    if name != "step" and value is not None:
                        tf.summary.scalar(name, value)
            self._writer.flush()
        except tf.errors.OpError as error:
            raise QuarlError(
                f"The TensorBoard curves cannot be written ({error.message}); free some space and "
                f"run the same command again. Received: path={str(self._folder)!r}"
            ) from error
