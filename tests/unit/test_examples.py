"""Examples for software that is not installed here: a ROS 2 node, a workflow."""

import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import compiled
import numpy as np
import pytest
import yaml
from samples import MODELS, ROOT, Patch, copied

from quarl_tf.cli import main
from quarl_tf.runtime.policy import Policy

EXAMPLES = ROOT / "examples"
PUBLISHED = MODELS / "CartPole-v1/dqn/s0"


@pytest.mark.parametrize("run", ["LunarLander-v3/ppo/s0", "MountainCarContinuous-v0/ddpg/s0"])
def test_the_node_publishes_the_action_of_each_observation(run: str, monkeypatch: Patch) -> None:
    artifact = MODELS / run / "int8.tflite"
    observations = compiled.around(artifact, 3)
    rclpy, node = MagicMock(), MagicMock()
    rclpy.create_node.return_value = node
    node.declare_parameter.return_value.value = str(artifact)

    def spin(node: MagicMock) -> None:
        answer = node.create_subscription.call_args.args[2]
        for numbers in ([0.0], *observations.tolist(), [np.nan] * observations.shape[1]):
            answer(SimpleNamespace(data=numbers))

    rclpy.spin = spin
    messages = SimpleNamespace(Float32MultiArray=SimpleNamespace)
    modules = {"rclpy": rclpy, "rclpy.qos": rclpy.qos, "std_msgs.msg": messages}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    runpy.run_path(str(EXAMPLES / "ros2_policy.py"), run_name="__main__")
    rclpy.create_node.assert_called_once_with("policy")
    node.declare_parameter.assert_called_once_with("policy", "int8.tflite")
    policy = Policy.load(artifact)
    expected = [np.atleast_1d(policy.act(observation)).tolist() for observation in observations]
    published = node.create_publisher.return_value.publish.call_args_list
    assert [call.args[0].data for call in published] == expected
    assert node.get_logger.return_value.error.call_count == 2


@pytest.mark.parametrize("number", [-1.0, 0.5, 256.0, np.nan])
def test_images_are_bytes_for_the_node(number: float) -> None:
    actor = runpy.run_path(str(EXAMPLES / "ros2_policy.py"))["actor"]
    act = actor(str(MODELS / "PongNoFrameskip-v4/ppo/s0-cc080679/int8.tflite"))
    image = np.zeros(84 * 84 * 4)
    assert len(act(image.tolist())) == 1
    image[9] = number
    with pytest.raises(ValueError, match="0 to 255"):
        act(image.tolist())


def test_the_workflow_gates_a_policy(tmp_path: Path, monkeypatch: Patch) -> None:
    folder = tmp_path / "policies/CartPole-v1/dqn/s0"
    folder.mkdir(parents=True)
    for scheme in ("fp32", "int8"):
        copied(PUBLISHED / f"{scheme}.tflite", folder)
    monkeypatch.chdir(tmp_path)
    steps = yaml.safe_load((EXAMPLES / "gate.yml").read_text())["jobs"]["policy"]["steps"]
    commands = [shlex.split(step["run"]) for step in steps if "run" in step]
    _, delete, evaluate, inspect = commands
    assert [evaluate[1], inspect[1]] == ["evaluate", "inspect"]
    (folder / "int8.eval.json").write_text("made elsewhere")
    subprocess.run(delete, check=True)
    assert not (folder / "int8.eval.json").exists()
    for policy in ("fp32", "int8", "random"):
        shutil.copy(PUBLISHED / f"{policy}.eval.json", folder)
    for words in (evaluate, inspect):
        assert main(words[1:]) == 0
    (folder / "int8.tflite").write_bytes((folder / "fp32.tflite").read_bytes())
    assert main(evaluate[1:]) == 1
