"""Behaviour of the figures: what they show, and that all of it can be read."""

import io
import math
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.colors import same_color, to_rgb
from matplotlib.figure import Figure
from PIL import Image

from quarl_tf.evaluation.compare import Interval, mean_interval
from quarl_tf.foundation.errors import UsageError
from quarl_tf.quantization.grid import fake_quantize
from quarl_tf.report.figures import (
    MOST_PRECISIONS,
    BitsPoint,
    Curve,
    Plot,
    PrecisionCurves,
    PrecisionPanel,
    PrecisionPoint,
    action_variance,
    learning_curve,
    mean_line,
    paired_returns,
    reward_against_bits,
    reward_against_precision,
    reward_by_setting,
    reward_trend,
    scheme_colour,
    smoothed,
    weight_histograms,
)
from quarl_tf.spec import DEFAULT_SCHEMES, Scheme, TensorFormat

OTHERS = DEFAULT_SCHEMES[1:]
PUBLISHED = tuple(f"ptq_paper_w{bits}" for bits in range(8, 1, -1))
NEAR = Interval(490, 480, 500)
TRAINED = tuple(f"qat_w{bits}a{bits}" for bits in range(8, 1, -1))


def returns(scheme: str, episodes: int = 100) -> np.ndarray:
    """Return CartPole's: nearly all 500, whatever the scheme, until 2 bits."""
    if scheme == "ptq_w2":
        return np.random.default_rng(0).integers(8, 12, episodes).astype(float)
    values = np.full(episodes, 500.0)
    if scheme == "ptq_w3":
        values[:3] = 450.0
    return values


def curve(label: str, delay: int | None = None) -> Curve:
    steps = np.arange(0.0, 50_000.0, 500.0)
    training = np.minimum(500, steps / 60)
    greedy = np.where(steps % 2500 == 0, training, np.nan)
    training[0] = np.nan  # No episode has ended yet.
    return Curve(label, steps, training, greedy, greedy / 2000, delay)


def courses(widths: int = 2, seeds: int = 3) -> list[PrecisionCurves]:
    """Return plain trainings, one precision without any, and some that begin to quantise."""
    names = [f"seed {seed}" for seed in range(seeds)]
    return [
        PrecisionCurves("fp32", False, [curve(name) for name in names]),
        PrecisionCurves("layer norm", False, []),
        *(
            PrecisionCurves(f"QAT {bits} bits", True, [curve(name, 25_000) for name in names])
            for bits in range(8, 8 - widths, -1)
        ),
    ]


