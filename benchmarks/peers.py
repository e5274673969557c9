"""Measure how fast Stable-Baselines3 or SBX trains, or how soon it solves a task.

The peers' side of `training_throughput.py` and of `time_to_solve.py`. Runs in the environment that
`make peers` makes, in a fresh process for every measurement: a request as JSON is the one argument,
the last line printed is the result as JSON.

For `training_throughput.py` our own preset is translated here, so that no hyper-parameter can
differ by an oversight. What does differ:

* Neither normalises observations; SBX's DQN and DDPG clip no gradients, nor does SB3's DDPG.
* RMSprop's epsilon in A2C stands beside its root (SB3), ours under it.
* Their DQN has the Huber loss, ours the squared; SB3 clips its whole gradient, ours each
  variable's.
* Their Ornstein-Uhlenbeck noise moves in steps of 0.01, ours of 1; both draw as many numbers.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, metadata
from typing import Any

_PACKAGES = {"sb3": "stable_baselines3", "sbx": "sbx"}
_VERSIONS = ("stable-baselines3", "sbx-rl", "torch", "jax", "gymnasium", "ale-py", "numpy")

#: Names of the peers' arguments, and of our preset's values that they take as they are.
_EVERYWHERE = {"learning_rate": "learning_rate", "gamma": "discount"}
_OFF_POLICY = {
    name: name for name in ("batch_size", "buffer_size", "learning_starts", "gradient_steps")
}
_ON_POLICY = {
    "gae_lambda": "gae_lambda",
    "ent_coef": "entropy_coefficient",
    "vf_coef": "value_coefficient",
    "max_grad_norm": "gradient_clip",
    "normalize_advantage": "normalize_advantages",
}
_NAMES: dict[str, dict[str, str]] = {
    "a2c": _ON_POLICY,
    "ddpg": {**_OFF_POLICY, "tau": "target_tau"},
    "dqn": {
        **_OFF_POLICY,
        "n_steps": "n_step",
        # The same at the start: exploration does not last into what is measured.
        "exploration_initial_eps": "exploration_final",
        "exploration_final_eps": "exploration_final",
    },
    "ppo": dict(_ON_POLICY, batch_size="minibatch_size", n_epochs="epochs", clip_range="clip"),
}


def arguments(library: str, algo: str, preset: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a preset of ours into the arguments of a peer's algorithm."""
    names = {**_EVERYWHERE, **_NAMES[algo]}
    translated = {theirs: preset[ours] for theirs, ours in names.items()}
    # Both count in steps of the whole vector environment.
    ticks = preset["train_frequency"] // preset["num_envs"]
    translated["train_freq" if algo in ("ddpg", "dqn") else "n_steps"] = ticks
    if algo == "dqn":
        # Theirs counts environment steps, ours gradient steps.
        steps = preset["target_update"] * preset["train_frequency"] // preset["gradient_steps"]
        translated["target_update_interval"] = steps
        if library == "sb3":
            translated["max_grad_norm"] = preset["gradient_clip"]
    if algo == "ddpg" and library == "sbx":
        translated["qf_learning_rate"] = preset["critic_learning_rate"]
    if preset["network"] == "nature":
        return {"policy": "CnnPolicy", **translated}
    network = {"net_arch": list(preset["network"])}
    return {"policy": "MlpPolicy", "policy_kwargs": network, **translated}


def rate(stamps: Sequence[tuple[int, float]], warm_up: int) -> float:
    """Return environment steps per second after the warm-up.

    Args:
        stamps: Environment steps so far and seconds, at the end of every rollout.
        warm_up: Environment steps not to count; the clock starts at the first stamp that has them.
    """
    first = next(stamp for stamp in stamps if stamp[0] >= warm_up)
    last = stamps[-1]
    return (last[0] - first[0]) / (last[1] - first[1])


def environment(env_id: str, num_envs: int, seed: int, *, processes: bool = False) -> Any:
    """Make the vector environment as rl-zoo makes it."""
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack

    if not _is_game(env_id):
        return make_vec_env(env_id, num_envs, seed)
    kind = SubprocVecEnv if processes else DummyVecEnv
    # Gymnasium imports the module before the colon, which registers the games, in every process.
    games = make_atari_env(f"ale_py:{env_id}", num_envs, seed, vec_env_cls=kind)
    return VecFrameStack(games, 4)


