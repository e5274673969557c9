"""Networks by name are the papers': sizes and shapes by hand, layer by layer."""

from itertools import pairwise

import pytest
from samples import refused

from quarl_tf import presets
from quarl_tf.environments import EnvSpec
from quarl_tf.networks import Design, build_policy
from quarl_tf.spec.architectures import NAMED, Architecture, Convolution, architecture

PONG = EnvSpec((84, 84, 4), "uint8", 6, frame_stack=4)
LUNAR_LANDER = EnvSpec((8,), "float32", 4)
#: Weights and biases of each layer, and the maps of the convolutions.
ByHand = tuple[list[int], list[tuple[int, ...]]]


def dense(*units: int) -> list[int]:
    return [n * m + m for n, m in pairwise(units)]


def nature(a: int, b: int, c: int, units: int) -> ByHand:
    """Count for three convolutions of so many filters on 84 by 84 by 4 bytes."""
    convolutions = [4 * 8**2 * a + a, a * 4**2 * b + b, b * 3**2 * c + c]
    return convolutions + dense(7 * 7 * c, units, 6), [(20, 20, a), (9, 9, b), (7, 7, c)]


LI = [4 * 8**2 * 16 + 16, 16 * 4**2 * 32 + 32, *dense(9 * 9 * 32, 256, 6)]
BY_HAND: dict[str, ByHand] = {
    "nature": nature(32, 64, 64, 512),
    "li": (LI, [(20, 20, 16), (9, 9, 32)]),
    "policy_a": nature(128, 128, 128, 128),
    "policy_b": nature(512, 512, 512, 512),
    "policy_c": nature(1024, 1024, 1024, 2048),
    "policy_i": (dense(8, 64, 64, 64, 4), []),
    "policy_ii": (dense(8, 256, 256, 256, 4), []),
    "policy_iii": (dense(8, 4096, 512, 1024, 4), []),
}

#: What the papers say of Pong's networks, in millions.
PUBLISHED = {"nature": 1.69, "li": 0.68, "policy_a": 1.25, "policy_b": 19.5, "policy_c": 129}


@pytest.mark.parametrize("name", sorted(NAMED))
def test_named_networks_are_those_of_the_papers(name: str) -> None:
    counts, maps = BY_HAND[name]
    millions = sum(counts) / 1e6
    assert millions == pytest.approx(PUBLISHED.get(name, millions), rel=5e-3)
    if name == "policy_c":  # Half a gigabyte to build.
        windows = Convolution(1024, 8, 4), Convolution(1024, 4, 2), Convolution(1024, 3, 1)
        assert architecture(name) == Architecture((2048,), windows)
        return
    spec = PONG if maps else LUNAR_LANDER
    network = build_policy(spec, Design(architecture(name), spec.num_actions or 0), seed=0)
    assert [layer.count_params() for layer in network.layers if layer.trainable_weights] == counts
    shapes = [layer.output_shape[1:] for layer in network.layers if "convolution" in layer.name]
    assert shapes == maps
    assert network.output_shape == (None, spec.num_actions)


def test_presets_know_networks_by_name_and_by_list() -> None:
    assert architecture([5, 4]) == architecture((5, 4)) == Architecture((5, 4), ())
    pong = "PongNoFrameskip-v4"
    assert presets.load("dqn", pong).architecture == NAMED["nature"]
    assert presets.load("dqn", pong, {"network": "li"}).architecture == NAMED["li"]
    flat = presets.load("dqn", pong, {"network": [7, 3], "precision": "float32"})
    assert flat.architecture == Architecture((7, 3))
    message = refused(presets.load, "dqn", pong, {"network": "Natur"}, code=2)
    assert message.endswith("did you mean nature? Received: network='Natur'")
