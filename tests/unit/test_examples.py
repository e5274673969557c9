"""Examples that need what is not here do what can be tried: a ROS 2 node, a workflow."""

import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import compiled
import numpy as np
import pytest
import yaml

from quarl_tf.cli import main
from quarl_tf.runtime.policy import Policy

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MODELS = ROOT / "tflite_models"


@pytest.mark.parametrize("run", ["LunarLander-v3/ppo/s0", "MountainCarContinuous-v0/ddpg/s0"])
def test_the_node_publishes_the_action_of_each_observation(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[Any] = []
    errors: list[str] = []
    artifact = MODELS / run / "int8.tflite"
    observations = compiled.around(artifact, 3)

    class Node:
        def __init__(self, name: str) -> None:
            assert name == "policy"

        def declare_parameter(self, name: str, default: str) -> SimpleNamespace:
            assert (name, default) == ("policy", "int8.tflite")
            return SimpleNamespace(value=str(artifact))

        def create_publisher(self, kind: type, topic: str, depth: int) -> SimpleNamespace:
            return SimpleNamespace(publish=published.append)

        def create_subscription(self, kind: type, topic: str, answer: Any, depth: int) -> None:
            self.answer = answer

        def get_logger(self) -> SimpleNamespace:
            return SimpleNamespace(error=errors.append)

    def spin(node: Node) -> None:
        for numbers in ([0.0], *observations.tolist(), [np.nan] * observations.shape[1]):
            node.answer(SimpleNamespace(data=numbers))

    for name, values in {
        "rclpy": {"init": lambda: None, "create_node": Node, "spin": spin},
        "std_msgs.msg": {"Float32MultiArray": SimpleNamespace},
    }.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    text = (EXAMPLES / "ros2_policy.py").read_text()
    exec(compile(text, "ros2_policy.py", "exec"), {"__name__": "__main__"})
    policy = Policy.load(artifact)
    wanted = [np.atleast_1d(policy.act(observation)).tolist() for observation in observations]
    assert [message.data for message in published] == wanted
    assert len(errors) == 2


def test_the_workflow_gates_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "policies/CartPole-v1/dqn/s0"
    folder.mkdir(parents=True)
    for scheme in ("fp32", "int8"):
        compiled.copied(MODELS / f"CartPole-v1/dqn/s0/{scheme}.tflite", folder)
    monkeypatch.chdir(tmp_path)
    steps = yaml.safe_load((EXAMPLES / "gate.yml").read_text())["jobs"]["policy"]["steps"]
    commands = [shlex.split(step["run"]) for step in steps if "run" in step]
    verbs = [words[1] for words in commands if words[0] == "quarl"]
    assert verbs == ["evaluate", "inspect"]
    for words in commands[1:]:
        assert main(words[1:]) == 0
    (folder / "int8.tflite").write_bytes((folder / "fp32.tflite").read_bytes())
    assert main(commands[1][1:]) == 1
