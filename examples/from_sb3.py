"""Convert a policy of Stable-Baselines3 to a float .tflite file that `quarl adopt` takes.

    pip install stable-baselines3==2.9.2 litert-torch==0.10
    python from_sb3.py model.zip policy.tflite --env CartPole-v1 [--vecnormalize stats.pkl]
    quarl adopt policy.tflite --name mine

It runs in the environment that the policy was trained in; quarl_tf is not needed there. Policies of
PPO, A2C, DQN, DDPG, TD3 and SAC, on vectors and images, are converted whole: VecNormalize's
statistics, the scaling of bytes, the order of an image's axes (Stable-Baselines3's channels come
first, the file's last), and the squashing and scaling of actions are inside. The file is compared
with `predict(deterministic=True)` on 1,000 observations before it is written; policy.json beside it
says what it is.

A zip of Stable-Baselines3 and the statistics of VecNormalize can hold pickles, which run any code
when they are loaded: convert only files that you trust.
"""

import argparse
import hashlib
import json
import pickle
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import litert_torch
import numpy as np
import stable_baselines3 as sb3
import torch
from ai_edge_litert.interpreter import Interpreter
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.policies import BasePolicy

#: What the parameters of an algorithm have that those of others lack; DDPG is a TD3.
ALGORITHMS = {
    "clip_range": sb3.PPO,
    "exploration_final_eps": sb3.DQN,
    "target_entropy": sb3.SAC,
    "target_policy_noise": sb3.TD3,
    "gae_lambda": sb3.A2C,
}

OBSERVATIONS = 1000

#: Largest difference of an action from predict's, as part of its range; and how far apart the best
#: two logits or values must be for their order to count.
TOLERANCE = 1e-4


