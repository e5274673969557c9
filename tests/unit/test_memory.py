"""The memory of flatbuffers: their weights, the arena and a process that runs them."""

from pathlib import Path

import pytest
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from samples import Artifacts, Patch

from quarl_tf.evaluation import memory
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.flatbuffer import Activation, byte_size

# The network has 4·64 + 64·64 + 64·2 weights, and biases of 64 + 64 + 2.
KERNELS, BIASES = 4 * 64 + 64 * 64 + 64 * 2, 64 + 64 + 2


@pytest.mark.parametrize(
    ("dtype", "elements", "size"),
    [
        *(("float32", 5, 20), ("float16", 5, 10), ("bfloat16", 5, 10), ("int64", 1, 8)),
        *(("int8", 5, 5), ("int4", 5, 3), ("int4", 4, 2), ("int2", 4, 1), ("bool", 3, 3)),
        ("float32", 0, 0),
    ],
)
def test_numbers_are_as_large_as_they_are_stored(dtype: str, elements: int, size: int) -> None:
    assert byte_size(dtype, elements) == size


@pytest.mark.parametrize("dtype", ["string", "resource", "variant"])
def test_what_is_no_number_has_no_size(dtype: str) -> None:
    with pytest.raises(QuarlError, match=f"Received: dtype='{dtype}'"):
        byte_size(dtype, 1)


def test_weights_take_what_their_types_do(artifacts: Artifacts) -> None:
    assert memory.weight_bytes(artifacts["fp32"]) == 4 * (KERNELS + BIASES)
    assert memory.weight_bytes(artifacts["fp16"]) == 2 * (KERNELS + BIASES)
    assert memory.weight_bytes(artifacts["int8"]) == KERNELS + 4 * BIASES


def test_tensors_live_from_their_operator_to_their_last_user(artifacts: Artifacts) -> None:
    # 4 inputs, two hidden layers of 64, 2 outputs; inputs and outputs belong to the caller.
    assert flatbuffer.activations(artifacts["fp32"]) == [
        Activation(16, 0, 2),
        Activation(256, 0, 1),
        Activation(256, 1, 2),
        Activation(8, 2, 2),
    ]


def test_the_arena_holds_what_lives_at_once(artifacts: Artifacts) -> None:
    # Input at 0, first hidden layer at 64, second behind it at 320, output where the first was.
    assert memory.arena_bytes(artifacts["fp32"]) == 320 + 256
    # Hidden layers of bytes at 64 and 128; behind them the head as 2 bytes, which lives together
    # with the second of them and with the output at 64.
    assert memory.arena_bytes(artifacts["int8"]) == 128 + 64 + 2


def test_a_tensor_goes_into_the_smallest_gap_that_fits(monkeypatch: Patch) -> None:
    found = [
        # In this order: at 0, 1024, 1536 and, as the first is gone by then, in front of them.
        Activation(1000, 0, 1),
        Activation(512, 1, 4),
        Activation(100, 1, 4),
        Activation(300, 2, 4),
    ]
    monkeypatch.setattr(flatbuffer, "activations", lambda _: found)
    assert memory.arena_bytes(b"") == 1536 + 100
    # Gaps of 448 and of 64 bytes, and what is behind.
    taken = [(448, 64), (576, 64)]
    assert [memory._place(size, taken) for size in (64, 65, 448, 449)] == [512, 0, 0, 640]


@pytest.mark.parametrize("name", ["fp32", "int8", "int8_io", "steering"])
def test_the_arena_is_as_large_as_the_interpreters(artifacts: Artifacts, name: str) -> None:
    # Delegates would take the tensors between the ends out of the arena.
    plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = Interpreter(str(artifacts[name]), experimental_op_resolver_type=plain)
    constant = {t.name for t in flatbuffer.parsed(artifacts[name])[0].tensors if t.data is not None}
    interpreter.allocate_tensors()
    spans = []
    for detail in interpreter.get_tensor_details():
        if detail["name"] not in constant:
            view = interpreter.tensor(detail["index"])()
            start = view.__array_interface__["data"][0]
            spans.append((start, start + view.nbytes))
    starts, ends = zip(*spans, strict=True)
    assert memory.arena_bytes(artifacts[name]) == max(ends) - min(starts)


def test_a_process_grows_by_what_it_loads(artifacts: Artifacts) -> None:
    found = memory.measure(artifacts["fp32"])
    assert found.file == artifacts["fp32"].stat().st_size
    assert found.weights == 4 * (KERNELS + BIASES)
    assert found.arena == 576
    # More than the file, which it holds; less than another Python.
    assert found.file < found.process < 20_000_000


def test_files_that_cannot_run_are_one_line(artifacts: Artifacts, tmp_path: Path) -> None:
    path = tmp_path / "x.tflite"
    for measure in (memory.measure, memory.process_bytes, memory.arena_bytes):
        with pytest.raises(QuarlError, match="Received: path="):
            measure(path)
    path.write_bytes(artifacts["fp32"].read_bytes()[:200])
    with pytest.raises(QuarlError, match="truncated or damaged"):
        memory.measure(path)
    with pytest.raises(
        QuarlError, match=r"LiteRT cannot run the flatbuffer .*Received: path="
    ) as e:
        memory.process_bytes(path)
    assert "\n" not in str(e.value)
