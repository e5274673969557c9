"""Films of policies in one episode, with captions and returns."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pygame
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from PIL import Image, ImageSequence
from samples import SIDECAR, Capsys, Patch, printed, refusal, refused

from quarl_tf import environments
from quarl_tf.evaluation import video
from quarl_tf.runtime import POLICIES


def acting(action: Any, env_id: str = "CartPole-v1", scheme: str = "fp32") -> Any:
    """Return a policy with a constant action."""
    spec = environments.env_spec(env_id)
    sidecar = replace(SIDECAR, env_id=env_id, scheme=scheme, **spec.facts)
    return SimpleNamespace(sidecar=sidecar, act=lambda _: action)


def balancing() -> Any:
    return video.Policy.load(POLICIES / "CartPole-v1/dqn/s0/int8.tflite")


def test_the_last_shot_of_an_episode_is_kept_until_the_other_ends(shots: list[Any]) -> None:
    images = list(video.scene([acting(0), balancing()], 3, 40).images(100))
    # The start, 40 steps, and two seconds of the last.
    assert len(images) == 1 + 40 + 2 * 50
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
    # Of every fourth step, the last is drawn too.
    shots.clear()
    list(video.scene([balancing()], 0, 10).images(100, stride=4))
    assert [shot.result for (shot,) in shots] == [0, 4, 8, *[10] * 26]


@pytest.mark.parametrize(
    ("env_id", "action", "size", "rate"),
    [
        ("CartPole-v1", 0, (600, 400), 50),
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
    # 16 of 31 images at 25 a second, and two seconds of the last.
    assert milliseconds == 16 * 40 + 2000
    # It is made smaller, or fails.
    monkeypatch.setattr(video, "GIF_LIMIT", large)
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


def test_what_cannot_be_shown_is_refused(broken_reward: str) -> None:
    for policies, seed, steps, received in (
        ([balancing()], -1, 5, "seed=-1, max_steps=5"),
        ([balancing()], 0, 0, "seed=0, max_steps=0"),
        ([balancing(), acting(0, "LunarLander-v3")], 0, 5, "['CartPole-v1', 'LunarLander-v3']"),
        ([acting(0, broken_reward)], 0, 5, "draws nothing"),
    ):
        assert received in refused(video.scene, policies, seed, steps)


def test_captions_of_several_runs_have_their_ids() -> None:
    native, other = balancing(), acting(0)
    int8 = f"int8, {round(native.sidecar.size_bytes / 1000)} kB"
    assert video.scene([native, other], 0, 5).names == [int8, "fp32, 0 kB"]
    other.sidecar = replace(other.sidecar, run_id="ppo-CartPole-v1-s1", native=False)
    names = [f"dqn-CartPole-v1-s0 {int8}", "ppo-CartPole-v1-s1 fp32"]
    assert video.scene([native, other], 0, 5).names == names


def test_the_commands(tmp_path: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    folder = tmp_path / "tflite_models/CartPole-v1/dqn/s0"
    shutil.copytree(POLICIES / "CartPole-v1/dqn/s0", folder)
    artifact, run_id, new = str(folder / "int8.tflite"), "dqn-CartPole-v1-s0", tmp_path / "new"
    root, target = ("--root", str(tmp_path)), tmp_path / "a.gif"
    words = [run_id, "--schemes", "int8", "--max-steps", "3", "--out", str(target), *root]
    assert f"recorded  {target}" in printed(capsys, "record", *words)
    assert target.exists()
    for arguments, out, code, message in (
        ([run_id], "film.gif", 1, "fp32.tflite cannot be read"),
        (["nothing"], "film.gif", 2, "A run id is"),
        ([run_id, "--schemes", "fp33"], "film.gif", 2, "fp33"),
        ([artifact], "film.avi", 2, "ends in .gif"),
    ):
        words = [*arguments, *root, "--out", str(new / out)]
        assert message in refusal(capsys, "record", *words, code=code)
    monkeypatch.setitem(sys.modules, "pygame", None)
    words = [artifact, *root, "--out", str(new / "film.gif")]
    assert "pip install" in refusal(capsys, "record", *words)
    assert "[video]" in refusal(capsys, "watch", artifact, code=1)
    assert not new.exists()
