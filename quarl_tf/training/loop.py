"""Train one run: act and learn, keep the best network, resume exactly.

At every checkpoint all environments start new episodes, with seeds that follow from the run's seed
and the step, in an uninterrupted run as well. So no state of an environment has to be saved, and a
killed and resumed run ends with the same network as an uninterrupted one, bit for bit, on the same
machine and, for images, with as many threads, which affect the sums of gradients.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf import agents, environments, networks, presets
from quarl_tf.environments import registry
from quarl_tf.foundation import provenance
from quarl_tf.foundation.display import Update
from quarl_tf.foundation.errors import QuarlError, one_line
from quarl_tf.foundation.files import sha256, write_csv, write_json
from quarl_tf.foundation.keras import keras, require_unforked, tf
from quarl_tf.foundation.seeding import environment_seed
from quarl_tf.networks.inference import Snapshot
from quarl_tf.networks.layers import Floats
from quarl_tf.quantization import quantizing, watching
from quarl_tf.spec import Origin, Run
from quarl_tf.store import state
from quarl_tf.store.records import Sidecar, TrainingRecord
from quarl_tf.store.workspace import Workspace, checkpoint_dir, delete_checkpoints
from quarl_tf.training import checkpoint, exported, rollout
from quarl_tf.training.collector import Collector

#: Observations kept for the calibration of int8 activations.
CALIBRATION_OBSERVATIONS = 2000


def train(workspace: Workspace, run: Run, update: Update, preset: presets.Preset) -> TrainingRecord:
    """Train a run, resume it, or return the record of a finished run.

    Writes `network.npz`, `calibration.npz`, `progress.csv`, `tensorboard/` and, last of all,
    `training.json`, which marks the run as finished; then deletes its checkpoints. The `preset`
    includes the run's overrides.

    Raises:
        UsageError: The environment or the preset does not fit.
        QuarlError: The folder is not writable, is in use, or has other settings, other code of the
            environment or flatbuffers of an earlier training.
    """
    require_unforked()
    folder = workspace.run_dir(run.run_id)
    state.require_trainable(workspace, run, preset)
    training = _Training(folder, run, preset)
    with closing(training.collector.envs), closing(training.trial_envs):
        if run.origin is not None and not run.origin.step:
            training.start_from(workspace, run.origin)
        with workspace.working_on(run.run_id):
            # Another process may have finished it in the meantime.
            return state.finished_training(workspace, run, preset) or training.complete(update)


class _Progress:
    """Keeps one row per point of the curves, and writes the files with each new row."""

    def __init__(self, folder: Path, rows: list[dict[str, Any]]) -> None:
        """Rewrite TensorBoard's curves: a killed training may have gone further."""
        self._folder, self.rows = folder, rows
        board = folder / "tensorboard"
        for stale in board.glob("*"):
            stale.unlink()
        self._writer = tf.summary.create_file_writer(str(board))
        for row in rows:
            self._to_board(row)

    def log(self, row: dict[str, Any]) -> None:
        """Add a row: its `step` and values by name, None if missing."""
        self.rows.append(row)
        self._to_board(row)
        write_csv(self._folder / "progress.csv", self.rows)

    def _to_board(self, row: Mapping[str, Any]) -> None:
        try:
            with self._writer.as_default(step=row["step"]):
                for name, value in row.items():
                    if name != "step" and value is not None:
                        tf.summary.scalar(name, value)
            self._writer.flush()
        except tf.errors.OpError as error:
            raise QuarlError(
                f"The TensorBoard curves cannot be written ({error.message}); free some space and "
                f"run the same command again. Received: path={str(self._folder)!r}"
            ) from error


@dataclass
class _BestNetwork:
    """The network with the best greedy return on selection seeds, the latest of equal ones."""

    weights: networks.Weights
    score: float = float("-inf")
    step: int = 0


