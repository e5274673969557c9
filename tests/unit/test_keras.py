"""Importing the package changes nothing; loading TensorFlow makes all its settings."""

from samples import python


def run(code: str) -> str:
    process = python(code)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_importing_the_package_sets_nothing() -> None:
    code = "import os; old = dict(os.environ); import quarl_tf; print(dict(os.environ) == old)"
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


def test_all_is_set_after_numpy() -> None:
    code = """
import os
os.environ.pop("OPENBLAS_NUM_THREADS", None)
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
import ctypes, numpy
from quarl_tf.foundation.keras import tf
library = ctypes.CDLL(numpy.linalg._umath_linalg.__file__)
threads = getattr(library, "scipy_openblas_get_num_threads64_", lambda: 1)
print(threads(), os.environ["CUDA_VISIBLE_DEVICES"], tf.config.list_physical_devices("GPU"))
"""
    assert run(code).splitlines()[-1] == "1 -1 []"
