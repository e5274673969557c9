"""Episodes replayed by the evaluator are those that stepping Gymnasium by hand gives."""

import errno
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import gymnasium as gym
import numpy as np
import pytest
from conftest import STEERING, Network
from samples import RUN, SIDECAR, Artifacts, Describe, Patch, refused, register, step

from quarl_tf import Policy, environments, pipeline
from quarl_tf.environments import acting, airnav, env_spec, registry
from quarl_tf.evaluation import play
from quarl_tf.evaluation.compare import effective_n
from quarl_tf.evaluation.play import evaluate, evaluate_random
from quarl_tf.foundation import files, processes, provenance
from quarl_tf.foundation.seeding import environment_seed, evaluation_seeds, generator
from quarl_tf.spec import GREEDY, Chance, Run
from quarl_tf.store.records import Evaluation, Protocol
from quarl_tf.store.state import baseline, evaluation_flaw, may_be_continued
from quarl_tf.store.workspace import evaluation_path, reference_path, sidecar_path

SEEDS = list(range(2**30, 2**30 + 12))
SAMPLED = Chance("sampled")


def fits(path: Path, seeds: Sequence[int], chance: Chance = GREEDY) -> bool:
    """Tell whether the saved evaluation of a flatbuffer has these seeds."""
    sidecar, saved = Policy.load(path).sidecar, Evaluation.load(evaluation_path(path, chance))
    return evaluation_flaw(saved, sidecar, reference_path(path, sidecar), seeds, chance) is None


def outcomes(result: Evaluation) -> list[tuple[float, int]]:
    return list(zip(result.returns, result.lengths, strict=True))


def test_returns_by_hand(artifacts: Artifacts, networks: Any, monkeypatch: Patch) -> None:
    path, network, env = artifacts["balancer"], networks["balancer"], gym.make("CartPole-v1")
    result = evaluate(path, SEEDS)
    expected = [step(env, lambda x: int(np.argmax(network(x))), seed) for seed in SEEDS]
    assert (outcomes(result), result.seeds) == (expected, SEEDS)
    assert np.mean(result.returns) > 400  # A random policy earns 22.
    assert (result.scheme, result.artifact_sha256) == ("fp32", Policy.load(path).sidecar.sha256)
    assert (result.ties, result.agreement, result.processor) == (0, None, provenance.processor())
    assert 0 < result.latency_us["median"] <= result.latency_us["p95"]
    monkeypatch.setattr(environments, "LONGEST_EPISODE", 100)
    assert refused(evaluate, path, SEEDS, code=2).endswith("Received: steps=101")


@pytest.mark.parametrize(("shift", "fraction"), [(0.0059, 1.0), (0.0061, 0.0)])
def test_continuous_actions_agree_nearly(describe: Describe, shift: float, fraction: float) -> None:
    run, paths = Run("ddpg", "Steering-v0", 0), []
    facts = {"run": run.to_dict(), "run_id": run.run_id, "env_id": run.env_id, "head": "action"}
    for bias in (0.0, shift):  # Of the second action, from 0 to 0.6.
        layers = [(np.zeros((3, 2), np.float32), np.array([0, bias], np.float32))]
        content = Network(layers, np.zeros((1, 3), np.float32)).convert("fp32")
        paths.append(describe(content, f"bias{bias}", **facts, **env_spec(run.env_id).facts))
    result = evaluate(paths[1], SEEDS[:1], reference=paths[0])
    assert result.agreement == {"fraction": fraction, "states": 3}
    assert result.latency_us["fp32"] > 0
    assert "fp32" not in evaluate(paths[0], SEEDS[:1], reference=paths[0]).latency_us


@pytest.fixture
def stochastic(artifacts: Artifacts, describe: Describe) -> Callable[..., Path]:
    """Return a function that writes a flatbuffer whose head is taken for logits."""
    return lambda name, scheme, **changes: describe(
        artifacts[name].read_bytes(), scheme, scheme=scheme, head="logits", **changes
    )


