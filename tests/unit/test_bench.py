"""Files are timed in turns, and a machine that is not at rest is told from one that is."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from quarl_tf.cli import verbs
from quarl_tf.evaluation import bench as benches
from quarl_tf.foundation.files import sha256
from quarl_tf.runtime import POLICIES

CART_POLE = POLICIES / "CartPole-v1/dqn/s0/int8.tflite"
CAR = POLICIES / "MountainCarContinuous-v0/ddpg/s0/int8.tflite"
Capsys = pytest.CaptureFixture[str]


def refusal(capsys: Capsys, *words: str, code: int) -> str:
    assert verbs.main(["bench", *words]) == code
    error = capsys.readouterr().err
    assert error.startswith("quarl: ")
    assert error.count("\n") == 1
    return error


@pytest.fixture(autouse=True)
def _same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the processes that tell how much memory a file takes; `test_memory` has them."""
    monkeypatch.setattr(benches.memory, "process_bytes", lambda _: 1000)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benches.os, "sched_getaffinity", lambda _: {0, 1})


@pytest.mark.usefixtures("two_cores")
def test_two_files_are_timed_by_one_thread_and_by_all(tmp_path: Path, capsys: Capsys) -> None:
    target = tmp_path / "new/bench.json"
    words = [str(CART_POLE), str(CAR), "--calls", "20", "--json", str(target)]
    assert verbs.main(["bench", *words]) == 0
    told = capsys.readouterr().out
    assert "1 thread " in told
    assert "2 threads" in told
    assert str(target) in told
    found = json.loads(target.read_text())
    assert found["calls"] == 20
    assert [one["artifact"] for one in found["timings"]] == [str(CART_POLE), str(CAR)]
    for one, path in zip(found["timings"], (CART_POLE, CAR), strict=True):
        assert one["sha256"] == sha256(path)
        assert one["scheme"] == "int8"
        assert one["load_ms"] > 0
        assert one["memory"]["file"] == path.stat().st_size
        assert set(one["latency_us"]) == {"1", "2"}
        for latency in one["latency_us"].values():
            assert 0 < latency["median"] <= latency["p95"] <= latency["p99"]
    assert found["spread"] >= 1
    assert found["load_average"] >= 0


def test_files_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    load = benches.Policy.load

    def recorded(path: Path, threads: int = 1) -> benches.Policy:
        order.append(path)
        return load(path, threads)

    monkeypatch.setattr(benches.os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(benches.Policy, "load", recorded)
    found = benches.bench([CART_POLE, CAR], 5, lambda *_: None)
    assert order == [CART_POLE, CAR] * 6
    assert [list(one.latency_us) for one in found.timings] == [[1], [1]]


@pytest.mark.parametrize(
    ("load_average", "spread", "at_rest"), [(0.1, 1.02, True), (0.9, 1.02, False), (0.1, 3, False)]
)
def test_a_busy_machine_is_told(
    load_average: float,
    spread: float,
    at_rest: bool,
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = benches.bench([CART_POLE], 5, lambda *_: None)
    found = replace(found, load_average=load_average, spread=spread)
    assert found.to_dict()["at_rest"] is at_rest
    monkeypatch.setattr(verbs, "bench", lambda *_: found)
    assert verbs.main(["bench", str(CART_POLE)]) == 0
    assert ("not at rest" in capsys.readouterr().err) is not at_rest


def test_what_cannot_be_timed_gets_one_line(tmp_path: Path, capsys: Capsys) -> None:
    assert "cannot be read" in refusal(capsys, str(tmp_path / "no.tflite"), code=1)
    for path in (CART_POLE, CART_POLE.with_suffix(".json")):
        shutil.copy(path, tmp_path)
    damaged = tmp_path / "int8.tflite"
    content = bytearray(damaged.read_bytes())
    content[-100] ^= 1
    damaged.write_bytes(content)
    target = tmp_path / "bench.json"
    words = (str(CART_POLE), str(damaged), "--json", str(target))
    assert "changed or damaged" in refusal(capsys, *words, code=1)
    assert not target.exists()
    assert "calls=0" in refusal(capsys, str(CART_POLE), "--calls", "0", code=2)
    assert "did you mean" in refusal(capsys, "CartPole-v1/dqn/int9", code=2)
