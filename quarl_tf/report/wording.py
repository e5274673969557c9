"""Say results in words: what came out, what to know before believing it, numbers as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from quarl_tf.evaluation.compare import MIN_EPISODES, Interval, independent_games
from quarl_tf.foundation.provenance import UNKNOWN_COMMIT, UNKNOWN_PROCESSOR
from quarl_tf.report.results import OK, LoadedRun, Row, fewest_episodes
from quarl_tf.spec import REFERENCE, Quantization, Scheme

#: How to begin a sentence on a simulated sweep, by the quantiser's rule.
_SWEEPS = {"nearest": "In simulation", "floor": "In simulation by the formula as published"}
_TIMES = "\N{MULTIPLICATION SIGN}"
_UNKNOWN = "\N{EN DASH}"

# Words.


def headline(rows: Sequence[Row]) -> list[str]:
    """Say what came out: the smallest flatbuffer that keeps the reward, losses, the bits needed."""
    natives = [r for r in rows if r.native and r.status == OK and r.scheme != REFERENCE]
    natives.sort(key=lambda row: row.size_bytes or math.inf)
    safe = [row for row in natives if _keeps_reward(row)]
    reference = next(row for row in rows if row.scheme == REFERENCE)
    first = [*safe[:1], *(row for row in natives[:1] if not _keeps_reward(row))]
    sentences = [f"{r.scheme} is {_cheaper(r, reference)} than fp32{_cost(r)}." for r in first]
    sentences += [
        f"The return of {row.scheme} is {_amount(row)} lower."
        for row in natives[1:]
        if row.verdict == "loss"
    ]
    schemes = {row.scheme: Scheme.parse(row.scheme) for row in rows}
    sentences += [
        f"In simulation, {row.scheme} runs at the {row.weight_bits} bits it was trained at"
        f"{_cost(row)}."
        for row in rows
        if row.status == OK and schemes[row.scheme].aware and not row.native
    ]
    simulated = {how: [r for r in rows if schemes[r.scheme].rounding == how] for how in _SWEEPS}
    return [
        *sentences,
        *(_bits_needed(words, simulated[how]) for how, words in _SWEEPS.items() if simulated[how]),
    ]


def _keeps_reward(row: Row) -> bool:
    return row.verdict in ("gain", "within margin")


def _cheaper(row: Row, reference: Row) -> str:
    words = [ratio(row.compression, "smaller", "larger")]
    if row.latency_median_us and reference.latency_median_us:
        words.append(ratio(reference.latency_median_us / row.latency_median_us, "faster", "slower"))
    return " and ".join(words)


def ratio(value: float | None, above: str, below: str) -> str:
    """Say how many times smaller or larger, faster or slower something is."""
    if value is None:
        return f"no {above}"
    if value >= 1:
        return f"{value:.1f}{_TIMES} {above}" if value >= 1.05 else f"no {above}"
    return f"{1 / value:.1f}{_TIMES} {below}" if value <= 1 / 1.05 else f"no {below}"


def _evidence(row: Row) -> str:
    if row.runs == 1:
        return f"{row.episodes} paired episodes"
    return f"{row.runs} trainings with {row.episodes} paired episodes in all"


def _cost(row: Row) -> str:
    if row.verdict == "gain":
        return f", and its return is {_amount(row)} higher"
    if row.verdict == "loss":
        return f", but its return is {_amount(row)} lower"
    if row.verdict == "cannot tell":
        return f"; whether it loses reward, {_evidence(row)} cannot tell"
    if row.difference_high is not None and row.difference_high < 0:
        return f"; its return is {_amount(row)} lower, within the margin"
    return f" and loses no reward that {_evidence(row)} could show"


def _amount(row: Row) -> str:
    """Say how far a return is from that of fp32: in percent, or plainly where that is 0."""
    if row.reward_error_percent is not None:
        return percent(abs(row.reward_error_percent))
    return f"{number_text(abs(row.difference_mean or 0.0))} per episode"


def _bits_needed(how: str, rows: Sequence[Row]) -> str:
    """Say down to how many bits simulated weights keep the reward, from many to few."""
    kept = 0
    while kept < len(rows) and _keeps_reward(rows[kept]):
        kept += 1
    keeping = f"{how}, weights of {rows[kept - 1].weight_bits} bits keep the reward"
    if kept == len(rows):
        return f"{keeping}, the fewest tried."
    stop = rows[kept]
    evidence = f"{stop.runs} trainings" if stop.runs > 1 else "the episodes"
    what = {
        None: " the result is missing",
        "loss": f" the return is {_amount(stop)} lower",
        "cannot tell": f", {evidence} cannot tell",
    }[stop.verdict]
    if kept == 0:
        return f"{how}, at {stop.weight_bits} bits{what}."
    return f"{keeping}; at {stop.weight_bits} bits{what}."


def notes_on(runs: Sequence[LoadedRun]) -> list[str]:
    """Say what the reader must know before believing the results."""
    notes = []
    episodes = fewest_episodes(runs)
    if episodes < MIN_EPISODES:
        notes.append(
            f"Only {episodes} episodes: fewer than {MIN_EPISODES} cannot tell what a scheme costs. "
            "Play 100 or more."
        )
    counts = {len(run.reference.evaluation.seeds) for run in runs}
    if len(counts) > 1:
        notes.append(f"Trainings have from {min(counts)} to {max(counts)} episodes.")
    notes += [note for run in runs for note in _notes_on_run(run)]
    notes += _notes_on_trainings(runs)
    without = [run.run_id for run in runs if run.curve is None]
    if without:
        notes.append(f"No training curve was exported for {', '.join(without)}.")
    # Several quantisation-aware runs may have the same plain twin.
    return list(dict.fromkeys(notes))


def _notes_on_run(run: LoadedRun) -> list[str]:
    """Say what the reader must know of one run's episodes and files."""
    notes = []
    most, least = max(run.played.values()), min(run.played.values())
    if least < most:
        short = ", ".join(name for name, played in run.played.items() if played == least)
        notes.append(
            f"Of {run.run_id}, the first {least} episodes are compared, as many as {short} "
            f"played; others played {most}."
        )
    plain = run.reference.sidecar.run_id
    games = run.reference.evaluation.returns
    worth = independent_games(run.reference.evaluation)
    if worth is not None and worth < len(games):
        notes.append(
            f"The {len(games)} games of {plain} are worth {worth:.1f} independent ones (different "
            f"returns: {len(set(games))}): without chance in the game, a greedy policy plays on "
            "alike from many starts. Intervals take games of equal returns for one."
        )
    returns = run.reference.comparison.returns
    if run.chance is None:
        notes.append(
            f"{plain} has no evaluation of a random policy to compare with, so the normalised "
            "error is unknown; see Missing."
        )
    elif _is_as_random(games, returns, run.chance.returns):
        notes.append(
            f"The fp32 policy of {plain} is not shown to earn more than a random one: it has "
            "little to lose, and its verdicts say little. Train it longer."
        )
    notes += [
        f"{file} in the folder of {run.run_id} is named after no scheme and was left out."
        for file in run.foreign
    ]
    return notes


