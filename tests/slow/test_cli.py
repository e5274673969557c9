import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console
from samples import Artifacts, Capsys, Copy, Patch, products, python, refusal, snapshot

from quarl_tf import presets
from quarl_tf.cli import arguments, doctor, verbs
from quarl_tf.foundation import display, provenance
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.files import sha256, write_bytes
from quarl_tf.spec import DEFAULT_SCHEMES, GREEDY, Chance, Run
from quarl_tf.store.records import Evaluation, Protocol, Sidecar
from quarl_tf.store.workspace import Workspace, evaluation_path, reference_path, sidecar_path

TRAIN = ["--algo", "dqn", "--env", "CartPole-v1"]
#: A training of a second, for what does not depend on what is learned.
TINY = [
    *TRAIN,
    *("-p", "steps=600", "-p", "network=[8]", "-p", "learning_starts=64"),
    *("-p", "train_frequency=64", "-p", "gradient_steps=2", "-p", "batch_size=8"),
    *("-p", "evaluation_every=200", "-p", "evaluation_episodes=4", "-p", "checkpoint_every=200"),
]
SCHEMES = ["--schemes", "fp32,int8"]


class Finished(NamedTuple):
    root: Path
    run_id: str

    @property
    def artifacts(self) -> Path:
        return Workspace(self.root).artifact_dir(self.run_id)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Run everything once."""
    root = tmp_path_factory.mktemp("root")
    assert verbs.main(["run", *TINY, *SCHEMES, "--episodes", "5", "--root", str(root)]) == 0
    (folder,) = (root / "runs").iterdir()
    return Finished(root, folder.name)


@pytest.fixture
def loose(finished: Finished, tmp_path: Path) -> Path:
    """Return a folder of its own with what was exported and evaluated."""
    return Path(shutil.copytree(finished.artifacts, tmp_path / "loose"))


def test_a_run_becomes_c(finished: Finished, tmp_path: Path, capsys: Capsys) -> None:
    shutil.copytree(finished.root, tmp_path, dirs_exist_ok=True)
    words = ["export", finished.run_id, "--target", "c", "--root", str(tmp_path)]
    source = Workspace(tmp_path).artifact(finished.run_id, "int8").with_suffix(".c")
    assert verbs.main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith(f"int8.tflite\nexport   {source}\n")
    assert verbs.main(words) == 0
    assert f"wrote     {source}  (flash: " in capsys.readouterr().out
    assert "dqn-CartPole-v1" in source.with_suffix(".h").read_text()
    error = refusal(capsys, *words, "--schemes", "fp32", code=2)
    assert "Received: FULLY_CONNECTED float32" in error


def test_a_second_run_redoes_nothing_and_does_not_load_tensorflow(finished: Finished) -> None:
    root, run_id = finished
    workspace, kept = Workspace(root), (root / "runs", root / "tflite_models")
    before = [snapshot(folder) for folder in kept]
    pages = [workspace.report_dir(run_id) / name for name in ("index.html", "report.md")]
    content = [page.read_bytes() for page in pages]
    words = ["run", *TINY, *SCHEMES, "--episodes", "5", "--root", str(root)]
    code = (
        "import sys; from quarl_tf.cli import verbs; "
        f"assert verbs.main({words!r}) == 0; assert 'tensorflow' not in sys.modules"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert [snapshot(folder) for folder in kept] == before
    assert [page.read_bytes() for page in pages] == content
    assert str(pages[0]) in done.stdout.replace("\n", "")
    evaluation = Evaluation.load(evaluation_path(workspace.artifact(run_id, "int8")))
    assert len(evaluation.returns) == len(evaluation.seeds) == 5


@pytest.fixture(scope="module")
def aware(finished: Finished) -> tuple[Path, str, str]:
    """Run at four bits beside the plain training; return the root and both ids."""
    root, plain = finished
    arguments = [*TINY, "--bits", "4", "--quant-delay", "300", "--episodes", "5"]
    assert verbs.main(["run", *arguments, "--root", str(root)]) == 0
    (folder,) = (root / "runs").glob("*-q4d300-*")
    return root, plain, folder.name


def test_a_run_with_bits_is_compared_with_the_plain_one_on_the_same_episodes(
    aware: tuple[Path, str, str],
) -> None:
    root, plain, run_id = aware
    assert run_id.startswith(f"{plain}-q4d300-")  # A DQN's ranges follow.
    workspace = Workspace(root)
    names = {path.name for path in workspace.artifact_dir(run_id).glob("*.tflite")}
    assert names == {"qat_w4a4.tflite"}
    artifact = workspace.artifact(run_id, "qat_w4a4")
    reference = workspace.artifact(plain, "fp32")
    assert reference_path(artifact, Sidecar.load(artifact.with_suffix(".json"))) == (reference)
    ours, theirs = (Evaluation.load(evaluation_path(p)) for p in (artifact, reference))
    assert ours.seeds == theirs.seeds[:5]
    assert ours.reference_sha256 == sha256(reference)
    table = (workspace.report_dir(run_id) / "report.md").read_text()
    assert "qat_w4a4" in table
    assert "fp32" in table


@pytest.mark.parametrize("place", [".", ".."])
def test_a_run_with_bits_finds_the_plain_one_from_within_its_folder(
    aware: tuple[Path, str, str], place: str, monkeypatch: Patch, capsys: Capsys
) -> None:
    root, _, run_id = aware
    folder = Workspace(root).artifact_dir(run_id)
    inner = folder / "inner"
    inner.mkdir(exist_ok=True)
    monkeypatch.chdir(folder if place == "." else inner)
    before = snapshot(folder)
    artifact = f"{place}/qat_w4a4.tflite"
    assert verbs.main(["evaluate", artifact, "--episodes", "5", "--gate", "1000"]) == 0
    assert snapshot(folder) == before
    assert f"{run_id}: 5 episodes" in capsys.readouterr().out


def test_a_run_with_bits_needs_the_plain_one(
    aware: tuple[Path, str, str], tmp_path: Path, capsys: Capsys
) -> None:
    root, plain, run_id = aware
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(Workspace(tmp_path).artifact_dir(plain))
    line = refusal(capsys, "report", run_id, "--root", str(tmp_path), code=1)
    assert "nothing to compare with" in line
    assert f"quarl export {plain} --schemes fp32" in line
    artifact = str(Workspace(tmp_path).artifact(run_id, "qat_w4a4"))
    line = refusal(capsys, "evaluate", artifact, "--episodes", "5", "--gate", "50", code=3)
    assert f"quarl export {plain} --schemes fp32" in line


def test_dry_run_names_every_file_and_makes_none(tmp_path: Path, capsys: Capsys) -> None:
    root = tmp_path / "root"
    assert verbs.main(["run", *TRAIN, "--dry-run", "--root", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "train",
        *["export"] * len(DEFAULT_SCHEMES),
        *["evaluate"] * len(DEFAULT_SCHEMES),
        "report",
    ]
    assert not root.exists()


@pytest.mark.parametrize("verb", ["run", "train", "export", "evaluate", "report", "inspect"])
def test_help_of_a_verb_ends_with_an_example_that_parses(
    verb: str, capsys: Capsys, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        verbs.main([verb, "-h"])
    assert stop.value.code == 0
    example = re.search(r"example: quarl (.+)", capsys.readouterr().out)
    assert example is not None
    parsed = arguments.build().parse_args(example[1].split())
    assert parsed.verb.split()[0] == verb


@pytest.mark.parametrize(
    ("words", "trained"),
    [
        # The most robust algorithm.
        (["LunarLander-v3"], "ppo-LunarLander-v3-s0"),
        # Half of training is plain.
        (
            ["--algo", "ppo", "--env", "CartPole-v1", "--bits", "4", "-p", "steps=60000"],
            r"ppo-CartPole-v1-s0-\w{8}-q4d30000\b",
        ),
    ],
)
def test_what_is_not_said_is_what_is_usual(words: list[str], trained: str, capsys: Capsys) -> None:
    assert verbs.main(["train", *words, "--root", "nowhere", "--dry-run"]) == 0
    assert re.search(trained, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fly"], "invalid choice"),
        (["train"], "--env"),
        (["train", "CartPole-v9"], "did you mean CartPole-v1"),
        (["evaluate", "CartPole-v1/dqn/int9"], "did you mean CartPole-v1/dqn/int8"),
        (["train", "--algo", "dqm", "--env", "CartPole-v1"], "did you mean dqn"),
        (["train", "--algo", "dqn", "--env", "CartPol-v1"], "CartPole-v1"),
        (["train", "--algo", "dqn", "--env", "MountainCar-v0"], "preset"),
        (["train", *TRAIN, "--seed", "-1"], "seed=-1"),
        (["train", *TRAIN, "--seed", "one"], "one"),
        (["train", *TRAIN, "-p", "learning_rat=1"], "did you mean learning_rate"),
        (["train", *TRAIN, "-p", "steps"], "KEY=VALUE"),
        (["train", *TRAIN, "-p", "steps=[1"], "steps=[1"),
        (["train", *TRAIN, "-p", "num_envs=7"], "num_envs=7"),
        (["export", "dqn-CartPole-v1-s0", "--schemes", "int9"], "did you mean int8"),
        (["export", "dqn-CartPole-v1-s0", "--schemes", ","], "at least one scheme"),
        (
            ["evaluate", "x.tflite", "--episodes", "0"],
            "--episodes: a whole number of 1 or more is needed: '0'",
        ),
        (["run", *TRAIN, "--gate", "nan"], "--gate: a percentage is 0 or more: 'nan'"),
        (["run", *TRAIN, "--margin", "-1"], "--margin: a percentage is 0 or more: '-1'"),
        (["evaluate", "x.tflite", "--gate", "-1"], "--gate: a percentage is 0 or more: '-1'"),
        (["report", "x", "--margin", "inf"], "--margin: a percentage is 0 or more: 'inf'"),
        (["blame", "x.tflite", "--episodes", "0"], "a whole number of 1 or more is needed: '0'"),
        (["report", "x", "--name", "a/b", "--dry-run"], "name='a/b'"),
        (
            ["study", "run", "x.yaml", "--jobs", "0"],
            "--jobs: a whole number of 1 or more is needed: '0'",
        ),
        (
            ["study", "run", "x.yaml", "--cores", "0"],
            "--cores: a whole number of 1 or more is needed: '0'",
        ),
        (["study", "report", "x.yaml", "--margin", "-1"], "a percentage is 0 or more: '-1'"),
        (["run", *TRAIN, "--bits", "9"], "bits=9"),
        (["train", *TRAIN, "--bits", "4", "--quant-delay", "0"], "delay=0"),
        (["train", *TRAIN, "--quant-delay", "9"], "add --bits N. Received: quant_delay=9"),
        (["train", *TRAIN, "-q", "edge_bits=4"], "add --bits N"),
        (["train", *TRAIN, "--bits", "4", "-q", "edge_bit=4"], "did you mean edge_bits"),
        (["train", *TRAIN, "--bits", "4", "-q", "per_channel=1"], "true or false"),
        (["train", *TRAIN, "--bits", "4", "-q", "rule"], "KEY=VALUE"),
        (["train", *TRAIN, "--bits", "4", "--quant-delay", "900"], "delay=900, learning_starts="),
        (["train", *TRAIN, "--bits", "4", "-q", "bits=2"], "--bits"),
        (["train", *TRAIN, "--bits", "4", "-q", "delay=2"], "--quant-delay"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: Capsys
) -> None:
    assert words in refusal(capsys, *arguments, code=2)


def test_an_output_folder_that_cannot_be_written_is_named_before_training(
    tmp_path: Path, capsys: Capsys
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    line = refusal(capsys, "train", *TINY, "--root", str(blocked), code=1)
    assert "--root" in line
    assert blocked.read_text() == "not a folder"


def test_gate_lets_a_scheme_pass_or_exits_with_3(loose: Path, capsys: Capsys) -> None:
    artifact = loose / "int8.tflite"
    gate = [str(artifact), "--episodes", "5", "--gate", "10"]
    saved = evaluation_path(artifact)
    evaluation = json.loads(saved.read_text())
    reference = Evaluation.load(evaluation_path(loose / "fp32.tflite"))

    evaluation["returns"] = [value * 0.95 for value in reference.returns]
    saved.write_text(json.dumps(evaluation))
    assert verbs.main(["evaluate", *gate]) == 0

    # A mean loss of 6 %, which five episodes do not hold within 10 %.
    shares = (1, 0.85, 1, 0.85, 1)
    evaluation["returns"] = [v * s for v, s in zip(reference.returns, shares, strict=True)]
    saved.write_text(json.dumps(evaluation))
    assert verbs.main(["evaluate", *gate]) == 0
    assert "int8" in refusal(capsys, "evaluate", *gate, "--confident", code=3)

    evaluation["returns"] = [value * 0.8 for value in reference.returns]
    saved.write_text(json.dumps(evaluation))
    capsys.readouterr()
    assert "int8 20.00 %" in refusal(capsys, "evaluate", *gate, code=3)


def test_gate_does_not_hold_against_fp32_by_other_rules(loose: Path, capsys: Capsys) -> None:
    # As if it was too large to be kept: what an earlier version made of it cannot be made anew.
    reference = loose / "fp32.tflite"
    reference.unlink()
    saved = evaluation_path(reference)
    evaluation = Evaluation.load(saved)
    replace(evaluation, protocol=Protocol(0, "greedy")).save(saved)
    gate = [str(loose / "int8.tflite"), "--episodes", "5", "--gate", "1000"]
    assert "no fp32 result" in refusal(capsys, "evaluate", *gate, code=3)


@pytest.fixture
def stochastic(artifacts: Artifacts, tmp_path: Path) -> tuple[Path, str]:
    """Return a root with the fp32 and int8 flatbuffers of a policy that is a distribution."""
    run = Run("ppo", "CartPole-v1", 0)
    for name, scheme in (("balancer", "fp32"), ("balancer_int8", "int8")):
        artifact = Workspace(tmp_path).artifact(run.run_id, scheme)
        write_bytes(artifact, artifacts[name].read_bytes())
        sidecar = Sidecar.load(sidecar_path(artifacts[name]))
        described = {"run": run.to_dict(), "run_id": run.run_id, "scheme": scheme, "head": "logits"}
        described["preset"] = asdict(presets.load("ppo", "CartPole-v1"))
        replace(sidecar, **described).save(sidecar_path(artifact))
    return tmp_path, run.run_id


def test_gate_is_held_by_results_of_the_kind_asked_for(
    stochastic: tuple[Path, str], capsys: Capsys
) -> None:
    root, run_id = stochastic
    artifact = Workspace(root).artifact(run_id, "int8")
    evaluate = ["evaluate", str(artifact), "--episodes", "4"]
    assert verbs.main(evaluate) == verbs.main([*evaluate, "--sample"]) == 0

    def keep(share: float, chance: Chance) -> None:
        """Let int8 earn this share of what fp32 earned."""
        path = evaluation_path(artifact, chance)
        fp32 = evaluation_path(artifact.with_name("fp32.tflite"), chance)
        returns = [share * value for value in Evaluation.load(fp32).returns]
        replace(Evaluation.load(path), returns=returns).save(path)

    gate = [*evaluate, "--gate", "10"]
    for greedy, sampled, codes in ((0.95, 0.8, (0, 3)), (0.8, 0.95, (3, 0))):
        keep(greedy, GREEDY)
        keep(sampled, Chance("sampled"))
        assert (verbs.main(gate), verbs.main([*gate, "--sample"])) == codes
        assert "Received: int8 20.00 %" in capsys.readouterr().err


def test_dry_runs_name_the_files_of_sampled_evaluations(
    stochastic: tuple[Path, str], capsys: Capsys, tmp_path: Path
) -> None:
    run = ["--algo", "ppo", "--env", "CartPole-v1", "--schemes", "fp32"]
    root = ["--root", str(tmp_path / "new")]
    assert verbs.main(["run", *run, *root, "--sample", "--dry-run"]) == 0
    *_, evaluation, report = capsys.readouterr().out.splitlines()
    assert evaluation.endswith("CartPole-v1/ppo/s0/fp32.sampled.eval.json")
    assert report.endswith("reports/ppo-CartPole-v1-s0-sampled")
    there, run_id = stochastic
    plan = ["report", run_id, "--root", str(there), "--sample", "--dry-run"]
    assert "was not evaluated with sampled actions" in refusal(capsys, *plan, code=1)
    fp32 = Workspace(there).artifact(run_id, "fp32")
    assert verbs.main(["evaluate", str(fp32), "--episodes", "1", "--sample"]) == 0
    capsys.readouterr()
    assert verbs.main(plan) == 0
    assert capsys.readouterr().out.strip() == report.replace("/new/", "/")


@pytest.mark.parametrize(
    ("algo", "env_id"), [("dqn", "CartPole-v1"), ("ddpg", "MountainCarContinuous-v0")]
)
def test_what_will_be_no_distribution_is_refused_before_it_is_trained(
    algo: str, env_id: str, tmp_path: Path, capsys: Capsys
) -> None:
    arguments = ["run", "--algo", algo, "--env", env_id, "--sample", "--root", str(tmp_path)]
    line = refusal(capsys, *arguments, code=2)
    assert "leave out --sample" in line
    assert f"Policies of {algo}" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("env_id", "chance", "named"),
    [
        ("CartPole-v1", ["--sticky", "0.25"], "leave out --sticky. Received: .*'CartPole-v1'"),
        ("MountainCarContinuous-v0", ["--epsilon", "0.1"], "leave out --epsilon. Received: "),
        ("CartPole-v1", ["--epsilon", "1.5"], "above 0, at most 1: '1.5'"),
        ("CartPole-v1", ["--epsilon", "0.1", "--sample"], "not allowed with"),
    ],
)
def test_chance_that_cannot_be_is_refused_before_training(
    env_id: str, chance: list[str], named: str, tmp_path: Path, capsys: Capsys
) -> None:
    arguments = ["run", "--algo", "ppo", "--env", env_id, *chance, "--root", str(tmp_path)]
    assert re.search(named, refusal(capsys, *arguments, code=2))
    assert list(tmp_path.iterdir()) == []


def test_files_of_no_distribution_are_not_evaluated_by_sampled_actions(
    copy_artifact: Copy, capsys: Capsys
) -> None:
    path = copy_artifact("fp32")
    for more in ([], ["--dry-run"]):
        line = refusal(capsys, "evaluate", str(path), "--episodes", "3", "--sample", *more, code=2)
        assert "leave out --sample. Received: run_id='dqn-CartPole-v1-s0', head='q_values'" in line
    assert not list(path.parent.glob("*.eval.json"))


@pytest.mark.parametrize(
    ("verb", "options", "message"),
    [
        ("train", ["-p", "network=nature"], "network"),
        ("run", ["-p", "network=nature"], "network"),
        ("train", ["--bits", "4", "-p", "layer_norm=true"], "layer='hidden_0_norm'"),
    ],
)
def test_a_dry_run_refuses_what_training_would(
    verb: str, options: list[str], message: str, capsys: Capsys
) -> None:
    run = ["--algo", "dqn", "--env", "CartPole-v1", "--root", "nowhere", "--dry-run"]
    assert message in refusal(capsys, verb, *run, *options, code=2)


def test_an_old_id_is_translated_with_a_notice(capsys: Capsys) -> None:
    words = ["train", "--algo", "dqn", "--env", "LunarLander-v2", "--root", "nowhere", "--dry-run"]
    assert verbs.main(words) == 0
    shown = capsys.readouterr()
    assert "dqn-LunarLander-v3-s0" in shown.out
    assert "LunarLander-v2 is LunarLander-v3" in shown.err


@pytest.mark.parametrize(
    ("overrides", "here", "lacking"),
    [
        ([], "X with avx2", ["bfloat16"]),
        (["-p", "precision=float32"], "X with avx2", []),
        (["--precision", "float32"], "X with avx2", []),
        ([], "X with avx512_bf16", []),
        (["--precision", "float16"], "X with avx512_bf16", ["float16"]),
    ],
)
def test_a_precision_that_the_processor_lacks_is_told_of_before_training(
    overrides: list[str],
    here: str,
    lacking: list[str],
    capsys: Capsys,
    monkeypatch: Patch,
    tmp_path: Path,
) -> None:
    def train(*_: object) -> None:
        raise QuarlError("Not now.")

    monkeypatch.setattr(provenance, "processor", lambda: here)
    monkeypatch.setattr("quarl_tf.training.loop.train", train)
    game = ["--algo", "ppo", "--env", "BreakoutNoFrameskip-v4", "--root", str(tmp_path)]
    assert verbs.main(["train", *game, *overrides]) == 1
    assert re.findall(r"has no (\w+),", capsys.readouterr().err) == lacking


def test_evaluating_one_file_evaluates_the_reference_beside_it(loose: Path) -> None:
    for path in loose.glob("*.eval.json"):
        path.unlink()
    artifact = loose / "int8.tflite"
    assert verbs.main(["evaluate", str(artifact), "--episodes", "3", "--gate", "1000"]) == 0
    reference = Evaluation.load(evaluation_path(loose / "fp32.tflite"))
    evaluation = Evaluation.load(evaluation_path(artifact))
    assert evaluation.reference_sha256 == reference.artifact_sha256
    assert evaluation.agreement is not None


def test_a_lost_or_damaged_curve_is_fixed_by_export(finished: Finished) -> None:
    root, run_id = finished
    copy = finished.artifacts / "progress.csv"
    content = copy.read_bytes()
    copy.write_text("step\nnonsense")
    assert verbs.main(["export", run_id, *SCHEMES, "--root", str(root)]) == 0
    assert copy.read_bytes() == content


def test_inspect_shows_what_the_file_holds_and_when_it_is_not_its_sidecars(
    loose: Path, capsys: Capsys
) -> None:
    artifact = loose / "int8.tflite"
    assert verbs.main(["inspect", str(artifact)]) == 0
    shown = capsys.readouterr().out
    assert "FULLY_CONNECTED int8" in shown
    assert Sidecar.load(sidecar_path(artifact)).sha256 in shown
    shutil.copy(loose / "fp32.tflite", artifact)
    assert verbs.main(["inspect", str(artifact)]) == 0
    assert "does not match" in capsys.readouterr().out


def test_list_shows_presets_and_the_state_of_runs(
    finished: Finished, tmp_path: Path, capsys: Capsys
) -> None:
    root, run_id = finished
    (root / "runs" / ".study-mine").mkdir()
    assert verbs.main(["list", "--root", str(root)]) == 0
    shown = capsys.readouterr().out
    assert "study-mine" not in shown
    assert "CartPole-v1" in shown
    assert "qat_int8, qat_int4, and qat_wNaN for N = 2" in " ".join(shown.split())
    assert re.search(rf"{run_id}\W+yes\W+2\W+2\W+yes", shown)
    shutil.copytree(root / "tflite_models", tmp_path / "tflite_models")
    assert verbs.main(["list", "--root", str(tmp_path)]) == 0
    assert re.search(rf"{run_id}\W+no\W+2\W+2\W+no", capsys.readouterr().out)


def test_published_results_are_not_overwritten(
    finished: Finished, tmp_path: Path, capsys: Capsys
) -> None:
    root, run_id = finished
    shutil.copytree(root / "tflite_models", tmp_path / "tflite_models")
    at = ("--root", str(tmp_path))
    for verb in ("train", "run"):
        error = refusal(capsys, verb, *TINY, *at, code=1)
        assert "work elsewhere (--root DIR) or delete that folder" in error
    assert not (tmp_path / "runs" / run_id / "run.json").exists()
    assert "work elsewhere" in refusal(capsys, "train", *TINY, *at, "--dry-run", code=1)
    error = refusal(capsys, "export", run_id, *at, code=1)
    # What to do next, ready to be copied.
    command = re.search(r"train it first \(quarl (.+) --root DIR\)", error)
    assert command is not None
    parsed = arguments.build().parse_args(shlex.split(command[1]))
    assert parsed.overrides == [text for text in TINY if "=" in text]
    # Nor where it cannot be told what they are of.
    folder = Workspace(tmp_path).artifact_dir(run_id)
    (folder / "fp32.json").write_text("{}")
    (folder / "int8.json").unlink()
    assert "work elsewhere" in refusal(capsys, "train", *TINY, *at, code=1)


@pytest.mark.parametrize(
    ("given", "words", "code"),
    [
        (["--schemes", "qat_w4a4"], "can be exported as fp32", 2),
        (["--bits", "4", "--schemes", "fp32"], "can be exported as qat_int4, qat_w4a4", 2),
        (["--bits", "4"], "its plain reference, which comes first: quarl run --algo dqn", 1),
        (["--bits", "4", "-p", "layer_norm=true"], "(LayerNormalization)", 2),
    ],
)
def test_what_cannot_be_is_refused_before_it_is_trained(
    given: list[str], words: str, code: int, tmp_path: Path, capsys: Capsys
) -> None:
    for also in ([], ["--dry-run"]):
        error = refusal(capsys, "run", *TINY, *given, *also, "--root", str(tmp_path), code=code)
        assert words in error
    assert not any(tmp_path.iterdir())


def test_a_twin_whose_flatbuffer_was_not_kept_need_not_be_trained_anew(
    finished: Finished, tmp_path: Path, capsys: Capsys
) -> None:
    twin = Workspace(tmp_path).artifact_dir(finished.run_id)
    shutil.copytree(finished.artifacts, twin)
    (twin / "fp32.tflite").unlink()
    words = ["run", *TINY, "--bits", "4", "--root", str(tmp_path), "--dry-run"]
    assert verbs.main(words) == 0
    evaluation_path(twin / "fp32.tflite").unlink()
    assert "plain reference, which comes first" in refusal(capsys, *words, code=1)


def test_the_twin_to_train_first_is_a_command_to_be_copied(tmp_path: Path, capsys: Capsys) -> None:
    presets_file = tmp_path / "own.yaml"
    shipped = asdict(presets.load("dqn", "CartPole-v1"))
    shipped["network"] = list(shipped["network"])
    presets_file.write_text(json.dumps({"dqn": {"CartPole-v1": shipped}}))
    own = ["--import", "json", "--presets", str(presets_file), "--root", str(tmp_path)]
    error = refusal(capsys, "run", *TINY, *own, "--bits", "4", code=1)
    advised = re.search(r"comes first: quarl (.+)\. Received: ", error)
    assert advised is not None
    parsed = arguments.build().parse_args(shlex.split(advised[1]))
    assert (parsed.verb, parsed.bits, parsed.root) == ("run", None, tmp_path)
    assert (parsed.modules, parsed.presets) == (["json"], presets_file)
    assert parsed.overrides == [text for text in TINY if "=" in text]


def test_a_run_has_what_its_schemes_are_compared_with(capsys: Capsys) -> None:
    assert verbs.main(["run", *TINY, "--schemes", "int8", "--dry-run"]) == 0
    assert re.search(r"export .*fp32\.tflite\nexport .*int8\.tflite\n", capsys.readouterr().out)


def test_an_export_that_cannot_be_is_refused_by_a_dry_run(
    finished: Finished, capsys: Capsys
) -> None:
    root, run_id = finished
    words = ("export", run_id, "--schemes", "qat_w4a4", "--root", str(root), "--dry-run")
    assert "can be exported as fp32" in refusal(capsys, *words, code=2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "dqn-Nope-v1-s0"], "The run does not exist; train it first (quarl train"),
        (["evaluate", "nothing.tflite"], "nothing.tflite"),
        (["report", "dqn-Nope-v1-s0"], "dqn-Nope-v1-s0"),
    ],
)
def test_what_is_not_there_is_named_by_a_dry_run_too(
    words: list[str], said: str, tmp_path: Path, monkeypatch: Patch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    told = {refusal(capsys, *words, *also, code=1) for also in ([], ["--dry-run"])}
    assert len(told) == 1
    assert said in told.pop()
    assert "nowhere.tflite" in refusal(capsys, "inspect", "nowhere.tflite", code=1)


def test_checkpoints_that_a_killed_end_has_left_are_deleted(finished: Finished) -> None:
    root, run_id = finished
    left = root / "runs" / run_id / "checkpoints"
    left.mkdir()
    (left / "1200.npz").write_bytes(b"large")
    assert verbs.main(["train", *TINY, "--root", str(root)]) == 0
    assert not left.exists()


def test_narrow_terminals_show_whole_names_and_verdicts(
    finished: Finished, capsys: Capsys, monkeypatch: Patch
) -> None:
    paths = [str(finished.artifacts / f"{name}.tflite") for name in ("fp32", "int8")]
    shown = {}
    for width in (80, 130):
        monkeypatch.setattr(verbs, "_console", Console(width=width))
        assert verbs.main(["evaluate", *paths, "--episodes", "5"]) == 0
        shown[width] = capsys.readouterr().out
        assert max(map(len, shown[width].splitlines())) <= width
        assert re.search(r"int8 .* inconclusive", shown[width])
    assert "[95 %]" in shown[130]
    assert "[95 %]" not in shown[80]


def test_paths_are_shown_as_they_are_where_output_is_piped(
    finished: Finished, tmp_path: Path, capsys: Capsys
) -> None:
    root, run_id = finished
    # Longer than a line, and with what Rich would take for a colour.
    there = tmp_path / "[red]" / ("long" * 40)
    shutil.copytree(root, there)
    workspace = Workspace(there)
    artifact = workspace.artifact(run_id, "int8")
    shown = {}
    for words in (
        ["run", *TINY, *SCHEMES, "--episodes", "5", "--root", str(there)],
        ["inspect", str(artifact)],
        ["list", "--root", str(there / "empty")],
    ):
        assert verbs.main(words) == 0
        shown[words[0]] = capsys.readouterr().out
    assert f"trained   {workspace.run_dir(run_id)} " in shown["run"]
    assert f"exported  {workspace.artifact_dir(run_id)} " in shown["run"]
    assert f"report    {workspace.report_dir(run_id) / 'index.html'}\n" in shown["run"]
    assert shown["inspect"].startswith(f"{artifact}\n")
    assert f"no runs in {there / 'empty'}\n" in shown["list"]


def test_evaluate_says_what_it_takes(finished: Finished, tmp_path: Path, capsys: Capsys) -> None:
    folder = finished.artifacts
    assert "name a .tflite file" in refusal(capsys, "evaluate", str(folder), code=1)
    assert "int8.json" in refusal(capsys, "evaluate", str(folder / "int8.json"), code=1)
    lonely = tmp_path / "int8.tflite"
    shutil.copy(folder / "int8.tflite", lonely)
    assert "no sidecar int8.json" in refusal(capsys, "evaluate", str(lonely), code=1)


def test_without_a_terminal_long_work_says_how_far_it_is(
    capsys: Capsys, monkeypatch: Patch
) -> None:
    with display.progress_bar("train x") as update:
        update(1, 4000, "return 3")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(display, "_SECONDS_BETWEEN", 0.0)
    with display.progress_bar("train x") as update:
        update(2000, 4000, "return 3")
    assert capsys.readouterr().err == "train x: 2,000 of 4,000  return 3\n"


def test_who_has_read_enough_is_not_told_of_a_failure() -> None:
    command = [sys.executable, "-m", "quarl_tf.cli", "list"]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_doctor_shows_what_it_found_as_it_is(monkeypatch: Patch, capsys: Capsys) -> None:
    cause = "pip install '.[train]'"
    finding = doctor.Finding("Keras 2 is chosen", False, cause, "pip install tf-keras")
    monkeypatch.setattr(doctor, "examine", lambda: [finding])
    assert verbs.main(["doctor"]) == 1
    assert cause in capsys.readouterr().out


def test_doctor_finds_this_environment_sound(capsys: Capsys) -> None:
    assert verbs.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "tensorflow" in shown
    assert "Keras 2 is chosen" in shown


def test_training_that_was_cut_off_goes_on_and_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quarl_tf.cli", "train", *TINY, "-p", "steps=4000"]
    whole = tmp_path / "whole"
    subprocess.run([*command, "--root", str(whole)], check=True)
    for sent, codes in ((signal.SIGINT, (130, 0)), (signal.SIGKILL, (-signal.SIGKILL,))):
        cut = tmp_path / sent.name
        process = subprocess.Popen([*command, "--root", str(cut)])
        deadline = time.monotonic() + 120
        while not list(cut.glob("runs/*/checkpoints/*.npz")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.5))  # In a burst, a rollout or a file.
        process.send_signal(sent)
        assert process.wait() in codes
        subprocess.run([*command, "--root", str(cut)], check=True)
        (left,), (right,) = whole.glob("runs/*"), cut.glob("runs/*")
        assert products(left) == products(right)
