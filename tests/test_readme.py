"""The README is held to what stands: its commands, its links and its table."""

import re
import shlex
from pathlib import Path

import pytest

from quarl_tf import arguments, cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^quarl .+$", README, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command: str) -> None:
    parsed = arguments.build().parse_args(shlex.split(command.replace("$seed", "0"))[1:])
    assert parsed.verb in cli._VERBS


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


def test_the_variances_of_actions_are_those_of_the_report() -> None:
    report = (ROOT / "reports" / "regularisation" / "report.md").read_text()
    (told,) = re.findall(r"explores more, as QuaRL has it.+?1,749\.", README, re.DOTALL)
    numbers = re.findall(r"\d+\.\d+|\d,\d+", told)
    assert len(numbers) == 18
    assert [number for number in numbers if number not in report] == []


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile
