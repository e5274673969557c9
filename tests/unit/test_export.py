"""Every flatbuffer computes what its network does, and its sidecar describes it."""

import re
import shutil
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import samples
from ai_edge_litert.interpreter import Interpreter
from samples import Artifacts, Patch, built, heads, refused, snapshot, write_network

from quarl_tf import Policy, networks, pipeline, presets
from quarl_tf.environments import env_spec
from quarl_tf.export import convert
from quarl_tf.export.graph import Graph
from quarl_tf.export.ptq import described
from quarl_tf.runtime import flatbuffer
from quarl_tf.spec import Run, Scheme
from quarl_tf.store.records import Sidecar
from quarl_tf.store.workspace import Workspace, sidecar_path
from quarl_tf.training.exported import variables

ALL = ["fp32", "fp16", "dynamic_int8", "int8", "ptq_w4", "ptq_paper_w4", "ptq_w2-head=8-hidden_0=4"]
POLE, FRAMES, CARS = "CartPole-v1", "Frames-v0", "MountainCarContinuous-v0"
SMALL, IMAGES = {"network": [32, 32]}, {"network": "li"}
SCALED = {"byte_zero": 87, "byte_unit": 60.0}
KINDS = {
    "values": Run("dqn", POLE, 4, SMALL),
    "images": Run("dqn", FRAMES, 0, IMAGES),
    "scaled images": Run("dqn", FRAMES, 2, {**IMAGES, **SCALED}),
    "dense images": Run("dqn", FRAMES, 5, {"network": [16, 16], **SCALED}),
    "dueling images": Run("dqn", FRAMES, 1, {**IMAGES, "dueling": True}),
    "images, layer norm": Run("dqn", FRAMES, 3, {**IMAGES, "layer_norm": True}),
    "dueling": Run("dqn", POLE, 0, {**SMALL, "dueling": True}),
    "continuous": Run("ppo", CARS, 0, SMALL),
    "steering": Run("ppo", "Steering-v0", 0, SMALL),
    "squashed steering": Run("ddpg", "Steering-v0", 0, SMALL),
    "bytes": Run("dqn", "Bytes-v0", 0, {**SMALL, **SCALED}),
    "layer norm": Run("ddpg", CARS, 0, {**SMALL, "layer_norm": True}),
}
VALUES = KINDS["values"]


def make(workspace: Workspace, run: Run, *schemes: str) -> list[Path]:
    return pipeline.export(run.run_id, schemes or None, root=workspace.root)


class Bench:
    """Networks as if they had been trained, and their flatbuffers."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self.network = cache(self._make)

    def export(self, kind: str, scheme: str) -> Path:
        self.network(kind)
        return make(self._workspace, KINDS[kind], scheme)[0]

    def compared(self, kind: str, scheme: str) -> tuple[Path, np.ndarray, np.ndarray]:
        """Return a flatbuffer, and the heads of its network and its own, centred if they are."""
        (network, observations), path = self.network(kind), self.export(kind, scheme)
        expected, actual = network(observations).numpy(), heads(path, observations)
        if Policy.load(path).sidecar.head == "advantages":
            expected, actual = (x - x.mean(axis=1, keepdims=True) for x in (expected, actual))
        return path, expected, actual

    def _make(self, kind: str) -> tuple[Any, np.ndarray]:
        """Return a network, and the observations that it is calibrated on."""
        run = KINDS[kind]
        observations, network = samples.observed(run.env_id, 4, 49), built(run)
        samples.settle(network, observations, run.seed)
        if run.algo == "ppo":
            deviation = network.get_layer("action").log_deviation
            deviation.assign(np.full(deviation.shape, np.log(0.3)))
            head = network.get_layer("head").kernel
            head.assign(300 * head)  # As large as after a training.
        samples.write_training(self._workspace, run, networks.weights(network), observations)
        return network, observations


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(Workspace(tmp_path_factory.mktemp("bench")))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return flatbuffers of values by scheme, in a workspace of their own."""
    bench = Bench(Workspace(tmp_path_factory.mktemp("exported")))
    return {name: bench.export("values", name) for name in ALL}


@pytest.fixture
def copy(exported: Artifacts, tmp_path: Path) -> Workspace:
    """Return a copy of the workspace with all flatbuffers, to be damaged."""
    shutil.copytree(exported["fp32"].parents[4], tmp_path, dirs_exist_ok=True)
    return Workspace(tmp_path)


