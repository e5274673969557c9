"""The report on records as the other stages write them."""

import csv
import json
import re
import shlex
import shutil
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import EVALUATION, RUN, SIDECAR, Patch, quantised, refused, returns_of, write_study

from quarl_tf import pipeline, presets, study
from quarl_tf.cli import arguments, summary
from quarl_tf.evaluation.compare import Interval, compare, student_interval
from quarl_tf.foundation.files import digest, sha256, write_bytes, write_csv
from quarl_tf.report import write as report
from quarl_tf.report.drawing import _groups, draw
from quarl_tf.report.page import dtypes, limits, number_text, percent, size
from quarl_tf.report.results import Source, load_cell
from quarl_tf.runtime import flatbuffer
from quarl_tf.spec import GREEDY, Chance, Origin, Run, Scheme
from quarl_tf.spec.cell import Cell, Column
from quarl_tf.store.records import Evaluation, Sidecar
from quarl_tf.store.state import protocol
from quarl_tf.store.workspace import Workspace, blame_path, evaluation_path, sidecar_path

DASH, MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"
#: What users write is text, not markup.
COMMAND = "quarl run '<script>alert(1)</script>'"
SCHEMES = ("fp32", "fp16", "int8", "ptq_w8", "ptq_w4", "ptq_w2")
EPISODES = 30
SEEDS = [replace(RUN, seed=seed) for seed in range(3)]
SLOW = {"learning_rate": 0.01}
LANDER = replace(RUN, env_id="LunarLander-v3")
AWARE = replace(RUN, quantization=quantised(delay=25_000))
SIZES = {"fp32": 272_480, "fp16": 138_240, "int8": 75_910, "int8_tensor": 272_480}
#: Of the float file that holds a simulated scheme; it must not be seen anywhere.
SIMULATED_SIZE = 271_828


def evaluate(workspace: Workspace, run: Run, scheme: str, returns: list[float]) -> None:
    artifact = workspace.artifact(run.run_id, scheme)
    latency = {"fp32": 9.1, "fp16": 9.0, "int8": 5.6}.get(scheme, 9.2)
    replace(
        EVALUATION,
        run_id=run.run_id,
        env_id=run.env_id,
        scheme=scheme,
        artifact_sha256=None if scheme == "random" else sha256(artifact),
        protocol=protocol(run.env_id, None if scheme == "random" else GREEDY),
        seeds=[2**30 + i for i in range(len(returns))],
        returns=returns,
        lengths=[1] * len(returns),
        latency_us={"median": latency, "p95": latency * 1.2}
        | ({"fp32": 11.2} if scheme == "int8" else {}),
        reference_sha256=sha256(workspace.artifact(run.plain.run_id, "fp32")),
    ).save(evaluation_path(artifact))


def add_run(workspace: Any, run: Run = RUN, schemes: Any = (), episodes: int = EPISODES) -> Run:
    """Write a finished run: flatbuffers, sidecars, evaluations, the random baseline, a curve."""
    for scheme in schemes or (SCHEMES if run.quantization is None else run.default_schemes):
        artifact = workspace.artifact(run.run_id, scheme)
        write_bytes(artifact, f"{scheme} {run.seed}".encode())
        replace(
            SIDECAR,
            run=run.to_dict(),
            run_id=run.run_id,
            env_id=run.env_id,
            scheme=scheme,
            native=Scheme.parse(scheme).native,
            sha256=sha256(artifact),
            size_bytes=SIZES.get(scheme, SIMULATED_SIZE),
        ).save(sidecar_path(artifact))
        evaluate(workspace, run, scheme, returns_of(scheme, episodes))
    if run.quantization is None:
        evaluate(workspace, run, "random", returns_of("random", episodes))
    steps = range(1000, 50_000, 1000)
    add_curve(workspace, run, {step: "" if step % 2000 else 480 for step in steps})
    return run


def add_curve(workspace: Workspace, run: Run, greedy: Mapping[int, Any], **others: float) -> None:
    """Write a learning curve from greedy returns by step, with other columns that are constant."""
    constant = {"episode_return": 1.0} | others
    rows = [{"step": step, "greedy_return": value, **constant} for step, value in greedy.items()]
    write_csv(workspace.artifact_dir(run.run_id) / "progress.csv", rows)


def layers(content: bytes) -> dict[str, np.ndarray]:
    """Replace `flatbuffer.weights`: these files are no flatbuffers."""
    assert content.startswith(b"fp32")
    return {"policy/hidden_0/MatMul": np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)}


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: Patch) -> Workspace:
    """Return a workspace whose reports have no figures."""
    monkeypatch.setattr(report, "draw", lambda *_: iter(()))
    return Workspace(tmp_path)


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: Patch) -> Workspace:
    """Return a workspace whose reports have figures, but none of weights."""
    monkeypatch.setattr(flatbuffer, "weights", lambda _: {})
    return Workspace(tmp_path)


