"""AirNav-v0: fly to a goal among obstacles, Air Learning's task in the plane and in NumPy.

Actions, reward, zones and curriculum are those of its sources (harvard-edge/airlearning-rl:
`settings.py`, `AirGym.py`). Differences: depth is measured along 64 rays instead of a rendered
image of 154×256; obstacles are round; a step takes 0.2 s, the 5 Hz of QuaRL's slowest policy; a
mission that takes too long is truncated without a penalty; yaw has the same rates both ways.

Positions are in m, x north and y east; headings in radians clockwise from north. A mission starts
in the middle of the arena, and the body hovers while it yaws.
"""

from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.utils.seeding import np_random
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from quarl_tf.foundation.errors import UsageError, require_known

Floats = NDArray[Any]
Flags = NDArray[np.bool_]


class Arena(NamedTuple):
    """A walled square with at most one obstacle in each of cells² cells."""

    half: float
    obstacles: tuple[int, int]  # Smallest and largest number, and likewise radii.
    radii: tuple[float, float]
    cells: int


ARENAS = {
    "easy": Arena(25.0, (10, 14), (1.0, 2.0), 5),
    "hard": Arena(30.0, (16, 20), (2.0, 3.0), 6),
}
ZONES = 4

#: In seconds, m and steps.
STEP, BODY, REACHED, SLOW, RANGE, LIMIT = 0.2, 0.5, 3.0, 6.0, 20.0, 750
#: Commanded forward and right speeds in m/s, and yaw rates in degrees per second.
_SPEEDS, _RATES = (5.0, 4.0, 3.0, 2.0, 1.0), (108.0, 54.0, 27.0, 13.5, 6.75)
ACTIONS = np.array(
    [(a * v, b * v, 0) for a, b in ((1, 0), (1, 1), (-0.5, 0)) for v in _SPEEDS]
    + [(0, 0, sign * rate) for sign in (1, -1) for rate in _RATES]
)
#: Directions of the rays from left to right, over the camera's field of view.
_ANGLES = np.radians(np.linspace(-54, 54, 64))
_RAYS = np.array([np.cos(_ANGLES), np.sin(_ANGLES)], np.float32)

_MOST_CELLS = max(arena.cells for arena in ARENAS.values()) ** 2
_DRAWS = 4 + 4 * _MOST_CELLS
#: Divisors of the last inputs: velocity (m/s), offset and distance of the goal (m).
_SCALES = np.array([5.0, 5.0, 30.0, 30.0, 30.0])
_LIMITS = np.repeat(np.array([1, 3], np.float32), [len(_ANGLES), len(_SCALES)])
_OBSERVATION_SPACE = gym.spaces.Box(np.where(_LIMITS > 1, -_LIMITS, np.float32(0)), _LIMITS)
_ACTION_SPACE: gym.spaces.Discrete[Any] = gym.spaces.Discrete(len(ACTIONS))
#: Missions in a window of the curriculum, and successes that raise the zone.
_WINDOW, _SUCCESSES = 1000, 300


class Missions(NamedTuple):
    """The states of n missions in one arena."""

    position: Floats  # [n, 2]
    velocity: Floats  # [n, 2], of the last step
    heading: Floats  # [n]
    goal: Floats  # [n, 2]
    obstacles: Floats  # [n, most, 3]: centre and radius
    steps: NDArray[np.int64]  # [n]


