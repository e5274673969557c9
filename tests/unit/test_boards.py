"""Which microcontrollers hold a policy."""

import sys
from pathlib import Path

import pytest
from ai_edge_litert.schema_py_generated import BuiltinOperator
from samples import MODELS, Artifacts, Capsys, Patch, copied, printed, refusal

from quarl_tf.cli import main
from quarl_tf.export import boards, c_source
from quarl_tf.export.boards import Memory
from quarl_tf.export.graph import Graph

LANDER = MODELS / "LunarLander-v3/ppo/s0/int8.tflite"


@pytest.fixture(autouse=True)
def without_node(monkeypatch: Patch) -> None:
    monkeypatch.setenv("PATH", "")


def test_c_takes_its_constants_code_buffers_and_ends() -> None:
    constants, buffers, _ = c_source.size(LANDER)
    # Eight floats in, four out.
    flash, ram = constants + 4096, buffers + (8 + 4) * 4
    micro, c = boards.fits(LANDER, "nano33ble")
    assert c == boards.Fit("C", Memory(flash, ram), Memory(1 << 20, 208 << 10), [])
    assert micro.route == "TensorFlow Lite Micro (estimated)"
    # The runtime is measured by mcufit.
    assert micro.taken.flash == LANDER.stat().st_size + 114_579
    assert (micro.holds, c.holds) == (True, True)
    # There the constants are in RAM, too.
    esp8266 = boards.fits(LANDER, "esp8266")
    needs = [micro.taken.ram + LANDER.stat().st_size, ram + constants]
    assert [fit.taken and fit.taken.ram for fit in esp8266] == needs
    _, c = boards.fits(LANDER, "teensy41")
    assert (c.taken and c.taken.ram, c.there.ram) == (ram + constants, 480 << 10)
    assert boards.fits(LANDER, "pico") == boards.fits(LANDER, "rp2040")


def test_missing_operators_are_named(artifacts: Artifacts, tmp_path: Path, capsys: Capsys) -> None:
    dynamic, half = ["FULLY_CONNECTED of float32 by int8"], ["DEQUANTIZE of float16"]
    lacking = {"fp32": [], "int8": [], "fp16": half, "dynamic_int8": dynamic}
    for scheme, names in lacking.items():
        micro, c = boards.fits(artifacts[scheme], "esp32")
        assert micro.lacking == names
        assert micro.holds == (not names)
        assert c.holds == (scheme == "int8")
    graph = Graph(LANDER.read_bytes())
    graph.model.operatorCodes[0].builtinCode = BuiltinOperator.ATAN2
    foreign = tmp_path / "foreign.tflite"
    foreign.write_bytes(graph.pack())
    micro, c = boards.fits(foreign, "esp32")
    assert micro.lacking == ["ATAN2 of float32"]
    assert (c.taken, c.lacking) == (None, ["a sidecar (quarl adopt)"])
    foreign.with_suffix(".json").write_text('{"env_id": "LunarLander-v3", "head": "logits"}')
    assert boards.fits(foreign, "esp32") == [micro, c]
    line = refusal(capsys, "inspect", str(foreign), "--board", "esp32", code=3)
    assert "lacking ATAN2 of float32\n" in line


def test_inspect_shows_what_fits(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    words = ["inspect", str(copied(LANDER, tmp_path)), "--board"]
    assert "does not fit" not in printed(capsys, *words, "pico")
    assert main([*words, "uno"]) == 3
    captured = capsys.readouterr()
    assert "does not fit" in captured.out
    assert captured.err.endswith("another board. Received: board='uno'\n")
    assert "did you mean nano33ble or " in refusal(capsys, *words, "nano33bel")
    monkeypatch.setitem(sys.modules, "mcufit.boards.yaml_repo", None)
    assert "pip install '.[boards]'" in refusal(capsys, *words, "pico", code=1)
