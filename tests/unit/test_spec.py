"""A name is the specification: of a run, of a scheme; presets are complete and checked."""

import json
import math
import re
import shlex
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from samples import quantised, refused

from quarl_tf import Chance, Recipe, Run, presets
from quarl_tf.cli import arguments, verbs
from quarl_tf.environments import registry
from quarl_tf.spec import LayerFormat, Origin, QatSchedule, Quantization, TensorFormat
from quarl_tf.spec.scheme import Scheme, default_schemes, possible_schemes

DQN, PPO, A2C = ((algo, "CartPole-v1") for algo in ("dqn", "ppo", "a2c"))
DDPG = "ddpg", "MountainCarContinuous-v0"
LATE = {"steps": 1000, "learning_starts": 900, "train_frequency": 200}


def test_every_part_of_a_run_enters_its_name() -> None:
    ids = [Run("dqn", name, 12).run_id for name in ("Acrobot-v1", "ALE/Pong-v5", "My:Env-v0")]
    assert ids == ["dqn-Acrobot-v1-s12", "dqn-ALE_Pong-v5-s12", "dqn-My_Env-v0-s12"]
    overrides = ({}, {"steps": 100}, {"steps": 101}, {"step": 100}, {"steps": 100, "num_envs": 1})
    runs = [Run("dqn", "CartPole-v1", 0, options) for options in overrides]
    runs += [Run("dqn", "CartPole-v1", 1), Run("dqn", "CartPole-v0", 0)]
    assert len({run.run_id for run in runs}) == len(runs)
    assert len({Run("dqn", "X", 0, {"network": n}).run_id for n in ([8, 8], (8, 8))}) == 1
    orders = {"steps": 100, "num_envs": 1}, {"num_envs": 1, "steps": 100}
    assert len({Run("dqn", "X", 0, order).run_id for order in orders}) == 1
    assert "Received: seed=-1" in refused(Run, "dqn", "CartPole-v1", -1, code=2)
    for overrides in (None, {1: 2}, {"steps": {1}}, {"steps": np.int64(4)}):
        assert "overrides=" in refused(Run, "dqn", "CartPole-v1", 0, overrides, code=2)
    assert "0 or more, of Python itself. Rec" in refused(Run, "dqn", "X", np.int64(0), code=2)
    assert "env_id=None" in refused(Run, "dqn", None, 0, code=2)
    assert "origin='dqn'" in refused(Run, "dqn", "X", 0, origin="dqn", code=2)
    assert len({*runs, *map(replace, runs)}) == len(runs)  # They can be keys.
    assert "modules='mine'" in refused(Run, "dqn", "X", 0, modules="mine", code=2)
    run = Run("dqn", "X", 0, own := {"network": [8]})
    own["network"].append(8)
    assert run.overrides == {"network": [8]}
    for values in (("sampling",), ("sticky", 1.5), ("epsilon", math.nan), ("sampled", 0.5)):
        assert repr(values[-1]) in refused(Chance, *values, code=2)
    assert "{'bits': 4}" in refused(Run, "dqn", "X", 0, quantization={"bits": 4}, code=2)


def start(sha256: str = "ab", **changes: Any) -> Origin:
    return Origin(Run(**{"algo": "dqn", "env_id": "CartPole-v1", "seed": 0, **changes}), sha256)


def test_a_run_from_another_is_named_after_it_and_compared_with_it() -> None:
    first, other = (Run("dqn", "CartPole-v1", 0, origin=start(sha256)) for sha256 in ("ab", "cd"))
    assert len({first.run_id, other.run_id, first.seedless_id, "dqn-CartPole-v1-s0"}) == 4
    # A saved training goes on, whatever its step, and needs no other.
    origins = [replace(start("ab"), step=step, file="a.npz") for step in (256, 512)]
    saved = [replace(first, origin=origin) for origin in origins]
    assert len({run.seedless_id for run in (*saved, first)}) == 2
    assert (first.needed, saved[0].needed) == (start("ab").run, None)
    restored = Run.from_dict(json.loads(json.dumps(first.to_dict())))
    assert (restored, restored.run_id) == (first, first.run_id)
    moved = start(modules=("mine",), presets="mine.yaml")  # Its modules are no part of what it is.
    assert replace(first, origin=moved).run_id == first.run_id
    assert shlex.split(first.command("train"))[-2:] == ["--from", "dqn-CartPole-v1-s0"]
    assert (first.plain, replace(first, quantization=quantised()).plain) == (first, start().run)
    seeds = [replace(first, seed=seed, origin=start(seed=seed)) for seed in (1, 2)]
    assert len({run.seedless_id for run in seeds}) == 1


