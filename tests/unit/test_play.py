"""The JavaScript of a page computes the same as the runtime and the environments."""

import base64
import io
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from compiled import reference_heads
from PIL import Image
from py_mini_racer import MiniRacer
from samples import MODELS, ROOT, Patch, observed

from quarl_tf import pipeline
from quarl_tf.environments import airnav, make
from quarl_tf.report import page, play, write
from quarl_tf.runtime.policy import Policy
from quarl_tf.store.records import Evaluation
from quarl_tf.store.workspace import Workspace, evaluation_path

RUN = "ppo-MountainCarContinuous-v0-s0"

#: A function of browsers that the engine lacks.
ATOB = """
const atob = (text) =>
  Array.from(Uint8Array.fromBase64(text), (byte) => String.fromCharCode(byte)).join("");
"""
COMPUTE = "(files, observations) => files.map((file) => observations.map(policy(file)))"
STEP = """(env, cases) => cases.map(([state, action]) => {
  const [next, reward, over] = TASKS[env].step(state, action);
  return { next, reward, over, observation: TASKS[env].observe(next) };
})"""
PLAY = """({ env, policies, starts }) => policies.map((file) => starts.map(({ state }) => {
  let game = { act: policy(file), state, total: 0, steps: 0, over: false };
  while (!game.over) game = advance(TASKS[env], game);
  return [game.total, game.steps];
}))"""


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch: Patch) -> None:
    monkeypatch.setattr(write, "draw", lambda *_: iter(()))


@pytest.fixture(scope="module")
def engine() -> Iterator[MiniRacer]:
    # Left open, it may keep the process from ending.
    with MiniRacer() as racer:
        racer.eval(ATOB)
        racer.eval((ROOT / "quarl_tf/report/templates/play.js").read_text())
        yield racer


@pytest.mark.parametrize("scheme", ["fp32", "int8"])
@pytest.mark.parametrize(
    "name", ["CartPole-v1/dqn", "Acrobot-v1/ppo", "MountainCarContinuous-v0/ppo"]
)
def test_heads_and_actions(engine: MiniRacer, name: str, scheme: str) -> None:
    path = MODELS / name / f"s0/{scheme}.tflite"
    runtime, content = Policy.load(path), path.read_bytes()
    sidecar = runtime.sidecar
    observations = observed(sidecar.env_id, 10, 29)
    heads = reference_heads(path, observations)
    # With very wide bounds, an action is the head.
    wide = {"action_low": [-1e9] * heads.shape[1], "action_high": [1e9] * heads.shape[1]}
    files = [play.policy(content, variant) for variant in (sidecar, replace(sidecar, **wide))]
    actions, computed = engine.call(f"({COMPUTE})", files, observations.tolist())
    margin = 0 if scheme == "int8" else 1e-6 * np.abs(heads).max()
    np.testing.assert_allclose(computed, heads, rtol=0, atol=margin)
    np.testing.assert_allclose(actions, [runtime.act(o) for o in observations], rtol=0, atol=1e-6)


def step_airnav(state: dict[str, Any], action: int) -> tuple[Any, float, bool, Any]:
    env = airnav.AirNavVector(1)
    env.reset(seed=0)
    env.missions = airnav.Missions(*(np.array([value]) for value in state.values()))
    (observation,), (reward,), (over,), *_ = env.step(np.array([action]))
    position, velocity, heading = (field[0] for field in env.missions[:3])
    return [*position, *velocity, heading], reward, over, observation


def step(env: Any, state: list[float], action: Any) -> tuple[Any, float, bool, Any]:
    env.reset()
    in_float32 = env.spec.id == "MountainCarContinuous-v0"
    env.state = np.array(state, np.float32 if in_float32 else np.float64)
    action = np.float32(action) if isinstance(action, list) else action
    observation, reward, over, *_ = env.step(action)
    return env.state, reward, over, observation


