"""The README is held to what stands: its commands, its links and its rows of results."""

import re
import shlex
from pathlib import Path

import pytest

from quarl_tf.cli import arguments

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood_and_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for command in re.findall(r"^quarl .+$", text, re.MULTILINE):
        arguments.build().parse_args(shlex.split(command, comments=True)[1:])
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (page.parent / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", text, re.MULTILINE):
        assert f"\n{target}:" in makefile


def test_rows_of_results_are_those_of_the_reports() -> None:
    marked = re.findall(
        r"<!-- results: from (\S+) -->\n(.+?)<!-- /results -->", PAGES[0].read_text(), re.DOTALL
    )
    for source, table in marked:
        assert set(table.splitlines()) <= set((ROOT / source).read_text().splitlines())
    assert marked
