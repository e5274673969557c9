"""Compare ways to make int8 files of games on states of sticky games, which no evaluation plays.

python benchmarks/int8_games.py [--states N] [FILE ...]
"""

import argparse
import json
import statistics
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from quarl_tf import environments
from quarl_tf.environments.acting import ticks
from quarl_tf.export import auto, integer, preparation, ptq
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
    "BeamRiderNoFrameskip-v4/a2c/s0-bbfa8fa5/fp32.tflite",
    "SpaceInvadersNoFrameskip-v4/a2c/s0-bbfa8fa5/fp32.tflite",
    "BreakoutNoFrameskip-v4/ppo/s0-aa368bfb/fp16.tflite",
    "MsPacmanNoFrameskip-v4/ppo/s0-93fd9ade/fp16.tflite",
    "PongNoFrameskip-v4/dqn/s0-e062e97a/fp32.tflite",
    "SeaquestNoFrameskip-v4/dqn/s0-23afa1db/fp16.tflite",
    "BeamRiderNoFrameskip-v4/dqn/s0-23afa1db/fp16.tflite",
)

#: Share of random actions in rollouts, share of images whose activations are in range, and the
#: strength of smoothing with its least peak.
VARIANTS = {
    "greedy rollouts, all in range": (0.0, 1.0, (0.75, 0.5)),
    "greedy rollouts": (0.0, 0.99, (0.75, 0.5)),
    "exploring rollouts, all in range": (0.05, 1.0, (0.75, 0.5)),
    "exploring rollouts": (0.05, 0.99, (0.75, 0.5)),
    "exploring rollouts, smoother (int8)": (0.05, 0.99, (0.8, 0.3)),
}

#: As at the end of a training.
_GAMES, _CALIBRATION = 8, 2000


def sticky_states(policy: Policy, count: int) -> NDArray[np.uint8]:
    """Return states [count, ...] that a policy visits in six games with sticky actions."""
    states = []
    with closing(environments.make(policy.sidecar.env_id, sticky=0.25)) as env:
        for game in range(6):
            observation, _ = env.reset(seed=environment_seed(0, "recipe of games", game))
            for step, tick in enumerate(ticks(env, policy.act, observation)):
                if step % 5 == game % 5:
                    states.append(np.array(tick.observations))
                if tick.done:
                    break
    return np.array(states)[np.linspace(0, len(states) - 1, count).astype(int)]


def calibration(policy: Policy, exploring: float) -> NDArray[np.uint8]:
    """Return observations [n, ...] of rollouts in which a share of the actions is random."""
    env_id, seed = policy.sidecar.env_id, environment_seed(0, "calibration of games")
    with (
        patch.object(rollout, "_EXPLORING", exploring),
        closing(environments.make_vector(env_id, _GAMES, once=True)) as envs,
    ):
        acting = rollout.rollout(
            envs, lambda batch, _: np.array([*map(policy.act, batch)]), seed, _CALIBRATION
        )
    return acting.observations


def measure(path: Path, count: int) -> dict[str, float]:
    """Return the percentage of states in which each variant acts otherwise than the float file."""
    policy = Policy.load(path)
    content, choices = flatbuffer.read(path), policy.sidecar.num_actions
    if "float16" in policy.sidecar.weight_dtypes:
        content = in_float32(content)
    states, scheme = sticky_states(policy, count), Scheme.parse("int8")
    reference = auto.heads(content, policy, states)
    observations = {share: calibration(policy, share) for share in (0.0, 0.05)}
    differing = {}
    for name, (exploring, usual, (migration, quietest)) in VARIANTS.items():
        with (
            patch.object(integer, "_USUAL", usual),
            patch.multiple(preparation, _MIGRATION=migration, _QUIETEST=quietest),
        ):
            copy = ptq.quantized(content, scheme, observations[exploring], choices)
        heads = auto.heads(copy, policy, states)
        differing[name] = 100 * (1 - actions.agreement(heads, reference, choices))
    return differing


def main() -> None:
    """Measure what is not measured yet; print the mean of each variant over the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", default=FILES, help="below tflite_models/")
    parser.add_argument("--states", type=int, default=1000)
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in args.files:
        if name not in results:
            results[name] = measure(MODELS / name, args.states)
            write_text(RESULTS, json.dumps(results, indent=1) + "\n")
            print(name, {k: round(v, 2) for k, v in results[name].items()})
    for name in VARIANTS:
        mean = statistics.fmean(values[name] for values in results.values())
        print(f"{name}: another action in {mean:.2f} % of the states, mean")


if __name__ == "__main__":
    main()
