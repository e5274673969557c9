"""Reading the file of a study, and errors in it."""

import csv
import re
from pathlib import Path

import pytest
from samples import ROOT, STUDY, Capsys, refused, write_study

from quarl_tf.cli import main
from quarl_tf.spec import Quantization
from quarl_tf.spec.cell import Cell
from quarl_tf.study import read


def quantizations_of(cell: Cell) -> list[Quantization]:
    runs = (column.runs[0] for column in cell.columns)
    return list({run.run_id: run.quantization for run in runs if run.quantization}.values())


def test_a_cell_goes_before_the_study_and_says_so(tmp_path: Path, capsys: Capsys) -> None:
    text = """
name: s
seeds: [0, 1]
bits: [4, 2]
cells:
  - {algo: dqn, env: LunarLander-v2, seeds: [7], bits: []}
  - {algo: dqn, env: CartPole-v1}
  - {algo: dqn, env: CartPole-v1, overrides: {discount: 0.9}}
  - {algo: ppo, env: CartPole-v1, delays: [20000, 0.57]}
  - {algo: ppo, env: CartPole-v1, seeds: [2], delays: [1], quantization: {edge_bits: 4}}
  - {algo: ppo, env: CartPole-v1, delays: [0.25]}
  - {algo: ppo, env: CartPole-v1, delays: [0.25], quantization: {ranges: percentile}}
  # Has no use for a delay; its training ends before it.
  - {algo: ppo, env: CartPole-v1, bits: [], delays: [60000], overrides: {steps: 50000}}
"""
    path = write_study(tmp_path, text)
    study = read(path)
    first, second, *others = study.cells
    assert study.episodes == 100
    assert [(run.env_id, run.seed) for run in first.references] == [("LunarLander-v3", 7)]
    assert not quantizations_of(first)
    assert (second.distinction, [run.seed for run in second.references]) == ("", [0, 1])
    plain = [column.scheme.name for column in second.columns if not column.scheme.aware]
    assert plain == ["fp32", "int8"]
    assert [cell.distinction for cell in others] == [
        *("discount=0.9", "", "delay=1, edge_bits=4", "delay=25000"),
        *("delay=25000, ranges=percentile", "steps=50000"),
    ]
    assert [(q.bits, q.delay) for q in quantizations_of(others[1])] == [
        *((4, 20_000), (2, 20_000)),
        *((4, 57_000), (2, 57_000)),  # As floats, 0.57 * 100000 is 56999.999999999993.
    ]
    assert {q.recipe.head.weights.bits for q in quantizations_of(others[2])} == {4}
    # Cells that differ in quantisation share their plain trainings.
    names = [scheme.name for _, scheme in study.experiments()]
    assert [names.count(name) for name in ("fp32", "int8", "qat_w4a4")] == [10, 10, 13]
    assert main(["study", "plan", str(path)]) == 0
    assert capsys.readouterr().err.count("LunarLander-v2 is now LunarLander-v3") == 1