@pytest.mark.parametrize("name", ALL)
def test_sidecars_describe_the_file(exported: Artifacts, name: str) -> None:
    path, sidecar = exported[name], Sidecar.load(sidecar_path(exported[name]))
    training = convert.TrainedNetwork(Workspace(path.parents[4]), VALUES)
    record, count, audit = training.record, len(training.observations), flatbuffer.audit(path)
    expected = described(path.read_bytes()) | {
        "size_bytes": path.stat().st_size,
        "weight_dtypes": audit.weight_dtypes,
        "check": sidecar.check,
        "scheme": name,
        "native": Scheme.parse(name).native,
        "run": VALUES.to_dict(),
        "preset": record.preset,
        "network_sha256": record.network_sha256,
        "calibration_sha256": record.calibration_sha256 if name == "int8" else None,
        "trained_on": record.processors,
        "trained_commits": record.commits,
        "head": "advantages" if name == "int8" else "q_values",
        "run_id": VALUES.run_id,
        "env_id": "CartPole-v1",
        "action_std": None,
        **env_spec(POLE).facts,
    }
    assert vars(sidecar) == expected
    ends = [(spec.shape, spec.dtype) for spec in (*audit.inputs, *audit.outputs)]
    assert ends == [((1, 4), "float32"), ((1, 2), "float32")]
    signatures = Interpreter(model_path=str(path)).get_signature_list()
    assert list(signatures.values()) == [{"inputs": ["observation"], "outputs": ["head"]}]
    check = sidecar.check
    assert min(count, 100) <= check["observations"] <= count
    assert 0 <= check["action_agreement"] <= 1
    assert check["action_agreement"] == 1 or name != "fp32"
    if name == "fp32":
        assert check["max_abs_difference"] <= check["tolerance"]
    else:
        assert check["max_abs_difference"] > 0


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        *product(("images", "scaled images", "continuous", "dueling", "steering"), ("fp32",)),
        *product(("values", "squashed steering", "layer norm"), ("fp32", "fp16")),
    ],
)
def test_float_flatbuffers_are_their_networks(bench: Bench, kind: str, scheme: str) -> None:
    (network, observations), path = bench.network(kind), bench.export(kind, scheme)
    twin, values = built(KINDS[kind]), networks.weights(network)
    if scheme == "fp16":
        rounded = (name for name in values if "kernel" in name or "bias" in name)
        values |= {name: np.float32(values[name].astype(np.float16)) for name in rounded}
    networks.set_weights(twin, values)
    expected = twin(observations).numpy()
    assert np.ptp(expected, axis=0).min() > 0.1
    np.testing.assert_allclose(heads(path, observations), expected, rtol=1e-4, atol=1e-4)
    sidecar = Sidecar.load(sidecar_path(path))
    std = [0.3] * len(sidecar.action_low or ())  # Of PPO's continuous actions.
    assert sidecar.action_std == (pytest.approx(std) if KINDS[kind].algo == "ppo" else None)
    if kind == "continuous":  # The head is the mean as it is; acting keeps within the bounds.
        assert np.abs(expected).max() > 1.2
        assert (sidecar.head, sidecar.action_low, sidecar.action_high) == ("action", [-1], [1])


