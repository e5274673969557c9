"""Write tflite_models/README.md, the shelf: what each policy earned and the command that plays it.

python pipelines/index.py
"""

from pathlib import Path

from quarl_tf.evaluation.shelf import Entry, shelf
from quarl_tf.foundation.files import write_text

_TITLE = """# Policies

Of each task, algorithm and scheme the run that did best on selection seeds, of those whose file is
kept, if any. Mean returns of greedy actions over so many episodes, and of the fp32 of the same run
in these episodes; errors in percent of that. Verdicts are of this one run; those over several
trainings, with intervals, stand in the reports. Files that are not kept have their size in
brackets; their command makes them again, a training in another folder, DIR.

|task|algorithm|scheme|run|episodes|return|fp32|error|verdict|kB|sha256|command|
|---|---|---|---|--:|--:|--:|--:|---|--:|---|---|
"""


def index(models: Path) -> Path:
    """Write the index of a folder of flatbuffers; return its path."""
    page = models / "README.md"
    rows = [f"| {' | '.join(_row(entry))} |\n" for entry in shelf(models)]
    write_text(page, _TITLE + "".join(rows))
    return page


def _row(entry: Entry) -> list[str]:
    sidecar, outcome = entry.sidecar, entry.outcome()
    size = f"{sidecar.size_bytes / 1000:,.1f}" if sidecar.native else "simulated"
    return [
        *(entry.run.env_id, entry.run.algo, sidecar.scheme, entry.artifact.parent.name),
        _number(outcome.episodes, ","),
        _number(outcome.mean_return, ",.1f"),
        _number(outcome.reference_mean, ",.1f"),
        _number(outcome.error_percent, "z.2f"),
        outcome.verdict or "",
        size if entry.artifact.exists() or not sidecar.native else f"({size})",
        f"`{sidecar.sha256[:12]}`",
        f"`{entry.command()}`",
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


if __name__ == "__main__":
    print(index(Path("tflite_models")))
