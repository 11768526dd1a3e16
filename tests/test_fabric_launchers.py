"""The same program started by torchrun, by srun and from a host file, on loopback hosts."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from meshloom.cli import main
from meshloom.config.cluster_settings import Fabric
from meshloom.config.errors import UserError
from meshloom.config.load import load_settings
from meshloom.config.settings import TrainSettings
from meshloom.fabric.attendant import UNANSWERED_S
from meshloom.fabric.cluster import with_launched_cluster
from meshloom.fabric.hostfile import Host, launch_on_hosts, own_address, read_hosts
from meshloom.fabric.joined import match_nodes
from meshloom.fabric.launch import Launched, PlannedNode, launched, open_site
from meshloom.fabric.processes import interface_of
from meshloom.fabric.slurm import hosts_of
from meshloom.fabric.slurm import task_of as slurm_task
from meshloom.fabric.torchrun import task_of as torchrun_task

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "tests" / "fabric_program.py"
ENDS_S = 60.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def start(command: list[str], **more: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment(**more), stdout=pipe, stderr=pipe, text=True)


def tasks_of_srun(folder: Path, nodes: str, mode: str) -> list["subprocess.Popen[str]"]:
    """What ``srun --nodes=2 --ntasks-per-node=1`` starts."""
    common = {
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "localhost,localhost2",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "MASTER_PORT": str(free_port()),
    }
    command = [sys.executable, str(PROGRAM), str(folder), nodes, mode]
    return [
        start(command, **common, SLURM_PROCID=str(rank), SLURM_LOCALID="0", SLURM_NODEID=str(rank)) for rank in range(2)
    ]


def outputs(processes: list["subprocess.Popen[str]"]) -> list[tuple[int, str, str]]:
    told = [process.communicate(timeout=ENDS_S) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, told, strict=True)]


def assert_no_worker_is_left(folder: Path) -> None:
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    assert pids and not any(map(psutil.pid_exists, pids))


def test_torchrun_on_two_nodes(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=test", "--local-addr=localhost"]
    program = [str(PROGRAM), str(tmp_path), "node1=1,node2=1", "sum"]
    found = outputs([start([*command, *program]) for _ in range(2)])
    assert [code for code, _, _ in found] == [0, 0], found
    said = "".join(out for _, out, _ in found)
    assert "sums [2.0, 2.0]" in said
    assert "seat 0 node1 0 0" in said and "seat 1 node2 1 0" in said
    assert_no_worker_is_left(tmp_path)


def test_every_task_of_srun_exits_with_the_error_of_one_rank(tmp_path: Path) -> None:
    found = outputs(tasks_of_srun(tmp_path, "node1=1,node2=1", "fail"))
    assert [code for code, _, _ in found] == [3, 3], found
    for _, _, errors in found:
        assert errors.count("rank 1 (on node2") == 1 and "lost key" in errors
    assert_no_worker_is_left(tmp_path)


def test_a_node_that_is_not_there_is_told_by_every_task(tmp_path: Path) -> None:
    found = outputs(tasks_of_srun(tmp_path, "!localhost=1,gpu7=1", "sum"))
    assert [code for code, _, _ in found] == [2, 2], found
    for _, _, errors in found:
        assert errors.count("node gpu7 is not among the hosts of this run") == 1
        assert "localhost, localhost2" in errors


@pytest.mark.slow
def test_a_run_that_is_refused_at_once_ends_every_task(tmp_path: Path) -> None:
    found = outputs(tasks_of_srun(tmp_path, "node1=1,node2=1", "refused"))
    assert [code for code, _, _ in found] == [2, 2], found


@pytest.mark.slow
def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "localhost"}
        words = ["train", "run.yaml"]
        task = start([sys.executable, "-m", "meshloom", *words], **slurm, MASTER_PORT=port)
        code, _, errors = outputs([task])[0]
    assert code == 2 and f"localhost:{port}" in errors and "MASTER_PORT" in errors


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_node_ends_the_others(victim: int, tmp_path: Path) -> None:
    tasks = tasks_of_srun(tmp_path, "node1=1,node2=1", "sleep")
    while not (tmp_path / "ready").exists():
        assert all(task.poll() is None for task in tasks), outputs(tasks)
    controller = psutil.Process(int((tmp_path / "ready").read_text()))
    tasks[victim].kill()
    code, _, errors = outputs([tasks[1 - victim]])[0]
    assert code == 3 and f"rank {victim} (on node{victim + 1}" in errors and "was lost with its node" in errors
    psutil.wait_procs([controller], timeout=ENDS_S)
    assert not controller.is_running()
    assert_no_worker_is_left(tmp_path)
    outputs(tasks)


@pytest.mark.slow
def test_a_lost_node_is_named_though_torchrun_ends_all_for_it(tmp_path: Path) -> None:
    """The agents' meeting place was on that node: the other agent sends SIGTERM, which used to end the controller before it had
    told what it knew."""
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    command += [f"--rdzv-endpoint=localhost:{port}", "--local-addr=localhost", str(PROGRAM), str(tmp_path)]
    # Who has the lower number gets the first rank, and with it the controller; who comes first has the meeting place.
    with (tmp_path / "said").open("w") as said:
        words = {"cwd": ROOT, "env": environment(), "stdout": said, "stderr": said}
        agents = [subprocess.Popen([*command, "node1=1,node2=1", "sleep"], **words)]
        psutil.Process(agents[0].pid).suspend()
        agents.append(subprocess.Popen([*command, "node1=1,node2=1", "sleep"], **words))
    assert agents[0].pid < agents[1].pid
    while not any(one.laddr.port == port for one in psutil.Process(agents[1].pid).net_connections()):
        assert agents[1].poll() is None
    psutil.Process(agents[0].pid).resume()
    while not (tmp_path / "ready").exists():
        assert all(agent.poll() is None for agent in agents), (tmp_path / "said").read_text()
    kept, lost = ([psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)] for agent in agents)
    for process in lost:
        process.kill()
    assert agents[0].wait(ENDS_S) == 1  # of torchrun
    assert psutil.wait_procs(kept, timeout=ENDS_S)[1] == []
    assert "error: rank 1 (on node2" in (tmp_path / "said").read_text()
    agents[1].wait()


CUT_OFF = """
import os, subprocess, sys, time
from pathlib import Path
import psutil
from meshloom.fabric.local import LocalSite
from meshloom.fabric.workers import Workers

