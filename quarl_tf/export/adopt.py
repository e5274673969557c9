"""Adopt a policy that others trained: a float flatbuffer from an observation to a head.

A Keras file or a SavedModel is converted first. The policy takes the observations of its
environment: a normaliser belongs inside the flatbuffer, a stack of frames into the environment.
"""

import contextlib
import io
import os
import re
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from quarl_tf import environments
from quarl_tf.environments import EnvSpec
from quarl_tf.export import calibration
from quarl_tf.export.graph import in_float32
from quarl_tf.export.ptq import described
from quarl_tf.foundation import native_output, processes
from quarl_tf.foundation.errors import QuarlError, UsageError, one_line, require_known
from quarl_tf.foundation.files import read_bytes, read_json, sha256
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.flatbuffer import FlatbufferAudit
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import ADOPTED, REFERENCE, Run, Scheme, require_possible
from quarl_tf.store.records import Sidecar
from quarl_tf.store.workspace import Workspace, sidecar_path, write_artifact

_HEADS = {True: ("logits", "q_values"), False: ("action",)}  #: By whether actions are discrete.
_KERAS = (".keras", ".h5", ".hdf5")  #: Suffixes of Keras files.
_HDF5 = b"\x89HDF\r\n\x1a\n"  #: First bytes of an HDF5 file.

#: Ways to a file that is adopted, by the suffixes of others.
_CONVERSIONS = {
    ".zip": "convert it with examples/from_sb3.py",
    ".pb": "name its folder, a SavedModel",
    **dict.fromkeys((".onnx", ".pt", ".pth"), "convert the PyTorch module with litert_torch"),
}


def adopt(
    workspace: Workspace,
    file: Path,
    env_id: str | None,
    head: str | None,
    *,
    name: str | None,
    seed: int,
    modules: Sequence[str],
    schemes: Sequence[Scheme],
) -> Run:
    """Write a flatbuffer as the fp32 of a run, after it has played in its environment.

    One of fp16 is widened. A Keras file is converted, and so is a folder, a SavedModel, which is a
    program that is run. A JSON file of its name beside it gives the environment and the head that
    are None; the default name is the hash of the flatbuffer. `schemes` are those of a later export.
    A QuarlError where it does not fit its environment, cannot be run, or a scheme needs a training.
    """
    _require_format(file)
    file = file.resolve() if file.is_dir() else file  # The current folder has a name as well.
    source = sidecar_path(file)
    fields = read_json(source) if source.exists() else {}
    env_id, head = _environment_and_head(fields, source, env_id, head)
    spec = environments.env_spec(env_id)
    environments.require_seeded(env_id)
    require_known(f"head of a policy for {env_id}", head, _HEADS[spec.num_actions is not None])
    # What is refused needs no model; its name may follow from the bytes below.
    overrides = {"name": "unknown" if name is None else name, "head": head}
    run = Run(ADOPTED, env_id, seed, overrides, modules=tuple(modules))
    require_possible(run, schemes)
    if file.suffix in _KERAS or file.is_dir():
        crash = f"TensorFlow crashed on the model; save it again. Received: {file}"
        shape, dtype = spec.observation_shape, spec.observation_dtype
        (content,) = processes.outcomes(_converted_model, [(file, shape, dtype)], crash)
        audit = flatbuffer.audit(content)
    else:
        content, audit = flatbuffer.read(file), flatbuffer.audit(file)  # Errors name the file.
        if fields.get("sha256") == sha256(file):  # Halves are widened below.
            del fields["sha256"]
    _require_interface(audit, spec, env_id)
    _require_logits(content, head)
    if "float16" in audit.weight_dtypes:
        with flatbuffer.understood():
            content = in_float32(content)
    facts = described(content)
    if name is None:
        run = replace(run, overrides=overrides | {"name": facts["sha256"][:12]})
    sidecar = _checked_sidecar(_described_run(run, spec, facts), fields, source)
    target = workspace.artifact(run.run_id, REFERENCE)
    _require_same(target, sidecar)
    crash = (
        "The interpreter or the environment crashed while the policy played; convert the "
        "flatbuffer again, or give the process more memory. "
        f"Received: {len(content)} bytes, sha256={sidecar.sha256!r}"
    )
    (check,) = processes.outcomes(_play, [(content, sidecar, modules)], crash)
    write_artifact(target, content, replace(sidecar, check=check))
    return run


