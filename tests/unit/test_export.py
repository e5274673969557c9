"""Every flatbuffer computes what its network does, and its sidecar tells the truth about it."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from samples import Artifacts, Patch

from quarl_tf import networks, presets
from quarl_tf.agents import network_factory
from quarl_tf.environments import env_spec, make_vector
from quarl_tf.export import convert
from quarl_tf.export.check import FLOAT_TOLERANCE
from quarl_tf.export.convert import export
from quarl_tf.foundation import provenance
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.files import sha256
from quarl_tf.networks import Weights, inference
from quarl_tf.quantization.grid import fake_quantize, round_to_half
from quarl_tf.quantization.ptq import half_weights, quantize_weights
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import DEFAULT_SCHEMES, Run, Scheme, TensorFormat
from quarl_tf.store.records import Sidecar, TrainingRecord
from quarl_tf.store.workspace import Workspace, sidecar_path

SIMULATED = [name for name in DEFAULT_SCHEMES if not Scheme.parse(name).native]
PAPER = "ptq_paper_w4"
MIXED = "ptq_w2-head=8-hidden_0=4"
ALL = [*DEFAULT_SCHEMES, PAPER, MIXED]


def silent(*_: Any) -> None:
    """Show no progress."""


def make(workspace: Workspace, run: Run, *schemes: str) -> list[Path]:
    return export(workspace, run.run_id, [Scheme.parse(name) for name in schemes], silent)


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return when every flatbuffer and sidecar was changed, and what is in it."""
    files = [p for p in folder.iterdir() if p.suffix in (".tflite", ".json")]
    return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in files}


def head(weights: Weights, observations: np.ndarray) -> np.ndarray:
    """Compute the heads of the tiny network by Keras."""
    run = Run("dqn", "CartPole-v1", 0, {"network": [32, 32]})
    preset = presets.load(run.algo, run.env_id, run.overrides)
    network = network_factory(run.algo, env_spec(run.env_id), preset, run.seed)()
    networks.set_weights(network, weights)
    return inference.forward(network)(observations)


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


@pytest.fixture(scope="module")
def weights(trained: Workspace, tiny_run: Run) -> Weights:
    return networks.load_weights(trained.run_dir(tiny_run.run_id) / "network.npz")


@pytest.fixture(scope="module")
def observations(trained: Workspace, tiny_run: Run) -> np.ndarray:
    path = trained.run_dir(tiny_run.run_id) / "calibration.npz"
    return networks.load_weights(path)["observations"]


def kernels(weights: Weights) -> list[np.ndarray]:
    """Return the kernels as flatbuffers store them: outputs first."""
    return [value.T for name, value in weights.items() if name.endswith("/kernel:0")]


def heads(path: Path, observations: np.ndarray) -> np.ndarray:
    policy = Policy.load(path)
    return np.stack([policy.head(observation) for observation in observations])


# Heads.


def test_fp32_is_the_network(
    exported: Artifacts, weights: Weights, observations: np.ndarray
) -> None:
    expected = head(weights, observations)
    scale = max(1.0, np.abs(expected).max())
    found = heads(exported["fp32"], observations)
    np.testing.assert_allclose(found, expected, rtol=0, atol=FLOAT_TOLERANCE * scale)


def test_fp16_is_the_network_with_its_weights_rounded_to_half(
    exported: Artifacts, weights: Weights, observations: np.ndarray
) -> None:
    expected = head(half_weights(weights), observations)
    found = heads(exported["fp16"], observations)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*SIMULATED, PAPER, MIXED])
def test_simulated_schemes_are_the_network_with_quantised_weights(
    exported: Artifacts, weights: Weights, observations: np.ndarray, name: str
) -> None:
    scheme = Scheme.parse(name)
    quantised = quantize_weights(weights, scheme.recipe)
    found = heads(exported[name], observations)
    np.testing.assert_allclose(found, head(quantised, observations), rtol=1e-4, atol=1e-4)


