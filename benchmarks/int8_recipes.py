"""Compare ways to make int8 files on selection seeds, which no evaluation uses.

python benchmarks/int8_recipes.py [--episodes N] [RUN ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quarl_tf.evaluation.shelf import entries
from quarl_tf.export import calibration, integer
from quarl_tf.foundation.files import write_text
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import LayerFormat, Recipe
from quarl_tf.spec.recipe import integers

RESULTS = Path("benchmarks/int8_recipes.json")


def _uniform(*, per_channel: bool) -> Recipe:
    form = integers(8, per_channel=per_channel)
    return Recipe(default=form, observation=replace(form, weights=None), head=form)


TENSOR, CHANNEL = _uniform(per_channel=False), _uniform(per_channel=True)


def bias_corrected(content: bytes, observations: NDArray[Any], recipe: Recipe) -> bytes:
    """Take the mean error that rounded kernels make off the biases.

    Bias correction (Nagel et al., arXiv 1906.04721, section 4.2), by the mean inputs over
    observations: of a layer y = Wx + b it is (Q(W) - W) E[x].
    """
    graph = integer.Graph(content)
    means: dict[int, Any] = {}

    def add(index: int, values: NDArray[Any]) -> None:
        mean = values.reshape(-1, values.shape[-1]).mean(axis=0) / len(observations)
        means[index] = means.get(index, 0) + mean

    integer.visit(content, observations, add)
    for name, operator in graph.layers().items():
        form = recipe.of(name).weights
        kernel, bias = (graph.constant(i) for i in operator.inputs[1:3])
        if form is None or kernel is None or bias is None:
            continue
        per_channel = graph.name(operator) == "CONV_2D" or form.per_channel
        codes, scales = integer.integers(kernel, form, per_channel=per_channel)
        error = codes * scales.reshape(-1, *[1] * (kernel.ndim - 1)) - kernel
        # Of images the mean over places stands for each place of the kernel.
        shift = (error.reshape(len(kernel), -1, kernel.shape[-1]).sum(axis=1)) @ means[
            operator.inputs[0]
        ]
        graph.set_constant(operator.inputs[2], (bias - shift).astype(np.float32))
    return graph.pack()


Variant = Callable[[bytes, NDArray[np.float32]], bytes]


def _variant(recipe: Recipe, *, equalise: bool = False, correct: bool = False) -> Variant:
    def make(content: bytes, observations: NDArray[np.float32]) -> bytes:
        content = integer.equalised(content) if equalise else content
        if correct:
            content = bias_corrected(content, observations, recipe)
        return integer.quantized(content, observations, recipe)

    return make


VARIANTS: dict[str, Variant] = {
    "per tensor": _variant(TENSOR),
    "per channel": _variant(CHANNEL),
    "per channel, corrected": _variant(CHANNEL, correct=True),
    "per channel, equalised": _variant(CHANNEL, equalise=True),
    "per channel, equalised, corrected": _variant(CHANNEL, equalise=True, correct=True),
    "per channel, equalised, head in float": _variant(
        replace(CHANNEL, head=LayerFormat()), equalise=True
    ),
}


def measure(path: Path, episodes: int) -> dict[str, float]:
    """Return the mean return of fp32 and of each variant."""
    policy = Policy.load(path)
    sidecar = policy.sidecar
    observations = calibration.observations(policy)
    content = path.read_bytes()
    if sidecar.num_actions is not None:
        content = integer.centred(content)
    files = {name: make(content, observations) for name, make in VARIANTS.items()}
    policies = {"fp32": policy, **{n: Policy(made, sidecar) for n, made in files.items()}}
    return {
        name: statistics.fmean(calibration.selection_returns(one, episodes))
        for name, one in policies.items()
    }


def main() -> None:
    """Measure what is not measured yet; print the errors in percent of fp32's return."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", help="run ids (default: all plain ones but games)")
    parser.add_argument("--episodes", type=int, default=20)
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for entry in entries(Path("tflite_models")):
        run_id, game = entry.run.run_id, "NoFrameskip" in entry.run.env_id
        asked = run_id in args.runs if args.runs else not game and not entry.run.overrides
        if entry.sidecar.scheme == "fp32" and asked and run_id not in results:
            results[run_id] = measure(entry.artifact, args.episodes)
            write_text(RESULTS, json.dumps(results, indent=1) + "\n")
            fp32 = results[run_id]["fp32"]
            errors = {n: 100 * (fp32 - r) / abs(fp32) for n, r in results[run_id].items()}
            print(run_id, {name: round(error, 2) for name, error in errors.items()}, flush=True)


if __name__ == "__main__":
    main()
