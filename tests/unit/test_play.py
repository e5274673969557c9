"""Pages play and films show what the runtime and the environments compute."""

import base64
import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pygame
import pytest
import samples
from compiled import reference_heads
from gymnasium.envs.classic_control import CartPoleEnv
from PIL import Image, ImageSequence
from py_mini_racer import MiniRacer
from samples import MODELS, ROOT, SIDECAR, Capsys, Patch, observed, printed, refusal, refused

from quarl_tf import Policy, environments, pipeline
from quarl_tf.environments import airnav, make
from quarl_tf.evaluation import video
from quarl_tf.report import page, play, write
from quarl_tf.runtime import POLICIES
from quarl_tf.store.records import Evaluation
from quarl_tf.store.workspace import Workspace, evaluation_path

RUN = "ppo-MountainCarContinuous-v0-s0"


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch: Patch) -> None:
    monkeypatch.setattr(write, "draw", lambda *_: iter(()))


@pytest.fixture(scope="module")
def engine() -> Iterator[MiniRacer]:
    with MiniRacer() as racer:  # Left open, it may keep the process from ending.
        for script in ("quarl_tf/report/templates/play.js", "tests/sources/play.js"):
            racer.eval((ROOT / script).read_text())
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
    actions, computed = engine.call("computed", files, observations.tolist())
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
    env.state = np.array(state, "f4" if env.spec.id == "MountainCarContinuous-v0" else "f8")
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
    for (state, action), result in zip(cases, engine.call("stepped", env_id, cases), strict=True):
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
    assert sorted(map(tuple, limits)) == specs


def played(workspace: Workspace) -> Any:
    """Write a report; return the scene of its page."""
    text = pipeline.report([RUN], root=workspace.root, command="quarl report").read_text()
    match = re.search(r'<script type="application/json" id="played">(.*?)</script>', text)
    assert (match is not None) == ("function policy(" in text) == (">At play<" in text)
    return match and json.loads(match[1])


def test_a_page_plays_the_evaluations(engine: MiniRacer, tmp_path: Path) -> None:
    workspace = samples.published(tmp_path, RUN)
    returns = engine.call("played", played(workspace))
    for scheme, episodes in zip(("fp32", "int8"), returns, strict=True):
        evaluation = Evaluation.load(evaluation_path(workspace.artifact(RUN, scheme))).first(5)
        expected = list(zip(evaluation.returns, evaluation.lengths, strict=True))
        np.testing.assert_allclose(episodes, expected, atol=0.01)


def test_what_cannot_play_is_left_out(tmp_path: Path, monkeypatch: Patch) -> None:
    workspace = samples.published(tmp_path, RUN)
    with monkeypatch.context() as patch:
        patch.setattr(page, "LARGEST_PLAYING", 10_000)
        assert played(workspace) is None
    workspace.artifact(RUN, "int8").unlink()
    assert played(workspace) is None
    path = MODELS / "CartPole-v1/a2c/s0-e9aa79bd/fp32.tflite"
    assert play.policy(path.read_bytes(), Policy.load(path).sidecar) is None


def test_other_environments_have_a_film(tmp_path: Path, shots: list[Any]) -> None:
    run = "ppo-LunarLander-v3-s0"
    workspace = samples.published(tmp_path, run)
    text = pipeline.report([run], root=tmp_path, command="quarl report").read_text()
    assert len(text) < page.LARGEST_PLAYING
    (content,) = re.findall(r'src="data:image/gif;base64,(.*?)"', text)
    film = Image.open(io.BytesIO(base64.b64decode(content)))
    assert film.n_frames > 20
    assert film.info["duration"] == 100
    for scheme, shot in zip(("fp32", "int8"), shots[-1], strict=True):
        first = Evaluation.load(evaluation_path(workspace.artifact(run, scheme))).returns[0]
        assert shot.result == pytest.approx(first)


