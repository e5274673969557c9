"""Flatbuffers of a quantisation-aware training compute what its network does."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import Patch, built, heads, observed, quantised, refused, settle, write_training

from quarl_tf import Run, networks, pipeline
from quarl_tf.export.graph import Graph
from quarl_tf.quantization import qat, watching
from quarl_tf.runtime import flatbuffer
from quarl_tf.store.records import Sidecar
from quarl_tf.store.workspace import Workspace, sidecar_path

POLE, CARS, FRAMES = "CartPole-v1", "MountainCarContinuous-v0", "Frames-v0"
SCALED = {"byte_zero": 87, "byte_unit": 60.0}
KINDS: Mapping[str, Run] = {
    "values": Run("dqn", POLE, 0, {"network": [32, 32]}),
    "dueling": Run("dqn", POLE, 1, {"network": [32, 32], "dueling": True}),
    "logits": Run("ppo", POLE, 0, {"network": [32, 32]}),
    "action": Run("ddpg", CARS, 0, {"network": [32, 32]}),
    "steering": Run("ppo", "Steering-v0", 0, {"network": [32, 32]}),
    "images": Run("dqn", FRAMES, 0, {"network": "li"}),
    # With seed 1 a sum of the first layer lies 5e-6 steps from halfway between two codes.
    "scaled images": Run("dqn", FRAMES, 3, {"network": "li", **SCALED}),
    "dense images": Run("dqn", FRAMES, 2, {"network": [16, 16], **SCALED}),
}
HEADS = {"dueling": "advantages", "logits": "logits", "action": "action", "steering": "action"}


class Bench:
    """Networks as if they had been trained, with observations of random play."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.observations = cache(lambda env_id: observed(env_id, 8, 99))

    def run(self, kind: str, bits: int, **options: Any) -> tuple[Run, Any]:
        """Write a finished quantisation-aware training; return it and its network."""
        run = replace(KINDS[kind], quantization=quantised(bits=bits, delay=1, **options))
        network, observations = built(run), self.observations(run.env_id)
        settle(network, observations, run.seed)
        network = watching(run.quantization)(network)
        network(observations, training=True)
        network = qat.quantized(network)
        qat.freeze(network)
        random = np.random.default_rng(0)
        for variable in network.trainable_variables:
            if "log_stretch" in variable.name:  # As if they had been learned.
                variable.assign(random.uniform(-0.2, 0.2, variable.shape).astype(np.float32))
        self.write(run, network)
        return run, network

    def write(self, run: Run, network: Any) -> None:
        observations = self.observations(run.env_id)
        write_training(self.workspace, run, networks.weights(network), observations)

    def export(self, run: Run, scheme: str) -> Path:
        return pipeline.export(run.run_id, [scheme], root=self.workspace.root)[0]

    def compared(self, kind: str, scheme: str, bits: int, **options: Any) -> Path:
        """Return a flatbuffer with the network's heads, but for values between two codes."""
        run, network = self.run(kind, bits, **options)
        acting = networks.acting(network)
        heads, expected = self.heads(run, scheme), acting(self.observations(run.env_id)).numpy()
        assert len(np.unique(expected)) > 3
        steps = np.abs(heads - expected) / qat.head_step(acting)
        assert (steps > 1e-2).mean() < 0.05
        assert steps.max() < 4.01
        if kind not in ("action", "steering"):
            assert (heads.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.95
        return self.workspace.artifact(run.run_id, scheme)

    def heads(self, run: Run, scheme: str) -> np.ndarray:
        return heads(self.export(run, scheme), self.observations(run.env_id))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(Workspace(tmp_path_factory.mktemp("bench")))


@pytest.mark.parametrize(
    ("kind", "bits", "options"),
    [
        *(("values", bits, {}) for bits in (2, 4, 8)),
        *((kind, 4, {}) for kind in KINDS if kind != "values"),
        ("logits", 3, {"rule": "paper"}),
        ("logits", 3, {"per_channel": True, "edge_bits": 5}),
        ("logits", 2, {"per_channel": False}),
        ("logits", 6, {"learned_steps": True}),
        ("images", 3, {"learned_steps": True}),
    ],
)
def test_simulated_files_are_the_network(bench: Bench, kind: str, bits: int, options: Any) -> None:
    scheme = f"qat_w{bits}a{bits}"
    path = bench.compared(kind, scheme, bits, **options)
    sidecar, paper = Sidecar.load(sidecar_path(path)), "rule" in options
    assert (sidecar.scheme, sidecar.head) == (scheme, HEADS.get(kind, "q_values"))
    assert sidecar.check["mean_steps_apart"] <= 0.02
    per_channel = Run.from_dict(sidecar.run).quantization.recipe.default.weights.per_channel
    for kernel in flatbuffer.weights(path).values():
        if kernel.ndim == 4 or (kernel.ndim == 2 and len(kernel) > 4):  # The head has eight bits.
            grids = kernel if per_channel or kernel.ndim == 4 else [kernel]
            assert all(len(np.unique(grid)) <= 2**bits + paper for grid in grids)
    assert not sidecar.native
    assert "int8" not in sidecar.weight_dtypes


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in KINDS),
        *((kind, {"learned_steps": True}) for kind in ("values", "images")),
        *((kind, {"per_channel": False}) for kind in ("values", "images")),
    ],
)
def test_int8_flatbuffers_are_the_network(bench: Bench, kind: str, options: Any) -> None:
    path = bench.compared(kind, "qat_int8", 8, **options)
    audit = flatbuffer.audit(path)
    layers = [op for op in audit.operators if op.startswith(("FULLY_CONNECTED", "CONV_2D"))]
    assert len(layers) >= 3
    assert all(op.endswith(" int8") for op in layers)
    assert Sidecar.load(sidecar_path(path)).native
    graph = Graph(path.read_bytes())
    for layer in graph.layers().values():
        kernel = graph.tensors[layer.inputs[1]]
        single = graph.name(layer) == "FULLY_CONNECTED" and "per_channel" in options
        assert len(kernel.quantization.scale) == (1 if single else kernel.shape[0])
    (source,) = audit.inputs
    if "images" in kind:
        assert (source.dtype, *source.scales, *source.zero_points) == ("uint8", 1.0, 0)
        *inside, last = audit.operators
        assert last == "DEQUANTIZE float32"
        assert all(op.endswith(" int8") for op in inside)
    else:
        assert source.dtype == "float32"
        # Only the normaliser and the scaling of actions are in float.
        assert audit.weight_dtypes.get("float32", 0) <= 10