@pytest.mark.parametrize("kind", ["images", "scaled images", "bytes"])
def test_fp16_of_bytes_is_nearly_the_network(bench: Bench, kind: str) -> None:
    path, expected, actual = bench.compared(kind, "fp16")
    np.testing.assert_allclose(actual, expected, atol=2e-3 * np.abs(expected).max())
    network, audit = bench.network(kind)[0], flatbuffer.audit(path)
    assert audit.weight_dtypes["float16"] > 0.99 * network.count_params()
    assert not any("MUL" in operator or "SUB" in operator for operator in audit.operators)
    preset = presets.restore("dqn", Sidecar.load(sidecar_path(path)).preset)
    weights = networks.weights(network)
    for name, values in variables(path, preset).items():
        np.testing.assert_allclose(values, weights[name], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", ["values", "images"])
def test_dynamic_int8_is_nearly_the_network(bench: Bench, kind: str) -> None:
    network, _ = bench.network(kind)
    path, expected, actual = bench.compared(kind, "dynamic_int8")
    assert 0 < np.abs(actual - expected).mean() < 0.02 * np.abs(expected).max()
    # Small kernels stay in float.
    kernels = [v.shape.num_elements() for v in network.variables if "kernel" in v.name]
    large = [size for size in kernels if size >= 1024 or kind == "images"]
    audit = flatbuffer.audit(path)
    assert audit.weight_dtypes["int8"] == sum(large)
    assert any(op.endswith(" float32\N{MULTIPLICATION SIGN}int8") for op in audit.operators)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_int8_of_any_kind_is_close_to_the_network(bench: Bench, kind: str) -> None:
    path, expected, actual = bench.compared(kind, "int8")
    error = np.abs(actual - expected)
    # Layer normalisation is eight operations, each with a rounding of its own.
    assert error.mean() < (12 if "layer norm" in kind else 3) * np.ptp(expected) / 255
    if KINDS[kind].algo == "dqn":
        clear = np.diff(np.sort(expected, axis=1)[:, -2:])[:, 0] > 0.1 * np.ptp(expected)
        assert np.count_nonzero(clear) > 10
        np.testing.assert_array_equal(actual.argmax(axis=1)[clear], expected.argmax(axis=1)[clear])
    sidecar = Sidecar.load(sidecar_path(path))
    assert sidecar.head == ("advantages" if KINDS[kind].algo == "dqn" else "action")
    # The sidecar compares the same, not Q-values with advantages.
    assert sidecar.check["max_abs_difference"] == pytest.approx(error.max(), rel=1e-3)
    if "images" in kind and "norm" not in kind:  # Integers from the bytes on.
        audit = flatbuffer.audit(path)
        (source,) = audit.inputs
        assert (source.shape, source.dtype) == ((1, 28, 28, 4), "uint8")
        assert (*source.scales, *source.zero_points) == (1.0, 0)
        assert all(operator.endswith(" int8") for operator in audit.operators[:-5])
        names = ["DEQUANTIZE"] * 2 + ["ADD"] * 2 + ["MUL"]
        assert audit.operators[-5:] == [f"{name} float32" for name in names]
        # Where the sum begins, and what each output is multiplied with.
        assert audit.weight_dtypes["float32"] == 1 + expected.shape[1]


@pytest.mark.parametrize("scheme", ["int8_stock", "ptq_opt_w4", "ptq_opt_w4a4"])
def test_sidecars_say_whether_values_are_centred(bench: Bench, scheme: str) -> None:
    path, expected, actual = bench.compared("values", scheme)
    sidecar, error = Sidecar.load(sidecar_path(path)), np.abs(actual - expected).max()
    assert sidecar.head == ("advantages" if scheme == "ptq_opt_w4a4" else "q_values")
    assert sidecar.check["max_abs_difference"] == pytest.approx(error, rel=1e-3)
    assert error < 0.5 * np.ptp(expected)
    audit = flatbuffer.audit(path)
    ends = {tensor.dtype for tensor in (*audit.inputs, *audit.outputs)}
    assert ends == {"int8" if scheme == "int8_stock" else "float32"}


def test_the_head_of_a_dueling_flatbuffer_is_the_layer_of_the_actions(bench: Bench) -> None:
    path = bench.export("dueling", "fp32")
    graph = Graph(before := path.read_bytes())
    layers = {name: graph.tensors[op.outputs[0]].name for name, op in graph.layers().items()}
    assert b"policy/head" in layers["head"]
    assert [name for name, tensor in layers.items() if b"value" in tensor] == list(layers)[-2:]
    assert all(name.startswith("hidden_") for name in layers if name != "head")
    path.unlink()
    built(KINDS["dueling"])  # A flatbuffer does not depend on networks built before.
    assert bench.export("dueling", "fp32").read_bytes() == before


@pytest.mark.parametrize("kind", ["dueling", "dueling images"])
def test_int8_of_a_dueling_network_has_no_value_stream(bench: Bench, kind: str) -> None:
    assert Policy.load(bench.export(kind, "ptq_opt_w4")).sidecar.head == "advantages"
    weights = flatbuffer.weights(bench.export(kind, "int8")).values()
    values = networks.weights(bench.network(kind)[0]).items()
    kernels = {name.partition("/")[0]: value.size for name, value in values if "kernel" in name}
    assert any(name.startswith("value") for name in kernels)
    first, *middle, head = [n for name, n in kernels.items() if not name.startswith("value")]
    # A feature of a vector has two weights in the first layer; a head of images has two layers.
    images = kind == "dueling images"
    expected = [first if images else 2 * first, *middle, head]
    sizes = [kernel.size for kernel in weights if kernel.ndim > 1]
    assert sizes[: len(expected)] == expected
    assert [size > head for size in sizes[len(expected) :]] == [True] * images


@pytest.mark.parametrize("suffix", [".tflite", ".json"])
@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_damaged_files_are_remade(copy: Workspace, suffix: str, damage: str) -> None:
    folder = copy.artifact_dir(VALUES.run_id)
    before, path = snapshot(folder), folder / "ptq_w4.tflite"
    file = path.with_suffix(suffix)
    content = file.read_bytes()
    file.unlink()
    if damage == "flipped":
        file.write_bytes(content[:-9] + b"\xff" * 9)
    assert make(copy, VALUES, "int8", "ptq_w4", "fp32")[1] == path
    after = snapshot(folder)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"ptq_w4.tflite", "ptq_w4.json"}
    assert all(after[name][1] == content for name, (_, content) in before.items())