OPTIONS: list[dict[str, Any]] = [
    *({}, {"bits": 2}, {"bits": 5}, {"bits": 8}, {"delay": 200}, {"edge_bits": 4}),
    *({"head.bits": 4}, {"observation.bits": 4, "hidden_0.bits": 2}),
    *({"per_channel": True}, *({"bits": bits, "per_channel": False} for bits in (2, 8))),
    *({"ranges": ranges} for ranges in ("moving_average", "percentile", "following")),
    *({"gradient": "clipped"}, {"learned_steps": True}),
    {"bits": 2, "learned_steps": True, "ranges": "moving_average"},
    *({"rule": "paper"}, {"rule": "paper", "edge_bits": 8}),
    {"rule": "paper", "ranges": "moving_average", "gradient": "clipped"},
    {"rule": "paper", "bits": 2, "per_channel": True},
]


def test_every_option_of_a_quantisation_enters_the_name_of_its_run() -> None:
    plain = Run("dqn", "CartPole-v1", 0, {"steps": 300})
    runs = [replace(plain, quantization=quantised(**options)) for options in OPTIONS]
    assert len({run.run_id for run in runs}) == len(runs)
    assert runs[0].run_id == f"{plain.run_id}-q4d100"
    assert all(run.plain == plain for run in runs)
    assert "quantization" not in plain.to_dict()


