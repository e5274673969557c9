"""Behaviour of the figures: what they show, and that all of it can be read."""

import io
import math
import re
from collections.abc import Callable

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.colors import same_color, to_rgb
from matplotlib.figure import Figure
from PIL import Image

from quarl_tf.errors import UsageError
from quarl_tf.plots import (
    BitsPoint,
    Curve,
    Plot,
    PrecisionPanel,
    PrecisionPoint,
    learning_curve,
    paired_returns,
    reward_against_bits,
    reward_against_precision,
    scheme_colour,
    weight_histograms,
)
from quarl_tf.quantization.affine import fake_quantize
from quarl_tf.spec import DEFAULT_SCHEMES, Scheme
from quarl_tf.statistics import Interval, mean_interval

OTHERS = DEFAULT_SCHEMES[1:]
PUBLISHED = tuple(f"ptq_paper_w{bits}" for bits in range(8, 1, -1))
TRAINED = tuple(f"qat_w{bits}a{bits}" for bits in range(8, 1, -1))


def returns(scheme: str, episodes: int = 100) -> np.ndarray:
    """Return CartPole's: nearly all 500, whatever the scheme, until 2 bits."""
    if scheme == "ptq_w2":
        return np.random.default_rng(0).integers(8, 12, episodes).astype(float)
    values = np.full(episodes, 500.0)
    if scheme == "ptq_w3":
        values[:3] = 450.0
    return values


def curve(label: str) -> Curve:
    steps = np.arange(0.0, 50_000.0, 500.0)
    training = np.minimum(500, steps / 60)
    greedy = np.where(steps % 2500 == 0, training, np.nan)
    training[0] = np.nan  # No episode has ended yet.
    return Curve(label, steps, training, greedy)


def points(runs: int = 1, schemes: tuple[str, ...] = DEFAULT_SCHEMES) -> list[BitsPoint]:
    return [
        BitsPoint(
            Scheme.parse(name), mean_interval(returns(name)), (float(returns(name).mean()),) * runs
        )
        for name in schemes
    ]


def layers() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    long_name = "sequential/policy/q_network/torso/dense_1/MatMul;StatefulPartitionedCall/dense/x"
    return {
        "policy/hidden_0/MatMul": generator.normal(0, 0.3, (64, 4)).astype(np.float32),
        long_name: generator.normal(0, 0.05, (64, 64)).astype(np.float32),
    }


def precisions(title: str, *delays: int) -> PrecisionPanel:
    """Return a cell of a study with a training at 8 and at 2 bits for each delay."""
    kinds = [("Fp", "fp32", None), ("8*", "int8", None)]
    for delay in delays:
        kinds += [("8", "qat_int8", delay), ("8", "qat_w8a8", delay), ("2", "qat_w2a2", delay)]
    made = [
        PrecisionPoint(label, Scheme.parse(name), delay, Interval(490, 480, 500), (485, 495))
        for label, name, delay in kinds
    ]
    return PrecisionPanel(title, made, 22.0)


def pairs(schemes: tuple[str, ...] = OTHERS) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {name: (returns("fp32"), returns(name)) for name in schemes}


FIGURES: dict[str, Callable[[], Plot]] = {
    "learning curve": lambda: learning_curve([curve("dqn-CartPole-v1-s0")], "dqn on CartPole-v1"),
    "learning curves": lambda: learning_curve(
        [curve(f"ddpg-MountainCarContinuous-v0-s{seed}") for seed in range(5)], "ddpg"
    ),
    "all schemes": lambda: paired_returns(pairs(), "dqn on CartPole-v1"),
    "one scheme": lambda: paired_returns(pairs(("int8",)), "dqn on CartPole-v1"),
    "seven schemes": lambda: paired_returns(pairs(OTHERS[:7]), "dqn on CartPole-v1"),
    "weights": lambda: weight_histograms(layers(), "fp32 weights of dqn-CartPole-v1-s0"),
    "bits": lambda: reward_against_bits(points(), 22.0, "dqn on CartPole-v1"),
    "bits by two rules": lambda: reward_against_bits(
        points(1, (*DEFAULT_SCHEMES, *PUBLISHED)), 22.0, "dqn on CartPole-v1"
    ),
    "bits of a training at 8 bits": lambda: reward_against_bits(
        points(1, ("fp32", "qat_int8", "qat_w8a8")), 22.0, "dqn on CartPole-v1"
    ),
    "precisions": lambda: reward_against_precision(
        [
            precisions("ppo on CartPole-v1 (ranges=extremes, per_channel=False)", 500, 50_000),
            precisions("ppo on CartPole-v1 (ranges=percentile, per_channel=True)", 10, 20, 30),
        ],
        "options",
    ),
    "bits of three runs": lambda: reward_against_bits(points(3), None, "dqn on CartPole-v1"),
}


