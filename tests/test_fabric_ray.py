"""Workers on a Ray cluster: two nodes of this machine act as two machines (make test-ray)."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from meshloom.config.cluster_settings import Fabric
from meshloom.config.errors import UserError
from meshloom.config.settings import TrainSettings
from meshloom.fabric.faults import Cause, WorkerFault
from meshloom.fabric.launch import PlannedNode, open_site
from meshloom.fabric.ray_site import RaySite
from meshloom.fabric.watch import Patience
from meshloom.fabric.workers import Workers
from meshloom.loop.train import run_training
from tests.lesson_runs import command, kill, start, train_settings, wait_until, whole_checkpoints, write_inputs
from tests.test_fabric_runs import samples
from tests.test_many_devices import assert_like, is_worker
from tests.test_nodes import BRIEF, every_role, on_two, write_all_inputs

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
        actors = [actor_of(pid) for pid in pids]
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
        os.kill(pids[2] if victim == "worker" else actor_of(pids[2]).pid, signal.SIGKILL)
        with pytest.raises(WorkerFault, match="rank 2 .*node2") as raised:
            call.result()
    assert raised.value.cause is (Cause.DIED if victim == "worker" else Cause.NODE_LOST)
    assert not any(map(psutil.pid_exists, pids.values()))


def actor_of(worker: int) -> psutil.Process:
    """The actor that a worker's attendant and nursery descend from."""
    return psutil.Process(worker).parents()[2]


def test_a_lost_machine_of_the_cluster_is_named(cluster: Any, tmp_path: Path) -> None:
    """Ray's processes there are killed; the actor ends as the one that started it is gone, and the workers with it."""
    (lost,) = cluster.worker_nodes
    daemon = lost.all_processes["raylet"][0].process.pid
    one_each = [PlannedNode("node1", ("cpu",)), PlannedNode("node2", ("cpu",))]
    try:
        site = RaySite(one_each, address=cluster.address, named=False)
        with site, Workers(HOST, site=site, logs=tmp_path, collectives=False) as workers:
            found = [psutil.Process(int(workers.peers[rank].hello["pid"])) for rank in range(2)]
            victim = next(rank for rank in range(2) if actor_of(found[rank].pid).ppid() == daemon)
            call = workers.submit("sleep", phase="generate", deadline_s=600)
            next(call.events())
            struck_at = time.monotonic()
            cluster.remove_node(lost, allow_graceful=False)
            with pytest.raises(WorkerFault, match=f"rank {victim} .*node{victim + 1}.* was lost with its node"):
                call.result()
        assert time.monotonic() - struck_at < ENDS_S
        assert psutil.wait_procs(found, timeout=ENDS_S)[1] == []
    finally:
        cluster.add_node(num_cpus=2)


def test_a_whole_run_on_ray_sees_the_samples_of_one_device(cluster: Any, tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    brief = ("batch.steps=2", "checkpoint.every_steps=0", "validation.every_steps=0")
    assert run_training(train_settings(inputs, tmp_path / "alone", *brief), resume=False) == 0
    on_ray = ("fabric=ray", f"cluster.ray_address={cluster.address}", "cluster.nodes=2", "cluster.devices_per_node=1")
    assert run_training(train_settings(inputs, tmp_path / "ray", *brief, *on_ray), resume=False) == 0
    assert samples(tmp_path / "ray") == samples(tmp_path / "alone")


def on_two_nodes(cluster: Any, inputs: Path, run_dir: Path, *changes: str) -> TrainSettings:
    """A run with a critic, a reference and a reward model, which are on the second node."""
    first = [f"placement.{role}=[node1:0]" for role in ("actor", "rollout")]
    second = [f"placement.{role}=[node2:0]" for role in ("critic", "reference", "reward")]
    on_ray = ("fabric=ray", f"cluster.ray_address={cluster.address}")
    return on_two(inputs, run_dir, 1, *on_ray, *first, *second, *changes)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all_inputs(tmp_path_factory.mktemp("inputs"))


def test_roles_on_the_second_node_do_what_one_device_does(cluster: Any, inputs: Path, tmp_path: Path) -> None:
    assert run_training(every_role(inputs, tmp_path / "alone", *BRIEF), resume=False) == 0
    assert run_training(on_two_nodes(cluster, inputs, tmp_path / "ray", *BRIEF), resume=False) == 0
    assert_like(tmp_path / "alone", tmp_path / "ray")


def test_an_actor_killed_in_a_run_ends_it_and_the_run_goes_on_on_one_device(
    cluster: Any, inputs: Path, tmp_path: Path
) -> None:
    run_dir, output, saving = tmp_path / "run", tmp_path / "out", (*BRIEF[2:], "checkpoint.every_steps=1")
    process = start(command(on_two_nodes(cluster, inputs, run_dir, *saving, "batch.steps=400")), output)
    assert wait_until(lambda: list(run_dir.glob("checkpoints/step-*")), process, timeout=300), output.read_text()
    workers = workers_on_ray()
    struck_at = time.monotonic()
    actor_of(workers[1].pid).kill()
    process.join(3 * ENDS_S)
    seconds = time.monotonic() - struck_at
    if process.exitcode is None:
        kill(process)
    assert process.exitcode == 3, output.read_text()
    assert seconds < ENDS_S
    assert "error: rank 1 (on node2" in output.read_text() and "was lost with its node" in output.read_text()
    assert psutil.wait_procs(workers.values(), timeout=ENDS_S)[1] == []
    saved = max(whole_checkpoints(run_dir))
    assert run_training(every_role(inputs, run_dir, *saving, f"batch.steps={saved + 1}"), resume=True) == 0
    assert whole_checkpoints(run_dir)[-1] == saved + 1


def workers_on_ray() -> dict[int, psutil.Process]:
    """The worker of each rank, which descends from an actor of this test's cluster."""
    workers = [child for child in psutil.Process().children(recursive=True) if is_worker(child)]
    return {int(" ".join(one.cmdline()).partition("rank ")[2].partition(" ")[0]): one for one in workers}


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