def by_hand(path: Path, chance: Chance, seeds: list[int], note: Any = id) -> list[Any]:
    """Step Gymnasium by hand; `note` sees every observation."""
    policy = Policy.load(path)
    env = gym.make(policy.sidecar.env_id)

    def act(observation: np.ndarray, random: np.random.Generator) -> Any:
        note(observation)
        return policy.act(observation) if chance is GREEDY else policy.sample(observation, random)

    return [step(env, partial(act, random=generator(s, "sampled actions")), s) for s in seeds]


def test_an_episode_depends_on_its_seed_alone(stochastic: Describe) -> None:
    """Draws follow from the seed, whatever the policy (`by_hand`)."""
    path = stochastic("fp32", "fp32")
    forwards, backwards = (evaluate(path, seeds, SAMPLED) for seeds in (SEEDS, SEEDS[::-1]))
    assert outcomes(forwards) == by_hand(path, SAMPLED, SEEDS)
    assert forwards.returns == backwards.returns[::-1]
    assert len(set(forwards.returns)) > 1
    assert forwards.protocol.actions == "sampled"
    assert forwards.latency_us is not None


def test_random_actions_follow_from_the_seed(artifacts: Artifacts) -> None:
    paths = artifacts["fp32"], artifacts["balancer"]
    # Where all actions are random, the policy does not matter.
    first, second = (evaluate(path, SEEDS, Chance("epsilon", 1.0)) for path in paths)
    assert first.returns == second.returns
    mixed = evaluate(paths[0], SEEDS, Chance("epsilon", 0.3))
    assert mixed.returns == evaluate(paths[0], SEEDS[::-1], Chance("epsilon", 0.3)).returns[::-1]
    assert mixed.returns not in (first.returns, evaluate(paths[0], SEEDS).returns)
    assert mixed.protocol.actions == "0.3 random, else greedy"


