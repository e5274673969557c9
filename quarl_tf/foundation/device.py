"""The device of trainings: the CPU, unless a GPU is chosen before TensorFlow is loaded."""

import sys

from quarl_tf.foundation.errors import UsageError, unknown

DEVICES = ("cpu", "gpu")


def use(device: str) -> None:
    """Choose "cpu" or "gpu" (experimental) for this process, or raise a UsageError."""
    global _chosen  # noqa: PLW0603
    if device not in DEVICES:
        raise unknown("device", device, DEVICES)
    if device != _chosen and "quarl_tf.foundation.keras" in sys.modules:
        raise UsageError(
            f"TensorFlow is loaded already; choose in a new process. Received: device={device!r}"
        )
    _chosen = device


def chosen() -> str:
    """Return the device in use."""
    return _chosen


_chosen = "cpu"