def write(workspace: Workspace, *runs: Run, **options: Any) -> Path:
    options = {"command": COMMAND} | options
    return pipeline.report([run.run_id for run in runs], root=workspace.root, **options).parent


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report on one run, figures included; return the folder."""
    workspace = Workspace(tmp_path_factory.mktemp("single"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flatbuffer, "weights", layers)
        return write(workspace, add_run(workspace))


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report on three seeds, one of which lacks ptq_w4's evaluation; return the folder."""
    workspace = Workspace(tmp_path_factory.mktemp("several"))
    runs = [add_run(workspace, run) for run in SEEDS]
    for run in runs:
        change(evaluation_path(workspace.artifact(run.run_id, "fp16")), processor="Gamma")
    evaluate(workspace, runs[2], "int8", [500.0] * (EPISODES - 1) + [440.0])
    int8, ptq_w4 = (workspace.artifact(runs[1].run_id, name) for name in ("int8", "ptq_w4"))
    change(evaluation_path(int8), latency_us={"median": 9.5, "p95": 6.0})
    evaluation_path(ptq_w4).unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw", lambda *_: iter(()))
        return write(workspace, *runs)


def cell_of(**runs: Sequence[Run]) -> Cell:
    """Return a cell from the trainings of each scheme."""
    columns = (Column(name, Scheme.parse(name), tuple(of_it)) for name, of_it in runs.items())
    return Cell(columns=tuple(columns))


def change(path: Path, **changes: Any) -> None:
    kind: Any = Evaluation if path.name.endswith(".eval.json") else Sidecar
    replace(kind.load(path), **changes).save(path)


def pages_of(folder: Path) -> tuple[str, str]:
    """Return the Markdown of a report, and the words of its page."""
    page = (folder / "index.html").read_text()
    words = re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.S)
    return (folder / "report.md").read_text(), " ".join(unescape(words).split())


def results_of(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text())


def rows_of(folder: Path, kind: str = "pooled") -> dict[str, dict[str, Any]]:
    return {row["scheme"]: row for row in results_of(folder)[kind]}


def test_the_page_loads_nothing_and_both_pages_show_every_result(single: Path) -> None:
    content, pages = (single / "index.html").read_text(), pages_of(single)
    loads = re.findall(r'(?:src|href)="([^"]*)"', content)
    assert len(loads) == 4
    assert all(load.startswith("data:image/png;base64,") for load in loads)
    assert not re.search(r"https?://|<script|@import|url\(", content)
    assert re.findall(r"!\[[^]]+\]\(figures/(\w+\.png)\)", pages[0]) == ["return_against_bits.png"]
    assert len([*(single / "figures").iterdir()]) == len(loads)
    values = {COMMAND, "2.21.0", "0123456789ab", "Alpha with avx2", "Beta with asimd"}
    for row in results_of(single)["pooled"]:
        values |= {row["scheme"], row["verdict"], number_text(row["return_mean"])}
    for text in pages:
        assert {value for value in values if value not in text} == set()
        assert "None" not in text


def test_a_report_needs_no_evaluated_flatbuffers(drawn: Workspace, monkeypatch: Patch) -> None:
    monkeypatch.setattr(flatbuffer, "weights", layers)
    run = add_run(drawn, schemes=["fp32", "int8"])
    folder = write(drawn, run)
    figure = folder / "figures" / "weight_histograms.png"
    results = (folder / "results.json").read_bytes()
    assert figure.exists()
    for scheme in ("fp32", "int8"):
        drawn.artifact(run.run_id, scheme).unlink()
    write(drawn, run)
    assert (folder / "results.json").read_bytes() == results
    assert not figure.exists()


def test_results_are_those_of_the_statistics_and_costs_those_of_native_files(single: Path) -> None:
    folder = Workspace(single.parents[1]).artifact_dir("dqn-CartPole-v1-s0")
    paths = [folder / f"{name}.eval.json" for name in ("fp32", "ptq_w4", "random")]
    expected = compare(*map(Evaluation.load, paths))
    row, int8 = (rows_of(single, "runs")[scheme] for scheme in ("ptq_w4", "int8"))
    assert row["return_mean"] == expected.returns.mean
    assert row["difference_low"] == expected.difference.low
    assert row["difference_high"] == expected.difference.high
    assert row["reward_error_percent"] == expected.reward_error_percent
    assert row["normalised_error_percent"] == expected.normalised_error_percent
    assert row["verdict"] == expected.verdict == "loss"
    assert results_of(single)["cells"][0]["notes"] == []
    costs = ("size_bytes", "latency_median_us", "compression", "speedup")
    ratios = SIZES["fp32"] / SIZES["int8"], 2.0  # That of turns, not of two evaluations.
    assert [int8[name] for name in costs] == [SIZES["int8"], 5.6, *ratios]
    assert [row[name] for name in costs] == [None] * 4  # None for simulated schemes.
    for name in ("index.html", "report.md", "results.csv", "results.json"):
        text = re.sub(r"base64,[^\"]*", "", (single / name).read_text())
        assert not re.search(r"271[.,]?8|9\.20 / 11\.0|9\.2,11\.", text), name


