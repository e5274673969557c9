"""Policies act by their flatbuffers, whose contents are told; damage is one line."""

import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from conftest import Network
from samples import Artifacts, Copy, Describe, Patch, refused

from quarl_tf.evaluation import memory
from quarl_tf.foundation import native_output
from quarl_tf.runtime.flatbuffer import audit, byte_size, parsed, weights
from quarl_tf.runtime.policy import Policy
from quarl_tf.store.records import Sidecar
from quarl_tf.store.workspace import sidecar_path

VECTORS = np.random.default_rng(1).normal(0, 1, (50, 4)).astype("f4")
FRAMES = np.random.default_rng(1).integers(0, 256, (20, 6, 6, 2), dtype=np.uint8)
DRAWS = 20_000
KERNELS, BIASES = 4 * 64 + 64 * 64 + 64 * 2, 64 + 64 + 2


@pytest.mark.parametrize("name", ["int8_io", "frames_int8_io", "frames_uint8_io"])
def test_integer_inputs_get_the_nearest_codes(artifacts: Artifacts, name: str) -> None:
    policy = Policy.load(artifacts[name])
    interpreter = Interpreter(model_path=str(artifacts[name]), num_threads=1)
    interpreter.allocate_tensors()
    (source,), (target,) = interpreter.get_input_details(), interpreter.get_output_details()
    scale, zero_point = source["quantization"]
    output_scale, output_zero_point = target["quantization"]
    ends, beyond = np.iinfo(source["dtype"]), np.float32([1e30, -1e30, 100, -100])  # Saturates.
    for observation in (*VECTORS, beyond) if name == "int8_io" else FRAMES:
        codes = np.clip(np.rint(observation / scale) + zero_point, ends.min, ends.max)
        interpreter.set_tensor(source["index"], codes[None].astype(source["dtype"]))
        interpreter.invoke()
        head = interpreter.get_tensor(target["index"])[0].astype(float)
        expected = (head - output_zero_point) * output_scale
        np.testing.assert_allclose(policy.head(observation), expected, rtol=1e-6)
        assert policy.act(observation) == head.argmax()


def test_actions_are_drawn_with_the_softmax_of_the_logits(describe: Describe) -> None:
    # Of three actions none is rare.
    kernel = np.array([[0.5, -0.5, 0], [0, 0.3, -0.3], [0.2, 0, 0], [0, -0.4, 0.4]], np.float32)
    content = Network([(kernel, np.float32([0.2, -0.4, 0.1]))], VECTORS).convert("fp32")
    policy = Policy.load(describe(content, head="logits", num_actions=3))
    random = np.random.default_rng(2)
    for observation in VECTORS[:3]:
        weights = np.exp(policy.head(observation))
        expected = weights / weights.sum()
        actions = [policy.sample(observation, random) for _ in range(DRAWS)]
        assert all(type(action) is int for action in actions)
        actual = np.bincount(actions, minlength=3) / DRAWS
        # Four standard errors.
        assert (np.abs(actual - expected) < 4 * np.sqrt(expected * (1 - expected) / DRAWS)).all()
    values = Policy.load(describe(content, num_actions=3))  # Q-values are no distribution.
    assert "head='q_values'" in refused(values.sample, VECTORS[0], random)
    assert "Received: random=0" in refused(policy.sample, VECTORS[0], 0, code=2)


def test_continuous_actions_are_drawn_around_the_head_and_clipped(artifacts: Artifacts) -> None:
    content = artifacts["steering"].read_bytes()
    sidecar = replace(Sidecar.load(sidecar_path(artifacts["steering"])), action_std=[0.3])
    wide = Policy(content, replace(sidecar, action_low=[-10.0], action_high=[10.0]))
    narrow = Policy(content, replace(sidecar, action_low=[-0.5], action_high=[0.25]))
    observation = np.array([-0.6, 0.01], np.float32)
    randoms = [np.random.default_rng(3) for _ in range(2)]
    drawn = [wide.sample(observation, randoms[0]) for _ in range(DRAWS)]
    clipped = [narrow.sample(observation, randoms[1]) for _ in range(DRAWS)]
    assert all((a.shape, a.dtype) == ((1,), np.float32) for a in (drawn[0], clipped[0]))
    np.testing.assert_array_equal(clipped, np.clip(drawn, -0.5, 0.25))
    assert (np.min(clipped), np.max(clipped)) == (-0.5, 0.25)
    assert abs(np.mean(drawn) - wide.head(observation)[0]) < 4 * 0.3 / DRAWS**0.5
    assert abs(np.std(drawn) - 0.3) < 4 * 0.3 / (2 * DRAWS) ** 0.5
    states = np.random.default_rng(0).uniform([-1.2, -0.07], [0.6, 0.07], (64, 2)).astype("f4")
    actions, heads = (np.stack([f(x) for x in states]) for f in (narrow.act, narrow.head))
    np.testing.assert_array_equal(actions, np.clip(heads, -0.5, 0.25))
    assert (actions.dtype, actions.min(), actions.max()) == (np.float32, -0.5, 0.25)


def test_ties_are_counted(artifacts: Artifacts) -> None:
    sidecar = replace(Sidecar.load(sidecar_path(artifacts["tied"])), head="logits")
    policy = Policy(artifacts["tied"].read_bytes(), sidecar)
    random = np.random.default_rng(0)
    assert {policy.sample(x, random) for x in VECTORS} == {0, 1}
    assert policy.ties == len(VECTORS)
    # The lowest index wins.
    assert {(type(action), action) for action in map(policy.act, VECTORS)} == {(int, 0)}
    assert policy.ties == 2 * len(VECTORS)


