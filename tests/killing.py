"""Kill trainings in the middle, as `kill -9` and a power cut do."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np

from quarl_tf.spec import Run
from quarl_tf.store.workspace import Workspace

_CHILD = """
import json, sys, time
from pathlib import Path
from quarl_tf.store.workspace import Workspace
from quarl_tf.spec import Run
from quarl_tf.training.loop import train

run = Run.from_dict(json.loads(sys.argv[2]))
# Slowed down, so that there is time to kill it.
train(Workspace(Path(sys.argv[1])), run, lambda *_: time.sleep(0.05))
"""


def train_and_kill(workspace: Workspace, run: Run) -> float:
    """Train in a process of its own, and kill it anywhere behind its first checkpoint.

    Returns:
        Seconds from the checkpoint to the kill: in a burst, a rollout or a file.
    """
    checkpoints = workspace.run_dir(run.run_id) / "checkpoints"
    delay = float(np.random.default_rng(time.time_ns()).uniform(0, 0.5))
    command = [sys.executable, "-c", _CHILD, str(workspace.root), json.dumps(run.to_dict())]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not any(checkpoints.glob("*.npz")):
            assert process.poll() is None, "the training ended before it could be killed"
            time.sleep(0.005)
        time.sleep(delay)
    finally:
        process.kill()
        process.wait()
    return delay
