"""Every flatbuffer computes what its network does, and its sidecar tells the truth about it."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from samples import (
    Artifacts,
    Patch,
    observed,
    refused,
    settle,
    snapshot,
    write_network,
    write_training,
)

from quarl_tf import networks, pipeline, presets
from quarl_tf.agents import network_factory
from quarl_tf.environments import env_spec
from quarl_tf.export import convert
from quarl_tf.export.convert import load
from quarl_tf.foundation import provenance
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.files import sha256
from quarl_tf.networks import Weights
from quarl_tf.quantization.ptq import half_weights, quantize_weights
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import DEFAULT_SCHEMES, Run, Scheme
from quarl_tf.store.records import Sidecar, TrainingRecord
from quarl_tf.store.workspace import Workspace, sidecar_path

SIMULATED = [name for name in DEFAULT_SCHEMES if not Scheme.parse(name).native]
PAPER = "ptq_paper_w4"
MIXED = "ptq_w2-head=8-hidden_0=4"
ALL = [*DEFAULT_SCHEMES, PAPER, MIXED]


def make(workspace: Workspace, run: Run, *schemes: str) -> list[Path]:
    return pipeline.export(run.run_id, schemes, root=workspace.root)


@pytest.fixture(scope="module")
def exported(
    trained: Workspace, tiny_run: Run, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Return the tiny run's flatbuffers by scheme."""
    root = tmp_path_factory.mktemp("exported")
    shutil.copytree(trained.root, root, dirs_exist_ok=True)
    return dict(zip(ALL, make(Workspace(root), tiny_run, *ALL), strict=True))


@pytest.fixture
def copy(exported: Artifacts, tmp_path: Path) -> Workspace:
    """Return a copy of the workspace with everything exported, to be damaged."""
    shutil.copytree(exported["fp32"].parents[4], tmp_path, dirs_exist_ok=True)
    return Workspace(tmp_path)


def heads(path: Path, observations: np.ndarray) -> np.ndarray:
    policy = Policy.load(path)
    return np.stack([policy.head(observation) for observation in observations])


@pytest.mark.parametrize("name", ALL)
def test_sidecars_tell_what_is_in_the_file(
    exported: Artifacts, trained: Workspace, tiny_run: Run, name: str
) -> None:
    path = exported[name]
    sidecar = Sidecar.load(sidecar_path(path))
    record = TrainingRecord.load(trained.run_dir(tiny_run.run_id) / "training.json")
    audit = flatbuffer.audit(path)
    assert sidecar.sha256 == sha256(path)
    assert sidecar.size_bytes == path.stat().st_size
    assert (sidecar.scheme, sidecar.native) == (name, Scheme.parse(name).native)
    assert Run.from_dict(sidecar.run) == tiny_run
    assert sidecar.preset == record.preset
    assert sidecar.network_sha256 == record.network_sha256
    calibrated = record.calibration_sha256 if name == "int8" else None
    assert sidecar.calibration_sha256 == calibrated
    assert sidecar.tensor_dtypes == audit.tensor_dtypes
    assert sidecar.weight_dtypes == audit.weight_dtypes
    assert sidecar.operators == audit.operators
    assert sidecar.versions == provenance.package_versions()
    assert (sidecar.trained_on, sidecar.trained_commits) == (record.processors, record.commits)
    assert sidecar.trained_on == [provenance.processor()]
    assert sidecar.head == ("advantages" if name == "int8" else "q_values")
    assert (sidecar.num_actions, sidecar.observation_shape) == (2, [4])
    assert [(spec.shape, spec.dtype) for spec in audit.inputs] == [((1, 4), "float32")]
    assert [(spec.shape, spec.dtype) for spec in audit.outputs] == [((1, 2), "float32")]
    signatures = Interpreter(model_path=str(path)).get_signature_list()
    assert list(signatures.values()) == [{"inputs": ["observation"], "outputs": ["head"]}]
    check, count = sidecar.check, len(load(trained, tiny_run.run_id).observations)
    # Evenly spread over all of them; the rest is left to this file.
    assert min(count, 100) <= check["observations"] <= count
    assert 0 <= check["action_agreement"] <= 1
    assert check["action_agreement"] == 1 or name != "fp32"
    if name in ("int8", "dynamic_int8"):
        assert check["tolerance"] is None
        assert check["max_abs_difference"] > 0
    else:
        assert check["max_abs_difference"] <= check["tolerance"]


