"""Replay flatbuffers in their environment: whole episodes, unclipped returns.

What is left to chance follows from the episode's seed (`spec.Chance`), so that all schemes meet
the same noise on the same episode. Each kind is kept in files of its own.
"""

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from quarl_tf import environments
from quarl_tf.environments.acting import Episode, play
from quarl_tf.foundation import provenance
from quarl_tf.foundation.display import Update
from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.seeding import environment_seed, evaluation_seeds, generator
from quarl_tf.runtime.policy import Policy, percentiles, time_calls
from quarl_tf.spec import BASELINE, GREEDY, Chance, Run
from quarl_tf.store.records import Evaluation, Sidecar
from quarl_tf.store.state import baseline, evaluation_flaw, protocol
from quarl_tf.store.workspace import evaluation_path, reference_path

#: Episodes on which a policy is compared with its fp32 reference.
AGREEMENT_EPISODES = 10

#: Continuous actions agree if no component differs by more than this part of its range.
AGREEMENT_TOLERANCE = 0.01

#: Observations kept for measuring the latency; 1000 Atari frames take 28 MB.
_LATENCY_OBSERVATIONS = 1000

_Act = Callable[[Any], Any]
_Fact = TypeVar("_Fact")


def evaluate(
    artifact: Path,
    seeds: Sequence[int],
    chance: Chance = GREEDY,
    *,
    reference: Path | None = None,
    update: Update = lambda *_: None,
) -> Evaluation:
    """Play one whole episode per seed with a flatbuffer, by its best actions or with chance.

    `update` is called after every episode. Of a `reference`, the run's fp32 flatbuffer, actions are
    compared on the states that it visits itself, so that an early difference does not lead to other
    states and count again and again.

    Raises:
        UsageError: The policy is no distribution to draw from.
        QuarlError: A file is damaged, the reference is of another network, the environment is not
            the one the policy was made for, or a return is not finite.
    """
    policy = Policy.load(artifact)
    sidecar = policy.sidecar
    guide = None if reference is None else _load_reference(reference, sidecar)
    seen: list[NDArray[Any]] = []
    agreement = None
    with closing(matching_env(sidecar, chance)) as env:
        episodes = _play_all(env, policy, seeds, chance, seen, update)
        if guide is not None:
            states = sum(episode.length for episode in episodes[:AGREEMENT_EPISODES])
            agreement = {"fraction": 1.0, "states": states}
            if guide.sidecar.sha256 != sidecar.sha256:
                agreement = _agreement(env, guide, policy, seeds[:AGREEMENT_EPISODES], chance)
    return _evaluation(
        episodes,
        run_id=sidecar.run_id,
        env_id=sidecar.env_id,
        scheme=sidecar.scheme,
        artifact_sha256=sidecar.sha256,
        protocol=protocol(sidecar.env_id, chance.actions, chance.sticky),
        seeds=list(seeds),
        latency_us=percentiles(time_calls(policy, seen, random=_draws(seeds[0], chance))),
        reference_sha256=None if guide is None else guide.sidecar.sha256,
        agreement=agreement,
    )


def _evaluation(episodes: Sequence[Episode], **facts: Any) -> Evaluation:
    return Evaluation(
        returns=[episode.result for episode in episodes],
        lengths=[episode.length for episode in episodes],
        starts=_listed([episode.start for episode in episodes]),
        successes=_listed([episode.success for episode in episodes]),
        ties=sum(episode.ties for episode in episodes),
        versions=provenance.package_versions(),
        processor=provenance.processor(),
        sources=provenance.sources(),
        **facts,
    )


def require_playable(artifact: Path, chance: Chance = GREEDY) -> None:
    """Refuse, by its errors and without playing, what `evaluate` would refuse."""
    policy = Policy.load(artifact)
    with closing(matching_env(policy.sidecar, chance)) as env:
        _actor(policy, 0, chance)(env.reset(seed=0)[0])


def evaluate_random(env_id: str, run_id: str, seeds: Sequence[int]) -> Evaluation:
    """Play one whole episode per seed with random actions, the zero of normalised errors.

    Errors are those of `evaluate`.
    """
    episodes = []
    with closing(environments.make(env_id)) as env:
        for seed in seeds:
            # With the environment's own seed, actions would follow its starting state.
            env.action_space.seed(environment_seed(seed, "random actions"))
            observation, _ = env.reset(seed=seed)
            episodes.append(play(env, lambda _: env.action_space.sample(), observation, seed))
    return _evaluation(
        episodes,
        run_id=run_id,
        env_id=env_id,
        scheme=BASELINE,
        artifact_sha256=None,
        protocol=protocol(env_id, "random"),
        seeds=list(seeds),
        latency_us=None,
        reference_sha256=None,
        agreement=None,
    )


def evaluate_and_save(
    artifact: Path, episodes: int, update: Update = lambda *_: None, *, chance: Chance = GREEDY
) -> Evaluation:
    """Evaluate a flatbuffer and, for a plain training, the random baseline; save both beside it.

    Seeds follow from the run's, and the reference is the `reference_path`, if it exists. What was
    saved for these very bytes, rules and reference is returned as it is, if it has these episodes
    or more. Errors are those of `evaluate`, and a UsageError without an episode.
    """
    if episodes < 1:
        raise UsageError(f"An evaluation needs one episode or more. Received: episodes={episodes}")
    sidecar = Policy.load(artifact).sidecar
    run = Run.from_dict(sidecar.run)
    seeds = evaluation_seeds(run.seed, episodes)
    reference = reference_path(artifact, sidecar)
    evaluation = _saved(artifact, sidecar, seeds, chance)
    if evaluation is None:
        guide = reference if reference.exists() else None
        evaluation = evaluate(artifact, seeds, chance, reference=guide, update=update)
        evaluation.save(evaluation_path(artifact, chance))
    # Last, so that a policy that is no distribution is refused at once. It lies beside fp32.
    beside = artifact.with_name(f"{BASELINE}.tflite")
    if reference.parent == artifact.parent and baseline(beside, run, seeds) is None:
        evaluate_random(sidecar.env_id, sidecar.run_id, seeds).save(evaluation_path(beside))
    return evaluation


