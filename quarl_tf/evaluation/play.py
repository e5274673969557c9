"""Play whole episodes with flatbuffers, for unclipped returns.

Randomness follows from the episode's seed (`spec.Chance`), so that all schemes meet the same noise
in the same episode. Each kind of chance has files of its own.
"""

import time
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, cycle, islice, repeat
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from quarl_tf import environments
from quarl_tf.environments import registry
from quarl_tf.environments.acting import Episode, play
from quarl_tf.foundation import processes, provenance
from quarl_tf.foundation.display import Update
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.seeding import environment_seed, generator
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import BASELINE, GREEDY, Chance
from quarl_tf.store.records import AGREEMENT_EPISODES, Evaluation, Sidecar
from quarl_tf.store.state import protocol

AGREEMENT_TOLERANCE = 0.01  #: Largest difference of equal continuous actions, of their range.
_WARM_UP_CALLS = 100
#: In turns a policy and its reference are timed, with so many calls and, warmed up, observations.
_LATENCY_TURNS, _LATENCY_CALLS = 5, 200
_LATENCY_OBSERVATIONS = _WARM_UP_CALLS + _LATENCY_CALLS
_SECONDS_SAVED = 60  #: After so long, at the end of an episode, an evaluation is saved again.
_SECONDS_ALONE = 5  #: So long an evaluation plays in one process; others take a second to start.

#: Facts of an evaluation that more episodes do not change.
_ONCE = ("reference_sha256", "agreement", "latency_us")

_Act = Callable[[Any], Any]


def evaluate(
    artifact: Path,
    seeds: Sequence[int],
    chance: Chance = GREEDY,
    *,
    reference: Path | None = None,
    update: Update = lambda *_: None,
    begun: Evaluation | None = None,
    save: Callable[[Evaluation], None] = lambda _: None,
    jobs: int = 1,
) -> Evaluation:
    """Play one whole episode per seed with a flatbuffer, greedily or with chance.

    The episodes of an evaluation that was `begun` come first and are not played again; its latency
    and agreement stay. `update` is called after every episode, `save` every minute and at the end.
    Long evaluations are played by several processes, `jobs`, if the environment is a package's:
    others may keep something from one episode to the next.
    Actions are compared with those of the `reference`, the run's fp32 flatbuffer, on the states
    that the reference visits: otherwise an early difference would lead to other states and count
    again. A UsageError where the policy is no distribution to draw from; a QuarlError where a file
    is damaged, the reference has another network, the environment is not the policy's, or a return
    is not finite.
    """
    policy = Policy.load(artifact)
    sidecar = policy.sidecar
    guide = None if reference is None else _guide(reference, sidecar)
    facts = {name: getattr(begun, name) for name in _ONCE} if begun else dict[str, Any]()
    # A greedy game has 30 starts, each played once: another process would play them again.
    at_once = chance == GREEDY and environments.rules(sidecar.env_id) is not None
    own = bool(sidecar.run.get("modules")) or not registry.is_versioned(sidecar.env_id)
    jobs = 1 if at_once or own or not processes.may_start() else jobs
    saved_at = time.monotonic()
    episodes: list[Episode] = []

    def so_far() -> Evaluation:
        names = {"run_id": sidecar.run_id, "env_id": sidecar.env_id, "scheme": sidecar.scheme}
        rules = {"protocol": protocol(sidecar.env_id, chance), "artifact_sha256": sidecar.sha256}
        return _evaluation(episodes, seeds[: len(episodes)], **names, **rules, **facts)

    known = [] if begun is None else _episodes(begun)
    with (
        closing(_Player(policy, chance)) as player,
        closing(_play_all(player, artifact, seeds, known, jobs)) as played,
    ):
        for episode in played:
            episodes.append(episode)
            if (done := len(episodes)) <= len(known):
                continue
            update(done, len(seeds))
            if not facts and done == min(AGREEMENT_EPISODES, len(seeds)):
                facts = _measured(player, guide, seeds, episodes)
            due = time.monotonic() - saved_at >= _SECONDS_SAVED and not at_once
            if facts and (due or done == len(seeds)):
                save(so_far())
                saved_at = time.monotonic()
    return so_far()


def _guide(path: Path, sidecar: Sidecar) -> Policy:
    """Load the policy to compare actions with; a QuarlError for another network of the run."""
    guide = Policy.load(path)
    same_run = guide.sidecar.run_id == sidecar.run_id
    if same_run and guide.sidecar.network_sha256 != sidecar.network_sha256:
        raise QuarlError(
            "Actions can be compared only with a policy of the same network; export both again. "
            f"Received: {path} of another network than {sidecar.scheme}"
        )
    return guide


