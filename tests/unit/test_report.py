"""Behaviour of the report on records as the other stages write them."""

import csv
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quarl_tf import presets, report
from quarl_tf.cli import arguments
from quarl_tf.evaluation.compare import MIN_EPISODES, compare, student_interval
from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.files import digest, sha256, write_bytes, write_csv
from quarl_tf.report import write_report
from quarl_tf.report.wording import dtypes, limits, made_with, number_text, percent, size
from quarl_tf.runtime import flatbuffer
from quarl_tf.spec import REFERENCE, Quantization, Run, Scheme, default_schemes
from quarl_tf.store.records import GREEDY, Evaluation, Sidecar
from quarl_tf.store.workspace import Workspace, evaluation_path, sidecar_path

TIMES, DASH, MINUS = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}", "\N{MINUS SIGN}"
COMMAND = "quarl run --algo dqn --env CartPole-v1 --seed 0"
SCHEMES = ("fp32", "fp16", "int8", "ptq_w8", "ptq_w4", "ptq_w2")
EPISODES = 30

PRESET = asdict(presets.load("dqn", "CartPole-v1"))
PROTOCOL = {"action": GREEDY, "return": "unclipped", "episode": "whole"}
SIZES = {"fp32": 272_480, "fp16": 138_240, "int8": 75_910}
#: Size of the float file that holds a simulated scheme; it must not be seen anywhere.
SIMULATED_SIZE = 271_828


def returns_of(scheme: str, episodes: int = EPISODES) -> list[float]:
    """Return CartPole-like returns: all perfect but for few bits."""
    generator = np.random.default_rng(7)
    if scheme == "random":
        return generator.integers(9, 50, episodes).astype(float).tolist()
    if scheme == "ptq_w2":
        return generator.integers(8, 12, episodes).astype(float).tolist()
    if scheme == "ptq_w4":
        return np.minimum(500, generator.normal(440, 60, episodes).round()).tolist()
    return [500.0] * episodes


def sidecar_of(run: Run, scheme: str, size_bytes: int) -> Sidecar:
    return Sidecar(
        run=run.to_dict(),
        run_id=run.run_id,
        env_id=run.env_id,
        scheme=scheme,
        native=Scheme.parse(scheme).native,
        sha256="",
        size_bytes=size_bytes,
        head="q_values",
        num_actions=2,
        action_low=None,
        action_high=None,
        observation_shape=[4],
        observation_dtype="float32",
        tensor_dtypes={"float32": 12},
        weight_dtypes={"int8": 67_584, "int32": 514} if scheme == "int8" else {"float32": 68_098},
        operators=["FULLY_CONNECTED float32"],
        check={"largest_difference": 1e-7},
        network_sha256="ab" * 32,
        calibration_sha256=None,
        preset=PRESET,
        trained_commit="fedcba987654",
        trained_on="Alpha with avx2",
        versions={"numpy": "2.3.5", "tensorflow": "2.21.0"},
        commit="0123456789ab",
    )


def evaluation_of(run: Run, scheme: str, returns: list[float], digest: str | None) -> Evaluation:
    latency = {"fp32": 9.1, "fp16": 9.0, "int8": 5.6}.get(scheme, 9.2)
    return Evaluation(
        run_id=run.run_id,
        env_id=run.env_id,
        scheme=scheme,
        artifact_sha256=digest,
        protocol=PROTOCOL,
        seeds=[2**30 + i for i in range(len(returns))],
        returns=returns,
        lengths=[int(r) for r in returns],
        ties=3 if scheme == "int8" else 0,
        latency_us=None if scheme == "random" else {"median": latency, "p95": latency * 1.2},
        reference_sha256=None,
        agreement=None if scheme == "random" else {"fraction": 0.993, "states": 5000},
        versions={"numpy": "2.3.5", "ai-edge-litert": "2.1.0"},
        processor="Beta with asimd",
    )


def evaluate(workspace: Workspace, run: Run, scheme: str, returns: list[float]) -> None:
    artifact = workspace.artifact(run.run_id, scheme)
    digest = None if scheme == "random" else sha256(artifact)
    evaluation_of(run, scheme, returns, digest).save(evaluation_path(artifact))


def add_run(
    workspace: Workspace,
    seed: int = 0,
    *,
    env_id: str = "CartPole-v1",
    episodes: int = EPISODES,
    overrides: dict[str, float] | None = None,
    quantization: Quantization | None = None,
    schemes: Sequence[str] | None = None,
) -> Run:
    """Write a finished run: flatbuffers, sidecars, evaluations, the random baseline, a curve."""
    run = Run("dqn", env_id, seed, overrides or {}, quantization)
    for scheme in schemes or (default_schemes(quantization) if quantization else SCHEMES):
        artifact = workspace.artifact(run.run_id, scheme)
        write_bytes(artifact, f"{scheme} {seed}".encode())
        sidecar = sidecar_of(run, scheme, SIZES.get(scheme, SIMULATED_SIZE))
        replace(sidecar, sha256=sha256(artifact)).save(sidecar_path(artifact))
        evaluate(workspace, run, scheme, returns_of(scheme, episodes))
    if quantization is None:
        evaluate(workspace, run, "random", returns_of("random", episodes))
    rows = [
        {"step": step, "episode_return": step / 100, "greedy_return": "" if step % 2000 else 480}
        for step in range(1000, 50_000, 1000)
    ]
    write_csv(workspace.artifact_dir(run.run_id) / "progress.csv", rows)
    return run


def layers(content: bytes) -> dict[str, np.ndarray]:
    """Stand in for `flatbuffer.weights`: these files are no flatbuffers."""
    assert content.startswith(b"fp32")
    return {"policy/hidden_0/MatMul": np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)}


