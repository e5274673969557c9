"""What an audit reads from flatbuffers, and that damage ends in one line, never in a crash."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import Artifacts, refused

from quarl_tf.foundation.errors import QuarlError
from quarl_tf.runtime.flatbuffer import audit, weights

LAYERS = 3  # The network has 4·64 + 64·64 + 64·2 weights, and biases of 64 + 64 + 2.
KERNELS = 4 * 64 + 64 * 64 + 64 * 2
BIASES = 64 + 64 + 2


def test_float_network_is_float_throughout(artifacts: Artifacts) -> None:
    found = audit(artifacts["fp32"])
    assert set(found.tensor_dtypes) - {"int32"} == {"float32"}
    assert found.weight_dtypes["float32"] == KERNELS + BIASES
    assert found.operators.count("FULLY_CONNECTED float32") == LAYERS
    (source,), (target,) = found.inputs, found.outputs
    assert (source.shape, source.dtype, source.scale) == ((1, 4), "float32", None)
    assert (target.shape, target.dtype, target.scale) == ((1, 2), "float32", None)


def test_int8_network_computes_in_int8_between_float_ends(artifacts: Artifacts) -> None:
    found = audit(artifacts["int8"])
    assert found.operators[0] == "QUANTIZE int8"
    assert found.operators[-1] == "DEQUANTIZE float32"
    assert found.operators.count("FULLY_CONNECTED int8") == LAYERS
    assert found.weight_dtypes["int8"] == KERNELS
    assert found.weight_dtypes["int32"] >= BIASES
    assert "float32" not in found.weight_dtypes


def test_quantised_interface_shows_its_scale(artifacts: Artifacts) -> None:
    found = audit(artifacts["int8_io"])
    for spec in (*found.inputs, *found.outputs):
        assert spec.dtype == "int8"
        assert spec.scale is not None
        assert 0 < spec.scale < 1
        assert -128 <= (spec.zero_point or 0) <= 127
    assert "float32" not in found.tensor_dtypes


def test_weights_are_those_of_the_network_in_its_order(
    artifacts: Artifacts, networks: dict[str, Any]
) -> None:
    kernels = [kernel.T for kernel, _ in networks["mlp"].layers]
    for scheme, exact in [("fp32", 0.0), ("fp16", 1e-3), ("dynamic_int8", 0.02), ("int8", 0.02)]:
        found = list(weights(artifacts[scheme]).values())
        assert [w.shape for w in found] == [k.shape for k in kernels]
        for weight, kernel in zip(found, kernels, strict=True):
            assert weight.dtype == np.float32
            np.testing.assert_allclose(weight, kernel, atol=exact * np.abs(kernel).max())


@pytest.mark.parametrize("name", ["fp32", "fp16", "int8_io"])
def test_truncated_content_is_refused(artifacts: Artifacts, name: str) -> None:
    content = artifacts[name].read_bytes()
    for length in range(0, len(content), 61):
        with pytest.raises(QuarlError, match=r"empty|not a TFLite flatbuffer|truncated or damaged"):
            audit(content[:length])


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 7)), min_size=1, max_size=8))
def test_flipped_bits_never_end_in_anything_but_one_line(
    artifacts: Artifacts, flips: list[tuple[int, int]]
) -> None:
    content = bytearray(artifacts["int8"].read_bytes())
    for position, bit in flips:
        content[position % len(content)] ^= 1 << bit
    message = ""
    try:
        audit(bytes(content))
        weights(bytes(content))
    except QuarlError as error:
        message = str(error)
    assert "\n" not in message


@pytest.mark.parametrize("read", [audit, weights])
def test_files_that_are_no_flatbuffers_are_refused(tmp_path: Path, read: Any) -> None:
    path = tmp_path / "x.tflite"
    assert f"path='{path}'" in refused(read, path)
    assert f"path='{tmp_path}'" in refused(read, tmp_path)
    for content, received in [
        (b"", "0 bytes"),
        (b"PK\x03\x04 a zip archive, perhaps", "identifier="),
        (b"\x1c\x00\x00\x00TFL3", "8 bytes"),
    ]:
        path.write_bytes(content)
        assert received in refused(read, path)
