"""Policies that others trained become runs after they have played, or are refused."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf
from conftest import Network
from samples import Artifacts, Capsys, Patch, printed, python, refusal, refused

from quarl_tf import Policy, Run
from quarl_tf.cli import main
from quarl_tf.export import adopt as adopting
from quarl_tf.export.converter import converted, of_function
from quarl_tf.foundation import processes
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.files import sha256
from quarl_tf.store.records import Evaluation, Sidecar
from quarl_tf.store.workspace import evaluation_path, sidecar_path

LOGITS = "--env CartPole-v1 --head logits"
MINE = (*LOGITS.split(), "--name", "mine")
FOLDER = Path("tflite_models/CartPole-v1/adopted/s0-mine")
RUN = "adopted-CartPole-v1-s0-mine"
pytestmark = pytest.mark.usefixtures("kept_pool")


@pytest.fixture
def file(artifacts: Artifacts, tmp_path: Path, monkeypatch: Patch) -> Path:
    """Return a flatbuffer without a sidecar, in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(artifacts["balancer"], "policy.tflite")
    return Path("policy.tflite")


def describe(file: Path, **values: Any) -> None:
    sidecar_path(file).write_text(json.dumps(values))


def test_a_file_becomes_a_run_that_is_quantised_and_reported(file: Path, capsys: Capsys) -> None:
    words = ("adopt", str(file), *MINE, "--schemes", "int8,ptq_w4", "--episodes", "5")
    assert RUN in printed(capsys, *words, "--gate", "100")
    assert (FOLDER / "fp32.tflite").read_bytes() == file.read_bytes()
    usual = "fp32", "fp16", "int8", *(f"ptq_w{n}" for n in range(8, 1, -1))
    for scheme in ("fp32", "int8", "ptq_w4"):
        run = Run.from_dict(Policy.load(FOLDER / f"{scheme}.tflite").sidecar.run)
        assert (run.run_id, run.adopted, run.overrides["head"]) == (RUN, True, "logits")
        assert run.default_schemes == usual  # Those without a training.
        assert len(Evaluation.load(evaluation_path(FOLDER / f"{scheme}.tflite")).seeds) == 5
    assert Sidecar.load(FOLDER / "fp32.json").check["observations"] > 100
    assert main(["export", RUN, "--schemes", "fp32,ptq_w3"]) == 0  # As for any other run.
    words = "quantize", str(FOLDER / "fp32.tflite"), "--scheme", "ptq_w2"
    assert "\nquantised " in printed(capsys, *words)
    assert printed(capsys, *words).startswith("kept ")
    assert main(["evaluate", "CartPole-v1/adopted/ptq_w3", "--episodes", "5"]) == 0
    assert RUN in printed(capsys, "list")
    assert main(["report", RUN]) == 0
    page = Path(f"reports/{RUN}/report.md").read_text()
    command = "quarl adopt FILE --env CartPole-v1 --seed 0 --name mine --head logits"
    assert f"{command} --schemes fp32,int8,ptq_w4,ptq_w3,ptq_w2 --episodes 5" in page
    content = (FOLDER / "int8.tflite").read_bytes()
    assert main([*words]) == 0
    assert (FOLDER / "int8.tflite").read_bytes() == content


def test_a_policy_without_layers_is_not_quantised(file: Path, capsys: Capsys) -> None:
    file.write_bytes(converted(of_function(lambda x: 2 * x[:, :2], (4,), "float32")))
    words = ["--env", "CartPole-v1", "--head", "q_values", "--name", "mine", "--episodes", "1"]
    line = refusal(capsys, "adopt", str(file), *words, "--schemes", "int8,fp32")
    assert "nothing to quantise" in line
    assert evaluation_path(FOLDER / "fp32.tflite").exists()  # The other scheme is evaluated.
    for scheme in ("int8", "ptq_opt_w8a8", "ptq_w4"):
        line = refusal(capsys, "quantize", str(FOLDER / "fp32.tflite"), "--scheme", scheme)
        assert "nothing to quantise" in line


