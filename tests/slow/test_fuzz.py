"""Damaged flatbuffers and sidecars are refused in one line, without a traceback or a crash.

QUARL_FUZZ is the number of trials; each follows from its number.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from samples import Artifacts, Capsys, KeptPool, Patch

from quarl_tf.cli import main
from quarl_tf.export import adopt as adopting
from quarl_tf.foundation.files import sha256

TRIALS = int(os.environ.get("QUARL_FUZZ", "160"))

ADOPT = ("adopt", "foreign.tflite", "--name", "fuzzed", "--episodes", "1")
COMMANDS = (
    *[("inspect", "fp32.tflite"), ("quantize", "fp32.tflite", "--scheme", "ptq_w4")] * 2,
    *[("quantize", "fp32.tflite", "--scheme", "int8")],
    *[("evaluate", "fp32.tflite", "--episodes", "1")] * 2,
    ("inspect", "int8.tflite", "--board", "nano33ble"),
    ("export", "int8.tflite", "--target", "c"),
    ADOPT,
)


def damaged(content: bytes, random: np.random.Generator) -> bytes:
    """Flip bits, overwrite a word, cut off, blank, or repeat a part of a file."""
    changed = bytearray(content)
    at, how = int(random.integers(len(content))), random.integers(5)
    end = at + int(random.integers(1, 64))
    if how == 0:
        for place in random.integers(len(content), size=random.integers(1, 9)):
            changed[place] ^= 1 << random.integers(8)
    elif how == 1:
        words = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, random.integers(2**32)]
        word = int(random.choice(words))
        changed[at // 4 * 4 : at // 4 * 4 + 4] = word.to_bytes(4, "little")
    elif how == 2:
        del changed[at:]
    elif how == 3:
        changed[at:end] = bytes(len(changed[at:end]))
    else:
        changed[at:at] = changed[at:end]
    return bytes(changed)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # Heads may be as great as floats are.
def test_damage_is_one_line_and_never_accepted(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: Patch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(adopting, "ProcessPoolExecutor", KeptPool)
    whole = {"foreign": artifacts["balancer"], "fp32": artifacts["balancer"]}
    whole["int8"] = artifacts["int8"]
    said = {"env_id": "CartPole-v1", "head": "logits"}
    hashed = said | {"sha256": sha256(artifacts["balancer"])}
    for trial in range(TRIALS):
        random = np.random.default_rng(trial)
        command = COMMANDS[trial % len(COMMANDS)]
        file, about = Path(command[1]), said if random.integers(2) else hashed
        content = whole[file.stem].read_bytes()
        sidecar = whole[file.stem].with_suffix(".json").read_bytes()
        beside = json.dumps(about).encode() if command[0] == "adopt" else sidecar
        first, second = content, beside
        if which := random.integers(3):
            first = damaged(content, random)
        if which != 1:
            second = damaged(beside, random)
        file.write_bytes(first)
        file.with_suffix(".json").write_bytes(second)
        code = main(command)
        said_wrong = capsys.readouterr().err
        where = f"trial {trial}: {command}"
        assert code in (0, 1, 2, 3), where
        assert said_wrong.count("\n") == (code > 0), f"{where}: {said_wrong}"
        if code == 0 and command[0] in ("quantize", "evaluate", "export"):
            assert first == content, where
            assert json.loads(second) == json.loads(sidecar), where
        if code == 0 and command[0] == "adopt":
            assert first == content or "sha256" not in json.loads(second), where
            # An adopted file can be exported.
            assert main(("export", "adopted-CartPole-v1-s0-fuzzed", "--schemes", "int8")) < 3, where
            assert capsys.readouterr().err.count("\n") < 2, where
        shutil.rmtree("tflite_models", ignore_errors=True)
    KeptPool.pool.shutdown()
    KeptPool.pool = None
