"""Progress of experiments, from the files of a workspace: `state`."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from quarl_tf import environments, presets
from quarl_tf.environments import registry
from quarl_tf.foundation import provenance
from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.files import sha256, write_bytes
from quarl_tf.foundation.seeding import evaluation_seeds
from quarl_tf.presets import Preset
from quarl_tf.spec import ADOPTED, BASELINE, GREEDY, REFERENCE, Chance, Origin, Run, Scheme
from quarl_tf.spec.scheme import FLOAT_SCHEMES
from quarl_tf.store import records
from quarl_tf.store.records import Evaluation, Protocol, Sidecar, TrainingRecord
from quarl_tf.store.workspace import (
    Workspace,
    evaluation_path,
    is_evaluated,
    reference_path,
    sidecar_path,
)


class State(StrEnum):
    """Progress of an experiment, which is one run in one scheme."""

    MISSING = "missing"
    TRAINED = "trained"
    EXPORTED = "exported"
    EVALUATED = "evaluated"
    FAILED = "failed"


@dataclass(frozen=True)
class Status:
    """Progress of an experiment, and its files where they are valid and match."""

    state: State
    reason: str = ""  #: Follows the name of the scheme in messages.
    sidecar: Sidecar | None = None
    evaluation: Evaluation | None = None


def state(
    workspace: Workspace,
    run: Run,
    scheme: str,
    *,
    chance: Chance,
    episodes: int | None = None,
    current: bool = False,
) -> Status:
    """Return the progress of an experiment.

    With `episodes`, an evaluation counts if it has so many of the run's seeds; if `current`, a
    training counts if it has the settings of today. Results count without the run folder, as in a
    clone, and without the flatbuffer, whose hash is in the sidecar and in the evaluation.
    """
    try:
        preset = presets.of(run) if current else None
        record = None if preset is None else finished_training(workspace, run, preset)
        if preset is not None and record is None and is_begun(workspace, run.run_id):
            return Status(State.MISSING, "was not trained")
        status = _exported(workspace, run, scheme, record)
        if (sidecar := status.sidecar) is None:
            return status
        if preset is not None:
            require_same_settings(workspace.artifact_dir(run.run_id), asdict(sidecar), run, preset)
        artifact = workspace.artifact(run.run_id, scheme)
        evaluation = _saved_evaluation(artifact, chance)
        if isinstance(evaluation, str):
            return replace(status, reason=evaluation)
        reference = reference_path(artifact, sidecar)
        seeds = None if episodes is None else evaluation_seeds(run.seed, episodes)
        flaw = evaluation_flaw(evaluation, sidecar, reference, seeds, chance)
        is_plain = run.quantization is None
        if flaw is None and is_plain and seeds and baseline(reference, run, seeds) is None:
            flaw = "has no evaluation of the random policy beside it"
        if flaw is not None:
            return replace(status, reason=flaw)
        return Status(State.EVALUATED, sidecar=sidecar, evaluation=evaluation)
    except QuarlError as error:
        return Status(State.FAILED, str(error))


def _saved_evaluation(artifact: Path, chance: Chance) -> Evaluation | str:
    """Return a flatbuffer's evaluation, or why there is none; a damaged one is played anew."""
    path = evaluation_path(artifact, chance)
    if not path.exists():
        return "was not evaluated" + f" with {chance.words}" * bool(chance.words)
    try:
        return Evaluation.load(path)
    except QuarlError as error:
        return str(error)


