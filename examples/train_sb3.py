"""Train by an algorithm of Stable-Baselines3 with its defaults, for from_sb3.py to convert.

    pip install stable-baselines3==2.9.2 Box2D pygame pybullet_envs_gymnasium==0.6.0
    python train_sb3.py PPO LunarLander-v3 500000 ppo.zip

It runs in an environment of its own, as from_sb3.py does; docs/results/sb3.md shows what became of
two policies. The same command on the same machine trains the same policy.
"""

import argparse
import contextlib

import pybullet_envs_gymnasium  # noqa: F401
import stable_baselines3 as sb3
import torch


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("algorithm", choices=["A2C", "DDPG", "DQN", "PPO", "SAC", "TD3"])
    parser.add_argument("env", metavar="ID", help="Gymnasium id, also of PyBullet's robots")
    parser.add_argument("steps", type=int)
    parser.add_argument("output", help="model.zip")
    args = parser.parse_args()
    torch.set_num_threads(1)  # For networks of this size faster than several.
    model = getattr(sb3, args.algorithm)("MlpPolicy", args.env, seed=0, verbose=1)
    with contextlib.suppress(KeyboardInterrupt):  # What was learned until then is kept.
        model.learn(args.steps)
    model.save(args.output)


if __name__ == "__main__":
    main()
