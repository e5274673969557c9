"""Presets are complete and checked: no typo becomes another experiment."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from quarl_tf import presets
from quarl_tf.environments import registry
from quarl_tf.foundation.errors import UsageError
from quarl_tf.presets import DdpgPreset, DqnPreset
from quarl_tf.spec.architectures import NAMED

AVAILABLE = presets.available()


def refused(overrides: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as error:
        presets.load("dqn", "CartPole-v1", overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


# What is shipped.


#: The papers' seven games.
GAMES = {
    f"{game}NoFrameskip-v4"
    for game in ("BeamRider", "Breakout", "MsPacman", "Pong", "Qbert", "Seaquest", "SpaceInvaders")
}
CONTROL = {"BipedalWalker-v3", "HalfCheetahBulletEnv-v0", "Walker2DBulletEnv-v0"}


@pytest.mark.parametrize(
    ("algo", "wanted"),
    [
        ("dqn", {"CartPole-v1", "LunarLander-v3", *GAMES}),
        ("a2c", {"CartPole-v1", *GAMES}),
        ("ppo", {"CartPole-v1", "LunarLander-v3", *GAMES}),
        ("ddpg", {"MountainCarContinuous-v0", *CONTROL}),
    ],
)
def test_every_cell_of_the_papers_has_a_preset(algo: str, wanted: set[str]) -> None:
    assert wanted <= {env_id for name, env_id in AVAILABLE if name == algo}


@pytest.mark.parametrize(("algo", "env_id"), AVAILABLE)
def test_shipped_presets_load_for_environments_that_exist(algo: str, env_id: str) -> None:
    preset = presets.load(algo, env_id)
    assert registry.find(env_id).id == env_id
    for name, value in asdict(preset).items():
        if isinstance(value, str):
            assert value in (*NAMED, *presets.PRECISIONS)
        elif isinstance(value, float):
            assert 0 <= value < math.inf
        else:
            # Booleans are whole numbers to Python.
            assert isinstance(value, bool) or np.min(value) > 0, name


@pytest.mark.parametrize(("algo", "env_id"), AVAILABLE)
def test_shipped_presets_make_sense(algo: str, env_id: str) -> None:
    preset = presets.load(algo, env_id)
    assert 0 < preset.discount <= 1
    assert 0 < preset.learning_rate < 1
    assert preset.num_envs <= preset.train_frequency <= preset.steps
    assert preset.evaluation_every <= preset.steps
    assert preset.checkpoint_every <= preset.steps


@pytest.mark.parametrize("env_id", [env_id for algo, env_id in AVAILABLE if algo == "dqn"])
def test_shipped_presets_of_dqn_make_sense(env_id: str) -> None:
    preset = presets.load("dqn", env_id)
    assert isinstance(preset, DqnPreset)
    # Else the replay never holds enough to start learning.
    assert preset.learning_starts <= preset.buffer_size
    assert preset.learning_starts < preset.steps
    assert 0 < preset.exploration_fraction <= 1
    assert preset.exploration_final <= 1


# Names.


@pytest.mark.parametrize(
    ("algo", "env_id", "message"),
    [
        ("dqn", "CartPole-v2", "Unknown dqn preset: did you mean CartPole-v1"),
        ("dqn", "cartpole-v1", "did you mean CartPole-v1"),
        ("dqn", "Humanoid", "choose from .*CartPole-v1.* Received: dqn preset='Humanoid'"),
        ("dqm", "CartPole-v1", "Unknown algorithm: did you mean dqn"),
        ("xyz", "CartPole-v1", "choose from .*dqn"),
    ],
)
def test_unknown_names_are_refused_naming_the_closest(algo: str, env_id: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        presets.load(algo, env_id)


# Overrides.


def test_overrides_change_what_they_name_and_nothing_else() -> None:
    plain = asdict(presets.load("dqn", "CartPole-v1"))
    changes = {"steps": plain["steps"] + 1, "network": [3, 5], "learning_rate_decay": False}
    changed = asdict(presets.load("dqn", "CartPole-v1", changes))
    assert changed == plain | changes | {"network": (3, 5)}
    assert asdict(presets.load("dqn", "CartPole-v1", {})) == plain


def test_a_whole_number_may_stand_for_a_float() -> None:
    preset = presets.load("dqn", "CartPole-v1", {"discount": 1})
    assert preset.discount == 1
    assert type(preset.discount) is float


@pytest.mark.parametrize(
    ("algo", "env_id", "name"),
    [
        ("a2c", "CartPole-v1", "epsilon"),
        ("a2c", "CartPole-v1", "gradient_clip"),
        ("dqn", "CartPole-v1", "exploration_fraction"),
        ("dqn", "CartPole-v1", "gradient_clip"),
        ("ppo", "CartPole-v1", "learning_rate"),
        ("ddpg", "MountainCarContinuous-v0", "critic_learning_rate"),
        ("ddpg", "MountainCarContinuous-v0", "target_tau"),
    ],
)
def test_what_nothing_is_learned_without_is_above_zero(algo: str, env_id: str, name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} must be above 0.* Received: {name}=0\.0"):
        presets.load(algo, env_id, {name: 0})


@pytest.mark.parametrize("other", [{"epochs": 2}, {"clip": 0.2}, {"minibatch_size": 64}])
def test_a2c_takes_one_unclipped_step_on_all_of_a_rollout(other: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=r"else train by ppo\. Received: epochs="):
        presets.load("a2c", "CartPole-v1", other)


def test_unknown_keys_are_refused_naming_the_closest() -> None:
    assert "did you mean learning_rate" in refused({"learning_rat": 0.1})
    assert "did you mean network" in refused({"Network": [1]})
    assert "Received: preset key='x'" in refused({"x": 1})


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("steps", ["100", 1.5, 100.0, True, None, [100], 0, -1], "a whole number above 0"),
        (
            "discount",
            ["0.9", True, None, [0.9], -0.5, math.nan, math.inf],
            "a number of 0 or more",
        ),
        (
            "network",
            [16, None, [16, 0], [16, -1], [1.5], [True], ["16"], [[16]]],
            "a list of whole numbers above 0, or a name",
        ),
        ("learning_rate_decay", ["true", 1, 0, None], "true or false"),
        ("dueling", ["true", 1, None], "true or false"),
        ("double", ["false", 0], "true or false"),
        ("layer_norm", ["yes", 0, None], "true or false"),
        ("precision", [16, None, True, ["float32"]], "a name"),
    ],
)
def test_values_of_another_kind_are_refused(name: str, values: list[Any], kind: str) -> None:
    for value in values:
        assert refused({name: value}).startswith(f"{name} must be {kind}. Received: {name}=")


def test_networks_may_be_changed_by_options() -> None:
    plain = presets.load("dqn", "CartPole-v1")
    assert isinstance(plain, DqnPreset)
    assert (plain.dueling, plain.double, plain.layer_norm) == (False, True, False)
    assert plain.precision == "float32"
    changes = {"dueling": True, "double": False, "layer_norm": True}
    assert asdict(presets.load("dqn", "CartPole-v1", changes)) == asdict(plain) | changes
    images = presets.load("dqn", "PongNoFrameskip-v4", {"precision": "float32"})
    assert images.precision == "float32"
    # What acts by NumPy, in float32, must not learn in another arithmetic.
    assert "Networks without convolutions train in float32" in refused({"precision": "bfloat16"})


@pytest.mark.parametrize("algo", ["dqn", "ddpg"])
def test_a_training_too_short_to_learn_is_refused(algo: str) -> None:
    env_id = {"dqn": "CartPole-v1", "ddpg": "MountainCarContinuous-v0"}[algo]
    shipped = presets.load(algo, env_id)
    assert isinstance(shipped, DqnPreset | DdpgPreset)
    least = shipped.learning_starts + shipped.train_frequency
    assert presets.load(algo, env_id, {"steps": least}).steps == least
    with pytest.raises(UsageError, match=f"once learning starts.*steps={least - 1}, learning_sta"):
        presets.load(algo, env_id, {"steps": least - 1})


def test_options_that_do_not_exist_are_refused() -> None:
    assert "Unknown precision: did you mean bfloat16" in refused({"precision": "bfloat"})
    assert "choose from bfloat16, float32. Received: precision='x'" in refused({"precision": "x"})
    # Only Q-networks have two streams.
    for algo, env_id in (("ppo", "CartPole-v1"), ("ddpg", "MountainCarContinuous-v0")):
        with pytest.raises(UsageError, match="Received: preset key='dueling'"):
            presets.load(algo, env_id, {"dueling": True})


# Records.


@pytest.mark.parametrize(("algo", "env_id"), AVAILABLE)
def test_presets_survive_their_record(algo: str, env_id: str) -> None:
    preset = presets.load(algo, env_id)
    assert presets.restore(algo, json.loads(json.dumps(asdict(preset)))) == preset


def test_recorded_presets_must_be_complete() -> None:
    values = asdict(presets.load("dqn", "CartPole-v1"))
    del values["steps"], values["discount"]
    with pytest.raises(UsageError, match=r"The recorded dqn preset lacks discount, steps"):
        presets.restore("dqn", values)


def test_a_delay_leaves_a_burst_behind_it() -> None:
    preset = presets.load("ppo", "CartPole-v1", {"steps": 1000, "train_frequency": 256})
    presets.require_possible_delay(744, preset)
    with pytest.raises(UsageError, match=r"shorter or train longer\. Received: delay=745,"):
        presets.require_possible_delay(745, preset)