def _measured(
    player: "_Player", guide: Policy | None, seeds: Sequence[int], episodes: Sequence[Episode]
) -> dict[str, Any]:
    """Return the facts `_ONCE`, without those of a comparison where there is no guide."""
    policy, chance = player.policy, player.chance
    other = guide if guide and guide.sidecar.sha256 != policy.sidecar.sha256 else None
    facts: dict[str, Any] = {"latency_us": _latency(player, other, seeds[0])}
    if guide is None:
        return facts
    states = sum(episode.length for episode in episodes[:AGREEMENT_EPISODES])
    agreement = {"fraction": 1.0, "states": states}
    if other is not None:
        agreement = _agreement(player.env, other, policy, seeds[:AGREEMENT_EPISODES], chance)
    return facts | {"reference_sha256": guide.sidecar.sha256, "agreement": agreement}


def _latency(player: "_Player", guide: Policy | None, seed: int) -> dict[str, float]:
    """Time a policy and its reference in turns, which other load on the machine affects alike."""
    policies = [player.policy, *([guide] if guide else [])]
    if player.chance.kind == "sampled":
        acts = [_actor(policy, seed, player.chance) for policy in policies]
    else:
        acts = [policy.act for policy in policies]
    turns = [
        [time_calls(act, player.observations, _LATENCY_CALLS) for act in acts]
        for _ in range(_LATENCY_TURNS)
    ]
    times = [np.concatenate(parts) for parts in zip(*turns, strict=True)]
    fp32 = {"fp32": float(np.median(times[1]))} if guide else {}
    return percentiles(times[0]) | fp32