def acting(action: Any, env_id: str = "CartPole-v1", scheme: str = "fp32") -> Any:
    """Return a policy with a constant action."""
    sidecar = replace(SIDECAR, env_id=env_id, scheme=scheme, **environments.env_spec(env_id).facts)
    return SimpleNamespace(sidecar=sidecar, act=lambda _: action)


def balancing() -> Any:
    return video.Policy.load(POLICIES / "CartPole-v1/dqn/s0/int8.tflite")


def test_the_last_shot_of_an_episode_is_kept_until_the_other_ends(shots: list[Any]) -> None:
    images = list(video.scene([acting(0), balancing()], 3, 40).images(100))
    assert len(images) == 1 + 40 + 2 * 50  # The start, 40 steps, and two seconds of the last.
    left, right = zip(*shots, strict=True)
    np.testing.assert_array_equal(left[0].screen, right[0].screen)
    end = [shot.end for shot in left].index("done")
    assert 5 < end < 20
    assert [shot.result for shot in left] == [*range(end), *[end] * (len(left) - end)]
    assert all(shot is left[end] for shot in left[end:])
    assert [shot.end for shot in right[38:42]] == ["", "", "stopped", "stopped"]
    assert right[-1].result == 40
    assert images[end].tobytes() != images[end - 1].tobytes()
    assert images[-1].tobytes() == images[40].tobytes()
    shots.clear()  # Of every fourth step, the last is drawn too.
    list(video.scene([balancing()], 0, 10).images(100, stride=4))
    assert [shot.result for (shot,) in shots] == [0, 4, 8, *[10] * 26]


@pytest.mark.parametrize(
    ("env_id", "action", "size", "rate"),
    [
        ("LunarLander-v3", 2, (600, 400), 50),
        ("PongNoFrameskip-v4", 2, (304, 400), 15),
        ("HalfCheetahBulletEnv-v0", np.zeros(6, np.float32), (534, 400), 60),
    ],
)
def test_all_is_drawn_in_colour(env_id: str, action: Any, size: tuple[int, int], rate: int) -> None:
    scene = video.scene([acting(action, env_id), acting(action, env_id, "int8")], 0, 2)
    assert scene.rate == rate
    image = next(iter(scene.images(400)))
    assert image.size == (2 * size[0] + 3 * video._EDGE, size[1] + 40 + video._EDGE)
    screen = np.asarray(image)[40:-10, 10 : size[0] - 10].astype(int)
    assert (np.ptp(screen, axis=2) > 20).any()


@pytest.mark.parametrize(
    ("screen", "message"),
    [
        (None, "its `render`"),
        (np.zeros((4, 4, 3)), "its `render`"),
        (np.zeros((3, 8, 8), np.uint8), "its `render`"),
        (KeyError("trail"), "CartPole-v1 cannot be made or drawn (KeyError: 'trail')"),
    ],
)
def test_what_is_no_image_is_refused(screen: Any, message: str, monkeypatch: Patch) -> None:
    scene, sound = video.scene([balancing()], 0, 2), np.zeros((8, 8, 3), np.uint8)
    monkeypatch.setattr(CartPoleEnv, "render", Mock(side_effect=[sound, screen]))
    assert message in refused(list, scene.images(100), code=2)


def test_no_environment_closes_before_the_last_image(monkeypatch: Patch) -> None:
    scene, close = video.scene([acting(0), balancing()], 3, 40), Mock()
    monkeypatch.setattr(CartPoleEnv, "close", close)
    images = scene.images(100)
    next(images)
    close.reset_mock()  # Those that were asked for their spaces.
    for _ in images:
        close.assert_not_called()
    assert close.call_count == 2


