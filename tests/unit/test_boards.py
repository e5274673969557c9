"""Which microcontrollers hold a policy."""

import sys
from pathlib import Path

import compiled
import pytest

from quarl_tf.cli import main
from quarl_tf.export import boards, c_source, integer
from quarl_tf.export.boards import Memory

MODELS = Path(__file__).parents[2] / "tflite_models"
LANDER = MODELS / "LunarLander-v3/ppo/s0/int8.tflite"


@pytest.fixture(autouse=True)
def without_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


def test_c_takes_its_constants_code_buffers_and_ends() -> None:
    constants, buffers, _ = c_source.size(LANDER)
    # Eight floats in, four out.
    flash, ram = constants + 4096, buffers + (8 + 4) * 4
    micro, c = boards.fits(LANDER, "nano33ble")
    assert c == boards.Fit("C", Memory(flash, ram), Memory(1 << 20, 208 << 10), [])
    assert micro.route == "TensorFlow Lite Micro (estimated)"
    assert micro.taken is not None
    # The runtime is measured by mcufit.
    assert micro.taken.flash == LANDER.stat().st_size + 114_579
    assert micro.holds
    assert c.holds
    # There the constants are in RAM, too.
    there = boards.fits(LANDER, "esp8266")
    assert [fit.taken and fit.taken.ram for fit in there] == [
        micro.taken.ram + LANDER.stat().st_size,
        ram + constants,
    ]
    assert boards.fits(LANDER, "pico") == boards.fits(LANDER, "rp2040")


def test_operators_that_lack_are_named(artifacts: dict[str, Path], tmp_path: Path) -> None:
    lacking = {
        "fp32": [],
        "int8": [],
        "fp16": ["DEQUANTIZE of float16"],
        "dynamic_int8": ["FULLY_CONNECTED of float32 by int8"],
    }
    for scheme, names in lacking.items():
        micro, c = boards.fits(artifacts[scheme], "esp32")
        assert micro.lacking == names
        assert micro.holds == (not names)
        assert c.holds == (scheme == "int8")
    graph = integer.Graph(LANDER.read_bytes())
    graph.model.operatorCodes[0].builtinCode = integer._OPERATORS["ATAN2"]
    foreign = tmp_path / "foreign.tflite"
    foreign.write_bytes(graph.pack())
    micro, c = boards.fits(foreign, "esp32")
    assert micro.lacking == ["ATAN2 of float32"]
    assert (c.taken, c.lacking) == (None, ["a sidecar (quarl adopt)"])


def test_inspect_tells_what_a_board_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["inspect", str(compiled.copied(LANDER, tmp_path)), "--board"]
    assert main([*words, "pico"]) == 0
    assert "does not fit" not in capsys.readouterr().out
    assert main([*words, "uno"]) == 3
    shown = capsys.readouterr()
    assert "does not fit" in shown.out
    assert shown.err.endswith("Received: board='uno'\n")
    assert main([*words, "nano33bel"]) == 2
    assert "did you mean nano33ble or " in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "mcufit.boards.yaml_repo", None)
    assert main([*words, "pico"]) == 1
    error = capsys.readouterr().err
    assert "pip install '.[boards]'" in error
    assert error.count("\n") == 1