class Head(torch.nn.Module):
    """From an observation, as the environment gives it, to logits, Q-values or an action."""

    def __init__(self, model: BaseAlgorithm, image: bool, statistics: Any) -> None:
        """Take a model, whether it sees images, and the statistics of its VecNormalize."""
        super().__init__()
        self.policy, self.image, self.clip = model.policy, image, None
        self.kind = next(name for name, kind in ALGORITHMS.items() if isinstance(model, kind))
        self.squashed = model.policy.squash_output
        if statistics is not None and statistics.norm_obs:
            self.clip = float(statistics.clip_obs)
            deviation = np.sqrt(statistics.obs_rms.var + statistics.epsilon)
            self.register_buffer("mean", torch.tensor(statistics.obs_rms.mean, dtype=torch.float32))
            self.register_buffer("factor", torch.tensor(1 / deviation, dtype=torch.float32))
        if isinstance(model.action_space, spaces.Box):
            low, high = (
                torch.tensor(end.ravel(), dtype=torch.float32)
                for end in (model.action_space.low, model.action_space.high)
            )
            self.register_buffer("low", low)
            self.register_buffer("scale", (high - low) / 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Compute the head of an observation [1, ...]."""
        if self.image:
            observation = observation.permute(0, 3, 1, 2)
        if self.clip is not None:
            observation = ((observation - self.mean) * self.factor).clamp(-self.clip, self.clip)
        policy = self.policy
        if self.kind == "exploration_final_eps":
            return policy.q_net(observation)
        if self.kind == "target_policy_noise":
            head = policy.actor(observation)
        elif self.kind == "target_entropy":
            head = torch.tanh(policy.actor.get_action_dist_params(observation)[0])
        else:
            # An actor-critic's own method returns the features of both, if these are not shared.
            features = BasePolicy.extract_features(
                policy, observation, policy.pi_features_extractor
            )
            head = policy.action_net(policy.mlp_extractor.forward_actor(features))
            head = torch.tanh(head) if self.squashed else head
        return self.low + (head + 1) * self.scale if self.squashed else head


def load(path: Path) -> BaseAlgorithm:
    """Load a model, its algorithm told by its parameters."""
    with zipfile.ZipFile(path) as file:
        parameters = json.loads(file.read("data"))
    for name, algorithm in ALGORITHMS.items():
        if name in parameters:
            return algorithm.load(path, device="cpu")
    sys.exit(f"{path} is of no algorithm among PPO, A2C, DQN, DDPG, TD3 and SAC.")


def describe(model: BaseAlgorithm, image: bool, env_id: str | None) -> dict[str, Any]:
    """Return what `quarl adopt` reads: the head, what goes in, and the bounds of actions."""
    space, actions = model.observation_space, model.action_space
    shape = (*space.shape[1:], space.shape[0]) if image else space.shape
    description = {
        "head": "action" if isinstance(actions, spaces.Box) else "logits",
        "observation_shape": list(shape),
        "observation_dtype": "uint8" if space.dtype == np.uint8 else "float32",
    }
    if env_id is not None:
        description["env_id"] = env_id
    if isinstance(actions, spaces.Box):
        ends = {"action_low": actions.low, "action_high": actions.high}
        description |= {name: end.ravel().tolist() for name, end in ends.items()}
        if hasattr(model.policy, "log_std") and not model.use_sde:
            description["action_std"] = model.policy.log_std.exp().tolist()
    elif isinstance(actions, spaces.MultiDiscrete):
        description["num_actions"] = actions.nvec.tolist()
    elif isinstance(actions, spaces.Discrete):
        description["num_actions"] = int(actions.n)
    else:
        sys.exit(f"Actions must be a Box, Discrete or MultiDiscrete. Received: {actions}")
    if isinstance(model, sb3.DQN):
        description["head"] = "q_values"
    return description


def observations(space: spaces.Box, statistics: Any) -> np.ndarray:
    """Draw observations [n, ...] as Stable-Baselines3 has them."""
    random = np.random.default_rng(0)
    if space.dtype == np.uint8:
        return random.integers(0, 256, (OBSERVATIONS, *space.shape), dtype=np.uint8)
    drawn = random.normal(size=(OBSERVATIONS, *space.shape))
    if statistics is not None and statistics.norm_obs:
        drawn = statistics.obs_rms.mean + 3 * drawn * np.sqrt(statistics.obs_rms.var)
    return np.clip(drawn, space.low, space.high).astype(np.float32)


def check(
    content: bytes, model: BaseAlgorithm, drawn: np.ndarray, statistics: Any, image: bool
) -> tuple[str, bool]:
    """Compare a file with `predict`; return how far it is off, and whether that is too far."""
    interpreter = Interpreter(model_content=content)
    interpreter.allocate_tensors()
    (source,), (target,) = interpreter.get_input_details(), interpreter.get_output_details()
    normalised = drawn if statistics is None else statistics.normalize_obs(drawn)
    expected, _ = model.predict(normalised, deterministic=True)
    heads = []
    for observation in np.moveaxis(drawn, 1, -1) if image else drawn:
        interpreter.set_tensor(source["index"], observation[None])
        interpreter.invoke()
        heads.append(interpreter.get_tensor(target["index"])[0])
    heads = np.array(heads)
    if not np.isfinite(heads).all():
        return "a head that is not finite", True
    if not isinstance(model.action_space, spaces.Box):
        choices = np.atleast_1d(getattr(model.action_space, "nvec", heads.shape[1]))
        differing = wrong = 0
        parts = np.split(heads, np.cumsum(choices)[:-1], axis=1)
        for values, action in zip(parts, expected.reshape(OBSERVATIONS, -1).T, strict=True):
            second, best = np.sort(values, axis=1)[:, -2:].T
            differs = values.argmax(axis=1) != action
            differing += differs.sum()
            wrong += (differs & (best - second > TOLERANCE * np.abs(heads).max())).sum()
        return f"{differing} other actions", bool(wrong)
    low, high = model.action_space.low.ravel(), model.action_space.high.ravel()
    expected = expected.reshape(OBSERVATIONS, -1)
    difference = (np.abs(np.clip(heads, low, high) - expected) / (high - low)).max()
    return f"largest difference {difference:.1e} of the range", bool(difference > TOLERANCE)


def main() -> None:
    """Convert, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="model.zip")
    parser.add_argument("output", type=Path, help="policy.tflite")
    parser.add_argument("--env", metavar="ID", help="Gymnasium id of its environment")
    parser.add_argument("--vecnormalize", type=Path, metavar="FILE", help="its statistics")
    about = "the environment itself, not Stable-Baselines3, puts the channels of images first"
    parser.add_argument("--channels-first", action="store_true", help=about)
    args = parser.parse_args()
    for path in filter(None, (args.model, args.vecnormalize)):
        if not path.is_file():
            sys.exit(f"There is no such file: {path}")
    if not zipfile.is_zipfile(args.model) or not args.output.parent.is_dir():
        sys.exit(f"A model is a whole .zip, and the output's folder exists. Received: {args}")
    model = load(args.model)
    statistics = None
    if args.vecnormalize is not None:
        statistics = pickle.loads(args.vecnormalize.read_bytes())
    elif isinstance(model, sb3.PPO | sb3.A2C) and model._last_original_obs is not None:
        sys.exit("The policy was trained in a VecNormalize; give its statistics (--vecnormalize).")
    space = model.observation_space
    if not isinstance(space, spaces.Box):
        sys.exit(f"Observations must be a Box. Received: {space}")
    normalises = statistics is not None and statistics.norm_obs
    if normalises and statistics.observation_space.shape != space.shape:
        sys.exit(f"These are the statistics of another space: {statistics.observation_space}")
    image = len(space.shape) == 3 and space.dtype == np.uint8 and not args.channels_first
    description = describe(model, image, args.env)
    dtype = getattr(torch, description["observation_dtype"])
    example = torch.zeros((1, *description["observation_shape"]), dtype=dtype)
    model.policy.set_training_mode(False)
    head = Head(model, image, statistics).eval()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "policy.tflite")
        litert_torch.convert(head, (example,)).export(str(file))
        content = file.read_bytes()
    drawn = observations(space, statistics)
    outcome, too_far = check(content, model, drawn, statistics, image)
    if too_far:
        sys.exit(f"The file is not the policy: {outcome} on {OBSERVATIONS} observations.")
    description["sha256"] = hashlib.sha256(content).hexdigest()
    args.output.write_bytes(content)
    args.output.with_suffix(".json").write_text(json.dumps(description, indent=1) + "\n")
    print(f"{args.output}: {len(content):,} bytes, {outcome} on {OBSERVATIONS} observations")


if __name__ == "__main__":
    main()
