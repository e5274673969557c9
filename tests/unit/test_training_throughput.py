"""The benchmark of training: what it asks of the peers, and what it prints. Nothing is timed."""

from dataclasses import asdict
from typing import Any

import ours
import peers

WORKLOADS = ours.workloads()


def preset(name: str) -> dict[str, Any]:
    return asdict(WORKLOADS[name].preset())


def test_the_warm_up_is_not_counted() -> None:
    stamps = [(100, 0.0), (200, 10.0), (300, 11.0), (400, 13.0)]
    assert peers.rate(stamps, warm_up=150) == 200 / 3


def test_multiplications_are_counted() -> None:
    # CartPole: 4 numbers, two actions, 256 by 256 in between; 64 transitions for two steps.
    layers = 4 * 256, 256 * 256, 256 * 2
    learning = 64 * 128 / 256 * (4 * sum(layers) - layers[0])
    assert ours.multiplications(WORKLOADS["dqn-CartPole"]) == sum(layers) + learning
    # Policy and value; 20 epochs.
    first, rest = 2 * 4 * 64, 2 * 64 * 64 + 64 * 2 + 64
    learning = 20 * (3 * (first + rest) - first)
    assert ours.multiplications(WORKLOADS["ppo-CartPole"]) == first + rest + learning
    # 2 numbers, one action, which the critic takes as well; 256 transitions a step.
    actor, critic = (n * 400 + 400 * 300 + 300 for n in (2, 3))
    learning = 256 * (4 * actor - 2 * 400 + 6 * critic - 3 * 400)
    assert ours.multiplications(WORKLOADS["ddpg-MountainCarContinuous"]) == actor + learning
    # Nature's network by hand, one pass to act and one to learn.
    convolutions = 20 * 20 * 32 * 8 * 8 * 4, 9 * 9 * 64 * 4 * 4 * 32, 7 * 7 * 64 * 3 * 3 * 64
    policy = sum(convolutions) + 3136 * 512 + 512 * 6
    expected = 4 * policy - convolutions[0]
    assert ours.multiplications(WORKLOADS["a2c-Pong"]) == expected