@pytest.mark.parametrize(
    ("env_id", "reach"),
    [
        ("Acrobot-v1", [np.pi, np.pi, 12, 28]),
        ("CartPole-v1", [2.5, 3, 0.22, 3]),
        ("MountainCarContinuous-v0", [1, 0.07]),
        ("Pendulum-v1", [7, 8]),
        ("AirNav-v0", [29, 29, 5, 5, np.pi]),
    ],
)
def test_steps_are_the_environment_s(engine: MiniRacer, env_id: str, reach: list[float]) -> None:
    random, env = np.random.default_rng(0), make(env_id).unwrapped
    env.action_space.seed(0)
    states: list[Any] = random.uniform(-1, 1, (200, len(reach))) * reach
    if env_id == "MountainCarContinuous-v0":
        states = (states - [0.3, 0]).clip(-1.2, 0.6)
    states = states.astype(np.float32).tolist()
    if env_id == "AirNav-v0":
        states = [
            play.start(env_id, seed) | {"position": s[:2], "velocity": s[2:4], "heading": s[4]}
            for seed, s in enumerate(states)
        ]
    actions = [np.asarray(env.action_space.sample()).tolist() for _ in states]
    cases, overs = list(zip(states, actions, strict=True)), 0
    for (state, action), result in zip(cases, engine.call(f"({STEP})", env_id, cases), strict=True):
        if env_id == "AirNav-v0":
            expected, mission = step_airnav(state, action), result["next"]
            result["next"] = [*mission["position"], *mission["velocity"], mission["heading"]]
        else:
            expected = step(env, state, action)
        overs += result["over"]
        for key, value in zip(("next", "reward", "over", "observation"), expected, strict=True):
            np.testing.assert_allclose(result[key], value, rtol=1e-6, atol=1e-7, err_msg=key)
    assert env_id == "Pendulum-v1" or 0 < overs < len(cases)


def test_environments_have_their_limits(engine: MiniRacer) -> None:
    limits = engine.execute("Object.entries(TASKS).map(([id, task]) => [id, task.limit])")
    specs = [(id_, gym.spec(id_).max_episode_steps or airnav.LIMIT) for id_ in play.ENVIRONMENTS]
    assert list(map(tuple, limits)) == specs


def copied(folder: Path, run_id: str = RUN) -> Workspace:
    workspace = Workspace(folder)
    workspace.artifact_dir(run_id).mkdir(parents=True)
    for path in Workspace(ROOT).artifact_dir(run_id).iterdir():
        if path.name.split(".")[0] in ("fp32", "int8", "random"):
            shutil.copy(path, workspace.artifact_dir(run_id))
    return workspace


def page_of(workspace: Workspace, run_id: str = RUN) -> str:
    return pipeline.report([run_id], root=workspace.root, command="quarl report").read_text()


def played(workspace: Workspace) -> Any:
    """Write a report; return the scene of its page."""
    text = page_of(workspace)
    match = re.search(r'<script type="application/json" id="played">(.*?)</script>', text)
    assert (match is not None) == ("function policy(" in text) == (">At play<" in text)
    return match and json.loads(match[1])


def test_a_page_plays_the_evaluations(engine: MiniRacer, tmp_path: Path) -> None:
    workspace = copied(tmp_path)
    returns = engine.call(f"({PLAY})", played(workspace))
    for scheme, episodes in zip(("fp32", "int8"), returns, strict=True):
        evaluation = Evaluation.load(evaluation_path(workspace.artifact(RUN, scheme))).first(5)
        expected = list(zip(evaluation.returns, evaluation.lengths, strict=True))
        np.testing.assert_allclose(episodes, expected, atol=0.01)


def test_what_cannot_play_is_left_out(tmp_path: Path, monkeypatch: Patch) -> None:
    workspace = copied(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(page, "LARGEST_PLAYING", 10_000)
        assert played(workspace) is None
    workspace.artifact(RUN, "int8").unlink()
    assert played(workspace) is None
    path = MODELS / "CartPole-v1/a2c/s0-e9aa79bd/fp32.tflite"
    assert play.policy(path.read_bytes(), Policy.load(path).sidecar) is None


def test_other_environments_have_a_film(tmp_path: Path, shots: list[Any]) -> None:
    run = "ppo-LunarLander-v3-s0"
    workspace = copied(tmp_path, run)
    text = page_of(workspace, run)
    assert len(text) < page.LARGEST_PLAYING
    (content,) = re.findall(r'src="data:image/gif;base64,(.*?)"', text)
    film = Image.open(io.BytesIO(base64.b64decode(content)))
    assert film.n_frames > 20
    assert film.info["duration"] == 100
    for scheme, shot in zip(("fp32", "int8"), shots[-1], strict=True):
        first = Evaluation.load(evaluation_path(workspace.artifact(run, scheme))).returns[0]
        assert shot.result == pytest.approx(first)
