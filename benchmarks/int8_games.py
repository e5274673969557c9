"""Compare ways to make int8 files of games on states of sticky games, which no evaluation plays.

python benchmarks/int8_games.py [FILE ...]
"""

import argparse
import json
import statistics
from collections.abc import Iterable
from contextlib import ExitStack, closing
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from quarl_tf import environments
from quarl_tf.environments.acting import ticks
from quarl_tf.export import auto, calibration, integer, ptq
from quarl_tf.export.graph import in_float32
from quarl_tf.foundation.files import write_text
from quarl_tf.foundation.seeding import environment_seed
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import Scheme, actions
from quarl_tf.training import rollout

RESULTS = Path("benchmarks/int8_games.json")
MODELS = Path("tflite_models")

#: Each algorithm, and games of all kinds; fp32 where it is kept, else fp16.
FILES = (
    "QbertNoFrameskip-v4/dqn/s0-23afa1db/fp16.tflite",
    "BreakoutNoFrameskip-v4/ppo/s0-aa368bfb/fp16.tflite",
    "SeaquestNoFrameskip-v4/dqn/s0-23afa1db/fp16.tflite",
    "BeamRiderNoFrameskip-v4/a2c/s0-bbfa8fa5/fp16.tflite",
    "SpaceInvadersNoFrameskip-v4/a2c/s0-bbfa8fa5/fp16.tflite",
    "PongNoFrameskip-v4/dqn/s0-4b456516/fp32.tflite",
    "MsPacmanNoFrameskip-v4/ppo/s0-93fd9ade/fp16.tflite",
)

#: What a variant changes in `export.integer`.
VARIANTS: dict[str, dict[str, Any]] = {
    "ranges of all images": {"_PARTS": (1.0,)},
    "a head of 8 bits": {"has_two_stages": lambda _: False},
    "int8": {},
    "int8, rollouts of quarl quantize": {},
}

#: As at the end of a training by PPO or A2C, and states to compare in.
_GAMES, _CALIBRATION = 8, 2000
_STATES = 1000


def sticky_states(policy: Policy) -> NDArray[np.uint8]:
    """Return states [n, ...] that a policy visits in six games with sticky actions."""
    states = []
    with closing(environments.make(policy.sidecar.env_id, sticky=0.25)) as env:
        for game in range(6):
            observation, _ = env.reset(seed=environment_seed(0, "recipe of games", game))
            for step, tick in enumerate(ticks(env, policy.act, observation)):
                if step % 5 == game % 5:
                    states.append(np.array(tick.observations))
                if tick.done:
                    break
    return np.array([states[i] for i in np.linspace(0, len(states) - 1, _STATES).astype(int)])


def observed(policy: Policy, *, by_quantize: bool) -> NDArray[np.uint8]:
    """Return observations [n, ...] of rollouts of a training, or of those of `quarl quantize`."""
    if by_quantize:
        return calibration.observations(policy)
    env_id, seed = policy.sidecar.env_id, environment_seed(0, "calibration of games")
    with closing(environments.make_vector(env_id, _GAMES, once=True)) as envs:
        acting = rollout.rollout(
            envs, lambda batch, _: np.array([*map(policy.act, batch)]), seed, _CALIBRATION
        )
    return acting.observations


def measure(path: Path, names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return by variant how often it acts otherwise than the float file, and what that loses.

    In percent of the states and, by the head of the float file, of the head's deviation: a rare
    mistake may weigh more than many between actions of nearly the same value.
    """
    policy = Policy.load(path)
    content, choices = flatbuffer.read(path), policy.sidecar.num_actions
    if "float16" in policy.sidecar.weight_dtypes:
        content = in_float32(content)
    states, scheme = sticky_states(policy), Scheme.parse("int8")
    reference = auto.heads(content, policy, states)
    scale = actions.centred(reference, choices).std()
    observations = cache(partial(observed, policy))  # Variants share their rollouts.
    results = {}
    for name in names:
        with ExitStack() as stack:
            for key, value in VARIANTS[name].items():
                stack.enter_context(patch.object(integer, key, value))
            images = observations(by_quantize=name.endswith("quantize"))
            copy = ptq.quantized(content, scheme, images, choices)
        chosen = auto.heads(copy, policy, states).argmax(axis=1)
        losses = reference.max(axis=1) - reference[np.arange(len(states)), chosen]
        differing = np.mean(chosen != reference.argmax(axis=1))
        results[name] = {
            "differing_percent": float(100 * differing),
            "loss_percent": float(100 * losses.mean() / scale),
        }
    return results


def main() -> None:
    """Measure what is not measured yet; print the mean of each variant over the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", default=FILES, help="below tflite_models/")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in args.files:
        known = results.setdefault(name, {})
        if missing := [variant for variant in VARIANTS if variant not in known]:
            known |= measure(MODELS / name, missing)
            write_text(RESULTS, json.dumps(results, indent=1) + "\n")
            print(name, results[name], flush=True)
    for name in VARIANTS:
        rows = [results[file][name] for file in args.files]
        share, loss = (statistics.fmean(row[key] for row in rows) for key in rows[0])
        print(f"{name}: another action in {share:.2f} % of the states, a loss of {loss:.3f} %")


if __name__ == "__main__":
    main()
