"""What figures show, and that all of it can be read."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from PIL import Image
from samples import RUN, returns_of

from quarl_tf.evaluation.compare import Interval, mean_interval
from quarl_tf.quantization.grid import fake_quantize
from quarl_tf.report.figures.curves import RETURNS, VARIANCE, Curve, mean_curves
from quarl_tf.report.figures.layers import blamed_layers, weight_histograms
from quarl_tf.report.figures.returns import paired_returns, performance_profile, return_against_bits
from quarl_tf.report.figures.style import png, scheme_colour
from quarl_tf.report.results import CellResults, Row
from quarl_tf.spec import DEFAULT_SCHEMES, Scheme
from quarl_tf.spec.cell import Cell, Column

COMPARED = DEFAULT_SCHEMES[1:]
PUBLISHED = tuple(f"ptq_paper_w{bits}" for bits in range(8, 1, -1))
TRAINED = tuple(f"qat_w{bits}a{bits}" for bits in range(8, 1, -1))
TASK = "dqn on CartPole-v1"
Point = tuple[Interval | None, Sequence[float | None]]
POINT: Point = Interval(490, 480, 500), [485.0, 495.0]


def curves(count: int, delay: int | None = None) -> list[Curve]:
    steps = np.arange(0.0, 50_000.0, 500.0)
    training = np.minimum(500, steps / 60)
    greedy = np.where(steps % 2500 == 0, training, np.nan)
    training[0] = np.nan  # No episode has ended yet.
    columns = {"step": steps, "episode_return": training, "greedy_return": greedy}
    columns |= {"action_variance": greedy / 2000, "episodes": steps // 50}
    return [Curve(pd.DataFrame(columns), delay)] * count


def groups(widths: int = 2, seeds: int = 3, suffix: str = "") -> dict[str, list[Curve]]:
    """Return full precision, one group that lacks a training, and some that quantise."""
    fp32 = {f"fp32{suffix}": curves(seeds), f"fp32 (layer_norm=True){suffix}": []}
    return fp32 | {f"{b} bits{suffix}": curves(seeds, 25_000) for b in range(8, 8 - widths, -1)}


def cell(points: dict[str, Point], distinction: str = "", env_id: str = RUN.env_id) -> CellResults:
    """Build a cell from the interval of each scheme and the mean returns of its trainings."""
    columns = (Column("fp32", Scheme.parse("fp32"), (replace(RUN, env_id=env_id),)),)
    described = Cell(columns=columns, distinction=distinction)
    rows = []
    for name, (interval, means) in points.items():
        scheme = Scheme.parse(name)
        task: dict[str, Any] = {"cell": described.title, "algo": "dqn", "env_id": env_id}
        task |= {"run_id": None, "seed": None, "delay": None, "label": name, "scheme": name}
        kind = {"native": scheme.native, "weight_bits": scheme.weight_bits, "runs": len(means)}
        rows.append(Row(**task, **kind, returns=interval))
    trainings = [
        replace(pooled, returns=None if mean is None else Interval(mean, mean, mean))
        for means in zip(*(means for _, means in points.values()), strict=True)
        for pooled, mean in zip(rows, means, strict=True)
    ]
    return CellResults(described, [], rows, trainings, None, {})


def played(schemes: tuple[str, ...] = (), runs: int = 1, distinction: str = "") -> CellResults:
    """Return the cell of the default schemes and of others."""
    points: dict[str, Point] = {}
    for name in (*DEFAULT_SCHEMES, *schemes):
        points[name] = mean_interval(returns_of(name)), [float(np.mean(returns_of(name)))] * runs
    return replace(cell(points, distinction), baseline=Interval(22, 20, 24))


def layers() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    long_name = "sequential/policy/q_network/torso/dense_1/MatMul;StatefulPartitionedCall/dense/x"
    return {
        "policy/hidden_0/MatMul": generator.normal(0, 0.3, (64, 4)).astype(np.float32),
        long_name: generator.normal(0, 0.05, (64, 64)).astype(np.float32),
    }


def pairs(*schemes: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {name: (np.array(returns_of("fp32")), np.array(returns_of(name))) for name in schemes}


LONG = "gradient=straight_through, ranges=percentile"
SETTINGS = " (learning_rate=0.00025, entropy_coefficient=0.01)"
FIGURES: dict[str, Callable[[], Figure]] = {
    "one training": lambda: mean_curves({"fp32": curves(1)}, RETURNS, "step", TASK),
    "all schemes": lambda: paired_returns(pairs(*COMPARED), TASK),
    "profile": lambda: performance_profile(
        {name: np.array([99.0, 100.0, -400.0]) for name in (*COMPARED, *TRAINED)}
    ),
    "weights": lambda: weight_histograms(layers(), "fp32 weights of dqn-CartPole-v1-s0"),
    "three families": lambda: return_against_bits([played((*PUBLISHED, *TRAINED), 3)]),
    "many cells": lambda: return_against_bits([played(TRAINED, 3, LONG)] * 10),
    "long names": lambda: mean_curves(groups(7, 5, SETTINGS), VARIANCE, "step", TASK),
    "episodes": lambda: mean_curves(groups(1), RETURNS, "episodes", TASK),
}


@pytest.mark.parametrize("name", FIGURES)
def test_everything_can_be_read_in_a_small_picture(name: str) -> None:
    figure = FIGURES[name]()
    FigureCanvasAgg(figure).draw()
    box = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= 0
    (legend,) = figure.legends
    below = legend.get_window_extent()
    assert not any(below.overlaps(axes.get_tightbbox()) for axes in figure.axes)
    titles = [axes.title.get_window_extent() for axes in figure.axes if axes.get_title()]
    assert not any(a.overlaps(b) for i, a in enumerate(titles) for b in titles[:i])
    assert all(figure.get_supylabel() or axes.get_ylabel() for axes in figure.axes)
    assert figure.axes[-1].get_xlabel()
    content = png(figure)
    image = Image.open(io.BytesIO(content))
    assert image.info.keys() <= {"transparency"}  # Nothing says when it was made, or by what.
    assert image.width >= 1200
    assert len(content) < 220_000
    assert plt.get_fignums() == []


def test_bits_descend_and_schemes_of_the_same_width_stand_apart() -> None:
    schemes = (*DEFAULT_SCHEMES, *PUBLISHED)
    (axes,), (of_three,) = (return_against_bits([played(PUBLISHED, runs)]).axes for runs in (1, 3))
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["32", "16", "8", "7", "6", "5", "4", "3", "2"]
    places = sorted(container.lines[0].get_xdata()[0] for container in axes.containers)
    assert len(places) == len(schemes)
    assert min(b - a for a, b in pairwise(places)) > 0.15
    means = [float(container.lines[0].get_ydata()[0]) for container in axes.containers]
    assert means == [pytest.approx(np.mean(returns_of(scheme))) for scheme in schemes]
    # The random policy has a line, and so has each of three trainings in the two families.
    for panel in (axes, of_three):
        dashed = [line for line in panel.lines if line.get_linestyle() == "--"]
        assert [line.get_ydata()[0] for line in dashed] == [22.0]
    assert len(of_three.lines) == len(axes.lines) + 2 * 3
    assert scheme_colour("ptq_w32") == scheme_colour("ptq_w8")  # More bits look like 8.


def test_what_lacks_a_training_has_no_mean_and_a_panel_without_any_no_scale() -> None:
    points = dict.fromkeys(("fp32", "qat_w4a4", "qat_w3a3", "qat_w2a2"), POINT)
    points["qat_w3a3"] = None, [490.0, None]
    (axes,) = return_against_bits([cell(points)]).axes
    assert (len(axes.containers), [text.get_text() for text in axes.texts]) == (3, ["missing"])
    (line,) = [line for line in axes.lines if len(line.get_xdata()) == 4]
    assert np.isnan(line.get_ydata()).tolist() == [False, False, True, False]
    cells = [cell({"fp32": POINT}), cell({"fp32": (None, [None, None])}, env_id="other")]
    full, empty = return_against_bits(cells).axes
    assert len(full.get_yticks()) > len(empty.get_yticks()) == 0


def test_panels_of_one_task_share_an_axis_without_wide_intervals() -> None:
    wide: Point = Interval(100, -900, 1100), [90.0, 110.0]
    tasks = (("one", POINT), ("one", wide), ("other", POINT))
    cells = [cell({"fp32": point}, env_id=task) for task, point in tasks]
    first, second, other = return_against_bits(cells).axes
    assert first.get_ylim() == second.get_ylim() != other.get_ylim()
    assert first.get_ylim() == pytest.approx((90 - 0.08 * 405, 495 + 0.08 * 405))


def test_a_profile_is_the_share_of_trainings_that_keep_so_much() -> None:
    (axes,) = performance_profile({"int8": np.array([100.0, 50.0, 130.0, -70.0])}).axes
    x, y = axes.lines[0].get_data()
    # Of four trainings three keep 50 %, two 100 %; values beyond the axis are at its ends.
    assert list(zip(x, y, strict=True))[1:-1] == [(-20, 100), (50, 75), (100, 50), (120, 25)]
    assert axes.lines[0].get_drawstyle() == "steps-pre"


def test_one_panel_per_scheme_counts_its_episodes() -> None:
    axes = {panel.get_title(): panel for panel in paired_returns(pairs(*COMPARED)).axes}
    assert list(axes) == list(COMPARED)
    for name, counts in (("int8", "0 30 0"), ("ptq_w2", "30 0 0")):
        assert re.findall(r"\d+", axes[name].texts[0].get_text()) == counts.split()
    (panel,) = paired_returns({"int8": (np.array([3.0, 1, 2]), np.array([30.0, 1, 0]))}).axes
    assert re.findall(r"\d+", panel.texts[0].get_text()) == ["1", "1", "1"]
    ring, dot = (c.get_offsets() for c in panel.collections if isinstance(c, PathCollection))
    assert (ring.tolist(), dot.tolist()) == ([[1, 1], [2, 2], [3, 3]], [[1, 1], [2, 0], [3, 30]])


def test_grid_lines_are_the_values_that_quantised_weights_take() -> None:
    weights = layers()
    axes = weight_histograms(weights).axes
    assert len(axes) == 2 * len(weights)
    for i, panel in enumerate(axes):
        form = Scheme.parse(("ptq_w4", "ptq_w2")[i % 2]).recipe.default.weights
        lines = {np.float32(line.get_xdata()[0]) for line in panel.lines}
        assert len(lines) == 2**form.bits
        assert set(fake_quantize(list(weights.values())[i // 2], form).ravel().tolist()) <= lines
    kernel = np.zeros((2, 3, 3, 1), np.float32)  # Its grid is that of the widest channel.
    kernel[0, 0, 0, 0], kernel[1, 0, 0, 0], kernel[1, 0, 1, 0] = 0.1, -2.0, 2.0
    axes = weight_histograms({"conv": kernel}).axes
    assert [float(line.get_xdata()[0]) for line in axes[1].lines] == [-2.0, -1.0, 0.0, 1.0]
    assert png(weight_histograms({"dead": np.zeros((3, 3), np.float32)}))


def test_layers_stand_in_order_with_their_numbers() -> None:
    columns = {"share": [0.25, 0.75], "saturated": [0.01, 0.0], "codes": [200, 256]}
    columns |= {"gain": [2.0, 1.0], "gain_low": [-1.0, -np.inf], "gain_high": [4.0, np.inf]}
    table = pd.DataFrame({"layer": ["hidden_0", "head"], **columns})
    figure = blamed_layers(table, "int8 of a run")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["hidden_0", "head"]
    assert figure.axes[0].yaxis_inverted()
    *bars, gains = figure.axes
    widths = [[bar.get_width() for bar in axes.patches] for axes in bars]
    assert widths == [[25, 75], [1, 0], [200, 256]]
    assert gains.lines[-1].get_xdata().tolist() == [2, 1]
    (ends,) = gains.collections
    first, second = ends.get_segments()
    assert first[:, 0].tolist() == [-1, 4]
    assert not second.size  # Nothing bounds it.
    assert png(figure)


def test_curves_leave_out_what_has_no_value_and_mark_the_delay() -> None:
    figure = mean_curves({"fp32": curves(1), "4 bits": curves(1, 25_000)}, RETURNS, "step")
    training, greedy = figure.axes
    assert len(data(training, 0)[0]) == 99
    assert data(greedy, 0)[0] == data(greedy, 1)[0] == list(range(0, 50_000, 2500))
    for axes in figure.axes:  # A line for each group, as one training has no faint one.
        plain, aware, delay = axes.lines
        assert plain.get_color() != aware.get_color()
        assert delay.get_xdata() == [25_000, 25_000]
    assert training.get_ylim() == greedy.get_ylim()
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["fp32", "4 bits", "quantised from here on"]


def test_a_single_evaluation_is_seen() -> None:
    once = Curve(curves(1)[0].values[:1].assign(episode_return=20.0))
    for axes in mean_curves({"fp32": [once]}, RETURNS, "step").axes:
        assert axes.lines[0].get_marker() == "o"


def data(axes: Axes, place: int) -> tuple[list[float], list[float]]:
    line = axes.lines[place]
    return np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()


def test_variance_and_return_are_smoothed_where_they_are_known() -> None:
    columns = {"step": [10.0, 20.0, 30.0], "greedy_return": [100.0, np.nan, 0.0]}
    variances = [0.2, np.nan, 0.0], [0.1, np.nan, 0.1]
    trainings = [Curve(pd.DataFrame(columns | {"action_variance": v})) for v in variances]
    above, below = mean_curves({"fp32": trainings}, VARIANCE, "step").axes
    # A moving average of factor 0.95 begins at the first value and not at 0.
    assert data(above, 0) == ([10, 30], pytest.approx([0.2, 0.19 / 1.95]))
    assert data(above, 1) == ([10, 30], pytest.approx([0.1, 0.1]))
    assert data(above, 2)[1] == pytest.approx([0.15, (0.19 / 1.95 + 0.1) / 2])
    assert data(below, 2)[1] == pytest.approx([100, 95 / 1.95])
    single = mean_curves({"fp32": trainings[:1]}, VARIANCE, "step")
    assert [len(axes.lines) for axes in single.axes] == [1, 1]
    texts = mean_curves(groups(), VARIANCE, "step").legends[0].get_texts()
    assert [text.get_text() for text in texts[:2]] == ["fp32", "fp32 (layer_norm=True) (missing)"]


def test_a_trend_goes_by_episodes_and_marks_where_each_training_began_to_quantise() -> None:
    columns = {"step": [0.0, 100.0, 200.0], "episode_return": [np.nan, 20.0, 40.0]}
    columns["greedy_return"] = columns["episode_return"]
    tables = [pd.DataFrame(columns | {"episodes": [0.0, n, 2 * n]}) for n in (2, 3)]
    trainings = [Curve(table, 150) for table in tables]
    axes, _ = mean_curves({"8 bits": trainings}, RETURNS, "episodes").axes
    assert (data(axes, 0), data(axes, 1)) == (([2, 4], [20, 40]), ([3, 6], [20, 40]))
    # Both have values from episode 3 to 4, between which each is interpolated.
    assert data(axes, 2) == ([3, 4], pytest.approx([(30 + 20) / 2, (40 + 80 / 3) / 2]))
    # Step 150 lies halfway between the last two rows.
    assert [data(axes, place)[0][0] for place in (3, 4)] == [3, 4.5]
