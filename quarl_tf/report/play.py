"""Give a page what it takes to play fp32 and int8 side by side; `templates/play.js` does so.

Where the page does not have the environment, it shows a film of an episode.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quarl_tf.environments import make
from quarl_tf.environments.airnav import AirNavVector
from quarl_tf.evaluation import video
from quarl_tf.evaluation.play import AGREEMENT_TOLERANCE
from quarl_tf.export.graph import Graph
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.report.results import CellResults, Result, Source
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import GREEDY, REFERENCE
from quarl_tf.store.records import Sidecar

#: Those that `templates/play.js` has.
ENVIRONMENTS = (
    "Acrobot-v1",
    "AirNav-v0",
    "CartPole-v1",
    "MountainCarContinuous-v0",
    "Pendulum-v1",
)

_SCHEMES, _STARTS = (REFERENCE, "int8"), 5

#: Bytes of a film, its frames a second, and the most seconds that it takes of an episode.
_FILM_BYTES, _FILM_RATE, _FILM_SECONDS = 400_000, 10, 20

#: What the page computes; only a layer may end in a ReLU, which is 1 in the schema.
_LAYERS = "FULLY_CONNECTED float32", "FULLY_CONNECTED int8"
_FLOAT = "ADD", "SUB", "MUL", "MINIMUM", "MAXIMUM", "CONCATENATION", "RESHAPE", "TANH"
_OTHERS = "QUANTIZE int8", "DEQUANTIZE float32", "TANH int8", "RESHAPE int8"
_FUSED = dict.fromkeys((*_OTHERS, *(f"{name} float32" for name in _FLOAT)), (0,)) | dict.fromkeys(
    _LAYERS, (0, 1)
)


def shown(source: Source, cells: Sequence[CellResults]) -> dict[str, Any]:
    """Return what a page shows at play, by the names its template has: a scene, else a film."""
    played = scene(source, cells)
    return {"play": played, "film": None if played else film(source, cells)}


def scene(source: Source, cells: Sequence[CellResults]) -> dict[str, Any] | None:
    """Return what a page plays, as JSON has it: of a report's one cell the first training.

    There is None of several cells, of evaluations with chance, where the page does not have the
    environment or an operator, and where a file is not there.
    """
    for pair in _pairs(source, cells):
        with contextlib.suppress(QuarlError):
            return _scene(source, pair)
    return None


def film(source: Source, cells: Sequence[CellResults]) -> dict[str, Any] | None:
    """Return what a page shows instead: the run and, in base64, a GIF of an evaluation's start.

    There is None of several cells, of evaluations with chance, where the environment draws nothing
    or is not installed, and where a file is not there.
    """
    for pair in _pairs(source, cells):
        paths = [_path(source, one) for one in pair]
        with contextlib.suppress(QuarlError):
            whole = video.scene([*map(Policy.load, paths)], pair[0].evaluation.seeds[0], 1)
            start = whole._replace(max_steps=round(_FILM_SECONDS * whole.rate))
            content = video.gif(start, _FILM_BYTES, _FILM_RATE)
            return {"run_id": pair[1].sidecar.run_id, "gif": base64.b64encode(content).decode()}
    return None


def _pairs(source: Source, cells: Sequence[CellResults]) -> Iterator[list[Result]]:
    """Yield fp32 and int8 of each training of a report's one cell, where there are both."""
    if len(cells) > 1 or source.chance != GREEDY:
        return
    for entries in cells[0].entries:
        found = {one.sidecar.scheme: one for one in entries if isinstance(one, Result)}
        if set(_SCHEMES) <= set(found):
            yield [found[scheme] for scheme in _SCHEMES]


def _path(source: Source, result: Result) -> Path:
    return source.workspace.artifact(result.sidecar.run_id, result.sidecar.scheme)


def _scene(source: Source, results: Sequence[Result]) -> dict[str, Any] | None:
    sidecars = [one.sidecar for one in results]
    if sidecars[0].env_id not in ENVIRONMENTS:
        return None
    paths = [_path(source, one) for one in results]
    policies = [policy(flatbuffer.read(path), Policy.load(path).sidecar) for path in paths]
    if None in policies:
        return None
    low, high = sidecars[0].action_low, sidecars[0].action_high
    seeds = results[0].evaluation.seeds[:_STARTS]
    played = zip(seeds, *(one.evaluation.returns for one in results), strict=False)
    return {
        "run_id": sidecars[1].run_id,
        "env": sidecars[0].env_id,
        "tolerance": low and (AGREEMENT_TOLERANCE * np.subtract(high or [], low)).tolist(),
        "policies": policies,
        "starts": [
            {"state": start(sidecars[0].env_id, seed), "returns": returns}
            for seed, *returns in played
        ],
    }


def policy(content: bytes, sidecar: Sidecar) -> dict[str, Any] | None:
    """Return a flatbuffer as JSON has it; None with what the page does not compute.

    Constants are little-endian in base64; tensors that are computed have a size instead.
    """
    (graph, *_), operators = flatbuffer.parsed(content), []
    kinds = flatbuffer.audit(content).operators
    for operator, kind, whole in zip(graph.operators, kinds, Graph(content).operators, strict=True):
        fused = getattr(whole.builtinOptions, "fusedActivationFunction", 0)
        if fused not in _FUSED.get(kind, ()):
            return None
        (output,) = operator.outputs
        told = {"name": operator.name, "inputs": operator.inputs, "output": output}
        operators.append(told | {"relu": fused == 1})
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
        # Kernels of a scale for each output have zero points of 0.
        "zero": int(tensor.zero_points[0]) if tensor.zero_points.size else 0,
    }


def start(env_id: str, seed: int) -> Any:
    """Return the state that an environment starts from with a seed, as JSON has it."""
    if env_id == "AirNav-v0":
        missions = AirNavVector(1)
        missions.reset(seed=seed)
        return {name: value[0].tolist() for name, value in missions.missions._asdict().items()}
    env: Any = make(env_id)
    env.reset(seed=seed)
    return env.unwrapped.state.tolist()
