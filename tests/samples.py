"""Records, helpers and checks that several tests share."""

import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec as Registration

from quarl_tf import Policy, agents, networks, presets
from quarl_tf.cli import main
from quarl_tf.environments import env_spec, make_vector
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.files import sha256
from quarl_tf.spec import Quantization, Run
from quarl_tf.store.records import Evaluation, Sidecar, TrainingRecord
from quarl_tf.store.workspace import Workspace
from quarl_tf.training import loop

Capsys, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
Artifacts, Copy, Describe = dict[str, Path], Callable[[str], Path], Callable[..., Path]

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "tflite_models"
RUN = Run("dqn", "CartPole-v1", 0)
PRESET = presets.load("dqn", "CartPole-v1")

TRAINING = TrainingRecord(
    run=RUN.to_dict(),
    run_id="dqn-CartPole-v1-s0",
    preset=json.loads(json.dumps(asdict(PRESET))),  # JSON has no tuples.
    best_step=10,
    selection_return=9.5,
    network_sha256=hashlib.sha256(b"network").hexdigest(),
    calibration_sha256=hashlib.sha256(b"calibration").hexdigest(),
    seconds=0.1,
    versions={"numpy": "2"},
    commits=["0123456789ab"],
    sources=["01234567"],
    processors=["Alpha with avx2"],
)

SIDECAR = replace(
    Sidecar.load(MODELS / "CartPole-v1/dqn/s0/fp32.json"),
    size_bytes=10,
    network_sha256=TRAINING.network_sha256,
    preset=TRAINING.preset,
    trained_commits=TRAINING.commits,
    trained_on=TRAINING.processors,
    versions={"tensorflow": "2.21.0"},
    commit=None,
)

#: Of the same flatbuffer.
EVALUATION = replace(
    Evaluation.load(MODELS / "CartPole-v1/dqn/s0/fp32.eval.json"),
    seeds=[1, 2],
    returns=[9.0, 10.0],
    lengths=[9, 10],
    ties=3,
    latency_us={"median": 9.0, "p95": 11.5},
    reference_sha256=None,
    processor="Beta with asimd",
)

_SIZES: dict[str, Any] = {"steps": 1200, "num_envs": 4, "network": [32, 32], "n_step": 2}
_SIZES |= {"learning_starts": 200, "buffer_size": 800, "batch_size": 16, "gradient_steps": 8}
_SIZES |= {"train_frequency": 64, "target_update": 20, "checkpoint_every": 400}
_SIZES |= {"evaluation_every": 400, "evaluation_episodes": 8}
#: A training of a second, for tests that do not depend on what is learned. Kernels of fewer than
#: 1024 weights stay in float in dynamic_int8; the ring holds less than is added, so that it wraps.
TINY = Run("dqn", "CartPole-v1", 0, _SIZES)

#: The file of a study, to which keys can be added.
STUDY = "name: s\nseeds: [0]\ncells: [{algo: ppo, env: CartPole-v1}]\n"


def quantised(**options: Any) -> Quantization:
    return Quantization.from_mapping({"bits": 4, "delay": 100, **options})


def silent(*_: Any) -> None:
    """Show no progress."""


def refused(function: Any, *arguments: Any, code: int | None = None, **options: Any) -> str:
    """Call a function that has to raise a QuarlError, of this exit code; return its one line."""
    with pytest.raises(QuarlError) as caught:
        function(*arguments, **options)
    assert code in (None, caught.value.exit_code)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def printed(capsys: Capsys, *words: str) -> str:
    """Run a command that has to succeed; return its output."""
    assert main(words) == 0
    return capsys.readouterr().out


def refusal(capsys: Capsys, *words: str, code: int = 2) -> str:
    """Run a command that has to fail with this code; return its one line."""
    assert main(words) == code
    line = capsys.readouterr().err
    assert line.startswith("quarl: ")
    assert line.count("\n") == 1
    return line


def write_study(folder: Path, text: str) -> Path:
    path = folder / "study.yaml"
    path.write_text(text)
    return path


def write_presets(path: Path, algo: str, env_id: str, preset: Any) -> Path:
    """Write a file of presets that holds one."""
    path.write_text(json.dumps({algo: {env_id: preset}}))
    return path