def _exported(workspace: Workspace, run: Run, scheme: str, record: TrainingRecord | None) -> Status:
    """Return whether a valid flatbuffer is there, with its sidecar, else the status before it."""
    artifact = workspace.artifact(run.run_id, scheme)
    trained = record is not None or is_trained(workspace, run.run_id)
    # Without its training, as in a clone, a flatbuffer is made of a float one.
    can_be_made = trained and (is_begun(workspace, run.run_id) or sources(artifact))
    previous = State.TRAINED if can_be_made else State.MISSING
    exists = artifact.exists()
    if not sidecar_path(artifact).exists() or not (exists or is_evaluated(artifact)):
        return Status(previous, "was not exported" if trained else "was not trained")
    sidecar = Sidecar.load(sidecar_path(artifact))
    expected = (run.run_id, scheme, sha256(artifact) if exists else sidecar.sha256)
    if (sidecar.run_id, sidecar.scheme, sidecar.sha256) != expected:
        return Status(previous, "has a flatbuffer that does not match its sidecar")
    if record is not None and sidecar.network_sha256 != record.network_sha256:
        return Status(previous, "was exported from an earlier network")
    return Status(State.EXPORTED, sidecar=sidecar)


def evaluation_flaw(
    evaluation: Evaluation,
    sidecar: Sidecar,
    reference: Path,
    seeds: Sequence[int] | None,
    chance: Chance,
) -> str | None:
    """Return why an evaluation is not valid for a flatbuffer on these seeds; None if it is."""
    if evaluation.artifact_sha256 != sidecar.sha256:
        return "has a stale evaluation, made with another flatbuffer"
    if not _keeps_rules(evaluation, reference, chance):
        return "was evaluated by other rules, or in another version of the environment"
    fp32 = Sidecar.load(sidecar_path(reference)) if sidecar_path(reference).exists() else None
    # A deleted reference cannot be compared with again.
    hashes = {fp32 and fp32.sha256} | (set() if reference.exists() else {None})
    if evaluation.reference_sha256 not in hashes:
        return "was compared with another fp32 flatbuffer"
    if seeds is not None and evaluation.first(len(seeds)).seeds != list(seeds):
        return "was evaluated on fewer or other episodes"
    return None


def may_be_continued(evaluation: Evaluation, chance: Chance) -> bool:
    """Tell whether more episodes would be played as those of a valid evaluation were."""
    then = evaluation.protocol, evaluation.processor, evaluation.versions
    rules = protocol(evaluation.env_id, chance)
    alike = then == (rules, provenance.processor(), provenance.package_versions())
    alike = alike and registry.is_versioned(evaluation.env_id)
    return alike and len(evaluation.seeds) >= records.AGREEMENT_EPISODES


def protocol(env_id: str, chance: Chance | None) -> Protocol:
    """Return the current evaluation rules; `chance` is None for random actions."""
    actions, sticky = ("random", 0.0) if chance is None else (chance.actions, chance.sticky)
    return Protocol(records.PROTOCOL_VERSION, actions, environments.rules(env_id, sticky))


def _keeps_rules(evaluation: Evaluation, reference: Path, chance: Chance | None) -> bool:
    """Tell whether an evaluation has today's rules (or a deleted reference's) and environment."""
    rules = protocol(evaluation.env_id, chance)
    if not reference.exists():
        # It cannot be repeated with its reference, so its game's rules of that time count.
        path = evaluation_path(reference, chance or GREEDY)
        kept = Evaluation.load(path) if chance and path.exists() else evaluation
        rules = replace(rules, game=kept.protocol.game)
    changed = _code_has_changed(evaluation.env_id, evaluation.environment_sha256)
    return evaluation.protocol == rules and not changed


def _code_has_changed(env_id: str, recorded: str | None) -> bool:
    """Tell whether a user's environment is another one now, as far as it is imported."""
    if recorded is not None:
        with contextlib.suppress(QuarlError):
            return recorded != registry.source_sha256(env_id)
    return False


def require_same_environment(path: Path, run: Run, recorded: str | None) -> None:
    """Raise a QuarlError for a training in other code of a user's environment than today's."""
    if _code_has_changed(run.env_id, recorded):
        raise QuarlError(
            f"{path} was trained in an environment whose code, of its module or package, or "
            "registration has changed since; move it and the folder of its flatbuffers away, or "
            "train in another --root. What was exported of it is evaluated by quarl evaluate FILE"
            f"{run.imports}. Received: environment={run.env_id!r}"
        )


