"""Contents and memory of flatbuffers; damage is one line, never a crash."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from hypothesis import given
from hypothesis import strategies as st
from samples import Artifacts, refused

from quarl_tf.evaluation import memory
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.flatbuffer import audit, byte_size, weights

LAYERS, KERNELS, BIASES = 3, 4 * 64 + 64 * 64 + 64 * 2, 64 + 64 + 2


def test_audits_have_types_operators_and_scales(artifacts: Artifacts) -> None:
    contents = audit(artifacts["fp32"])
    assert set(contents.tensor_dtypes) - {"int32"} == {"float32"}
    assert contents.operators.count("FULLY_CONNECTED float32") == LAYERS
    ends = [(spec.shape, spec.dtype, spec.scale) for spec in (*contents.inputs, *contents.outputs)]
    assert ends == [((1, 4), "float32", None), ((1, 2), "float32", None)]
    # int8 between float ends.
    contents = audit(artifacts["int8"])
    outer_operators = [contents.operators[0], contents.operators[-1]]
    assert outer_operators == ["QUANTIZE int8", "DEQUANTIZE float32"]
    assert contents.operators.count("FULLY_CONNECTED int8") == LAYERS
    assert "float32" not in contents.weight_dtypes
    # int8 throughout.
    contents = audit(artifacts["int8_io"])
    for spec in (*contents.inputs, *contents.outputs):
        assert spec.dtype == "int8"
        assert 0 < (spec.scale or 0) < 1
        assert -128 <= (spec.zero_point or 0) <= 127
    assert "float32" not in contents.tensor_dtypes


def test_weights_are_those_of_the_network(artifacts: Artifacts, networks: dict[str, Any]) -> None:
    kernels = [kernel.T for kernel, _ in networks["mlp"].layers]
    for scheme, exact in [("fp32", 0.0), ("fp16", 1e-3), ("dynamic_int8", 0.02), ("int8", 0.02)]:
        file_kernels = list(weights(artifacts[scheme]).values())
        assert [w.shape for w in file_kernels] == [k.shape for k in kernels]
        for weight, kernel in zip(file_kernels, kernels, strict=True):
            assert weight.dtype == np.float32
            np.testing.assert_allclose(weight, kernel, atol=exact * np.abs(kernel).max())


@given(st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 7)), min_size=1, max_size=8))
def test_flipped_bits_are_one_line(artifacts: Artifacts, flips: list[tuple[int, int]]) -> None:
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


def test_files_that_are_no_flatbuffers_are_refused(artifacts: Artifacts, tmp_path: Path) -> None:
    path = tmp_path / "x.tflite"
    for function in (audit, memory.measure, memory.process_bytes, memory.arena_bytes):
        assert f"Received: path='{path}'" in refused(function, path)
    assert f"path='{tmp_path}'" in refused(audit, tmp_path)
    for content, received in [
        (b"", "0 bytes"),
        (b"PK\x03\x04 a zip archive, perhaps", "identifier="),
        (b"\x1c\x00\x00\x00TFL3", "8 bytes"),
    ]:
        path.write_bytes(content)
        assert received in refused(audit, path)
    path.write_bytes(artifacts["fp32"].read_bytes()[:200])
    assert "truncated or damaged" in refused(memory.measure, path)
    assert f"Received: path='{path}'" in refused(memory.process_bytes, path)


@pytest.mark.parametrize("name", ["fp32", "int8", "int8_io", "steering"])
def test_the_arena_is_as_large_as_the_interpreters(artifacts: Artifacts, name: str) -> None:
    # Delegates would take the tensors between the ends out of the arena.
    resolver = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = Interpreter(str(artifacts[name]), experimental_op_resolver_type=resolver)
    tensors = flatbuffer.parsed(artifacts[name])[0].tensors
    constants = {tensor.name for tensor in tensors if tensor.data is not None}
    interpreter.allocate_tensors()
    spans = []
    for detail in interpreter.get_tensor_details():
        if detail["name"] not in constants:
            view = interpreter.tensor(detail["index"])()
            start = view.__array_interface__["data"][0]
            spans.append((start, start + view.nbytes))
    starts, ends = zip(*spans, strict=True)
    assert memory.arena_bytes(artifacts[name]) == max(ends) - min(starts)


def test_a_process_grows_by_its_policy(artifacts: Artifacts) -> None:
    assert memory.measure(artifacts["fp16"])["weights"] == 2 * (KERNELS + BIASES)
    assert memory.measure(artifacts["int8"])["weights"] == KERNELS + 4 * BIASES
    sizes = memory.measure(artifacts["fp32"])
    assert sizes["file"] == artifacts["fp32"].stat().st_size
    assert (sizes["weights"], sizes["arena"]) == (4 * (KERNELS + BIASES), 576)
    # More than the file, which it holds; less than another Python.
    assert sizes["file"] < sizes["process"] < 20_000_000
    for dtype, elements, size in (("float32", 5, 20), ("bfloat16", 5, 10), ("int4", 5, 3)):
        assert byte_size(dtype, elements) == size
    assert "Received: dtype='string'" in refused(byte_size, "string", 1)