@pytest.fixture(scope="module", params=FIGURES.values(), ids=FIGURES.keys())
def plot(request: pytest.FixtureRequest) -> Plot:
    made: Plot = request.param()
    FigureCanvasAgg(made.figure).draw()
    return made


def panels(figure: Figure) -> list[Axes]:
    return list(figure.axes)


# Every figure.


def test_nothing_is_cut(plot: Plot) -> None:
    box = plot.figure.get_tightbbox()
    width, height = plot.figure.get_size_inches()
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= width
    assert box.y1 <= height


def test_legends_hide_no_data(plot: Plot) -> None:
    (legend,) = plot.figure.legends
    box = legend.get_window_extent()
    assert not any(box.overlaps(axes.get_tightbbox()) for axes in panels(plot.figure))


def test_panel_titles_do_not_run_into_each_other(plot: Plot) -> None:
    titles = [axes.title.get_window_extent() for axes in panels(plot.figure) if axes.get_title()]
    assert not any(a.overlaps(b) for i, a in enumerate(titles) for b in titles[:i])


def test_has_labels_and_a_caption(plot: Plot) -> None:
    shared = plot.figure.get_supylabel()
    assert all(shared or axes.get_ylabel() for axes in panels(plot.figure))
    assert panels(plot.figure)[-1].get_xlabel()
    assert plot.caption.endswith(".")
    assert len(plot.caption) > 80


def test_registers_nothing_with_pyplot(plot: Plot) -> None:
    assert plot.figure is not None
    assert plt.get_fignums() == []


def test_png_is_small_and_says_nothing_about_when_or_by_what(plot: Plot) -> None:
    content = plot.png()
    image = Image.open(io.BytesIO(content))
    assert image.info.keys() <= {"transparency"}
    assert image.width >= 1200
    assert len(content) < 100_000


def test_the_same_numbers_make_the_same_bytes() -> None:
    make = FIGURES["bits"]
    assert make().png() == make().png()


# Colours.


def test_every_scheme_has_a_colour_of_its_own() -> None:
    names = (*DEFAULT_SCHEMES, *PUBLISHED, *TRAINED, "qat_int8", "random")
    colours = [to_rgb(scheme_colour(name)) for name in names]
    apart = [math.dist(a, b) for i, a in enumerate(colours) for b in colours[:i]]
    assert min(apart) > 0.05


@pytest.mark.parametrize("bits", [9, 16, 32])
def test_wide_grids_have_a_colour_too(bits: int) -> None:
    assert re.fullmatch("#[0-9a-f]{6}", scheme_colour(f"ptq_w{bits}"))


def test_an_unknown_scheme_has_none() -> None:
    with pytest.raises(UsageError, match="int8"):
        scheme_colour("int88")


def test_a_scheme_has_the_same_colour_in_every_figure() -> None:
    paired = panels(paired_returns(pairs(), "").figure)
    bits = panels(reward_against_bits(points(), None, "").figure)[0]
    of_bits = [container.lines[0].get_color() for container in bits.containers]
    for axes, colour in zip(paired, of_bits[1:], strict=True):
        name = axes.get_title()
        dots = [c for c in axes.collections if isinstance(c, PathCollection)][1]
        assert same_color(dots.get_facecolor()[0], scheme_colour(name))
        assert same_color(colour, scheme_colour(name))


# Learning curves.


def test_curves_leave_out_what_has_no_value() -> None:
    axes = panels(learning_curve([curve("a")], "").figure)[0]
    training, greedy = axes.lines
    assert len(training.get_xdata()) == 99
    assert list(greedy.get_xdata()) == list(range(0, 50_000, 2500))


def test_several_curves_are_told_apart() -> None:
    figure = learning_curve([curve("a"), curve("b")], "").figure
    colours = [line.get_color() for line in panels(figure)[0].lines]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    assert {"a", "b"} <= {text.get_text() for text in figure.legends[0].get_texts()}


# Paired returns.


def test_one_panel_per_scheme_counts_its_episodes() -> None:
    axes = panels(paired_returns(pairs(), "").figure)
    assert [one.get_title() for one in axes] == list(OTHERS)
    counts = {
        one.get_title(): [int(n) for n in re.findall(r"\d+", one.texts[0].get_text())]
        for one in axes
    }
    assert counts["int8"] == [0, 100, 0]
    assert counts["ptq_w3"] == [3, 97, 0]
    assert counts["ptq_w2"] == [100, 0, 0]


def test_pairs_stay_pairs_when_sorted() -> None:
    before, after = np.array([3.0, 1.0, 2.0]), np.array([30.0, 10.0, 20.0])
    axes = panels(paired_returns({"int8": (before, after)}, "").figure)[0]
    ring, dot = (c.get_offsets() for c in axes.collections if isinstance(c, PathCollection))
    assert ring.tolist() == [[1, 1], [2, 2], [3, 3]]
    assert dot.tolist() == [[1, 10], [2, 20], [3, 30]]


