"""The one place that chooses Keras 2, which TF-Agents and tfmot need, and quiets TensorFlow.

Import `tf` and `keras` from here, before anything else imports TensorFlow.
"""

from __future__ import annotations

import os

# Read when TensorFlow's Keras first loads; Keras 3 would break TF-Agents and tfmot.
os.environ["TF_USE_LEGACY_KERAS"] = "1"
# Its C++ logs say nothing a user could act on; failures arrive as exceptions.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# By itself, TensorFlow takes oneDNN's convolutions only on processors with instructions for neural
# networks. With AVX2 alone, too, games train faster by them.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
# XLA would sum large tensors in windows, without vector instructions: on CartPole, the norms that
# clip DQN's gradients took a tenth of each gradient step.
os.environ["XLA_FLAGS"] = " ".join(
    ["--xla_disable_hlo_passes=tree_reduction_rewriter", *os.environ.get("XLA_FLAGS", "").split()]
)
# Policies this small train on the CPU.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

from quarl_tf.foundation import native_output
from quarl_tf.foundation.errors import QuarlError

try:
    with native_output.caught():
        import tensorflow as tf
        import tf_keras as keras
        from tf_keras.src.mixed_precision import autocast_variable

        # Its first use looks for a GPU, and says that there is none.
        tf.config.list_logical_devices()
except ModuleNotFoundError as error:
    raise QuarlError(
        "Training and export need TensorFlow, which evaluation and reports do without; install "
        f"the rest in the folder of quarl_tf: pip install '.[train]'. Received: {error}"
    ) from error

if tf.keras.Model is not keras.Model:
    raise QuarlError(
        "Keras 3 was loaded before quarl_tf could choose Keras 2; import quarl_tf first or set "
        f"TF_USE_LEGACY_KERAS=1. Received: tf.keras.Model from {tf.keras.Model.__module__}"
    )

__all__ = ["autocast_variable", "keras", "tf"]
