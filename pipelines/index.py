"""Write tflite_models/README.md: each policy, what it earned, and the command that plays it.

python pipelines/index.py
"""

from __future__ import annotations

import statistics
from pathlib import Path

from quarl_tf.evaluation.compare import reward_error
from quarl_tf.foundation.files import read_json, write_text
from quarl_tf.spec import REFERENCE, Run, Scheme
from quarl_tf.store.records import Evaluation, Sidecar
from quarl_tf.store.workspace import evaluation_path, reference_path

_TITLE = """# Policies

Mean returns of greedy actions; errors against fp32, in percent of its return. Sizes of files that
are not kept here are in brackets; their command makes them.

| task | algorithm | run | scheme | return | error | kB | command |
|---|---|---|---|---:|---:|---:|---|
"""


def index(models: Path) -> Path:
    """Write the index of a folder of flatbuffers; return its path."""
    sidecars = [path for path in models.rglob("*.json") if "weight_dtypes" in read_json(path)]
    rows = [_row(path.with_suffix(".tflite"), Sidecar.load(path)) for path in sorted(sidecars)]
    page = models / "README.md"
    write_text(page, _TITLE + "".join(f"| {' | '.join(row)} |\n" for row in rows))
    return page


def _row(artifact: Path, sidecar: Sidecar) -> list[str]:
    run = Run.from_dict(sidecar.run)
    mean, reference = _mean(artifact), _mean(reference_path(artifact, sidecar))
    error = None if mean is None or reference is None else reward_error(reference, mean)
    size = f"{sidecar.size_bytes / 1000:,.1f}"
    return [
        *(run.env_id, run.algo, artifact.parent.name, sidecar.scheme),
        "" if mean is None else f"{mean:,.1f}",
        "" if error is None else f"{error:z.1f}",
        size if artifact.exists() else f"({size})",
        f"`{_command(artifact, run, sidecar.scheme)}`",
    ]


def _mean(artifact: Path) -> float | None:
    path = evaluation_path(artifact)
    return statistics.fmean(Evaluation.load(path).returns) if path.exists() else None


def _command(artifact: Path, run: Run, scheme: str) -> str:
    reference = artifact.with_name(f"{REFERENCE}.tflite")
    if artifact.exists():
        return f"quarl evaluate {artifact}"
    parsed = Scheme.parse(scheme)
    if reference.exists() and parsed.rounding and not parsed.single_layers:
        return f"quarl quantize {reference} --scheme {scheme}"
    return f"{run.command('run')} --schemes {scheme}"


if __name__ == "__main__":
    print(index(Path("tflite_models")))
