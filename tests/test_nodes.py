"""Whole runs on two nodes, each an agent of torchrun on this machine: roles on the other node, and a node that is lost."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from meshloom.config.load import dump_yaml
from meshloom.config.settings import TrainSettings
from meshloom.loop.train import run_training
from meshloom.observe.run_folder import read_status
from tests.lesson_runs import lives, train_settings, whole_checkpoints, write_inputs, write_reward_model
from tests.test_fabric_launchers import environment, free_port
from tests.test_many_devices import assert_like

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
LIMIT_S, RUN_S = 20.0, 400.0
# The first gradients of a critic's layers are rounding, as its head is 0: a larger eps keeps AdamW from making them large.
PPO = ("algorithm.advantage=gae", "algorithm.lam=0.95", "critic.optimizer.lr=1e-2", "critic.optimizer.eps=1e-3") + (
    "optimizer.eps=1e-4",
)
BRIEF = ("batch.steps=2", "checkpoint.every_steps=0", "validation.every_steps=0", "optimizer.schedule=constant")
MAPS = {
    "each on devices of its own": (
        3,
        """\
actor: {devices: ["node1:0", "node1:1"]}
rollout: {devices: ["node1:2"]}
critic: {devices: ["node2:0"]}
reference: {devices: ["node2:1"]}
reward: {devices: ["node2:2"]}
""",
    ),
    "all on one device": (
        1,
        """\
actor: {devices: ["node1:0"]}
rollout: {devices: ["node1:0"]}
critic: {devices: ["node2:0"]}
reference: {devices: ["node2:0"]}
reward: {devices: ["node2:0"]}
""",
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all_inputs(tmp_path_factory.mktemp("inputs"))


def write_all_inputs(folder: Path) -> Path:
    """Model, rows, reward and reward model."""
    write_inputs(folder)
    write_reward_model(folder / "judge", folder / "model")
    return folder


def every_role(inputs: Path, run_dir: Path, *changes: str) -> TrainSettings:
    """A run with a critic, a reference and a reward model."""
    reward = (
        "reward.function=null",
        f"reward.components.task.function={inputs / 'reward.py'}:score",
        f"reward.components.quality.model.path={inputs / 'judge'}",
        "reward.components.quality.weight=0.1",
    )
    return train_settings(inputs, run_dir, *PPO, *reward, *changes)


def on_two(inputs: Path, run_dir: Path, devices: int, *changes: str) -> TrainSettings:
    return every_role(inputs, run_dir, "cluster.nodes=2", f"cluster.devices_per_node={devices}", *changes)


@pytest.fixture(scope="module")
def alone(inputs: Path) -> Path:
    """A finished run on one device."""
    assert run_training(every_role(inputs, inputs / "alone", *BRIEF), resume=False) == 0
    return inputs / "alone"


class Agent:
    """An agent of torchrun, which is a node; what it and its processes say is in a file.

    Args:
        command: of the agent.
        name: of the node.
        said: the file.
    """

    def __init__(self, command: list[str], name: str, said: Path) -> None:
        self.name, self.said = name, said
        with said.open("w") as file:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment(MESHLOOM_NODE=name), stdout=file, stderr=file, start_new_session=True
            )

    def everything(self) -> list[psutil.Process]:
        """The agent and all that descends from it."""
        with suppress(psutil.NoSuchProcess):
            agent = psutil.Process(self.process.pid)
            return [agent, *agent.children(recursive=True)]
        return []

    def kill(self) -> None:
        """The node is gone, with all that runs on it."""
        for one in self.everything():
            with suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it did not end within {seconds:g} s:\n{self.said.read_text()}")


@contextmanager
def two_nodes(settings: TrainSettings, device_map: str, folder: Path) -> Iterator[list[Agent]]:
    """The run on two nodes; nothing of it is left afterwards."""
    (folder / "map.yaml").write_text(device_map)
    (folder / "run.yaml").write_text(dump_yaml(settings))
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
    command += [f"--nproc-per-node={settings.cluster.devices_per_node}"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--local-addr=localhost"]
    command += ["-m", "meshloom", "train", str(folder / "run.yaml"), "--device-map", str(folder / "map.yaml")]
    agents = [Agent(command, name, folder / name) for name in ("node1", "node2")]
    try:
        yield agents
    finally:
        for agent in agents:
            agent.kill()
            agent.process.wait()


@pytest.mark.parametrize("place", MAPS)
def test_roles_on_another_node_do_what_one_device_does(inputs: Path, alone: Path, tmp_path: Path, place: str) -> None:
    devices, device_map = MAPS[place]
    with two_nodes(on_two(inputs, tmp_path / "run", devices, *BRIEF), device_map, tmp_path) as agents:
        codes = [agent.wait(RUN_S) for agent in agents]
    assert codes == [0, 0], [agent.said.read_text() for agent in agents]
    assert_like(alone, tmp_path / "run")


def controller_of(agents: list[Agent]) -> int:
    """The node that the controller runs on."""
    commands = [[one.cmdline() for one in agent.everything()] for agent in agents]
    return next(at for at, found in enumerate(commands) if sum("--device-map" in words for words in found) > 2)


@pytest.mark.parametrize("lost", ["the controller's", "the other"])
def test_a_lost_node_ends_the_other_and_the_run_goes_on_on_one_device(inputs: Path, tmp_path: Path, lost: str) -> None:
    run_dir = tmp_path / "run"
    settings = on_two(inputs, run_dir, 1, *BRIEF[2:], "batch.steps=400", "checkpoint.every_steps=1")
    with two_nodes(settings, MAPS["all on one device"][1], tmp_path) as agents:
        until = time.monotonic() + RUN_S
        while not list(run_dir.glob("checkpoints/step-*")):
            texts = [agent.said.read_text() for agent in agents]
            assert all(agent.process.poll() is None for agent in agents) and time.monotonic() < until, texts
            time.sleep(0.05)
        started = [process for agent in agents for process in agent.everything()]
        at = controller_of(agents)
        victim, other = (agents[at], agents[1 - at]) if lost == "the controller's" else (agents[1 - at], agents[at])
        struck_at = time.monotonic()
        victim.kill()
        code = other.wait(3 * LIMIT_S)
        seconds = time.monotonic() - struck_at
        said = other.said.read_text()
        assert code == 1, said  # of torchrun, whatever its processes end with
        assert seconds < LIMIT_S, said
        _, alive = psutil.wait_procs(started, timeout=LIMIT_S)
        assert not any(map(lives, alive))
    if lost == "the other":
        # Of torchrun, which may have lost the place where its agents meet, and then does not say how its processes ended.
        assert "exitcode: 3" in said or "RendezvousConnectionError" in said
        assert f"error: rank {agents.index(victim)} (on {victim.name}" in said
        assert "was lost with its node" in said or "was killed by SIGKILL" in said
        assert read_status(run_dir)["state"] == "failed"
    else:
        assert "the controller of this run is gone" in said
    saved = max(whole_checkpoints(run_dir))
    more = every_role(inputs, run_dir, *BRIEF[2:], f"batch.steps={saved + 1}", "checkpoint.every_steps=1")
    assert run_training(more, resume=True) == 0
    assert read_status(run_dir)["state"] == "finished" and whole_checkpoints(run_dir)[-1] == saved + 1