def _saved(
    artifact: Path, sidecar: Sidecar, seeds: Sequence[int], chance: Chance
) -> Evaluation | None:
    """Return what was saved; anything that does not fit, or is damaged, is cheap to redo."""
    with suppress(QuarlError):
        evaluation = Evaluation.load(evaluation_path(artifact, chance))
        reference = reference_path(artifact, sidecar)
        if evaluation_flaw(evaluation, sidecar, reference, seeds, chance) is None:
            return evaluation
    return None


def _listed(facts: Sequence[_Fact | None]) -> list[_Fact] | None:
    known = [fact for fact in facts if fact is not None]
    return known if len(known) == len(facts) else None


def _load_reference(path: Path, sidecar: Sidecar) -> Policy:
    reference = Policy.load(path)
    same_run = reference.sidecar.run_id == sidecar.run_id
    if same_run and reference.sidecar.network_sha256 != sidecar.network_sha256:
        raise QuarlError(
            "Actions can be compared only with a policy of the same network; export both again "
            f"(quarl export {sidecar.run_id} --schemes fp32,{sidecar.scheme}). Received: "
            f"{path} of another network than {sidecar.scheme}"
        )
    return reference


def matching_env(sidecar: Sidecar, chance: Chance = GREEDY, **options: Any) -> gym.Env[Any, Any]:
    """Make the environment, once its spaces are those the policy was made for."""
    for name, value in environments.env_spec(sidecar.env_id).facts.items():
        expected = getattr(sidecar, name)
        if value != expected:
            raise QuarlError(
                f"{sidecar.env_id} is not the environment that {sidecar.run_id} was trained in; "
                "install the version its sidecar names, or train again. Received: "
                f"{name}={value}, the policy's is {expected}"
            )
    environments.require_chance(sidecar.env_id, chance)
    return environments.make(sidecar.env_id, sticky=chance.sticky, **options)


def _draws(seed: int, chance: Chance) -> np.random.Generator | None:
    return generator(seed, "sampled actions") if chance.kind == "sampled" else None


def _actor(policy: Policy, seed: int, chance: Chance) -> _Act:
    """Return what acts in the episode of a seed."""
    if (draws := _draws(seed, chance)) is not None:
        return partial(policy.sample, random=draws)
    if chance.kind != "epsilon":
        return policy.act
    lots = generator(seed, "random actions")

    def act(observation: NDArray[Any]) -> Any:
        lot, other = lots.random(), lots.integers(policy.sidecar.num_actions or 1)
        return other if lot < chance.probability else policy.act(observation)

    return act


def _play_all(
    env: gym.Env[Any, Any],
    policy: Policy,
    seeds: Sequence[int],
    chance: Chance,
    seen: list[NDArray[Any]],
    update: Update,
) -> list[Episode]:
    """Play the episodes of an evaluation; `seen` takes the first observations met.

    A game has 30 starts and no chance: greedy episodes from one start are one, played once.
    """
    episodes: list[Episode] = []
    by_start: dict[int | None, Episode] = {}

    def act(observation: NDArray[Any], choose: _Act) -> Any:
        if len(seen) < _LATENCY_OBSERVATIONS:
            seen.append(np.array(observation))  # Environments may reuse theirs.
        return choose(observation)

    for done, seed in enumerate(seeds, start=1):
        observation, info = env.reset(seed=seed)
        start = info.get(environments.START)
        # With chance no two episodes are alike.
        episode = by_start.get(start) if chance == GREEDY else None
        if episode is None:
            ties = policy.ties
            choose = _actor(policy, seed, chance)
            episode = play(env, partial(act, choose=choose), observation, seed)
            episode = episode._replace(ties=policy.ties - ties, start=start)
        if start is not None:
            by_start[start] = episode
        episodes.append(episode)
        update(done, len(seeds))
    return episodes


def _agreement(
    env: gym.Env[Any, Any], guide: Policy, policy: Policy, seeds: Sequence[int], chance: Chance
) -> dict[str, float]:
    """Compare greedy actions on the states that the guide visits, with this chance."""
    # Discrete actions have no range: they agree if they are equal.
    low, high = guide.sidecar.action_low or [0.0], guide.sidecar.action_high or [0.0]
    tolerance = AGREEMENT_TOLERANCE * np.subtract(high, low)
    states = agreed = 0

    def act_and_compare(observation: NDArray[Any], act: _Act) -> Any:
        nonlocal states, agreed
        action = guide.act(observation)
        states += 1
        agreed += bool(np.all(np.abs(action - policy.act(observation)) <= tolerance))
        return action if chance == GREEDY else act(observation)

    for seed in seeds:
        observation, _ = env.reset(seed=seed)
        play(env, partial(act_and_compare, act=_actor(guide, seed, chance)), observation, seed)
    return {"fraction": agreed / states, "states": states}
