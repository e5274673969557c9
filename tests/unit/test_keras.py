"""Importing the package changes nothing; loading TensorFlow makes all its settings."""

from samples import python, refused

from quarl_tf.foundation import device
from quarl_tf.foundation.errors import UsageError


def run(code: str) -> str:
    done = python(code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_sets_nothing() -> None:
    code = "import os; kept = dict(os.environ); import quarl_tf; print(dict(os.environ) == kept)"
    assert run(code) == "True\n"


def test_keras_3_is_refused_in_one_line() -> None:
    code = """
import sys, types
sys.modules["keras"] = types.SimpleNamespace(__version__="3.9.1")
try:
    import quarl_tf.foundation.keras
except ValueError as error:
    print(error)
"""
    (line,) = run(code).splitlines()
    assert line.endswith("Received: keras=3.9.1")


def test_all_is_set_after_numpy_for_the_device_that_was_chosen_first() -> None:
    assert refused(device.use, "tpu", error=UsageError).endswith("Received: device='tpu'")
    code = """
import os
os.environ.pop("OPENBLAS_NUM_THREADS", None)
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
import ctypes, numpy
from quarl_tf.foundation import device
device.use("cpu")
from quarl_tf.foundation.keras import tf
library = ctypes.CDLL(numpy.linalg._umath_linalg.__file__)
threads = getattr(library, "scipy_openblas_get_num_threads64_", lambda: 1)
print(threads(), os.environ["CUDA_VISIBLE_DEVICES"], tf.config.list_physical_devices("GPU"))
try:
    device.use("gpu")
except ValueError as error:
    print(error)
"""
    *_, found, line = run(code).splitlines()
    assert found == "1 -1 []"
    assert line.endswith("Received: device='gpu'")
