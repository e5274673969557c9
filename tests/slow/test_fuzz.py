"""Damaged flatbuffers and sidecars are refused in one line, without a traceback or a crash.

QUARL_FUZZ is the number of trials; each follows from its number.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from samples import Artifacts, Capsys, Patch

from quarl_tf.cli import main
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
    start, damage = int(random.integers(len(content))), random.integers(5)
    end = start + int(random.integers(1, 64))
    if damage == 0:
        for place in random.integers(len(content), size=random.integers(1, 9)):
            changed[place] ^= 1 << random.integers(8)
    elif damage == 1:
        word = int(random.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, random.integers(2**32)]))
        changed[start // 4 * 4 : start // 4 * 4 + 4] = word.to_bytes(4, "little")
    elif damage == 2:
        del changed[start:]
    elif damage == 3:
        changed[start:end] = bytes(len(changed[start:end]))
    else:
        changed[start:start] = changed[start:end]
    return bytes(changed)


@pytest.mark.usefixtures("kept_pool")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # Heads may be as great as floats are.
def test_damage_is_one_line_and_never_accepted(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: Patch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    sound = {"foreign": artifacts["balancer"], "fp32": artifacts["balancer"]}
    sound["int8"] = artifacts["int8"]
    description = {"env_id": "CartPole-v1", "head": "logits"}
    with_hash = description | {"sha256": sha256(artifacts["balancer"])}
    for trial in range(TRIALS):
        random, command = np.random.default_rng(trial), COMMANDS[trial % len(COMMANDS)]
        file, fields = Path(command[1]), description if random.integers(2) else with_hash
        content = sound[file.stem].read_bytes()
        sidecar = sound[file.stem].with_suffix(".json").read_bytes()
        document = json.dumps(fields).encode() if command[0] == "adopt" else sidecar
        flatbuffer, written = content, document
        if which := random.integers(3):
            flatbuffer = damaged(content, random)
        if which != 1:
            written = damaged(document, random)
        file.write_bytes(flatbuffer)
        file.with_suffix(".json").write_bytes(written)
        code, errors = main(command), capsys.readouterr().err
        label = f"trial {trial}: {command}"
        assert code in (0, 1, 2, 3), label
        assert errors.count("\n") == (code > 0), f"{label}: {errors}"
        if code == 0 and command[0] in ("quantize", "evaluate", "export"):
            assert flatbuffer == content, label
            assert json.loads(written) == json.loads(sidecar), label
        if code == 0 and command[0] == "adopt":
            assert flatbuffer == content or "sha256" not in json.loads(written), label
            # An adopted file can be exported.
            assert main(("export", "adopted-CartPole-v1-s0-fuzzed", "--schemes", "int8")) < 3, label
            assert capsys.readouterr().err.count("\n") < 2, label
        shutil.rmtree("tflite_models", ignore_errors=True)
