"""Films show policies of one task on one seed, each with its name and its return."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import imageio_ffmpeg
import numpy as np
import pygame
import pytest
from PIL import Image
from samples import SIDECAR, Capsys, Patch, refusal, refused

from quarl_tf import cli, environments
from quarl_tf.evaluation import video
from quarl_tf.runtime import POLICIES


def acting(action: Any, env_id: str = "CartPole-v1", scheme: str = "fp32") -> Any:
    """Return a policy that does the same whatever it sees."""
    spec = environments.env_spec(env_id)
    sidecar = replace(SIDECAR, env_id=env_id, scheme=scheme, **spec.facts)
    return SimpleNamespace(sidecar=sidecar, act=lambda _: action)


def balancing() -> Any:
    return video.Policy.load(POLICIES / "CartPole-v1/dqn/s0/int8.tflite")


@pytest.fixture
def shots(monkeypatch: Patch) -> list[Any]:
    """Return what every image is drawn of, filled as it is drawn."""
    drawn: list[Any] = []
    compose = video._compose

    def kept(names: Any, shots: Any, height: int) -> Any:
        drawn.append(tuple(shots))
        return compose(names, shots, height)

    monkeypatch.setattr(video, "_compose", kept)
    return drawn


def test_an_episode_that_ended_is_held_until_the_other_ends(shots: list[Any]) -> None:
    scene = video.scene([acting(0), balancing()], 3, 40)
    assert [name.split(",")[0] for name in scene.names] == ["fp32", "int8"]
    images = list(scene.images(100))
    # 40 steps, what is seen before them, and two seconds of the last.
    assert len(images) == 1 + 40 + 2 * 50
    left, right = zip(*shots, strict=True)
    np.testing.assert_array_equal(left[0].screen, right[0].screen)
    end = [shot.end for shot in left].index("done")
    assert 5 < end < 20
    assert [shot.result for shot in left[: end + 1]] == list(range(end + 1))
    assert all(shot is left[end] for shot in left[end:])
    assert [shot.end for shot in right[38:42]] == ["", "", "stopped", "stopped"]
    assert right[-1].result == 40
    assert images[end].tobytes() != images[end - 1].tobytes()
    assert images[-1].tobytes() == images[40].tobytes()


def test_every_so_many_steps_are_drawn_and_the_last(shots: list[Any]) -> None:
    list(video.scene([balancing()], 0, 10).images(100, stride=4))
    assert [shot.result for (shot,) in shots[:5]] == [0, 4, 8, 10, 10]


@pytest.mark.parametrize(
    ("env_id", "action", "size", "rate"),
    [
        ("CartPole-v1", 0, (600, 400), 50),
        ("LunarLander-v3", 2, (600, 400), 50),
        ("PongNoFrameskip-v4", 2, (304, 400), 15),
        ("HalfCheetahBulletEnv-v0", np.zeros(6, np.float32), (534, 400), 60),
    ],
)
def test_environments_are_drawn_in_colour(
    env_id: str, action: Any, size: tuple[int, int], rate: int
) -> None:
    scene = video.scene([acting(action, env_id), acting(action, env_id, "int8")], 0, 2)
    assert scene.rate == rate
    image = next(iter(scene.images(400)))
    edges = 2 * size[0] + 3 * video._EDGE, size[1] + 40 + video._EDGE
    assert image.size == edges
    screen = np.asarray(image)[40:-10, 10 : size[0] - 10].astype(int)
    assert (np.ptp(screen, axis=2) > 20).any()


def test_a_gif_is_a_loop_of_the_right_length(tmp_path: Path) -> None:
    target = tmp_path / "new/film.gif"
    video.record(video.scene([acting(0), balancing()], 0, 30), target)
    assert list(target.parent.iterdir()) == [target]
    assert target.stat().st_size < video.GIF_LIMIT
    with Image.open(target) as film:
        assert film.info["loop"] == 0
        milliseconds = 0
        for place in range(film.n_frames):
            film.seek(place)
            milliseconds += film.info["duration"]
    # 16 of 31 images at 25 a second, and two seconds of the last.
    assert milliseconds == 16 * 40 + 2000


def test_a_gif_is_made_smaller_or_not_at_all(tmp_path: Path, monkeypatch: Patch) -> None:
    scene, target = video.scene([acting(0), balancing()], 0, 30), tmp_path / "film.gif"
    video.record(scene, target)
    large = target.stat().st_size
    monkeypatch.setattr(video, "GIF_LIMIT", large)
    video.record(scene, target)
    assert target.stat().st_size < large
    target.unlink()
    monkeypatch.setattr(video, "GIF_LIMIT", 100)
    assert "the limit is 100" in refused(video.record, scene, target)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def films(monkeypatch: Patch) -> list[Any]:
    """Return what a stand-in of imageio-ffmpeg was given."""
    given: list[Any] = []

    def write_frames(path: str, size: tuple[int, int], **options: Any) -> Iterator[None]:
        given.append((size, options["fps"]))
        while True:
            frame = yield
            given.append(frame)
            Path(path).write_bytes(frame)
            if len(given) == 20:
                raise OSError(28, "No space left on device")

    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", SimpleNamespace(write_frames=write_frames))
    monkeypatch.setattr(video, "_SECONDS_AT_THE_END", 0)
    return given


def test_an_mp4_has_every_step(tmp_path: Path, films: list[Any]) -> None:
    target = tmp_path / "film.mp4"
    video.record(video.scene([balancing()], 0, 5), target)
    (width, height), rate = films[0]
    assert (width % 2, height % 2, rate) == (0, 0, 50)
    assert [len(frame) for frame in films[1:]] == [3 * width * height] * 6
    assert list(tmp_path.iterdir()) == [target]


def test_of_a_film_that_fails_nothing_is_left(tmp_path: Path, films: list[Any]) -> None:
    scene = video.scene([balancing()], 0, 50)
    assert "No space left" in refused(video.record, scene, tmp_path / "film.mp4")
    assert len(films) == 20
    assert list(tmp_path.iterdir()) == []


# The package leaves it to Python to close its pipes.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_mp4_can_be_played(tmp_path: Path) -> None:
    reader = imageio_ffmpeg.read_frames
    video.record(video.scene([balancing()], 0, 5), tmp_path / "film.mp4")
    with closing(reader(str(tmp_path / "film.mp4"))) as frames:
        assert next(frames)["fps"] == 50
        assert len(list(frames)) == 6 + 2 * 50


@pytest.fixture
def window(monkeypatch: Patch) -> Any:
    """Return pygame, whose windows nobody sees."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr(video, "_SECONDS_AT_THE_END", 0)
    return pygame


