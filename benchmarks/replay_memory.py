"""Measure the memory of a DQN training on Pong whose replay is full.

Prints the largest resident size, and the part of it that is the process' own rather than mapped
from files (TensorFlow's libraries, mostly), which other processes share. The training fills its
replay before it learns a few bursts, evaluates and writes a checkpoint. Linux only.

    python benchmarks/replay_memory.py --json benchmarks/replay_memory.json
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from pathlib import Path
from typing import Any

from quarl_tf.foundation import provenance
from quarl_tf.foundation.files import write_json
from quarl_tf.spec import Run
from quarl_tf.store.workspace import Workspace
from quarl_tf.training import loop

_STATUS = Path("/proc/self/status")
_SECONDS_BETWEEN = 0.05

_FRAMES = 100_000


def status_mib(name: str) -> float:
    """Return a field of this process' status, in MiB."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return float(line.split()[1]) / 1024


class Peak(threading.Thread):
    """Watches the largest memory that is the process' own, which the kernel keeps no record of."""

    def __init__(self) -> None:
        """Start at nothing."""
        super().__init__(daemon=True)
        self.own = 0.0
        self.ended = threading.Event()

    def run(self) -> None:
        """Look until ended."""
        while not self.ended.wait(_SECONDS_BETWEEN):
            self.own = max(self.own, status_mib("RssAnon"))


def measure() -> dict[str, Any]:
    """Train until the replay is full and a little longer; return MiB by name, and the precision."""
    slow = provenance.lacks_bfloat16(provenance.processor())
    overrides = {
        "precision": "float32" if slow else "bfloat16",
        "buffer_size": _FRAMES,
        "learning_starts": _FRAMES - 100,
        "steps": _FRAMES + 1000,
        "checkpoint_every": _FRAMES + 500,
    }
    run = Run("dqn", "PongNoFrameskip-v4", 0, overrides)
    peak = Peak()
    peak.start()
    with tempfile.TemporaryDirectory() as folder:
        loop.train(Workspace(Path(folder)), run, lambda *_: None)
    peak.ended.set()
    found = {"frames": _FRAMES, "resident MiB": status_mib("VmHWM"), "own MiB": peak.own}
    return found | {"precision": overrides["precision"]}


def main() -> None:
    """Print the figures; with `--json`, write them with what they were measured on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = measure()
    for name, value in found.items():
        print(f"{name:>14}: {value if isinstance(value, str) else f'{value:,.0f}'}")
    if args.json:
        made_by = {
            "versions": provenance.package_versions(),
            "commit": provenance.source_commit(),
            "processor": provenance.processor(),
        }
        write_json(args.json, {**found, **made_by})


if __name__ == "__main__":
    main()