def test_int8_is_close_to_the_centred_network(
    exported: Artifacts, weights: Weights, observations: np.ndarray
) -> None:
    expected = head(weights, observations)
    expected = expected - expected.mean(axis=1, keepdims=True)
    found = heads(exported["int8"], observations)
    # A 255th of the range for the head's own rounding, and as much again for each layer before.
    step = (expected.max() - expected.min()) / 255
    assert np.abs(found - expected).mean() < 3 * step


def test_dynamic_int8_is_close_to_the_network(
    exported: Artifacts, weights: Weights, observations: np.ndarray
) -> None:
    expected = head(weights, observations)
    found = heads(exported["dynamic_int8"], observations)
    # One layer of three is quantised, weights and activations, to a 255th of their range each.
    assert 0 < np.abs(found - expected).mean() < 0.02 * np.abs(expected).max()
    audit = flatbuffer.audit(exported["dynamic_int8"])
    assert audit.weight_dtypes["int8"] == 32 * 32


def test_heads_are_of_the_actions(exported: Artifacts) -> None:
    for name, path in exported.items():
        sidecar = Policy.load(path).sidecar
        assert sidecar.head == ("advantages" if name == "int8" else "q_values")
        assert (sidecar.num_actions, sidecar.observation_shape) == (2, [4])


# Weights, read back from the files.


@pytest.mark.parametrize("name", SIMULATED)
def test_kernels_have_no_more_values_than_the_bits_allow(
    exported: Artifacts, weights: Weights, name: str
) -> None:
    bits = Scheme.parse(name).weight_bits
    found = list(flatbuffer.weights(exported[name]).values())
    assert [kernel.shape for kernel in found] == [kernel.shape for kernel in kernels(weights)]
    for kernel, original in zip(found, kernels(weights), strict=True):
        assert len(np.unique(kernel)) <= 2**bits
        np.testing.assert_array_equal(
            kernel, fake_quantize(original, TensorFormat(bits=bits, step="paper"))
        )
    # The network has one kernel of more weights than any of these codes.
    assert max(len(np.unique(original)) for original in kernels(weights)) > 2**8


def test_the_published_rule_has_other_weights(exported: Artifacts) -> None:
    published = flatbuffer.weights(exported[PAPER]).values()
    ours = flatbuffer.weights(exported["ptq_w4"]).values()
    assert all(len(np.unique(kernel)) <= 2**4 + 1 for kernel in published)
    assert not all(np.array_equal(a, b) for a, b in zip(published, ours, strict=True))


def test_float_schemes_keep_the_weights(exported: Artifacts, weights: Weights) -> None:
    whole = flatbuffer.weights(exported["fp32"]).values()
    half = flatbuffer.weights(exported["fp16"]).values()
    for original, first, second in zip(kernels(weights), whole, half, strict=True):
        np.testing.assert_array_equal(first, original)
        np.testing.assert_array_equal(second, round_to_half(original))


def test_int8_is_integer_in_every_layer(exported: Artifacts, weights: Weights) -> None:
    audit = flatbuffer.audit(exported["int8"])
    layers = [op for op in audit.operators if op.startswith("FULLY_CONNECTED")]
    assert layers == ["FULLY_CONNECTED int8"] * 3
    assert audit.weight_dtypes["int8"] == sum(kernel.size for kernel in kernels(weights))
    # What is left in float is the normaliser's statistics and its clip.
    assert audit.weight_dtypes.get("float32", 0) <= 2 * 4 + 2


@pytest.mark.parametrize("name", ALL)
def test_flatbuffers_take_one_raw_observation(exported: Artifacts, name: str) -> None:
    audit = flatbuffer.audit(exported[name])
    assert [(spec.shape, spec.dtype) for spec in audit.inputs] == [((1, 4), "float32")]
    assert [(spec.shape, spec.dtype) for spec in audit.outputs] == [((1, 2), "float32")]
    signatures = Interpreter(model_path=str(exported[name])).get_signature_list()
    assert list(signatures.values()) == [{"inputs": ["observation"], "outputs": ["head"]}]