def test_several_trainings_count_once_each(several: Path) -> None:
    results, pooled = results_of(several), rows_of(several)
    row, expected = pooled["int8"], student_interval([0.0, 0.0, -2.0])
    assert results["cells"][0]["runs"] == [f"dqn-CartPole-v1-s{s}" for s in range(3)]
    interval = row["difference_mean"], row["difference_low"]
    assert interval == pytest.approx((expected.mean, expected.low))
    errors = row["reward_error_percent"], row["absolute_reward_error_percent"]
    assert errors == pytest.approx((0.4 / 3, 0.4 / 3))
    assert (row["runs"], row["episodes"], row["ties"]) == (3, 3 * EPISODES, 9)
    # The least: other processes only add to it.
    assert (row["latency_median_us"], row["latency_p95_us"]) == (5.6, 6.0)
    # Those of another processor than fp32's are not shown.
    assert (pooled["fp16"]["latency_median_us"], pooled["fp16"]["speedup"]) == (None, None)
    with (several / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(results["runs"]) == 3 * len(SCHEMES)
    for line, row in zip(lines, results["runs"], strict=True):
        for name in ("run_id", "scheme", "status", "return_mean", "difference_low", "sha256"):
            assert line[name] == ("" if row[name] is None else str(row[name]))
    assert missing_of(several) == {"ptq_w4": "was not evaluated"}
    row = pooled["ptq_w4"]
    assert "dqn-CartPole-v1-s1" in row["status"]
    assert row["return_mean"] is row["verdict"] is row["reward_error_percent"] is None
    assert results["cells"][0]["fewest"] == {"ptq_w": "ptq_w8"}


def test_equal_returns_have_a_verdict_and_a_bound_and_no_interval(several: Path) -> None:
    markdown, page = pages_of(several)
    fp16 = rows_of(several)["fp16"]
    assert fp16["verdict"] == "no difference seen"
    assert (fp16["difference_mean"], fp16["difference_alike"], fp16["return_alike"]) == (0, 3, 3)
    assert fp16["difference_low"] is fp16["difference_high"] is fp16["return_low"] is None
    assert fp16["unseen_percent"] == pytest.approx(63.16, abs=0.01)
    bound = rows_of(several, "runs")["fp16"]["unseen_percent"]
    assert bound == pytest.approx(100 * (1 - 0.05 ** (1 / EPISODES)))
    fp16_row = r"\| fp16 \| no difference seen .*63 %.* \| 0 % \| 0 % \| 0 \[all equal"
    assert re.search(fp16_row, markdown)
    assert [text for text in ("63 %", "9.5 %") if text not in page] == []
    assert rows_of(several)["ptq_w2"]["unseen_percent"] is None  # A loss of all needs no bound.


def test_rows_tell_what_decides_them_and_how_many_trainings_lose(workspace: Workspace) -> None:
    runs = [add_run(workspace, replace(RUN, seed=seed)) for seed in range(6)]

    def row_of(trainings: int, *returns: list[float]) -> dict[str, Any]:
        for run, repeated in zip(runs, returns, strict=False):
            evaluate(workspace, run, "int8", repeated * (EPISODES // len(repeated)))
        return rows_of(write(workspace, *runs[:trainings]))["int8"]

    assert row_of(1, [500.0] * (EPISODES - 1) + [200.0])["more_needed"] > 0
    row = row_of(2, [100.0, 99.0], [480.0, 479.0])
    assert (row["verdict"], row["losing"]) == ("inconclusive", 2)
    row = row_of(6, [489.0, 490.0], [500.0])
    assert (row["verdict"], row["losing"]) == ("within margin", 1)
    assert row["unseen_percent"] == pytest.approx(58.18, abs=0.01)  # Clopper's and Pearson's.


@pytest.mark.parametrize(
    ("schemes", "means", "smallest", "fewest"),
    [
        (SCHEMES, {"ptq_w2": 500.0}, "int8", {"ptq_w": "ptq_w8"}),
        # A small loss in every episode; fewer bits count only if all wider schemes keep the reward.
        (SCHEMES, {"int8": 499.0, "ptq_w8": 450.0}, "fp16", {"ptq_w": None}),
        # A file as large as fp32 is not the smallest; each form of a family has its fewest bits.
        (
            ("fp32", "int8_tensor", "ptq_opt_w4", "ptq_opt_w3", "ptq_opt_w4a4"),
            {"ptq_opt_w4": None, "ptq_opt_w4a4": 450.0},
            None,
            {"ptq_opt_wN": "ptq_opt_w3", "ptq_opt_wNaN": None},
        ),
    ],
)
def test_the_headline_names_what_keeps_the_reward(
    workspace: Workspace, schemes: Any, means: Any, smallest: str | None, fewest: Any
) -> None:
    run = add_run(workspace, schemes=schemes)
    for scheme, mean in means.items():
        if mean is None:
            evaluation_path(workspace.artifact(run.run_id, scheme)).unlink()
        else:
            evaluate(workspace, run, scheme, [mean] * EPISODES)
    (cell,) = results_of(write(workspace, run))["cells"]
    assert (cell["smallest"], cell["fewest"]) == (smallest, fewest)


def test_what_is_missing_is_not_called_none(workspace: Workspace) -> None:
    run = add_run(workspace, schemes=("fp32", "int8"))
    evaluate(workspace, run, "int8", [450.0] * EPISODES)
    line = "- **Smallest native file that keeps the reward:** "
    assert f"{line}none" in pages_of(write(workspace, run))[0]
    evaluation_path(workspace.artifact(run.run_id, "int8")).unlink()
    assert f"{line}not known (results of some are missing)" in pages_of(write(workspace, run))[0]
    assert line not in pages_of(write(workspace, add_run(workspace, SEEDS[1], ("fp32",))))[0]


def test_the_terminal_warns_of_what_is_like_chance_and_shows_digits(workspace: Workspace) -> None:
    run, args = add_run(workspace), Namespace(chance=GREEDY, episodes=EPISODES, margin=2.0)
    artifacts = [workspace.artifact(run.run_id, scheme) for scheme in ("fp32", "int8")]
    assert not any(summary.notes(artifacts[1], args))
    evaluate(workspace, run, "fp32", returns_of("random"))
    assert run.run_id in "".join(summary.notes(artifacts[1], args))
    for scheme, value in (("fp32", -0.82), ("int8", -0.8177)):
        evaluate(workspace, run, scheme, [value] * EPISODES)
    title, table, caption = summary.results_table(artifacts, args, 130).renderables
    assert run.run_id in str(title)
    cells = {column.header: list(column.cells) for column in table.columns}
    assert cells["return"] == ["-0.8200", "-0.8177"]
    assert f"timed on {EVALUATION.processor}" in str(caption)
    assert cells["difference [95 %]"][1].startswith("+0.0023")
    # A narrow terminal has no room for sizes and latencies.
    _, table = summary.results_table(artifacts, args, 60).renderables
    assert {*cells} - {column.header for column in table.columns} == {"bytes", "act µs"}


def test_all_are_compared_on_the_episodes_that_all_have(workspace: Workspace) -> None:
    runs = [add_run(workspace), add_run(workspace, SEEDS[1], episodes=EPISODES - 5)]
    for scheme, beyond in (("fp32", 900.0), ("int8", 0.0)):
        evaluate(workspace, runs[0], scheme, [500.0] * EPISODES + [beyond] * 10)
    folder = write(workspace, *runs)
    results = results_of(folder)
    assert (results["missing"], results["cells"][0]["episodes"]) == ([], EPISODES - 5)
    assert {row["episodes"] for row in results["runs"]} == {EPISODES - 5}
    assert rows_of(folder)["int8"]["difference_mean"] == 0


def test_greedy_results_and_others_do_not_mix(workspace: Workspace) -> None:
    run, chance = add_run(workspace), Chance("epsilon", 0.1)
    artifacts = [workspace.artifact(run.run_id, scheme) for scheme in SCHEMES]
    message = refused(write, workspace, run, chance=chance)
    command = f"`quarl evaluate {artifacts[0]} --epsilon 0.1`"
    assert f"was not evaluated with epsilon 0.1; make it with {command}" in message
    for impossible in (Chance("sticky", 0.25), Chance("sampled")):
        assert "leave out --s" in refused(write, workspace, run, chance=impossible, code=2)
    assert message.endswith("Received: run='dqn-CartPole-v1-s0'")
    assert not workspace.report_dir(f"{run.run_id}-epsilon0.1").exists()
    greedy = write(workspace, run)
    protocol = replace(EVALUATION.protocol, actions=chance.actions)
    for path in artifacts:
        shutil.copy(evaluation_path(path), evaluation_path(path, chance))
        change(evaluation_path(path, chance), returns=[493.0] * EPISODES, protocol=protocol)
    before, other = (greedy / "results.json").read_bytes(), write(workspace, run, chance=chance)
    assert other.name == f"{greedy.name}-epsilon0.1"
    assert (greedy / "results.json").read_bytes() == before
    for folder, mean in ((greedy, 500.0), (other, 493.0)):
        assert rows_of(folder)["int8"]["return_mean"] == mean
        assert ("--epsilon" in (folder / "report.md").read_text()) == (folder == other)
    artifacts[0].unlink()
    evaluation_path(artifacts[0], chance).unlink()
    assert "--schemes fp32 --epsilon 0.1" in refused(write, workspace, run, chance=chance)


def missing_of(folder: Path) -> dict[str, str]:
    """Return why each scheme is missing; both pages name it, and the commands that make it."""
    missing = results_of(folder)["missing"]
    for text in pages_of(folder):
        for entry in missing:
            assert f"{entry['scheme']} of {entry['run_id']} {entry['reason']}" in text
            run, root = Run("dqn", "CartPole-v1", int(entry["run_id"][-1])), folder.parents[1]
            scheme = "fp32" if entry["scheme"] == "random" else entry["scheme"]
            command = f"quarl evaluate {Workspace(root).artifact(run.run_id, scheme)} --episodes"
            if not entry["exported"]:
                command = rf"{run.command('run')} .* --root DIR"
            assert re.search(command, text)
    return {entry["scheme"]: entry["reason"] for entry in missing}


def test_what_does_not_match_is_missing(workspace: Workspace) -> None:
    run = add_run(workspace, schemes=(*SCHEMES, "ptq_w3", "ptq_w5", "ptq_w6"))
    folder = workspace.artifact_dir(run.run_id)
    change(folder / "int8.eval.json", artifact_sha256="0" * 64)
    write_bytes(folder / "fp16.tflite", b"flipped")
    (folder / "ptq_w2.json").unlink()
    other_rules = replace(EVALUATION.protocol, game={"sticky_actions": 0})  # Than a deleted fp32's.
    change(folder / "ptq_w8.eval.json", protocol=other_rules)
    (folder / "fp32.tflite").unlink()
    write_bytes(folder / "ptq_w3.eval.json", b'{"damaged')
    change(folder / "ptq_w5.json", network_sha256="cd" * 32)
    change(folder / "ptq_w6.eval.json", reference_sha256="ef" * 32)
    missing = missing_of(write(workspace, run))
    assert "ptq_w3.eval.json cannot be read as JSON" in missing.pop("ptq_w3")
    assert missing == {
        "fp16": "has a flatbuffer that does not match its sidecar",
        "int8": "has a stale evaluation, made with another flatbuffer",
        "ptq_w8": "was evaluated by other rules, or in another version of the environment",
        "ptq_w6": "was compared with another fp32 flatbuffer",
        "ptq_w5": "was exported from another network than fp32",
        "ptq_w2": "was not exported",
    }
    quoted = workspace.root.rename(workspace.root.with_name("my root"))
    command = f"{run.command('run')} --schemes fp32,fp16,int8,ptq_w8,ptq_w6,ptq_w5,ptq_w4,ptq_w3"
    command += f",ptq_w2 --episodes {EPISODES}"
    markdown, _ = pages_of(write(Workspace(quoted), run))
    assert f"    {command} --root DIR\n" in markdown
    assert f"    quarl evaluate '{quoted}/tflite_models/CartPole-v1/dqn/s0/int8.tflite'" in markdown
    write_bytes(Workspace(quoted).run_dir(run.run_id) / "run.json", b"{}")
    assert f"    {command} --root '{quoted}'\n" in pages_of(write(Workspace(quoted), run))[0]


def test_a_baseline_on_other_episodes_is_missing(workspace: Workspace) -> None:
    run = add_run(workspace)
    change(workspace.artifact_dir(run.run_id) / "random.eval.json", seeds=list(range(EPISODES)))
    folder = write(workspace, run)
    assert missing_of(folder) == {"random": "was not evaluated on the episodes of fp32"}
    rows, (markdown, _) = rows_of(folder, "runs"), pages_of(folder)
    assert all(row["normalised_error_percent"] is None for row in rows.values())
    assert rows["ptq_w4"]["verdict"] == "loss"
    assert "| random policy |" not in markdown
    assert f"1 of {len(SCHEMES) + 1} experiments without a result" in markdown


def notes(workspace: Workspace, run: Run, chance: Chance = GREEDY) -> dict[str, dict[str, Any]]:
    """Return the notes of a report by key; both pages have a sentence for each."""
    folder = write(workspace, run, chance=chance)
    (cell,), (markdown, page) = results_of(folder)["cells"], pages_of(folder)
    sentences = re.findall(r"^> (?!.*see Missing)(.+)$", markdown, re.M)
    assert len(sentences) == len(cell["notes"])
    assert all(" ".join(text.split()) in page for text in sentences)
    return {note["key"]: note for note in cell["notes"]}


@pytest.mark.parametrize("games", [[60.0, 100.0, 270.0], [-1.0]])
def test_games_that_repeat_themselves_are_noted(workspace: Workspace, games: list[float]) -> None:
    run = add_run(workspace, replace(RUN, env_id="PongNoFrameskip-v4"))
    for path in workspace.artifact_dir(run.run_id).glob("*.eval.json"):
        returns = ([1.0, 7.0] if path.stem == "random.eval" else games) * EPISODES
        change(path, returns=returns[:EPISODES])
    report_notes = notes(workspace, run)
    note = report_notes["repeated_games"]
    assert (note["different"], note["effective_n"]) == (len(games), pytest.approx(len(games)))
    # The interval of three is wide, but each earns more than any random game.
    assert ("as_random" in report_notes) == (games == [-1.0])


def test_a_game_that_chance_does_not_change_is_noted(workspace: Workspace) -> None:
    sticky = Chance("sticky", 0.25)
    run = add_run(workspace, replace(RUN, env_id="PongNoFrameskip-v4"), ("fp32", "int8"))
    for scheme in ("fp32", "int8"):
        artifact = workspace.artifact(run.run_id, scheme)
        path = evaluation_path(artifact).rename(evaluation_path(artifact, sticky))
        change(path, protocol=protocol(run.env_id, sticky), returns=[9.0] * EPISODES)
    assert notes(workspace, run, sticky)["repeated_sticky_games"]["different"] == 1
    change(path.with_name("fp32.sticky0.25.eval.json"), lengths=[*range(1, EPISODES + 1)])
    assert "repeated_sticky_games" not in notes(workspace, run, sticky)


def test_few_episodes_are_noted_and_other_files_are_left_out(workspace: Workspace) -> None:
    run = add_run(workspace, episodes=5)
    folder = workspace.artifact_dir(run.run_id)
    write_bytes(folder / "progress.csv", b"step,loss\n1,2\n")
    write_bytes(blame_path(folder / "fp32.tflite"), b"")
    for name in ("foo", "ptq_w99", "int8 (copy)"):
        write_bytes(folder / f"{name}.tflite", b"of somebody else")
    assert notes(workspace, run)["few_episodes"]["episodes"] == 5
    rows = results_of(workspace.report_dir(run.run_id))["runs"]
    assert [row["scheme"] for row in rows] == list(SCHEMES)


def test_layers_are_shown_where_blame_is_of_this_network(workspace: Workspace) -> None:
    path = workspace.artifact(add_run(workspace).run_id, "fp32")
    row = {"layer": "head", "low": 1, "high": 2.5, "codes": 201, "saturated": 0.015, "noise": 31.4}
    row |= {"share": 1, "disagreement": 0.0225, "gain_low": 0.5, "gain_high": 6.5, "gain_alike": 0}
    shown = ["head", "1.00 … 2.50", "201", "1.50 %", "31.4 dB", "100.0 %", "2.25 %"]
    network = SIDECAR.network_sha256
    for made_of, gain, count in (("0" * 64, 3, 0), (network, 3, 1), (network, None, 1)):
        write_csv(blame_path(path), [row | {"gain": gain, "network_sha256": made_of}])
        cells = [*shown, "3.00 [0.50, 6.50]" if gain else number_text(None)]
        markdown, page = pages_of(write(workspace, RUN))
        assert markdown.count(f"| {' | '.join(cells)} |") == page.count(" ".join(cells)) == count


def test_a_quantisation_aware_run_is_compared_with_its_reference(workspace: Workspace) -> None:
    aware = [replace(AWARE, seed=seed) for seed in range(2)]
    for run in aware:
        add_run(workspace, run.plain)
        add_run(workspace, run)
        path = sidecar_path(workspace.artifact(run.run_id, "qat_w4a4"))
        change(path, preset=SIDECAR.preset | {"learning_rate": 0.5}, network_sha256="cd" * 32)
        evaluate(workspace, run, "qat_w4a4", [450.0] * EPISODES)
    folder = write(workspace, *aware)
    assert folder.name == "dqn-CartPole-v1-q4d25000"
    rows = rows_of(folder)
    assert list(rows) == ["fp32", "qat_w4a4"]
    assert (rows["qat_w4a4"]["return_mean"], rows["fp32"]["return_mean"]) == (450.0, 500.0)
    assert (rows["qat_w4a4"]["delay"], rows["fp32"]["delay"]) == (25_000, None)
    assert results_of(folder)["cells"][0]["notes"] == []
    markdown, page = pages_of(folder)
    assert "0.5" in page
    _, *commands = re.findall(r"^    (quarl run .+)$", markdown, re.M)
    parsed = [arguments.build().parse_args(shlex.split(line)[1:]) for line in commands]
    assert [(args.seed, args.bits) for args in parsed] == [(0, None), (1, None), (0, 4), (1, 4)]
    assert [("fp32" in line) for line in commands] == [True, True, False, False]
    assert {(args.episodes, args.workspace) for args in parsed} == {(EPISODES, workspace)}


def test_one_seed_other_processors_and_last_networks_are_noted(workspace: Workspace) -> None:
    plain, run = add_run(workspace), add_run(workspace, AWARE)
    assert notes(workspace, run).keys() == {"one_seed"}
    change(workspace.artifact_dir(run.run_id) / "qat_w4a4.json", trained_on=["Gamma"])
    assert notes(workspace, run)["other_processor"]["bits"] == [4]
    tuned = add_run(workspace, replace(run, origin=Origin(plain, "a" * 64)))
    change(workspace.artifact_dir(tuned.run_id) / "qat_w4a4.json", trained_on=["Gamma"])
    assert notes(workspace, tuned).keys() == {"one_seed"}  # It starts from its reference.
    # Last networks stand beside the best of their own precision, from the burst after the delay.
    add_curve(workspace, run, {25_000: 500, 25_001: 499, 30_000: 470, 40_000: 9})
    folder = write(workspace, run)
    assert results_of(folder)["cells"][0]["last_networks"] == [
        {"label": "fp32", "best": 480, "last": 480},
        {"label": "qat_w4a4", "best": 470, "last": 9},
    ]
    sentence = "of the last one: fp32 480.0 and 480.0; qat_w4a4 470.0 and 9.00."
    assert all(sentence in text for text in pages_of(folder))
    assert "Gamma" in pages_of(folder)[1]
    assert results_of(write(workspace, plain))["cells"][0]["last_networks"] == []


def test_names(workspace: Workspace) -> None:
    cart, slow = SEEDS[:2], [replace(run, overrides=SLOW) for run in SEEDS[:2]]
    for run in (*cart, *slow, LANDER):
        add_run(workspace, run)
    for runs, name, expected in (
        ([cart[0], cart[0]], None, "dqn-CartPole-v1-s0"),
        (cart, None, "dqn-CartPole-v1"),
        ([*cart, LANDER], "all", "all"),
        (slow, None, f"dqn-CartPole-v1-{digest(slow[0].overrides)}"),
    ):
        assert write(workspace, *runs, name=name).name == expected
    ids = [run.run_id for run in cart]
    for runs, name, received in (
        ([ids[0], slow[1].run_id], None, "--name NAME. Received: runs="),
        (ids, "../else", "Received: name='../else'"),
        ([f"./{ids[0]}"], None, "Received: run="),
    ):
        options = {"name": name, "command": COMMAND, "code": 2}
        assert received in refused(pipeline.report, runs, root=workspace.root, **options)


def test_runs_that_differ_in_more_than_the_seed_are_cells_of_their_own(drawn: Workspace) -> None:
    tuned = [replace(run, origin=Origin(run, str(run.seed) * 64)) for run in SEEDS[:2]]
    runs = [RUN, replace(RUN, overrides=SLOW), LANDER, SEEDS[1], AWARE, *tuned]
    for run in runs:
        add_run(drawn, run, () if run == AWARE else ["fp32", "int8"])
    # An older record lacks a setting that had its default.
    preset = {key: value for key, value in SIDECAR.preset.items() if key != "dueling"}
    change(drawn.artifact_dir(runs[0].run_id) / "fp32.json", preset=preset)
    folder = write(drawn, *runs, name="all")
    results = results_of(folder)
    assert [len(cell["runs"]) for cell in results["cells"]] == [2, 1, 1, 1, 2]
    assert results["cells"][-1]["runs"] == [run.run_id for run in tuned]
    titles = [cell["title"] for cell in results["cells"]]
    assert len(set(titles)) == 5
    assert titles[:2] == ["dqn on CartPole-v1", "dqn on CartPole-v1 (learning_rate=0.01)"]
    assert results["missing"] == []  # A cell has the schemes of its own runs; no other is missing.
    assert {path.name for path in (folder / "figures").iterdir()} == {
        *("return_against_bits.png", "performance_profile.png"),
        *(f"{number}_learning_curves.png" for number in range(1, 6)),
    }
    markdown, _ = pages_of(folder)
    assert all(f"| {title} |" in markdown for title in titles)


def test_references_that_cells_share_have_curves_of_their_own(workspace: Workspace) -> None:
    source, cells = Source(workspace=workspace, margin_percent=2.0, command=COMMAND), []
    for overrides in ({}, SLOW):
        plain = add_run(workspace, replace(RUN, overrides=overrides))
        for bits in (4, 2):
            aware = add_run(workspace, replace(plain, quantization=quantised(bits=bits)))
            cell = cell_of(fp32=[plain], **{f"qat_w{bits}a{bits}": [aware]})
            cells.append(load_cell(source, cell))
    assert len(_groups(cells)) == 6


def test_shared_trainings_count_once_over_cells(workspace: Workspace) -> None:
    runs = [add_run(workspace, run) for run in SEEDS]
    others = [add_run(workspace, replace(RUN, env_id="Acrobot-v1"))]
    hopeless = [add_run(workspace, replace(RUN, env_id="MountainCar-v0"))]  # Left out.
    evaluate(workspace, hopeless[0], "random", [1000.0, 900.0] * (EPISODES // 2))
    game = [add_run(workspace, replace(run, env_id="PongNoFrameskip-v4")) for run in SEEDS]
    for run in game:  # Left out: each plays two different games.
        evaluate(workspace, run, "fp32", [400.0, 500.0] * (EPISODES // 2))
    cells = [cell_of(fp32=of_it, int8=of_it) for of_it in (runs, runs[:1], others, hopeless, game)]
    source = Source(workspace=workspace, margin_percent=2.0, command=COMMAND)
    report.write(source, cells, "x", "x")
    (row,) = results_of(workspace.report_dir("x"))["aggregates"]
    assert (row["scheme"], row["cells"], len(row["errors"])) == ("int8", 2, 4)


STUDY = """
name: mine
title: Mine
seeds: [0, 1]
episodes: 20
schemes: [int8, ptq_w4]
bits: [4]
cells:
  - {algo: dqn, env: CartPole-v1, remark: "Published: 1 < 2."}
  - {algo: dqn, env: Acrobot-v1, bits: []}
"""


def report_on(workspace: Workspace, text: str, finished: bool = True) -> tuple[Path, study.Study]:
    planned = study.read(write_study(workspace.root, text))
    with pytest.MonkeyPatch.context() as patch:
        if finished:  # According to the study; the report reads the files.
            patch.setattr(study, "plan", lambda *_: [])
        index = study.write_study_report(
            workspace, planned, margin_percent=2.0, command=COMMAND, remedy="quarl study run it"
        )
    return index.parent, planned


def finish_study(workspace: Workspace) -> None:
    quantization = presets.quantization("dqn", {"bits": 4, "delay": 25_000})
    for run in SEEDS[:2]:
        add_run(workspace, run)
        add_run(workspace, replace(run, quantization=quantization))
        add_run(workspace, replace(run, env_id="Acrobot-v1"))


def test_a_study_is_a_report_of_its_cells(workspace: Workspace) -> None:
    finish_study(workspace)
    folder, _ = report_on(workspace, STUDY)
    results, cart, acrobot = results_of(folder), "dqn on CartPole-v1", "dqn on Acrobot-v1"
    assert [cell["title"] for cell in results["cells"]] == [cart, acrobot]
    assert results["missing"] == []
    assert [(row["cell"], row["scheme"]) for row in results["pooled"]] == [
        *((cart, scheme) for scheme in ("fp32", "int8", "ptq_w4", "qat_w4a4")),
        *((acrobot, scheme) for scheme in ("fp32", "int8", "ptq_w4")),
    ]
    # Of the 30 episodes, those that the study asks for.
    assert {row["episodes"] for row in results["runs"]} == {20}
    assert "Published: 1 < 2." in pages_of(folder)[1]
    # Without fp32 of a seed, nothing of it can be compared.
    evaluation_path(workspace.artifact("dqn-CartPole-v1-s1", "fp32")).unlink()
    report_on(workspace, STUDY)
    missing, pooled = (results_of(folder)[key] for key in ("missing", "pooled"))
    assert len(missing) == 4
    assert sum("has nothing to compare with" in experiment["reason"] for experiment in missing) == 3
    assert pages_of(folder)[0].count("    quarl study run it\n\n") == 2
    assert all((row["return_mean"] is None) == (row["cell"] == cart) for row in pooled)


def test_a_study_of_which_nothing_exists_has_a_report(drawn: Workspace) -> None:
    folder, planned = report_on(drawn, STUDY + "delays: [0.5, 5000]\n", finished=False)
    results = results_of(folder)
    assert len(results["missing"]) == len(planned.experiments()) == 16
    assert all(row["return_mean"] is None for row in (*results["pooled"], *results["runs"]))
    labels = [row["label"] for row in results["pooled"][:5]]
    assert labels == ["fp32", "int8", "ptq_w4", "qat_w4a4 from 25,000", "qat_w4a4 from 5,000"]


def test_memory_is_compared_with_that_of_fp32(workspace: Workspace, monkeypatch: Patch) -> None:
    measured = []

    def measure(path: Path) -> dict[str, int]:
        measured.append(path)
        run_id = Sidecar.load(sidecar_path(path)).run_id
        size = 50 if path.stem == "int8" else 200 if run_id.endswith("-s0") else 100
        return {"weights": size, "arena": 50}

    monkeypatch.setattr("quarl_tf.evaluation.memory.measure", measure)
    finish_study(workspace)
    folder, _ = report_on(workspace, STUDY + "memory: true\n")
    assert len(measured) == len(set(measured))
    fp32, int8, *_ = results_of(folder)["memory"]
    # Means of 200 and 100, and of 50 and 50.
    assert (fp32["bytes"], fp32["change_percent"]) == ({"weights": 150, "arena": 50}, None)
    assert int8["bytes"] == {"weights": 50, "arena": 50}
    assert int8["change_percent"] == pytest.approx({"weights": -200 / 3, "arena": 0})
    assert "150 B" in pages_of(folder)[1]
    workspace.artifact("dqn-CartPole-v1-s1", "int8").unlink()  # Too large to be kept.
    report_on(workspace, STUDY + "memory: true\n")
    int8 = results_of(folder)["memory"][1]
    assert int8["bytes"] is None
    assert "dqn-CartPole-v1-s1" in int8["status"]


def test_what_some_lack_is_not_drawn(drawn: Workspace) -> None:
    runs = [add_run(drawn), add_run(drawn, AWARE)]
    cell = cell_of(fp32=runs[:1], qat_w4a4=runs[1:])
    source = Source(workspace=drawn, margin_percent=2.0, command=COMMAND)
    variance = "step", "action_variance", "action_variance_dqn_CartPole-v1.png"
    for x, column, figure in (variance, ("episodes", "episodes", "return_against_episodes.png")):
        for run in runs:
            add_curve(drawn, run, {10: 2, 20: 2, 30: 2}, **{column: 3.0})
            files = [picture.file for picture in draw(drawn, [load_cell(source, cell)], [], x)]
            assert (figure in files) == (run == AWARE)


def test_numbers_as_text() -> None:
    texts = {None: DASH, -0.0: "0", 500.0: "500.0", 9.634: "9.63", 15010.4: "15,010"}
    texts |= {-20.25: f"{MINUS}20.2", 0.0042: "0.004"}
    assert {value: number_text(value) for value in texts} == texts
    assert [percent(p) for p in (2.5, -0.00004, None)] == ["2.50 %", "0 %", DASH]
    assert [size(n) for n in (None, 812, 75_910, 6_612_000)] == [DASH, "812 B", "75.9 kB", "6.6 MB"]
    assert limits(Interval(0.0, -1.0, 2.0)) == f"[{MINUS}1.00, 2.00]"
    assert limits(student_interval([2.0])) == limits(None) == "[no interval]"
    assert dtypes({"int32": 514, "int8": 67_584}) == "67,584 int8, 514 int32"


def test_success_stands_beside_returns_where_recorded(workspace: Workspace, several: Path) -> None:
    run = add_run(workspace, schemes=["fp32", "int8"])
    for scheme, successes in (("fp32", [True, True]), ("int8", [True, False])):
        path = evaluation_path(workspace.artifact(run.run_id, scheme))
        change(path, successes=successes * (EPISODES // 2))
    folder = write(workspace, run)
    rows = rows_of(folder, "runs")
    assert (rows["fp32"]["success_rate"], rows["int8"]["success_rate"]) == (1.0, 0.5)
    for page, text in (("report.md", ", success 50"), ("index.html", ">success 50")):
        assert text in (folder / page).read_text()
        assert "is_success" in (folder / page).read_text()
        assert "success" not in (several / page).read_text().replace("unsuccess", "")
    assert "success" not in (several / "results.json").read_text()