def baseline(reference: Path, run: Run, seeds: Sequence[int]) -> Evaluation | None:
    """Return the random policy's evaluation on these seeds, stored beside the fp32 `reference`."""
    try:
        evaluation = Evaluation.load(evaluation_path(reference.with_name(f"{BASELINE}.tflite")))
    except QuarlError:
        return None
    skip = evaluation.seeds.index(seeds[0]) if seeds[0] in evaluation.seeds else 0
    evaluation = evaluation.first(len(seeds), skip=skip)
    fits = _keeps_rules(evaluation, reference, None)
    fits = fits and (evaluation.run_id, evaluation.seeds) == (run.plain.run_id, list(seeds))
    return evaluation if fits else None


def finished_training(workspace: Workspace, run: Run, preset: Preset) -> TrainingRecord | None:
    """Return the record of a finished training, else None; a QuarlError for other settings."""
    folder = workspace.run_dir(run.run_id)
    if not (folder / "training.json").exists():
        return None
    record = TrainingRecord.load(folder / "training.json")
    record.verify(folder)
    require_same_settings(folder, asdict(record), run, preset)
    require_same_run(folder, record.run_id)
    require_same_environment(folder, run, record.environment_sha256)
    return record


def require_same_run(folder: Path, recorded_id: str) -> None:
    """Raise a QuarlError for a run's folder with the training of another run, as after a copy."""
    if recorded_id != folder.name:
        raise QuarlError(
            f"{folder} holds another run; move it away or use another --root. "
            f"Received: {recorded_id!r}, expected {folder.name!r}"
        )


def require_same_settings(
    path: Path,
    recorded: Mapping[str, Any],
    run: Run,
    preset: Preset,
    remedy: str = "move it away or use another --root",
) -> None:
    """Raise a QuarlError that names the settings of a record which differ from those asked for."""
    settings = presets.settings(run, asdict(preset))
    try:
        old_settings = presets.settings(Run.from_dict(recorded["run"]), recorded["preset"])
    except (KeyError, TypeError, UsageError) as error:
        raise QuarlError(
            f"{path} was trained by another version; move it away or use another --root. "
            f"Received: {error}"
        ) from error
    pairs = [(k, settings.get(k), old_settings.get(k)) for k in sorted({*old_settings, *settings})]
    if received := ", ".join(f"{k}={new!r} for {old!r}" for k, new, old in pairs if new != old):
        raise QuarlError(f"{path} was trained with other settings; {remedy}. Received: {received}")


def training_record(workspace: Workspace, run_id: str) -> TrainingRecord:
    """Return the record of a finished training, else a QuarlError."""
    folder = workspace.run_dir(run_id)
    if (folder / "training.json").exists():
        record = TrainingRecord.load(folder / "training.json")
        require_same_run(folder, record.run_id)
        return record
    reason = "does not exist"
    remedy = "train it first (quarl train --algo … --env … --seed …), or give its --root"
    if run_id.startswith(f"{ADOPTED}-"):
        reason = "is not here"
        remedy = "adopt it first (quarl adopt FILE --env … --head …), or give its --root"
    elif is_begun(workspace, run_id):
        reason = "is not finished"
    elif (run := exported_run(workspace, run_id)) is not None:
        reason = "is not here, only what was exported of it"
        remedy = f"train it first ({run.command('train')} --root DIR)"
    raise QuarlError(
        f"The run {reason}; {remedy}. Received: run={run_id!r} in {workspace.root.resolve()}"
    )