def _is_game(env_id: str) -> bool:
    return "NoFrameskip" in env_id


def _noise(envs: Any, deviation: float) -> Any:
    import numpy as np
    from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise

    zeros = np.zeros(envs.action_space.shape)
    return OrnsteinUhlenbeckActionNoise(zeros, deviation + zeros)


def _algorithm(library: str, algo: str) -> Any:
    return getattr(import_module(_PACKAGES[library]), algo.upper())


def measure(request: Mapping[str, Any]) -> float:
    """Train and return environment steps per second."""
    import torch
    from stable_baselines3.common.callbacks import BaseCallback

    class Stamps(BaseCallback):  # type: ignore[misc]
        """Reads the clock between acting and learning: both are then whole in what is counted."""

        def __init__(self) -> None:
            super().__init__()
            self.stamps: list[tuple[int, float]] = []

        def _on_rollout_end(self) -> None:
            self.stamps.append((self.num_timesteps, time.perf_counter()))

        def _on_step(self) -> bool:
            return True

    torch.set_num_threads(request["threads"])
    preset, seed = request["preset"], request["seed"]
    envs = environment(request["env_id"], preset["num_envs"], seed, processes=request["processes"])
    options = arguments(request["library"], request["algo"], preset)
    if request["algo"] == "ddpg":
        options["action_noise"] = _noise(envs, preset["noise"])
    algorithm = _algorithm(request["library"], request["algo"])
    model = algorithm(env=envs, seed=seed, device="cpu", **options)
    clock = Stamps()
    model.learn(request["warm_up"] + request["steps"], callback=clock)
    envs.close()
    return rate(clock.stamps, request["warm_up"])


def zoo_arguments(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an algorithm's arguments of an entry of the zoo: `lin_x` falls from x to 0."""
    return {
        name: _falling(float(value[4:])) if str(value).startswith("lin_") else value
        for name, value in entry.items()
        if name not in ("n_envs", "n_timesteps", "noise")
    }


def _falling(first: float) -> Callable[[float], float]:
    return lambda remaining: remaining * first


def solve(request: Mapping[str, Any]) -> dict[str, Any]:
    """Train until greedy episodes return the goal, or to the limit of seconds.

    Seconds count from when the request was made.
    """
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.evaluation import evaluate_policy

    env_id, seed, zoo = request["env_id"], request["seed"], request["zoo"]
    # Selection seeds are far from those of the training and of the confirmation.
    look_envs = environment(env_id, min(request["look"], 8), 10_000 + seed)

    class Until(BaseCallback):  # type: ignore[misc]
        """Looks every so many steps, and ends the training at the goal or out of time."""

        def __init__(self) -> None:
            super().__init__()
            self.due, self.seconds, self.steps = request["every"], None, None
            self.out_of_time = False

        def _on_step(self) -> bool:
            if self.num_timesteps < self.due:
                return True
            self.due += request["every"]
            mean_return, _ = evaluate_policy(self.model, look_envs, request["look"])
            seconds, limit = time.time() - request["started"], request["limit"]
            self.out_of_time = limit is not None and seconds > limit
            if mean_return >= request["goal"] and not self.out_of_time:
                self.seconds, self.steps = seconds, self.num_timesteps
            return self.seconds is None and not self.out_of_time

    envs = environment(env_id, zoo["n_envs"], seed)
    options = zoo_arguments(zoo)
    if "noise" in zoo:
        options["action_noise"] = _noise(envs, zoo["noise"])
    policy = "CnnPolicy" if _is_game(env_id) else "MlpPolicy"
    algorithm = _algorithm(request["library"], request["algo"])
    model = algorithm(policy, envs, seed=seed, device="cpu", **options)
    until = Until()
    model.learn(zoo["n_timesteps"], callback=until)
    confirmation_envs = environment(env_id, 8, 20_000 + seed)
    confirmed, _ = evaluate_policy(model, confirmation_envs, request["confirmed"])
    for vector in (envs, look_envs, confirmation_envs):
        vector.close()
    found = {"seconds": until.seconds, "steps": until.steps, "confirmed": float(confirmed)}
    return found | {"out_of_time": until.out_of_time}


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.argv[1])
    answer = solve(request) if "goal" in request else {"steps_per_second": measure(request)}
    print(json.dumps(answer | {"versions": {name: metadata.version(name) for name in _VERSIONS}}))


if __name__ == "__main__":
    main()
