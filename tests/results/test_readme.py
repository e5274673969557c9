"""Commands, links and numbers in the README and the documentation are right."""

import re
import shlex
from pathlib import Path

import pytest
from samples import ROOT, python

from quarl_tf.cli import arguments

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page: Path) -> None:
    text, makefile = page.read_text(), (ROOT / "Makefile").read_text()
    for command in re.findall(r"^quarl .+$", text, re.MULTILINE):
        arguments.build().parse_args(shlex.split(command, comments=True)[1:])
    for target in re.findall(r"^make ([\w-]+)", text, re.MULTILINE):
        assert f"\n{target}:" in makefile


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    # Those of the documentation are checked when it is built.
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_rows_of_numbers_are_those_of_the_records() -> None:
    page = ROOT / "README.md"
    before = page.read_bytes()
    try:
        python("pipelines/readme.py", cwd=ROOT)
        assert page.read_bytes() == before
    finally:
        page.write_bytes(before)
