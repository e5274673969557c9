"""Networks by name are the papers': sizes and shapes by hand, layer by layer."""

from __future__ import annotations

import pytest

from quarl_tf import presets
from quarl_tf.cli import verbs
from quarl_tf.environments import EnvSpec
from quarl_tf.foundation.errors import UsageError
from quarl_tf.networks import Design, policy_factory
from quarl_tf.spec.architectures import NAMED, Architecture, Convolution, architecture

#: Pong has six actions, LunarLander four.
PONG = EnvSpec((84, 84, 4), "uint8", 6, frame_stack=4)
LUNAR_LANDER = EnvSpec((8,), "float32", 4)

#: Weights and biases of each layer, and the maps of the convolutions.
BY_HAND = {
    "nature": (
        [
            4 * 8**2 * 32 + 32,
            32 * 4**2 * 64 + 64,
            64 * 3**2 * 64 + 64,
            7 * 7 * 64 * 512 + 512,
            512 * 6 + 6,
        ],
        [(20, 20, 32), (9, 9, 64), (7, 7, 64)],
    ),
    "li": (
        [4 * 8**2 * 16 + 16, 16 * 4**2 * 32 + 32, 9 * 9 * 32 * 256 + 256, 256 * 6 + 6],
        [(20, 20, 16), (9, 9, 32)],
    ),
    "policy_a": (
        [
            4 * 8**2 * 128 + 128,
            128 * 4**2 * 128 + 128,
            128 * 3**2 * 128 + 128,
            7 * 7 * 128 * 128 + 128,
            128 * 6 + 6,
        ],
        [(20, 20, 128), (9, 9, 128), (7, 7, 128)],
    ),
    "policy_b": (
        [
            4 * 8**2 * 512 + 512,
            512 * 4**2 * 512 + 512,
            512 * 3**2 * 512 + 512,
            7 * 7 * 512 * 512 + 512,
            512 * 6 + 6,
        ],
        [(20, 20, 512), (9, 9, 512), (7, 7, 512)],
    ),
    "policy_i": ([8 * 64 + 64, 64 * 64 + 64, 64 * 64 + 64, 64 * 4 + 4], []),
    "policy_ii": ([8 * 256 + 256, 256 * 256 + 256, 256 * 256 + 256, 256 * 4 + 4], []),
    "policy_iii": ([8 * 4096 + 4096, 4096 * 512 + 512, 512 * 1024 + 1024, 1024 * 4 + 4], []),
}

TRAIN = ["--algo", "dqn", "--env", "PongNoFrameskip-v4", "--dry-run"]

#: What the papers say of Pong's networks, in millions.
PUBLISHED = {"nature": 1.69, "li": 0.68, "policy_a": 1.25, "policy_b": 19.5, "policy_c": 129}


def computed(named: Architecture, spec: EnvSpec) -> list[int]:
    """Count the parameters of each layer without building it."""
    *place, channels = spec.observation_shape
    counts = []
    for filters, kernel, stride in named.convolutions:
        counts.append(channels * kernel**2 * filters + filters)
        place, channels = [(size - kernel) // stride + 1 for size in place], filters
    inputs = channels
    for size in place:
        inputs *= size
    for units in (*named.hidden_layers, spec.num_actions or 0):
        counts.append(inputs * units + units)
        inputs = units
    return counts


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_named_networks_are_those_of_the_papers(name: str) -> None:
    counts, maps = BY_HAND[name]
    spec = PONG if maps else LUNAR_LANDER
    network = policy_factory(spec, Design(architecture(name), spec.num_actions or 0), seed=0)()
    assert [layer.count_params() for layer in network.layers if layer.trainable_weights] == counts
    shapes = [layer.output_shape[1:] for layer in network.layers if "convolution" in layer.name]
    assert shapes == maps
    assert computed(NAMED[name], spec) == counts
    assert network.output_shape == (None, spec.num_actions)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_sizes_are_the_published_ones(name: str) -> None:
    """The largest takes half a gigabyte; its size is computed, as it is for the others above."""
    millions = sum(computed(NAMED[name], PONG)) / 1e6
    assert millions == pytest.approx(PUBLISHED[name], rel=5e-3)


def test_every_name_is_tested_here() -> None:
    assert {*BY_HAND, *PUBLISHED} == set(NAMED)


def test_lists_are_fully_connected_layers() -> None:
    assert architecture([5, 4]) == architecture((5, 4)) == Architecture((5, 4), ())
    assert architecture("li").convolutions == (Convolution(16, 8, 4), Convolution(32, 4, 2))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("natur", "Unknown network: did you mean nature? Received: network='natur'"),
        ("Nature", "did you mean nature?"),
        ("policy_d", "did you mean policy_"),
        ("xyz", "choose from li, nature, policy_a, policy_b, policy_c, policy_i, policy_ii, "),
    ],
)
def test_unknown_names_are_refused_naming_the_closest(name: str, message: str) -> None:
    for refuse in (
        lambda: architecture(name),
        lambda: presets.load("dqn", "CartPole-v1", {"network": name}),
    ):
        with pytest.raises(UsageError) as error:
            refuse()
        assert message in str(error.value)
        assert "\n" not in str(error.value)


# From a preset, and from the command line.


def test_presets_know_networks_by_name_and_by_list() -> None:
    pong = "PongNoFrameskip-v4"
    flat = {"network": [7, 3], "precision": "float32"}
    assert presets.load("dqn", pong).architecture == NAMED["nature"]
    assert presets.load("dqn", pong, {"network": "li"}).architecture == NAMED["li"]
    assert presets.load("dqn", pong, flat).architecture == Architecture((7, 3))


@pytest.mark.parametrize("network", ["nature", "policy_ii", "[5,4]", "[5, 4]"])
def test_command_line_takes_names_and_lists(
    network: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # The preset's bfloat16 is for convolutions.
    override = ["-p", f"network={network}", "-p", "precision=float32"]
    assert verbs.main(["train", *TRAIN, *override]) == 0
    assert "dqn-PongNoFrameskip-v4-s0-" in capsys.readouterr().out


@pytest.mark.parametrize("network", ["natur", "16", "[16,0]", "[nature]"])
def test_command_line_refuses_other_networks(
    network: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verbs.main(["train", *TRAIN, "-p", f"network={network}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "network=" in error
