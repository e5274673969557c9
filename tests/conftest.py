"""Small flatbuffers with sidecars, which TensorFlow's converter makes once per session."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from samples import SIDECAR, Artifacts, Copy, Describe, Patch, copied

from quarl_tf.environments import env_spec
from quarl_tf.evaluation import video
from quarl_tf.export import adopt
from quarl_tf.export.converter import converted, of_function
from quarl_tf.export.ptq import described
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.files import write_bytes
from quarl_tf.foundation.keras import tf
from quarl_tf.spec import Run
from quarl_tf.store.records import Sidecar
from quarl_tf.store.workspace import sidecar_path

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("quarl", deadline=None)
settings.load_profile("quarl")

Layers = Sequence[tuple[np.ndarray, np.ndarray]]

_CAR = Run("ddpg", "MountainCarContinuous-v0", 0)
#: What is in the sidecar of a policy of continuous actions.
STEERING = {"run": _CAR.to_dict(), "run_id": _CAR.run_id, "env_id": _CAR.env_id, "head": "action"}
STEERING |= env_spec(_CAR.env_id).facts


@dataclass(frozen=True)
class Network:
    """A multilayer perceptron with ReLU between its layers; kernels are [inputs, outputs]."""

    layers: Layers
    #: Observations the int8 schemes are calibrated on: [n, ...].
    calibration: np.ndarray
    tanh: bool = False
    #: Type of the observations; bytes are divided by 255 inside.
    dtype: str = "float32"

    def __call__(self, observation: np.ndarray) -> np.ndarray:
        """Compute the head of one observation in NumPy."""
        x = observation.astype(np.float32).ravel() / (255 if self.dtype == "uint8" else 1)
        for i, (kernel, bias) in enumerate(self.layers):
            x = x @ kernel + bias
            x = np.maximum(x, 0) if i < len(self.layers) - 1 else x
        return np.tanh(x) if self.tanh else x

    def convert(self, scheme: str, io: str = "float32") -> bytes:
        """Make a flatbuffer; `io` is the type of its quantised input and output, if they are."""

        def forward(observation: Any) -> Any:
            x = tf.reshape(tf.cast(observation, tf.float32), [1, -1])
            x = x / 255.0 if self.dtype == "uint8" else x
            for i, (kernel, bias) in enumerate(self.layers):
                x = tf.matmul(x, tf.constant(kernel)) + tf.constant(bias)
                x = tf.nn.relu(x) if i < len(self.layers) - 1 else x
            return tf.tanh(x) if self.tanh else x

        # Quantised inputs take over the float input that the converter sees.
        input_type = self.dtype if io == "float32" else "float32"
        converter = of_function(forward, self.calibration.shape[1:], input_type)
        if scheme != "fp32":
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        if scheme == "fp16":
            converter.target_spec.supported_types = [tf.float16]
        if scheme == "int8":
            samples = self.calibration.astype(input_type)
            converter.representative_dataset = lambda: ([x[None]] for x in samples)
            converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
            if input_type == "float32":
                converter.inference_input_type = converter.inference_output_type = tf.as_dtype(io)
        return converted(converter)


def write_flatbuffer(path: Path, content: bytes, record: Sidecar = SIDECAR, **changes: Any) -> Path:
    """Write a flatbuffer and a sidecar (for CartPole), which is right except for the changes."""
    write_bytes(path, content)
    replace(record, **(described(content) | changes)).save(sidecar_path(path))
    return path


@pytest.fixture(scope="session")
def networks() -> dict[str, Network]:
    """Return the networks that the flatbuffers of `artifacts` are made from."""
    rng = np.random.default_rng(0)

    def layers(*sizes: int) -> Layers:
        return [
            (rng.normal(0, n**-0.5, (n, m)).astype("f4"), rng.normal(0, 0.1, m).astype("f4"))
            for n, m in pairwise(sizes)
        ]

    vectors = rng.normal(0, 1, (64, 4)).astype("f4")
    frames = rng.integers(0, 256, (64, 6, 6, 2), dtype=np.uint8)
    cars = rng.uniform([-1.2, -0.07], [0.6, 0.07], (64, 2)).astype("f4")
    # Push to where the pole leans and turns: enough to balance it for 500 steps.
    balance = np.array([[-0.1, 0.1], [-0.2, 0.2], [-3, 3], [-1, 1]], np.float32)
    steer = np.array([[2], [10]], np.float32)
    return {
        "mlp": Network(layers(4, 64, 64, 2), vectors),
        "tied": Network([(np.zeros((4, 2), np.float32), np.zeros(2, np.float32))], vectors),
        "balancer": Network([(balance, np.zeros(2, np.float32))], vectors),
        "frames": Network(layers(72, 16, 2), frames, dtype="uint8"),
        "steering": Network([(steer, np.ones(1, np.float32))], cars, tanh=True),
    }


@pytest.fixture(scope="session")
def artifacts(networks: dict[str, Network], tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    """Return flatbuffers with sidecars by name; copy one before damaging it (`copy_artifact`)."""
    frames = {"observation_shape": [6, 6, 2], "observation_dtype": "uint8"}
    recipes: dict[str, tuple[str, str, str, dict[str, Any]]] = {
        "fp32": ("mlp", "fp32", "float32", {}),
        "fp16": ("mlp", "fp16", "float32", {}),
        "dynamic_int8": ("mlp", "dynamic_int8", "float32", {}),
        "int8": ("mlp", "int8", "float32", {}),
        "int8_io": ("mlp", "int8", "int8", {}),
        "tied": ("tied", "fp32", "float32", {}),
        "balancer": ("balancer", "fp32", "float32", {}),
        "frames": ("frames", "fp32", "float32", frames),
        "frames_int8_io": ("frames", "int8", "int8", frames),
        "frames_uint8_io": ("frames", "int8", "uint8", frames),
        "steering": ("steering", "fp32", "float32", STEERING),
        "steering_int8_io": ("steering", "int8", "int8", STEERING),
    }
    folder, paths = tmp_path_factory.mktemp("artifacts"), {}
    for name, (network, scheme, io, changes) in recipes.items():
        content = networks[network].convert(scheme, io)
        paths[name] = write_flatbuffer(folder / f"{name}.tflite", content, scheme=scheme, **changes)
    return paths


@pytest.fixture
def copy_artifact(artifacts: Artifacts, tmp_path: Path) -> Copy:
    """Return a function that copies a flatbuffer and its sidecar into the test's own folder."""
    return lambda name: copied(artifacts[name], tmp_path)