class Page(HTMLParser):
    """A page that is well formed: its text, what it loads, its anchors."""

    VOID = frozenset({"meta", "img", "br", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str | None] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures out of tests that look at words and numbers."""
    monkeypatch.setattr(report, "_figures", lambda *_: {})


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report on one run, figures included; return its folder."""
    workspace = Workspace(tmp_path_factory.mktemp("single"))
    run = add_run(workspace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flatbuffer, "weights", layers)
        return write_report(workspace, [run.run_id], command=COMMAND).parent


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report on three seeds, of which one lacks ptq_w4's evaluation; return its folder."""
    workspace = Workspace(tmp_path_factory.mktemp("several"))
    runs = [add_run(workspace, seed) for seed in range(3)]
    evaluate(workspace, runs[2], "int8", [500.0] * (EPISODES - 1) + [440.0])
    evaluation_path(workspace.artifact(runs[1].run_id, "ptq_w4")).unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flatbuffer, "weights", layers)
        return write_report(workspace, [run.run_id for run in runs], command=COMMAND).parent


def page_of(folder: Path) -> Page:
    return Page((folder / "index.html").read_text())


def results_of(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def by_scheme(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["scheme"]: row for row in rows}


# The page.


def test_page_is_one_file_that_loads_nothing(single: Path) -> None:
    page = page_of(single)
    assert len(page.loads) == 4
    assert all(load.startswith("data:image/png;base64,") for load in page.loads)
    content = (single / "index.html").read_text()
    assert not re.search(r"https?://|<script|@import|url\(", content)
    assert len(content) < 1_500_000


def test_pages_name_every_scheme_verdict_and_the_command(single: Path) -> None:
    for text in (page_of(single).text, (single / "report.md").read_text()):
        for expected in (*SCHEMES, "random policy", "within margin", "loss", "reference", COMMAND):
            assert expected in text
        for term in ("normalised error", "same action as fp32", "ties", "2.21.0"):
            assert term in text
        assert "Trained at commit fedcba987654, exported at commit 0123456789ab; " in text
        assert "; trained on Alpha with avx2; evaluated on Beta with asimd." in text


def test_headline_is_in_plain_words(single: Path) -> None:
    assert results_of(single)["sections"][0]["headline"] == [
        f"int8 is 3.6{TIMES} smaller and 1.6{TIMES} faster than fp32 and loses no reward that "
        f"{EPISODES} paired episodes could show.",
        "In simulation, weights of 8 bits keep the reward; at 4 bits the return is 17.1 % lower.",
    ]
    assert f"3.6{TIMES} smaller" in page_of(single).text


def test_sizes_and_latencies_of_float_files_are_shown_nowhere(single: Path) -> None:
    for name in ("index.html", "report.md", "results.csv", "results.json"):
        text = re.sub(r"base64,[^\"]*", "", (single / name).read_text())
        assert not re.search(r"271[.,]?8", text), name
        assert not re.search(r"9\.20 / 11\.0|9\.2,11\.", text), name
    rows = by_scheme(results_of(single)["runs"])
    assert rows["ptq_w4"]["size_bytes"] is rows["ptq_w4"]["latency_median_us"] is None
    assert rows["int8"]["size_bytes"] == SIZES["int8"]


def test_markdown_shows_the_figures_beside_it(single: Path) -> None:
    shown = re.findall(r"!\[[^]]+\]\((figures/\w+\.png)\)", (single / "report.md").read_text())
    assert len(shown) == 4
    assert sorted(shown) == sorted(
        f"figures/{path.name}" for path in (single / "figures").iterdir()
    )


def test_markdown_tables_have_as_many_cells_as_headings(several: Path) -> None:
    tables = re.findall(r"(?:^\|.*\n)+", (several / "report.md").read_text(), re.MULTILINE)
    assert len(tables) == 3
    for table in tables:
        # |R_fp32| in words is no cell border: it stands in no table.
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_what_users_wrote_is_text_not_markup(workspace: Workspace, no_figures: None) -> None:
    run = add_run(workspace)
    index = write_report(workspace, [run.run_id], command="quarl '<script>alert(1)</script>'")
    assert "<script>" not in index.read_text()


# The numbers.


def test_results_are_those_of_the_statistics(single: Path) -> None:
    run = Run("dqn", "CartPole-v1", 0)
    made = {
        scheme: evaluation_of(run, scheme, returns_of(scheme), None)
        for scheme in (*SCHEMES, "random")
    }
    expected = compare(made["fp32"], made["ptq_w4"], made["random"])
    row = by_scheme(results_of(single)["runs"])["ptq_w4"]
    assert row["return_mean"] == expected.returns.mean
    assert row["difference_low"] == expected.difference.low
    assert row["difference_high"] == expected.difference.high
    assert row["reward_error_percent"] == expected.reward_error
    assert row["normalised_error_percent"] == expected.normalised_error
    assert row["verdict"] == expected.verdict == "loss"


def test_csv_and_json_hold_the_same_rows(several: Path) -> None:
    with (several / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    rows = results_of(several)["runs"]
    assert len(lines) == len(rows) == 3 * len(SCHEMES)
    for line, row in zip(lines, rows, strict=True):
        assert {line["run_id"], line["scheme"], line["status"]} == {
            row["run_id"],
            row["scheme"],
            row["status"],
        }
        assert line["return_mean"] == (
            "" if row["return_mean"] is None else str(row["return_mean"])
        )


def test_several_trainings_count_once_each(several: Path) -> None:
    section = results_of(several)["sections"][0]
    row = by_scheme(section["pooled"])["int8"]
    expected = student_interval([0.0, 0.0, -2.0])
    assert section["runs"] == [f"dqn-CartPole-v1-s{seed}" for seed in range(3)]
    assert row["difference_mean"] == pytest.approx(expected.mean)
    assert row["difference_low"] == pytest.approx(expected.low)
    assert row["reward_error_percent"] == pytest.approx(0.4 / 3)
    assert row["absolute_reward_error_percent"] == pytest.approx(0.4 / 3)
    assert (row["runs"], row["episodes"], row["ties"]) == (3, 3 * EPISODES, 9)


def test_the_latency_of_several_trainings_is_the_least(
    workspace: Workspace, no_figures: None
) -> None:
    runs = [add_run(workspace, seed) for seed in (0, 1)]
    path = evaluation_path(workspace.artifact(runs[1].run_id, "int8"))
    # Something else ran beside it.
    replace(Evaluation.load(path), latency_us={"median": 9.5, "p95": 6.0}).save(path)
    index = write_report(workspace, [run.run_id for run in runs], command=COMMAND)
    row = by_scheme(results_of(index.parent)["sections"][0]["pooled"])["int8"]
    assert (row["latency_median_us"], row["latency_p95_us"]) == (5.6, 6.0)


def test_the_margin_is_the_users(workspace: Workspace, no_figures: None) -> None:
    run = add_run(workspace)
    index = write_report(workspace, [run.run_id], command=COMMAND, margin_percent=30)
    assert by_scheme(results_of(index.parent)["runs"])["ptq_w4"]["verdict"] == "within margin"
    assert "A loss of up to 30 % counts as none" in page_of(index.parent).text


def test_the_same_files_make_the_same_bytes(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flatbuffer, "weights", layers)
    run = add_run(workspace)
    contents = []
    for name in ("first", "second"):
        folder = write_report(workspace, [run.run_id], name=name, command=COMMAND).parent
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        contents.append({path.relative_to(folder): path.read_bytes() for path in files})
    assert len(contents[0]) == 8
    assert contents[0] == contents[1]


# Sampled actions.


SAMPLED = PROTOCOL | {"action": "sampled from the policy's distribution"}


def add_sampled(workspace: Workspace, run: Run, episodes: int = EPISODES) -> None:
    """Write evaluations by sampled actions beside the greedy ones: every return is lower by 7."""
    for scheme in SCHEMES:
        artifact = workspace.artifact(run.run_id, scheme)
        returns = [value - 7 for value in returns_of(scheme, episodes)]
        evaluation = evaluation_of(run, scheme, returns, sha256(artifact))
        replace(evaluation, protocol=SAMPLED).save(evaluation_path(artifact, sample=True))


def test_sampled_and_greedy_evaluations_have_reports_of_their_own(
    workspace: Workspace, no_figures: None
) -> None:
    runs = [add_run(workspace, seed) for seed in range(2)]
    ids = [run.run_id for run in runs]
    greedy = write_report(workspace, ids, command=COMMAND).parent
    before = {path.name: path.read_bytes() for path in greedy.iterdir() if path.is_file()}
    for run in runs:
        add_sampled(workspace, run)
    sampled = write_report(workspace, ids, command=COMMAND, sample=True).parent
    alone = write_report(workspace, ids[:1], command=COMMAND, sample=True).parent
    named = write_report(workspace, ids, command=COMMAND, sample=True, name="mine").parent

    assert (greedy.name, sampled.name) == ("dqn-CartPole-v1", "dqn-CartPole-v1-sampled")
    assert (alone.name, named.name) == ("dqn-CartPole-v1-s0-sampled", "mine")
    write_report(workspace, ids, command=COMMAND)
    assert {p.name: p.read_bytes() for p in greedy.iterdir() if p.is_file()} == before
    for folder, mean in ((greedy, 500.0), (sampled, 493.0)):
        rows = by_scheme(results_of(folder)["sections"][0]["pooled"])
        assert rows["fp32"]["return_mean"] == rows["int8"]["return_mean"] == mean


def test_pages_state_the_protocol_of_what_they_show(workspace: Workspace, no_figures: None) -> None:
    run = add_run(workspace)
    add_sampled(workspace, run)
    for protocol, sample in ((PROTOCOL, False), (SAMPLED, True)):
        folder = write_report(workspace, [run.run_id], command=COMMAND, sample=sample).parent
        section = results_of(folder)["sections"][0]
        assert section["protocol"] == protocol
        assert section["title"].endswith(", sampled actions") == sample
        for text in (page_of(folder).text, (folder / "report.md").read_text()):
            assert all(rule in text for rule in protocol.values())
            assert ("sampled actions" in text) == sample
            # What the report was made from is made again by its own kind of evaluation.
            assert bool(re.search(r"quarl run .* --episodes \d+ --sample", text)) == sample


def test_what_was_not_sampled_is_missing_in_a_sampled_report(
    workspace: Workspace, no_figures: None
) -> None:
    run = add_run(workspace)
    with pytest.raises(QuarlError, match=r"was not evaluated by sampled actions.* --sample`"):
        write_report(workspace, [run.run_id], command=COMMAND, sample=True)
    add_sampled(workspace, run)
    artifact = workspace.artifact(run.run_id, "int8")
    evaluation_path(artifact, sample=True).unlink()
    index = write_report(workspace, [run.run_id], command=COMMAND, sample=True)
    (missing,) = results_of(index.parent)["missing"]
    assert missing["reason"] == "was not evaluated by sampled actions"
    assert missing["command"] == f"quarl evaluate {artifact} --sample"


def test_the_random_baseline_may_be_longer(workspace: Workspace, no_figures: None) -> None:
    run = add_run(workspace)
    add_sampled(workspace, run, EPISODES - 5)
    sampled = write_report(workspace, [run.run_id], command=COMMAND, sample=True).parent
    assert results_of(sampled)["missing"] == []
    evaluate(workspace, run, "random", returns_of("random")[: EPISODES - 5])
    before = (sampled / "results.json").read_bytes()
    write_report(workspace, [run.run_id], command=COMMAND, sample=True)
    assert (sampled / "results.json").read_bytes() == before


# What is missing or does not belong.


def test_a_missing_experiment_is_named_and_not_averaged_over(several: Path) -> None:
    results = results_of(several)
    root = several.parent.parent
    assert results["missing"] == [
        {
            "run_id": "dqn-CartPole-v1-s1",
            "scheme": "ptq_w4",
            "reason": "was not evaluated",
            "command": f"quarl evaluate {root}/tflite_models/dqn-CartPole-v1-s1/ptq_w4.tflite",
        }
    ]
    row = by_scheme(results["sections"][0]["pooled"])["ptq_w4"]
    assert row["status"] == "missing in dqn-CartPole-v1-s1"
    assert row["return_mean"] is row["verdict"] is row["reward_error_percent"] is None
    for text in (page_of(several).text, (several / "report.md").read_text()):
        assert "1 experiment is missing" in text
        assert "ptq_w4 of dqn-CartPole-v1-s1 was not evaluated" in text
    assert "at 4 bits the result is missing" in results["sections"][0]["headline"][-1]


def reasons(workspace: Workspace, run: Run) -> dict[str, str]:
    index = write_report(workspace, [run.run_id], command=COMMAND)
    missing = results_of(index.parent)["missing"]
    for one in missing:
        assert one["reason"] in page_of(index.parent).text
        assert one["command"] in page_of(index.parent).text
    return {one["scheme"]: one["reason"] for one in missing}


def test_each_way_to_be_missing_is_named(workspace: Workspace, no_figures: None) -> None:
    run = add_run(workspace)
    artifact = {scheme: workspace.artifact(run.run_id, scheme) for scheme in SCHEMES}
    evaluation = Evaluation.load(evaluation_path(artifact["int8"]))
    replace(evaluation, artifact_sha256="0" * 64).save(evaluation_path(artifact["int8"]))
    write_bytes(artifact["fp16"], b"flipped")
    sidecar_path(artifact["ptq_w2"]).unlink()
    elsewhere = Evaluation.load(evaluation_path(artifact["ptq_w4"]))
    seeds = [seed + 1 for seed in elsewhere.seeds]
    replace(elsewhere, seeds=seeds).save(evaluation_path(artifact["ptq_w4"]))
    other = Evaluation.load(evaluation_path(artifact["ptq_w8"]))
    replace(other, protocol={"action": "sampled"}).save(evaluation_path(artifact["ptq_w8"]))
    assert reasons(workspace, run) == {
        "int8": "has a stale evaluation, made with another flatbuffer",
        "fp16": "has a flatbuffer that does not match its sidecar",
        "ptq_w2": "was not exported",
        "ptq_w4": "was evaluated on other episodes than fp32, or by other rules",
        "ptq_w8": "was evaluated on other episodes than fp32, or by other rules",
    }


def test_results_of_another_network_are_missing(workspace: Workspace, no_figures: None) -> None:
    run = add_run(workspace)
    path = sidecar_path(workspace.artifact(run.run_id, "int8"))
    replace(Sidecar.load(path), network_sha256="cd" * 32).save(path)
    path = evaluation_path(workspace.artifact(run.run_id, "fp16"))
    replace(Evaluation.load(path), reference_sha256="ef" * 32).save(path)
    fp32 = sha256(workspace.artifact(run.run_id, "fp32"))
    path = evaluation_path(workspace.artifact(run.run_id, "ptq_w8"))
    replace(Evaluation.load(path), reference_sha256=fp32).save(path)
    assert reasons(workspace, run) == {
        "int8": "was exported from another network than fp32",
        "fp16": "was compared with another fp32 flatbuffer",
    }
    commands = [one["command"] for one in results_of(workspace.report_dir(run.run_id))["missing"]]
    assert commands == [
        f"quarl evaluate {workspace.artifact(run.run_id, 'fp16')}",
        f"quarl export {run.run_id} --schemes fp32,int8 --root {workspace.root}",
    ]


def test_schemes_are_compared_on_the_episodes_that_all_have(
    workspace: Workspace, no_figures: None
) -> None:
    run = add_run(workspace)
    before = write_report(workspace, [run.run_id], command=COMMAND, name="before").parent
    assert "are compared" not in str(results_of(before)["sections"][0]["notes"])
    for scheme in ("fp32", "int8"):
        # What comes after the others' last episode would make int8 lose everything.
        more = [500.0] * EPISODES + [900.0 if scheme == "fp32" else 0.0] * 10
        evaluate(workspace, run, scheme, more)
    after = write_report(workspace, [run.run_id], command=COMMAND, name="after").parent
    assert results_of(after)["missing"] == []
    assert results_of(after)["runs"] == results_of(before)["runs"]
    (note,) = results_of(after)["sections"][0]["notes"]
    assert note == (
        f"Of {run.run_id}, the first {EPISODES} episodes are compared, as many as fp16, ptq_w8, "
        f"ptq_w4, ptq_w2 played; others played {EPISODES + 10}."
    )


def test_a_scheme_of_one_run_is_missing_in_the_other(
    workspace: Workspace, no_figures: None
) -> None:
    runs = [add_run(workspace, seed) for seed in range(2)]
    for path in workspace.artifact_dir(runs[0].run_id).glob("ptq_w8*"):
        path.unlink()
    index = write_report(workspace, [run.run_id for run in runs], command=COMMAND)
    missing = results_of(index.parent)["missing"]
    assert [(one["run_id"], one["scheme"]) for one in missing] == [("dqn-CartPole-v1-s0", "ptq_w8")]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run_id": "dqn-CartPole-v1-s1"}, "has an evaluation of another run"),
        ({"env_id": "LunarLander-v3"}, "has an evaluation of another run"),
        ({"seeds": list(range(EPISODES))}, "on other episodes than fp32"),
        ({"scheme": "int8"}, "has an evaluation of another run"),
        (None, "was not evaluated"),
    ],
)
def test_a_baseline_of_something_else_is_missing(
    workspace: Workspace, no_figures: None, change: dict[str, Any] | None, reason: str
) -> None:
    run = add_run(workspace)
    path = evaluation_path(workspace.artifact(run.run_id, "random"))
    if change is None:
        path.unlink()
    else:
        replace(Evaluation.load(path), **change).save(path)
    index = write_report(workspace, [run.run_id], command=COMMAND)
    results = results_of(index.parent)
    (missing,) = results["missing"]
    assert missing["scheme"] == "random"
    assert reason in missing["reason"]
    fp32 = workspace.artifact(run.run_id, "fp32")
    assert missing["command"] == f"quarl evaluate {fp32} --episodes {EPISODES}"
    assert f"random of {run.run_id} {missing['reason']}" in page_of(index.parent).text
    assert all(row["normalised_error_percent"] is None for row in results["runs"])
    assert "| random policy |" not in (index.parent / "report.md").read_text()
    assert by_scheme(results["runs"])["ptq_w4"]["verdict"] == "loss"


