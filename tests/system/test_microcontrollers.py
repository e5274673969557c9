"""Policies on what is not here: 32-bit Arm by QEMU, TensorFlow Lite Micro by its own wheel."""

import shutil
import subprocess
from pathlib import Path

import compiled
import numpy as np
import pytest
from samples import MODELS, Artifacts, copied, python_with

from quarl_tf.export import boards
from quarl_tf.runtime.policy import Policy

DENSE = ("CartPole-v1/dqn/s0", "LunarLander-v3/ppo/s0")

#: A compiler for 32-bit Arm, and what runs its programs.
ARM = ("arm-linux-gnueabihf-gcc", "qemu-arm-static")

_REPLAY = """
import sys
import numpy as np
from tflite_micro.python.tflite_micro import runtime

interpreter, heads = runtime.Interpreter.from_file(sys.argv[1]), []
for observation in np.load("observations.npy"):
    interpreter.set_input(observation[None], 0)
    interpreter.invoke()
    heads.append(interpreter.get_output(0)[0])
np.save("heads.npy", heads)
"""


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("run", [*DENSE, "MountainCarContinuous-v0/ddpg/s0"])
def test_32_bit_arm_computes_the_same_bits(run: str, fixed: bool, tmp_path: Path) -> None:
    if None in map(shutil.which, ARM):
        pytest.fail("install gcc-arm-linux-gnueabihf and qemu-user-static", pytrace=False)
    artifact = copied(MODELS / run / "int8.tflite", tmp_path)
    observations = compiled.around(artifact, 500) * (65536 if fixed else 1)
    flags = (*compiled.STRICT, "-static")
    on_host = compiled.run(artifact, observations, flags, fixed=fixed)
    on_arm = compiled.run(artifact, observations, flags, fixed=fixed, board=ARM)
    np.testing.assert_array_equal(on_arm.view(np.int32), on_host.view(np.int32))


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a Python that has TensorFlow Lite Micro: QUARL_MICRO, or a new one."""
    folder = tmp_path_factory.mktemp("micro")
    return python_with("QUARL_MICRO", folder, "tflite-micro==0.dev20261023182759")


def replayed(micro: str, artifact: Path, observations: np.ndarray, folder: Path) -> np.ndarray:
    """Return the heads by TensorFlow Lite Micro: [n, outputs]."""
    np.save(folder / "observations.npy", observations)
    words = [micro, "-c", _REPLAY, artifact.resolve()]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    return np.load(folder / "heads.npy")


@pytest.mark.parametrize("run", DENSE)
def test_tensorflow_lite_micro_takes_the_same_actions(run: str, micro: str, tmp_path: Path) -> None:
    artifact = MODELS / run / "int8.tflite"
    observations, policy = compiled.around(artifact, 200), Policy.load(artifact)
    expected = np.array([policy.head(observation) for observation in observations])
    heads = replayed(micro, artifact, observations, tmp_path)
    # Its kernels round a product twice, LiteRT's once: a code may be the next one.
    code = np.diff(np.unique(expected)).min()
    assert np.abs(heads - expected).max() < 1.5 * code
    expected_actions, actions = expected.argmax(axis=1), heads.argmax(axis=1)
    leads = expected.max(axis=1) - expected[np.arange(len(expected)), actions]
    assert leads.max() < 1.5 * code
    assert (expected_actions != actions).mean() < 0.01


def test_tensorflow_lite_micro_takes_images(micro: str, tmp_path: Path) -> None:
    artifact = MODELS / "PongNoFrameskip-v4/dqn/s0-4b456516/int8.tflite"
    squares = np.random.default_rng(0).integers(0, 256, (20, 12, 12, 4), np.uint8)
    images, policy = squares.repeat(7, axis=1).repeat(7, axis=2), Policy.load(artifact)
    assert "BROADCAST_TO int8" in policy.sidecar.operators
    expected = np.array([policy.head(image) for image in images])
    heads = replayed(micro, artifact, images, tmp_path)
    assert np.abs(heads - expected).max() < 0.02 * np.ptp(expected)


def test_what_lacks_operators_fails_there(artifacts: Artifacts, micro: str, tmp_path: Path) -> None:
    for scheme in ("fp32", "fp16", "int8", "dynamic_int8"):
        shape = Policy.load(artifacts[scheme]).sidecar.observation_shape
        observations = np.zeros((1, *shape), np.float32)
        if boards.fits(artifacts[scheme], "esp32")[0].lacking:
            with pytest.raises(subprocess.CalledProcessError):
                replayed(micro, artifacts[scheme], observations, tmp_path)
        else:
            replayed(micro, artifacts[scheme], observations, tmp_path)
