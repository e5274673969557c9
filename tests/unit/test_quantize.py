"""Weights are quantised from flatbuffer to flatbuffer."""

import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from samples import Artifacts, Copy, refused, snapshot

from quarl_tf.cli import main
from quarl_tf.export import converter
from quarl_tf.export.graph import in_float32
from quarl_tf.export.ptq import quantize, quantized
from quarl_tf.foundation.files import sha256
from quarl_tf.foundation.keras import keras
from quarl_tf.quantization.grid import fake_quantize
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import Scheme
from quarl_tf.store.records import Sidecar
from quarl_tf.store.workspace import sidecar_path


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        *((name, (name,) * 3) for name in ("ptq_w2", "ptq_w8", "ptq_paper_w4", "ptq_w32")),
        ("ptq_w2-head=8-hidden_0=4", ("ptq_w4", "ptq_w2", "ptq_w8")),
    ],
)
def test_only_kernels_are_put_on_grids(artifacts: Artifacts, name: str, layers: Any) -> None:
    content = artifacts["fp32"].read_bytes()
    changed = quantized(content, Scheme.parse(name))
    forms: list[Any] = [Scheme.parse(layer).recipe.default.weights for layer in layers]
    before, after = flatbuffer.weights(content), flatbuffer.weights(changed)
    kernels = map(fake_quantize, before.values(), forms)
    np.testing.assert_equal(after, dict(zip(before, kernels, strict=True)))
    size = sum(kernel.nbytes for kernel in before.values())
    differing = np.frombuffer(content, np.uint8) != np.frombuffer(changed, np.uint8)
    assert 0 < differing.sum() <= size
    assert flatbuffer.audit(content) == flatbuffer.audit(changed)


def test_convolutions_have_a_grid_for_each_output_channel() -> None:
    random, layers = np.random.default_rng(0), keras.layers
    network = keras.Sequential(
        [keras.Input((6, 6, 3)), layers.Conv2D(4, 3), layers.DepthwiseConv2D(3), layers.Flatten()]
    )
    for variable in network.trainable_variables:
        sizes = 10.0 ** random.integers(-2, 3, variable.shape[-1])  # Far apart.
        variable.assign(random.normal(0, 1, variable.shape) * sizes)
    depthwise = network.layers[1].depthwise_kernel
    depthwise.assign(depthwise * np.array([1e-2, 1, 10, 100])[:, None])
    content = converter.converted(converter.of_function(network, (6, 6, 3), "float32"))
    weights = flatbuffer.weights(quantized(content, Scheme.parse("ptq_w4"))).values()
    kernels = [kernel for kernel in weights if kernel.ndim > 1]
    assert [kernel.shape for kernel in kernels] == [(4, 3, 3, 3), (1, 3, 3, 4)]
    for kernel, axis in zip(kernels, (0, 3), strict=True):
        counts = [len(np.unique(np.take(kernel, channel, axis))) for channel in range(4)]
        assert 3 < min(counts) <= max(counts) <= 16


def test_the_copy_has_a_sidecar_and_acts(copy_artifact: Copy) -> None:
    path, scheme = copy_artifact("frames"), Scheme.parse("ptq_w6")
    assert main(["quantize", str(path), "--scheme", "ptq_w6"]) == 0
    copied = path.with_name("ptq_w6.tflite")
    policy = Policy.load(copied)
    assert (policy.sidecar.scheme, policy.sidecar.native) == ("ptq_w6", False)
    assert policy.act(np.zeros((6, 6, 2), np.uint8)) in (0, 1)
    content = copied.read_bytes()
    # A deleted flatbuffer is made again, and its sidecar kept.
    replace(policy.sidecar, check={"a": 1}).save(sidecar_path(copied))
    recorded = sidecar_path(copied).read_text()
    copied.unlink()
    quantize(path, scheme)
    assert (copied.read_bytes(), sidecar_path(copied).read_text()) == (content, recorded)
    # As after a process that was killed in between.
    sidecar_path(copied).unlink()
    quantize(path, scheme)
    assert Policy.load(copied).sidecar == policy.sidecar


