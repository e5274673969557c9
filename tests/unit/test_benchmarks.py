"""How the benchmarks summarise what pages publish; nothing is timed."""

import arm
import numpy as np
import ours
import peers
import time_to_solve
import training_throughput
from samples import Artifacts


def test_peers_take_the_zoo_s_values_and_do_not_count_the_warm_up() -> None:
    arguments = peers.zoo_arguments({"n_envs": 8, "n_steps": 32, "clip_range": "lin_0.2"})
    assert arguments.keys() == {"n_steps", "clip_range"}
    assert [arguments["clip_range"](remaining) for remaining in (1.0, 0.5)] == [0.2, 0.1]
    assert peers.rate([(100, 0.0), (200, 10.0), (300, 11.0), (400, 13.0)], 150) == 200 / 3


def test_multiplications_are_counted() -> None:
    loads = ours.workloads()
    counted = {n: ours.multiplications(loads[n]) for n in ("dqn-CartPole", "a2c-Pong")}
    # CartPole: 4 numbers, two actions, 256 by 256 in between; 64 transitions for two steps.
    layers = 4 * 256, 256 * 256, 256 * 2
    learning = 64 * 128 / 256 * (4 * sum(layers) - layers[0])
    assert counted["dqn-CartPole"] == sum(layers) + learning
    # Nature's network by hand, one pass to act and one to learn.
    convolutions = 20 * 20 * 32 * 8 * 8 * 4, 9 * 9 * 64 * 4 * 4 * 32, 7 * 7 * 64 * 3 * 3 * 64
    policy = sum(convolutions) + 3136 * 512 + 512 * 6
    assert counted["a2c-Pong"] == 4 * policy - convolutions[0]


def test_the_floor_is_the_environment_and_then_the_arithmetic() -> None:
    figures = {
        "machine": {"multiplications_per_second": {"float32": 6000}},
        "preset": {"precision": "float32"},
        "multiplications": 2,
        "steps_per_second": {"alone": [900, 1000, 2000], "ours": [300, 200, 400], "sb3": [100] * 3},
        "peers": ["sb3"],
        "shares": dict.fromkeys((*ours.PARTS, "rest"), 20.0),
    }
    line = training_throughput.tables({"task": figures}).splitlines()[4]
    # 1 / (1 / 1000 + 1 / 3000) is 750.
    assert line.startswith("| task | 300 [200, 400] | sb3 | 100 [100, 100] | 3.00 [2.00, 4.00] |")
    assert line.endswith("| 40 % | 1,000 [900, 2,000] | 3,000 |")


def test_seconds_to_solve_are_compared_by_seed() -> None:
    all_seconds = {"ours": (4.0, 10.0, None), "sb3": (8.0, 30.0, 9.0)}
    task = {"task": "CartPole", "confirmed": 490.0}
    rows = [
        task | {"library": library, "seed": seed, "seconds": taken, "steps": taken and 2000}
        for library, seconds in all_seconds.items()
        for seed, taken in enumerate(seconds)
    ]
    *_, us, sb3, _, missing = time_to_solve.table(rows).splitlines()
    assert missing.startswith("Not run: sbx on CartPole, ours on LunarLander,")
    assert "ours on Pong to 20" in missing
    assert "sb3 on Pong to 20" not in missing  # It has no recipe of theirs.
    assert us.startswith("| CartPole | 475 | ours | 2 of 3 | 7.0 [4.0, 10.0] | 2 [2, 2] |")
    assert sb3.endswith("| 9.0 [8.0, 30.0] | 2 [2, 2] | 490.0 [490.0, 490.0] | 2.50 [2.00, 3.00] |")
    assert time_to_solve.seconds_limit(rows, "CartPole", 1, 3.0) == 30
    assert time_to_solve.seconds_limit(rows, "CartPole", 2, 3.0) is None  # Nor did ours.
    ended = task | {"library": "sbx", "seconds": None, "steps": None, "limit": 30.0, "seed": 1}
    ended["out_of_time"] = True
    assert "| sbx | 0 of 1 within 30 s | none |" in time_to_solve.table([*rows, ended])


def test_heads_are_compared_state_by_state_in_steps_of_codes(artifacts: Artifacts) -> None:
    here = {"actions": np.array([1, 0, 0]), "heads": np.array([[1.0, 2.5], [3, 2], [1, 1]])}
    board = {"actions": np.array([1, 1, 0]), "heads": np.array([[1.0, 2.5], [2, 3], [1, 1]])}
    assert arm.comparison(here, board, unit=0.5) == {"equal_actions": 2, "difference": 2, "lead": 2}
    assert arm.comparison(here, here, None) == {"equal_actions": 3, "difference": 0, "lead": 0}
    # An action of several numbers is equal where all are; it has no lead.
    heads, others = np.array([[0.0, 1.0], [0.25, 0.5]]), np.array([[0.0, 1.0], [0.25, 0.0]])
    here, board = ({"actions": x, "heads": x} for x in (heads, others))
    assert arm.comparison(here, board, 0.25) == {"equal_actions": 1, "difference": 2}
    assert arm.step(artifacts["fp32"].read_bytes()) is None
    assert arm.step(artifacts["steering_int8_io"].read_bytes()) == 1 / 128
