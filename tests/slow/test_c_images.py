"""Policies that see images compute in C what LiteRT's reference kernels compute."""

from pathlib import Path

import compiled
import numpy as np
import pytest

MODELS = Path(__file__).parents[2] / "tflite_models/PongNoFrameskip-v4"


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("a2c/s0/int8_tensor", compiled.STRICT),
        ("dqn/s0-e062e97a/int8", compiled.SANITIZED),
        ("ppo/s0-cc080679-q8d1000000-0d58268f/qat_int8", compiled.STRICT),
    ],
)
def test_heads_of_images_are_those_of_the_reference_kernels(
    name: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    artifact = compiled.copied(MODELS / f"{name}.tflite", tmp_path)
    random = np.random.default_rng(1)
    # Large grey squares: noise alone excites the first layer like nothing an environment shows.
    images = random.integers(0, 256, (100, 12, 12, 4)).repeat(7, axis=1).repeat(7, axis=2)
    compiled.check(artifact, images.astype(np.uint8), flags)
