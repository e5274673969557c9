"""Prepare what a page plays: fp32 and int8 side by side, computed by `templates/play.js`.

Other environments than those of the script are shown in a film of an episode.
"""

import base64
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quarl_tf.environments import make
from quarl_tf.environments.airnav import AirNavVector
from quarl_tf.evaluation import video
from quarl_tf.evaluation.play import AGREEMENT_TOLERANCE
from quarl_tf.export.graph import NONE, RELU, Graph
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.report.results import CellResults, Result, Source
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import GREEDY, REFERENCE
from quarl_tf.store.records import Sidecar

#: Implemented in `templates/play.js`.
ENVIRONMENTS = ("Acrobot-v1", "AirNav-v0", "CartPole-v1", "MountainCarContinuous-v0", "Pendulum-v1")

_SCHEMES, _STARTS = (REFERENCE, "int8"), 5

#: Largest size of a film in bytes, frames per second, and the most seconds of an episode.
_FILM_BYTES, _FILM_RATE, _FILM_SECONDS = 400_000, 10, 20

#: Operators that the page computes; only layers may have a fused ReLU.
_LAYERS = {"FULLY_CONNECTED float32", "FULLY_CONNECTED int8"}
_FLOAT = ("ADD", "SUB", "MUL", "MINIMUM", "MAXIMUM", "CONCATENATION", "RESHAPE", "TANH")
_INTEGER = {"QUANTIZE int8", "DEQUANTIZE float32", "TANH int8", "RESHAPE int8"}
_OPERATORS = _LAYERS | _INTEGER | {f"{name} float32" for name in _FLOAT}


def animation(source: Source, cells: Sequence[CellResults]) -> dict[str, Any]:
    """Return what a page plays, as JSON, and the film that it shows instead; both may be None.

    It is the first training of the report's one cell for which that can be made. There is nothing
    for several cells, for evaluations with chance, for missing files, and for environments that
    are not installed or draw nothing.
    """
    for entries in cells[0].entries if len(cells) == 1 and source.chance == GREEDY else ():
        results = {entry.sidecar.scheme: entry for entry in entries if isinstance(entry, Result)}
        if not set(_SCHEMES) <= set(results):
            continue
        pair = [results[scheme] for scheme in _SCHEMES]
        paths = [source.workspace.artifact(r.sidecar.run_id, r.sidecar.scheme) for r in pair]
        with contextlib.suppress(QuarlError):
            simulation = _simulation(pair, paths)
            return {"play": simulation, "film": None if simulation else _film(pair, paths)}
    return {"play": None, "film": None}


def _simulation(pair: Sequence[Result], paths: Sequence[Path]) -> dict[str, Any] | None:
    """Return what a page plays; None if it lacks the environment or an operator."""
    fp32, int8 = (result.sidecar for result in pair)
    if fp32.env_id not in ENVIRONMENTS:
        return None
    policies = [policy(flatbuffer.read(path), Policy.load(path).sidecar) for path in paths]
    if None in policies:
        return None
    low, high = fp32.action_low, fp32.action_high
    seeds = pair[0].evaluation.seeds[:_STARTS]
    episodes = zip(seeds, *(result.evaluation.returns for result in pair), strict=False)
    return {
        "run_id": int8.run_id,
        "env": fp32.env_id,
        "tolerance": low and (AGREEMENT_TOLERANCE * np.subtract(high or [], low)).tolist(),
        "policies": policies,
        "starts": [
            {"state": start(fp32.env_id, seed), "returns": returns} for seed, *returns in episodes
        ],
    }


def _film(pair: Sequence[Result], paths: Sequence[Path]) -> dict[str, Any]:
    """Return the run and, in base64, a GIF of the start of its first episode."""
    scene = video.scene([*map(Policy.load, paths)], pair[0].evaluation.seeds[0], 1)
    scene = scene._replace(max_steps=round(_FILM_SECONDS * scene.rate))
    content = video.gif(scene, _FILM_BYTES, _FILM_RATE)
    return {"run_id": pair[1].sidecar.run_id, "gif": base64.b64encode(content).decode()}


def policy(content: bytes, sidecar: Sidecar) -> dict[str, Any] | None:
    """Return a flatbuffer for JSON; None if it has an operator that the page does not compute.

    Constants are little-endian in base64; computed tensors have a size instead.
    """
    (graph, *_), operators = flatbuffer.parsed(content), []
    kinds = flatbuffer.audit(content).operators
    records = Graph(content).operators  # With all options of the schema.
    for operator, kind, record in zip(graph.operators, kinds, records, strict=True):
        activation = Graph.activation(record)
        allowed = (NONE, RELU) if kind in _LAYERS else (NONE,)
        if kind not in _OPERATORS or activation not in allowed:
            return None
        (output,) = operator.outputs
        entry = {"name": operator.name, "inputs": operator.inputs, "output": output}
        operators.append(entry | {"relu": activation == RELU})
    return {
        "scheme": sidecar.scheme,
        "size_bytes": sidecar.size_bytes,
        "low": sidecar.action_low,
        "high": sidecar.action_high,
        "tensors": [_tensor(tensor) for tensor in graph.tensors],
        "operators": operators,
        "input": graph.inputs[0],
        "output": graph.outputs[0],
    }


def _tensor(tensor: Any) -> dict[str, Any]:
    constant = tensor.data is not None
    return {
        "dtype": tensor.dtype,
        "size": int(np.prod(tensor.shape)),
        "data": base64.b64encode(tensor.data.tobytes()).decode() if constant else None,
        "scales": tensor.scales.tolist(),
        # Kernels with a scale for each output have zero points of 0.
        "zero": int(tensor.zero_points[0]) if tensor.zero_points.size else 0,
    }


def start(env_id: str, seed: int) -> Any:
    """Return the initial state of an environment for a seed, for JSON."""
    if env_id == "AirNav-v0":
        missions = AirNavVector(1)
        missions.reset(seed=seed)
        return {name: value[0].tolist() for name, value in missions.missions._asdict().items()}
    env: Any = make(env_id)
    env.reset(seed=seed)
    return env.unwrapped.state.tolist()