BREAKOUT, CARS = "BreakoutNoFrameskip-v4", "MountainCarContinuous-v0"
SMALL = {"network": [32, 32]}
FLAT = {"network": [16], "precision": "float32"}
KINDS: dict[str, tuple[Run, presets.Preset]] = {
    "values": (Run("dqn", "CartPole-v1", 4), presets.load("dqn", "CartPole-v1", SMALL)),
    "images": (Run("dqn", BREAKOUT, 0), presets.load("dqn", BREAKOUT, {"network": "li"})),
    "dueling images": (
        Run("dqn", BREAKOUT, 1),
        presets.load("dqn", BREAKOUT, {"network": "li", "dueling": True}),
    ),
    "flat images": (Run("dqn", BREAKOUT, 2), presets.load("dqn", BREAKOUT, FLAT)),
    "images, layer norm": (
        Run("dqn", BREAKOUT, 3),
        presets.load("dqn", BREAKOUT, {"network": "li", "layer_norm": True}),
    ),
    "dueling": (
        Run("dqn", "CartPole-v1", 0),
        presets.load("dqn", "CartPole-v1", {**SMALL, "dueling": True}),
    ),
    "continuous": (Run("ppo", CARS, 0), presets.load("ppo", "CartPole-v1", SMALL)),
    "layer norm": (Run("ddpg", CARS, 0), presets.load("ddpg", CARS, {**SMALL, "layer_norm": True})),
}


