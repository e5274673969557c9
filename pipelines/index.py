"""Write tflite_models/README.md, the shelf: what each policy earned and the command that plays it.

python pipelines/index.py
"""

from pathlib import Path

from quarl_tf.evaluation.shelf import Entry, shelf
from quarl_tf.foundation.files import write_text
from quarl_tf.spec import REFERENCE

_TITLE = """# Policies

Of each task, algorithm and scheme the run that did best on selection seeds. Mean returns of greedy
actions; errors against fp32, in percent of its return. Files that are not kept have their size in
brackets; their command makes them again, a training in another folder, DIR.

| task | algorithm | scheme | run | return | error | verdict | kB | µs | sha256 | command |
|---|---|---|---|--:|--:|---|--:|--:|---|---|
"""


def index(models: Path) -> Path:
    """Write the index of a folder of flatbuffers; return its path."""
    page = models / "README.md"
    rows = [f"| {' | '.join(_row(entry))} |\n" for entry in shelf(models)]
    write_text(page, _TITLE + "".join(rows))
    return page


def _row(entry: Entry) -> list[str]:
    sidecar, evaluation, comparison = entry.sidecar, entry.evaluation(), entry.comparison()
    latency = (evaluation.latency_us or {}).get("median") if evaluation else None
    error = comparison.reward_error_percent if comparison else None
    size = f"{sidecar.size_bytes / 1000:,.1f}"
    reference = sidecar.scheme == REFERENCE
    return [
        *(entry.run.env_id, entry.run.algo, sidecar.scheme, entry.artifact.parent.name),
        f"{comparison.returns.mean:,.1f}" if comparison else "",
        "" if error is None or reference else f"{error:z.2f}",
        "reference" if reference else comparison.verdict if comparison else "",
        size if entry.artifact.exists() else f"({size})",
        f"{latency:.1f}" if latency is not None and sidecar.native else "",
        f"`{sidecar.sha256[:12]}`",
        f"`{entry.command()}`",
    ]


if __name__ == "__main__":
    print(index(Path("tflite_models")))