# Sidecars.


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


def test_checks_are_kept_with_what_they_allow(
    exported: Artifacts, observations: np.ndarray
) -> None:
    for name, path in exported.items():
        check = Sidecar.load(sidecar_path(path)).check
        # Evenly spread over all of them; the rest is left to this file.
        assert min(len(observations), 100) <= check["observations"] <= len(observations)
        assert 0 <= check["action_agreement"] <= 1
        if name in ("int8", "dynamic_int8"):
            assert check["tolerance"] is None
            assert check["max_abs_difference"] > 0
        else:
            assert check["max_abs_difference"] <= check["tolerance"]
    fp32 = Sidecar.load(sidecar_path(exported["fp32"])).check
    assert fp32["action_agreement"] == 1


def test_only_native_schemes_are_smaller(exported: Artifacts) -> None:
    sizes = {name: path.stat().st_size for name, path in exported.items()}
    assert sizes["dynamic_int8"] < sizes["fp16"] < sizes["fp32"]
    assert sizes["int8"] < sizes["fp32"]
    assert {sizes[name] for name in (*SIMULATED, PAPER)} == {sizes["fp32"]}


# Networks of other kinds, with the weights that training starts from.

BREAKOUT, CARS = "BreakoutNoFrameskip-v4", "MountainCarContinuous-v0"
SMALL = {"network": [32, 32]}