def loopback(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)

loopback("up")
logs, host = Path(sys.argv[1]), "tests.fabric_hosts:Host"
with LocalSite(["cpu"]) as site, Workers(host, site=site, logs=logs, collectives=False) as workers:
    next(workers.submit("sleep", phase="generate", deadline_s=600).events())
    started = psutil.Process().children(recursive=True)
    time.sleep(3.0)
    alive = sum(process.is_running() for process in started)
    loopback("down")
    began = time.monotonic()
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in started):
        assert time.monotonic() < began + 100, started
        time.sleep(0.1)
    print(len(started), alive, time.monotonic() - began, flush=True)
    os._exit(0)
"""


@pytest.mark.slow
def test_what_a_lost_machine_with_the_controller_leaves_on_others_ends(tmp_path: Path) -> None:
    """Nothing comes from there, not even the end of a connection: it lasted for a quarter of an hour."""
    alone = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*alone, "ip", "link"], capture_output=True).returncode:
        pytest.skip("needs a network namespace")
    done = subprocess.run(
        [*alone, sys.executable, "-c", CUT_OFF, str(tmp_path)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    started, alive, seconds = done.stdout.split()
    assert int(started) == int(alive) == 3  # an attendant, a nursery and a worker
    assert UNANSWERED_S - 5 < float(seconds) < UNANSWERED_S + 45


FAKE_SSH = """#!/bin/sh
# Runs the command here; the host is the last argument but one.
while [ $# -gt 2 ]; do shift; done
echo "$1" >> "$FAKE_SSH_LOG"
[ "$1" = broken ] && exit 255
exec sh -c "$2"
"""


@pytest.fixture
def fake_ssh(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(FAKE_SSH)
    (folder / "ssh").chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "FAKE_SSH_LOG": str(tmp_path / "ssh.log")}


LAUNCH = """
import sys
from pathlib import Path
from meshloom.fabric.hostfile import launch_on_hosts, read_hosts
hosts = read_hosts(Path(sys.argv[1]))
sys.exit(launch_on_hosts(hosts, [sys.executable, *sys.argv[2:]], address="127.0.0.1"))
"""


def launch(folder: Path, hosts: str, nodes: str, mode: str, **more: str) -> "subprocess.Popen[str]":
    file = folder / "hosts"
    file.write_text(hosts)
    return start([sys.executable, "-c", LAUNCH, str(file), str(PROGRAM), str(folder), nodes, mode], **more)


def test_a_host_file_starts_workers_over_ssh(tmp_path: Path, fake_ssh: dict[str, str]) -> None:
    process = launch(tmp_path, "worker-0 slots=2\nuser@worker-1\n", "!worker-1=1,worker-0=2", "where", **fake_ssh)
    ((code, said, errors),) = outputs([process])
    assert code == 0, errors
    assert "worker-0: 2 workers: ssh" in said and "worker-1: 1 worker: ssh" in said
    assert [line for line in said.splitlines() if line.startswith("seat")] == [
        "seat 0 worker-1 0 0",
        "seat 1 worker-0 1 0",
        "seat 2 worker-0 1 1",
    ]
    assert sorted(Path(fake_ssh["FAKE_SSH_LOG"]).read_text().split()) == ["user@worker-1", "worker-0"]
    assert_no_worker_is_left(tmp_path)


def test_hosts_that_are_not_those_of_the_plan_are_told_once(tmp_path: Path, fake_ssh: dict[str, str]) -> None:
    """Each host's attendant used to repeat it."""
    ((code, _, errors),) = outputs([launch(tmp_path, "worker-0\nworker-1\n", "!gpu7=1,worker-1=1", "sum", **fake_ssh)])
    assert code == 2, errors
    assert errors.count("node gpu7 is not among the hosts of this run") == 1
    assert errors.count("hosts: worker-0, worker-1") == 1


def test_what_a_host_file_started_ends_with_the_launcher(tmp_path: Path, fake_ssh: dict[str, str]) -> None:
    process = launch(tmp_path, "worker-0\nworker-1\n", "worker-0=1,worker-1=1", "sleep", **fake_ssh)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None, process.communicate()
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) == 7  # the controller, and on each host an attendant, a nursery and a worker
    os.kill(process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(started, timeout=ENDS_S)
    assert alive == []
    process.communicate()


def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path, fake_ssh: dict[str, str]) -> None:
    process = launch(tmp_path, "broken\nworker-1\n", "broken=1,worker-1=1", "where", **fake_ssh)
    ((code, said, errors),) = outputs([process])
    assert code == 3 and "broken: ssh ended with exit code 255" in said
    assert "error: host broken cannot be reached" in errors and "`ssh broken true` must need no password" in errors


