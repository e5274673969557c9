"""What trainings of a study share that differ only behind the delay, as by their bits.

The first of them leaves its last checkpoint before the delay, its trunk, and the others go on from
there, to the same bytes as if each had been trained from its start.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from quarl_tf import presets
from quarl_tf.foundation import provenance
from quarl_tf.foundation.files import digest
from quarl_tf.presets import Preset
from quarl_tf.spec import Run


def trunk_path(folder: Path, run: Run, preset: Preset) -> Path | None:
    """Return the file of a training's trunk; None if it has none.

    Trainings by the same code share it whose settings are the same but for the bits, with what
    follows from them, and for the gradient through what is quantised.
    """
    if run.quantization is None or run.quantization.schedule.learned_steps:
        return None  # Which steps are learned depends on the bits.
    shared = presets.settings(run, asdict(preset))
    schedule = run.quantization.schedule
    shared = {name: v for name, v in shared.items() if not name.startswith("quantization.")}
    shared["quantization"] = [schedule.delay, schedule.ranges]
    training = run.algo, run.env_id, run.seed, provenance.source_digest()
    return folder / f"{digest({**shared, 'training': training})}.npz"
