"""What a training writes, how it resumes, and what it refuses."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas
import pytest
import samples
from samples import TINY, Capsys, Patch, begun, built, products, refusal, refused, snapshot, train

from quarl_tf import Run, environments, networks, pipeline
from quarl_tf.environments import GAME_OVER, RAW_REWARD
from quarl_tf.environments.acting import Tick
from quarl_tf.foundation.files import locked
from quarl_tf.foundation.seeding import environment_seed
from quarl_tf.networks import inference
from quarl_tf.quantization import quantizing
from quarl_tf.store.records import Sidecar, TrainingRecord
from quarl_tf.store.state import finished_training, require_origin, starting_from
from quarl_tf.store.workspace import Workspace, sidecar_path
from quarl_tf.training import checkpoint, loop
from quarl_tf.training.collector import Collector
from quarl_tf.training.rollout import rollout


def curves(workspace: Workspace, run: Run) -> pandas.DataFrame:
    return pandas.read_csv(workspace.run_dir(run.run_id) / "progress.csv")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return samples.uncut_and_cut(tmp_path_factory.mktemp("trained"), TINY)[0]


@pytest.fixture
def copy(trained: Workspace, tmp_path: Path) -> Workspace:
    """Return a copy of the trained workspace, to be damaged."""
    shutil.copytree(trained.root, tmp_path, dirs_exist_ok=True)
    return Workspace(tmp_path)


@pytest.fixture
def cut_off(trained: Workspace, tmp_path: Path) -> Workspace:
    """Return a workspace of a killed training, to be damaged or resumed."""
    shutil.copytree(trained.root.with_name("cut"), tmp_path, dirs_exist_ok=True)
    return Workspace(tmp_path)


def test_record_and_curve_say_what_was_trained(trained: Workspace) -> None:
    folder, curve = trained.run_dir(TINY.run_id), curves(trained, TINY)
    preset: Any = samples.preset(TINY)
    record = TrainingRecord.load(folder / "training.json")
    assert finished_training(trained, TINY, preset) == record  # Of these settings and files.
    assert Run.from_dict(record.run) == TINY
    assert any((folder / "tensorboard").iterdir())
    evaluated = curve.dropna(subset="greedy_return")
    assert len(evaluated) >= preset.steps // preset.evaluation_every
    # The best on selection seeds, and the later of two that are equally good.
    best = max(zip(evaluated.greedy_return, evaluated.step, strict=True))
    assert (record.selection_return, record.best_step) == best
    assert list(curve) == ["step", "seconds", "episodes", "episode_return", "greedy_return", "loss"]
    last = curve.step.iloc[-1]
    assert preset.steps <= last < preset.steps + preset.train_frequency
    # A hundredth is less than a burst here, so every burst has its row; resets are no steps.
    bursts = np.diff(curve.step, prepend=0)
    assert 0 < bursts.min() <= bursts.max() <= preset.train_frequency
    # CartPole pays 1 a step, and an episode is 1 to 500 steps long.
    assert curve.episode_return.dropna().between(1, 500).all()
    assert 1 <= last / curve.episodes.iloc[-1] <= 500
    losses = curve.loss.dropna()
    assert len(losses) >= (curve.step > preset.learning_starts).sum()
    assert np.isfinite(losses).all()


def test_training_stops_at_the_return_that_was_asked_for(tmp_path: Path) -> None:
    # Any policy reaches this return at the first evaluation.
    run = replace(TINY, overrides={**TINY.overrides, "until": 1})
    record = train(Workspace(tmp_path), run)
    last = curves(Workspace(tmp_path), run).iloc[-1]
    assert record.best_step == last.step < run.overrides["steps"]
    assert record.selection_return == last.greedy_return >= 1


def collector_for(agent: Any) -> Collector:
    """Return a collector of two environments, whose episodes have three steps."""
    run = Run("ddpg", "Steering-v0", 0, {"num_envs": 2, "steps": 20_000})
    return Collector(agent, run.env_id, samples.preset(run), run.seed)


def test_collected_are_steps_and_whole_episodes_from_seeds_that_follow_from_the_step() -> None:
    agent, starts = Mock(act=Mock(return_value=np.zeros((2, 2), np.float32))), []
    collector = collector_for(agent)
    for ticks in (10, 3):  # Every fourth only resets.
        collector.restart()
        starts.append(collector.observations)
        for _ in range(ticks):
            collector.tick()
    assert not np.array_equal(*starts)
    assert (collector.step, collector.episodes) == (2 * (8 + 3), 2 * (2 + 1))
    assert [*collector.recent_returns] == [3.0] * 6
    assert agent.act.call_args.args[1] == 20 / 20_000  # What was done before the last tick.


def test_a_life_that_ends_is_no_episode_and_scores_are_not_clipped() -> None:
    collector, ones, lost = collector_for(Mock()), np.ones(2), np.ones(2, np.bool_)
    info = {RAW_REWARD: np.array([7.0, 7.0]), GAME_OVER: np.array([False, True])}
    collector._ticks = iter([Tick(None, ones, ones, lost, lost, info=info)])
    collector.tick()
    assert ([*collector.recent_returns], collector.episodes) == ([7.0], 1)


def test_calibration_is_of_what_the_kept_network_sees(trained: Workspace) -> None:
    folder, limit = trained.run_dir(TINY.run_id), loop.CALIBRATION_OBSERVATIONS
    observations = networks.load_weights(folder / "calibration.npz")["observations"]
    assert 0 < len(observations) <= limit
    assert observations.dtype == np.float32
    network = built(TINY)
    networks.set_weights(network, networks.load_weights(folder / "network.npz"))
    head = inference.Snapshot(network)
    envs = environments.make_vector("CartPole-v1", TINY.overrides["evaluation_episodes"])
    seed = environment_seed(TINY.seed, "calibration", int(curves(trained, TINY).step.iloc[-1]))
    expected = rollout(envs, lambda batch, _: head(batch).argmax(axis=1), seed, limit).observations
    np.testing.assert_allclose(observations, expected, rtol=1e-6)


def test_checkpoints_of_others_are_kept(cut_off: Workspace) -> None:
    folder = cut_off.run_dir(TINY.run_id) / "checkpoints"
    newest = max(folder.glob("*.npz"))
    arrays, state = checkpoint.load(newest) or ({}, {})
    del arrays["variable/0"]
    checkpoint.save(folder, int(newest.stem), arrays, state)
    content = newest.read_bytes()
    assert "Another version" in refused(train, cut_off, TINY)
    assert newest.read_bytes() == content


def test_all_commits_are_named(cut_off: Workspace, trained: Workspace, monkeypatch: Patch) -> None:
    monkeypatch.setattr(loop.provenance, "source_commit", lambda: "fedcba987654")
    monkeypatch.setattr(loop.provenance, "processor", lambda: "Beta with asimd")
    record = train(cut_off, TINY)
    expected = TrainingRecord.load(trained.run_dir(TINY.run_id) / "training.json")
    assert record.commits == [*expected.commits, "fedcba987654"]
    assert record.processors == [*expected.processors, "Beta with asimd"]


def test_a_run_that_another_process_trains_is_refused(tmp_path: Path) -> None:
    folder = Workspace(tmp_path).run_dir(TINY.run_id)
    with locked(folder, "held by the test"):
        assert "Received: run='dqn-" in refused(train, Workspace(tmp_path), TINY)
        assert not any(folder.iterdir())
    assert "A Run is trained" in refused(pipeline.train, TINY.run_id, root=tmp_path, code=2)


def test_a_full_disk_is_one_line(trained: Workspace, tmp_path: Path, monkeypatch: Patch) -> None:
    workspace = Workspace(tmp_path)
    folder, fsync = workspace.run_dir(TINY.run_id), os.fsync
    (folder / "checkpoints").mkdir(parents=True)  # Half written, without a checkpoint.
    (folder / "progress.csv").write_text("step,episode_return\n64,1")
    (folder / "network.npz").write_bytes(b"PK\x03\x04")

    def fills_up(handle: int) -> None:
        if any((folder / "checkpoints").glob("*.npz")):  # Full after the first checkpoint.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fills_up)
        assert "No space left" in refused(train, workspace, TINY)
    assert not list(folder.rglob("*.tmp"))
    assert not (folder / "training.json").exists()
    steps: list[int] = []
    train(workspace, TINY, lambda done, *_: steps.append(done))
    assert steps[0] > TINY.overrides["checkpoint_every"]
    assert products(folder) == products(trained.run_dir(TINY.run_id))


@pytest.mark.parametrize("name", ["network.npz", "calibration.npz"])
def test_changed_network_is_refused(copy: Workspace, name: str) -> None:
    path = copy.run_dir(TINY.run_id) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    before = snapshot(copy.root)
    assert f"{path} was changed or damaged" in refused(train, copy, TINY)
    path.unlink()
    assert f"Received: path='{path}'" in refused(train, copy, TINY)
    del before[str(path.relative_to(copy.root))]
    assert snapshot(copy.root) == before


@pytest.mark.parametrize("progress", ["cut_off", "copy"])
@pytest.mark.parametrize("change", ["seed", "discount"])
def test_the_folder_of_another_run_is_refused(progress: str, change: str, request: Any) -> None:
    workspace: Workspace = request.getfixturevalue(progress)
    other, words = replace(TINY, seed=1), f"Received: {TINY.run_id!r}"
    if change == "discount":
        other = replace(TINY, overrides={**TINY.overrides, "discount": 0.5})
        words = "discount=0.5 for 0."
    workspace.run_dir(TINY.run_id).rename(workspace.run_dir(other.run_id))
    before = snapshot(workspace.root)
    assert words in refused(train, workspace, other)
    if progress == "copy":
        assert "holds another run" in refused(pipeline.export, other.run_id, root=workspace.root)
    assert snapshot(workspace.root) == before


@pytest.mark.parametrize("every", [64, 5000])
def test_a_reward_that_is_not_finite_is_not_called_divergence(every: int, tmp_path: Path) -> None:
    run, preset = Run("dqn", "BrokenReward-v0", 0), samples.preset(TINY, evaluation_every=every)
    assert "sum=nan" in refused(train, Workspace(tmp_path), run, settings=preset)


def test_losses_and_heads_beyond_numbers_are_divergence(tmp_path: Path, monkeypatch: Patch) -> None:
    state = begun(tmp_path, TINY)
    state.resume()
    with monkeypatch.context() as patch:
        patch.setattr(state.agent, "learn", lambda _: {"loss": np.nan})
        assert "Training diverged" in refused(state.burst)
    weights = networks.weights(state.agent.network)
    networks.set_weights(state.agent.network, {n: v * np.nan for n, v in weights.items()})
    assert "a head that is not finite at step" in refused(state.greedy, "selection")


def test_only_states_of_the_episodes_count_for_the_action_variance(tmp_path: Path) -> None:
    run = Run("ppo", "CartPole-v1", 0, {"network": [8], "evaluation_episodes": 6})
    state = begun(tmp_path, run)
    lengths = state.greedy("selection").returns  # A reward of 1 for every state.
    assert len(set(lengths)) > 1
    assert sum(map(len, state._variances)) == sum(lengths)


def require_start(workspace: Workspace, run: Run, weights: Any, tolerance: float = 0.0) -> None:
    state = begun(workspace.root / "unused", run)
    state.start_from(workspace, run.origin)
    for name, values in weights.items():
        actual = state.best.weights[name]
        np.testing.assert_allclose(actual, values, rtol=tolerance, atol=tolerance / 1000)


def test_a_training_from_another_starts_there_and_is_compared_with_it(copy: Workspace) -> None:
    run = replace(TINY, quantization=samples.quantised(delay=450))
    run = starting_from(copy, TINY.run_id, run, samples.preset(TINY))
    require_start(copy, run, networks.load_weights(copy.run_dir(TINY.run_id) / "network.npz"))
    train(copy, run)
    pipeline.export(TINY.run_id, ["fp32"], root=copy.root)  # Its reference is what it started from.
    (artifact,) = pipeline.export(run.run_id, ["qat_w4a4"], root=copy.root)
    fp32 = Sidecar.load(copy.artifact(TINY.run_id, "fp32").with_suffix(".json"))
    assert pipeline.evaluate(artifact, 2).reference_sha256 == fp32.sha256
    other = replace(run, origin=replace(run.origin, network_sha256="another"))
    assert "trained again, or its folder deleted" in refused(train, copy, other)


def test_a_flatbuffer_stands_in_for_a_run_to_start_from(copy: Workspace) -> None:
    weights = networks.load_weights(copy.run_dir(TINY.run_id) / "network.npz")
    fp32, _ = pipeline.export(TINY.run_id, ["fp32", "fp16"], root=copy.root)
    shutil.rmtree(copy.root / "runs")
    arguments = copy, TINY.run_id, TINY, samples.preset(TINY)
    run, sidecar = starting_from(*arguments), Sidecar.load(fp32.with_suffix(".json"))
    require_start(copy, run, weights)
    assert run.origin.network_sha256 == sidecar.sha256
    of_network = replace(run.origin, network_sha256=sidecar.network_sha256)
    assert "of which only fp32.tflite is here" in refused(require_origin, copy, of_network)
    # Where only fp16 is kept, it is what a training starts from, also when fp32 is there again.
    content = fp32.read_bytes()
    fp32.unlink()
    of_halves = starting_from(*arguments)
    assert "of which only fp16.tflite is here" in refused(require_origin, copy, run.origin)
    fp32.write_bytes(content)
    require_start(copy, of_halves, weights, 1e-3)
    content = bytearray(fp32.read_bytes())
    content[-100] ^= 1
    fp32.write_bytes(content)
    assert f"Received: path='{fp32}" in refused(starting_from, *arguments)
    # Without either, what such a training was exported to tells what it started from.
    shutil.rmtree(fp32.parent)
    assert "train it first" in refused(starting_from, *arguments)
    known = replace(sidecar, run=run.to_dict(), run_id=run.run_id)
    known.save(sidecar_path(copy.artifact(run.run_id, "fp32")))
    assert starting_from(*arguments) == run


def test_a_start_that_does_not_fit_is_one_line(trained: Workspace, capsys: Capsys) -> None:
    words = ["train", "--algo", "dqn", "--env", "CartPole-v1", "--root", str(trained.root)]
    words += ["--from", TINY.run_id, "--dry-run"]
    assert "Received: network=[256, 256] for [32, 32]" in refusal(capsys, *words)
    words += ["-p", "network=[32,32]", "-p", "byte_zero=3"]
    assert "Received: byte_zero=3 for 0" in refusal(capsys, *words)


def test_what_is_chosen_by_is_the_network_as_exported(tmp_path: Path, monkeypatch: Patch) -> None:
    overrides = {"network": "li", "precision": "bfloat16", "evaluation_episodes": 1}
    quantization = samples.quantised(bits=3, delay=1)
    run = Run("ppo", "PongNoFrameskip-v4", 0, overrides, quantization)
    state = begun(tmp_path, run)
    frames = np.random.default_rng(0).integers(0, 256, (200, 84, 84, 4), np.uint8)
    state.agent.network(frames, training=True)
    state._start_quantization(1)
    everywhere = np.ones(len(frames), np.bool_)
    monkeypatch.setattr(loop.rollout, "rollout", lambda _, act, *__: act(frames, everywhere))
    network = quantizing(quantization)(built(run))
    networks.set_weights(network, networks.weights(state.agent.network))
    exported = inference.forward(network)(frames)
    np.testing.assert_array_equal(state.greedy("selection"), exported.argmax(axis=1))
    # In bfloat16, as trained, some differ.
    assert not np.array_equal(inference.forward(state.agent.network)(frames), exported)
