"""The benchmark of mixed precision: how repetitions are summed up. Nothing is timed."""

import mixed_precision


def repetition(full: float, mixed: float) -> dict[str, dict[str, float]]:
    rates = {"float32": full, "bfloat16": mixed}
    names = ("gradient_steps", "environment_steps", "peak_mib")
    return {precision: dict.fromkeys(names, rate) for precision, rate in rates.items()}


def test_ratios_are_of_repetitions_side_by_side() -> None:
    found = mixed_precision.summary([repetition(2, 3), repetition(4, 5), repetition(10, 20)])
    assert found["bfloat16"]["peak_mib"] == 5
    assert found["gradient_steps_ratio"] == [1.5, 1.25, 2]