def test_sidecars_give_missing_options(artifacts: Artifacts, file: Path, capsys: Capsys) -> None:
    fields = {"env_id": "CartPole-v1", "head": "q_values", "observation_shape": [4]}
    unbounded = {"action_low": None, "action_high": None, "action_std": []}
    describe(file, num_actions=2, **fields, **unbounded)
    assert "adopt it (quarl adopt)" in refusal(capsys, "evaluate", str(file), code=1)
    printed(capsys, "adopt", str(file), "--episodes", "1")
    assert "can be adopted" in printed(capsys, "inspect", str(file))
    shutil.copy(artifacts["int8"], file.with_name("lone.tflite"))
    assert "needs the .json" in printed(capsys, "inspect", str(file.with_name("lone.tflite")))
    (folder,) = Path("tflite_models/CartPole-v1/adopted").iterdir()
    sidecar = Sidecar.load(folder / "fp32.json")
    assert (sidecar.head, folder.name) == ("q_values", f"s0-{sidecar.sha256[:12]}")
    assert sidecar.action_std is None
    assert main(["adopt", str(file), *MINE, "--episodes", "1"]) == 0
    assert Sidecar.load(FOLDER / "fp32.json").head == "logits"
    shutil.copy(artifacts["steering"], file)  # Continuous actions keep their deviation.
    describe(file, action_low=[-1], action_high=[1.0], action_std=[0.5])
    words = ("--env", "MountainCarContinuous-v0", "--head", "action", "--name", "car")
    assert main(["adopt", str(file), *words, "--episodes", "1"]) == 0
    path = Path("tflite_models/MountainCarContinuous-v0/adopted/s0-car/fp32.tflite")
    assert Policy.load(path).sidecar.action_std == [0.5]


@pytest.mark.parametrize(
    ("fields", "words", "message"),
    [
        ({}, "--env CartPole-v1", "Received: env='CartPole-v1', head=None"),
        ({}, "--env CartPole-v1 --head action", "choose from logits, q_values."),
        ({}, "--env LunarLander-v3 --head logits", "one input, float32 [1, 8], and one"),
        ({}, f"{LOGITS} --name a/b", "Received: name='a/b'"),
        ({}, f"{LOGITS} --name mine --schemes qat_int8", "can be exported as fp32, fp16, int8"),
        ({}, f"{LOGITS} --name mine --schemes dynamic_int8", "Received: scheme='dynamic_int8'"),
        ({"action_std": [0.5]}, LOGITS, "Received: action_std=[0.5]"),
        ({"action_low": [-1e300]}, LOGITS, "expected None"),
        ({"scheme": "fp32"}, LOGITS, "a policy of this package already"),
        ({"sha256": "0"}, LOGITS, "flatbuffer or environment than these. Received: sha256"),
        ({"heads": "logits"}, LOGITS, "Received: fields that differ heads"),
    ],
)
def test_unfit_options_and_sidecars_are_refused(
    file: Path, capsys: Capsys, fields: dict[str, Any], words: str, message: str
) -> None:
    if fields:
        describe(file, **fields)
    assert message in refusal(capsys, "adopt", str(file), *words.split())
    assert not Path("tflite_models").exists()


def test_only_floats_are_adopted(artifacts: Artifacts, file: Path, capsys: Capsys) -> None:
    shutil.copy(artifacts["int8"], "other.tflite")
    assert "constants of int8" in refusal(capsys, "adopt", "other.tflite", *MINE)
    assert "No such file" in refusal(capsys, "adopt", "none.tflite", *MINE, code=1)
    for name, advice in (
        ("model.zip", "convert it with examples/from_sb3.py"),
        ("policy.onnx", "convert the PyTorch module with litert_torch"),
        ("policy.pt", "convert the PyTorch module with litert_torch"),
        ("saved_model.pb", "name its folder"),
        ("POLICY.H5", "rename it to end in .h5"),
    ):
        Path(name).write_bytes(b"of others")
        assert advice in refusal(capsys, "adopt", name, *MINE)
    for name in ("text.keras", "text.h5"):
        assert "No such file" in refusal(capsys, "adopt", name, *MINE, code=1)
        Path(name).write_text("text")
        assert f"{name} is truncated" in refusal(capsys, "adopt", name, *MINE, code=1)
    shutil.copy(artifacts["fp16"], file)
    describe(file, sha256=sha256(file))
    printed(capsys, "adopt", str(file), *MINE, "--schemes", "fp16,int8", "--episodes", "1")
    fp32, fp16 = (Policy.load(FOLDER / f"{name}.tflite").sidecar for name in ("fp32", "fp16"))
    assert "float16" not in fp32.tensor_dtypes
    assert fp16.weight_dtypes["float16"] > 0.99 * sum(fp32.weight_dtypes.values())
    (FOLDER / "fp32.tflite").write_bytes(b"damaged")  # Its file is not here.
    line = refusal(capsys, "export", RUN, "--schemes", "fp32", code=1)
    assert "adopt it again (quarl adopt FILE" in line
    assert "--head logits" in line