def plan(draws: Floats, arena: Arena, zone: int) -> Missions:
    """Create missions from uniform draws [n, _DRAWS].

    The zone sets the distance of the goal's coordinates from the middle. Obstacles are 1 m or more
    from the edge of their cell, and clear of start and goal.
    """
    n = len(draws)
    nearest = SLOW + 1
    width = (arena.half - nearest - 1) / ZONES
    side = 2 * draws[:, :2] - 1
    goal = np.copysign(nearest + (zone - 1 + np.abs(side)) * width, side)
    cells = draws[:, 4:].reshape(n, _MOST_CELLS, 4)[:, : arena.cells**2]
    radius = arena.radii[0] + np.diff(arena.radii) * cells[..., 0]
    size = 2 * arena.half / arena.cells
    middles = (np.indices((arena.cells, arena.cells)).reshape(2, -1).T + 0.5) * size - arena.half
    centre = middles + (2 * cells[..., 1:3] - 1) * (size / 2 - 1 - radius)[..., None]
    room = np.minimum(_length(centre), _length(centre - goal[:, None])) - radius
    order = np.argsort(cells[..., 3] + (room < REACHED + BODY), axis=1)[:, : arena.obstacles[1]]
    circles = np.concatenate([centre, radius[..., None]], axis=2)
    obstacles = np.take_along_axis(circles, order[..., None], axis=1)
    least, most = arena.obstacles
    count = least + (draws[:, 3] * (most - least + 1)).astype(np.int64)
    obstacles[np.arange(most) >= count[:, None]] = (1e3, 1e3, 0)
    heading = (2 * draws[:, 2] - 1) * np.pi
    zeros = np.zeros((n, 2))
    return Missions(zeros, zeros, heading, goal, obstacles, np.zeros(n, np.int64))


def fly(missions: Missions, actions: NDArray[Any]) -> Missions:
    """Act for one step; a diagonal command is averaged with the current velocity."""
    forward, right, rate = ACTIONS[actions].T
    command = _rotate(np.stack([forward, right], axis=1), missions.heading)
    velocity = np.where((right > 0)[:, None], (command + missions.velocity) / 2, command)
    heading = missions.heading + STEP * np.radians(rate)
    return missions._replace(
        position=missions.position + STEP * velocity,
        velocity=velocity,
        heading=(heading + np.pi) % (2 * np.pi) - np.pi,
        steps=missions.steps + 1,
    )


def judge(before: Missions, after: Missions, arena: Arena) -> tuple[Floats, Flags, Flags]:
    """Return rewards, whether goals were reached, and whether the body hit something."""
    path = after.position - before.position
    offsets = before.obstacles[..., :2] - before.position[:, None]
    squared_length = np.maximum((path**2).sum(axis=1), 1e-12)[:, None]
    share = np.clip((offsets * path[:, None]).sum(axis=2) / squared_length, 0, 1)
    gap = _length(offsets - share[..., None] * path[:, None]) - before.obstacles[..., 2]
    distance = _length(after.goal - after.position)
    reached = distance < REACHED
    hit = (gap < BODY).any(axis=1) | (np.abs(after.position) > arena.half - BODY).any(axis=1)
    rewards = _length(before.goal - before.position) - distance - 1
    rewards += np.where(distance < SLOW, (4 - _length(after.velocity)) * 0.01875, 0)
    return np.select([reached, hit], [1000.0, -100.0], rewards), reached, hit & ~reached


def depths(missions: Missions, arena: Arena) -> Floats:
    """Return the free distance along every ray in m, at most `RANGE`: [n, rays]."""
    cos, sin = (part.astype(np.float32)[:, None] for part in _direction(missions.heading))
    dx, dy = cos * _RAYS[0] - sin * _RAYS[1], sin * _RAYS[0] + cos * _RAYS[1]
    x, y = missions.position.astype(np.float32).T[..., None]
    half = np.float32(arena.half)
    with np.errstate(divide="ignore", invalid="ignore"):
        walls = np.fmin((half - x * np.sign(dx)) / abs(dx), (half - y * np.sign(dy)) / abs(dy))
        offsets = (missions.obstacles[..., :2] - missions.position[:, None]).astype(np.float32)
        room: Floats = missions.obstacles[..., 2].astype(np.float32) ** 2 - (offsets**2).sum(axis=2)
        along = offsets[..., :1] * dx[:, None] + offsets[..., 1:] * dy[:, None]
        # NaN where a ray misses the obstacle, negative where it lies behind.
        entry = along - np.sqrt(along * along + room[..., None])
    obstacles = np.where(entry > 0, entry, np.float32(RANGE)).min(axis=1)
    distances: Floats = np.clip(np.minimum(obstacles, walls), 0, np.float32(RANGE))
    return distances


