"""Policies in C compute what LiteRT's reference kernels do; which boards hold a policy."""

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import compiled
import gymnasium as gym
import numpy as np
import pytest
import yaml
from ai_edge_litert.schema_py_generated import BuiltinOperator
from conftest import write_flatbuffer
from samples import MODELS, ROOT, Artifacts, Capsys, Copy, Patch, copied, printed, refusal, refused

from quarl_tf.cli import arguments, main
from quarl_tf.export import boards, c_source
from quarl_tf.export.graph import RELU, Graph
from quarl_tf.export.ptq import quantized
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import Scheme
from quarl_tf.store.records import Sidecar
from quarl_tf.store.workspace import sidecar_path

CARTPOLE = MODELS / "CartPole-v1/dqn/s0/int8.tflite"
PONG = MODELS / "PongNoFrameskip-v4/ppo/s1-443ba9b6/fp32.tflite"
LANDER = MODELS / "LunarLander-v3/ppo/s0/int8.tflite"
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(
    "name",
    [
        "CartPole-v1/dqn/s0/int8",
        "MountainCarContinuous-v0/ppo/s0/int8",
        "Walker2DBulletEnv-v0/ddpg/s0-999554cc/int8",
        "HalfCheetahBulletEnv-v0/ddpg/s0-93bec123-q8d250000-f1d614ed/qat_int8",
    ],
)
def test_dense_heads_are_those_of_the_reference_kernels(name: str, tmp_path: Path) -> None:
    artifact = copied(MODELS / f"{name}.tflite", tmp_path)
    compiled.check(artifact, compiled.around(artifact, 2000))