@pytest.mark.parametrize("algo", ["ddpg", "dqn", "ppo"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_commands_records_and_options_mean_the_same_run(options: dict[str, Any], algo: str) -> None:
    overrides = {"network": "nature", "dueling": True, "n_step": 2}
    quantization = quantised(**options)
    run = Run(algo, "CartPole-v1", 7, overrides, quantization)
    parsed = arguments.build().parse_args(shlex.split(run.command("train"))[1:])
    assert dict(verbs._override(text) for text in parsed.overrides) == overrides
    preset = presets.load("ppo", "CartPole-v1", {"steps": 600})
    assert verbs._quantization(parsed, algo, preset) == quantization
    assert (parsed.algo, parsed.env, parsed.seed) == (algo, "CartPole-v1", 7)
    restored = Run.from_dict(json.loads(json.dumps(run.to_dict())))
    assert (restored, restored.run_id) == (run, run.run_id)
    assert Quantization.from_mapping(quantization.options()) == quantization


def test_a_quantisation_recorded_by_another_version_is_refused() -> None:
    former = {"bits": 4, "delay": 5, "rule": "nearest", "ranges": "moving_average"}
    current = quantised().to_dict()
    head = {"head": {**current["recipe"]["head"], "weights": {"bits": 9}}}
    other = current | {"recipe": current["recipe"] | head}
    for record in (former, {"recipe": [], "schedule": {}}, other):
        assert "recorded by another version" in refused(Quantization.restore, record, code=2)
    given = {name: former[name] for name in ("bits", "delay", "ranges")}
    assert Quantization.from_mapping(former).options() == given


def started(**changes: Any) -> Run:
    return Run("dqn", "CartPole-v1", 0, {}, quantised(), origin=start(**changes))


def test_what_is_not_given_follows_from_the_rest() -> None:
    def per_channel(**options: Any) -> bool:
        weights = quantised(**options).recipe.default.weights
        return weights is not None and weights.per_channel

    assert [bits for bits in range(2, 9) if per_channel(bits=bits)] == [2, 3, 8]
    # The names of the first version's trainings mean what they did.
    tags = [quantised(bits=8, per_channel=p).tag for p in (False, "few", True)]
    assert [tag == "q8d100" for tag in tags] == [True, True, False]
    assert [b for b in range(2, 9) if per_channel(bits=b, per_channel="few")] == [2, 3]
    assert not per_channel(bits=2, per_channel=False)
    assert not per_channel(bits=2, rule="paper")
    assert quantised().schedule == QatSchedule(delay=100, ranges="extremes")
    assert quantised(learned_steps=True).schedule.gradient == "clipped"
    published = quantised(rule="paper").recipe
    assert published.head == published.default


def test_presets_say_what_is_usual_for_an_algorithm() -> None:
    def usual(algo: str, **options: Any) -> tuple[str, str]:
        schedule = presets.quantization(algo, {"bits": 4, "delay": 100, **options}).schedule
        return schedule.ranges, schedule.gradient

    assert usual("dqn") == usual("pqn") == ("following", "straight_through")
    assert usual("ddpg") == ("following", "clipped")
    assert usual("ppo") == usual("a2c") == ("extremes", "straight_through")
    assert usual("dqn", ranges="moving_average") == ("moving_average", "straight_through")
    assert usual("dqn", rule="paper") == usual("ddpg", rule="paper") == usual("ppo")
    assert usual("dqn", learned_steps=True) == ("extremes", "clipped")


@pytest.mark.parametrize("bits", range(2, 9))
def test_a_quantisation_is_exported_at_its_own_width(bits: int) -> None:
    usual = default_schemes(quantised(bits=bits))
    assert usual == ("qat_int8",) * (bits == 8) + (f"qat_w{bits}a{bits}",)
    # It saves storage alone, so it is made only when asked for.
    assert possible_schemes(quantised(bits=bits)) == ("qat_int4",) * (bits <= 4) + usual
    # Grids that int4 and integer kernels do not support.
    assert possible_schemes(quantised(bits=bits, rule="paper")) == usual[-1:]
    assert default_schemes(quantised(bits=bits, edge_bits=7)) == usual[-1:]


def test_a_recipe_says_the_formats_of_every_layer() -> None:
    eight, four, two = (LayerFormat(activations=TensorFormat(bits=b)) for b in (8, 4, 2))
    recipe = Recipe(default=four, observation=eight, head=eight, by_layer={"hidden_1": two})
    assert recipe.of("normalizer") == recipe.of("head") == recipe.of("squash") == eight
    assert recipe.of("hidden_1") == recipe.of("hidden_1_tanh") == two
    assert recipe.of("hidden_10") == recipe.of("convolution_0") == four
    layers = {"value": two, "value_hidden": eight}
    streams = Recipe(default=four, by_layer=layers)
    assert [streams.of(name) for name in layers] == [two, eight]
    assert replace(streams, by_layer={"value": two}).of("value_hidden") == four
    heads: list[Any] = [Scheme.parse(f"ptq_opt_w{bits}").recipe.head.weights for bits in (4, 12)]
    assert [head.bits for head in heads] == [8, 12]
    for name in ("ptq_w4-head=8", "ptq_paper_w4-head=8-hidden_0=6"):
        named: Any = Scheme.parse(name).recipe
        assert (named.default.weights.bits, named.of("head").weights.bits) == (4, 8)
    int8, in_float = Scheme.parse("int8").recipe, Scheme.parse("int8-head=32-hidden_1=32").recipe
    assert in_float.of("hidden_0") == int8.default
    assert in_float.of("head") == in_float.of("hidden_1") == LayerFormat()
    for name, rounding in (("ptq_w4", "nearest"), ("ptq_paper_w4", "floor")):
        form = LayerFormat(weights=TensorFormat(bits=4, rounding=rounding, step="paper"))
        assert Scheme.parse(name).recipe == Recipe(default=form, head=form)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("INT8", "did you mean int8"),
        ("fp23", "did you mean .*fp32"),
        ("ptq_w08", "did you mean .*ptq_w8"),
        *((f"qat_{odd}", "did you mean .*qat_") for odd in ("w4a5", "w1a1", "w9a9", "w44", "int2")),
        # A scheme of single layers has one name.
        ("ptq_w4-head=8-head=8", "Unknown scheme"),
        ("ptq_w4-hidden_0=6-head=8", "name ptq_w4-head=8-hidden_0=6. Received"),
        *((name, "Unknown scheme") for name in ("ptq_w4-head=99", "int8-hidden_0=4")),
        ("int8-head=32", "did you mean int8_head32"),
    ],
)
def test_unknown_schemes_are_refused(name: str, message: str) -> None:
    assert re.search(message, refused(Scheme.parse, name, code=2))


