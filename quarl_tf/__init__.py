"""Shrink reinforcement-learning policies and prove what that costs."""

import os

__version__ = "0.1.0"

# Read when NumPy first loads. Acting multiplies matrices of a few rows, which are done before a
# second thread has woken up; with both cores busy, waiting for it took four times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