def _environment_and_head(
    fields: dict[str, Any], source: Path, env_id: str | None, head: str | None
) -> tuple[str, str]:
    """Return the environment and the head, which are taken out of the fields of a description."""
    if "scheme" in fields:
        raise UsageError(
            "This file is a policy of this package already; use it as it is, or copy the .tflite "
            f"alone to adopt it under a name. Received: {source} beside it"
        )
    default_id, default_head = fields.pop("env_id", None), fields.pop("head", None)
    env_id, head = env_id or default_id, head or default_head
    if not (isinstance(env_id, str) and isinstance(head, str)):
        raise UsageError(
            "A policy is adopted for an environment and by what its head is: give --env and "
            f"--head, or env_id and head in {source}. Received: env={env_id!r}, head={head!r}"
        )
    return environments.canonical_id(env_id), head


def _require_format(file: Path) -> None:
    """Refuse a file of another format, and what is no SavedModel or Keras file by its content."""
    suffix = "" if file.is_dir() else file.suffix.lower()
    conversion = _CONVERSIONS.get(suffix)
    if suffix in _KERAS and suffix != file.suffix:
        conversion = f"rename it to end in {suffix}"
    if conversion is not None:
        raise UsageError(
            f"A policy is adopted from TFLite or Keras; {conversion} "
            f"(docs/guide/bring-your-own.md). Received: {file}"
        )
    if file.is_dir() and not any(file.glob("saved_model.*")):
        raise UsageError(
            f"A folder is adopted if it is a SavedModel; name one, or a file. Received: {file}, "
            "without a saved_model.pb"
        )
    if file.suffix not in _KERAS or file.is_dir():
        return
    content = read_bytes(file)
    # Keras says of such a file that it is not found.
    is_archive, is_hdf5 = zipfile.is_zipfile(io.BytesIO(content)), content.startswith(_HDF5)
    if not (is_archive if file.suffix == ".keras" else is_hdf5):
        raise QuarlError(
            f"{file} is truncated or not a {file.suffix} file; save it again, or rename it. "
            f"Received: {len(content)} bytes"
        )


def _require_same(target: Path, sidecar: Sidecar) -> None:
    """Refuse a folder of another policy or its copies, or of this one with another kind of head."""
    saved_sidecars = []
    for path in target.parent.glob("*.json"):
        with contextlib.suppress(QuarlError):  # Evaluations, and sidecars that are damaged.
            saved_sidecars.append(Sidecar.load(path))
    if target.exists() and REFERENCE not in {saved.scheme for saved in saved_sidecars}:
        saved_sidecars.append(replace(sidecar, network_sha256=sha256(target)))
    for saved in saved_sidecars:
        pairs = {
            "network_sha256": (sidecar.network_sha256, saved.network_sha256),
            "head": (sidecar.head, saved.run["overrides"].get("head")),
            "action_std": (sidecar.action_std, saved.action_std),
        }
        for name, (value, expected) in pairs.items():
            if value != expected:
                raise UsageError(
                    f"{target.parent} holds another policy, or this one by another converter; give "
                    "another --name, or delete that folder. "
                    f"Received: {name}={value}, there is {expected}"
                )


def _described_run(run: Run, spec: EnvSpec, facts: dict[str, Any]) -> Sidecar:
    return Sidecar(
        run=run.to_dict(),
        run_id=run.run_id,
        env_id=run.env_id,
        scheme=REFERENCE,
        native=True,
        head=run.overrides["head"],
        action_std=None,
        network_sha256=facts["sha256"],
        calibration_sha256=None,
        preset={},
        trained_commits=[],
        trained_on=[],
        **spec.facts,
        **facts,
    )


def _require_interface(audit: FlatbufferAudit, spec: EnvSpec, env_id: str) -> None:
    source = f"{spec.observation_dtype} {[1, *spec.observation_shape]}"
    expected = source, f"float32 {[1, spec.action_size]}"
    received = tuple(
        ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)
        for tensors in (audit.inputs, audit.outputs)
    )
    if received != expected:
        raise UsageError(
            f"A policy for {env_id} has one input, {expected[0]}, and one output, {expected[1]}. "
            f"Received: input {received[0]}; output {received[1]}"
        )
    if any("VARIABLE" in operator for operator in audit.operators):
        raise UsageError(
            "The weights are variables, whose values the file lacks; convert the model with "
            "TFLiteConverter.from_keras_model, or adopt its .keras file. Received: READ_VARIABLE"
        )
    if other_dtypes := sorted(audit.weight_dtypes.keys() - flatbuffer.FLOAT_TYPES):
        raise UsageError(
            "A policy is adopted in floats; convert it without quantisation. "
            f"Received: constants of {', '.join(other_dtypes)}"
        )