def load(cell: tuple[str, str] = DQN, **overrides: Any) -> presets.Preset:
    return presets.load(*cell, overrides)


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
    assert "did you mean learning_rate" in refused(load, learning_rat=0.1, code=2)
    message = refused(load, network="Natur", code=2)
    assert message.endswith("did you mean nature? Received: network='Natur'")
    assert "Received: preset key='dueling'" in refused(load, DDPG, dueling=True, code=2)


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
        ("byte_zero", [-1, 256, 87.0, True, None]),
        ("byte_unit", [0, -1.0, math.inf, "64"]),
    ],
)
def test_values_of_another_kind_are_refused(name: str, values: list[Any]) -> None:
    for value in values:
        message = refused(load, **{name: value}, code=2)
        assert message.startswith(f"{name} must be ")
        assert f"Received: {name}=" in message


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (quantised, {"bits": 1}, "Received: bits=1"),
        (quantised, {"hidden_0.bits": 9}, "Received: hidden_0.bits=9"),
        (quantised, {"head.bits": 4.0}, "Received: head.bits=4.0"),
        (quantised, {"edge_bit": 4}, "did you mean edge_bits"),
        (presets.quantization, {"algo": "sac", "values": {}}, "Received: algorithm='sac'"),
        (presets.quantization, {"algo": "ppo", "values": 4}, "Received: options of quantisation=4"),
        (quantised, {"delay": 0}, "Received: delay=0"),
        (quantised, {"rule": "papr"}, "rule must be nearest or paper"),
        (quantised, {"rule": "paper", "learned_steps": True}, "rule=paper, learned_steps=true"),
        (quantised, {"gradient": "straight_through", "learned_steps": True}, "gradient=straight_t"),
        (quantised, {"ranges": "following", "learned_steps": True}, "ranges=following, gradient=c"),
        (started, {"algo": "ppo"}, "--algo dqn --env CartPole-v1 from ppo-CartPole-v1-s0"),
        (started, {"env_id": "Acrobot-v1"}, "--algo dqn --env CartPole-v1 from dqn-Acrobot-v1-s0"),
        (started, {"seed": 1}, "Received: seed=0"),
        (started, {"quantization": quantised()}, "Received: run='dqn-CartPole-v1-s0-q4d100'"),
        (load, {"train_frequency": 100, "num_envs": 7}, ": train_frequency=100, num_envs=7"),
        (load, {"evaluation_every": 10**6, "until": 475}, ": until=475, evaluation_every=1000000"),
        (load, {"learning_starts": 8}, "Received: learning_starts=8"),
        (load, {"buffer_size": 1001}, "Received: learning_starts=1000, buffer_size=1001"),
        (load, {"buffer_size": 71, "learning_starts": 16}, "buffer_size=71, num_envs=8"),
        (load, {"cell": DDPG, **LATE}, "Received: steps=1000, learning_starts=900"),
        (load, {"cell": PPO, "minibatch_size": 100}, "train_frequency=256, minibatch_size=100"),
        (load, {"cell": PPO, "minibatch_size": 1}, "Received: minibatch_size=1"),
        (load, {"cell": A2C, "epochs": 2}, "Received: epochs=2"),
    ],
)
def test_contradictions_are_refused(make: Any, options: dict[str, Any], message: str) -> None:
    assert message in refused(make, **options, code=2)