def observe(missions: Missions, arena: Arena) -> NDArray[np.float32]:
    """Return observations [n, 69]: depths, then velocity and goal in the body's frame, distance."""
    offset = missions.goal - missions.position
    velocity, goal = (_rotate(v, -missions.heading) for v in (missions.velocity, offset))
    inputs = np.concatenate([velocity, goal, _length(offset)[:, None]], axis=1) / _SCALES
    observations = np.concatenate([depths(missions, arena) / RANGE, inputs], axis=1)
    return np.asarray(observations, np.float32)


def _direction(heading: Floats) -> tuple[Floats, Floats]:
    return np.cos(heading), np.sin(heading)


def _rotate(vectors: Floats, angles: Floats) -> Floats:
    """Rotate vectors [n, 2] by angles [n]."""
    (x, y), (cos, sin) = vectors.T, _direction(angles)
    return np.stack([x * cos - y * sin, x * sin + y * cos], axis=1)


def _length(vectors: Floats) -> Any:
    return np.sqrt((vectors**2).sum(axis=-1))


class AirNavVector(gym.vector.VectorEnv[Any, Any, Any]):
    """Parallel missions; environment e equals `AirNav` with seed + e.

    In a training the zone rises from 1 at 30 % successes in a window of 1 000 missions; a window
    ends early once that is reached or impossible.
    """

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int, arena: str = "hard", zone: int = ZONES) -> None:
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = _OBSERVATION_SPACE, _ACTION_SPACE
        self.observation_space = batch_space(_OBSERVATION_SPACE, num_envs)
        self.action_space = batch_space(_ACTION_SPACE, num_envs)
        self.randoms = [np_random()[0] for _ in range(num_envs)]
        #: Successes and missions of the current window; None without a curriculum.
        self._window: list[int] | None = None
        self._choose(arena, zone)

    def _choose(self, arena: str, zone: int) -> None:
        require_known("arena", str(arena), ARENAS)
        if zone not in range(1, ZONES + 1):
            raise UsageError(f"Zones are 1 to {ZONES}. Received: zone={zone!r}")
        self._arena_name, self.arena, self._zone = arena, ARENAS[arena], zone

    def train_from(self, state: list[int] | None) -> None:
        """Start the curriculum in zone 1, or at a `training_state`."""
        self._zone, *self._window = state or (1, 0, 0)

    def training_state(self) -> list[int]:
        """Return the zone, and successes and missions of the window."""
        return [self._zone, *(self._window or ())]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        """Start missions; options `arena` and `zone` also apply to later ones."""
        for name in options or ():
            require_known("option", name, ("arena", "zone"))
        self._choose(**{"arena": self._arena_name, "zone": self._zone, **(options or {})})
        if seed is not None:
            self.randoms = [np_random(seed + e)[0] for e in range(self.num_envs)]
        self._over = np.ones(self.num_envs, np.bool_)
        self.missions = self._plan()
        self._over[:] = False
        return observe(self.missions, self.arena), _success_info(self._over)

    def _plan(self) -> Missions:
        draws = [self.randoms[e].random(_DRAWS) for e in np.flatnonzero(self._over)]
        return plan(np.array(draws), self.arena, self._zone)

    def step(self, actions: NDArray[Any]) -> tuple[Any, Floats, Flags, Flags, dict[str, Any]]:
        """Fly for 0.2 s; missions that are over start again instead."""
        missions, starts = fly(self.missions, actions), ~self._over
        rewards, reached, hit = judge(self.missions, missions, self.arena)
        terminated, reached = (reached | hit) & starts, reached & starts
        truncated = (missions.steps >= LIMIT) & starts & ~terminated
        if not starts.all():
            for field, first_values in zip(missions, self._plan(), strict=True):
                field[self._over] = first_values
        self.missions, self._over = missions, terminated | truncated
        self._rise(int(reached.sum()), int(self._over.sum()))
        rewards = np.where(starts, rewards, 0.0)
        observations = observe(missions, self.arena)
        return observations, rewards, terminated, truncated, _success_info(reached)

    def _rise(self, successes: int, missions: int) -> None:
        if self._window is None:
            return
        successes, missions = self._window[0] + successes, self._window[1] + missions
        rises = successes >= _SUCCESSES
        self._zone = min(self._zone + rises, ZONES)
        ends = rises or missions - successes > _WINDOW - _SUCCESSES
        self._window = [0, 0] if ends else [successes, missions]


