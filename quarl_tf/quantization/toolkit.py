"""TensorFlow's model optimisation toolkit, as far as it is used, without its warnings."""

import warnings

import quarl_tf.foundation.keras  # noqa: F401  # It chooses Keras 2, and has to come first.

with warnings.catch_warnings():
    # It compares versions by what Python has given up.
    warnings.simplefilter("ignore", DeprecationWarning)
    from tensorflow_model_optimization.python.core.quantization.keras import (
        quantize_config,
        quantize_wrapper,
        quantizers,
    )

__all__ = ["quantize_config", "quantize_wrapper", "quantizers"]
