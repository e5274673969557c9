"""The network that is measured under limits computes what its sizes say."""

from __future__ import annotations

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from memory_limit import LIMITS_MIB, draw, float_policy

from quarl_tf.export import integer
from quarl_tf.foundation import native_output
from quarl_tf.runtime import flatbuffer
from quarl_tf.spec import Scheme


def head(content: bytes, observation: np.ndarray) -> np.ndarray:
    with native_output.caught():
        interpreter = Interpreter(model_content=content)
        interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], observation)
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])


def test_the_network_is_a_perceptron_with_relu() -> None:
    content = float_policy((5, 16, 8, 3))
    first, second, last = (k for k in flatbuffer.weights(content).values() if k.ndim == 2)
    observation = np.random.default_rng(0).standard_normal((1, 5), np.float32)
    hidden = np.maximum(np.maximum(observation @ first.T, 0) @ second.T, 0)
    np.testing.assert_allclose(head(content, observation), hidden @ last.T, atol=1e-6)


def test_the_network_becomes_int8() -> None:
    seen = np.random.default_rng(0).standard_normal((64, 32), np.float32)
    content = float_policy((32, 64, 64, 3))
    int8 = integer.quantized(content, seen, Scheme.parse("int8").recipe)
    assert flatbuffer.audit(int8).weight_dtypes["int8"] == 32 * 64 + 64 * 64 + 64 * 3
    wanted, found = (head(each, seen[:1]) for each in (content, int8))
    assert np.abs(found - wanted).max() < 0.1 * np.abs(wanted).max()


def test_limits_that_nothing_was_measured_at_are_left_out() -> None:
    row = {"file_bytes": 10**6, "median_ms": 1.0}
    rows = [
        {"inputs": inputs, "scheme": scheme, "limit_mib": limit, **row}
        for inputs in (32, 39_427)
        for scheme in ("fp32", "int8")
        for limit in LIMITS_MIB
    ]
    del rows[-1]["median_ms"]
    lines = [line for axes in draw(rows).axes for line in axes.lines]
    assert [len(line.get_xdata()) for line in lines] == [9, 9, 9, 8]
