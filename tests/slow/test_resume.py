"""A training that was interrupted, saved or begun with another's network goes on exactly there."""

import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import Capsys, Patch, products, refusal, refused, silent

from quarl_tf import agents, environments, networks, presets
from quarl_tf.cli import verbs
from quarl_tf.environments import airnav, registry
from quarl_tf.foundation import provenance
from quarl_tf.foundation.errors import UsageError
from quarl_tf.foundation.files import sha256
from quarl_tf.networks.layers import unwrap
from quarl_tf.pipeline import evaluate, export, with_origin
from quarl_tf.spec import Origin, Quantization, Run
from quarl_tf.store.records import Sidecar, TrainingRecord
from quarl_tf.store.workspace import Workspace, checkpoint_dir
from quarl_tf.training import checkpoint, loop
from quarl_tf.training.loop import train

BREAKOUT, CARS = "BreakoutNoFrameskip-v4", "MountainCarContinuous-v0"
_BRIEF: dict[str, Any] = {"steps": 512, "num_envs": 2, "network": [8], "train_frequency": 64}
_BRIEF |= {"evaluation_every": 128, "evaluation_episodes": 2, "checkpoint_every": 256}
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


def aware(delay: int, **options: Any) -> Quantization:
    return Quantization.from_mapping({"bits": 4, "delay": delay, **options})


_FEW_BITS = presets.quantization("dqn", {"bits": 4, "delay": 100})

