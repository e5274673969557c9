"""Compare ways to make int8 files on calibration and selection seeds, which no evaluation uses.

python benchmarks/int8_recipes.py [--episodes N] [RUN ...]
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quarl_tf.evaluation.shelf import entries
from quarl_tf.export import calibration, integer, preparation
from quarl_tf.foundation.files import write_text
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import Recipe, Scheme, actions
from quarl_tf.spec.recipe import integers

RESULTS = Path("benchmarks/int8_recipes.json")

#: Observations that heads are compared on, at most.
_UNSEEN = 1000


Variant = Callable[[bytes, NDArray[np.float32]], bytes]


def _variant(
    scheme: str = "int8",
    *,
    nearest: bool = False,
    equalise: bool = True,
    refine: bool = False,
) -> Variant:
    recipe = Scheme.parse(scheme).recipe
    if nearest:
        form = integers(8, per_channel=True)
        recipe = Recipe(default=form, observation=replace(form, weights=None), head=form)

    def make(content: bytes, observations: NDArray[np.float32]) -> bytes:
        content = preparation.equalised(content) if equalise else content
        content = preparation.refined(content, observations) if refine else content
        return integer.quantized(content, observations, recipe)

    return make


VARIANTS: dict[str, Variant] = {
    "per tensor": _variant("int8_tensor", equalise=False),
    "per channel": _variant(nearest=True, equalise=False),
    "per channel, equalised": _variant(nearest=True),
    "per channel, equalised, refined": _variant(nearest=True, refine=True),
    "per channel, equalised, by outputs": _variant(),
    "per channel, equalised, refined, by outputs": _variant(refine=True),
    "the same, head in float": _variant("int8_head32", refine=True),
}


def measure(path: Path, episodes: int) -> dict[str, dict[str, float]]:
    """Return of fp32 and of each variant the mean return, and the error of its head.

    The error is the root mean square on observations that it was not made with, in percent of the
    head's standard deviation; of discrete actions what they all share does not count.
    """
    policy = Policy.load(path)
    sidecar, content = policy.sidecar, path.read_bytes()
    choices = sidecar.num_actions
    observations = calibration.observations(policy)
    samples, unseen = observations[::2], observations[1::2][:_UNSEEN]
    content = preparation.centred(content, choices)
    files = {"fp32": content, **{name: make(content, samples) for name, make in VARIANTS.items()}}
    policies = {name: Policy(file, sidecar) for name, file in files.items()}
    heads = {n: np.array([p.head(x) for x in unseen]) for n, p in policies.items()}
    if choices is not None:
        heads = {name: actions.centred(values, choices) for name, values in heads.items()}
    scale = float(heads["fp32"].std(axis=0).mean())
    return {
        name: {
            "return": statistics.fmean(calibration.selection_returns(policy, episodes)),
            "head_error": 100
            * float(np.sqrt(np.square(heads[name] - heads["fp32"]).mean()))
            / scale,
        }
        for name, policy in policies.items()
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
        selected = run_id in args.runs if args.runs else not game and not entry.run.overrides
        if entry.sidecar.scheme == "fp32" and selected and run_id not in results:
            results[run_id] = measure(entry.artifact, args.episodes)
            write_text(RESULTS, json.dumps(results, indent=1) + "\n")
            print(run_id, {n: round(v["head_error"], 2) for n, v in results[run_id].items()})
    for name in VARIANTS:
        ratios = [
            run[name]["head_error"] / run["per tensor"]["head_error"]
            for run in results.values()
            if name in run
        ]
        print(
            f"{name}: {statistics.median(ratios):.2f} times the head's error of per tensor, median"
        )


if __name__ == "__main__":
    main()