def test_what_was_made_of_the_same_network_is_kept(copy_artifact: Copy) -> None:
    path, scheme = copy_artifact("fp32"), Scheme.parse("int8")
    copied = quantize(path, scheme)
    made = copied.read_bytes()
    exported = quantize(path, Scheme.parse("int8_tensor")).read_bytes()
    copied.write_bytes(exported)
    sidecar = Sidecar.load(sidecar_path(copied))
    for calibration in ("ab" * 32, None):  # What a training was exported to, and a former copy.
        facts = {"sha256": sha256(copied), "calibration_sha256": calibration}
        replace(sidecar, **facts).save(sidecar_path(copied))
        before = snapshot(path.parent)
        assert quantize(path, scheme) == copied
        assert snapshot(path.parent) == before
    replace(sidecar, sha256=sha256(copied), network_sha256="ab" * 32).save(sidecar_path(copied))
    assert quantize(path, scheme).read_bytes() == made
    copied.write_bytes(b"damaged")
    assert quantize(path, scheme).read_bytes() == made


def test_halves_are_widened(artifacts: Artifacts) -> None:
    half = artifacts["fp16"].read_bytes()
    full = in_float32(half)
    assert "float16" in flatbuffer.audit(half).weight_dtypes
    assert "float16" not in flatbuffer.audit(full).tensor_dtypes
    halves, floats = ([*flatbuffer.weights(x).values()] for x in (half, full))
    np.testing.assert_equal(floats, halves)
    policies = [Policy(content, Policy.load(artifacts["fp16"]).sidecar) for content in (half, full)]
    for observation in np.random.default_rng(0).normal(size=(20, 4)):
        np.testing.assert_allclose(*(policy.head(observation) for policy in policies), atol=1e-5)
    assert in_float32(full) == full


@pytest.mark.parametrize("scheme", ["int8", "ptq_w4"])
def test_a_policy_of_halves_is_quantised(copy_artifact: Copy, scheme: str) -> None:
    path = copy_artifact("fp16")
    of_half = quantize(path, Scheme.parse(scheme))
    assert Policy.load(of_half).sidecar.check["source"] == "fp16"
    full = copy_artifact("fp32")
    assert f"not {scheme} made from fp32" in refused(quantize, full, Scheme.parse(scheme), code=2)
    audit = flatbuffer.audit(of_half)
    sidecar_path(of_half).unlink()
    of_half.unlink()
    assert flatbuffer.audit(quantize(full, Scheme.parse(scheme))) == audit


def test_other_schemes_and_files_are_refused(artifacts: Artifacts) -> None:
    for name, scheme, received in (("fp32", "qat_int8", "qat_int8"), ("int8", "ptq_w4", "int8")):
        message = refused(quantize, artifacts[name], Scheme.parse(scheme), code=2)
        assert f"scheme='{received}'" in message
    assert "identifier" in refused(quantized, b"none", Scheme.parse("ptq_w4"))
    content, scheme = artifacts["fp32"].read_bytes(), Scheme.parse("ptq_w2-hiden_0=4")
    assert "hidden_0" in refused(quantized, content, scheme, code=2)


@pytest.mark.parametrize("description", [None, '{"env_id": "CartPole-v1"}', "of ptq_w4"])
def test_a_copy_replaces_no_other_file(copy_artifact: Copy, description: str | None) -> None:
    path = copy_artifact("frames")
    target = path.with_name("ptq_w8.tflite")
    other = quantize(path, Scheme.parse("ptq_w4"))
    shutil.copy(other, target)
    if description == "of ptq_w4":
        shutil.copy(sidecar_path(other), sidecar_path(target))
    elif description is not None:
        sidecar_path(target).write_text(description)
    before = snapshot(path.parent)
    message = refused(quantize, path, Scheme.parse("ptq_w8"), code=2)
    # A scheme that needs a training is refused beside what that was exported to.
    assert "can become" in refused(quantize, path, Scheme.parse("fp32"), code=2)
    assert (
        f"replace a file that is not ptq_w8 made from fp32; move it away. Received: path='{target}'"
        in message
    )
    assert snapshot(path.parent) == before
