"""Files are timed in turns, and a busy machine is reported."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import latencies
import pytest
from samples import MODELS, Capsys, Patch, copied, printed, refusal, refused, silent

from quarl_tf.cli import main, verbs
from quarl_tf.evaluation import bench as benches
from quarl_tf.foundation.files import sha256
from quarl_tf.runtime import POLICIES
from quarl_tf.store.records import Evaluation

PUBLISHED = MODELS / "CartPole-v1/dqn/s0"
CART_POLE = POLICIES / "CartPole-v1/dqn/s0/int8.tflite"
CAR = POLICIES / "MountainCarContinuous-v0/ddpg/s0/int8.tflite"


@pytest.fixture(autouse=True)
def _same_memory(monkeypatch: Patch) -> None:
    """Measure no processes; `test_policies` does."""
    monkeypatch.setattr(benches.memory, "process_bytes", lambda _: 1000)


def test_files_are_timed_in_turns(tmp_path: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    loaded = Mock(wraps=benches.Policy.load)
    monkeypatch.setattr(benches.provenance, "available_cores", lambda: {0, 1})
    monkeypatch.setattr(benches.Policy, "load", loaded)
    target = tmp_path / "new/bench.json"
    words = ("bench", str(CART_POLE), str(CAR), "--calls", "20", "--json", str(target))
    for blocked in (f"{CART_POLE}/bench.json", str(tmp_path)):  # Below a file, and a folder.
        assert f"path='{blocked}'" in refusal(capsys, *words[:-1], blocked, code=1)
    output = printed(capsys, *words)
    # Nothing was timed for the other.
    order = [path for (path, *_), _ in loaded.call_args_list if path in (CART_POLE, CAR)]
    assert order == [CART_POLE, CAR, *[CART_POLE, CART_POLE, CAR, CAR] * 5]
    assert all(text in output for text in ("1 thread", "2 threads", "as C", str(target)))
    measurements = json.loads(target.read_text())
    assert measurements["calls"] == 20
    assert measurements["spread"] >= 1
    assert measurements["load_average"] >= 0
    for entry, path in zip(measurements["artifacts"], (CART_POLE, CAR), strict=True):
        assert (entry["artifact"], entry["scheme"]) == (str(path), "int8")
        assert entry["sha256"] == sha256(path)
        assert entry["load_ms"] > 0
        assert entry["bytes"]["file"] == path.stat().st_size
        assert set(entry["latency_us"]) == {"1", "2", "C"}
        for latency in entry["latency_us"].values():
            assert 0 < latency["median"] <= latency["p95"] <= latency["p99"]


def test_c_needs_an_int8_scheme_and_a_compiler(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(benches.provenance, "available_cores", lambda: {0})
    measurements = benches.bench([PUBLISHED / "fp32.tflite", CART_POLE], 5, silent)
    assert [list(entry["latency_us"]) for entry in measurements["artifacts"]] == [["1"], ["1", "C"]]
    monkeypatch.setenv("PATH", str(tmp_path))
    (entry,) = benches.bench([CART_POLE], 5, silent)["artifacts"]
    assert list(entry["latency_us"]) == ["1"]


def test_a_busy_machine_is_told(capsys: Capsys, monkeypatch: Patch) -> None:
    """The second has a high load, the third loops of different durations."""
    monkeypatch.setattr(benches.provenance, "available_cores", lambda: {0, 1})
    monkeypatch.setattr(benches, "_program", lambda *_: None)
    for load, slow, at_rest in ((0, 1, True), (2, 1, False), (0, 3, False)):
        monkeypatch.setattr(benches.os, "getloadavg", Mock(return_value=(load, 0, 0)))
        monkeypatch.setattr(benches.timeit, "repeat", Mock(return_value=[1.0] * 9 + [slow]))
        measurements = benches.bench([CART_POLE], 5, silent)
        assert (measurements["load_average"], measurements["spread"]) == (load / 2, slow)
        assert measurements["at_rest"] is at_rest
        monkeypatch.setattr(verbs, "bench", Mock(return_value=measurements))
        assert main(["bench", str(CART_POLE)]) == 0
        assert ("not at rest" in capsys.readouterr().err) is not at_rest


def test_latencies_are_replaced(tmp_path: Path) -> None:
    files = [copied(PUBLISHED / f"{name}.tflite", tmp_path) for name in ("int8", "fp32")]
    target, _ = (
        Path(shutil.copy(PUBLISHED / f"{name}.eval.json", tmp_path)) for name in ("int8", "fp32")
    )
    played, measurements = Evaluation.load(target), benches.bench(files, 5, silent)
    measurements |= {"at_rest": False, "processor": played.processor}
    assert "not at rest are not saved" in refused(latencies.save, measurements)
    assert Evaluation.load(target) == played
    measurements["at_rest"] = True
    assert latencies.save(measurements)[0] == target
    int8, fp32 = (row["latency_us"]["1"] for row in measurements["artifacts"])
    expected = replace(played, latency_us=int8 | {"fp32": fp32["median"]})
    assert Evaluation.load(target) == expected != played
    measurements["processor"] = "another"
    assert "no greedy evaluation on this processor" in refused(latencies.save, measurements)
    assert Evaluation.load(target) == expected