class _Training:
    """The state of one training between bursts."""

    def __init__(self, folder: Path, run: Run, preset: presets.Preset) -> None:
        #: Of every session that trained the run. Read now: the code may be changed meanwhile.
        self._provenance: dict[str, list[str]] = {
            "commits": [provenance.source_commit() or "unknown"],
            "sources": [provenance.sources()],
            "processors": [provenance.processor()],
        }
        self._environment_sha256 = registry.source_sha256(run.env_id)
        self._folder, self._run, self._preset = folder, run, preset
        self._checkpoints = checkpoint_dir(folder)
        self._spec = environments.env_spec(run.env_id)
        environments.require_seeded(run.env_id)
        #: Earlier by the seconds of former sessions, up to the checkpoint that this one resumes.
        self._start_time = time.monotonic()
        # A plain training does not load the second Keras that this needs.
        self._qat: Any = run.quantization and import_module("quarl_tf.quantization.qat")
        prepare = watching(run.quantization)
        self.agent = agents.build(run.algo, self._spec, preset, run.seed, prepare)
        self._quantized = False
        self._take_snapshot()
        self.collector = Collector(self.agent, run.env_id, preset, run.seed)
        self.trial_envs = environments.make_vector(
            run.env_id, preset.evaluation_episodes, once=True
        )
        self.best = _BestNetwork(networks.weights(self.agent.network))
        #: Of the action distributions in the latest greedy episodes.
        self._variances: list[Floats] = []

    @property
    def step(self) -> int:
        """Finished steps of the environments."""
        return self.collector.step

    def _take_snapshot(self) -> None:
        """Prepare greedy play by the network as it is exported, in float32.

        On grids of few bits, sums in bfloat16 often round to another code than in float32.
        """
        run, preset, network = self._run, self._preset, self.agent.network
        if preset.precision != "float32":
            preset = replace(preset, precision="float32")
            prepare = (quantizing if self._quantized else watching)(run.quantization)
            network = prepare(agents.build_network(run.algo, self._spec, preset, run.seed))
        self._exported_network = network
        self._snapshot = Snapshot(networks.acting(network))

    def complete(self, update: Update) -> TrainingRecord:
        folder, preset = self._folder, self._preset
        self.resume()
        while self.step < preset.steps and not self._solved:
            self.burst()
            update(self.step, preset.steps, self.note())
        best = self.best
        self.agent.forget()  # The calibration needs memory, too.
        networks.set_weights(self.agent.network, best.weights)
        observations = self.greedy("calibration", CALIBRATION_OBSERVATIONS).observations
        networks.save_weights(folder / "network.npz", best.weights)
        networks.save_weights(folder / "calibration.npz", {"observations": observations})
        record = TrainingRecord(
            run=self._run.to_dict(),
            run_id=self._run.run_id,
            preset=asdict(preset),
            best_step=best.step,
            selection_return=best.score,
            network_sha256=sha256(folder / "network.npz"),
            calibration_sha256=sha256(folder / "calibration.npz"),
            seconds=round(self._elapsed(), 1),
            versions=provenance.package_versions(),
            **self._provenance,
            environment_sha256=self._environment_sha256,
        )
        record.save(folder / "training.json")
        delete_checkpoints(folder)
        return record

    @property
    def _solved(self) -> bool:
        until, in_its_format = self._preset.until, self._run.quantization is None or self._quantized
        return in_its_format and until is not None and self.best.score >= until

    def start_from(self, workspace: Workspace, origin: Origin) -> None:
        """Start from the network of another run; a QuarlError if it has changed."""
        run_id = origin.run.run_id
        if state.starting_from(workspace, run_id, self._run, self._preset) != self._run:
            raise QuarlError(
                "The run to start from was trained again, or its folder deleted, since this "
                "training began; delete this run's folder to begin anew. "
                f"Received: run={self._run.run_id!r} from {run_id!r}"
            )
        path, record = state.origin_network(workspace, run_id, origin)
        if isinstance(record, Sidecar):
            preset = presets.restore(self._run.algo, record.preset)
            weights = exported.variables(path, preset, record.action_std)
            count = record.preset["steps"]
        else:
            weights, count = networks.load_weights(path), record.best_step
        self.agent.start_from(weights, count)
        self.best = _BestNetwork(networks.weights(self.agent.network))

    def resume(self) -> None:
        """Resume from the newest good checkpoint or the saved one; start new episodes."""
        content, origin = checkpoint.load_newest(self._checkpoints), self._run.origin
        if content is None and origin is not None and origin.step:
            content = checkpoint.load_to_go_on(Path(origin.file))
        rows: list[dict[str, Any]] = []
        if content is not None:
            state.require_same_settings(self._folder, content[1], self._run, self._preset)
            if "lacking" not in content[1]:
                state.require_same_run(self._folder, Run.from_dict(content[1]["run"]).run_id)
                recorded = content[1].get("environment_sha256")  # Earlier versions lack it.
                state.require_same_environment(self._folder, self._run, recorded)
            try:
                rows = self._restore(*content)
            except (KeyError, ValueError) as error:
                raise QuarlError(
                    "Another version of this program wrote the checkpoints; continue with it, "
                    "or delete the run folder and train again. Received: "
                    f"{str(self._checkpoints)!r} ({type(error).__name__}: {one_line(error)})"
                ) from error
        # Written first, so that an unwritable folder is refused before anything is computed.
        description = {**self._run.to_dict(), "preset": asdict(self._preset)}
        write_json(self._folder / "run.json", description)
        self._progress = _Progress(self._folder, rows)
        self.collector.restart()

    def _restore(self, arrays: agents.Arrays, saved: Any) -> Any:
        """Restore a checkpoint; return its rows of progress."""
        if saved["quantized"]:
            self._quantize()
        if "lacking" in saved:
            arrays = {**self.agent.arrays(), **arrays}
        self.agent.restore(arrays)
        for target in self.agent.targets if "lacking" in saved else ():
            networks.set_weights(target, networks.weights(self.agent.network))
        self.collector.restore(saved)
        self._start_time -= saved["seconds"]
        for name, values in self._provenance.items():
            self._provenance[name] = list(dict.fromkeys([*saved[name], *values]))
        weights = agents.section(arrays, "best") or networks.weights(self.agent.network)
        self.best = _BestNetwork(weights, *saved["best"])
        return saved["rows"]

    def burst(self) -> None:
        """Act for `train_frequency` steps, learn once, then evaluate, log and save if due."""
        quantization = self._run.quantization
        if quantization is not None and self.step >= quantization.delay and not self._quantized:
            self._start_quantization(quantization.delay)
        first_step = self.step
        for _ in range(self._preset.train_frequency // self._preset.num_envs):
            self.collector.tick()
        metrics = self.agent.learn(self.collector.observations)
        loss = metrics.get("loss", 0.0)
        if not math.isfinite(loss):
            raise self._diverged(f"loss={loss}")
        if quantization and quantization.schedule.ranges == "following" and self._quantized:
            # Updates of target networks copy the grids, with the weights or (DDPG) every time.
            self._freeze_ranges()
        if self._due(first_step, self._preset.evaluation_every):
            self._variances.clear()
            score = float(np.mean(self.greedy("selection").returns))
            if score >= self.best.score:
                self.best = _BestNetwork(networks.weights(self.agent.network), score, self.step)
            metrics["greedy_return"] = score
            if self._variances:
                metrics["action_variance"] = float(np.concatenate(self._variances).mean())
        if "greedy_return" in metrics or self._due(first_step, max(1, self._preset.steps // 100)):
            self._log(metrics)
        if self._due(first_step, self._preset.checkpoint_every) and self.step < self._preset.steps:
            self._checkpoint()

    def _start_quantization(self, delay: int) -> None:
        """Quantise from now on; the best network so far does not count, it is not quantised."""
        # A saved training that goes on without its replay may not have learned yet.
        self._qat.require_watched(self.agent.network, delay)
        self._quantize()
        self._freeze_ranges(self.agent.targets)
        self.best = _BestNetwork(networks.weights(self.agent.network))

    def _quantize(self) -> None:
        """Continue with the quantised network, whose grids are set later."""
        self.agent.change_network(self._qat.quantized)
        self._quantized = True
        self._take_snapshot()

    def _freeze_ranges(self, targets: Sequence[keras.Model] = ()) -> None:
        self._qat.freeze(self.agent.network, targets)
        self.agent.refresh()

    def greedy(self, purpose: str, keep: int = 0) -> rollout.Rollout:
        """Play a greedy episode in every trial environment, with seeds by purpose and step."""
        seed = environment_seed(self._run.seed, purpose, self.step)
        if self._exported_network is not self.agent.network:
            networks.set_weights(self._exported_network, networks.weights(self.agent.network))
        self._snapshot.refresh()

        def act(observations: npt.NDArray[Any], playing: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
            heads = self._snapshot(observations)
            if not np.isfinite(heads).all():
                raise self._diverged("a head that is not finite")
            if self.agent.action_variance is not None:
                self._variances.append(self.agent.action_variance(heads[playing]))
            return self._spec.greedy(heads)

        return rollout.rollout(self.trial_envs, act, seed, keep)

    def note(self) -> str:
        mean = self.collector.mean_return()
        score = f", best greedy {self.best.score:.1f}" if math.isfinite(self.best.score) else ""
        return "no episode has ended" if mean is None else f"return {mean:.1f}{score}"

    def _diverged(self, received: str) -> QuarlError:
        return QuarlError(
            "Training diverged; train again with a lower learning rate (-p learning_rate=…). "
            f"Received: {received} at step {self.step}"
        )

    def _due(self, first_step: int, period: int) -> bool:
        """Tell whether a multiple of `period`, or the end, lies in the last burst."""
        return self.step // period > first_step // period or self.step >= self._preset.steps

    def _checkpoint(self) -> None:
        self.agent.end_of_stream(self.collector.observations)
        values = {
            "run": self._run.to_dict(),
            "preset": asdict(self._preset),
            "rows": self._progress.rows,
            **self.collector.state(),
            "quantized": self._quantized,
            "seconds": self._elapsed(),
            **self._provenance,
            "environment_sha256": self._environment_sha256,
            "best": [self.best.score, self.best.step],
            "copies": self.agent.copies(),
        }
        best = {f"best/{name}": value for name, value in self.best.weights.items()}
        checkpoint.save(self._checkpoints, self.step, {**self.agent.arrays(), **best}, values)
        self.collector.restart()

    def _elapsed(self) -> float:
        return time.monotonic() - self._start_time

    def _log(self, metrics: dict[str, float]) -> None:
        row = {
            "step": self.step,
            "seconds": round(self._elapsed(), 1),
            "episodes": self.collector.episodes,
            "episode_return": self.collector.mean_return(),
            "greedy_return": metrics.get("greedy_return"),
            "loss": metrics.get("loss"),
        }
        if self._preset.STOCHASTIC:
            row["action_variance"] = metrics.get("action_variance")
        self._progress.log(row)
