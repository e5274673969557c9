"""A study on a real local Ray cluster of two workers, one of which is killed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from samples import silent, write_study

from quarl_tf.store.workspace import Workspace
from quarl_tf.study import State, engine, read

STUDY = """
name: cluster
seeds: [0, 1]
bits: [4]
episodes: 2
overrides:
  {steps: 24000, network: [8], num_envs: 4, train_frequency: 64, minibatch_size: 64, epochs: 1,
   evaluation_every: 6000, evaluation_episodes: 4, checkpoint_every: 1000}
cells: [{algo: ppo, env: CartPole-v1}]
"""


def networks(root: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in root.glob("runs/*/network.npz")}


@contextmanager
def two_workers() -> Iterator[tuple[Any, list[Any]]]:
    """Start a cluster of a head without cores and two workers; yield it and the workers."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    workers = [cluster.add_node(num_cpus=1) for _ in range(2)]
    try:
        yield cluster, workers
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_a_killed_worker_costs_nothing_but_time(tmp_path: Path) -> None:
    study = read(write_study(tmp_path, STUDY))
    local, remote = Workspace(tmp_path / "local"), Workspace(tmp_path / "cluster")
    lines: list[str] = []
    engine.run(local, study, engine.LocalEngine(2), lines.append, silent)
    killed = False
    with two_workers() as (cluster, workers):

        def kill(*_: object) -> None:
            nonlocal killed
            if not killed and list(remote.root.glob("runs/*/checkpoints/*.npz")):
                killed = True
                cluster.remove_node(workers[0], allow_graceful=False)
                cluster.add_node(num_cpus=1)

        on_ray = engine.RayEngine(cluster.address, 1)
        assert on_ray.most_cores == 1
        statuses = engine.run(remote, study, on_ray, lines.append, kill)
    assert killed
    assert {status.state for status in statuses} == {State.EVALUATED}
    assert networks(remote.root) == networks(local.root)
    assert len(networks(local.root)) == 4
    done = [line for line in lines if line.startswith("done")]
    assert len(done) == len(lines) == 8
    before = time.time()
    repeated = engine.run(remote, study, engine.LocalEngine(2), lines.append, silent)
    assert repeated == statuses
    assert not [path for path in remote.root.rglob("*.tflite") if path.stat().st_mtime > before]


def test_nodes_with_folders_of_their_own_send_back_what_they_make(tmp_path: Path) -> None:
    study, workspace = read(write_study(tmp_path, STUDY)), Workspace(tmp_path / "gathered")
    lines: list[str] = []
    at_the_kill: list[int] = []
    with two_workers() as (cluster, workers):

        def kill(*_: object) -> None:
            if not at_the_kill and len(lines) >= 1:
                at_the_kill.append(len(lines))
                cluster.remove_node(workers[0], allow_graceful=False)

        on_ray = engine.RayEngine(cluster.address, 1, workspace.root)
        statuses = engine.run(workspace, study, on_ray, lines.append, kill)
    assert at_the_kill
    assert {status.state for status in statuses} == {State.EVALUATED}
    assert sorted(lines) == sorted({f"done      {status.run.run_id}" for status in statuses})
    assert len(lines) == len(networks(workspace.root)) == 4
    # Trained in folders of the nodes: checkpoints and curves for TensorBoard stay there.
    assert not list(workspace.root.glob("runs/*/*/"))