class Bench:
    """Networks as if they had been trained, and their flatbuffers, each made when asked for."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._networks: dict[str, tuple[Any, np.ndarray]] = {}

    @staticmethod
    def build(kind: str) -> Any:
        """Build a network as it is exported: float32, whatever it was trained in."""
        run, preset = KINDS[kind]
        preset = replace(preset, precision="float32")
        return network_factory(run.algo, env_spec(run.env_id), preset, run.seed)()

    def network(self, kind: str) -> tuple[Any, np.ndarray]:
        """Return a network, and the observations that it is calibrated on."""
        if kind not in self._networks:
            self._networks[kind] = self._make(kind)
        return self._networks[kind]

    def export(self, kind: str, scheme: str) -> Path:
        """Return a flatbuffer."""
        self.network(kind)
        return make(self._workspace, KINDS[kind][0], scheme)[0]

    def _make(self, kind: str) -> tuple[Any, np.ndarray]:
        run, preset = KINDS[kind]
        seen, network = observed(run.env_id, 4, 49), self.build(kind)
        if seen.dtype == np.uint8:
            # Half of the frames, which are much alike, become noise; no byte is at either end of
            # its range, as in many a game.
            noise = np.random.default_rng(0).integers(40, 200, seen[::2].shape, np.uint8)
            seen = np.clip(seen, 40, 200)
            seen[::2] = noise
        settle(network, seen, run.seed)
        if kind == "continuous":
            network.get_layer("action").log_deviation.assign(np.log([0.3]))
            head = network.get_layer("head").kernel
            head.assign(300 * head)  # As large as after a training.
        write_training(self._workspace, run, preset, networks.weights(network), seen)
        return network, seen


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(Workspace(tmp_path_factory.mktemp("bench")))


def centred(values: np.ndarray) -> np.ndarray:
    return values - values.mean(axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        *(("values", scheme) for scheme in ("fp32", "fp16", *SIMULATED, PAPER, MIXED)),
        *(("images", scheme) for scheme in ("fp32", "ptq_w4")),
        ("dueling images", "fp32"),
        *(("dueling", scheme) for scheme in ("fp32", "fp16", "ptq_w4")),
        ("continuous", "fp32"),
        *(("layer norm", scheme) for scheme in ("fp32", "fp16")),
    ],
)
def test_float_flatbuffers_of_any_kind_are_their_networks(
    bench: Bench, kind: str, scheme: str
) -> None:
    network, observations = bench.network(kind)
    path = bench.export(kind, scheme)
    twin, values = bench.build(kind), networks.weights(network)
    if scheme == "fp16":
        values = half_weights(values)
    elif scheme != "fp32":
        values = quantize_weights(values, Scheme.parse(scheme).recipe)
    networks.set_weights(twin, values)
    expected = twin(observations).numpy()
    assert np.ptp(expected, axis=0).min() > 0.1 or scheme == "ptq_w2"
    np.testing.assert_allclose(heads(path, observations), expected, rtol=1e-4, atol=1e-4)
    check = Sidecar.load(sidecar_path(path)).check
    assert check["max_abs_difference"] <= check["tolerance"]


@pytest.mark.parametrize("kind", ["images", "dueling images", "flat images"])
def test_fp16_of_images_is_nearly_the_network(bench: Bench, kind: str) -> None:
    network, observations = bench.network(kind)
    expected = network(observations).numpy()
    path = bench.export(kind, "fp16")
    np.testing.assert_allclose(
        heads(path, observations), expected, atol=2e-3 * np.abs(expected).max()
    )
    assert flatbuffer.audit(path).weight_dtypes["float16"] > 0.99 * network.count_params()


@pytest.mark.parametrize("kind", ["values", "images"])
def test_dynamic_int8_is_nearly_the_network(bench: Bench, kind: str) -> None:
    network, observations = bench.network(kind)
    expected = network(observations).numpy()
    path = bench.export(kind, "dynamic_int8")
    found = heads(path, observations)
    assert 0 < np.abs(found - expected).mean() < 0.02 * np.abs(expected).max()
    # Small kernels stay in float.
    kernels = [v.shape.num_elements() for v in network.variables if "kernel" in v.name]
    large = [size for size in kernels if size >= 1024 or kind == "images"]
    audit = flatbuffer.audit(path)
    assert audit.weight_dtypes["int8"] == sum(large)
    assert any(op.endswith(" float32\N{MULTIPLICATION SIGN}int8") for op in audit.operators)


@pytest.mark.parametrize("kind", ["images", "dueling images", "flat images"])
def test_int8_of_images_is_integer_from_the_bytes_on(bench: Bench, kind: str) -> None:
    audit = flatbuffer.audit(bench.export(kind, "int8"))
    (pixels,) = audit.inputs
    assert (pixels.dtype, pixels.shape) == ("uint8", (1, 84, 84, 4))
    # One step of the input stands for one step of a byte.
    assert (pixels.scale, pixels.zero_point) == (1.0, 0)
    *inside, last = audit.operators
    assert last == "DEQUANTIZE float32"
    assert all(operator.endswith(" int8") for operator in inside)
    assert "float32" not in audit.weight_dtypes


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_int8_of_any_kind_is_close_to_what_chooses(bench: Bench, kind: str) -> None:
    network, observations = bench.network(kind)
    path = bench.export(kind, "int8")
    expected, found = network(observations).numpy(), heads(path, observations)
    discrete = expected.shape[1] > 1
    if discrete:
        expected, found = centred(expected), centred(found)
    error = np.abs(found - expected)
    # Layer normalisation is eight operations, each with a rounding of its own.
    steps = 12 if "layer norm" in kind else 3
    assert error.mean() < steps * np.ptp(expected) / 255
    if discrete:
        clear = np.diff(np.sort(expected, axis=1)[:, -2:])[:, 0] > 0.1 * np.ptp(expected)
        assert np.count_nonzero(clear) > 10
        np.testing.assert_array_equal(found.argmax(axis=1)[clear], expected.argmax(axis=1)[clear])
    check = Sidecar.load(sidecar_path(path)).check
    # The sidecar compares the same, not Q-values with advantages.
    assert check["max_abs_difference"] == pytest.approx(error.max(), rel=1e-3)


@pytest.mark.parametrize("kind", ["dueling", "dueling images"])
def test_int8_of_a_dueling_network_has_no_value_stream(bench: Bench, kind: str) -> None:
    network, _ = bench.network(kind)
    names = [variable.name for variable in network.variables if "kernel" in variable.name]
    assert any(name.startswith("value") for name in names)
    path = bench.export(kind, "int8")
    found = [kernel.size for kernel in flatbuffer.weights(path).values() if kernel.ndim > 1]
    values = networks.weights(network)
    first, *others = [values[name].size for name in names if not name.startswith("value")]
    # A feature of a vector has two weights in the first layer.
    assert found == [first if kind == "dueling images" else 2 * first, *others]
    assert Policy.load(path).sidecar.head == "advantages"


@pytest.mark.parametrize("scheme", ["fp32", "int8"])
def test_mean_and_deviation_of_continuous_policies_are_exported(bench: Bench, scheme: str) -> None:
    network, observations = bench.network("continuous")
    policy = Policy.load(bench.export("continuous", scheme))
    sidecar = policy.sidecar
    assert (sidecar.head, sidecar.action_low, sidecar.action_high) == ("action", [-1.0], [1.0])
    assert sidecar.action_std == pytest.approx([0.3])
    # The head is the mean as it is; acting keeps within the bounds.
    means = network(observations).numpy()
    assert np.abs(means).max() > 1.2
    acted = np.stack([policy.act(observation) for observation in observations])
    np.testing.assert_allclose(acted, np.clip(means, -1, 1), atol=0.1)
    assert np.abs(acted).max() == 1


def test_exporting_again_touches_nothing(copy: Workspace, tiny_run: Run) -> None:
    folder = copy.artifact_dir(tiny_run.run_id)
    before = snapshot(folder)
    paths = make(copy, tiny_run, "int8", "fp32", "ptq_w4")
    assert [path.name for path in paths] == ["int8.tflite", "fp32.tflite", "ptq_w4.tflite"]
    assert snapshot(folder) == before


def test_numbers_beyond_half_precision_are_refused_in_one_line(
    copy: Workspace, tiny_run: Run
) -> None:
    mean = {"normalizer/mean:0": np.full(4, 1e6, np.float32)}
    write_network(copy.run_dir(tiny_run.run_id), trained_weights(copy, tiny_run) | mean)
    with pytest.raises(QuarlError, match=r"up to 65504.*--schemes.*Received: .*=1000000"):
        make(copy, tiny_run, "fp16")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-9] + b"\xff" * 9),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    # Interrupted between flatbuffer and sidecar.
    "no sidecar": lambda path: sidecar_path(path).unlink(),
    "half a sidecar": lambda path: sidecar_path(path).write_text('{"run": {"algo"'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_flatbuffers_are_made_again(
    copy: Workspace, tiny_run: Run, damage: Callable[[Path], object]
) -> None:
    folder = copy.artifact_dir(tiny_run.run_id)
    before, path = snapshot(folder), folder / "ptq_w4.tflite"
    damage(path)
    make(copy, tiny_run, "fp32", "ptq_w4")
    after = snapshot(folder)
    made = {name for name, (changed, _) in after.items() if before[name][0] != changed}
    assert made == {"ptq_w4.tflite", "ptq_w4.json"}
    Policy.load(path)
    contents = ({name: content for name, (_, content) in x.items()} for x in (before, after))
    assert next(contents) == next(contents)


def trained_weights(workspace: Workspace, run: Run) -> Weights:
    return load(workspace, run.run_id).weights


def test_flatbuffers_of_another_network_are_replaced(
    copy: Workspace, exported: Artifacts, tiny_run: Run
) -> None:
    other, shift = trained_weights(copy, tiny_run), np.array([1, -1], np.float32)
    other["head/bias:0"] += shift
    write_network(copy.run_dir(tiny_run.run_id), other)
    (path,) = make(copy, tiny_run, "fp32")
    observations = load(copy, tiny_run.run_id).observations
    before = heads(exported["fp32"], observations)
    np.testing.assert_allclose(heads(path, observations), before + shift, rtol=1e-4, atol=1e-4)


def test_flatbuffers_of_another_scheme_are_replaced(copy: Workspace, tiny_run: Run) -> None:
    folder = copy.artifact_dir(tiny_run.run_id)
    for suffix in (".tflite", ".json"):
        shutil.copy(folder / f"fp32{suffix}", folder / f"ptq_w2{suffix}")
    (path,) = make(copy, tiny_run, "ptq_w2")
    assert all(len(np.unique(kernel)) <= 4 for kernel in flatbuffer.weights(path).values())


def refusal(workspace: Workspace, run_id: str) -> str:
    return refused(pipeline.export, run_id, ["ptq_w16"], root=workspace.root)


def test_a_converter_that_fails_without_a_word_is_one_line(
    copy: Workspace, tiny_run: Run, monkeypatch: Patch
) -> None:
    class Speechless:
        def convert(self) -> bytes:
            raise MemoryError

    monkeypatch.setattr(convert, "of_function", lambda *_: Speechless())
    with pytest.raises(QuarlError, match=r"^The TFLite converter failed: MemoryError"):
        make(copy, tiny_run, "ptq_w12")


def test_unknown_run_is_refused(copy: Workspace) -> None:
    message = refusal(copy, "dqn-CartPole-v1-s7")
    assert "The run does not exist; train it first (quarl train" in message
    assert "Received: run='dqn-CartPole-v1-s7'" in message
    assert not copy.artifact_dir("dqn-CartPole-v1-s7").exists()


def test_unfinished_run_is_refused(copy: Workspace, tiny_run: Run) -> None:
    (copy.run_dir(tiny_run.run_id) / "training.json").unlink()
    assert "The run is not finished; train it first" in refusal(copy, tiny_run.run_id)


@pytest.mark.parametrize("name", ["network.npz", "calibration.npz"])
def test_changed_training_is_refused_and_its_flatbuffers_are_left(
    copy: Workspace, tiny_run: Run, name: str
) -> None:
    before = snapshot(copy.artifact_dir(tiny_run.run_id))
    path = copy.run_dir(tiny_run.run_id) / name
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path} was changed or damaged after training" in refusal(copy, tiny_run.run_id)
    assert snapshot(copy.artifact_dir(tiny_run.run_id)) == before


def test_folder_that_cannot_be_written_is_refused(copy: Workspace, tiny_run: Run) -> None:
    folder = copy.artifact_dir(tiny_run.run_id)
    shutil.rmtree(folder)
    folder.write_bytes(b"a file")
    message = refusal(copy, tiny_run.run_id)
    assert f"Cannot write {folder}" in message
    assert folder.read_bytes() == b"a file"


def test_network_that_is_not_finite_is_refused(copy: Workspace, tiny_run: Run) -> None:
    folder = copy.run_dir(tiny_run.run_id)
    before = snapshot(copy.artifact_dir(tiny_run.run_id))
    lost = {"head/bias:0": np.array([np.nan, 0], np.float32)}
    write_network(folder, trained_weights(copy, tiny_run) | lost)
    assert "nan" in refusal(copy, tiny_run.run_id)
    assert snapshot(copy.artifact_dir(tiny_run.run_id)) == before


def test_flatbuffer_that_is_not_its_network_is_refused(
    copy: Workspace, tiny_run: Run, monkeypatch: Patch
) -> None:
    path = copy.artifact(tiny_run.run_id, "fp16")
    path.unlink()

    def shifted(weights: Weights) -> Weights:
        # A hundredth of the head: as if the converter had lost a little of the network.
        return half_weights(weights) | {"head/bias:0": weights["head/bias:0"] + np.float32(0.01)}

    monkeypatch.setattr(convert, "half_weights", shifted)
    with pytest.raises(QuarlError, match=r"fp16 flatbuffer does not compute .*nothing was written"):
        make(copy, tiny_run, "fp16")
    assert not path.exists()