def test_a_gif_is_a_loop_of_the_right_length(tmp_path: Path, monkeypatch: Patch) -> None:
    scene, target = video.scene([acting(0), balancing()], 0, 30), tmp_path / "new/film.gif"
    monkeypatch.setattr(video, "_GIF_HEIGHT", 100)
    video.record(scene, target)
    assert list(target.parent.iterdir()) == [target]
    large = target.stat().st_size
    assert large < video.GIF_LIMIT
    with Image.open(target) as film:
        assert film.info["loop"] == 0
        milliseconds = sum(frame.info["duration"] for frame in ImageSequence.Iterator(film))
    assert milliseconds == 16 * 40 + 2000  # 16 of 31 images at 25 a second, then two seconds.
    monkeypatch.setattr(video, "GIF_LIMIT", large)  # It is made smaller, or fails.
    video.record(scene, target)
    assert target.stat().st_size < large
    target.unlink()
    monkeypatch.setattr(video, "GIF_LIMIT", 100)
    assert "the limit is 100" in refused(video.record, scene, target)
    monkeypatch.setattr(video, "_MOST_FRAMES", 5)
    assert "more than 5 frames" in refused(video.record, scene, target)
    assert list(target.parent.iterdir()) == []


def test_a_window_shows_every_step_and_can_be_closed(shots: list[Any], monkeypatch: Patch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")  # Invisible.
    monkeypatch.setattr(video, "_SECONDS_AT_THE_END", 0)
    video.watch(video.scene([acting(0), balancing()], 0, 5))
    assert len(shots) == 6
    scene = video.scene([balancing()], 0, 50)
    first, shown = next(iter(scene.images(100))), []

    def images(scene: Any, height: int) -> Iterator[Image.Image]:
        for number in range(9):
            shown.append(number)
            if number == 3:
                pygame.event.post(pygame.event.Event(pygame.QUIT))
            yield first

    monkeypatch.setattr(video.Scene, "images", images)
    video.watch(scene)
    assert shown == [0, 1, 2, 3]
    pygame.display.quit()
    monkeypatch.setenv("SDL_VIDEODRIVER", "none-such")
    assert "quarl record" in refused(video.watch, scene)


def test_what_cannot_be_shown_is_refused() -> None:
    for policies, seed, steps, received in (
        ([balancing()], -1, 5, "seed=-1, max_steps=5"),
        ([balancing()], 0, 0, "seed=0, max_steps=0"),
        ([balancing(), acting(0, "LunarLander-v3")], 0, 5, "['CartPole-v1', 'LunarLander-v3']"),
        ([acting(0, "BrokenReward-v0")], 0, 5, "draws nothing"),
    ):
        assert received in refused(video.scene, policies, seed, steps)


def test_the_commands(tmp_path: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    folder = tmp_path / "tflite_models/CartPole-v1/dqn/s0"
    shutil.copytree(POLICIES / "CartPole-v1/dqn/s0", folder)
    artifact, run_id, new = str(folder / "int8.tflite"), "dqn-CartPole-v1-s0", tmp_path / "new"
    root, target = ("--root", str(tmp_path)), tmp_path / "a.gif"
    words = [run_id, "--schemes", "int8", "--max-steps", "3", "--out", str(target), *root]
    assert f"recorded  {target}" in printed(capsys, "record", *words)
    assert target.exists()
    for arguments, out, code, message in (
        ([run_id], "film.gif", 1, "fp32.tflite is not there; make it (quarl export"),
        (["nothing"], "film.gif", 2, "A run id is"),
        ([run_id, "--schemes", "fp33"], "film.gif", 2, "fp33"),
        ([artifact], "film.avi", 2, "ends in .gif"),
    ):
        words = [*arguments, *root, "--out", str(new / out)]
        assert message in refusal(capsys, "record", *words, code=code)
    monkeypatch.setitem(sys.modules, "pygame", None)
    assert "pip install" in refusal(capsys, "record", artifact, *root, "--out", str(new / "a.gif"))
    assert "[video]" in refusal(capsys, "watch", artifact, code=1)
    assert not new.exists()