@pytest.mark.parametrize("chance", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_agreement_is_of_greedy_actions(stochastic: Describe, chance: Chance) -> None:
    """In the states that the reference visits."""
    balancer, tied = stochastic("balancer", "fp32"), stochastic("tied", "int8")
    reference, greedy, seeds = Policy.load(balancer), list[Any](), SEEDS[: play.AGREEMENT_EPISODES]
    by_hand(balancer, chance, seeds, lambda observation: greedy.append(reference.act(observation)))
    # The tied policy's greedy action is always 0; its samples are heads or tails.
    result = evaluate(tied, SEEDS, chance, reference=balancer)
    assert result.agreement == {"fraction": greedy.count(0) / len(greedy), "states": len(greedy)}
    # Those of the episodes, not of the comparison.
    assert chance != GREEDY or result.ties == sum(result.lengths)
    self_comparison = evaluate(balancer, SEEDS, chance, reference=balancer)
    assert self_comparison.agreement == {"fraction": 1.0, "states": len(greedy)}


def test_nothing_is_played_that_cannot_be_saved(stochastic: Describe, monkeypatch: Patch) -> None:
    path, refuse = stochastic("fp32", "fp32"), Mock(side_effect=PermissionError(errno.EACCES, "x"))
    monkeypatch.setattr(files.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(play, "evaluate", lambda *_, **__: pytest.fail("played"))
    assert "make the folder writable" in refused(pipeline.evaluate, path, 2)


def test_saved_evaluations_are_reused(stochastic: Describe, monkeypatch: Patch) -> None:
    path, seeds = stochastic("tied", "fp32"), evaluation_seeds(0, 14)
    saved, folder = evaluation_path(path), path.parent
    assert "episodes=0" in refused(pipeline.evaluate, path, 0, code=2)
    unfit: Any = "sampled"
    assert "chance='sampled'" in refused(partial(pipeline.evaluate, path, chance=unfit), code=2)
    greedy = pipeline.evaluate(path, 12)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    sampled = pipeline.evaluate(path, 8, chance=SAMPLED)
    after = {file.name: file.read_bytes() for file in folder.iterdir()}  # The baseline is shared.
    assert after == before | {"fp32.sampled.eval.json": after["fp32.sampled.eval.json"]}
    # A longer evaluation is kept, a shorter one continued.
    assert pipeline.evaluate(path, 8) == greedy.first(8)
    assert Evaluation.load(saved) == greedy
    assert pipeline.evaluate(path, 8, chance=SAMPLED) == sampled
    assert [fits(path, seeds[:12]), fits(path, seeds[1:2])] == [True, False]
    monkeypatch.setattr(play, "play", played := Mock(wraps=acting.play))
    longer = pipeline.evaluate(path, 14)
    replace(greedy, processor="Gamma").save(saved)
    afresh = pipeline.evaluate(path, 14)
    assert (afresh.seeds, afresh.returns[:12]) == (seeds, greedy.returns)
    assert longer == replace(afresh, latency_us=greedy.latency_us)
    # What was new, the random policy, and all.
    assert [call.args[-1] for call in played.mock_calls] == [*seeds[12:], *seeds, *seeds]
    assert may_be_continued(longer, GREEDY)
    assert not may_be_continued(longer.first(9), GREEDY)
    assert not may_be_continued(replace(longer, versions={"numpy": "1"}), GREEDY)
    # Code that has no version may have changed since.
    assert not may_be_continued(replace(longer, env_id="Steering-v0"), GREEDY)
    now = {"env_id": "Steering-v0", "environment_sha256": registry.source_sha256("Steering-v0")}
    assert not may_be_continued(replace(longer, **now), GREEDY)
    random = Evaluation.load(folder / "random.eval.json")
    later: Any = baseline(folder / "fp32.tflite", RUN, seeds[2:])
    assert (random.seeds, later.returns) == (seeds, random.returns[2:])
    protocols = [{"protocol": Protocol(0, "greedy")}, {"protocol": Protocol(1, "sampled")}]
    for changes in ({"artifact_sha256": "0" * 64}, {"environment_sha256": "0" * 64}, *protocols):
        replace(longer, **changes).save(saved)
        assert not fits(path, seeds)
    saved.write_text('{"run_id": ')
    assert pipeline.evaluate(path, 14) == Evaluation.load(saved)


def test_interrupted_evaluations_keep_episodes(stochastic: Describe, monkeypatch: Patch) -> None:
    def interrupt(done: int, _: int) -> None:
        if done == 25:
            raise KeyboardInterrupt

    path = stochastic("tied", "int8")
    monkeypatch.setattr(play, "_SECONDS_SAVED", 0)
    with pytest.raises(KeyboardInterrupt):
        pipeline.evaluate(path, 30, update=interrupt)
    assert len(Evaluation.load(evaluation_path(path)).seeds) == 24
    seeds = evaluation_seeds(RUN.seed, 30)
    monkeypatch.setattr(play, "play", played := Mock(wraps=acting.play))
    result = pipeline.evaluate(path, 30)
    assert [call.args[-1] for call in played.mock_calls[:6]] == seeds[24:]
    assert outcomes(result) == outcomes(evaluate(path, seeds))
    # One that cannot be continued is kept until another is as long.
    replace(result, processor="Gamma").save(evaluation_path(path))
    with pytest.raises(KeyboardInterrupt):
        pipeline.evaluate(path, 40, update=interrupt)
    assert len(Evaluation.load(evaluation_path(path)).seeds) == 30

    def overtake(done: int, _: int) -> None:
        if done == 5:  # Another process plays the same.
            result.save(evaluation_path(path))
        interrupt(done, 0)

    evaluation_path(path).unlink()
    with pytest.raises(KeyboardInterrupt):
        pipeline.evaluate(path, 40, update=overtake)
    assert len(Evaluation.load(evaluation_path(path)).seeds) == 30


def test_processes_play_the_same_episodes(stochastic: Describe, monkeypatch: Patch) -> None:
    path, seeds = stochastic("tied", "int8"), evaluation_seeds(0, 14)
    alone = evaluate(path, seeds, SAMPLED)
    monkeypatch.setattr(play, "_SECONDS_ALONE", 0)
    monkeypatch.setattr(play, "play", played := Mock(wraps=acting.play))
    result = evaluate(path, seeds, SAMPLED, jobs=2)
    assert played.call_count == play.AGREEMENT_EPISODES
    assert replace(result, latency_us=alone.latency_us) == alone
    played.reset_mock()
    with patch.object(processes, "may_start", return_value=False):  # In a pool's worker.
        assert evaluate(path, seeds, SAMPLED, jobs=2).returns == result.returns
    assert played.call_count == len(seeds)

    def replaced(done: int, _: int) -> None:
        if done == play.AGREEMENT_EPISODES:
            stochastic("balancer", "int8")

    assert "replaced" in refused(evaluate, path, seeds, SAMPLED, update=replaced, jobs=2)
    # Others' environments are played by one, which knows their modules.
    played.reset_mock()
    run = replace(RUN, modules=("a_module",)).to_dict()
    assert evaluate(stochastic("tied", "int8", run=run), seeds, SAMPLED, jobs=2).seeds == seeds
    assert played.call_count == len(seeds)


def test_a_reference_is_compared_with_unless_it_was_deleted(stochastic: Describe) -> None:
    path = stochastic("tied", "int8")
    fp32 = reference_path(path, Policy.load(path).sidecar)
    SIDECAR.save(sidecar_path(fp32))
    evaluate(path, SEEDS[:2]).save(evaluation_path(path))
    assert fits(path, SEEDS[:2])
    fp32.touch()
    assert not fits(path, SEEDS[:2])


def test_evaluations_of_games_state_their_rules(stochastic: Describe, monkeypatch: Patch) -> None:
    assert evaluate(stochastic("fp32", "fp32"), SEEDS[:2]).protocol.game is None
    # CartPole under the name of a game.
    game = register(monkeypatch, "PoleNoFrameskip-v4", "gymnasium.envs.classic_control:CartPoleEnv")
    path = stochastic("fp32", "fp32", env_id=game)
    played = [evaluate(path, SEEDS[:2], chance, reference=path) for chance in (GREEDY, SAMPLED)]
    for result in (*played, evaluate_random(game, "run", SEEDS[:2])):
        assert result.protocol.game == environments.rules(game)
    played[0].save(evaluation_path(path))
    assert fits(path, SEEDS[:2])
    monkeypatch.setattr(environments, "rules", lambda *_: {"sticky_actions": 0.25})
    assert not fits(path, SEEDS[:2])


class _OfTwoStarts(gym.Wrapper):
    """Starts by a seed's remainder, and names its start if it is a game."""

    is_game = False

    def reset(self, *, seed: int, options: Any = None) -> tuple[Any, Any]:
        observation, info = self.env.reset(seed=seed % 2, options=options)
        return observation, info | ({environments.START: seed % 2} if self.is_game else {})


@pytest.mark.parametrize("name", ["fp32", "tied"])
def test_one_start_is_played_once(stochastic: Describe, name: str, monkeypatch: Patch) -> None:
    path = stochastic(name, "fp32")
    by_start = [evaluate(path, [seed]) for seed in (0, 1)]
    make, played, progress = environments.make, Mock(wraps=acting.play), list[int]()
    monkeypatch.setattr(environments, "make", lambda env_id, **_: _OfTwoStarts(make(env_id)))
    monkeypatch.setattr(_OfTwoStarts, "is_game", True)
    monkeypatch.setattr(play, "play", played)
    result = evaluate(path, [4, 7, 5, 2, 9], update=lambda done, _: progress.append(done))
    assert progress == [1, 2, 3, 4, 5]
    assert [call.args[-1] for call in played.call_args_list] == [4, 7]
    expected = [by_start[start] for start in (0, 1, 1, 0, 1)]
    assert outcomes(result) == [outcomes(evaluation)[0] for evaluation in expected]
    assert result.ties == sum(evaluation.ties for evaluation in expected)
    evaluate(path, [4, 7, 5], chance=SAMPLED)
    assert [call.args[-1] for call in played.call_args_list[2:]] == [4, 7, 5]
    seeds = [*range(13)]
    whole, begun = evaluate(path, seeds), evaluate(path, seeds[:10])
    played.reset_mock()
    assert evaluate(path, seeds, begun=begun) == replace(whole, latency_us=begun.latency_us)
    assert [call.args[-1] for call in played.call_args_list] == [10, 11]


def test_equal_first_observations_are_recorded(stochastic: Describe, monkeypatch: Patch) -> None:
    path, make = stochastic("fp32", "fp32"), environments.make
    assert evaluate(path, SEEDS[:4]).starts is None
    monkeypatch.setattr(environments, "make", lambda env_id, **_: _OfTwoStarts(make(env_id)))
    result = evaluate(path, [4, 7, 2, 9])
    assert len({*result.starts[::2]}) == len({*result.starts[1::2]}) == 1
    assert effective_n(result) == 2


def test_misfits_are_refused(artifacts: Any, describe: Describe) -> None:
    path = describe(artifacts["int8"].read_bytes(), scheme="int8", network_sha256="1" * 64)
    message = refused(evaluate, path, SEEDS, reference=artifacts["fp32"])
    assert "of another network than int8" in message
    fp32, foreign = describe(artifacts["fp32"].read_bytes(), "fp32"), replace(RUN, seed=1)
    facts = {"scheme": "int8", "run": foreign.to_dict(), "run_id": foreign.run_id}
    message = refused(pipeline.evaluate, describe(artifacts["int8"].read_bytes(), **facts), 2)
    assert message.endswith(f"Received: {fp32}, fp32 of {RUN.run_id}")
    assert not evaluation_path(fp32).exists()
    for name, changes, message in (
        ("fp32", {"env_id": "MountainCar-v0"}, "observation_shape=[2], the policy's is [4]"),
        ("steering", STEERING | {"action_high": [2.0]}, "[1.0], the policy's is [2.0]"),
    ):
        path = describe(artifacts[name].read_bytes(), **changes)
        assert message in refused(evaluate, path, SEEDS)
    broken = "BrokenReward-v0"
    path = describe(artifacts["tied"].read_bytes(), env_id=broken)
    for message in (refused(evaluate, path, [7]), refused(evaluate_random, broken, "", [7])):
        assert re.search("reward that is not finite.*sum=nan, seed=7", message)


def test_random_episodes_are_as_by_hand() -> None:
    result, env, expected = evaluate_random("CartPole-v1", "", SEEDS), gym.make("CartPole-v1"), []
    for seed in SEEDS:
        # Not the environment's own, by which actions would follow its starting state.
        env.action_space.seed(environment_seed(seed, "random actions"))
        expected.append(step(env, lambda _: env.action_space.sample(), seed))
    assert outcomes(result) == expected
    assert 9 < np.mean(result.returns) < 60
    assert (result.scheme, result.artifact_sha256, result.latency_us) == ("random", None, None)


def test_success_is_what_the_last_step_of_an_episode_tells(monkeypatch: Patch) -> None:
    assert evaluate_random("CartPole-v1", "run", SEEDS[:2]).successes is None
    monkeypatch.setattr(airnav, "REACHED", 25.0)
    result = evaluate_random("AirNav-v0", "run", SEEDS)
    assert set(result.successes or ()) == {True, False}
    assert result.successes == [total > 0 for total in result.returns]
    # Where only successes are told, the others are none.
    outcomes = iter([acting.Episode(1.0, 3, True), acting.Episode(0.0, 3, None)])
    monkeypatch.setattr(play, "play", lambda *_: next(outcomes))
    assert evaluate_random("CartPole-v1", "run", SEEDS[:2]).successes == [True, False]
    monkeypatch.setattr(play, "play", acting.play)
    ended = acting.Tick(0, 0, 1.0, True, True, info={environments.SUCCESS: np.nan})
    monkeypatch.setattr(acting, "ticks", lambda *_: [ended])
    assert "Received: nan" in refused(acting.play, None, None, None, 0)
