"""Workers on a Ray cluster: two nodes of this machine act as two machines (make test-ray)."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from meshloom.config.cluster_settings import Fabric
from meshloom.config.errors import UserError
from meshloom.fabric.faults import Cause, WorkerFault
from meshloom.fabric.launch import PlannedNode, open_site
from meshloom.fabric.ray_site import RaySite
from meshloom.fabric.watch import Patience
from meshloom.fabric.workers import Workers
from meshloom.loop.train import run_training
from tests.lesson_runs import train_settings, write_inputs
from tests.test_fabric_runs import samples

HOST = "tests.fabric_hosts:Host"
TWO = [PlannedNode("node1", ("cpu", "cpu")), PlannedNode("node2", ("cpu",))]
ENDS_S = 20.0

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    yield cluster
    cluster.shutdown()


def test_roles_are_placed_on_nodes_of_the_cluster_and_reach_each_other(cluster: Any, tmp_path: Path) -> None:
    site = open_site(TWO, fabric=Fabric.RAY, ray_address=cluster.address)
    with site, Workers(HOST, site=site, logs=tmp_path) as workers:
        assert [(seat.node, seat.local_rank) for seat in workers.seats] == [("node1", 0), ("node1", 1), ("node2", 0)]
        assert workers.call("summed", {"value": 1.0}, phase="test", deadline_s=60) == [3.0] * 3
        pids = [int(workers.peers[rank].hello["pid"]) for rank in range(3)]
        actors = [psutil.Process(pid).parents()[2] for pid in pids]
        assert actors[0] == actors[1] != actors[2]
        assert all("ray::Minder" in " ".join(actor.cmdline()) for actor in actors)
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize("victim", ["worker", "actor"])
def test_a_killed_worker_or_actor_is_named(cluster: Any, tmp_path: Path, victim: str) -> None:
    site = RaySite(TWO, address=cluster.address, named=False)
    with site, Workers(HOST, site=site, logs=tmp_path, collectives=False, patience=Patience(lost_s=3.0)) as workers:
        pids = {rank: int(peer.hello["pid"]) for rank, peer in workers.peers.items()}
        call = workers.submit("sleep", phase="generate", deadline_s=600)
        next(call.events())
        worker = psutil.Process(pids[2])
        os.kill(worker.pid if victim == "worker" else worker.parents()[2].pid, signal.SIGKILL)
        with pytest.raises(WorkerFault, match="rank 2 .*node2") as raised:
            call.result()
    assert raised.value.cause is (Cause.DIED if victim == "worker" else Cause.NODE_LOST)
    assert not any(map(psutil.pid_exists, pids.values()))


def test_a_whole_run_on_ray_sees_the_samples_of_one_device(cluster: Any, tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    brief = ("batch.steps=2", "checkpoint.every_steps=0", "validation.every_steps=0")
    assert run_training(train_settings(inputs, tmp_path / "alone", *brief), resume=False) == 0
    on_ray = ("fabric=ray", f"cluster.ray_address={cluster.address}", "cluster.nodes=2", "cluster.devices_per_node=1")
    assert run_training(train_settings(inputs, tmp_path / "ray", *brief, *on_ray), resume=False) == 0
    assert samples(tmp_path / "ray") == samples(tmp_path / "alone")


def test_what_the_cluster_has_no_room_for_is_told(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshloom.fabric.ray_site._PLACE_S", 3.0)
    too_large = [PlannedNode("node1", ("cpu",) * 3)]
    with pytest.raises(UserError, match="no room"), RaySite(too_large, address=cluster.address, named=False):
        pass
    stranger = [PlannedNode("gpu7", ("cpu",))]
    with pytest.raises(UserError, match="gpu7 .* no machine"), RaySite(stranger, address=cluster.address, named=True):
        pass
    with pytest.raises(UserError, match="no Ray cluster answers"), RaySite(TWO, address="127.0.0.1:1", named=False):
        pass
