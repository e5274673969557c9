"""Policies of images in strictly compiled C compute what LiteRT computes."""

from pathlib import Path

import compiled
import numpy as np
from samples import MODELS, copied, observed

PONG = MODELS / "PongNoFrameskip-v4"


def test_policies_of_images_in_500_states(tmp_path: Path) -> None:
    artifact = copied(PONG / "dqn/s0-4b456516/int8.tflite", tmp_path)
    observations = observed("PongNoFrameskip-v4", 4, 124)
    compiled.check(artifact, observations)
    compiled.run(artifact, observations[:100], compiled.SANITIZED)  # Fails if undefined.
    fixed_heads = compiled.run(artifact, observations[:100], fixed=True)[0] / 65536
    reference_heads = compiled.reference_heads(artifact, observations[:100])
    np.testing.assert_allclose(fixed_heads, reference_heads, atol=2 / 65536)


def test_heads_of_grey_squares(tmp_path: Path) -> None:
    """Squares excite the first layer; noise alone does so like no environment."""
    name = "ppo/s0-3a874d41-q8d1000000-0d58268f/qat_int8.tflite"
    squares = np.random.default_rng(1).integers(0, 256, (100, 12, 12, 4), np.uint8)
    compiled.check(copied(PONG / name, tmp_path), squares.repeat(7, axis=1).repeat(7, axis=2))