def test_files_of_another_network_or_scheme_are_remade(copy: Any, exported: Artifacts) -> None:
    training, shift = convert.TrainedNetwork(copy, VALUES), np.array([1, -1], np.float32)
    training.weights["head/bias:0"] += shift
    write_network(copy.run_dir(VALUES.run_id), training.weights)
    (path,) = make(copy, VALUES, "fp32")
    observations = training.observations
    expected = heads(exported["fp32"], observations) + shift
    np.testing.assert_allclose(heads(path, observations), expected, rtol=1e-4, atol=1e-4)
    for suffix in (".tflite", ".json"):
        shutil.copy(path.with_suffix(suffix), path.with_name(f"ptq_w2{suffix}"))
    (path,) = make(copy, VALUES, "ptq_w2")
    assert all(len(np.unique(kernel)) <= 4 for kernel in flatbuffer.weights(path).values())


def refusal(workspace: Workspace, run_id: str, *schemes: str) -> str:
    return refused(pipeline.export, run_id, schemes or ["ptq_w16"], root=workspace.root)


def test_what_cannot_be_made_is_refused(copy: Workspace, monkeypatch: Patch) -> None:
    run_id = VALUES.run_id
    half, few_bits = (copy.artifact(run_id, scheme) for scheme in ("fp16", "ptq_w4"))
    half.unlink()

    float32 = convert.TrainedNetwork._float32

    def shifted(training: convert.TrainedNetwork, *, acting: bool) -> tuple[bytes, Any]:
        # As if the converter had lost a little of the network.
        content, _ = float32(training, acting=acting)
        weights = {name: value + np.float32(0.01) for name, value in training.weights.items()}
        return content, training.network(weights)

    with monkeypatch.context() as patch:
        patch.setattr(convert.TrainedNetwork, "_float32", shifted)
        message = refusal(copy, run_id, "fp16")
        assert "The fp32 flatbuffer does not compute" in message
        assert "nothing was written" in message
    with monkeypatch.context() as patch:
        broken = Mock(convert=Mock(side_effect=MemoryError))
        patch.setattr(convert, "of_function", lambda *_: broken)
        assert refusal(copy, run_id).startswith("The TFLite converter failed: MemoryError")
    large = {"head/bias:0": np.full(2, 1e6, np.float32)}
    write_network(copy.run_dir(run_id), convert.TrainedNetwork(copy, VALUES).weights | large)
    few_bits.unlink()
    message = refusal(copy, run_id, "fp16", "ptq_w4")
    assert re.search(r"up to 65504.*Received: .*head.* up to 1000000", message)
    assert not half.exists()
    assert few_bits.exists()  # What follows it is made.


def test_damaged_trainings_are_refused_and_flatbuffers_are_kept(copy: Workspace) -> None:
    run_id, lost = VALUES.run_id, {"head/bias:0": np.array([np.nan, 0], np.float32)}
    folder, before = copy.run_dir(run_id), snapshot(copy.artifact_dir(run_id))
    path, weights = folder / "network.npz", convert.TrainedNetwork(copy, VALUES).weights
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path} was changed or damaged after training" in refusal(copy, run_id)
    write_network(folder, weights | lost)
    assert "nan" in refusal(copy, run_id)
    for unfit in ("int8", []):
        assert f"schemes={unfit!r}" in refused(pipeline.export, run_id, unfit, root=copy.root)
        assert f"run_ids={unfit!r}" in refused(pipeline.report, unfit, root=copy.root)
    assert "adopt it first" in refusal(copy, "adopted-CartPole-v1-s0-mine")
    assert snapshot(copy.artifact_dir(run_id)) == before
    floats = (copy.artifact(run_id, scheme) for scheme in ("fp32", "fp16"))
    for path in (folder / "training.json", *floats):
        path.unlink()
    assert "--schemes ptq_w16 --root DIR" in refusal(copy, run_id)