@pytest.mark.parametrize("name", ["foo", "ptq_w99", "int8 (copy)"])
def test_foreign_flatbuffers_are_left_out_and_named(
    workspace: Workspace, no_figures: None, name: str
) -> None:
    run = add_run(workspace)
    write_bytes(workspace.artifact_dir(run.run_id) / f"{name}.tflite", b"of somebody else")
    assert f"{name}.tflite in the folder of {run.run_id}" in notes(workspace, run)
    results = results_of(workspace.report_dir(run.run_id))
    assert [row["scheme"] for row in results["runs"]] == list(SCHEMES)
    assert results["missing"] == []


@pytest.mark.parametrize("run_id", ["dqn-CartPole-v1-s0/", "./dqn-CartPole-v1-s0"])
def test_a_path_is_no_run(workspace: Workspace, run_id: str) -> None:
    add_run(workspace)
    with pytest.raises(UsageError, match=r"not a path.*; give dqn-CartPole-v1-s0\. Received: run="):
        write_report(workspace, [run_id], command=COMMAND)


def test_commands_work_from_where_the_user_is(
    tmp_path: Path, no_figures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commands(workspace: Workspace) -> dict[str, list[str]]:
        index = write_report(workspace, [run.run_id], command=COMMAND)
        missing = results_of(index.parent)["missing"]
        return {one["scheme"]: shlex.split(one["command"]) for one in missing}

    there = tmp_path / "my root"
    run = add_run(Workspace(there))
    evaluation_path(Workspace(there).artifact(run.run_id, "int8")).unlink()
    sidecar_path(Workspace(there).artifact(run.run_id, "fp16")).unlink()
    flatbuffer_path = f"tflite_models/{run.run_id}/int8.tflite"
    export = ["quarl", "export", run.run_id, "--schemes", "fp16"]
    assert commands(Workspace(there)) == {
        "int8": ["quarl", "evaluate", str(there / flatbuffer_path)],
        "fp16": [*export, "--root", str(there)],
    }
    monkeypatch.chdir(there)
    assert commands(Workspace(Path("."))) == {
        "int8": ["quarl", "evaluate", flatbuffer_path],
        "fp16": export,
    }


@pytest.mark.parametrize(
    ("damage", "command"),
    [
        (
            lambda artifact: sidecar_path(artifact).unlink(),
            "quarl export dqn-CartPole-v1-s0 --schemes fp32 --root {root}",
        ),
        (
            lambda artifact: artifact.write_bytes(b"flipped"),
            "quarl export dqn-CartPole-v1-s0 --schemes fp32 --root {root}",
        ),
        (
            lambda artifact: evaluation_path(artifact).unlink(),
            "quarl evaluate {root}/tflite_models/dqn-CartPole-v1-s0/fp32.tflite",
        ),
    ],
    ids=["no sidecar", "changed flatbuffer", "no evaluation"],
)
def test_nothing_can_be_said_without_fp32(
    workspace: Workspace, damage: Callable[[Path], object], command: str
) -> None:
    run = add_run(workspace)
    damage(workspace.artifact(run.run_id, "fp32"))
    with pytest.raises(QuarlError) as caught:
        write_report(workspace, [run.run_id], command=COMMAND)
    assert f"`{command.format(root=workspace.root)}`" in str(caught.value)
    assert str(caught.value).endswith("Received: run='dqn-CartPole-v1-s0'")
    assert "\n" not in str(caught.value)
    assert not workspace.report_dir(run.run_id).exists()


def test_a_flatbuffer_may_be_left_out_once_it_was_evaluated(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flatbuffer, "weights", layers)
    run = add_run(workspace)
    write_report(workspace, [run.run_id], command=COMMAND)
    folder = workspace.report_dir(run.run_id)
    before = (folder / "results.json").read_bytes(), (folder / "report.md").read_text()
    figure = folder / "figures" / "weight_histograms.png"
    assert figure.exists()
    digest = sha256(workspace.artifact(run.run_id, "fp32"))
    for scheme in ("fp32", "int8"):
        workspace.artifact(run.run_id, scheme).unlink()
    write_report(workspace, [run.run_id], command=COMMAND)
    assert (folder / "results.json").read_bytes() == before[0]
    assert digest in before[1]
    assert digest in (folder / "report.md").read_text()
    assert not figure.exists()


def test_a_run_that_is_not_there(workspace: Workspace) -> None:
    with pytest.raises(QuarlError, match="Received: run=") as caught:
        write_report(workspace, ["dqn-CartPole-v1-s9"], command=COMMAND)
    assert f"`quarl export dqn-CartPole-v1-s9 --root {workspace.root}`" in str(caught.value)


def test_a_damaged_curve(workspace: Workspace) -> None:
    run = add_run(workspace)
    write_bytes(workspace.artifact_dir(run.run_id) / "progress.csv", b"step,loss\n1,2\n")
    with pytest.raises(QuarlError, match=r"training curve cannot be read.*Received: path="):
        write_report(workspace, [run.run_id], command=COMMAND)


def test_runs_by_different_rules_are_not_pooled(workspace: Workspace, no_figures: None) -> None:
    runs = [add_run(workspace, seed) for seed in range(2)]
    for scheme in SCHEMES:
        path = evaluation_path(workspace.artifact(runs[1].run_id, scheme))
        replace(Evaluation.load(path), protocol={"action": "sampled"}).save(path)
    with pytest.raises(QuarlError, match="different rules"):
        write_report(workspace, [run.run_id for run in runs], command=COMMAND)


# What a reader must know.


def notes(workspace: Workspace, run: Run) -> str:
    index = write_report(workspace, [run.run_id], command=COMMAND)
    noted = results_of(index.parent)["sections"][0]["notes"]
    assert all(note in page_of(index.parent).text for note in noted)
    return " ".join(noted)


def test_a_sound_evaluation_needs_no_notes(single: Path) -> None:
    assert results_of(single)["sections"][0]["notes"] == []


def test_games_that_repeat_themselves_are_noted(workspace: Workspace, no_figures: None) -> None:
    run = add_run(workspace)
    for path in workspace.artifact_dir(run.run_id).glob("*.eval.json"):
        played = Evaluation.load(path)
        replace(played, protocol={**PROTOCOL, "game": "whole games"}).save(path)
    played = Evaluation.load(evaluation_path(workspace.artifact(run.run_id, "fp32")))
    different = len(set(played.returns))
    assert different < len(played.returns)
    said = notes(workspace, run)
    assert f"The {len(played.returns)} games of {run.run_id} are worth " in said
    assert f"independent ones (different returns: {different}): " in said
    assert "not shown to earn more than a random one" not in said


def test_games_that_all_earn_more_than_random_ones_are_no_random_ones(
    workspace: Workspace, no_figures: None
) -> None:
    run = add_run(workspace)
    for path in workspace.artifact_dir(run.run_id).glob("*.eval.json"):
        played = Evaluation.load(path)
        # Three of which the interval reaches below nothing.
        won = [60.0, 100.0, 270.0] * len(played.returns)
        games = [1.0, 7.0] * len(played.returns) if played.scheme == "random" else won
        returns = games[: len(played.returns)]
        replace(played, returns=returns, protocol={**PROTOCOL, "game": "whole games"}).save(path)
    said = notes(workspace, run)
    assert "(different returns: 3)" in said
    assert "not shown to earn more than a random one" not in said


def test_games_that_are_all_lost_are_noted(workspace: Workspace, no_figures: None) -> None:
    run = add_run(workspace)
    for path in workspace.artifact_dir(run.run_id).glob("*.eval.json"):
        played = Evaluation.load(path)
        lost = played.returns if played.scheme == "random" else [-1.0] * len(played.returns)
        replace(played, returns=lost, protocol={**PROTOCOL, "game": "whole games"}).save(path)
    said = notes(workspace, run)
    assert "are worth 1.0 independent ones (different returns: 1)" in said
    assert "not shown to earn more than a random one" in said


def test_notes_on_few_episodes_no_curve_and_no_baseline(
    workspace: Workspace, no_figures: None
) -> None:
    run = add_run(workspace, episodes=5)
    (workspace.artifact_dir(run.run_id) / "progress.csv").unlink()
    evaluation_path(workspace.artifact(run.run_id, "random")).unlink()
    text = notes(workspace, run)
    assert f"Only 5 episodes: fewer than {MIN_EPISODES} cannot tell" in text
    assert (
        f"fewer than {MIN_EPISODES} paired episodes"
        in page_of(workspace.report_dir(run.run_id)).text
    )
    rows = by_scheme(results_of(workspace.report_dir(run.run_id))["runs"])
    assert {rows[scheme]["verdict"] for scheme in SCHEMES[1:]} == {"cannot tell"}
    assert "No training curve was exported for dqn-CartPole-v1-s0" in text
    assert "the normalised error is unknown" in text


def test_note_on_a_policy_that_has_nothing_to_lose(workspace: Workspace, no_figures: None) -> None:
    run = add_run(workspace)
    for scheme in SCHEMES:
        evaluate(workspace, run, scheme, returns_of("ptq_w2"))
    assert "not shown to earn more than a random one" in notes(workspace, run)


def test_one_episode_makes_a_report_that_cannot_tell(
    workspace: Workspace, no_figures: None
) -> None:
    run = add_run(workspace, episodes=1)
    assert "Only 1 episode" in notes(workspace, run)
    folder = workspace.report_dir(run.run_id)
    assert by_scheme(results_of(folder)["runs"])["int8"]["verdict"] == "cannot tell"
    assert "[no interval]" in page_of(folder).text


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        ([450.0] * EPISODES, "than fp32, but its return is 10.0 % lower."),
        ([499.0] * EPISODES, "than fp32; its return is 0.20 % lower, within the margin."),
        ([500.0] * (EPISODES - 3) + [300.0, 300.0, 700.0], "paired episodes cannot tell."),
        ([550.0] * EPISODES, "than fp32, and its return is 10.0 % higher."),
    ],
)
def test_headlines(
    workspace: Workspace, no_figures: None, returns: list[float], expected: str
) -> None:
    run = add_run(workspace, schemes=["fp32", "int8"])
    evaluate(workspace, run, "int8", returns)
    index = write_report(workspace, [run.run_id], command=COMMAND, margin_percent=2)
    (sentence,) = results_of(index.parent)["sections"][0]["headline"]
    assert sentence.startswith("int8 is 3.6")
    assert sentence.endswith(expected)


