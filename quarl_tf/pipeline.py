"""The stages as functions: files in, files out; a finished stage returns at once.

TensorFlow is loaded only where something is to be trained or exported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quarl_tf.foundation import kinds
from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.files import require_writable
from quarl_tf.spec import BASELINE, DEFAULT_MARGIN_PERCENT, GREEDY, REFERENCE, Chance, Run, Scheme
from quarl_tf.spec.run import DEFAULT_EPISODES, require_possible
from quarl_tf.store.records import Evaluation, Sidecar, TrainingRecord
from quarl_tf.store.workspace import (
    Workspace,
    delete_checkpoints,
    evaluation_path,
    reference_path,
    sidecar_path,
)

if TYPE_CHECKING:
    from quarl_tf.presets import Preset

_CHANCE = kinds.Kind("a Chance, as Chance('sticky', 0.25)", lambda v: isinstance(v, Chance))


def _silent(*_: Any) -> None: ...


def _listed(what: str, names: Iterable[str]) -> list[str]:
    """Return names as a list; a UsageError for none, or for a single text."""
    several = isinstance(names, Iterable) and not isinstance(names, str)
    values: Any = list(names) if several else names
    kinds.listed("names", (str,)).require(what, values)
    return [*values]


def with_origin(workspace: Workspace, origin: Path | str, run: Run, preset: Preset) -> Run:
    """Return a run that starts from a finished training, or resumes a saved one (`.npz`)."""
    from quarl_tf.store.state import starting_from
    from quarl_tf.training import checkpoint

    if str(origin).endswith(".npz"):
        return checkpoint.going_on(Path(origin), run, preset)
    return starting_from(workspace, str(origin), run, preset)


def train(
    run: Run, *, root: Path | str = ".", origin: Path | str | None = None, update: Any = _silent
) -> TrainingRecord:
    """Train a run into `runs/<run_id>/` below the root, or resume it.

    `origin` names a finished training, with whose network it starts, or a file of `quarl checkpoint
    save`, which it resumes: another run, whose `run_id` the record has. `update` is called with the
    steps done, all steps, and a note.

    Raises:
        QuarlError: The run or its folder cannot be used; see `training.loop.train`.
    """
    from quarl_tf import presets
    from quarl_tf.environments import import_environments
    from quarl_tf.store.state import finished_training

    if not isinstance(run, Run):
        raise UsageError(
            f"A Run is trained, such as Run('ppo', 'CartPole-v1', 0). Received: {run!r}"
        )
    import_environments(run.modules)
    workspace, preset = Workspace(Path(root)), presets.of(run)
    if origin is not None:
        run = with_origin(workspace, origin, run, preset)
    record = finished_training(workspace, run, preset)
    if record is not None:
        # A process that was killed at the end of the training has left them.
        delete_checkpoints(workspace.run_dir(run.run_id))
        return record
    from quarl_tf.training import loop

    return loop.train(workspace, run, update, preset)


def export(
    run_id: str,
    schemes: Sequence[str] | None = None,
    *,
    root: Path | str = ".",
    update: Any = _silent,
) -> list[Path]:
    """Export a trained or adopted run into its folder of `tflite_models/`, one flatbuffer a scheme.

    `schemes` are by default the usual ones. Without the training, as in a clone, they are made of a
    float flatbuffer, and by default those that can be. Returns the flatbuffers in their order.
    `update` is called with the schemes done, all schemes, and the next.

    Raises:
        UsageError: `schemes` is empty or a single text.
        QuarlError: The run is not trained, or a scheme is not for such a training. Or the outputs
            of a flatbuffer differ from those of its network; the other schemes are written.
    """
    from quarl_tf.store.state import (
        copy_curve,
        is_begun,
        known_run,
        not_exported,
        usual_schemes,
    )

    workspace = Workspace(Path(root))
    kinds.NAME.require("run_id", run_id)
    run = known_run(workspace, run_id)
    # Where none can be used, the first says so.
    usual = usual_schemes(workspace, run) or run.default_schemes[:1]
    names = usual if schemes is None else _listed("schemes", schemes)
    require_possible(run, map(Scheme.parse, names))
    missing = not_exported(workspace, run, names)
    copy_curve(workspace, run_id)
    if missing:
        write: Callable[[Scheme], None]
        if is_begun(workspace, run_id):
            from quarl_tf.export.convert import TrainedNetwork

            write = TrainedNetwork(workspace, run).export
        else:
            from quarl_tf.export import ptq

            write = partial(ptq.export, workspace, run)
        failures = []
        for done, name in enumerate(missing):
            update(done, len(missing), name)
            try:
                write(Scheme.parse(name))
            except QuarlError as error:  # The other schemes are written.
                failures.append(error)
        update(len(missing), len(missing), "")
        if failures:
            raise type(failures[0])("; ".join(dict.fromkeys(map(str, failures)))) from failures[0]
    return [workspace.artifact(run_id, name) for name in names]


def evaluate(
    artifact: Path | str,
    episodes: int = DEFAULT_EPISODES,
    *,
    chance: Chance = GREEDY,
    update: Any = _silent,
    jobs: int = 1,
) -> Evaluation:
    """Replay a flatbuffer in its environment, also its fp32 reference and the random policy.

    Episodes are whole, and their seeds follow from the run's; `chance` is what is random in them.
    Evaluations are saved beside the flatbuffer, also while they are played. Of a saved one of the
    same bytes, rules, environment and reference the first episodes are returned if it has as many.
    If not, it is continued where it has ten, the processor and the packages are the same, and these
    tell the environment's code; else all are played. After some seconds `jobs` processes play, but
    for greedy games and environments of one's own; a script then has to begin with
    `if __name__ == "__main__"`. `update` is called with the episodes done and all.

    Raises:
        UsageError: No episode is asked for, or `chance` is not for such a policy.
        QuarlError: A file is damaged, or the environment is not the one it was trained in.
    """
    from quarl_tf.environments import registry
    from quarl_tf.evaluation import play
    from quarl_tf.foundation.seeding import evaluation_seeds
    from quarl_tf.runtime.policy import Policy
    from quarl_tf.store.state import baseline, evaluation_flaw

    artifact = Path(artifact)
    kinds.COUNT.require("episodes", episodes)
    kinds.COUNT.require("jobs", jobs)
    _CHANCE.require("chance", chance)
    sidecar = Policy.load(artifact).sidecar
    run = Run.from_dict(sidecar.run)
    seeds = evaluation_seeds(run.seed, episodes)
    reference, path = reference_path(artifact, sidecar), evaluation_path(artifact, chance)
    if reference.exists() and reference.resolve() != artifact.resolve():
        _require_reference(reference, run.plain.run_id)
        evaluate(reference, episodes, chance=chance, update=update, jobs=jobs)

    def saved() -> Evaluation | None:
        if not registry.is_identified(run.env_id):
            return None  # It may have changed.
        with suppress(QuarlError):  # A damaged one is replaced.
            found = Evaluation.load(path)
            known_seeds = seeds[: len(found.seeds)]
            if evaluation_flaw(found, sidecar, reference, known_seeds, chance) is None:
                return found
        return None

    evaluation = saved()
    if evaluation is None or len(evaluation.seeds) < episodes:
        evaluation = _played(artifact, seeds, chance, reference, saved, update=update, jobs=jobs)
    # Last, so that errors of the policy come at once. It is saved beside fp32.
    if reference.parent == artifact.parent and baseline(reference, run, seeds) is None:
        random_evaluation = play.evaluate_random(sidecar.env_id, run.plain.run_id, seeds)
        random_evaluation.save(evaluation_path(artifact.with_name(f"{BASELINE}.tflite")))
    return evaluation.first(episodes)


def _require_reference(path: Path, run_id: str) -> None:
    other = Sidecar.load(sidecar_path(path))
    if (other.scheme, other.run_id) != (REFERENCE, run_id):
        raise QuarlError(
            f"This is not the fp32 to compare with; put that of {run_id} in its place, or remove "
            f"it. Received: {path}, {other.scheme} of {other.run_id}"
        )


def _played(
    artifact: Path,
    seeds: Sequence[int],
    chance: Chance,
    reference: Path,
    saved: Callable[[], Evaluation | None],
    **options: Any,
) -> Evaluation:
    """Play episodes and save them now and then; continue a `saved`, shorter evaluation if it can.

    A longer one stays: it may be another processor's, or another process may play them, too.
    """
    from quarl_tf.environments import registry
    from quarl_tf.evaluation import play
    from quarl_tf.store.state import may_be_continued

    path, env_id = evaluation_path(artifact, chance), Sidecar.load(sidecar_path(artifact)).env_id
    require_writable(path)  # Before the episodes are played.
    registry.source_sha256(env_id)  # Of the code that plays, should it be edited meanwhile.
    begun = saved()
    if begun is not None and not may_be_continued(begun, chance):
        begun = None

    def save(evaluation: Evaluation) -> None:
        if (kept := saved()) is None or len(evaluation.seeds) >= len(kept.seeds):
            evaluation.save(path)

    compared = reference if reference.exists() else None
    options |= {"reference": compared, "begun": begun, "save": save}
    return play.evaluate(artifact, seeds, chance, **options)


def report(
    run_ids: Sequence[str],
    *,
    root: Path | str = ".",
    name: str | None = None,
    margin_percent: float = DEFAULT_MARGIN_PERCENT,
    chance: Chance = GREEDY,
    command: str = "quarl_tf.report(…)",
) -> Path:
    """Write `reports/<name>/` on exported and evaluated runs; return its index.html.

    By default the name follows from the runs. `margin_percent` is the acceptable loss, in percent
    of the fp32 return, `chance` selects the evaluations, and `command` is shown as the origin of
    the report.

    Raises:
        UsageError: No run is given, the name is invalid, or the runs of several cells have none.
        QuarlError: A run has no fp32 result.
    """
    from quarl_tf.report.results import Source
    from quarl_tf.report.write import write_report

    _CHANCE.require("chance", chance)
    source = Source(Workspace(Path(root)), margin_percent, command, chance)
    return write_report(source, _listed("run_ids", run_ids), name)
