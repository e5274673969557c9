"""Published flatbuffers do today what their records say."""

import hashlib
from pathlib import Path

import pytest

from quarl_tf.evaluation.play import evaluate
from quarl_tf.export.ptq import quantized
from quarl_tf.runtime import POLICIES
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import REFERENCE, Scheme
from quarl_tf.store.records import Evaluation, Sidecar
from quarl_tf.store.workspace import Workspace, evaluation_path, sidecar_path

WORKSPACE = Workspace(Path(__file__).parents[2])

#: What is kept of each run; of others the hash is enough.
KEPT = {REFERENCE, "int8", "qat_int8", *(f"qat_w{bits}a{bits}" for bits in (8, 4, 2))}

#: Larger files need not be kept.
LARGE = 4_000_000


@pytest.mark.parametrize(
    "path", sorted(POLICIES.rglob("*.tflite")), ids=lambda path: path.parent.parent.name
)
def test_policies_of_the_package_earn_their_recorded_returns(path: Path) -> None:
    sidecar = Policy.load(path).sidecar
    published = WORKSPACE.artifact(sidecar.run_id, sidecar.scheme)
    assert Sidecar.load(sidecar_path(published)).sha256 == sidecar.sha256
    recorded = Evaluation.load(evaluation_path(published))
    played = evaluate(path, recorded.seeds[:5])
    assert (played.returns, played.lengths) == (recorded.returns[:5], recorded.lengths[:5])


def test_what_is_kept_is_there_and_what_is_made_again_has_its_hash() -> None:
    models = WORKSPACE.root / "tflite_models"
    records = [p for p in models.rglob("*.json") if not p.name.endswith(".eval.json")]
    assert records
    for path in records:
        sidecar, reference = Sidecar.load(path), path.with_name(f"{REFERENCE}.tflite")
        scheme, kept = Scheme.parse(sidecar.scheme), path.with_suffix(".tflite").exists()
        if scheme.rounding is not None and reference.exists():
            made = quantized(reference.read_bytes(), scheme)
            assert kept or hashlib.sha256(made).hexdigest() == sidecar.sha256, path
        elif sidecar.scheme in KEPT:
            assert kept or sidecar.size_bytes > LARGE, path