def _is_as_random(played: Sequence[float], mean: Interval, chance: Sequence[float]) -> bool:
    """Tell whether a policy is not shown to earn more than a random one.

    Few games have a wide interval; but where each earns more than any random one, it is shown.
    """
    low = mean.low if mean.bounded else mean.mean
    return bool(low <= np.mean(chance)) and min(played) <= max(chance)


def _notes_on_trainings(runs: Sequence[LoadedRun]) -> list[str]:
    """Say what the reader must know of quantisation-aware trainings and their plain twins."""
    notes = []
    if len({run.run.seed for run in runs if run.run.quantization is not None}) == 1:
        notes.append(
            "Quantisation-aware trainings of one seed: what they lose to their plain twin is the "
            "difference of two trainings, which chance makes as well. More seeds would tell."
        )
    elsewhere = {
        run.run.quantization.bits: None
        for run in runs
        if run.run.quantization and run.own.trained_on != run.reference.sidecar.trained_on
    }
    if elsewhere:
        notes.append(
            f"Trained at {'/'.join(map(str, elsewhere))} bits on another processor than the plain "
            "twins, or on one that was not recorded. Where it is another, sums round otherwise: "
            "these trainings differ from their twins before the delay already, and what they lose "
            "to them is the difference of two trainings."
        )
    return notes


def quantization_text(quantization: Quantization) -> str:
    """Say how a training is quantised: bits, delay, and what is not usual or follows from that."""
    options = ", ".join(f"{name}={value}" for name, value in quantization.options().items())
    text = f"{quantization.bits} bits from step {quantization.delay:,} on"
    return f"{text} ({options})" if options else text


# Numbers as text.


def number_text(value: float | None) -> str:
    """Write a return or a latency with three to five digits; a dash for what is unknown."""
    if value is None:
        return _UNKNOWN
    magnitude = abs(value)
    digits = 0 if magnitude >= 1000 else 1 if magnitude >= 10 else 2
    text = f"{value:,.{digits}f}" if magnitude >= 0.01 or value == 0 else f"{value:.1g}"
    return ("0" if value == 0 else text).replace("-", "\N{MINUS SIGN}")


def percent(value: float | None) -> str:
    """Write a percentage."""
    return number_text(value) + ("" if value is None else " %")


def size(value: float | None) -> str:
    """Write a number of bytes."""
    if value is None:
        return _UNKNOWN
    for unit, step in (("MB", 1e6), ("kB", 1e3)):
        if value >= step:
            return f"{value / step:.1f} {unit}"
    return f"{value:.0f} B"


def limits(low: float | None, high: float | None) -> str:
    """Write the limits of an interval."""
    if low is None or high is None:
        return "[no interval]"
    return f"[{number_text(low)}, {number_text(high)}]"


def made_with(provenance: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """Say which commits and versions of packages made results, and on which processors."""
    commits = [f"{what} at {_commits(many)}" for what, many in provenance["commits"].items()]
    packages = [f"{name} {' and '.join(many)}" for name, many in provenance["versions"].items()]
    places = [
        f"{what} on {' and '.join(many)}"
        for what, many in provenance["processors"].items()
        if set(many) - {UNKNOWN_PROCESSOR}
    ]
    return "; ".join([", ".join(commits).capitalize(), ", ".join(packages), *places])


def _commits(many: Sequence[str]) -> str:
    known = [commit for commit in many if commit != UNKNOWN_COMMIT]
    named = [f"commit{'s' if len(known) > 1 else ''} {', '.join(known)}"] if known else []
    return " and ".join([*named, *(["an unknown commit"] if len(known) < len(many) else [])])


def dtypes(counts: Mapping[str, int]) -> str:
    """Write the weights of a file by dtype, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {dtype}" for dtype, count in ordered)