def test_another_policy_needs_a_name(artifacts: Artifacts, file: Path, capsys: Capsys) -> None:
    printed(capsys, "adopt", str(file), *MINE, "--schemes", "ptq_w4", "--episodes", "1")
    for suffix in ("tflite", "json"):
        (FOLDER / f"fp32.{suffix}").unlink()
        shutil.copy(artifacts["fp32"], file)
        message = refusal(capsys, "adopt", str(file), *MINE)
        assert f"{FOLDER} holds another policy, or this one" in message
        shutil.copy(artifacts["balancer"], file)
    other = ["q_values" if word == "logits" else word for word in MINE]
    assert "head=q_values, there is logits" in refusal(capsys, "adopt", str(file), *other)
    assert main(["adopt", str(file), *MINE, "--episodes", "1"]) == 0


def test_heads_that_are_none_of_an_observation_are_refused(file: Path, capsys: Capsys) -> None:
    def softmax(x: Any) -> Any:
        return tf.concat([tf.nn.softmax(x[:, :1]), tf.nn.softmax(x[:, 1:2])], axis=1)

    for network in (softmax, lambda x: tf.nn.softmax(x[:, :2])):
        file.write_bytes(converted(of_function(network, (4,), "float32")))
        assert "Received: --head logits of a SOFTMAX" in refusal(capsys, "adopt", str(file), *MINE)
    words = ("--env", "CartPole-v1", "--head", "q_values", "--episodes", "1")
    assert main(["adopt", str(file), *words]) == 0

    def random(x: Any) -> Any:
        return x[:, :2] + tf.random.uniform((1, 2))

    file.write_bytes(converted(of_function(random, (4,), "float32")))
    assert "function of one observation" in refusal(capsys, "adopt", str(file), *MINE, code=1)


def test_one_name_of_several_adopted_policies_is_refused(file: Path, capsys: Capsys) -> None:
    for name in ("mine", "yours"):
        assert main(["adopt", str(file), *LOGITS.split(), "--name", name, "--episodes", "1"]) == 0
    name = "CartPole-v1/adopted/fp32"
    line = refusal(capsys, "inspect", name)
    assert f"{name} is the name of 2 adopted policies" in line
    assert str(FOLDER / "fp32.tflite") in line
    assert printed(capsys, "list").count(name) == 2
    runs = RUN, RUN.replace("mine", "yours")
    assert "is one training" in refusal(capsys, "report", *runs, "--name", "both")
    (FOLDER / "fp32.tflite").unlink()
    assert "s0-yours" in printed(capsys, "list")
    assert "s0-yours" in printed(capsys, "inspect", name)


def test_nan_heads_and_crashes_get_one_line(file: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    bias = np.full(2, np.nan, np.float32)
    network = Network([(np.ones((4, 2), np.float32), bias)], np.zeros((1, 4), np.float32))
    file.write_bytes(network.convert("fp32"))
    assert "not finite" in refusal(capsys, "adopt", str(file), *MINE, code=1)
    monkeypatch.setattr(adopting, "processes", processes)  # In one of its own.
    monkeypatch.setattr(adopting, "_play", _crash)
    assert "crashed while" in refusal(capsys, "adopt", str(file), *MINE, code=1)
    assert not FOLDER.exists()


def test_a_process_ends_with_its_parent() -> None:
    # Shells ignore SIGINT for what they start in the background.
    code = "import os, signal, threading, time; signal.signal(2, signal.default_int_handler); "
    code += "from quarl_tf.foundation.processes import outcomes; "
    for number in (9, 2):  # It would hold the output open, or be waited for.
        end = f"threading.Timer(3, os.kill, (os.getpid(), {number})).start(); "
        work = "next(outcomes(time.sleep, [(600,)], ''))"
        python("-c", code + end + work, code=-number, timeout=60)


def test_errors_of_other_processes_are_raised(monkeypatch: Patch) -> None:
    for error in (ValueError("odd"), EOFError("odd"), QuarlError("odd")):
        with pytest.raises(type(error), match="odd"):
            next(processes.outcomes(_fail, [(error,)], "crashed"))
    with pytest.raises(RuntimeError, match="ValueError: <function"):  # It cannot be sent.
        next(processes.outcomes(_fail, [(None,)], "crashed"))
    monkeypatch.setattr(processes, "current_process", lambda: Mock(daemon=True))
    assert "multiprocessing.Pool" in refused(next, processes.outcomes(_fail, [(None,)], "crashed"))


def _fail(error: Exception | None) -> Iterator[None]:
    yield from ()
    raise error or ValueError(lambda: 0)


def _crash(*_: Any) -> None:
    os.abort()