def test_a_dry_run_says_what_would_be_done_and_does_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    hosts = (Host("worker-0", 8), Host("me@worker-1", 1))
    command = ["meshloom", "train", "run.yaml"]
    code = launch_on_hosts(hosts, command, address="head", folder=tmp_path, dry_run=True, say=lines.append)
    assert code == 0 and lines[0] == "head: meshloom train run.yaml"
    assert lines[1].startswith("worker-0: 8 workers: ssh ") and f"worker-0 'cd {tmp_path} && exec" in lines[1]
    assert lines[2].startswith("worker-1: 1 worker: ssh ") and "me@worker-1" in lines[2]
    assert own_address([Host("localhost", 1)]) == "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "names no host"),
        ("# only words\n", "names no host"),
        ("a slots=2\na slots=3\n", "a is named twice"),
        ("a slots=none\n", "'slots=none' is not understood"),
        ("a 4\n", "'4' is not understood"),
        ("a slots=0\n", "'slots=0' is not understood"),
        ("-oProxyCommand=evil\n", "is no host"),
    ],
)
def test_a_host_file_that_is_wrong_is_told(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(UserError, match=told):
        read_hosts(file)


def test_a_host_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\nworker-0 slots=8  # the first\n\nme@worker-1\n")
    assert read_hosts(file) == (Host("worker-0", 8), Host("me@worker-1", 1))
    with pytest.raises(UserError, match="cannot be read"):
        read_hosts(tmp_path / "none")


def nodes(*names: str) -> list[PlannedNode]:
    return [PlannedNode(name, ("cpu",)) for name in names]


def test_nodes_are_matched_by_name_or_by_order() -> None:
    hosts = ["gpu1.cluster.local", "gpu2.cluster.local"]
    assert match_nodes(nodes("gpu2", "gpu1.cluster.local"), hosts, named=True) == [1, 0]
    assert match_nodes(nodes("node1", "node2"), hosts, named=False) == [0, 1]
    with pytest.raises(UserError, match="gpu3 is not among"):
        match_nodes(nodes("gpu1", "gpu3"), hosts, named=True)
    with pytest.raises(UserError, match="3 nodes, but the run was started on 2"):
        match_nodes(nodes("gpu1", "gpu2", "gpu3"), hosts, named=True)
    with pytest.raises(UserError, match="several hosts"):
        match_nodes(nodes("vm", "gpu2"), ["vm", "vm"], named=True)


def test_several_nodes_need_a_launcher() -> None:
    with pytest.raises(UserError, match="2 nodes") as raised:
        open_site(nodes("node1", "node2"))
    assert "torchrun" in raised.value.fix and "meshloom launch" in raised.value.fix
    with pytest.raises(UserError, match="no launcher has started"):
        open_site(nodes("node1"), fabric=Fabric.TORCHRUN)


def test_variables_of_launchers_are_read() -> None:
    torch_variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu1", "MASTER_PORT": "29500"}
    task = torchrun_task({**torch_variables, "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"})
    assert task is not None and (task.node_index, task.nodes, task.master) == (1, (4, 4), ("gpu1", 29500))
    assert torchrun_task({"RANK": "0"}) is None
    slurm = {"SLURM_PROCID": "6", "SLURM_NTASKS": "7", "SLURM_LOCALID": "2", "SLURM_JOB_NODELIST": "gpu[01-02]"}
    task = slurm_task({**slurm, "SLURM_TASKS_PER_NODE": "4,3", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "1"})
    assert task is not None and (task.node_index, task.nodes, task.name) == (1, (4, 3), "gpu02")
    assert task.master == slurm_task({**slurm, "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "1"}).master
    assert slurm_task({**slurm, "ENVIRONMENT": "BATCH", "SLURM_JOB_ID": "77"}) is None
    assert slurm_task({**slurm, "SLURM_NTASKS": "1"}) is None
    assert hosts_of("gpu[01-02,7],login,a[1-2]b") == ["gpu01", "gpu02", "gpu7", "login", "a1b", "a2b"]
    with pytest.raises(UserError, match="cannot be read"):
        hosts_of("gpu[01")


def test_what_a_launcher_has_started_is_the_cluster_unless_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = Launched("torchrun", os.open(os.devnull, os.O_WRONLY), 8, (4, 4))
    monkeypatch.setenv("MESHLOOM_CONTROLLER", ticket.text())
    launched.cache_clear()
    try:
        assert with_launched_cluster(train_settings()).cluster.model_dump(include={"nodes", "devices_per_node"}) == {
            "nodes": 2,
            "devices_per_node": 4,
        }
        assert "MESHLOOM_CONTROLLER" not in os.environ
        given = with_launched_cluster(train_settings("cluster.nodes=1", "cluster.devices_per_node=8"))
        assert (given.cluster.nodes, given.cluster.devices_per_node) == (1, 8)
        named = with_launched_cluster(train_settings("cluster.node_names=[gpu-a,gpu-b]"))
        assert (named.cluster.nodes, named.cluster.node_names) == (2, ("gpu-a", "gpu-b"))
        mapped = with_launched_cluster(train_settings("placement.map=map.yaml"))
        assert (mapped.cluster.nodes, mapped.cluster.devices_per_node) == (1, 4)
        assert mapped.provenance.of("cluster.devices_per_node") == "torchrun"
    finally:
        launched.cache_clear()
        os.close(ticket.descriptor)
    assert with_launched_cluster(train_settings()).cluster.devices_per_node is None


def train_settings(*overrides: str) -> TrainSettings:
    given = ["run_dir=r", "model.path=m", "data.train.files=[d.jsonl]", *overrides]
    return load_settings(TrainSettings, None, given)


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "" and interface_of("203.0.113.9") == ""
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family is socket.AF_INET and not one.address.startswith("127."):
                assert interface_of(one.address) == name


def test_the_launch_command_hands_on_what_train_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("worker-0 slots=8\n")
    words = ["launch", "--hostfile", str(hosts), "run.yaml", "--dry-run", "optimizer.lr=1", "--resume"]
    assert main([*words, "--device-map", "map.yaml", "--address", "head", "--python", "/opt/python"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("head: ")
    assert lines[0].endswith(" -m meshloom train run.yaml optimizer.lr=1 --resume --device-map map.yaml")
    assert (
        lines[1].startswith("worker-0: 8 workers: ssh ") and "exec /opt/python -m meshloom.fabric.attendant" in lines[1]
    )
    assert main(["launch", "--hostfile", str(tmp_path / "none"), "run.yaml"]) == 2