def python(*words: str, code: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process, which has to end with this code."""
    command = [sys.executable, *words]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert completed.returncode == code, completed.stderr
    return completed


def python_with(variable: str, folder: Path, *installations: str) -> str:
    """Return the Python that a variable of the environment names, or that of a new one."""
    if path := os.environ.get(variable):
        return path
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    for packages in installations:
        subprocess.run([folder / "bin/pip", "install", "--quiet", *packages.split()], check=True)
    return str(folder / "bin/python")


def copied(artifact: Path, folder: Path) -> Path:
    """Copy a flatbuffer and its sidecar."""
    for suffix in (".tflite", ".json"):
        shutil.copy(artifact.with_suffix(suffix), folder)
    return folder / artifact.name


def published(folder: Path, run_id: str) -> Workspace:
    """Copy what a report plays of a published run: its curve, fp32, int8 and the random policy."""
    workspace, source = Workspace(folder), Workspace(ROOT).artifact_dir(run_id)
    workspace.artifact_dir(run_id).mkdir(parents=True)
    for path in source.iterdir():
        if path.name.split(".")[0] in ("fp32", "int8", "progress", "random"):
            shutil.copy(path, workspace.artifact_dir(run_id))
    return workspace


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the modification time and the content of every file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}


def products(folder: Path) -> list[bytes]:
    """Return what a training writes, except for its times."""
    with (folder / "progress.csv").open(newline="") as file:
        rows = [{**row, "seconds": ""} for row in csv.DictReader(file)]
    names = ("network.npz", "calibration.npz")
    return [*((folder / name).read_bytes() for name in names), repr(rows).encode()]


class Drawn(gym.Env[Any, Any]):
    """Observes draws of its observation space, and keeps the last action."""

    def __init__(self, observation_space: Any, action_space: Any, reward: float = 1.0) -> None:
        self.observation_space = deepcopy(observation_space)  # Draws follow its seed.
        self.action_space, self.reward = action_space, reward

    def reset(self, *, seed: int | None = None, **_: Any) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert np.shape(action) == self.action_space.shape
        assert np.asarray(action).dtype == self.action_space.dtype
        self.steps += 1
        self.received = action
        return self.observation_space.sample(), self.reward, self.steps == 3, False, {}


def register(patch: Patch, env_id: str, create: Any, **options: Any) -> str:
    """Register an environment for one test; return its id."""
    patch.setitem(gym.registry, env_id, Registration(env_id, create, **options))
    return env_id


def step(env: gym.Env[Any, Any], act: Callable[[np.ndarray], Any], seed: int) -> tuple[float, int]:
    """Step Gymnasium by hand; return the return and the length of an episode."""
    observation, _ = env.reset(seed=seed)
    rewards, over = [], False
    while not over:
        observation, reward, terminated, truncated, _ = env.step(act(observation))
        rewards.append(float(reward))
        over = terminated or truncated
    return sum(rewards), len(rewards)


#: Spaces of environments of draws, and whose presets they take.
DRAWN = {
    "Steering-v0": (
        gym.spaces.Box(-1, 1, (3,)),
        gym.spaces.Box(np.float32([-2, 0]), np.float32([2, 0.6])),
        "MountainCarContinuous-v0",
    ),
    "Bytes-v0": (gym.spaces.Box(0, 255, (6,), np.uint8), gym.spaces.Discrete(3), "CartPole-v1"),
    "Frames-v0": (  # As a game's, but smaller; no byte at an end of its range, as in many games.
        gym.spaces.Box(40, 200, (28, 28, 4), np.uint8),
        gym.spaces.Discrete(4),
        "BreakoutNoFrameskip-v4",
    ),
}
for _name, (*_spaces, _) in DRAWN.items():
    gym.register(_name, partial(Drawn, *_spaces))
_spaces = [gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2)]
gym.register("BrokenReward-v0", partial(Drawn, *_spaces, reward=np.nan))


def preset(run: Run, **changes: Any) -> presets.Preset:
    """Return the preset of a run, of which the environment may be one of draws."""
    *_, env_id = DRAWN.get(run.env_id, (run.env_id,))
    return presets.load(run.algo, env_id, {**run.overrides, **changes})


def built(run: Run) -> Any:
    """Build a network as it is exported: float32, whatever it was trained in."""
    settings = preset(run, precision="float32")
    return agents.build_network(run.algo, env_spec(run.env_id), settings, run.seed)


def begun(folder: Path, run: Run) -> Any:
    """Return a training whose state was neither started nor resumed."""
    return loop._Training(folder, run, preset(run))


def train(workspace: Workspace, run: Run, update: Any = silent, settings: Any = None) -> Any:
    """Train a run, by default by its own preset; return its record."""
    return loop.train(workspace, run, update, settings or preset(run))


def uncut_and_cut(folder: Path, run: Run, settings: Any = None) -> tuple[Workspace, Workspace]:
    """Train; return the workspace, and another as a kill after the last step leaves it."""
    uncut, cut = Workspace(folder / "uncut"), Workspace(folder / "cut")

    def keep(step: int, steps: int, _: str) -> None:
        if step >= steps:
            shutil.copytree(uncut.root, cut.root)

    train(uncut, run, keep, settings)
    return uncut, cut


def heads(path: Path, observations: np.ndarray) -> np.ndarray:
    """Return the heads of a flatbuffer: [n, outputs]."""
    return np.stack([*map(Policy.load(path).head, observations)])


def observed(env_id: str, num_envs: int, ticks: int) -> np.ndarray:
    """Observe random play."""
    envs = make_vector(env_id, num_envs)
    envs.action_space.seed(0)
    played = (envs.step(envs.action_space.sample())[0] for _ in range(ticks))
    return np.concatenate([envs.reset(seed=0)[0], *played])


def settle(network: Any, observations: np.ndarray, seed: int) -> None:
    """Set biases and the normaliser's statistics, as training does."""
    random, values = np.random.default_rng(seed), networks.weights(network)
    for name in values:
        if "bias" in name or "norm/" in name:
            values[name] = values[name] + random.normal(0, 0.1, values[name].shape)
    if "normalizer/mean:0" in values:
        values["normalizer/mean:0"] = observations.mean(axis=0)
        values["normalizer/inverse_deviation:0"] = 1 / observations.std(axis=0)
    networks.set_weights(network, {k: v.astype(np.float32) for k, v in values.items()})


def returns_of(scheme: str, episodes: int = 30) -> list[float]:
    """Return CartPole-like returns: all perfect but for few bits."""
    ranges = {"random": (9, 50), "ptq_w2": (8, 12), "ptq_w4": (380, 501)}
    low, high = ranges.get(scheme, (500, 501))
    return np.random.default_rng(7).integers(low, high, episodes).astype(float).tolist()


def write_training(workspace: Workspace, run: Run, weights: Any, observations: np.ndarray) -> None:
    """Write a finished training."""
    folder = workspace.run_dir(run.run_id)
    networks.save_weights(folder / "calibration.npz", {"observations": observations})
    (folder / "progress.csv").write_text("step\n1\n")
    values = {"run": run.to_dict(), "run_id": run.run_id, "preset": asdict(preset(run))}
    hashed = sha256(folder / "calibration.npz")
    replace(TRAINING, calibration_sha256=hashed, **values).save(folder / "training.json")
    write_network(folder, weights)


def write_network(folder: Path, weights: networks.Weights) -> None:
    """Give a finished training another network."""
    networks.save_weights(folder / "network.npz", weights)
    record = TrainingRecord.load(folder / "training.json")
    replace(record, network_sha256=sha256(folder / "network.npz")).save(folder / "training.json")


def random_weights(network: Any, seed: int = 0) -> networks.Weights:
    """Set every variable to random values, those of normalisers included; return them."""
    random, values = np.random.default_rng(seed), networks.weights(network)
    for name, value in values.items():
        drawn = random.normal(size=value.shape) / np.sqrt(max(1, value.size // value.shape[-1]))
        drawn = np.abs(drawn) + 0.1 if "deviation" in name else drawn  # Deviations are positive.
        values[name] = drawn.astype(np.float32)
    networks.set_weights(network, values)
    return values