@pytest.fixture
def describe(tmp_path: Path) -> Describe:
    """Return a function that writes content and a sidecar, which is right except for changes."""
    return lambda content, name="policy", **changes: write_flatbuffer(
        tmp_path / f"{name}.tflite", content, **changes
    )


@pytest.fixture(scope="module")
def kept_pool() -> Iterator[None]:
    """Adopt in one process until it breaks, as starting one is slow."""
    pools = list[Any]()

    def kept(work: Any, shares: Any, crash: str) -> Iterator[Any]:
        if not pools or pools[-1]._broken:
            pools.append(ProcessPoolExecutor(1, get_context("spawn")))
        try:
            yield from pools[-1].submit(_listed, work, *shares[0]).result()
        except BrokenProcessPool as error:
            raise QuarlError(crash) from error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adopt, "processes", SimpleNamespace(outcomes=kept))
        yield
    for pool in pools:
        pool.shutdown()


def _listed(work: Any, *arguments: Any) -> list[Any]:
    return [*work(*arguments)]


@pytest.fixture
def shots(monkeypatch: Patch) -> list[Any]:
    """Return a list of the shots of every image of a film, filled as they are drawn."""
    drawn, compose = list[Any](), video._compose

    def recorded(names: Any, shots: Any, height: int) -> Any:
        drawn.append(tuple(shots))
        return compose(names, shots, height)

    monkeypatch.setattr(video, "_compose", recorded)
    return drawn