@pytest.mark.parametrize(
    ("observation", "received"),
    [
        *((np.zeros(n, "f4"), f"shape={n}, dtype=float32") for n in ((1, 4), (3,))),
        *((np.zeros(4, t), f"shape=(4,), dtype={t}") for t in ("int64", "uint8", "bool")),
        ([[0.0], [0.0, 1.0]], "something ragged"),
        (None, "shape=(), dtype=object"),
    ],
)
def test_other_shapes_and_types(artifacts: Artifacts, observation: Any, received: str) -> None:
    policy, x = Policy.load(artifacts["fp32"]), VECTORS[0]
    assert refused(policy.act, observation).endswith(f"Received: {received}")
    frames = Policy.load(artifacts["frames_int8_io"])
    assert "dtype=float32" in refused(frames.act, FRAMES[0].astype(np.float32))
    strided = np.repeat(x, 2)[::2]
    for variant in (x.astype(np.float64), x.tolist(), tuple(x.tolist()), strided, x.astype(">f4")):
        np.testing.assert_array_equal(policy.head(variant), policy.head(x))


def test_infinite_numbers_are_refused(artifacts: Artifacts, describe: Describe) -> None:
    for policy in (Policy.load(artifacts[name]) for name in ("fp32", "int8_io")):
        for value in (np.nan, np.inf, -np.inf):
            message = refused(policy.act, np.array([0, 0, value, 0], np.float32))
            assert message.endswith(f"observation[2]={value}")
        refused(policy.act, [0.0, 1e300, 0.0, 0.0])  # Infinite as float32.
    huge = np.array([3e38, 3e38, 0, 0], np.float32)  # Neither its sum nor its squares are finite.
    assert Policy.load(artifacts["int8_io"]).act(huge) in (0, 1)
    layer = np.full((4, 2), 3e38, np.float32), np.zeros(2, np.float32)
    policy = Policy.load(describe(Network([layer], VECTORS).convert("fp32")))
    assert "head=[inf, inf]" in refused(policy.act, np.ones(4, np.float32))


def test_foreign_and_damaged_files_are_refused(artifacts: Artifacts, copy_artifact: Copy) -> None:
    path = copy_artifact("fp32")
    intact, sidecar = path.read_bytes(), sidecar_path(path)
    document, values = sidecar.read_text(), json.loads(sidecar.read_text())
    assert "threads=0" in refused(Policy.load, path, threads=0, code=2)
    record = Policy.load(path).sidecar  # A damaged file with a new sidecar.
    assert "scheme='fp32'" in refused(Policy, intact[:1000], record)
    message = refused(Policy, intact, replace(record, observation_shape=[5]))
    assert "input shapes [[1, 4]], expected [[1, 5]]" in message
    for content in (artifacts["steering"].read_bytes(), intact[:-1]):
        path.write_bytes(content)
        assert f"{len(content)} bytes" in refused(Policy.load, path)
    path.write_bytes(intact)
    for text, message in (
        (document[:200], "cannot be read as JSON"),
        (json.dumps(values | {"trained_on": ["another"]}), "fp32.json was changed or damaged"),
    ):
        sidecar.write_text(text)
        assert message in refused(Policy.load, path)
    del values["checksum"]  # Former versions wrote no checksum.
    sidecar.write_text(json.dumps(values))
    assert asdict(Policy.load(path).sidecar) == values
    sidecar.write_text(json.dumps(values | {"sha256": "0" * 64}))
    assert "fp32.tflite was changed or damaged" in refused(Policy.load, path)
    sidecar.unlink()
    assert "has no sidecar fp32.json beside it" in refused(Policy.load, path)


def test_policies_load_without_files_in_memory(artifacts: Artifacts, monkeypatch: Patch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)  # Which not every system has.
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)  # As of a daemon.
        with native_output.silenced():
            os.write(2, b"unseen")
    assert Policy.load(artifacts["fp32"]).act(VECTORS[0]) in (0, 1)
    before = os.fstat(2)

    def work(_: int) -> None:
        with native_output.caught():
            time.sleep(0.01)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))
    assert os.path.samestat(os.fstat(2), before)  # Threads keep standard error.


def test_a_policy_acts_without_error_output_and_temporary_folder(artifacts: Artifacts) -> None:
    code = "import tempfile; tempfile._candidate_tempdir_list = lambda: []\n"
    code += "from quarl_tf import Policy\n"
    code += f"print(Policy.load({str(artifacts['fp32'])!r}).act([0.0] * 4))"
    for redirection in ("", "2>&-"):
        command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} {redirection}"
        assert subprocess.check_output(command, shell=True, text=True).strip() in ("0", "1")


def test_weights_are_those_of_the_network(artifacts: Artifacts, networks: dict[str, Any]) -> None:
    kernels = [kernel.T for kernel, _ in networks["mlp"].layers]
    for scheme, exact in [("fp32", 0.0), ("fp16", 1e-3), ("dynamic_int8", 0.02), ("int8", 0.02)]:
        file_kernels = list(weights(artifacts[scheme]).values())
        assert [w.shape for w in file_kernels] == [k.shape for k in kernels]
        for weight, kernel in zip(file_kernels, kernels, strict=True):
            assert weight.dtype == np.float32
            np.testing.assert_allclose(weight, kernel, atol=exact * np.abs(kernel).max())


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
    tensors = parsed(artifacts[name])[0].tensors
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
