import errno
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
from unittest.mock import Mock

import pytest
import samples
from rich.console import Console
from samples import MODELS, Capsys, Patch, copied, printed, products, python, refusal, snapshot

from quarl_tf.cli import arguments, doctor, verbs
from quarl_tf.export.graph import Graph
from quarl_tf.foundation import display, provenance
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.files import sha256
from quarl_tf.spec import DEFAULT_SCHEMES, GREEDY, Chance
from quarl_tf.store.records import Evaluation, Sidecar
from quarl_tf.store.workspace import Workspace, evaluation_path, reference_path, sidecar_path

DQN, PPO = "--algo dqn --env CartPole-v1", "--algo ppo --env CartPole-v1"
CAR = "--env MountainCarContinuous-v0"
TRAIN = DQN.split()
TINY, RUN_ID = shlex.split(samples.TINY.command("train"))[2:], samples.TINY.run_id
SCHEMES = ["--schemes", "fp32,int8"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Run everything once."""
    root = tmp_path_factory.mktemp("root")
    assert verbs.main(["run", *TINY, *SCHEMES, "--episodes", "5", "--root", str(root)]) == 0
    return Workspace(root)


def test_a_run_becomes_c(finished: Workspace, capsys: Capsys) -> None:
    words = ["export", RUN_ID, "--target", "c", "--root", str(finished.root)]
    assert f"wrote     {finished.artifact_dir(RUN_ID)}/int8.c  (flash: " in printed(capsys, *words)
    assert "FULLY_CONNECTED float32" in refusal(capsys, *words, "--schemes", "fp32")


def test_a_second_run_redoes_nothing_and_does_not_load_tensorflow(finished: Workspace) -> None:
    root = finished.root
    folders = root / "runs", root / "tflite_models"
    pages = [finished.report_dir(RUN_ID) / name for name in ("index.html", "report.md")]
    before = [*map(snapshot, folders), *(page.read_bytes() for page in pages)]
    words = ["run", *TINY, *SCHEMES, "--episodes", "5", "--root", str(root)]
    code = "import sys; from quarl_tf.cli import verbs; "
    code += f"assert verbs.main({words!r}) == 0; assert 'tensorflow' not in sys.modules"
    completed = python("-c", code)
    assert [*map(snapshot, folders), *(page.read_bytes() for page in pages)] == before
    assert str(pages[0]) in completed.stdout.replace("\n", "")


@pytest.fixture(scope="module")
def aware(finished: Workspace) -> str:
    """Run at four bits beside the plain training; return the id."""
    arguments = [*TINY, "--bits", "4", "--quant-delay", "300", "--episodes", "5"]
    assert verbs.main(["run", *arguments, "--root", str(finished.root)]) == 0
    (folder,) = finished.root.glob(f"runs/{RUN_ID}-q4d300-*")  # A DQN's ranges follow.
    return folder.name


def test_a_run_with_bits_is_compared_with_the_plain_one_on_the_same_episodes(
    finished: Workspace, aware: str, monkeypatch: Patch, capsys: Capsys
) -> None:
    folder = finished.artifact_dir(aware)
    assert [path.name for path in folder.glob("*.tflite")] == ["qat_w4a4.tflite"]
    assert not (folder / "random.eval.json").exists()  # It is beside the plain run.
    artifact, reference = folder / "qat_w4a4.tflite", finished.artifact(RUN_ID, "fp32")
    assert reference_path(artifact, Sidecar.load(sidecar_path(artifact))) == reference
    evaluation, baseline = (Evaluation.load(evaluation_path(p)) for p in (artifact, reference))
    assert evaluation.seeds == baseline.seeds[:5]
    assert evaluation.reference_sha256 == sha256(reference)
    assert "qat_w4a4" in (finished.report_dir(aware) / "report.md").read_text()
    (folder / "inner").mkdir()  # From within its folder, too.
    before = snapshot(folder)
    for inside, place in ((folder, "."), (folder / "inner", "..")):
        monkeypatch.chdir(inside)
        words = ["evaluate", f"{place}/qat_w4a4.tflite", "--episodes", "5", "--gate", "1000"]
        assert f"{aware}: 5 episodes" in printed(capsys, *words)
    assert snapshot(folder) == before


def test_a_run_is_exported_by_one_process_alone(finished: Workspace, capsys: Capsys) -> None:
    before = snapshot(finished.root)
    words = ["run", *TINY, "--episodes", "7", "--root", str(finished.root)]
    with finished.working_on(RUN_ID):
        assert "Another process works on this run" in refusal(capsys, *words, code=4)
    assert snapshot(finished.root) == before


def test_a_run_is_released(finished: Workspace, aware: str, tmp_path: Path, capsys: Capsys) -> None:
    artifact, fp32 = finished.artifact(aware, "qat_w4a4"), finished.artifact(RUN_ID, "fp32")
    for path in (artifact, sidecar_path(artifact), fp32):
        shutil.copy(path, tmp_path)
    gate = ["evaluate", str(tmp_path / artifact.name), "--episodes", "5", "--gate", "1000"]
    line = refusal(capsys, *gate, code=3)
    assert f"expected at {tmp_path.parent / 's0'}" in line
    assert f"quarl export {RUN_ID} --schemes fp32" in line
    shutil.copy(sidecar_path(fp32), tmp_path)
    printed(capsys, *gate)
    names = {path.name for path in tmp_path.glob("*.eval.json")}
    assert names == {"qat_w4a4.eval.json", "fp32.eval.json", "random.eval.json"}
    before = snapshot(tmp_path)
    printed(capsys, *gate)
    assert snapshot(tmp_path) == before
    (tmp_path / "fp32.tflite").unlink()  # Its evaluation, of five episodes, stays.
    gate[3] = "6"
    assert "give --episodes 5" in refusal(capsys, *gate, code=3)


def test_bits_need_their_plain_run(finished: Workspace, tmp_path: Path, capsys: Capsys) -> None:
    preset = asdict(samples.PRESET) | {"learning_rate": 0.5}
    file = samples.write_presets(tmp_path / "own.yaml", "dqn", "CartPole-v1", preset)
    words = ["run", *TINY, "--bits", "4", "--presets", str(file), "--root", str(finished.root)]
    assert "learning_rate=0.5 for " in refusal(capsys, *words, code=1)


def test_dry_run_names_every_file_and_makes_none(tmp_path: Path, capsys: Capsys) -> None:
    root = tmp_path / "root"
    words = ["run", *TRAIN, "--dry-run", "--root", str(root)]
    lines = printed(capsys, *words).splitlines()
    verbs_of_schemes = [verb for verb in ("export", "evaluate") for _ in DEFAULT_SCHEMES]
    assert [line.split()[0] for line in lines] == ["train", *verbs_of_schemes, "report"]
    output = printed(capsys, *words, "--schemes", "int8")  # The reference of a scheme comes first.
    assert re.search(r"export .*fp32\.tflite\nexport .*int8\.tflite\n", output)
    words = ["run", *PPO.split(), "--schemes", "fp32", "--sample", "--dry-run", "--root", str(root)]
    *_, evaluation, report = printed(capsys, *words).splitlines()
    assert evaluation.endswith("CartPole-v1/ppo/s0/fp32.sampled.eval.json")
    assert report.endswith("reports/ppo-CartPole-v1-s0-sampled")
    task = ["train", *TRAIN, "--root", str(root), "--dry-run"]
    spellings = (["--until", "475"], ["--until", "475.0"], ["-p", "until=475"])
    assert len({printed(capsys, *task, *options) for options in spellings}) == 1  # One run.
    assert not root.exists()


def test_a_dry_run_leaves_out_what_is_done(finished: Workspace, capsys: Capsys) -> None:
    words = ["run", *TINY, *SCHEMES, "--dry-run", "--root", str(finished.root), "--episodes"]
    assert printed(capsys, *words, "5").split()[0] == "report"
    lines = printed(capsys, *words, "500").splitlines()
    assert {line.split()[0] for line in lines} == {"evaluate", "report"}


def test_the_help_of_a_verb_has_a_sound_example(capsys: Capsys, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for verb in ("run", "train", "export", "evaluate", "report", "inspect"):
        with pytest.raises(SystemExit, match="0"):
            verbs.main([verb, "-h"])
        (example,) = re.findall(r"example: quarl (.+)", capsys.readouterr().out)
        assert arguments.build().parse_args(example.split()).verb == verb


@pytest.mark.parametrize(
    ("words", "trained"),
    [
        ("train LunarLander-v2", "ppo-LunarLander-v3-s0"),  # The most robust algorithm.
        ("run LunarLander-v2", "ppo-LunarLander-v3-s0"),
        # Half of training is plain.
        ("train CartPole-v1 --bits 4 -p steps=60000", r"ppo-CartPole-v1-s0-\w{8}-q4d30000\b"),
    ],
)
def test_defaults_are_the_usual_ones(words: str, trained: str, capsys: Capsys) -> None:
    assert verbs.main([*words.split(), "--root", "nowhere", "--dry-run"]) == 0
    output, told = capsys.readouterr()
    assert re.search(trained, output)
    assert ("LunarLander-v2 is now LunarLander-v3" in told) == ("-v2" in words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fly"], "invalid choice"),
        (["evaluate", "a.tflite", "--root", "mine"], "quarl evaluate -h. Received: --root mine"),
        (["evaluate", "/data/int8"], "'/data/int8'"),
        (["export", "CartPole-v1/dqn/int8"], "add --target c"),
        (["export", "a.tflite", "--target", "c", "--schemes", "fp16"], "leave out --schemes"),
        (["train", "--algo", "dqn", "--env", "MountainCar-v0"], "preset"),
        (["train", *TRAIN, "-p", "steps"], "KEY=VALUE"),
        (["train", *TRAIN, "-p", "steps=[1"], "steps=[1"),
        (["export", "dqn-CartPole-v1-s0", "--schemes", ","], "at least one scheme"),
        (["run", *TRAIN, "--gate", "nan"], "--gate: expected a percentage of 0 or more"),
        (["evaluate", "x.tflite", "--confident"], "add --gate"),
        (["evaluate", "x.tflite", "--episodes", "0"], "a whole number above 0. Received: '0'"),
        (["study", "run", "studies/li.yaml", "--gather"], "Engine local has no option --gather"),
        (["study", "run", "x.yaml", "--shard", "3/2"], "from 1 to N: '3/2'"),
        (["train", *TRAIN, "--quant-delay", "9"], "add --bits N. Received: quant_delay=9"),
        (["train", *TRAIN, "--bits", "4", "-q", "per_channel=1"], "true, false or few"),
        (["train", *TRAIN, "--bits", "4", "--quant-delay", "900"], "delay=900, learning_starts="),
        (["train", *TRAIN, "--bits", "4", "-q", "bits=2"], "--bits"),
    ],
)
def test_wrong_use_is_one_line_and_code_2(arguments: list[str], words: str, capsys: Capsys) -> None:
    assert words in refusal(capsys, *arguments, code=2)


def test_unfit_folders_are_one_line(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert "Cannot write" in refusal(capsys, "train", *TINY, "--root", str(blocked), code=1)
    closed = PermissionError(errno.EACCES, "Permission denied", "/closed")
    monkeypatch.setattr(verbs.shelf, "available", Mock(side_effect=closed))
    assert "(Permission denied); change its permissions" in refusal(capsys, "list", code=1)


def test_gate_goes_by_results_of_its_kind_or_exits_with_3(tmp_path: Path, capsys: Capsys) -> None:
    for scheme in ("fp32", "int8"):
        artifact = copied(MODELS / f"CartPole-v1/ppo/s0/{scheme}.tflite", tmp_path)
    gate = ["evaluate", str(artifact), "--episodes", "5", "--gate"]
    fp32 = str(artifact.with_name("fp32.tflite"))
    assert "name another scheme" in refusal(capsys, "evaluate", fp32, *gate[2:], "1000")
    assert verbs.main([*gate, "1000"]) == verbs.main([*gate, "1000", "--sample"]) == 0
    for greedy, sampled, options, code in (
        ([0.95] * 5, [0.8] * 5, [], 0),
        ([0.95] * 5, [0.8] * 5, ["--sample"], 3),
        ([0.8] * 5, [0.95] * 5, [], 3),
        ([0.8] * 5, [0.95] * 5, ["--sample"], 0),
        # A mean loss of 6 %, which five episodes do not hold within 10 %.
        ([1, 0.85, 1, 0.85, 1], [1] * 5, [], 0),
        ([1, 0.85, 1, 0.85, 1], [1] * 5, ["--confident"], 3),
        ([1] * 5, [1] * 5, ["--confident"], 3),  # Five equal ones have no interval.
    ):
        for shares, chance in ((greedy, GREEDY), (sampled, Chance("sampled"))):
            path = evaluation_path(artifact, chance)
            # The reference beside it was evaluated with it.
            fp32 = Evaluation.load(path.with_name(path.name.replace("int8", "fp32")))
            int8 = Evaluation.load(path)
            assert int8.reference_sha256 == fp32.artifact_sha256
            assert int8.agreement is not None
            returns = [value * share for value, share in zip(fp32.returns, shares, strict=True)]
            replace(int8, returns=returns).save(path)
        assert verbs.main([*gate, "10", *options]) == code
        assert ("int8" in (error := capsys.readouterr().err)) == (code == 3)
        assert ("Received: int8 20.00 %" in error) == (code == 3 and options != ["--confident"])
        assert ("no interval" in error) == (greedy == [1] * 5)
        assert "inf %" not in error
    for name in ("int8", "fp32"):  # Who earns nothing loses nothing.
        path = evaluation_path(artifact.with_name(f"{name}.tflite"))
        replace(Evaluation.load(path), returns=[0.0] * 5).save(path)
    assert verbs.main([*gate, "10"]) == 0


def test_slow_precision_is_told_of(capsys: Capsys, monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr("quarl_tf.training.loop.train", Mock(side_effect=QuarlError("Not now.")))
    game = ["train", "--algo", "ppo", "--env", "BreakoutNoFrameskip-v4", "--root", str(tmp_path)]
    for extension, options, told in (
        ("avx2", [], True),
        ("avx512_bf16", [], False),
        ("avx2", ["--precision", "float32"], False),
    ):
        monkeypatch.setattr(provenance, "processor", lambda best=extension: f"X with {best}")
        assert verbs.main([*game, *options]) == 1
        line = capsys.readouterr().err
        assert ("slower in it than in float32; to train in float32 give" in line) == told


def test_a_damaged_curve_and_what_a_killed_end_has_left_are_put_right(finished: Workspace) -> None:
    root, copy = finished.root, finished.artifact_dir(RUN_ID) / "progress.csv"
    checkpoints, content = finished.run_dir(RUN_ID) / "checkpoints", copy.read_bytes()
    copy.write_text("step\nnonsense")
    checkpoints.mkdir()
    (checkpoints / "1200.npz").write_bytes(b"large")
    words = ["run", *TINY, *SCHEMES, "--episodes", "5", "--no-report", "--root", str(root)]
    assert verbs.main(words) == 0
    assert copy.read_bytes() == content
    assert not checkpoints.exists()


def test_inspect_tells_parts_and_flaws(finished: Workspace, tmp_path: Path, capsys: Capsys) -> None:
    loose = Path(shutil.copytree(finished.artifact_dir(RUN_ID), tmp_path / "loose"))
    artifact = loose / "int8.tflite"
    for text in ("FULLY_CONNECTED int8", Sidecar.load(sidecar_path(artifact)).sha256, "not match"):
        if text == "not match":
            shutil.copy(loose / "fp32.tflite", artifact)
        assert text in printed(capsys, "inspect", str(artifact))
    graph = Graph((loose / "fp32.tflite").read_bytes())
    graph.tensors[graph.inputs[0]].name = b"state[/a]"  # Which Rich takes for markup.
    artifact.write_bytes(graph.pack())
    assert "state[/a]" in printed(capsys, "inspect", str(artifact))


def test_list_shows_presets_and_runs(
    finished: Workspace, tmp_path: Path, capsys: Capsys, monkeypatch: Patch
) -> None:
    root = finished.root
    monkeypatch.chdir(root)
    models = Path(shutil.copytree(root / "tflite_models", tmp_path / "tflite_models"))
    for folder, answer in ((root, "yes"), (tmp_path, "no")):
        output = printed(capsys, "list", "--root", str(folder))
        assert re.search(rf"{RUN_ID}\W+{answer}\W+2\W+2\W", output)
        assert "qat_int8, qat_int4, and qat_wNaN for N = 2" in " ".join(output.split())
    next(models.glob("*/*/*/fp32.eval.json")).write_text("{")  # A damaged one hides no policy.
    monkeypatch.chdir(tmp_path)
    assert "CartPole-v1/dqn/fp32" in printed(capsys, "list")


def test_published_results_are_kept(finished: Workspace, tmp_path: Path, capsys: Capsys) -> None:
    shutil.copytree(finished.root / "tflite_models", tmp_path / "tflite_models")
    task = (*TINY, "--root", str(tmp_path))
    for words in (("train", *task), ("train", *task, "--dry-run")):
        assert "elsewhere (--root DIR) or delete" in refusal(capsys, *words, code=1)
    Workspace(tmp_path).artifact(RUN_ID, "int8").unlink()
    words = ("run", *task, "--episodes", "5", "--schemes")
    assert "trained elsewhere" in printed(capsys, *words, "int8,ptq_w4")
    copies = [Workspace(tmp_path).artifact(RUN_ID, scheme) for scheme in ("int8", "ptq_w4")]
    # A result stands without its file, a missing one is made of fp32.
    assert [path.exists() for path in copies] == [False, True]
    assert evaluation_path(copies[1]).exists()
    for options in (["dynamic_int8"], ["dynamic_int8", "--dry-run"]):
        assert "run='dqn-C" in refusal(capsys, *words, *options, code=1)
    assert not (tmp_path / "runs" / RUN_ID / "run.json").exists()
    words = ("export", RUN_ID, *task[-2:], "--schemes", "dynamic_int8")
    assert "--schemes dynamic_int8 --root DIR" in refusal(capsys, *words, code=1)
    for path in tmp_path.glob("tflite_models/*/*/*/*.tflite"):  # May be deleted once evaluated.
        path.unlink()
    assert verbs.main(["run", *task, "--bits", "3", "--dry-run"]) == 0
    assert "--root DIR" in refusal(capsys, "export", RUN_ID, *task[-2:], code=1)
    assert "verdict" in printed(capsys, "run", *task, "--episodes", "5", "--no-report")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (f"run {DQN} --schemes qat_w4a4", "can be exported as fp32"),
        (f"run {DQN} --bits 4 -p layer_norm=true", "(LayerNormalization)"),
        (f"train {DQN} --bits 4 -p layer_norm=true", "layer='hidden_0_norm'"),
        (f"run {DQN} -p network=nature", "network"),
        (f"run {DQN} -p byte_zero=87", "scale observations of bytes"),
        (f"run {DQN} --schemes ptq_w4-hiden_0=8", "did you mean hidden_0"),
        (f"run {DQN} --sample", "Policies of dqn are no distribution to sample actions from"),
        (f"run {PPO} --sticky 0.25", "leave out --sticky. Received: environment='CartPole-v1'"),
        (f"run --algo ppo {CAR} --epsilon 0.1", "leave out --epsilon. Received: "),
        (f"run {PPO} --epsilon 0.1 --sample", "not allowed with"),
        (f"run {PPO} CartPole-v1", "Received: ENV='CartPole-v1', --env='CartPole-v1'"),
        (f"train {PPO} --delay 600", "Received: --delay"),
        (f"train {PPO} --until 490 -p until=20", "Received: --until 490, -p until=20"),
    ],
)
def test_what_cannot_be_is_refused(words: str, text: str, tmp_path: Path, capsys: Capsys) -> None:
    for options in ([], ["--dry-run"]):
        assert text in refusal(capsys, *words.split(), *options, "--root", str(tmp_path))
    assert not any(tmp_path.iterdir())


def test_the_reference_to_train_first_is_a_command_to_copy(tmp_path: Path, capsys: Capsys) -> None:
    cell = "dqn", "CartPole-v1", asdict(samples.PRESET)
    presets_file = samples.write_presets(tmp_path / "own.yaml", *cell)
    options = ["--import", "json", "--presets", str(presets_file), "--root", str(tmp_path)]
    error = refusal(capsys, "run", *TINY, *options, "--bits", "4", code=1)
    (advised,) = re.findall(r"comes first: quarl (.+)\. Received: ", error)
    parsed = arguments.build().parse_args(shlex.split(advised))
    assert (parsed.verb, parsed.bits, parsed.workspace.root) == ("run", None, tmp_path)
    assert (parsed.modules, parsed.presets) == (["json"], presets_file)
    assert parsed.overrides == [text for text in TINY if "=" in text]


def test_a_report_says_what_it_lacks(finished: Workspace, tmp_path: Path, capsys: Capsys) -> None:
    shutil.copytree(finished.root, tmp_path, dirs_exist_ok=True)
    Workspace(tmp_path).artifact(RUN_ID, "int8").with_suffix(".json").write_text("")
    words = ["report", "--root", str(tmp_path)]
    assert verbs.main([*words, RUN_ID]) == 0
    assert "experiments without a result: 1; " in capsys.readouterr().err
    assert "run='dqn-CartPole-v1-s9'" in refusal(capsys, *words, "dqn-CartPole-v1-s9", code=1)
    for verb in ("evaluate", "inspect"):
        assert "'no.tflite'" in refusal(capsys, verb, "no.tflite", code=1)


def test_a_full_disk_behind_the_output_is_one_line_and_a_reader_that_has_left_none() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "wb") as full, os.fdopen(writer, "wb") as left:
        for verb, output, code in (("list", full, 1), ("doctor", left, 128 + signal.SIGPIPE)):
            words = [sys.executable, "-m", "quarl_tf.cli", verb]
            process = subprocess.run(words, check=False, stdout=output, stderr=subprocess.PIPE)
            lines = len(process.stderr.splitlines())
            assert (process.returncode, lines) == (code, output is full)


def test_piped_paths_are_as_they_are(finished: Workspace, tmp_path: Path, capsys: Capsys) -> None:
    # Longer than a line, and with what Rich would take for a colour.
    root = tmp_path / "[red]" / ("long" * 40)
    artifact = Path(shutil.copytree(finished.artifact_dir(RUN_ID), root)) / "int8.tflite"
    assert printed(capsys, "inspect", str(artifact)).startswith(f"{artifact}\n")
    empty = root / "empty"
    assert f"no runs in {empty}\n" in printed(capsys, "list", "--root", str(empty))


def test_without_a_terminal_long_work_says_how_far(capsys: Capsys, monkeypatch: Patch) -> None:
    for pause, output in ((60.0, ""), (0.0, "train x: 2,000 of 4,000  return 3\n")):
        monkeypatch.setattr(display, "_SECONDS_BETWEEN", pause)
        with display.progress_bar("train x") as update:
            update(2000, 4000, "return 3")
        assert capsys.readouterr().err == output


def test_no_terminal_cuts_a_number(finished: Workspace, capsys: Capsys, monkeypatch: Patch) -> None:
    paths = [str(finished.artifact(RUN_ID, name)) for name in ("fp32", "int8")]
    for width in (80, 130):
        monkeypatch.setattr(verbs, "_console", Console(width=width))
        output = printed(capsys, "evaluate", *paths, "--episodes", "5")
        assert max(map(len, output.splitlines())) <= width
        assert re.search(r"int8 .* inconclusive", output)
        assert "…" not in output


def test_doctor_tells_what_is_sound_and_what_is_not(monkeypatch: Patch, capsys: Capsys) -> None:
    assert "tensorflow" in printed(capsys, "doctor")
    others = dict.fromkeys(("jinja2", "tensorflow", "pygame-ce", "rich"), "1")
    versions = others | {doctor.PACKAGE: "0"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    packages = {finding.package for finding in doctor.examine()}
    assert "numpy" in packages
    assert not packages & {"pygame-ce", "seaborn", "tf-agents"}  # Nor of extras that are not there.
    # What an extra lacks is told where some of it is there.
    versions["tensorflow-model-optimization"] = "0.8.1"
    assert any(f.package == "tf-agents" and f.remedy for f in doctor.examine())
    finding = doctor.Finding("tf-keras", "2.20.0", "pip install 'tf-keras>=2.21'")
    monkeypatch.setattr(doctor, "examine", lambda: [finding])
    assert verbs.main(["doctor"]) == 1
    assert finding.remedy in capsys.readouterr().out


def test_training_that_was_cut_off_goes_on_and_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    task, uncut = ["train", *TINY, "-p", "steps=4000", "--root"], tmp_path / "uncut"
    assert verbs.main([*task, str(uncut)]) == 0
    for sent, codes in ((signal.SIGINT, (130, 0)), (signal.SIGKILL, (-signal.SIGKILL, 0))):
        cut = tmp_path / sent.name
        process = subprocess.Popen([sys.executable, "-m", "quarl_tf.cli", *task, str(cut)])
        deadline = time.monotonic() + 120
        while not list(cut.glob("runs/*/checkpoints/*.npz")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.5))  # In a burst, a rollout or a file.
        process.send_signal(sent)
        assert process.wait() in codes
        assert verbs.main([*task, str(cut)]) == 0
        (expected,), (actual,) = uncut.glob("runs/*"), cut.glob("runs/*")
        assert products(expected) == products(actual)
