"""Commands, links and numbers of pages are right; missing figures are listed."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from samples import EVALUATION, ROOT, Patch, python

from quarl_tf.cli import arguments
from quarl_tf.store.workspace import Workspace

DOCS = ROOT / "docs"
RESULTS = sorted((DOCS / "results").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


@pytest.fixture(scope="module")
def case_studies() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS / "pages"))
        import case_studies

        yield case_studies


def row(text: str, first: str) -> list[str]:
    """Return the cells of a table's row."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def flight(cell: str, scheme: str, success: float, latency: float) -> dict[str, Any]:
    figures = {"success_rate": success, "latency_median_us": latency, "size_bytes": 2000.0}
    return {"cell": cell, "scheme": scheme, "runs": 1, **figures}


def test_flights_stand_beside_the_papers_and_missing_ones_are_named(case_studies: Any) -> None:
    cells = "dqn on AirNav-v0", "dqn on AirNav-v0 (network=policy_iii, steps=9)"
    pooled = [flight(cell, "fp32", 0.9, 30) for cell in cells]
    pooled += [flight(cells[1], "int8", 0.875, 10)]
    text = case_studies.flights(pooled)
    success, _, speed = text.partition("## Size and speed")
    shares = ["90.0 %", "87.5 %", case_studies.DASH, case_studies.DASH]
    assert row(success, "III") == ["III", "86 %", "75 %", "1", *shares]
    assert row(speed, "III")[:9] == [
        *("III", "208.115", "11.036", "18.86", "2.0 kB", "2.0 kB", "30.0", "10.0", "3.00")
    ]
    assert (
        "Missing: Policy I in int8, int8_stock, qat_int8; Policy II in fp32, int8, int8_stock, "
        "qat_int8; Policy III in int8_stock, qat_int8." in text
    )


def test_trainings_in_both_precisions_are_compared(
    case_studies: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(case_studies, "ROOT", tmp_path)
    runs, kinds = [], list(enumerate(("float32", "bfloat16")))
    for seed, number, precision in ((s, *kind) for s in (0, 1) for kind in kinds):
        run_id = f"ppo-PongNoFrameskip-v4-s{seed}-{number}"
        cell = f"ppo on Pong (precision={precision})"
        runs.append({"cell": cell, "run_id": run_id, "seed": seed})
        folder = Workspace(tmp_path).artifact_dir(run_id)
        folder.mkdir(parents=True)
        returns = [20.0 - number - i % 2 for i in range(40)]
        played = {"env_id": "PongNoFrameskip-v4", "seeds": list(range(40)), "returns": returns}
        replace(EVALUATION, lengths=[9] * 40, **played).save(folder / "fp32.eval.json")
        lines = ["step,seconds,episode_return,greedy_return"]
        # The float32 training of the second seed gets to 17 alone.
        best = 17 if (seed, number) == (1, 0) else 18
        lines += ["1000000,30,5,17", f"2000000,{120 - 60 * number},17,{best}", "3000000,180,19,9"]
        (folder / "progress.csv").write_text("\n".join(lines))
    text = case_studies.convergence(runs)
    assert row(text, "0") == ["0", "2.00", "2.00", "2.00", "1.00", "19.5", "18.5", "loss"]
    assert row(text, "1")[1:5] == [case_studies.DASH, "2.00", case_studies.DASH, "1.00"]
    assert "in both: 1, in which bfloat16 takes 0.50 (0.50 to 0.50) times float32's" in text
    assert "1.00 [all equal], inconclusive." in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page: Path) -> None:
    text, makefile = page.read_text(), (ROOT / "Makefile").read_text()
    for command in re.findall(r"^quarl .+$", text, re.MULTILINE):
        arguments.build().parse_args(shlex.split(command, comments=True)[1:])
    for target in re.findall(r"^make ([\w-]+)", text, re.MULTILINE):
        assert f"\n{target}:" in makefile


@pytest.mark.parametrize("page", [*PAGES[:2], *RESULTS], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    # Those of the other pages are checked when the site is built, of which some are.
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("script", ["pipelines/index.py", "docs/pages/fill.py"])
def test_rows_of_numbers_are_those_of_the_records(script: str) -> None:
    pages = [*PAGES, ROOT / "tflite_models/README.md", *(DOCS / "assets").glob("*.png")]
    before = {page: page.read_bytes() for page in pages}
    try:
        python(script, cwd=ROOT)
        changed = [
            page for page in pages if page.suffix == ".md" and page.read_bytes() != before[page]
        ]
        assert not changed
    finally:
        for page, content in before.items():
            page.write_bytes(content)