def test_fine_tuned_trainings_are_compared_with_what_they_start_from(tmp_path: Path) -> None:
    text = """
name: s
seeds: [1, 0]
overrides: {steps: 20000}
cells:
  - {algo: ppo, env: CartPole-v1, bits: [4, 2], from: {sha256: [b, a], overrides: {epochs: 3}}}
  - {algo: ppo, env: CartPole-v1, from: {sha256: [b, a], overrides: {epochs: 3}}}
"""
    tuned, plain = read(write_study(tmp_path, text)).cells
    for cell, overrides in ((tuned, {"epochs": 3}), (plain, {"steps": 20_000})):
        found = [(run.seed, run.overrides, run.quantization) for run in cell.references]
        assert found == [(0, overrides, None), (1, overrides, None)]
    trained = tuned.columns[-1].runs
    assert [run.quantization.bits for run in trained if run.quantization] == [2, 2]
    for runs in (trained, plain.references):
        assert [run.origin.network_sha256 for run in runs if run.origin] == ["a", "b"]
        assert [run.needed for run in runs] == [*tuned.references]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cells: [", "line 1"),
        ("- a", "a study must map names"),
        (STUDY + "episods: 3", "did you mean episodes"),
        (STUDY.replace("name: s", "name: a/b"), "name='a/b'"),
        (STUDY.replace("name: s\n", ""), "needs name"),
        (STUDY.replace("seeds: [0]\n", ""), "needs seeds"),
        (STUDY.replace("[0]", "[]"), "seeds must be a list of one or more"),
        (STUDY.replace("[0]", "[-1]"), "Received: seeds=[-1]"),
        (STUDY.replace("[0]", "[0, 0]"), "Received: seeds=[0, 0]"),
        (STUDY.replace("ppo", "ppx"), "cell 1: Unknown algorithm: did you mean ppo"),
        (STUDY + "bits: [0.5]", "bits must be a list of whole numbers"),
        (STUDY + "bits: [4]\ndelays: [1.5]", "share of the training between 0 and 1. Rec"),
        (STUDY + "bits: [4]\ndelays: [0.000001]", "Received: delay=0"),
        (STUDY + "bits: [4]\noverrides: {layer_norm: true}", "has no rule for layer_norm"),
        (STUDY + "bits: [4]\ndelays: [1000000]", "delay=1000000, steps=100000"),
        (STUDY + "bits: [4]\nquantization: {delay: 4}", "`delays` the delays"),
        (STUDY + "delays: [1]", "add bits ([] for none). Received: ['delays']"),
        (STUDY + "episodes: 0", "episodes=0"),
        (STUDY + "x: frames", "x must be steps or episodes or seconds. Received: x='frames'"),
        (STUDY + "epsilon: 0", "must be a number above 0, at most 1. Received: epsilon=0"),
        (STUDY + "epsilon: 1\nsample: true", "Received: sample, epsilon"),
        (STUDY.replace("v1}", "v1, from: {}}"), "from needs sha256"),
        (STUDY.replace("v1}", "v1, from: {sha: a}}"), "did you mean sha256"),
        (STUDY.replace("v1}", "v1, from: {sha256: [a], overrides: {stps: 9}}}"), "mean steps"),
        (STUDY.replace("v1}", "v1, from: {sha256: [a, b]}}"), "seeds=[0], sha256=['a', 'b']"),
        (STUDY + "presets: none.yaml", "none.yaml"),
        ("[" * 3000, "recursion depth"),
        (STUDY.replace("}]", "}, {algo: ppo, env: CartPole-v1, remark: a}]"), "cell 2 says the"),
    ],
)
def test_a_wrong_file_is_one_line_with_its_name(text: str, words: str, tmp_path: Path) -> None:
    path = write_study(tmp_path, text)
    message = refused(read, path, code=2)
    assert words in message
    assert str(path) in message


def test_shipped_studies_are_sound_quarls_is_whole_and_classic_its_part_without_games() -> None:
    # Files of presets are beside them.
    paths = [path for path in (ROOT / "studies").glob("*.yaml") if "-presets" not in path.stem]
    studies = {path.stem: read(path) for path in paths}
    assert [study.name for study in studies.values()] == [*studies]
    with (ROOT / "docs/results/quarl_table2.csv").open(newline="") as file:
        published = {(row["algo"], row["task"]) for row in csv.DictReader(file)}
    quarl, classic = studies["quarl"], studies["classic"]
    runs = [cell.references[0] for cell in quarl.cells]
    tasks = [re.sub(r"(Env|NoFrameskip)?-v\d+$", "", run.env_id) for run in runs]
    assert {(run.algo, task) for run, task in zip(runs, tasks, strict=True)} == published
    experiments = quarl.experiments()
    assert classic.experiments() == [e for e in experiments if "NoFrameskip" not in e[0].env_id]
