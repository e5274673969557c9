"""A training resumes after an interruption, or elsewhere as a run of its own."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from samples import Capsys, Patch, begun, printed, products, refusal, refused, train, uncut_and_cut

from quarl_tf import agents, environments, networks, pipeline, presets
from quarl_tf.cli import verbs
from quarl_tf.environments import airnav, registry
from quarl_tf.foundation.files import sha256
from quarl_tf.spec import Origin, Quantization, Run
from quarl_tf.store.records import TrainingRecord
from quarl_tf.store.workspace import Workspace, checkpoint_dir
from quarl_tf.training import checkpoint

BREAKOUT = "BreakoutNoFrameskip-v4"
_BRIEF: dict[str, Any] = {"steps": 512, "num_envs": 2, "network": [8], "train_frequency": 64}
_BRIEF |= {"evaluation_every": 256, "evaluation_episodes": 2, "checkpoint_every": 256}
_OFF_POLICY = {"learning_starts": 64, "batch_size": 16, "gradient_steps": 4}
#: The ring wraps, and the exploration's schedule is under way at any cut.
_DQN = {**_OFF_POLICY, "exploration_fraction": 1.0, "buffer_size": 400}
_DDPG = {**_OFF_POLICY, "layer_norm": True}
_PPO = {"minibatch_size": 32, "epochs": 2}
_A2C = {"minibatch_size": 64}
_IMAGES: dict[str, Any] = {"steps": 256, "network": "li", "train_frequency": 32}
_IMAGES |= {"evaluation_every": 128, "checkpoint_every": 128}
_DQN_IMAGES = {**_IMAGES, "batch_size": 4, "gradient_steps": 1, "buffer_size": 100, "dueling": True}
_PPO_IMAGES = {**_IMAGES, "minibatch_size": 16, "epochs": 1, "precision": "bfloat16"}


_FEW_BITS = presets.quantization("dqn", {"bits": 4, "delay": 100})
_STEPS, _LATE = samples.quantised(learned_steps=True), samples.quantised(delay=350)

#: Algorithm, environment, changes of the preset of another environment, and quantisation; the
#: checkpoint that is resumed lies behind a delay of 100, before one of 350.
KINDS: dict[str, tuple[str, str, dict[str, Any], str, Quantization | None]] = {
    "dqn": ("dqn", "CartPole-v1", {**_DQN, "dueling": True}, "CartPole-v1", None),
    "dqn of images at 4 bits": ("dqn", BREAKOUT, {**_DQN, **_DQN_IMAGES}, BREAKOUT, _FEW_BITS),
    "dqn of a task that rises": ("dqn", "AirNav-v0", _DQN, "AirNav-v0", None),
    "ppo of images": ("ppo", BREAKOUT, {**_PPO, **_PPO_IMAGES}, BREAKOUT, None),
    "a2c at 4 bits": ("a2c", "CartPole-v1", _A2C, "CartPole-v1", _LATE),
    "pqn at 4 bits": ("pqn", "CartPole-v1", _PPO, "CartPole-v1", _FEW_BITS),
    "pqn of images": ("pqn", BREAKOUT, {**_PPO, **_PPO_IMAGES}, BREAKOUT, None),
    "continuous ppo": ("ppo", "Pendulum-v1", _PPO, "CartPole-v1", None),
    "learned steps": ("ppo", "CartPole-v1", _PPO, "CartPole-v1", _STEPS),
    "ddpg": ("ddpg", "Pendulum-v1", _DDPG, "MountainCarContinuous-v0", None),
    "ddpg at 4 bits": ("ddpg", "Pendulum-v1", _OFF_POLICY, "MountainCarContinuous-v0", _LATE),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_resumed_trainings_give_same_bytes(kind: str, tmp_path: Path, monkeypatch: Patch) -> None:
    # A game takes 60 ticks.
    monkeypatch.setitem(registry.find(BREAKOUT).kwargs, "max_num_frames_per_episode", 240)
    monkeypatch.setattr(airnav, "REACHED", 12.0)  # The task becomes harder during the training.
    monkeypatch.setattr(airnav, "_SUCCESSES", 2)
    algo, env_id, changes, preset_of, quantization = KINDS[kind]
    preset = presets.load(algo, preset_of, {**_BRIEF, **changes})
    run = Run(algo, env_id, 3, {}, quantization)
    uncut = cut_and_resumed(run, preset, tmp_path)
    # Every trainable variable has changed.
    initial = agents.build_network(run.algo, environments.env_spec(run.env_id), preset, run.seed)
    learned = networks.load_weights(uncut.run_dir(run.run_id) / "network.npz")
    for variable in initial.trainable_variables:
        assert not np.array_equal(learned[variable.name], variable.numpy()), variable.name
    curve = (uncut.run_dir(run.run_id) / "progress.csv").read_text()
    assert ("action_variance" in curve) == (run.algo in ("a2c", "ppo"))


def cut_and_resumed(run: Run, preset: Any, folder: Path) -> Workspace:
    """Train without and with an interruption after the last checkpoint; return the former."""
    uncut, cut = uncut_and_cut(folder, run, preset)
    started: list[int] = []
    train(cut, run, lambda done, *_: started.append(done), preset)
    assert preset.checkpoint_every < started[0] < 0.8 * preset.steps
    assert products(cut.run_dir(run.run_id)) == products(uncut.run_dir(run.run_id))
    return uncut


def test_a_training_is_of_one_code_of_its_environment(tmp_path: Path, monkeypatch: Patch) -> None:
    run = Run("ppo", "Steering-v0", 3, {**_BRIEF, **_PPO})
    workspaces = uncut_and_cut(tmp_path, run)
    monkeypatch.setattr(registry.find(run.env_id), "max_episode_steps", 2)
    for workspace in workspaces:
        message = refused(train, workspace, run)
        assert f"{workspace.run_dir(run.run_id)} was trained in an environment whose" in message
    monkeypatch.undo()
    for workspace in workspaces:
        train(workspace, run)


def test_a_resumed_distillation_gives_same_bytes(tmp_path: Path) -> None:
    first = Run("dqn", "CartPole-v1", 3, {**_BRIEF, **_DQN})
    train(Workspace(tmp_path / "uncut"), first)
    run = replace(first, overrides={**first.overrides, "distillation": 5.0}, quantization=_FEW_BITS)
    preset = presets.of(run)
    run = pipeline.with_origin(Workspace(tmp_path / "uncut"), first.run_id, run, preset)
    cut_and_resumed(run, preset, tmp_path)


_SAVED = {**_BRIEF, "evaluation_every": 128}
_SAVED_DQN = {**_SAVED, **_OFF_POLICY, "target_update": 6}
_SAVED_DDPG = {**_SAVED, **_OFF_POLICY, "learning_starts": 200}
_SAVED_DDPG |= {"noise": 0.0, "correlated_noise": False}
RUNS = {
    "ppo": Run("ppo", "CartPole-v1", 3, {**_SAVED, "minibatch_size": 32, "epochs": 2}),
    "dqn": Run("dqn", "CartPole-v1", 3, _SAVED_DQN),
    "ddpg": Run("ddpg", "MountainCarContinuous-v0", 3, _SAVED_DDPG),
    "dqn at 4 bits": Run("dqn", "CartPole-v1", 3, _SAVED_DQN, _FEW_BITS),
}


def saved(run: Run, folder: Path, file: Path) -> list[Any]:
    """Train, and save the checkpoint in the middle to a file; return its content."""
    content: list[Any] = []
    checkpoints = checkpoint_dir(Workspace(folder).run_dir(run.run_id))

    def save(step: int, *_: object) -> None:
        if not content and step > 256:
            words = ["checkpoint", "save", run.run_id, str(file), "--root", str(folder)]
            assert verbs.main(words) == 0
            content.extend(checkpoint.load_newest(checkpoints) or ())

    train(Workspace(folder), run, save)
    return content


@pytest.mark.parametrize("kind", RUNS)
def test_a_saved_training_goes_on_where_it_was(kind: str, tmp_path: Path, capsys: Capsys) -> None:
    run, file = RUNS[kind], tmp_path / "saved.npz"
    arrays, state = saved(run, tmp_path / "here", file)
    command = shlex.split(capsys.readouterr().out.partition("resume by ")[2].splitlines()[0])[1:]
    expected = replace(run, origin=Origin(run, sha256(file), state["step"], str(file)))
    assert expected.run_id.startswith(f"{run.run_id}-from")
    assert expected.plain == (expected if run.quantization is None else run.plain)
    elsewhere = Workspace(tmp_path / "elsewhere")
    training = begun(elsewhere.root / "begun", expected)  # What it starts with.
    training.resume()
    assert training.step == state["step"] >= 256
    assert training.collector.episodes == state["episodes"]
    copies, agent_arrays = set(state["copies"]), training.agent.arrays()
    assert bool(copies) == (run.algo != "ppo")
    for name in arrays.keys() - copies:
        if not name.startswith(("replay/", "best/")):
            np.testing.assert_array_equal(agent_arrays[name], arrays[name], err_msg=name)
    for target in training.agent.targets:
        np.testing.assert_equal(networks.weights(target), networks.weights(training.agent.network))
    if run.algo == "ddpg":  # It acts by its network, also while a new replay warms up.
        observations = training.collector.observations
        heads = networks.inference.Snapshot(training.agent.network)(observations)
        actions = training.agent.act(observations, 0.5)
        np.testing.assert_array_equal(actions, training._spec.greedy(heads))
    # As the command that was printed has it, to the end.
    assert verbs.main([*command, "--root", str(elsewhere.root)]) == 0
    record = TrainingRecord.load(elsewhere.run_dir(expected.run_id) / "training.json")
    assert record.run == expected.to_dict()
    assert record.best_step > state["step"]
    folders = tmp_path / "here/runs" / run.run_id, elsewhere.run_dir(expected.run_id)
    lines, continued = ((f / "progress.csv").read_text().splitlines() for f in folders)
    shared = len(state["rows"]) + 1
    assert continued[:shared] == lines[:shared]
    assert [line.split(",")[0] for line in continued] == [line.split(",")[0] for line in lines]


def test_what_a_training_is_held_to_is_saved_with_it(tmp_path: Path, capsys: Capsys) -> None:
    first, overrides = RUNS["dqn"], {**_SAVED_DQN, "distillation": 0.5}
    run = Run("dqn", "CartPole-v1", 3, overrides)
    preset = presets.load("dqn", "CartPole-v1", overrides)
    message = refusal(capsys, *shlex.split(run.command("train"))[1:], "--root", str(tmp_path))
    assert "name it (--from RUN). Received: distillation=0.5" in message
    assert not list(tmp_path.iterdir())
    train(Workspace(tmp_path), first)
    run = pipeline.with_origin(Workspace(tmp_path), first.run_id, run, preset)
    arrays, state = saved(run, tmp_path, tmp_path / "saved.npz")
    # Where that network is not.
    file, elsewhere = str(tmp_path / "saved.npz"), Workspace(tmp_path / "elsewhere")
    continued = pipeline.with_origin(elsewhere, file, replace(run, origin=None), preset)
    training = begun(tmp_path / "elsewhere/runs/begun", continued)
    training.resume()
    assert training.step == state["step"]
    weights = networks.load_weights(tmp_path / "runs" / first.run_id / "network.npz")
    for teacher in (networks.weights(training.agent.teacher), agents.section(arrays, "teacher")):
        np.testing.assert_equal(teacher, weights)
    assert not np.array_equal(weights["head/kernel:0"], arrays["best/head/kernel:0"])
    # One that would learn no more is not gone on with.
    content, state = checkpoint.load_to_go_on(Path(file))
    late = checkpoint.save(tmp_path / "late", 500, content, {**state, "step": 500})
    message = refused(checkpoint.going_on, late, replace(run, origin=None), preset)
    assert "12 steps left, of which learning_starts=64" in message


def test_what_cannot_go_on_is_one_line(tmp_path: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    run, file = RUNS["ppo"], tmp_path / "saved.npz"
    saved(run, tmp_path, file)
    capsys.readouterr()
    words = ["checkpoint", "save", run.run_id, "--root", str(tmp_path)]
    assert "no checkpoint" in refusal(capsys, *words, str(file), code=1)
    assert "ends in .npz" in refusal(capsys, *words, "saved.zip")
    task = [*shlex.split(run.command("train"))[1:], "--from", str(file), "--dry-run"]
    printed(capsys, *task)
    message = refusal(capsys, *task, "-p", "discount=0.5", code=1)
    assert "with other settings; give the same ones. Received: discount=0.5 for 0.98" in message
    message = refusal(capsys, *task, "--seed", "4")
    assert "continues with its own seed; give --seed 3. Received: seed=4" in message
    arrays, state = checkpoint.load_to_go_on(file)
    monkeypatch.setattr(checkpoint, "LIMIT", 1000)
    checkpoint.save(checkpoint_dir(tmp_path / "large"), 256, arrays, state)
    message = refused(checkpoint.save_to_go_on, tmp_path / "large", tmp_path / "large.npz")
    assert "larger than 1,000 bytes" in message
    assert not (tmp_path / "large.npz").exists()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255  # Within a compressed array.
    for damaged in (content, content[:-100]):
        file.write_bytes(damaged)
        assert "no whole file of `quarl checkpoint" in refusal(capsys, *task, code=1)
