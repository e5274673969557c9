"""A study on a real local Ray cluster of two workers, one of which is killed."""

import time
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from samples import silent, write_study

from quarl_tf.store.workspace import Workspace
from quarl_tf.study import State, engine, read

STUDY = """
name: cluster
bits: [4]
episodes: 2
overrides:
  {steps: 24000, network: [8], num_envs: 4, train_frequency: 64, minibatch_size: 64, epochs: 1,
   evaluation_every: 6000, evaluation_episodes: 4, checkpoint_every: 1000}
cells: [{algo: ppo, env: CartPole-v1}]
"""


def networks(root: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in root.glob("runs/*/network.npz")}


@pytest.mark.parametrize(("folders", "seeds"), [("shared", 10), ("separate", 2)])
def test_a_killed_worker_costs_nothing_but_time(folders: str, seeds: int, tmp_path: Path) -> None:
    gathers, numbers = folders == "separate", [*range(seeds)]
    study = read(write_study(tmp_path, f"{STUDY}seeds: {numbers}"))
    local, remote = Workspace(tmp_path / "local"), Workspace(tmp_path / "cluster")
    engine.run(local, study, engine.LocalEngine(2), silent, silent)
    lines, at_the_kill = list[str](), list[int]()
    # A head without cores and two workers.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    first_worker, _ = (cluster.add_node(num_cpus=1) for _ in range(2))

    def kill(*_: object) -> None:
        begun = lines if gathers else list(remote.root.glob("runs/*/checkpoints/*.npz"))
        if begun and not at_the_kill:
            at_the_kill.append(len(lines))
            cluster.remove_node(first_worker, allow_graceful=False)
            cluster.add_node(num_cpus=1)

    try:
        on_ray = engine.RayEngine(cluster.address, 1, remote.root if gathers else None)
        assert on_ray.most_cores == 1
        statuses = engine.run(remote, study, on_ray, lines.append, kill)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert at_the_kill
    assert {status.state for status in statuses} == {State.EVALUATED}
    assert networks(remote.root) == networks(local.root)
    assert len(networks(local.root)) == len(lines) == 2 * seeds  # In float and at 4 bits.
    assert sorted(lines) == sorted({f"done      {status.run.run_id}" for status in statuses})
    # Where nodes have folders of their own, checkpoints and curves for TensorBoard stay there.
    assert bool(list(remote.root.glob("runs/*/*/"))) != gathers
    before = time.time()
    assert engine.run(remote, study, engine.LocalEngine(2), lines.append, silent) == statuses
    assert not [path for path in remote.root.rglob("*.tflite") if path.stat().st_mtime > before]