def test_a_window_shows_every_step(window: Any, shots: list[Any]) -> None:
    video.watch(video.scene([acting(0), balancing()], 0, 5))
    assert len(shots) == 6


def test_a_window_can_be_closed(window: Any, monkeypatch: Patch) -> None:
    scene = video.scene([balancing()], 0, 50)
    first, shown = next(iter(scene.images(100))), []

    def images(scene: Any, height: int) -> Iterator[Image.Image]:
        for number in range(9):
            shown.append(number)
            if number == 3:
                window.event.post(window.event.Event(window.QUIT))
            yield first

    monkeypatch.setattr(video.Scene, "images", images)
    video.watch(scene)
    assert shown == [0, 1, 2, 3]


def test_without_a_display_a_window_gets_one_line(monkeypatch: Patch) -> None:
    pytest.importorskip("pygame").display.quit()
    monkeypatch.setenv("SDL_VIDEODRIVER", "none-such")
    assert "quarl record" in refused(video.watch, video.scene([balancing()], 0, 5))


@pytest.mark.parametrize(("seed", "steps"), [(-1, 5), (0, 0)])
def test_an_episode_needs_a_seed_and_a_step(seed: int, steps: int) -> None:
    assert f"seed={seed}, max_steps={steps}" in refused(video.scene, [balancing()], seed, steps)


def test_one_environment_at_a_time_is_shown() -> None:
    others = [balancing(), acting(0, "LunarLander-v3")]
    assert "['CartPole-v1', 'LunarLander-v3']" in refused(video.scene, others, 0, 5)


def test_policies_of_several_runs_are_told_apart() -> None:
    other = acting(0, scheme="int8")
    other.sidecar = replace(other.sidecar, run_id="ppo-CartPole-v1-s1", native=False)
    names = video.scene([balancing(), other], 0, 5).names
    assert names == ["dqn-CartPole-v1-s0 int8, 84 kB", "ppo-CartPole-v1-s1 int8"]


def test_what_draws_nothing_is_refused(broken_reward: str) -> None:
    assert "draws nothing" in refused(video.scene, [acting(0, broken_reward)], 0, 5)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a root with one trained policy."""
    folder = "CartPole-v1/dqn/s0"
    shutil.copytree(POLICIES / folder, tmp_path / "tflite_models" / folder)
    return tmp_path


def test_a_run_is_recorded_by_its_id(root: Path, capsys: Capsys) -> None:
    given, target = ["record", "dqn-CartPole-v1-s0", "--root", str(root)], root / "film.gif"
    words = [*given, "--schemes", "int8", "--max-steps", "3", "--out", str(target)]
    assert cli.main(words) == 0
    assert f"recorded  {target}" in capsys.readouterr().out
    assert target.exists()


def test_what_cannot_be_recorded_gets_one_line(
    root: Path, capsys: Capsys, monkeypatch: Patch
) -> None:
    def say(code: int, *words: str, out: str = "film.gif") -> str:
        target = root / "new" / out
        words = ("record", *words, "--root", str(root), "--out", str(target))
        line = refusal(capsys, *words, code=code)
        assert not target.parent.exists()
        return line

    artifact = str(root / "tflite_models/CartPole-v1/dqn/s0/int8.tflite")
    assert "fp32.tflite cannot be read" in say(1, "dqn-CartPole-v1-s0")
    assert "A run id is" in say(2, "nothing")
    assert "fp33" in say(2, "dqn-CartPole-v1-s0", "--schemes", "fp33")
    assert ".gif or .mp4" in say(2, artifact, out="film.avi")
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert "[video]" in say(1, artifact, out="film.mp4")
    monkeypatch.setitem(sys.modules, "pygame", None)
    assert "pip install" in say(2, artifact)
    assert "[video]" in refusal(capsys, "watch", artifact, code=1)