def test_a_program_may_have_several_policies(tmp_path: Path) -> None:
    actions = []
    for folder, name in ((tmp_path / "dqn", "CartPole-v1"), (tmp_path / "ppo", "LunarLander-v3")):
        folder.mkdir()
        artifact = copied(MODELS / name / folder.name / "s0/int8.tflite", folder)
        c_source.write(artifact)
        caller = '#include "int8.h"\nstatic float zeros[POLICY_OBSERVATION_SIZE];\n'
        caller += f"int {folder.name}(void) {{ return policy_act(zeros); }}\n"
        (folder / "caller.c").write_text(caller)
        policy = Policy.load(artifact)
        actions.append(str(policy.act(np.zeros(policy.sidecar.observation_shape))))
    main = "#include <stdio.h>\nint dqn(void), ppo(void);\n"
    main += 'int main(void) { return !printf("%d %d", dqn(), ppo()); }\n'
    (tmp_path / "main.c").write_text(main)
    sources = [str(path) for path in tmp_path.rglob("*.c")]
    subprocess.run(["gcc", *compiled.STRICT, *sources, "-o", "program"], cwd=tmp_path, check=True)
    assert subprocess.check_output(tmp_path / "program", text=True).split() == actions
    # The names of one policy in each file.
    (tmp_path / "both.c").write_text('#include "dqn/int8.h"\n#include "ppo/int8.h"\n')
    both = ["gcc", "-fsyntax-only", "both.c"]
    failed = subprocess.run(both, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "header of one policy" in failed.stderr


@pytest.mark.parametrize("scale", [0.5, 0.3, 1.0, 3.7, 0.00123456789, 1e-5])
def test_multipliers_round_as_doubles(scale: float) -> None:
    sums = np.arange(-300_000, 300_001)
    multiplier, shift = c_source._multiplier(scale, 300_000)
    rounded = np.copysign((np.abs(sums) * multiplier + (1 << shift >> 1)) >> shift, sums)
    expected = np.copysign(np.floor(np.abs(sums * scale) + 0.5), sums)
    codes = np.abs(expected) <= 256
    np.testing.assert_array_equal(rounded[codes], expected[codes])


@pytest.mark.parametrize("name", ["CartPole-v1/a2c/s0", "MountainCarContinuous-v0/ddpg/s0"])
@pytest.mark.parametrize("scheme", ["int8_tensor", "int8_head32"])
def test_other_int8_schemes_compute_the_same(name: str, scheme: str, tmp_path: Path) -> None:
    reference = copied(MODELS / name / "fp32.tflite", tmp_path)
    observations = compiled.around(reference, 300)
    content = quantized(reference.read_bytes(), Scheme.parse(scheme), observations)
    sidecar = Sidecar.load(sidecar_path(reference))
    artifact = write_flatbuffer(tmp_path / f"{scheme}.tflite", content, sidecar)
    compiled.check(artifact, observations, compiled.SANITIZED)
    # A float head has no codes.
    assert ("codes: none" in artifact.with_suffix(".h").read_text()) == (scheme == "int8_head32")


def test_heads_in_two_stages_compute_the_same(artifacts: Artifacts, tmp_path: Path) -> None:
    reference = copied(artifacts["frames"], tmp_path)
    frames = np.random.default_rng(0).integers(0, 256, (200, 6, 6, 2), np.uint8)
    content = quantized(reference.read_bytes(), Scheme.parse("int8"), frames // 8, 2)
    sidecar = Sidecar.load(sidecar_path(reference))
    artifact = write_flatbuffer(tmp_path / "int8.tflite", content, sidecar)
    # Some are beyond what the first stage reaches.
    for images in (frames, frames // 8):
        heads, actions = compiled.run(artifact, images, compiled.SANITIZED)
        np.testing.assert_array_equal(heads, compiled.reference_heads(artifact, images))
        np.testing.assert_array_equal(actions[:, 0], heads.argmax(axis=1))
        fixed_heads, _ = compiled.run(artifact, images, compiled.SANITIZED, fixed=True) / 65536
        assert np.abs(fixed_heads - heads).max() < 2 / 65536
    # What computes something else is refused.
    fine, join = Graph(content), Graph(content)
    second = [op for op in fine.operators if fine.name(op) == "FULLY_CONNECTED"][-1]
    weights = fine.model.buffers[fine.tensors[second.inputs[1]].buffer]
    weights.data = weights.data.copy()
    weights.data[0] ^= 1
    clip = next(op for op in join.operators if join.name(op) == "CONCATENATION")
    clip.builtinOptions.fusedActivationFunction = RELU
    for graph in (fine, join):
        other = write_flatbuffer(tmp_path / "other.tflite", graph.pack(), sidecar)
        assert "BROADCAST_TO int8 in another order" in refused(c_source.write, other, code=2)


@pytest.mark.parametrize("run", ["LunarLander-v3/ppo/s0", "MountainCarContinuous-v0/ddpg/s0"])
def test_actions_without_floats_are_the_same_but_near_ties(run: str, tmp_path: Path) -> None:
    artifact = copied(MODELS / run / "int8.tflite", tmp_path)
    policy, states = Policy.load(artifact), list[np.ndarray]()
    with gym.make(policy.sidecar.env_id) as env:
        states.append(env.reset(seed=0)[0])
        while len(states) < 200:
            states.append(env.step(policy.act(states[-1]))[0])
    # Floats get the same multiples of 1/65536; some lie where the normaliser clips.
    integers = np.rint(np.array([*states, *compiled.around(artifact, 200) * 20]) * 65536)
    heads, actions = compiled.run(artifact, integers / 65536)
    multiples = compiled.run(artifact, integers, compiled.SANITIZED, fixed=True)
    fixed_heads, fixed_actions = multiples / 65536
    assert (np.abs(fixed_heads - heads) < 2 / 65536).all(axis=1).mean() > 0.95
    # A feature in the middle between two codes may get either.
    difference = np.abs(fixed_heads - heads).max()
    assert difference < 0.05 * np.ptp(heads)
    if policy.sidecar.num_actions is None:
        assert np.abs(fixed_actions - actions).max() <= difference
    else:
        best = np.sort(heads, axis=1)
        clear = best[:, -1] - best[:, -2] > 2 * difference
        np.testing.assert_array_equal((fixed_actions * 65536)[clear, 0], actions[clear, 0])
        assert clear.mean() > 0.9
    words = ["gcc", "-std=c99", "-mgeneral-regs-only", "-c", "int8.c"]
    subprocess.run(words, cwd=tmp_path, check=True)


def test_clips_beyond_each_other_without_floats(tmp_path: Path) -> None:
    graph = Graph(CARTPOLE.read_bytes())
    for clip, end in zip(graph.operators[2:4], (-1, 1), strict=True):  # MINIMUM and MAXIMUM.
        graph.set_constant(clip.inputs[1], np.float32(end))
    pole = Sidecar.load(sidecar_path(CARTPOLE))
    artifact = write_flatbuffer(tmp_path / "clips.tflite", graph.pack(), pole)
    integers = np.rint(np.random.default_rng(0).normal(size=(50, 4)) * 3 * 65536)
    heads, _ = compiled.run(artifact, integers / 65536)
    fixed_heads, _ = compiled.run(artifact, integers, fixed=True) / 65536
    np.testing.assert_allclose(fixed_heads, heads, atol=2 / 65536)


def test_files_of_the_converter(copy_artifact: Copy, networks: dict[str, Any]) -> None:
    compiled.check(copy_artifact("int8"), networks["mlp"].calibration)


def test_the_header_has_origin_and_size(tmp_path: Path) -> None:
    artifact = copied(CARTPOLE, tmp_path)
    summary = c_source.write(artifact)
    # Weights, two of a feature; bias, multiplier and shift of each output; the normaliser's four
    # means, factors and ends.
    weights = 2 * 4 * 256 + 256 * 256 + 256 * 2
    constants = weights + (4 + 4 + 1) * (256 + 256 + 2) + 4 * 4 * 4
    constants += 3 * 4 * (4 + 12)  # Three layers of four pointers and twelve numbers.
    buffers = 256 + 256 + 4 * 2  # Two hidden layers, and the head of which the best is looked for.
    assert re.findall(r"[\d,]+\b", summary) == [f"{n:,}" for n in (constants, buffers, weights)]
    header = artifact.with_suffix(".h").read_text()
    sidecar, graph = Policy.load(artifact).sidecar, Graph(artifact.read_bytes())
    ends = graph.operators[4].outputs[0], graph.operators[-1].inputs[0]
    grids = (graph.tensors[i].quantization for i in ends)
    codes = [f"scale {grid.scale[0]!s}, zero point {grid.zeroPoint[0]}" for grid in grids]
    for text in (sidecar.sha256, sidecar.run_id, "CartPole-v1", "dqn", summary, *codes):
        assert text in header
    assert "#define POLICY_OBSERVATION_SIZE 4\n#define POLICY_HEAD_SIZE 2\n" in header


def test_unfit_policies_are_named(artifacts: Artifacts, tmp_path: Path, capsys: Capsys) -> None:
    pong, pole = (Sidecar.load(sidecar_path(path)) for path in (PONG, CARTPOLE))
    images = np.zeros((2, *pong.observation_shape), np.uint8)
    padded = Graph(quantized(PONG.read_bytes(), Scheme.parse("int8"), images))
    padded.operators[1].builtinOptions.padding = 0
    padded_file = write_flatbuffer(tmp_path / "padded.tflite", padded.pack(), pong)
    branched = Graph(CARTPOLE.read_bytes())
    branched.operators[1].inputs[0] = branched.inputs[0]
    power = branched.model.operatorCodes[branched.operators[2].opcodeIndex]
    power.builtinCode = BuiltinOperator.POW
    branched_file = write_flatbuffer(tmp_path / "branched.tflite", branched.pack(), pole)
    several = tmp_path / "several.tflite", CARTPOLE.read_bytes(), pole
    several_file = write_flatbuffer(*several, head="logits", num_actions=[1, 1])
    far = Graph(CARTPOLE.read_bytes())
    far.set_constant(far.operators[0].inputs[1], np.array([0, 1e5, 0, 0], np.float32))
    far_file = write_flatbuffer(tmp_path / "far.tflite", far.pack(), pole)
    for artifact, text, *options in (
        (artifacts["fp32"], "Received: FULLY_CONNECTED float32"),
        (artifacts["int8_io"], "Received: input=int8, output=int8"),
        (padded_file, "Received: CONV_2D int8 with padding"),
        (branched_file, "Received: POW float32\n"),
        (several_file, "num_actions=[1, 1]"),
        (far_file, "Received: feature 1, which Q16.16 does not hold", "--no-float"),
        (artifacts["fp32"], "FULLY_CONNECTED float32 in fixed point", "--no-float"),
    ):
        line = refusal(capsys, "export", str(artifact), "--target", "c", *options)
        assert text in line
        assert line.count("Received: ") == 1
        assert not artifact.with_suffix(".c").exists()
    assert "add --target c" in refusal(capsys, "export", str(far_file), "--no-float")


def test_c_of_the_shelf_and_examples(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    monkeypatch.chdir(tmp_path)
    shelf = tmp_path / "mine/tflite_models/LunarLander-v3/ppo/s0"
    words = ["export", "LunarLander-v3/ppo/int8", "--target", "c", "--root", "mine"]
    printed(capsys, *words, "--no-float")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    header = (shelf / "int8.h").read_text()
    assert "int policy_act(const int32_t *observation)" in header
    assert "_fixed" in header  # Of no other form, which may be linked beside it.
    # Without its training a run's exported file is there all the same.
    printed(capsys, "export", "ppo-LunarLander-v3-s0", *words[2:])
    source = (shelf / "int8.c").read_bytes()
    flash = f"{c_source.size(shelf / 'int8.tflite')[0]:,} bytes"
    place = shelf.relative_to(tmp_path) / "int8.c"
    assert f"wrote     {place}  (flash: {flash}" in printed(capsys, *words)
    assert (shelf / "int8.c").read_bytes() == source
    (shelf / "int8.h").write_text("mine")
    assert "was not written by this program" in refusal(capsys, *words)
    assert (shelf / "int8.h").read_text() == "mine"
    (shelf / "int8.h").unlink()
    printed(capsys, *words)
    shutil.copy(ROOT / "examples/main.c", shelf)
    subprocess.run(["gcc", *compiled.STRICT, "main.c", "int8.c", "-o", "a"], cwd=shelf, check=True)
    observations = compiled.around(shelf / "int8.tflite", 20)
    lines = subprocess.check_output([shelf / "a"], input=observations.tobytes()).splitlines()
    actions, policy = [int(line.split()[0]) for line in lines], Policy.load(shelf / "int8.tflite")
    assert actions == [policy.act(observation) for observation in observations]
    subprocess.run(["gcc", "-c", "int8.c"], cwd=shelf, check=True)
    header = compiled.SOURCES / "Arduino.h"
    words = ["g++", "-Wall", "-Werror", "-include", str(header), f"-I{shelf}"]
    sketch = ("-x", "c++", str(ROOT / "examples/arduino/arduino.ino"), "-x", "none", "int8.o")
    subprocess.run([*words, "-o", "board", *sketch], cwd=shelf, check=True)
    # Lines that are no observation have no action, and shift no other.
    lines = [" ".join(map(repr, observation.tolist())) for observation in observations]
    sent = [lines[0], "1 2 3", f"{lines[1]} 4", lines[2] + "\r", "nan " * 8, "1" * 999, lines[3]]
    text = "".join(f"{line}\n" for line in sent)
    answers = subprocess.check_output([shelf / "board"], input=text, text=True).splitlines()
    expected = [str(actions[0]), "?", "?", str(actions[2]), "?", "?", str(actions[3])]
    assert [line.split()[0] for line in answers] == expected


@pytest.fixture
def without_node(monkeypatch: Patch) -> None:
    monkeypatch.setenv("PATH", "")


@pytest.mark.usefixtures("without_node")
def test_c_takes_its_constants_code_buffers_and_ends() -> None:
    constants, buffers, _ = c_source.size(LANDER)
    flash, ram = constants + 4096, buffers + (8 + 4) * 4  # Eight floats in, four out.
    micro, c = boards.fits(LANDER, "nano33ble")
    assert c == boards.Fit("C", boards.Memory(flash, ram), boards.Memory(1 << 20, 208 << 10), [])
    assert micro.route == "TensorFlow Lite Micro (estimated)"
    assert micro.taken.flash == LANDER.stat().st_size + 114_579  # The runtime, by mcufit.
    assert (micro.holds, c.holds) == (True, True)
    esp8266 = boards.fits(LANDER, "esp8266")  # There the constants are in RAM, too.
    needs = [micro.taken.ram + LANDER.stat().st_size, ram + constants]
    assert [fit.taken and fit.taken.ram for fit in esp8266] == needs
    _, c = boards.fits(LANDER, "teensy41")
    assert (c.taken and c.taken.ram, c.there.ram) == (ram + constants, 480 << 10)
    assert boards.fits(LANDER, "pico") == boards.fits(LANDER, "rp2040")


@pytest.mark.usefixtures("without_node")
def test_missing_operators_are_named(artifacts: Artifacts, tmp_path: Path, capsys: Capsys) -> None:
    dynamic, half = ["FULLY_CONNECTED of float32 by int8"], ["DEQUANTIZE of float16"]
    for scheme, names in {"fp32": [], "int8": [], "fp16": half, "dynamic_int8": dynamic}.items():
        micro, c = boards.fits(artifacts[scheme], "esp32")
        assert (micro.lacking, micro.holds, c.holds) == (names, not names, scheme == "int8")
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


@pytest.mark.usefixtures("without_node")
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


def ros_actor(artifact: Path) -> Any:
    """Return what the node acts by; the rest of it needs ROS."""
    return runpy.run_path(str(EXAMPLES / "ros2_policy.py"))["actor"](str(artifact))


@pytest.mark.parametrize("run", ["LunarLander-v3/ppo/s0", "MountainCarContinuous-v0/ddpg/s0"])
def test_the_node_acts_as_the_policy_and_refuses_the_same(run: str) -> None:
    artifact = MODELS / run / "int8.tflite"
    act, policy = ros_actor(artifact), Policy.load(artifact)
    observations = compiled.around(artifact, 3)
    expected = [np.atleast_1d(policy.act(observation)).tolist() for observation in observations]
    assert [act(observation.tolist()) for observation in observations] == expected
    for numbers in ([0.0], [np.nan] * observations.shape[1]):
        with pytest.raises(ValueError, match=r"reshape|not finite"):
            act(numbers)


@pytest.mark.parametrize("number", [-1.0, 0.5, 256.0, np.nan])
def test_images_are_bytes_for_the_node(number: float) -> None:
    act, image = ros_actor(PONG), np.zeros(84 * 84 * 4)
    assert len(act(image.tolist())) == 1
    image[9] = number
    with pytest.raises(ValueError, match="0 to 255"):
        act(image.tolist())


def test_the_workflow_has_sound_commands() -> None:
    steps = yaml.safe_load((EXAMPLES / "gate.yml").read_text())["jobs"]["policy"]["steps"]
    commands = [step["run"] for step in steps if step.get("run", "").startswith("quarl ")]
    parsed = [arguments.build().parse_args(shlex.split(command)[1:]) for command in commands]
    assert [args.verb for args in parsed] == ["evaluate", "inspect"]