def starting_from(workspace: Workspace, origin: str, run: Run, preset: Preset) -> Run:
    """Return the run with the finished training `origin`, which has the same architecture."""
    try:
        path, record = origin_network(workspace, origin, run.origin)
    except QuarlError:
        # What such a training was exported to tells the run, as in a clone.
        for file in sorted(workspace.artifact_dir(run.run_id).parent.glob("*-from*/*.json")):
            with contextlib.suppress(QuarlError):
                known = Run.from_dict(Sidecar.load(file).run)
                is_same = replace(known, origin=None) == replace(run, origin=None)
                if is_same and known.origin and known.origin.run.run_id == origin:
                    return known
        raise
    run = replace(run, origin=Origin(Run.from_dict(record.run), sha256(path)))
    origin_settings = presets.settings(run, record.preset)
    settings = presets.settings(run, asdict(preset))
    for name in ("network", "layer_norm", "dueling", "byte_zero", "byte_unit"):
        if origin_settings.get(name) != settings.get(name):
            raise UsageError(
                f"A training starts from a network like its own; give -p {name}=… as {origin} has "
                f"it. Received: {name}={settings[name]!r} for {origin_settings[name]!r}"
            )
    return run


def require_origin(workspace: Workspace, origin: Origin) -> None:
    """Refuse another network than the one that a training starts from; a missing one may come."""
    run_id = origin.run.run_id
    try:
        path, record = origin_network(workspace, run_id, origin)
    except QuarlError:
        return
    if (received := sha256(path)) != origin.network_sha256:
        problem = f"another network of {run_id} than the one that is here; work with that one"
        if record.network_sha256 == origin.network_sha256 or path.stem == "fp16":
            problem = f"the network of {run_id}, of which only {path.name} is here; train it"
        raise QuarlError(
            f"A training starts from {problem} elsewhere (--root DIR), or correct its hash. "
            f"Received: {received}, expected {origin.network_sha256}"
        )


def origin_network(
    workspace: Workspace, run_id: str, origin: Origin | None = None
) -> tuple[Path, TrainingRecord | Sidecar]:
    """Return the file of a finished training's network, and its record.

    Without the run folder, as in a clone, these are a float flatbuffer and its sidecar: the one
    that a training began from (`origin`), else fp32, or fp16 where only that is kept. A QuarlError
    where neither can be used.
    """
    folder = workspace.run_dir(run_id)
    kept = [workspace.artifact(run_id, scheme) for scheme in FLOAT_SCHEMES]
    kept = [path for path in kept if path.exists()]
    if (folder / "training.json").exists() or not kept:
        record = training_record(workspace, run_id)
        record.verify(folder)
        return folder / "network.npz", record
    begun_from = [path for path in kept if origin and sha256(path) == origin.network_sha256]
    flatbuffer = [*begun_from, *kept][0]
    sidecar = Sidecar.load(sidecar_path(flatbuffer))
    if sidecar.sha256 != sha256(flatbuffer) or sidecar.preset.get("layer_norm"):
        raise QuarlError(
            "This flatbuffer was changed, or has layer normalisation, whose weights it does not "
            "keep apart; train it elsewhere (--root DIR), and this one from it there. "
            f"Received: path={str(flatbuffer)!r}"
        )
    return flatbuffer, sidecar


def known_run(workspace: Workspace, run_id: str) -> Run:
    """Return a run that is trained, here or elsewhere, or adopted, else a QuarlError."""
    if (run := exported_run(workspace, run_id)) is not None and not is_begun(workspace, run_id):
        return run
    return Run.from_dict(training_record(workspace, run_id).run)


def exported_run(workspace: Workspace, run_id: str) -> Run | None:
    """Return the run of this id by the sidecars in its folder; None if there are none."""
    sidecar = _any_sidecar(workspace, run_id)
    return None if sidecar is None else Run.from_dict(sidecar.run)


def _any_sidecar(workspace: Workspace, run_id: str) -> Sidecar | None:
    for path in sorted(workspace.artifact_dir(run_id).glob("*.json")):
        with contextlib.suppress(QuarlError):
            if (sidecar := Sidecar.load(path)).run_id == run_id:
                return sidecar
    return None


