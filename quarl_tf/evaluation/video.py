"""Show policies side by side in one episode, as a film or in a window."""

import io
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import cache
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from quarl_tf import environments
from quarl_tf.environments.acting import ticks
from quarl_tf.environments.registry import making
from quarl_tf.evaluation.play import matching_env
from quarl_tf.foundation.errors import QuarlError, UsageError, one_line
from quarl_tf.foundation.files import write_bytes
from quarl_tf.runtime.policy import Policy

#: Limit of a GIF in bytes, and attempts to meet it: colours, every how many-th frame, scale.
GIF_LIMIT = 2_000_000
_MOST_FRAMES = 3000  #: Of a GIF, which has them all in memory.
_TOO_LONG = "The episode is too long for a GIF; stop it earlier (--max-steps)."
_ATTEMPTS = ((128, 1, 1.0), (64, 1, 0.8), (32, 1, 0.6), (32, 2, 0.6), (32, 3, 0.5), (16, 6, 0.5))

_GIF_HEIGHT, _HEIGHT = 300, 400  #: Height of a screen in pixels.
_GAME_RATE = 15  #: Steps of an Atari game per second, each of 4 frames.
_EDGE, _SECONDS_AT_THE_END = 6, 2
_FRAME, _INK, _END = "#22313f", "#ffffff", "#ffc46b"
_font = cache(ImageFont.load_default)


class _Shot(NamedTuple):
    """The screen and the return of a policy so far, and why its episode ended, if it has."""

    screen: Any
    result: float
    end: str


class Scene(NamedTuple):
    """Policies with their captions, and the episode they play."""

    policies: Sequence[Policy]
    names: Sequence[str]
    seed: int
    max_steps: int
    rate: float  #: Steps per second.

    def images(self, height: int, stride: int = 1) -> Iterator[Image.Image]:
        """Play; yield every `stride`-th step, and repeat the last one at the end."""
        # Without warnings of pygame about missing sound cards.
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
        with ExitStack() as stack:
            episodes = [_episode(policy, self, stride) for policy in self.policies]
            for episode in episodes:
                stack.enter_context(closing(episode))
            shots = [next(episode) for episode in episodes]
            repeats = round(_SECONDS_AT_THE_END * self.rate / stride)
            while repeats >= 0:
                yield _compose(self.names, shots, height)
                repeats -= all(shot.end for shot in shots)
                shots = [next(episode) for episode in episodes]


def scene(policies: Sequence[Policy], seed: int, max_steps: int) -> Scene:
    """Build the scene of policies of one environment, for at most so many steps.

    A UsageError where there are several environments, one cannot be drawn, or a number is invalid.
    """
    sidecars = [policy.sidecar for policy in policies]
    first, tasks = sidecars[0], sorted({sidecar.env_id for sidecar in sidecars})
    if len(tasks) > 1 or seed < 0 or max_steps < 1:
        raise UsageError(
            "Show policies of one environment on a seed of 0 or more for at least one step. "
            f"Received: environments={tasks}, seed={seed}, max_steps={max_steps}"
        )
    with closing(matching_env(first)) as env:
        metadata = env.metadata
    if "rgb_array" not in metadata.get("render_modes", ()):
        raise UsageError(
            "This environment draws nothing: its metadata has no render mode 'rgb_array'. "
            f"Received: environment={first.env_id!r}"
        )
    is_game = environments.rules(first.env_id) is not None
    rate = _GAME_RATE if is_game else metadata.get("render_fps") or 30
    several_runs = len({sidecar.run_id for sidecar in sidecars}) > 1
    names = []
    for sidecar in sidecars:
        name = f"{sidecar.run_id} {sidecar.scheme}" if several_runs else sidecar.scheme
        size = f", {sidecar.size_bytes / 1000:,.0f} kB" if sidecar.native else ""
        names.append(name + size)
    return Scene(policies, names, seed, max_steps, rate)


def record(scene: Scene, path: Path) -> None:
    """Write a scene; a UsageError if the path is no .gif, a QuarlError if it is too long."""
    if path.suffix != ".gif":
        raise UsageError(f"A film ends in .gif. Received: path={str(path)!r}")
    write_bytes(path, gif(scene, GIF_LIMIT))


def gif(scene: Scene, limit: int, rate: int = 25) -> bytes:
    """Return a scene as a GIF of at most `rate` frames a second; a QuarlError above `limit`."""
    stride = ceil(scene.rate / rate)
    images = list(islice(scene.images(_GIF_HEIGHT, stride), _MOST_FRAMES + 1))
    if len(images) > _MOST_FRAMES:
        raise QuarlError(f"{_TOO_LONG} Received: more than {_MOST_FRAMES:,} frames")
    for colours, step, scale in _ATTEMPTS:
        content = _gif(images[::step], scene.rate / stride / step, colours, scale)
        if len(content) < limit:
            return content
    raise QuarlError(f"{_TOO_LONG} Received: {len(content):,} bytes, the limit is {limit:,}")