#: Algorithm, environment, changes of the preset of another environment, and quantisation; the
#: checkpoint that is resumed lies behind a delay of 100, before one of 350.
KINDS: dict[str, tuple[str, str, dict[str, Any], str, Quantization | None]] = {
    "dqn": ("dqn", "CartPole-v1", {**_DQN, "dueling": True}, "CartPole-v1", None),
    "dqn at 4 bits": ("dqn", "CartPole-v1", _DQN, "CartPole-v1", aware(350)),
    "dqn of images at 4 bits": ("dqn", BREAKOUT, {**_DQN, **_DQN_IMAGES}, BREAKOUT, _FEW_BITS),
    "dqn of a task that rises": ("dqn", "AirNav-v0", _DQN, "AirNav-v0", None),
    "dqn in float16": ("dqn", "CartPole-v1", {**_DQN, "precision": "float16"}, "CartPole-v1", None),
    "ppo of images": ("ppo", BREAKOUT, {**_PPO, **_PPO_IMAGES}, BREAKOUT, None),
    "a2c at 4 bits": ("a2c", "CartPole-v1", _A2C, "CartPole-v1", aware(350)),
    "continuous ppo": ("ppo", "Pendulum-v1", _PPO, "CartPole-v1", None),
    "learned steps": ("ppo", "CartPole-v1", _PPO, "CartPole-v1", aware(100, learned_steps=True)),
    "ddpg": ("ddpg", "Pendulum-v1", _DDPG, CARS, None),
    "ddpg at 4 bits": ("ddpg", "Pendulum-v1", _OFF_POLICY, CARS, aware(100)),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_resumed_trainings_give_same_bytes(kind: str, tmp_path: Path, monkeypatch: Patch) -> None:
    # A game takes 60 ticks.
    monkeypatch.setitem(registry.find(BREAKOUT).kwargs, "max_num_frames_per_episode", 240)
    # The task becomes harder during the training.
    monkeypatch.setattr(airnav, "REACHED", 12.0)
    monkeypatch.setattr(airnav, "_SUCCESSES", 2)
    algo, env_id, changes, preset_of, quantization = KINDS[kind]
    preset = presets.load(algo, preset_of, {**_BRIEF, **changes})
    run = Run(algo, env_id, 3, {}, quantization)
    folder = cut_and_resumed(run, preset, tmp_path)
    # Every trainable variable has changed.
    initial = agents.build_network(run.algo, environments.env_spec(run.env_id), preset, run.seed)
    learned = networks.load_weights(folder / "network.npz")
    for variable in initial.trainable_variables:
        assert not np.array_equal(learned[variable.name], variable.numpy()), variable.name
    assert ("action_variance" in (folder / "progress.csv").read_text()) == (algo in ("a2c", "ppo"))


def cut_and_resumed(run: Run, preset: Any, folder: Path) -> Path:
    """Train without and with an interruption after the last checkpoint; return the former run."""
    uncut, cut = Workspace(folder / "uncut"), Workspace(folder / "cut")

    def keep(step: int, steps: int, _: str) -> None:
        if step >= steps:
            shutil.copytree(uncut.root, cut.root)

    train(uncut, run, keep, preset)
    started: list[int] = []
    train(cut, run, lambda done, *_: started.append(done), preset)
    assert preset.checkpoint_every < started[0] < 0.8 * preset.steps
    assert products(cut.run_dir(run.run_id)) == products(uncut.run_dir(run.run_id))
    return uncut.run_dir(run.run_id)


_USUAL = presets.load("a2c", "CartPole-v1", {**_BRIEF, **_A2C})


def late(bits: int, **fields: Any) -> Run:
    """Return a run whose delay lies behind the first checkpoint."""
    quantization = Quantization.from_mapping({"bits": bits, "delay": 300})
    return replace(Run("a2c", "CartPole-v1", 3, {}, quantization), **fields)


def test_trainings_of_other_bits_share_what_lies_before_the_delay(tmp_path: Path) -> None:
    alone, shared = Workspace(tmp_path / "alone"), Workspace(tmp_path / "shared")

    def begins_anew(run: Run, preset: presets.Preset = _USUAL) -> bool:
        steps: list[int] = []
        train(shared, run, lambda step, *_: steps.append(step), preset)
        return steps[0] <= preset.checkpoint_every

    assert begins_anew(late(8))
    (beginning,) = (shared.root / "runs/.beginnings").iterdir()
    assert not begins_anew(late(2))
    train(alone, late(2), silent, _USUAL)
    actual, expected = (workspace.run_dir(late(2).run_id) for workspace in (shared, alone))
    assert products(actual) == products(expected)
    # What else the beginning depends on; the user's own code may have changed.
    assert begins_anew(late(4), replace(_USUAL, learning_rate=1e-5))
    assert begins_anew(late(5, modules=("samples",)))
    beginning.write_bytes(beginning.read_bytes()[:-9])
    assert begins_anew(late(6))


def test_a_beginning_is_of_one_version_and_no_training_needs_it(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    workspace, beginnings = Workspace(tmp_path), tmp_path / "runs/.beginnings"

    def stop(step: int, *_: Any) -> None:
        if step >= _USUAL.checkpoint_every:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(workspace, late(8), stop, _USUAL)
    monkeypatch.setattr(provenance, "sources", lambda: "changed")
    train(workspace, late(8), silent, _USUAL)
    assert not beginnings.exists()
    beginnings.write_text("a file where the folder should be")
    assert train(workspace, late(4), silent, _USUAL).best_step > 0


RUNS = {
    "ppo": Run("ppo", "CartPole-v1", 3, {**_BRIEF, **_PPO}),
    "dqn": Run("dqn", "CartPole-v1", 3, {**_BRIEF, **_OFF_POLICY, "target_update": 6}),
    "ddpg": Run("ddpg", CARS, 3, {**_BRIEF, **_OFF_POLICY, "learning_starts": 200, "noise": 0.0}),
}
RUNS["dqn at 4 bits"] = replace(RUNS["dqn"], quantization=_FEW_BITS)


def saved(run: Run, folder: Path, file: Path) -> tuple[dict[str, np.ndarray], Any]:
    """Train, and save the checkpoint in the middle to a file; return its content."""
    content: list[Any] = []
    checkpoints = checkpoint_dir(Workspace(folder).run_dir(run.run_id))

    def save(step: int, *_: object) -> None:
        if not content and step > 256:
            words = ["checkpoint", "save", run.run_id, str(file), "--root", str(folder)]
            assert verbs.main(words) == 0
            content.extend(checkpoint.load_newest(checkpoints) or ())

    train(Workspace(folder), run, save)
    arrays, state = content
    return arrays, state


def begun(folder: Path, run: Run) -> loop._Training:
    return loop._Training(folder, run, presets.load(run.algo, run.env_id, run.overrides))


@pytest.mark.parametrize("kind", RUNS)
def test_a_saved_training_goes_on_where_it_was(kind: str, tmp_path: Path, capsys: Capsys) -> None:
    run, file = RUNS[kind], tmp_path / "saved.npz"
    arrays, state = saved(run, tmp_path / "here", file)
    command = shlex.split(capsys.readouterr().out.partition("resume by ")[2].splitlines()[0])[1:]
    expected = replace(run, origin=Origin(run, sha256(file), state["step"], str(file)))
    assert expected.run_id.startswith(f"{run.run_id}-from")
    assert expected.plain == (expected if run.quantization is None else run.plain)
    # What it starts with.
    elsewhere = Workspace(tmp_path / "elsewhere")
    training = begun(elsewhere.run_dir("begun"), expected)
    training.resume()
    agent, collector = training.agent, training.collector
    assert training.step == state["step"] >= 256
    assert collector.episodes == state["episodes"]
    copies, agent_arrays = set(state["copies"]), agent.arrays()
    assert bool(copies) == (run.algo != "ppo")
    for name in arrays.keys() - copies:
        if not name.startswith(("replay/", "best/")):
            np.testing.assert_array_equal(agent_arrays[name], arrays[name], err_msg=name)
    for target in agent.targets:
        for name, value in networks.weights(target).items():
            np.testing.assert_array_equal(value, networks.weights(agent.network)[name])
    # It acts by its network, also while a new replay warms up.
    if run.algo == "ddpg":
        heads = networks.inference.Snapshot(agent.network)(collector.observations)
        actions = agent.act(collector.observations, 0.5)
        np.testing.assert_array_equal(actions, training._spec.greedy(heads))
    # As the command that was printed has it, to the end.
    assert verbs.main([*command, "--root", str(elsewhere.root)]) == 0
    record = TrainingRecord.load(elsewhere.run_dir(expected.run_id) / "training.json")
    assert record.run == expected.to_dict()
    assert record.best_step > state["step"]
    lines, continued = (
        (folder / "progress.csv").read_text().splitlines()
        for folder in (tmp_path / "here/runs" / run.run_id, elsewhere.run_dir(expected.run_id))
    )
    shared = len(state["rows"]) + 1
    assert continued[:shared] == lines[:shared]
    assert [line.split(",")[0] for line in continued] == [line.split(",")[0] for line in lines]


def test_what_a_training_is_held_to_is_saved_with_it(tmp_path: Path, capsys: Capsys) -> None:
    first, here, file = RUNS["dqn"], Workspace(tmp_path), tmp_path / "saved.npz"
    run = replace(first, overrides={**first.overrides, "distillation": 0.5})
    preset = presets.load("dqn", "CartPole-v1", run.overrides)
    message = refusal(capsys, *shlex.split(run.command("train"))[1:], "--root", str(tmp_path))
    assert "name it (--from RUN). Received: distillation=0.5" in message
    assert "--from RUN" in refused(train, here, run, silent, error=UsageError)
    assert not list(tmp_path.iterdir())
    train(here, first, silent)
    arrays, state = saved(with_origin(here, first.run_id, run, preset), tmp_path, file)
    # Elsewhere, where that network is not.
    elsewhere = Workspace(tmp_path / "elsewhere")
    training = begun(elsewhere.run_dir("begun"), with_origin(elsewhere, str(file), run, preset))
    training.resume()
    assert training.step == state["step"]
    weights = networks.load_weights(here.run_dir(first.run_id) / "network.npz")
    teacher = networks.weights(training.agent.teacher)
    for name, value in weights.items():
        np.testing.assert_array_equal(teacher[name], value)
        np.testing.assert_array_equal(arrays[f"teacher/{name}"], value)
    assert not np.array_equal(weights["head/kernel:0"], arrays["best/head/kernel:0"])


def test_what_cannot_be_saved_or_gone_on_from_is_one_line(
    tmp_path: Path, capsys: Capsys, monkeypatch: Patch
) -> None:
    run, file = RUNS["ppo"], tmp_path / "saved.npz"
    saved(run, tmp_path, file)
    capsys.readouterr()
    words = ["checkpoint", "save", run.run_id, "--root", str(tmp_path)]
    assert "has no checkpoint" in refusal(capsys, *words, str(file), code=1)
    assert "ends in .npz" in refusal(capsys, *words, "saved.zip")
    task = [*shlex.split(run.command("train"))[1:], "--from", str(file), "--dry-run"]
    assert verbs.main(task) == 0
    capsys.readouterr()
    message = refusal(capsys, *task, "-p", "discount=0.5", code=1)
    assert "with other settings; give the same ones. Received: discount=0.5 for 0.98" in message
    large = checkpoint.save(tmp_path / "large", 256, *checkpoint.load_to_go_on(file))
    monkeypatch.setattr(checkpoint, "LIMIT", 1000)
    message = refused(checkpoint.save_to_go_on, large.parent, tmp_path / "large.npz")
    assert "larger than 1,000 bytes" in message
    assert not (tmp_path / "large.npz").exists()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255  # Within a compressed array.
    for damaged in (content, content[:-100]):
        file.write_bytes(damaged)
        assert "no whole file of `quarl checkpoint" in refusal(capsys, *task, code=1)


@pytest.fixture
def uncut(trained: Workspace, tmp_path: Path) -> Workspace:
    """Return a workspace with the tiny run, to start from."""
    return Workspace(shutil.copytree(trained.root, tmp_path / "uncut"))


def require_start(workspace: Workspace, run: Run, weights: networks.Weights) -> None:
    """Check that a run starts from these weights."""
    state = begun(workspace.run_dir("unused"), run)
    assert run.origin is not None
    state.start_from(workspace, run.origin)
    start = {name: state.best.weights[name] for name in weights}
    np.testing.assert_equal(start, weights)


def test_a_training_from_another_starts_there_and_resumes_to_the_same_bytes(
    uncut: Workspace, tiny_run: Run, tmp_path: Path
) -> None:
    weights = networks.load_weights(uncut.run_dir(tiny_run.run_id) / "network.npz")
    kernels = []
    for coefficient in (5.0, 0.0):
        overrides = {**tiny_run.overrides, "distillation": coefficient}
        preset = presets.load("dqn", tiny_run.env_id, overrides)
        run = replace(tiny_run, overrides=overrides, quantization=aware(450))
        run = with_origin(uncut, tiny_run.run_id, run, preset)
        require_start(uncut, run, weights)
        learned = networks.load_weights(cut_and_resumed(run, preset, tmp_path) / "network.npz")
        kernels.append(learned["head/kernel:0"])
        shutil.rmtree(tmp_path / "cut")
    # Distillation depends on the network that it started from.
    assert not np.array_equal(*kernels)
    # Its reference is that network, too.
    export(tiny_run.run_id, ["fp32"], root=uncut.root)
    (artifact,) = export(run.run_id, ["qat_w4a4"], root=uncut.root)
    fp32 = Sidecar.load(uncut.artifact(tiny_run.run_id, "fp32").with_suffix(".json"))
    assert evaluate(artifact, 2).reference_sha256 == fp32.sha256
    other = replace(run, origin=replace(run.origin, network_sha256="another"))
    assert "trained again since" in refused(train, uncut, other, silent)


def test_a_flatbuffer_stands_in_for_a_run_to_start_from(uncut: Workspace, tiny_run: Run) -> None:
    weights = networks.load_weights(uncut.run_dir(tiny_run.run_id) / "network.npz")
    (fp32,) = export(tiny_run.run_id, ["fp32"], root=uncut.root)
    shutil.rmtree(uncut.root / "runs")
    preset = presets.load("dqn", tiny_run.env_id, tiny_run.overrides)
    arguments = uncut, tiny_run.run_id, tiny_run, preset
    run = with_origin(*arguments)
    require_start(uncut, run, weights)
    assert run.origin.network_sha256 == Sidecar.load(fp32.with_suffix(".json")).sha256
    content = bytearray(fp32.read_bytes())
    content[-100] ^= 1
    fp32.write_bytes(content)
    assert f"Received: path='{fp32}" in refused(with_origin, *arguments)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--from", "dqn-CartPole-v1-s9"], 1, "Received: run='dqn-CartPole-v1-s9'"),
        (["-p", "network=[3]"], 2, "Received: network=[3] for "),
        (["-p", "dueling=true"], 2, "Received: dueling=True for False"),
    ],
)
def test_a_start_that_does_not_fit_is_one_line(
    options: list[str], code: int, message: str, trained: Workspace, tiny_run: Run, capsys: Capsys
) -> None:
    words = ["train", "--algo", "dqn", "--env", "CartPole-v1", "-p", "network=[32, 32]"]
    where = ["--root", str(trained.root), "--from", tiny_run.run_id, "--dry-run"]
    assert message in refusal(capsys, *words, *where, *options, code=code)


def test_the_value_network_sees_what_the_network_to_start_from_saw(tmp_path: Path) -> None:
    run = Run("ppo", "CartPole-v1", 0, {"network": [8]})
    first, second = begun(tmp_path, run).agent, begun(tmp_path, run).agent
    first._statistics.update(np.random.default_rng(0).normal(3, 2, (50, 4)).astype(np.float32))
    first._statistics.apply_to(first._model.normalised_networks)
    second.start_from(networks.weights(first.network), 50)
    models = second._model.normalised_networks
    policy, value = (unwrap(model.get_layer("normalizer")) for model in models)
    assert value.mean.numpy() == pytest.approx(first._statistics.mean, rel=1e-5)
    np.testing.assert_array_equal(value.mean, policy.mean)
    # Rounded once more, from the statistics that are taken from the policy.
    np.testing.assert_allclose(value.inverse_deviation, policy.inverse_deviation, rtol=1e-5)