def sources(artifact: Path) -> list[Path]:
    """Return the float flatbuffers beside it of which a flatbuffer is made without its training.

    A former copy tells by its sidecar what it was made of.
    """
    schemes = FLOAT_SCHEMES if Scheme.parse(artifact.stem).post_training else ()
    with contextlib.suppress(QuarlError):
        former = Sidecar.load(sidecar_path(artifact))
        schemes = tuple(s for s in schemes if s == former.check.get("source", REFERENCE))
    paths = [artifact.with_name(f"{scheme}.tflite") for scheme in schemes]
    return [path for path in paths if path.exists() and path != artifact]


def usual_schemes(workspace: Workspace, run: Run) -> list[str]:
    """Return the default schemes; of exports without their training, those that can be used."""
    if is_begun(workspace, run.run_id) or exported_run(workspace, run.run_id) is None:
        return [*run.default_schemes]
    paths = [workspace.artifact(run.run_id, name) for name in run.default_schemes]
    return [path.stem for path in paths if path.exists() or sources(path)]


def is_kept(workspace: Workspace, run: Run, preset: Preset) -> bool:
    """Tell whether exports are here but not their training; a QuarlError for other settings."""
    sidecar = None if is_begun(workspace, run.run_id) else _any_sidecar(workspace, run.run_id)
    if sidecar is not None:
        require_same_settings(workspace.artifact_dir(run.run_id), asdict(sidecar), run, preset)
    return sidecar is not None


def not_exported(workspace: Workspace, run: Run, schemes: Sequence[str]) -> list[str]:
    """Return the schemes whose flatbuffer is missing, damaged or of an earlier network."""
    record = training_record(workspace, run.run_id) if is_begun(workspace, run.run_id) else None
    missing = []
    for scheme in schemes:
        exported = None
        with contextlib.suppress(QuarlError):
            exported = _exported(workspace, run, scheme, record).sidecar
        if exported is None or not workspace.artifact(run.run_id, scheme).exists():
            missing.append(scheme)
    return missing


def is_trained(workspace: Workspace, run_id: str) -> bool:
    """Tell whether a training is finished, or only its flatbuffers are here, as in a clone."""
    if is_begun(workspace, run_id):
        return (workspace.run_dir(run_id) / "training.json").exists()
    return any(workspace.artifact_dir(run_id).glob("*.json"))


def has_exports(workspace: Workspace, run_id: str) -> bool:
    """Tell whether something that a training was exported to is here."""
    found = any(workspace.artifact_dir(run_id).glob("*.tflite"))
    return found or exported_run(workspace, run_id) is not None


def is_begun(workspace: Workspace, run_id: str) -> bool:
    """Tell whether a training has begun here."""
    folder = workspace.run_dir(run_id)
    return any((folder / name).exists() for name in ("run.json", "training.json"))


def require_possible_settings(run: Run, preset: Preset) -> None:
    """Refuse a distillation of no network, and a delay that is not within the training."""
    if preset.distillation and run.origin is None:
        raise UsageError(
            "Distillation compares the head with that of the network that a training starts from; "
            f"name it (--from RUN). Received: distillation={preset.distillation}"
        )
    if run.quantization is not None:
        presets.require_possible_delay(run.quantization.delay, preset)


def require_trainable(workspace: Workspace, run: Run, preset: Preset) -> None:
    """Refuse to train with unfit settings, or beside exports whose training is not here."""
    require_possible_settings(run, preset)
    if has_exports(workspace, run.run_id) and not is_begun(workspace, run.run_id):
        raise QuarlError(
            f"{workspace.artifact_dir(run.run_id)} has what an earlier training was exported to, "
            "which is not here; make other schemes of its float file, if there is one (quarl run), "
            f"work elsewhere (--root DIR) or delete that folder. Received: run={run.run_id!r}"
        )


def copy_curve(workspace: Workspace, run_id: str) -> None:
    """Copy the run's learning curve to its flatbuffers, where reports read it."""
    curve = workspace.run_dir(run_id) / "progress.csv"
    copy = workspace.artifact_dir(run_id) / curve.name
    if curve.exists() and not (copy.exists() and copy.read_bytes() == curve.read_bytes()):
        write_bytes(copy, curve.read_bytes())