def watch(scene: Scene) -> None:
    """Show a scene in a window until either ends; a UsageError without a display."""
    import pygame

    try:
        pygame.display.init()
    except pygame.error as error:
        raise UsageError(
            f"No window can be opened ({one_line(error)}); `quarl record` writes a file instead. "
            f"Received: DISPLAY={os.environ.get('DISPLAY', '')!r}"
        ) from error
    clock = pygame.time.Clock()
    for image in scene.images(_HEIGHT):
        window = pygame.display.get_surface() or pygame.display.set_mode(image.size)
        window.blit(pygame.image.frombuffer(image.tobytes(), image.size, "RGB"), (0, 0))
        pygame.display.flip()
        if pygame.event.get(pygame.QUIT):
            return
        clock.tick(scene.rate)


def _episode(policy: Policy, scene: Scene, stride: int) -> Generator[_Shot, None, None]:
    """Yield the shots of an episode, the last one without end.

    Its environment stays open: many end pygame in `close`, with which those of others draw.
    """
    total = 0.0
    with closing(matching_env(policy.sidecar, render_mode="rgb_array")) as env:
        observation, _ = env.reset(seed=scene.seed)
        yield _Shot(_screen(env), total, end="")
        for step, tick in enumerate(ticks(env, policy.act, observation), start=1):
            total += float(tick.rewards)
            end = "done" if tick.done else "stopped" if step == scene.max_steps else ""
            if end or step % stride == 0:
                environments.require_finite(total, f"seed={scene.seed}")
                shot = _Shot(_screen(env), total, end)
                yield shot
            while end:
                yield shot


def _screen(env: gym.Env[Any, Any]) -> Any:
    """Draw an environment; a UsageError where it cannot, or makes no image of bytes."""
    with making(env.spec.id if env.spec is not None else "?"):
        screen: Any = env.render()
    shape = np.shape(screen)
    is_image = len(shape) > 1 and shape[2:] in ((), (3,), (4,))
    if not is_image or np.asarray(screen).dtype != np.uint8:
        raise UsageError(
            "An environment draws bytes [height, width, 3] in the render mode 'rgb_array'; correct "
            f"its `render`. Received: {type(screen).__name__}, shape={shape}"
        )
    return screen


def _compose(names: Sequence[str], shots: Sequence[_Shot], height: int) -> Image.Image:
    """Draw screens beside each other, each below its caption and return."""
    screens = [Image.fromarray(np.asarray(shot.screen)) for shot in shots]
    width = round(screens[0].width * height / screens[0].height / 2) * 2
    bar, column = height // 20 * 2, width + _EDGE
    # With room for the longest name, a return and an end beside each other.
    font = _font(min(0.6 * bar, 1.9 * width / (max(map(len, names)) + 22)))
    image = Image.new("RGB", (len(shots) * column + _EDGE, bar + height + _EDGE), _FRAME)
    draw = ImageDraw.Draw(image)
    for i, (name, shot, screen) in enumerate(zip(names, shots, screens, strict=True)):
        left, right = i * column + 2 * _EDGE, (i + 1) * column - _EDGE
        image.paste(screen.resize((width, height), Image.Resampling.BOX), (left - _EDGE, bar))
        draw.text((left, bar / 2), name, _INK, font, anchor="lm")
        draw.text((right, bar / 2), shot.end, _END, font, anchor="rm")
        right -= round(font.getlength(f"{shot.end}  ")) if shot.end else 0
        draw.text((right, bar / 2), f"return {shot.result:z,.0f}", _INK, font, anchor="rm")
    return image


def _gif(images: Sequence[Image.Image], rate: float, colours: int, scale: float) -> bytes:
    width, height = (round(scale * side) for side in images[0].size)
    frames = [image.resize((width, height), Image.Resampling.BOX) for image in images]
    # With one palette for all, unchanged parts take no bytes.
    samples = frames[:: ceil(len(frames) / 8)]
    palette = Image.fromarray(np.concatenate([np.asarray(s) for s in samples])).quantize(colours)
    none = Image.Dither.NONE
    first, *others = [frame.quantize(palette=palette, dither=none) for frame in frames]
    duration = 10 * round(100 / rate)  # Milliseconds; a GIF counts hundredths of a second.
    buffer = io.BytesIO()
    first.save(buffer, "GIF", save_all=True, append_images=others, duration=duration, loop=0)
    return buffer.getvalue()
