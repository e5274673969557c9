"""AirNav-v0: actions, observations, rewards and missions."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from samples import refused

from quarl_tf.environments import Rising, airnav, make, make_vector
from quarl_tf.environments.airnav import ACTIONS, ARENAS, AirNavVector, Missions

HARD = ARENAS["hard"]
LEFT, MIDDLE = 0, slice(31, 33)


def mission(**changes: Any) -> Missions:
    """Return one mission: in the middle, at rest, heading north, one obstacle far away."""
    still: dict[str, Any] = {"position": [0.0, 0.0], "velocity": [0.0, 0.0], "heading": 0.0}
    task = {"goal": [20.0, 0.0], "obstacles": [[-20.0, -20.0, 2.0]], "steps": 0}
    return Missions(**{k: np.array([v]) for k, v in (still | task | changes).items()})


def fly(action: int, **changes: Any) -> tuple[Missions, float, bool, bool]:
    before = mission(**changes)
    after = airnav.fly(before, np.array([action]))
    rewards, reached, hit = airnav.judge(before, after, HARD)
    return after, rewards[0], bool(reached[0]), bool(hit[0])


def test_the_actions_are_air_learning_s() -> None:
    assert ACTIONS.shape == (25, 3)
    moves = [[5, 0, 0], [1, 0, 0], [5, 5, 0], [1, 1, 0], [-2.5, 0, 0], [-0.5, 0, 0]]
    turns = [[0, 0, 108], [0, 0, -6.75]]
    np.testing.assert_array_equal(ACTIONS[[0, 4, 5, 9, 10, 14, 15, 24]], moves + turns)


@pytest.mark.parametrize(
    ("action", "heading", "velocity", "expected", "turned"),
    [
        (0, 0, (3, 3), (5, 0), 0),
        (0, 90, (0, 0), (0, 5), 0),
        # Averaged with the current velocity.
        (5, 0, (5, 0), (5, 2.5), 0),
        (15, 0, (5, 0), (0, 0), 21.6),
        (15, 170, (5, 0), (0, 0), 21.6 - 360),
    ],
)
def test_motion(action: int, heading: float, velocity: Any, expected: Any, turned: float) -> None:
    start = {"heading": np.radians(heading), "velocity": np.array(velocity, float)}
    after, *_ = fly(action, **start)
    np.testing.assert_allclose(after.velocity[0], expected, atol=1e-12)
    np.testing.assert_allclose(after.position[0], 0.2 * np.array(expected), atol=1e-12)
    assert np.degrees(after.heading[0]) == pytest.approx(heading + turned)
    assert after.steps[0] == 1


@pytest.mark.parametrize(
    ("action", "changes", "reward", "reached", "hit"),
    [
        (0, {}, 0.0, False, False),  # 1 m nearer, -1 for the step.
        (0, {"goal": [6.5, 0.0]}, -0.01875, False, False),
        (4, {"goal": [5.0, 0.0]}, -0.8 + 3 * 0.01875, False, False),
        (0, {"goal": [3.9, 0.0]}, 1000.0, True, False),
        (4, {"goal": [3.9, 0.0]}, -0.8 + 3 * 0.01875, False, False),
        (0, {"obstacles": [[3.4, 0.0, 2.0]]}, -100.0, False, True),
        (0, {"obstacles": [[3.6, 0.0, 2.0]]}, 0.0, False, False),
        # Thinner than a step is long: hit on the way.
        (0, {"obstacles": [[0.5, 0.3, 0.1]]}, -100.0, False, True),
        (0, {"position": [28.6, 0.0], "goal": [20.0, 0.0]}, -100.0, False, True),
        # As in its source, the goal takes precedence.
        (0, {"goal": [3.9, 0.0], "obstacles": [[3.4, 0.0, 2.0]]}, 1000.0, True, False),
    ],
)
def test_rewards(action: int, changes: Any, reward: float, reached: bool, hit: bool) -> None:
    _, *outcome = fly(action, **changes)
    assert outcome == [pytest.approx(reward), reached, hit]


def test_rays_measure_depth_and_the_rest_is_in_the_body_s_frame() -> None:
    depths = airnav.depths(mission(obstacles=[[10.0, 0.0, 2.0]]), HARD)[0]
    np.testing.assert_allclose(depths[MIDDLE], 8.0, atol=0.02)
    assert (depths[LEFT], depths[-1]) == (20.0, 20.0)
    # Obstacles behind are not seen.
    assert (airnav.depths(mission(obstacles=[[-10.0, 0.0, 2.0]]), HARD) == 20).all()
    # The first ray looks 54 degrees to the left, at the western wall.
    walls = airnav.depths(mission(position=[0.0, -25.0]), HARD)[0]
    assert walls[LEFT] == pytest.approx(5 / np.sin(np.radians(54)), rel=1e-5)
    east = {"heading": np.pi / 2, "velocity": [0.0, 5.0], "goal": [15.0, 0.0]}
    features = airnav.observe(mission(**east), HARD)[0, -5:]
    np.testing.assert_allclose(features, [1, 0, 0, -0.5, 0.5], atol=1e-6)


@pytest.mark.parametrize("name", ARENAS)
@pytest.mark.parametrize("zone", range(1, 5))
def test_missions_have_their_zone_and_leave_room(name: str, zone: int) -> None:
    arena, draws = ARENAS[name], np.random.default_rng(0).random((300, airnav._DRAWS))
    missions = airnav.plan(draws, arena, zone)
    width, distances = (arena.half - 8) / 4, np.abs(missions.goal)
    assert (7 + (zone - 1) * width <= distances).all()
    assert (distances < 7 + zone * width).all()
    for goal, obstacles in zip(missions.goal, missions.obstacles, strict=True):
        centres, radii = np.split(obstacles[obstacles[:, 2] > 0], [2], axis=1)
        assert arena.obstacles[0] <= len(radii) <= arena.obstacles[1]
        gaps = np.hypot(*(centres[:, None] - centres).T) - radii - radii.T
        # The body is 1 m wide.
        assert gaps[~np.eye(len(radii), dtype=bool)].min() > 1.9
        for point in (np.zeros(2), goal):
            assert (np.hypot(*(centres - point).T) - radii[:, 0]).min() >= 3.5


def test_a_mission_is_cut_after_750_steps_without_a_penalty() -> None:
    env = make("AirNav-v0")
    env.reset(seed=0)
    *ends, last = [env.step(19)[1:4] for _ in range(750)]
    assert not any(late for *_, late in ends)
    assert last == (-1.0, False, True)


def test_options_choose_arena_and_zone() -> None:
    env, keyed = make("AirNav-v0"), make("AirNav-v0", arena="easy", zone=1)
    observation, _ = env.reset(seed=2, options={"arena": "easy", "zone": 1})
    np.testing.assert_array_equal(observation, keyed.reset(seed=2)[0])
    assert not np.array_equal(observation, make("AirNav-v0").reset(seed=2)[0])
    # They apply to later missions, too.
    np.testing.assert_array_equal(env.reset()[0], keyed.reset()[0])
    assert "zone=5" in refused(env.reset, options={"zone": 5}, code=2)
    assert "did you mean hard?" in refused(make, "AirNav-v0", arena="hrd", code=2)


def test_gymnasium_accepts_it_and_it_is_drawn() -> None:
    check_env(gym.make("AirNav-v0", arena="easy", zone=2, render_mode="rgb_array").unwrapped)
    env = make("AirNav-v0", render_mode="rgb_array")
    env.reset(seed=0)
    env.step(0)
    picture: Any = env.render()
    assert (picture.shape, picture.dtype) == ((480, 480, 3), np.uint8)
    # The goal, obstacles and walls, and the body in the middle.
    colours = {tuple(colour) for colour in picture.reshape(-1, 3)}
    assert {(0xCD, 0x28, 0x28), (0x28, 0x96, 0x3C), (0x62, 0x68, 0x74)} < colours
    assert tuple(picture[240, 240]) != (0xF0, 0xF0, 0xF0)


def test_training_begins_in_the_nearest_zone_and_rises_at_30_percent_of_a_window() -> None:
    distances = []
    for training, state in ((True, [1, 0, 0]), (False, [4])):
        envs: Any = make_vector("AirNav-v0", 2, training=training)
        assert isinstance(envs.unwrapped, Rising)
        assert envs.unwrapped.training_state() == state
        distances.append(envs.reset(seed=0)[0][:, -1])
    assert distances[0].max() < 18 / 30 < 33 / 30 < distances[1].min()
    envs = AirNavVector(2)
    for before, successes, missions, after in (
        ([1, 298, 500], 1, 3, [1, 299, 503]),
        ([1, 299, 500], 1, 3, [2, 0, 0]),
        ([4, 299, 500], 1, 3, [4, 0, 0]),
        # 300 of 1000 can no longer be reached.
        ([2, 100, 799], 0, 1, [2, 100, 800]),
        ([2, 100, 800], 0, 1, [2, 0, 0]),
    ):
        envs.train_from(before)
        envs._rise(successes, missions)
        assert envs.training_state() == after
