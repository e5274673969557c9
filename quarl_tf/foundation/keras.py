"""Load TensorFlow with Keras 2, which TF-Agents and tfmot need; import `tf` and `keras` from here.

All settings of the computation are made here, so that trainings by the command line and by Python
end with the same bytes.
"""

import atexit
import ctypes
import gc
import os
import sys

import numpy as np

from quarl_tf.foundation import native_output
from quarl_tf.foundation.errors import QuarlError

_XLA_FLAG = "--xla_disable_hlo_passes=tree_reduction_rewriter"


def _limit_blas() -> None:
    """Let NumPy multiply in one thread, which is faster for a few rows."""
    if "OPENBLAS_NUM_THREADS" in os.environ:
        return
    library = ctypes.CDLL(np.linalg._umath_linalg.__file__)
    for prefix in ("scipy_", ""):
        for suffix in ("64_", ""):
            set_threads = getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None)
            if set_threads is not None:
                set_threads(1)
                return


_version = getattr(sys.modules.get("keras"), "__version__", "2")
if not _version.startswith("2"):
    raise QuarlError(
        "Keras 3 is loaded already, as by TensorFlow, beside which Keras 2 cannot be chosen; set "
        "the environment variable TF_USE_LEGACY_KERAS=1 before they are imported. "
        f"Received: keras={_version}"
    )
# TensorFlow reads these when it is loaded or first computes.
os.environ["TF_USE_LEGACY_KERAS"] = "1"
# Its C++ logs do not help users; failures are exceptions.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# By default oneDNN's convolutions are used on processors newer than AVX2 only.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
# By default XLA sums large tensors in windows, without vector instructions.
_flags = os.environ.get("XLA_FLAGS", "").split()
if _XLA_FLAG not in _flags:
    os.environ["XLA_FLAGS"] = " ".join([_XLA_FLAG, *_flags])
# Kernels of GPUs add in another order each time.
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
_limit_blas()
# At exit the collector would search TensorFlow's graphs for seconds, to free what ends anyway.
atexit.register(gc.freeze)
_collects = gc.isenabled()
gc.disable()  # The collector never looks at what is loaded here.
try:
    with native_output.caught():
        import tensorflow as tf
        import tf_keras as keras

        tf.config.list_logical_devices()  # The first use of TensorFlow prints on devices.
except ModuleNotFoundError as error:
    raise QuarlError(
        "Training and export need TensorFlow, which evaluation and reports do without; install "
        f"the rest in the folder of quarl_tf: pip install '.[train]'. Received: {error}"
    ) from error
finally:
    gc.freeze()
    if _collects:
        gc.enable()

_PROCESS = os.getpid()


def require_unforked() -> None:
    """Raise a QuarlError in a fork of the process that loaded TensorFlow, where it would hang."""
    if os.getpid() != _PROCESS:
        raise QuarlError(
            "TensorFlow does not survive a fork; start processes by "
            "multiprocessing.get_context('spawn'). Received: a fork of a process that has loaded it"
        )


__all__ = ["keras", "require_unforked", "tf"]
