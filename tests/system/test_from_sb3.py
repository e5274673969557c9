"""Policies of Stable-Baselines3, trained and converted where that is installed, are adopted."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from samples import ROOT, Patch, python_with

from quarl_tf.cli import main
from quarl_tf.runtime.policy import Policy

EXAMPLE = ROOT / "examples/from_sb3.py"
PAGE = (ROOT / "docs/results/sb3.md").read_text()

_TRAIN = """
import gymnasium
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

envs = VecNormalize(DummyVecEnv([lambda: gymnasium.make("CartPole-v1")]))
model = PPO("MlpPolicy", envs, seed=0, n_steps=512).learn(512)
model.save("ppo.zip")
envs.save("stats.pkl")
SAC("MlpPolicy", "Pendulum-v1", seed=0).save("sac.zip")
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a Python that has Stable-Baselines3 and litert-torch: QUARL_SB3, or a new one."""
    (packages,) = re.findall("^pip install (.+)$", PAGE, re.MULTILINE)
    return python_with("QUARL_SB3", tmp_path_factory.mktemp("sb3"), "torch==2.13.0", packages)


def test_policies_of_sb3_are_adopted(python: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run([python, "-c", _TRAIN], check=True)
    for name, env_id, options in (
        ("ppo", "CartPole-v1", ["--vecnormalize", "stats.pkl"]),
        ("sac", "Pendulum-v1", []),
    ):
        words = [python, EXAMPLE, f"{name}.zip", f"{name}.tflite", "--env", env_id, *options]
        assert " on 1000 observations" in subprocess.check_output(words, text=True)
        words = ["adopt", f"{name}.tflite", "--name", name, "--schemes", "int8", "--episodes", "2"]
        assert main(words) == 0
        policy = Policy.load(f"tflite_models/{env_id}/adopted/s0-{name}/int8.tflite")
        assert policy.sidecar.head == {"ppo": "logits", "sac": "action"}[name]


def test_the_commands_of_the_docs_stand(python: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (EXAMPLE, ROOT / "examples/train_sb3.py"):
        shutil.copy(path, tmp_path)
    lines = re.findall(r"^(?:python|quarl) .+$", PAGE, re.MULTILINE)
    assert len(lines) == 10
    for program, verb, *words in map(shlex.split, lines):
        if program == "python":
            shortened = [re.sub(r"^\d+$", "300", word) for word in words]  # Trained for less.
            subprocess.run([python, verb, *shortened], check=True)
        else:
            if verb == "evaluate":  # From here on by names of the shelf.
                monkeypatch.chdir("mine")
            options = ["--episodes", "2"] if verb in ("adopt", "evaluate") else []
            # int8 of a policy that has learned nothing may miss its gate.
            assert main([verb, *words, *options]) in (0, 3)
    assert Path("reports/sb3/report.md").exists()