def counted(curve: Curve) -> Curve:
    """Return a training whose episodes took 50 steps each."""
    return replace(curve, episodes=curve.steps // 50)


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


def settings(title: str, returns: Interval | None = NEAR) -> PrecisionPanel:
    """Return a cell of a study with plain trainings and some at 4 and at 2 bits."""
    plain = PrecisionPoint("Fp", Scheme.parse("fp32"), None, Interval(500, 500, 500), (500, 500))
    trained = [
        PrecisionPoint(str(bits), Scheme.parse(f"qat_w{bits}a{bits}"), 500, returns, (485, 495))
        for bits in (4, 2)
    ]
    return PrecisionPanel(title, [plain, *trained], 22.0)


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
    "settings": lambda: reward_by_setting(
        {
            env_id: [settings("defaults"), settings("ranges=percentile"), settings("edge_bits=2")]
            for env_id in ("ppo on CartPole-v1", "ppo on HalfCheetahBulletEnv-v0")
        },
        "options",
    ),
    "action variance": lambda: action_variance(courses(), "ppo on CartPole-v1"),
    "action variance in many precisions": lambda: action_variance(
        [
            *courses(7, 5),
            PrecisionCurves("QAT 2 bits from 25,000 (learning_rate=1e+30)", True, []),
        ],
        "ppo on CartPole-v1",
    ),
    "action variance in precisions with long names": lambda: action_variance(
        [
            replace(one, label=f"{one.label} (learning_rate=0.00025, entropy_coefficient=0.01)")
            for one in courses(7)
        ],
        "ppo on CartPole-v1",
    ),
    "reward trend": lambda: reward_trend(
        [
            PrecisionCurves(one.label, one.quantised, [counted(curve) for curve in one.curves])
            for one in courses(1)
        ],
        "dqn on CartPole-v0",
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


# Action variances.


def test_a_moving_average_forgets_and_begins_at_the_first_value() -> None:
    # Weights 1; 1/2, 1; 1/4, 1/2, 1.
    assert smoothed(np.array([1.0, 2.0, 4.0]), 0.5) == pytest.approx([1, 5 / 3, 3])
    assert smoothed(np.array([7.0, 7.0, 7.0]), 0.95) == pytest.approx([7, 7, 7])
    assert smoothed(np.array([2.0, 0.0]), 0.95) == pytest.approx([2, 1.9 / 1.95])
    assert smoothed(np.array([]), 0.95).shape == (0,)


def test_lines_with_steps_of_their_own_have_a_mean_where_all_of_them_are() -> None:
    longer = np.array([0.0, 10.0, 20.0]), np.array([0.0, 10.0, 20.0])
    shorter = np.array([5.0, 15.0]), np.array([1.0, 3.0])
    steps, values = mean_line([longer, shorter])
    assert steps.tolist() == [5, 10, 15]
    assert values.tolist() == [3, 6, 9]


def test_variance_and_return_are_smoothed_where_they_are_known() -> None:
    steps, nothing = np.array([10.0, 20.0, 30.0]), np.full(3, np.nan)
    one, two = (
        Curve("seed", steps, nothing, np.array([100.0, np.nan, 0.0]), variance)
        for variance in (np.array([0.2, np.nan, 0.0]), np.array([0.1, np.nan, 0.1]))
    )
    made = action_variance([PrecisionCurves("fp32", False, [one, two])], "")
    above, below = panels(made.figure)
    first, second, mean = above.lines
    assert all(line.get_xdata().tolist() == [10, 30] for line in (*above.lines, *below.lines))
    assert first.get_ydata() == pytest.approx([0.2, 0.19 / 1.95])
    assert second.get_ydata() == pytest.approx([0.1, 0.1])
    assert mean.get_ydata() == pytest.approx([0.15, (0.19 / 1.95 + 0.1) / 2])
    assert "Not smoothed, the variances end at 0.05 (fp32)." in made.caption
    assert below.lines[-1].get_ydata() == pytest.approx([100, 95 / 1.95])
    assert mean.get_linewidth() > first.get_linewidth()


def test_a_single_training_is_no_mean() -> None:
    (single,) = courses(0, 1)[:1]
    made = action_variance([single], "")
    assert [len(axes.lines) for axes in panels(made.figure)] == [1, 1]
    assert "faint" not in made.caption


def test_every_precision_has_a_colour_and_the_delay_is_a_line_in_both_panels() -> None:
    made = action_variance(courses(), "")
    texts = [text.get_text() for text in made.figure.legends[0].get_texts()]
    assert texts == [
        *("fp32", "layer norm (missing)", "QAT 8 bits", "QAT 7 bits", "quantised from here on")
    ]
    for axes in panels(made.figure):
        assert [line.get_xdata()[0] for line in axes.lines].count(25_000) == 1
    assert "quantisation delay" in made.caption
    assert "delay" not in action_variance(courses(0), "").caption


def test_as_many_precisions_as_are_drawn_can_be_told_apart() -> None:
    made = action_variance(courses(MOST_PRECISIONS - 2), "")
    colours = [to_rgb(line.get_color()) for line in made.figure.legends[0].get_lines()]
    assert len(colours) == MOST_PRECISIONS + 1
    apart = [math.dist(a, b) for i, a in enumerate(colours) for b in colours[:i]]
    assert min(apart) > 0.1


def test_the_caption_says_what_a_variance_means_and_how_it_was_smoothed() -> None:
    caption = action_variance(courses(), "").caption
    assert "probabilities, and a lower one means more exploration" in caption
    assert "factor 0.95" in caption
    assert "bias-corrected" in caption


# Reward trends.


def test_a_trend_goes_by_episodes_and_marks_where_each_training_began_to_quantise() -> None:
    steps, nothing = np.array([0.0, 100.0, 200.0]), np.full(3, np.nan)
    returns = np.array([np.nan, 20.0, 40.0])
    slow, quick = (
        Curve("seed", steps, returns, nothing, nothing, 150, np.array([0.0, ended, 2 * ended]))
        for ended in (2.0, 4.0)
    )
    made = reward_trend([PrecisionCurves("8 bits", True, [slow, quick])], "")
    (axes,) = panels(made.figure)
    first, second, mean, *delays = axes.lines
    assert first.get_xdata().tolist() == [2, 4]
    assert second.get_xdata().tolist() == [4, 8]
    assert first.get_ydata().tolist() == second.get_ydata().tolist() == [20, 40]
    # Both are there at episode 4 alone: one with 40, the other with 20.
    assert (mean.get_xdata().tolist(), mean.get_ydata().tolist()) == ([4], [30])
    # Step 150 lies halfway between the last two rows.
    assert [line.get_xdata()[0] for line in delays] == [3, 6]
    assert "an episode of its own" in made.caption
    assert axes.get_xlabel() == "training episodes"


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
            assert (
                set(fake_quantize(values, TensorFormat(bits=bits, step="paper")).ravel().tolist())
                <= lines
            )


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
    families = [Scheme.parse(name).rounding for name in schemes]
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


def test_settings_are_rows_and_what_lacks_a_training_has_no_mean() -> None:
    cells = [settings("defaults", Interval(400, 380, 420)), settings("extremes", None)]
    (axes,) = reward_by_setting({"ppo": cells}, "options").figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["defaults", "extremes"]
    means = [line.get_xydata() for line in axes.lines if line.get_marker() == "D"]
    # Both means stand in the first row, 4 bits above 2; the axis points down.
    assert [mean[0, 0] for mean in means] == [400, 400]
    assert -0.5 < means[0][0, 1] < means[1][0, 1] < 0.5
    missing = [text.xy[1] for text in axes.texts if text.get_text() == "missing"]
    assert len(missing) == 2
    assert all(0.5 < place < 1.5 for place in missing)
    assert axes.get_ylim() == (1.5, -0.5)


def test_no_two_points_of_a_setting_share_a_place() -> None:
    names = ("qat_int8", "qat_w8a8", "qat_w2a2")
    made = [
        PrecisionPoint(name[-1], Scheme.parse(name), 500, Interval(490, 480, 500), (485, 495))
        for name in names
    ]
    figure = reward_by_setting({"ppo": [PrecisionPanel("defaults", made, None)]}, "").figure
    (axes,) = figure.axes
    places = [line.get_ydata()[0] for line in axes.lines if line.get_marker() in "oD"]
    assert len({round(float(place), 3) for place in places}) == len(names)
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts[:3] == ["qat_int8", "qat_w8a8", "2 bits"]


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


def test_captions_explain_the_labels_that_are_there() -> None:
    def caption(*schemes: str) -> str:
        points = [
            PrecisionPoint(name, Scheme.parse(name), None, Interval(1, 0, 2), (1.0,))
            for name in schemes
        ]
        return reward_against_precision([PrecisionPanel("one", points, None)], "s").caption

    plain = caption("fp32", "ptq_w4")
    assert "Fp: float32; w8, w7, …: weights alone, after training. Mean" in plain
    assert "8*: int8" in caption("fp32", "int8")
    assert "trained and run at so many bits. Mean" in caption("fp32", "qat_w4a4")
