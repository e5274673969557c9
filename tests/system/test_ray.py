"""A study on a real local Ray cluster of two workers, one of which is killed."""

import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from quarl_tf import study
from quarl_tf.store.workspace import Workspace
from quarl_tf.study import State, engine

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


def test_a_killed_worker_costs_nothing_but_time(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    wanted = study.read(path)
    here, there = Workspace(tmp_path / "local"), Workspace(tmp_path / "cluster")
    said: list[str] = []
    engine.run(here, wanted, engine.LocalEngine(2), said.append, lambda *_: None)

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    killed = False

    def kill(*_: object) -> None:
        nonlocal killed
        if not killed and list(there.root.glob("runs/*/checkpoints/*.npz")):
            killed = True
            cluster.remove_node(nodes[0], allow_graceful=False)
            cluster.add_node(num_cpus=1)

    try:
        on_ray = engine.RayEngine(cluster.address, 1)
        found = engine.run(there, wanted, on_ray, said.append, kill)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert killed
    assert {one.state for one in found} == {State.EVALUATED}
    assert networks(there.root) == networks(here.root)
    assert len(networks(here.root)) == 4
    done = [line for line in said if line.startswith("done")]
    assert len(done) == len(said) == 8
    before = time.time()
    again = engine.run(there, wanted, engine.LocalEngine(2), said.append, lambda *_: None)
    assert again == found
    assert not [path for path in there.root.rglob("*.tflite") if path.stat().st_mtime > before]
