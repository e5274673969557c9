"""The README is held to what stands: its commands, its links and its table."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from quarl_tf.cli import arguments, verbs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^quarl .+$", README, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command: str) -> None:
    parsed = arguments.build().parse_args(shlex.split(command.replace("$seed", "0"))[1:])
    assert parsed.verb in verbs._VERBS


def test_there_are_commands() -> None:
    assert COMMANDS


@pytest.mark.parametrize("target", re.findall(r"\]\((?!http)([^)]+)\)", README))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


def test_the_tables_of_results_are_the_generated_ones() -> None:
    marked = re.findall(r"<!-- results: from (\S+) -->\n(.+?)<!-- /results -->", README, re.DOTALL)
    for source, table in marked:
        assert table in (ROOT / source).read_text()
    results, trainings, speeds = (table for _, table in marked)
    assert "| fp32 |" in results
    assert "| Fp | fp16 |" in trainings
    assert "| sb3 |" in speeds


def test_what_a_robot_explores_and_earns_is_as_reported() -> None:
    report = (ROOT / "reports" / "regularisation" / "report.md").read_text()
    number = r"(\d[\d,.]*\d)"
    told = re.search(
        rf"its variance ends at {number}, {number}, {number} and {number} with 8, 6, 4 and 2 bits, "
        rf"for {number} in float32 and {number} with layer norm, and what is exported earns "
        rf"{number}, {number}, {number} and {number}, for {number} and {number}\.",
        " ".join(README.split()),
    )
    assert told is not None
    caption = re.findall(r"the variances end at (.+)", report)[-1]
    ends = {label: end for end, label in re.findall(rf"{number} \(([^)]+)\)", caption)}
    rows = re.findall(
        r"^\| ppo on HalfCheetah\S+ (?:\S+ )?\| \S+ \| (.+) \|$", report, re.MULTILINE
    )
    (float32, *quantised), (normed, *_) = (
        [cell.split()[0] for cell in row.split("|")] for row in rows
    )
    widths = [ends[f"QAT {bits} bits"] for bits in (8, 6, 4, 2)]
    explored, earned = told.groups()[:6], told.groups()[6:]
    assert explored == (*widths, ends["fp32"], ends["layer norm"])
    assert earned == (*quantised, float32, normed)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile


def test_the_memory_of_a_replay_is_as_measured() -> None:
    found = json.loads((ROOT / "benchmarks" / "replay_memory.json").read_text())
    told = f"{found['resident MiB']:,.0f} MiB resident, {found['own MiB']:,.0f} of them its own"
    assert told in " ".join(README.split())


def test_what_walker_earns_in_episodes_that_nothing_was_chosen_by_is_as_evaluated() -> None:
    paths = (ROOT / "tflite_models").glob("ddpg-Walker2D*-999554cc/fp32.eval.json")
    kept = [json.loads(path.read_text())["returns"] for path in sorted(paths)]
    first, more = ([np.mean(one[part]) for one in kept] for part in (slice(100), slice(100, 200)))
    told = (
        f"its two trainings earn {first[0]:,.0f} and {first[1]:,.0f}; since that was seen on the "
        "same hundred episodes, their fp32 has played a hundred more, in which they earn "
        f"{more[0]:,.0f} and {more[1]:,.0f}, together {np.mean(more):,.0f}"
    )
    assert len(more) == 2
    assert told in " ".join(README.split())