FLAT = {"network": [16], "precision": "float32"}
KINDS: dict[str, tuple[Run, presets.Preset]] = {
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
        seen, network = self._play(run.env_id), self.build(kind)
        random, values = np.random.default_rng(run.seed), networks.weights(network)
        for name in values:
            if "bias" in name or "norm/" in name:
                values[name] = values[name] + random.normal(0, 0.1, values[name].shape)
        if "normalizer/mean:0" in values:
            values["normalizer/mean:0"] = seen.mean(axis=0)
            values["normalizer/inverse_deviation:0"] = 1 / seen.std(axis=0)
        if "action/log_deviation:0" in values:
            values["action/log_deviation:0"] = np.log([0.3])
            # As large as after a training.
            values["head/kernel:0"] = 300 * values["head/kernel:0"]
        networks.set_weights(network, {k: v.astype(np.float32) for k, v in values.items()})
        folder = self._workspace.run_dir(run.run_id)
        networks.save_weights(folder / "network.npz", networks.weights(network))
        networks.save_weights(folder / "calibration.npz", {"observations": seen})
        (folder / "progress.csv").write_text("step\n1\n")
        TrainingRecord(
            run=run.to_dict(),
            run_id=run.run_id,
            preset=asdict(preset),
            best_step=1,
            selection_return=0.0,
            network_sha256=sha256(folder / "network.npz"),
            calibration_sha256=sha256(folder / "calibration.npz"),
            seconds=0.0,
            versions=provenance.package_versions(),
            commits=[],
            sources=[],
            processors=[],
        ).save(folder / "training.json")
        return network, seen

    @staticmethod
    def _play(env_id: str) -> np.ndarray:
        """Observe random play; half of the frames, which are much alike, become noise.

        No byte is at either end of its range, as in many a game.
        """
        envs = make_vector(env_id, 4)
        envs.action_space.seed(0)
        first, _ = envs.reset(seed=0)
        seen = np.concatenate(
            [first, *(envs.step(envs.action_space.sample())[0] for _ in range(49))]
        )
        if seen.dtype == np.uint8:
            noise = np.random.default_rng(0).integers(40, 200, seen[::2].shape, np.uint8)
            seen = np.clip(seen, 40, 200)
            seen[::2] = noise
        return seen


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(Workspace(tmp_path_factory.mktemp("bench")))


def centred(values: np.ndarray) -> np.ndarray:
    return values - values.mean(axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("images", "fp32"),
        ("images", "ptq_w4"),
        ("dueling images", "fp32"),
        ("dueling", "fp32"),
        ("dueling", "fp16"),
        ("dueling", "ptq_w4"),
        ("continuous", "fp32"),
        ("layer norm", "fp32"),
        ("layer norm", "fp16"),
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
    assert np.ptp(expected, axis=0).min() > 0.1
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


def test_dynamic_int8_of_images_is_nearly_the_network(bench: Bench) -> None:
    network, observations = bench.network("images")
    expected = network(observations).numpy()
    path = bench.export("images", "dynamic_int8")
    found = heads(path, observations)
    assert 0 < np.abs(found - expected).mean() < 0.02 * np.abs(expected).max()
    assert flatbuffer.audit(path).weight_dtypes["int8"] == sum(
        variable.shape.num_elements() for variable in network.variables if "kernel" in variable.name
    )


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
    assert found == [values[name].size for name in names if not name.startswith("value")]
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
    (middle,) = observations[np.argsort(np.abs(means[:, 0]))[:1]]
    random = np.random.default_rng(0)
    draws = np.array([policy.sample(middle, random)[0] for _ in range(2000)])
    assert abs(draws.std() - 0.3) < 4 * 0.3 / np.sqrt(2 * 2000)


# Once is enough, and damage is mended.


def test_exporting_again_touches_nothing(copy: Workspace, tiny_run: Run) -> None:
    folder = copy.artifact_dir(tiny_run.run_id)
    before = snapshot(folder)
    paths = make(copy, tiny_run, "int8", "fp32", "ptq_w4")
    assert [path.name for path in paths] == ["int8.tflite", "fp32.tflite", "ptq_w4.tflite"]
    assert snapshot(folder) == before


def test_numbers_beyond_half_precision_are_refused_in_one_line(
    copy: Workspace, tiny_run: Run, weights: Weights
) -> None:
    folder = copy.run_dir(tiny_run.run_id)
    mean = {"normalizer/mean:0": np.full(4, 1e6, np.float32)}
    networks.save_weights(folder / "network.npz", weights | mean)
    record = TrainingRecord.load(folder / "training.json")
    replace(record, network_sha256=sha256(folder / "network.npz")).save(folder / "training.json")
    with pytest.raises(QuarlError, match=r"up to 65504.*--schemes.*Received: .*=1000000"):
        make(copy, tiny_run, "fp16")


@pytest.mark.parametrize(
    "damage", ["flipped", "truncated", "empty", "missing", "no sidecar", "half a sidecar"]
)
def test_damaged_flatbuffers_are_made_again(copy: Workspace, tiny_run: Run, damage: str) -> None:
    folder = copy.artifact_dir(tiny_run.run_id)
    before = snapshot(folder)
    path = folder / "ptq_w4.tflite"
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "truncated":
        path.write_bytes(content[:-100])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "missing":
        path.unlink()
    elif damage == "no sidecar":
        # Interrupted between flatbuffer and sidecar.
        sidecar_path(path).unlink()
    else:
        sidecar_path(path).write_text('{"run": {"algo"')
    make(copy, tiny_run, "fp32", "ptq_w4")
    after = snapshot(folder)
    made = [name for name, (changed, _) in after.items() if before[name][0] != changed]
    assert set(made) == {"ptq_w4.tflite", "ptq_w4.json"}
    Policy.load(path)
    assert {name: content for name, (_, content) in after.items()} == {
        name: content for name, (_, content) in before.items()
    }


def retrain(workspace: Workspace, run: Run) -> Weights:
    """Replace the trained network by another, as a training with other code would."""
    folder = workspace.run_dir(run.run_id)
    values = networks.load_weights(folder / "network.npz")
    values["head/bias:0"] = values["head/bias:0"] + np.array([1, -1], np.float32)
    networks.save_weights(folder / "network.npz", values)
    record = TrainingRecord.load(folder / "training.json")
    digest = sha256(folder / "network.npz")
    replace(record, network_sha256=digest).save(folder / "training.json")
    return values


def test_flatbuffers_of_another_network_are_replaced(
    copy: Workspace, tiny_run: Run, observations: np.ndarray
) -> None:
    values = retrain(copy, tiny_run)
    (path,) = make(copy, tiny_run, "fp32")
    expected = head(values, observations)
    np.testing.assert_allclose(heads(path, observations), expected, rtol=1e-4, atol=1e-4)


def test_flatbuffers_of_another_scheme_are_replaced(copy: Workspace, tiny_run: Run) -> None:
    folder = copy.artifact_dir(tiny_run.run_id)
    for suffix in (".tflite", ".json"):
        shutil.copy(folder / f"fp32{suffix}", folder / f"ptq_w2{suffix}")
    (path,) = make(copy, tiny_run, "ptq_w2")
    assert all(len(np.unique(kernel)) <= 4 for kernel in flatbuffer.weights(path).values())


# What cannot be exported.


def refused(workspace: Workspace, run_id: str) -> str:
    with pytest.raises(QuarlError) as error:
        export(workspace, run_id, [Scheme.parse("fp32")], silent)
    assert "\n" not in str(error.value)
    return str(error.value)


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
    message = refused(copy, "dqn-CartPole-v1-s7")
    assert "The run does not exist; train it first (quarl train" in message
    assert "Received: run='dqn-CartPole-v1-s7'" in message
    assert not copy.artifact_dir("dqn-CartPole-v1-s7").exists()


def test_unfinished_run_is_refused(copy: Workspace, tiny_run: Run) -> None:
    (copy.run_dir(tiny_run.run_id) / "training.json").unlink()
    assert "The run is not finished; train it first" in refused(copy, tiny_run.run_id)


@pytest.mark.parametrize("name", ["network.npz", "calibration.npz"])
def test_changed_training_is_refused_and_its_flatbuffers_are_left(
    copy: Workspace, tiny_run: Run, name: str
) -> None:
    before = snapshot(copy.artifact_dir(tiny_run.run_id))
    path = copy.run_dir(tiny_run.run_id) / name
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path} was changed or damaged after training" in refused(copy, tiny_run.run_id)
    assert snapshot(copy.artifact_dir(tiny_run.run_id)) == before


def test_record_of_another_version_is_refused(copy: Workspace, tiny_run: Run) -> None:
    path = copy.run_dir(tiny_run.run_id) / "training.json"
    values = json.loads(path.read_text())
    del values["commits"]
    path.write_text(json.dumps(values))
    assert "fields that differ commits" in refused(copy, tiny_run.run_id)


def test_folder_that_cannot_be_written_is_refused(copy: Workspace, tiny_run: Run) -> None:
    folder = copy.artifact_dir(tiny_run.run_id)
    shutil.rmtree(folder)
    folder.write_bytes(b"a file")
    message = refused(copy, tiny_run.run_id)
    assert f"Cannot write {folder}" in message
    assert folder.read_bytes() == b"a file"


def test_network_that_is_not_finite_is_refused(copy: Workspace, tiny_run: Run) -> None:
    folder = copy.run_dir(tiny_run.run_id)
    before = snapshot(copy.artifact_dir(tiny_run.run_id))
    values = networks.load_weights(folder / "network.npz")
    values["head/bias:0"] = np.array([np.nan, 0], np.float32)
    networks.save_weights(folder / "network.npz", values)
    record = TrainingRecord.load(folder / "training.json")
    digest = sha256(folder / "network.npz")
    replace(record, network_sha256=digest).save(folder / "training.json")
    refused(copy, tiny_run.run_id)
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