# Weight histograms.


def test_grid_lines_are_the_values_that_quantised_weights_take() -> None:
    weights = layers()
    axes = panels(weight_histograms(weights, "").figure)
    assert len(axes) == 2 * len(weights)
    for row, values in enumerate(weights.values()):
        for column, bits in enumerate((4, 2)):
            lines = {float(line.get_xdata()[0]) for line in axes[2 * row + column].lines}
            assert len(lines) == 2**bits
            assert set(fake_quantize(values, bits).ravel().tolist()) <= lines


def test_layers_are_named_without_what_the_converter_fused() -> None:
    titles = [a.get_title(loc="left") for a in panels(weight_histograms(layers(), "").figure)[::2]]
    assert titles[0] == "policy/hidden_0/MatMul (64 by 4)"
    assert titles[1].startswith("…")
    assert titles[1].endswith("torso/dense_1/MatMul (64 by 64)")


def test_convolutions_show_the_grid_of_their_widest_channel() -> None:
    kernel = np.zeros((2, 3, 3, 1), np.float32)
    kernel[0, 0, 0, 0], kernel[1, 0, 0, 0], kernel[1, 0, 1, 0] = 0.1, -2.0, 2.0
    made = weight_histograms({"conv": kernel}, "")
    lines = [float(line.get_xdata()[0]) for line in panels(made.figure)[1].lines]
    assert lines == [-2.0, -1.0, 0.0, 1.0]
    assert "widest channel" in made.caption
    assert "channel" not in weight_histograms(layers(), "").caption


def test_a_layer_of_zeros_can_be_drawn() -> None:
    assert weight_histograms({"dead": np.zeros((3, 3), np.float32)}, "").png()


# Reward against bits.


@pytest.mark.parametrize("schemes", [DEFAULT_SCHEMES, (*DEFAULT_SCHEMES, *PUBLISHED)])
def test_bits_descend_and_schemes_of_the_same_width_stand_apart(schemes: tuple[str, ...]) -> None:
    axes = panels(reward_against_bits(points(1, schemes), None, "").figure)[0]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["32", "16", "8", "7", "6", "5", "4", "3", "2"]
    places = sorted(container.lines[0].get_xdata()[0] for container in axes.containers)
    assert len(places) == len(schemes)
    assert min(np.diff(places)) > 0.19


def test_native_simulated_and_published_have_markers_of_their_own() -> None:
    schemes = (*DEFAULT_SCHEMES, *PUBLISHED)
    axes = panels(reward_against_bits(points(1, schemes), None, "").figure)[0]
    markers = [container.lines[0].get_marker() for container in axes.containers]
    families = [Scheme.parse(name).mode for name in schemes]
    assert len(set(zip(markers, families, strict=True))) == len(set(markers)) == 3


def test_what_was_trained_at_few_bits_is_drawn_as_simulated() -> None:
    schemes = ("fp32", "int8", "qat_int8", "qat_w8a8", "ptq_w8", "qat_w4a4")
    made = reward_against_bits(points(1, schemes), None, "")
    markers = {
        name: container.lines[0].get_marker()
        for name, container in zip(schemes, panels(made.figure)[0].containers, strict=True)
    }
    assert [name for name, marker in markers.items() if marker == "o"] == list(schemes[:3])
    assert markers["qat_w8a8"] == markers["qat_w4a4"] != markers["ptq_w8"]
    texts = [text.get_text() for text in made.figure.legends[0].get_texts()]
    assert texts == ["fp32", "int8", "qat_int8", "ptq_w… (simulated)", "qat_w… (simulated)"]


def test_the_random_policy_is_a_line_and_in_the_legend() -> None:
    made = reward_against_bits(points(), 22.0, "")
    dashed = [line for line in panels(made.figure)[0].lines if line.get_linestyle() == "--"]
    assert [line.get_ydata()[0] for line in dashed] == [22.0]
    assert "random policy" in [text.get_text() for text in made.figure.legends[0].get_texts()]
    assert "random" in made.caption


def test_each_of_several_runs_is_a_line() -> None:
    def lines(runs: int) -> int:
        return len(panels(reward_against_bits(points(runs), None, "").figure)[0].lines)

    assert lines(3) == lines(1) + 3


def test_a_single_episode_has_no_error_bar() -> None:
    one = BitsPoint(Scheme.parse("fp32"), Interval(500.0, -math.inf, math.inf), (500.0,))
    (container,) = panels(reward_against_bits([one], None, "").figure)[0].containers
    assert not container.has_yerr
