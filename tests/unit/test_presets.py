"""Presets are complete and checked: no typo becomes another experiment."""

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from samples import refused

from quarl_tf import presets
from quarl_tf.environments import registry

DQN, DDPG = ("dqn", "CartPole-v1"), ("ddpg", "MountainCarContinuous-v0")


def refusal(overrides: dict[str, Any], cell: tuple[str, str] = DQN) -> str:
    return refused(presets.load, *cell, overrides, code=2)


@pytest.mark.parametrize(("algo", "env_id"), presets.available())
def test_shipped_presets_load_and_survive_their_record(algo: str, env_id: str) -> None:
    preset = presets.load(algo, env_id)
    assert registry.find(env_id).id == env_id
    assert preset.evaluation_every <= preset.steps
    assert preset.checkpoint_every <= preset.steps
    assert presets.restore(algo, json.loads(json.dumps(asdict(preset)))) == preset


def test_overrides_change_the_values_they_name_and_no_others() -> None:
    defaults = asdict(presets.load(*DQN))
    changes = {"steps": defaults["steps"] + 1, "network": [3, 5], "discount": 1, "dueling": True}
    changed = presets.load(*DQN, changes)
    assert asdict(changed) == defaults | changes | {"network": (3, 5)}
    assert type(changed.discount) is float
    assert "Received: steps=0" in refused(replace, changed, steps=0, code=2)
    assert "did you mean learning_rate" in refusal({"learning_rat": 0.1})
    assert "Received: preset key='dueling'" in refusal({"dueling": True}, DDPG)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("steps", ["100", 1.5, 100.0, True, None, [100], 0, -1]),
        ("discount", ["0.9", True, None, [0.9], -0.5, 1.5, math.nan, math.inf]),
        ("learning_rate", [0, -1.0, math.inf]),
        ("exploration_fraction", [0, 1.1]),
        ("network", [16, None, [16, 0], [16, -1], [1.5], [True], ["16"], [[16]]]),
        ("learning_rate_decay", ["true", 1, 0, None]),
        ("precision", [16, None, True, ["float32"], "bfloat"]),
    ],
)
def test_values_of_another_kind_are_refused(name: str, values: list[Any]) -> None:
    for value in values:
        message = refusal({name: value})
        assert message.startswith(f"{name} must be ")
        assert f"Received: {name}=" in message


@pytest.mark.parametrize(
    ("cell", "changes", "received"),
    [
        (DQN, {"train_frequency": 100, "num_envs": 7}, "train_frequency=100, num_envs=7"),
        (DQN, {"learning_starts": 8}, "learning_starts=8"),
        (DQN, {"buffer_size": 1001}, "buffer_size=1001"),
        (DDPG, {"steps": 1000, "learning_starts": 900, "train_frequency": 200}, "steps=1000"),
        (("ppo", "CartPole-v1"), {"minibatch_size": 100}, "minibatch_size=100"),
        (("ppo", "CartPole-v1"), {"minibatch_size": 1}, "minibatch_size=1"),
        (("a2c", "CartPole-v1"), {"epochs": 2}, "epochs=2"),
    ],
)
def test_contradictions_are_refused(cell: Any, changes: dict[str, Any], received: str) -> None:
    assert received in refusal(changes, cell).split("Received: ")[1]