def _require_logits(content: bytes, head: str) -> None:
    """Refuse probabilities as logits, whose samples would be of another distribution."""
    graph = flatbuffer.parsed(content)[0]
    producers = {i: operator for operator in graph.operators for i in operator.outputs}
    ends = [*graph.outputs]
    while ends and head == "logits":
        operator = producers.get(ends.pop())
        if operator is not None and operator.name in ("RESHAPE", "CONCATENATION"):
            ends += operator.inputs
        if operator is not None and operator.name == "SOFTMAX":
            raise UsageError(
                "Logits are what comes before the softmax; leave it out, or give --head q_values, "
                "whose greatest value is the action. Received: --head logits of a SOFTMAX"
            )


def _checked_sidecar(sidecar: Sidecar, fields: dict[str, Any], path: Path) -> Sidecar:
    """Return a sidecar with the deviation among the fields of a file, after checking the others."""
    try:
        json_sidecar = Sidecar.of(asdict(sidecar) | fields, path)
    except QuarlError as error:
        raise UsageError(
            f"{path} does not describe a policy to adopt; correct it, or move it away and give "
            f"--env and --head. Received: {one_line(error).rpartition('Received: ')[2]}"
        ) from error
    for name in sorted(fields.keys() - {"action_std"}):
        value, expected = getattr(json_sidecar, name), getattr(sidecar, name)
        if name in ("action_low", "action_high") and value is not None:
            with np.errstate(over="ignore"):  # Bounds are those of float32.
                value = np.array(value, np.float32).tolist()
        if value != expected:
            raise UsageError(
                f"{path} is of another flatbuffer or environment than these. "
                f"Received: {name}={value}, expected {expected}"
            )
    return replace(sidecar, action_std=json_sidecar.action_std or None)


def _converted_model(file: Path, shape: tuple[int, ...], dtype: str) -> Iterator[bytes]:
    """Convert a model that Keras 3 loads in safe mode; a QuarlError where that fails."""
    from quarl_tf.export import converter  # With Keras 2, which cannot be chosen after Keras 3.

    os.environ["KERAS_BACKEND"] = "tensorflow"
    with native_output.caught(), warnings.catch_warnings(action="ignore"):
        import keras

        try:
            if file.is_dir():
                network = keras.layers.TFSMLayer(file, "serving_default", name="model")
            else:
                network = keras.saving.load_model(file, compile=False, safe_mode=True)
            model_converter = converter.of_function(network, shape, dtype)
        except Exception as error:  # A foreign file may raise anything.
            raise QuarlError(
                f"{file} does not load as a function of one observation, {dtype} {[1, *shape]}; "
                "save it as one, of Keras's own layers without Python code. "
                f"Received: {_cause(error)}"
            ) from error
    yield converter.converted(model_converter)


def _cause(error: Exception) -> str:
    """Return a message without the frames of a traceback, colours and advice on arguments."""
    text = re.sub(r"\x1b\[\d+m", "", str(error))
    text = re.split(r"\n\s*\n\s*Arguments received by", text)[0].strip().rpartition("\n\n")[2]
    text = text.partition(" If you trust")[0]  # Keras names an argument that no command has.
    return " ".join(text.split())[:300] or type(error).__name__


def _play(content: bytes, sidecar: Sidecar, modules: Sequence[str]) -> Iterator[dict[str, Any]]:
    with native_output.caught(), flatbuffer.understood():
        environments.import_environments(modules)
        policy = Policy(content, sidecar)
        observations = calibration.observations(policy)
        heads = [policy.head(observation) for observation in observations]
        repeated = policy.head(observations[0])
    if not np.array_equal(repeated, heads[0]):
        raise QuarlError(
            "A policy is a function of one observation; one with a memory takes its past in the "
            f"observation. Received: heads {heads[0].tolist()} and {repeated.tolist()} of the same"
        )
    yield {"observations": len(heads), "max_abs_head": float(np.abs(heads).max())}
