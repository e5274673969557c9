"""Policies in C, strictly compiled, compute in whole episodes what LiteRT computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import compiled
import numpy as np
import pytest

from quarl_tf import environments
from quarl_tf.runtime.policy import Policy

MODELS = Path(__file__).parents[2] / "tflite_models"


def met(policy: Policy, episodes: int) -> Iterator[Any]:
    """Yield the observations of episodes."""
    with closing(environments.make(policy.sidecar.env_id)) as env:
        for seed in range(episodes):
            observation, over = env.reset(seed=seed)[0], False
            while not over:
                yield observation
                observation, _, done, cut, _ = env.step(policy.act(observation))
                over = done or cut


@pytest.mark.parametrize("name", ["LunarLander-v3/ppo/s0", "MountainCarContinuous-v0/ppo/s0"])
def test_dense_policies_in_a_hundred_episodes(name: str, tmp_path: Path) -> None:
    artifact = compiled.copied(MODELS / name / "int8.tflite", tmp_path)
    seen = np.array(list(met(Policy.load(artifact), 100)))
    assert len(seen) > 5000
    compiled.check(artifact, seen)


def test_policies_of_images_in_500_states(tmp_path: Path) -> None:
    artifact = compiled.copied(MODELS / "PongNoFrameskip-v4/dqn/s0-e062e97a/int8.tflite", tmp_path)
    policy = Policy.load(artifact)
    seen = np.array(list(islice(met(policy, 1), 500)))
    heads, actions = compiled.run(artifact, seen)
    np.testing.assert_array_equal(heads, compiled.reference_heads(artifact, seen))
    # Convolutions of the default runtime round otherwise: of two that are near the other may lead.
    acted = np.array([policy.act(observation) for observation in seen])
    differs = actions[:, 0] != acted
    behind = heads.max(axis=1) - heads[np.arange(len(seen)), acted]
    assert differs.mean() < 0.02
    assert behind[differs].max(initial=0) < 2.5 * np.diff(np.unique(heads)).min()