def percentiles(durations: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """Return the "median", "p95" and "p99" of durations [n]."""
    values = np.percentile(durations, [50, 95, 99]).tolist()
    return dict(zip(("median", "p95", "p99"), values, strict=True))


def time_calls(act: _Act, observations: Sequence[NDArray[Any]], calls: int) -> NDArray[np.float64]:
    """Return the microseconds of single calls [calls] on the observations in turn, warmed up."""
    clock, durations = time.perf_counter_ns, []
    for observation in islice(cycle(observations), _WARM_UP_CALLS + calls):
        start = clock()
        act(observation)
        durations.append(clock() - start)
    return np.array(durations[_WARM_UP_CALLS:]) / 1000


def _episodes(evaluation: Evaluation) -> list[Episode]:
    """Return the episodes of an evaluation, but for their starts; the first has all ties."""
    successes = evaluation.successes or repeat(None)
    ties = chain([evaluation.ties], repeat(0))
    return [*map(Episode, evaluation.returns, evaluation.lengths, successes, ties)]


def _evaluation(episodes: Sequence[Episode], seeds: Sequence[int], **facts: Any) -> Evaluation:
    optional = ("artifact_sha256", "latency_us", "reference_sha256", "agreement")
    facts = dict.fromkeys(optional) | facts
    starts = [episode.start for episode in episodes if episode.start is not None]
    reported = any(episode.success is not None for episode in episodes)
    return Evaluation(
        environment_sha256=registry.source_sha256(facts["env_id"]),
        seeds=list(seeds),
        returns=[episode.result for episode in episodes],
        lengths=[episode.length for episode in episodes],
        starts=starts if len(set(starts)) < len(starts) else None,
        # An environment may report successes alone.
        successes=[bool(episode.success) for episode in episodes] if reported else None,
        ties=sum(episode.ties for episode in episodes),
        versions=provenance.package_versions(),
        processor=provenance.processor(),
        sources=provenance.sources(),
        **facts,
    )


def evaluate_random(env_id: str, run_id: str, seeds: Sequence[int]) -> Evaluation:
    """Play one whole episode per seed with random actions, the zero of normalised errors."""
    episodes = []
    with closing(environments.make(env_id)) as env:
        for seed in seeds:
            # With the environment's own seed, actions would correlate with its starting state.
            env.action_space.seed(environment_seed(seed, "random actions"))
            observation, _ = env.reset(seed=seed)
            episodes.append(play(env, lambda _: env.action_space.sample(), observation, seed))
    names = {"run_id": run_id, "env_id": env_id, "scheme": BASELINE}
    return _evaluation(episodes, seeds, **names, protocol=protocol(env_id, None))


def matching_env(sidecar: Sidecar, chance: Chance = GREEDY, **options: Any) -> gym.Env[Any, Any]:
    """Make a policy's environment; a QuarlError if its spaces have changed."""
    environments.require_spaces(sidecar.env_id, sidecar.run_id, vars(sidecar))
    environments.require_chance(sidecar.env_id, chance)
    return environments.make(sidecar.env_id, sticky=chance.sticky, **options)


def _actor(policy: Policy, seed: int, chance: Chance) -> _Act:
    if chance.kind == "sampled":
        return partial(policy.sample, random=generator(seed, "sampled actions"))
    if chance.kind != "epsilon":
        return policy.act
    random = generator(seed, "random actions")

    def act(observation: NDArray[Any]) -> Any:
        draw, action = random.random(), random.integers(policy.sidecar.num_actions or 1)
        return action if draw < chance.probability else policy.act(observation)

    return act


class _Player:
    """Plays the episodes of an evaluation, each as its seed alone says.

    A game has 30 starts and is deterministic: greedy episodes from the same start are played once.
    """

    def __init__(
        self, policy: Policy, chance: Chance, most_observations: int = _LATENCY_OBSERVATIONS
    ) -> None:
        self.policy, self.chance = policy, chance
        self._most_observations = most_observations
        self.env = matching_env(policy.sidecar, chance)
        self.observations: list[NDArray[Any]] = []  #: The first ones that were acted on.
        self._by_start: dict[int, Episode] = {}

    def play(self, seed: int, known: Episode | None = None) -> Episode:
        """Return an episode with its start; one that is `known` is not played again."""
        observation, info = self.env.reset(seed=seed)
        start = info.get(environments.START, zlib.crc32(np.asarray(observation).tobytes()))
        if known is not None:
            return known._replace(start=start)
        if (episode := self._by_start.get(start)) is None:
            ties, choose = self.policy.ties, _actor(self.policy, seed, self.chance)
            episode = play(self.env, partial(self._act, choose=choose), observation, seed)
            episode = episode._replace(ties=self.policy.ties - ties, start=start)
            if self.chance == GREEDY and environments.START in info:
                self._by_start[start] = episode
        return episode

    def close(self) -> None:
        self.env.close()

    def _act(self, observation: NDArray[Any], choose: _Act) -> Any:
        if len(self.observations) < self._most_observations:
            self.observations.append(np.array(observation))  # Environments may reuse theirs.
        return choose(observation)


def _play_all(
    player: _Player, artifact: Path, seeds: Sequence[int], known: Sequence[Episode], jobs: int
) -> Generator[Episode, None, None]:
    """Yield the episodes of an evaluation; the `known` first ones are not played again.

    The last ones are played in processes.
    """
    begun_at = time.monotonic()
    for number, seed in enumerate(seeds):
        alone = time.monotonic() - begun_at < _SECONDS_ALONE
        may_share = number >= max(len(known), AGREEMENT_EPISODES) and len(seeds) - number >= jobs
        if jobs > 1 and may_share and not alone:
            what = artifact, player.policy.sidecar, player.chance
            shares = [(*what, seeds[number + first :: jobs]) for first in range(jobs)]
            crash = (
                "A process that played episodes did not start or was killed; begin a script with "
                "if __name__ == '__main__', else evaluate again, with fewer jobs if memory is "
                f"short. Received: jobs={jobs}"
            )
            yield from processes.outcomes(_play_share, shares, crash)
            return
        yield player.play(seed, known[number] if number < len(known) else None)


def _play_share(
    artifact: Path, sidecar: Sidecar, chance: Chance, seeds: Sequence[int]
) -> Iterator[Episode]:
    policy = Policy.load(artifact)
    if policy.sidecar != sidecar:
        raise QuarlError(
            f"The file was replaced while it was evaluated; evaluate again. Received: {artifact}"
        )
    with closing(_Player(policy, chance, most_observations=0)) as player:
        yield from map(player.play, seeds)


def _agreement(
    env: gym.Env[Any, Any], guide: Policy, policy: Policy, seeds: Sequence[int], chance: Chance
) -> dict[str, float]:
    """Compare greedy actions on the states that the guide visits, with this chance."""
    # Discrete actions have no range, and must be equal.
    low, high = guide.sidecar.action_low or [0.0], guide.sidecar.action_high or [0.0]
    tolerance = AGREEMENT_TOLERANCE * np.subtract(high, low)
    equal: list[bool] = []

    def act_and_compare(observation: NDArray[Any], act: _Act) -> Any:
        action = guide.act(observation)
        equal.append(bool(np.all(np.abs(action - policy.act(observation)) <= tolerance)))
        return action if chance == GREEDY else act(observation)

    for seed in seeds:
        observation, _ = env.reset(seed=seed)
        play(env, partial(act_and_compare, act=_actor(guide, seed, chance)), observation, seed)
    return {"fraction": sum(equal) / len(equal), "states": len(equal)}