def test_a_worse_but_smaller_scheme_does_not_hide_the_one_to_take(
    workspace: Workspace, no_figures: None
) -> None:
    run = add_run(workspace, schemes=["fp32", "fp16", "int8"])
    evaluate(workspace, run, "int8", [450.0] * EPISODES)
    index = write_report(workspace, [run.run_id], command=COMMAND)
    first, second = results_of(index.parent)["sections"][0]["headline"]
    assert first.startswith("fp16 is 2.0")
    assert "no faster" in first
    assert second.startswith("int8 is 3.6")


def test_the_published_formula_has_a_sentence_of_its_own(
    workspace: Workspace, no_figures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = ("ptq_paper_w8", "ptq_paper_w2")
    monkeypatch.setattr(sys.modules[__name__], "SCHEMES", (*SCHEMES, *published))
    run = add_run(workspace)
    evaluate(workspace, run, "ptq_paper_w2", returns_of("ptq_w2"))
    index = write_report(workspace, [run.run_id], command=COMMAND)
    results = results_of(index.parent)
    assert [row["scheme"] for row in results["runs"]] == list(SCHEMES)
    _, simulated, as_published = results["sections"][0]["headline"]
    assert "4 bits" in simulated
    assert as_published == (
        "In simulation by the formula as published, weights of 8 bits keep the reward; at 2 bits "
        "the return is 98.1 % lower."
    )


# Quantisation-aware runs.

AWARE = Quantization(bits=4, delay=25_000)


def test_a_quantisation_aware_run_has_a_report_of_its_own(
    workspace: Workspace, no_figures: None
) -> None:
    plain = [add_run(workspace, seed) for seed in range(2)]
    aware = [add_run(workspace, seed, quantization=AWARE) for seed in range(2)]
    for run in aware:
        path = sidecar_path(workspace.artifact(run.run_id, "qat_w4a4"))
        preset = {**PRESET, "learning_rate": 0.5}
        replace(Sidecar.load(path), preset=preset, network_sha256="cd" * 32).save(path)
        evaluate(workspace, run, "qat_w4a4", [450.0] * EPISODES)

    def written(runs: list[Run]) -> Path:
        return write_report(workspace, [run.run_id for run in runs], command=COMMAND).parent

    folder = written(aware)
    assert written(plain).name == "dqn-CartPole-v1"
    assert folder.name == "dqn-CartPole-v1-q4d25000"
    (section,) = results_of(folder)["sections"]
    assert "of one seed" not in str(section["notes"])
    assert section["title"] == "dqn on CartPole-v1, trained at 4 bits from step 25,000 on"
    rows = by_scheme(section["pooled"])
    assert list(rows) == ["fp32", "qat_w4a4"]
    assert (rows["qat_w4a4"]["return_mean"], rows["fp32"]["return_mean"]) == (450.0, 500.0)
    assert section["headline"] == [
        "In simulation, qat_w4a4 runs at the 4 bits it was trained at, but its return is 10.0 % "
        "lower."
    ]
    page = page_of(folder).text
    assert "learning_rate 0.5" in page
    assert "quantization.bits 4" in page
    assert "cd" * 32 in page


def test_pages_name_the_command_that_made_a_run_without_its_twin_s_scheme(
    workspace: Workspace, no_figures: None
) -> None:
    plain, aware = add_run(workspace), add_run(workspace, quantization=AWARE)
    for run in (plain, aware):
        notes(workspace, run)
        text = (workspace.report_dir(run.run_id) / "report.md").read_text()
        made = re.search(r"^from what was made by \(.+\)\n\n    quarl (.+)$", text, re.MULTILINE)
        assert made is not None
        parsed = arguments.build().parse_args(shlex.split(made[1]))
        assert (parsed.verb, parsed.algo, parsed.env) == ("run", run.algo, run.env_id)
        assert parsed.bits == (run.quantization and run.quantization.bits)
        assert (REFERENCE in made[1]) == (run is plain)
        assert parsed.episodes == EPISODES


def test_a_commit_that_no_record_keeps_is_said_to_be_unknown() -> None:
    commits = {"trained": ["0123456789ab", "unknown"], "exported": ["a", "b"]}
    text = made_with({"commits": commits, "versions": {"numpy": ["2.3.5"]}, "processors": {}})
    assert text == (
        "Trained at commit 0123456789ab and an unknown commit, exported at commits a, b; "
        "numpy 2.3.5"
    )


def test_a_run_of_another_processor_than_its_twins_is_noted(
    workspace: Workspace, no_figures: None
) -> None:
    add_run(workspace)
    run = add_run(workspace, quantization=AWARE)
    assert "on another processor" not in notes(workspace, run)
    assert "trainings of one seed" in notes(workspace, run)
    path = sidecar_path(workspace.artifact(run.run_id, "qat_w4a4"))
    for processor, named in (("Gamma", "Alpha with avx2 and Gamma"), ("", "and an unknown")):
        replace(Sidecar.load(path), trained_on=processor).save(path)
        assert "Trained at 4 bits on another processor than the plain twins" in notes(
            workspace, run
        )
        folder = workspace.report_dir("dqn-CartPole-v1-s0-q4d25000")
        assert named in (folder / "report.md").read_text()


def test_runs_with_other_delays_or_options_are_not_pooled(
    workspace: Workspace, no_figures: None
) -> None:
    runs = [
        add_run(workspace),
        add_run(workspace, quantization=AWARE),
        add_run(workspace, quantization=replace(AWARE, delay=10)),
        add_run(workspace, quantization=replace(AWARE, ranges="extremes")),
    ]
    ids = [run.run_id for run in runs]
    with pytest.raises(UsageError, match=r"give --name NAME\. Received: "):
        write_report(workspace, ids[1:3], command=COMMAND)
    index = write_report(workspace, ids, name="all", command=COMMAND)
    sections = results_of(index.parent)["sections"]
    assert [section["title"] for section in sections] == [
        "dqn on CartPole-v1",
        "dqn on CartPole-v1, trained at 4 bits from step 25,000 on",
        "dqn on CartPole-v1, trained at 4 bits from step 10 on",
        "dqn on CartPole-v1, trained at 4 bits from step 25,000 on (ranges=extremes)",
    ]
    assert [section["runs"] for section in sections] == [[run_id] for run_id in ids]
    # A section has the schemes of its own runs, and no other is missed.
    assert results_of(index.parent)["missing"] == []


def test_terms_are_explained_where_they_are_shown(workspace: Workspace, no_figures: None) -> None:
    terms = {"ptq_wN, ptq_paper_wN", "qat_int8", "qat_wNaN", "Fp", "8*", "8, 7, …"}

    def explained(run: Run) -> set[str]:
        folder = write_report(workspace, [run.run_id], command=COMMAND).parent
        found = re.findall(r"^- \*\*(.+)\*\*:", (folder / "report.md").read_text(), re.MULTILINE)
        assert {"native, simulated", "verdict", "latency"} <= set(found)
        return terms & set(found)

    assert explained(add_run(workspace)) == {"ptq_wN, ptq_paper_wN"}
    assert explained(add_run(workspace, quantization=AWARE)) == {"qat_wNaN"}
    eight = add_run(workspace, quantization=replace(AWARE, bits=8))
    assert explained(eight) == {"qat_int8", "qat_wNaN"}


# Names, groups and figures.


def test_names(workspace: Workspace, no_figures: None) -> None:
    cart = [add_run(workspace, seed).run_id for seed in range(2)]
    lander = add_run(workspace, env_id="LunarLander-v3").run_id

    def name_of(runs: list[str], name: str | None = None) -> str:
        return write_report(workspace, runs, name=name, command=COMMAND).parent.name

    assert name_of(cart[:1]) == "dqn-CartPole-v1-s0"
    assert name_of([cart[0], cart[0]]) == "dqn-CartPole-v1-s0"
    assert name_of(cart) == "dqn-CartPole-v1"
    assert name_of([*cart, lander], "all") == "all"
    slow = [add_run(workspace, seed, overrides={"learning_rate": 0.01}) for seed in range(2)]
    assert name_of([run.run_id for run in slow]) == f"dqn-CartPole-v1-{digest(slow[0].overrides)}"
    with pytest.raises(UsageError, match=r"give --name NAME\. Received: "):
        name_of([cart[0], slow[1].run_id])
    with pytest.raises(UsageError, match=r"give --name NAME\. Received: "):
        name_of([*cart, lander])
    with pytest.raises(UsageError, match=r"Received: name='\.\./else'"):
        name_of(cart, "../else")
    with pytest.raises(UsageError, match="Received: none"):
        name_of([])


def test_runs_that_differ_in_more_than_the_seed_are_not_pooled(
    workspace: Workspace, no_figures: None
) -> None:
    runs = [
        add_run(workspace),
        add_run(workspace, overrides={"learning_rate": 0.01}),
        add_run(workspace, env_id="LunarLander-v3"),
        add_run(workspace, seed=1),
    ]
    index = write_report(workspace, [r.run_id for r in runs], name="all", command=COMMAND)
    sections = results_of(index.parent)["sections"]
    assert [section["title"] for section in sections] == [
        "dqn on CartPole-v1",
        "dqn on CartPole-v1 (learning_rate=0.01)",
        "dqn on LunarLander-v3",
    ]
    assert [len(section["runs"]) for section in sections] == [2, 1, 1]


def test_runs_of_before_a_preset_said_more_are_pooled(
    workspace: Workspace, no_figures: None
) -> None:
    runs = [add_run(workspace, seed) for seed in range(2)]
    path = sidecar_path(workspace.artifact(runs[0].run_id, "fp32"))
    older = Sidecar.load(path)
    preset = {key: value for key, value in older.preset.items() if key != "dueling"}
    replace(older, preset=preset).save(path)
    index = write_report(workspace, [r.run_id for r in runs], command=COMMAND)
    (section,) = results_of(index.parent)["sections"]
    assert len(section["runs"]) == 2


def test_figures_of_an_earlier_report_are_removed(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flatbuffer, "weights", lambda _: {})
    run = add_run(workspace, schemes=["fp32"])
    stale = workspace.report_dir(run.run_id) / "figures" / "learning_curve.png"
    write_bytes(stale, b"of an earlier report")
    (workspace.artifact_dir(run.run_id) / "progress.csv").unlink()
    index = write_report(workspace, [run.run_id], command=COMMAND)
    assert not stale.exists()
    assert page_of(index.parent).loads == []


def test_figures_of_sections_have_names_of_their_own(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flatbuffer, "weights", layers)
    runs = [add_run(workspace, env_id=one, schemes=["fp32"]) for one in ("CartPole-v1", "Pong-v5")]
    index = write_report(workspace, [run.run_id for run in runs], name="both", command=COMMAND)
    assert sorted(path.name for path in (index.parent / "figures").iterdir()) == [
        "1_learning_curve.png",
        "1_weight_histograms.png",
        "2_learning_curve.png",
        "2_weight_histograms.png",
    ]


def test_needs_no_tensorflow() -> None:
    code = "import sys, quarl_tf.report; print('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# Numbers as text.


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, DASH),
        (0.0, "0"),
        (-0.0, "0"),
        (500.0, "500.0"),
        (9.634, "9.63"),
        (-20.25, f"{MINUS}20.2"),
        (15010.4, "15,010"),
        (0.0042, "0.004"),
    ],
)
def test_number_text(value: float | None, text: str) -> None:
    assert number_text(value) == text


def test_other_texts() -> None:
    assert percent(2.5) == "2.50 %"
    assert percent(None) == DASH
    assert [size(n) for n in (None, 812, 75_910, 6_612_000)] == [DASH, "812 B", "75.9 kB", "6.6 MB"]
    assert limits(-1.0, 2.0) == f"[{MINUS}1.00, 2.00]"
    assert limits(None, 2.0) == "[no interval]"
    assert dtypes({"int32": 514, "int8": 67_584}) == "67,584 int8, 514 int32"