def test_impossible_schemes_are_refused(bench: Bench) -> None:
    run, _ = bench.run("values", 4)
    for scheme in ("fp32", "int8", "ptq_w4", "qat_w5a5", "qat_int8"):
        message = refused(bench.export, run, scheme, code=2)
        assert not bench.workspace.artifact(run.run_id, scheme).exists()
        assert f"{run.run_id} can be exported as qat_int4, qat_w4a4. " in message
        assert message.endswith(f"Received: scheme={scheme!r}")


@pytest.mark.parametrize(("scheme", "bits"), [("qat_w6a6", 6), ("qat_int8", 8)])
def test_a_wrong_head_is_refused(bench: Bench, scheme: str, bits: int, monkeypatch: Patch) -> None:
    run, _ = bench.run("values", bits)
    exported = qat.exported

    def broken(network: Any, *, rounded: bool) -> Any:
        kernel = qat.quantized_layers(network)[-1].layer.kernel
        kernel.assign(kernel.numpy() * np.array([-1.0, *[1.0] * (kernel.shape[1] - 1)], np.float32))
        return exported(network, rounded=rounded)

    monkeypatch.setattr(qat, "exported", broken)
    artifact = bench.workspace.artifact(run.run_id, scheme)
    artifact.unlink(missing_ok=True)
    assert f"{scheme} flatbuffer does not compute" in refused(bench.export, run, scheme)
    assert not artifact.exists()


def test_weights_between_two_codes_are_exported(bench: Bench) -> None:
    run, network = bench.run("values", 4)
    for layer in qat.quantized_layers(network):
        if "kernel" in layer.quantizers:
            kernel, step = layer.layer.kernel, layer.grid("kernel").step
            lowest = -layer.quantizers["kernel"].form.steps // 2
            codes = np.clip(np.floor(kernel.numpy() / step), lowest, None)
            kernel.assign(((codes + 0.5) * step).astype(np.float32))
    bench.write(run, network)
    assert bench.export(run, "qat_w4a4").exists()


@pytest.mark.parametrize(
    ("kind", "bits", "options"),
    [
        *(("logits", bits, {}) for bits in (2, 3, 4)),
        ("values", 4, {"edge_bits": 4}),
        ("values", 4, {"learned_steps": True}),
        ("action", 4, {}),
        ("scaled images", 4, {}),
        ("logits", 3, {"per_channel": False}),
        ("values", 4, {"per_channel": True}),
    ],
)
def test_int4_computes_what_is_simulated(kind: str, bits: int, options: Any, bench: Bench) -> None:
    run, network = bench.run(kind, bits, **options)
    simulated = f"qat_w{bits}a{bits}"
    heads, expected = bench.heads(run, "qat_int4"), bench.heads(run, simulated)
    # A code may become its neighbour where multiples of a step are not exact in float32, as of
    # learned ones, and where convolutions of other kernels add a sum in another order.
    unequal = 0.005 if options.get("learned_steps") or "images" in kind else 0.0
    assert (heads != expected).mean() <= unequal
    np.testing.assert_allclose(heads, expected, atol=1.01 * qat.head_step(network))
    path = bench.workspace.artifact(run.run_id, "qat_int4")
    types = flatbuffer.audit(path).weight_dtypes
    kernels = [v.size for n, v in networks.weights(network).items() if n.endswith("kernel:0")]
    edge = 0 if options.get("edge_bits") == 4 else kernels[-1]
    assert (types["int4"], types.get("int8", 0)) == (sum(kernels) - edge, edge)
    saved = 3.5 * types["int4"] + 3 * edge  # An eighth of a kernel's bytes, or a quarter, is left.
    size = bench.workspace.artifact(run.run_id, simulated).stat().st_size - path.stat().st_size
    assert size > 0.9 * saved - 2000
    sidecar = Sidecar.load(sidecar_path(path))
    assert sidecar.native
    # A single sum halfway between two codes, which one network rounds to either by the processor
    # and the batch, is one of few images.
    assert sidecar.check["mean_steps_apart"] <= max(0.01, 1 / len(heads) + 1e-6)