class AirNav(gym.Env[NDArray[np.float32], np.int64]):
    """One mission, in an `arena` ("easy", "hard") with the goal in a `zone` (1 to 4)."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012
    observation_space, action_space = _OBSERVATION_SPACE, _ACTION_SPACE

    def __init__(self, *, render_mode: str | None = None, **options: Any) -> None:
        self.render_mode = render_mode
        self._vector = AirNavVector(1, **options)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        """Start a mission."""
        super().reset(seed=seed)
        self._vector.randoms = [self.np_random]
        observations, _ = self._vector.reset(options=options)
        self._trail = [self._vector.missions.position[0]]
        return observations[0], {"is_success": False}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Fly for 0.2 s."""
        observations, rewards, terminated, truncated, info = self._vector.step(np.array([action]))
        self._trail.append(self._vector.missions.position[0])
        success = {"is_success": bool(info["is_success"][0])}
        ends = bool(terminated[0]), bool(truncated[0])
        return observations[0], float(rewards[0]), *ends, success

    def render(self) -> NDArray[np.uint8] | None:
        """Draw the arena from above, north up, with what the body sees, its goal and its trail."""
        if self.render_mode is None:
            return None
        return _draw(self._vector.missions, self._vector.arena, np.array(self._trail))


def _draw(missions: Missions, arena: Arena, trail: Floats) -> NDArray[np.uint8]:
    from PIL import Image, ImageDraw

    pixels = 480
    metre = pixels / (arena.half + 1)  # Drawn at twice the size.
    image = Image.new("RGB", (2 * pixels, 2 * pixels), "#32363e")
    pen = ImageDraw.Draw(image)

    def to_pixels(points: Floats) -> list[tuple[float, ...]]:
        return [tuple(point) for point in pixels + points[..., ::-1] * (metre, -metre)]

    def circle(centre: Floats, radius: float, **colours: Any) -> None:
        (x, y), r = to_pixels(centre[None])[0], radius * metre
        pen.ellipse((x - r, y - r, x + r, y + r), **colours)

    position, heading, goal = missions.position[0], missions.heading[0], missions.goal[0]
    pen.rectangle(to_pixels(np.array([[1, -1], [-1, 1]]) * arena.half), "#f0f0f0")
    circle(goal, REACHED, fill="#aadeaa")
    directions = np.stack(_direction(heading + _ANGLES), axis=1)
    ends = position + directions * depths(missions, arena)[0][:, None]
    pen.polygon(to_pixels(np.stack([position, *ends])), "#ffeeb4")
    for end in ends[::7]:
        pen.line(to_pixels(np.stack([position, end])), "#f0c864", 2)
    circle(goal, REACHED, outline="#28963c", width=5)
    circle(goal, 0.6, fill="#28963c")
    for *centre, radius in missions.obstacles[0]:
        circle(np.array(centre), radius, fill="#626874")
    circle(np.zeros(2), 0.8, outline="#3c6ec8", width=5)
    pen.line(to_pixels(trail), "#3c6ec8", 5, "curve")
    arrow = np.array([[1.7, 0], [-1, 0.9], [-0.5, 0], [-1, -0.9]])
    pen.polygon(to_pixels(position + _rotate(arrow, np.full(4, heading))), "#cd2828")
    return np.asarray(image.resize((pixels, pixels), Image.Resampling.BOX))


def _success_info(reached: Flags) -> dict[str, Any]:
    return {"is_success": reached, "_is_success": np.ones_like(reached)}


gym.register("AirNav-v0", f"{__name__}:AirNav", vector_entry_point=f"{__name__}:AirNavVector")
