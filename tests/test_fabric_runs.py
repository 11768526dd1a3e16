"""Whole runs that a launcher has started on two nodes see the same samples as on one device."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from meshloom.config.load import dump_yaml
from meshloom.loop.train import run_training
from meshloom.observe.run_folder import read_status
from tests.lesson_runs import train_settings, write_inputs
from tests.test_fabric_launchers import FAKE_SSH, environment, free_port

ROOT = Path(__file__).parent.parent
BRIEF = ("batch.steps=2", "validation.every_steps=0")
PYTHON = str(Path(os.sys.executable))
ENDS_S = 240.0


def samples(run_dir: Path) -> list[Any]:
    records = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    return [(it["step"], it["group"], it["response_ids"], it["reward"]) for it in records if it["kind"] == "train"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs, with a finished run on one device, and settings that say nothing of devices."""
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    settings = train_settings(folder, folder / "alone", *BRIEF, "checkpoint.every_steps=0")
    assert run_training(settings, resume=False) == 0
    text = dump_yaml(settings)
    kept, skipping = [], False
    for line in text.splitlines():
        skipping = line.startswith("cluster:") or (skipping and line.startswith(" "))
        if not skipping:
            kept.append(line)
    (folder / "run.yaml").write_text("\n".join(kept) + "\n")
    return folder


def torchrun(*words: str) -> list["subprocess.Popen[str]"]:
    command = [PYTHON, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    command += [f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=run", "--local-addr=localhost"]
    pipe = subprocess.PIPE
    whole = [*command, "-m", "meshloom", "train", *words]
    return [subprocess.Popen(whole, cwd=ROOT, env=environment(), stdout=pipe, stderr=pipe, text=True) for _ in range(2)]


@pytest.mark.slow
def test_under_torchrun(inputs: Path, tmp_path: Path) -> None:
    agents = torchrun(str(inputs / "run.yaml"), f"run_dir={tmp_path / 'run'}")
    told = [agent.communicate(timeout=ENDS_S) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], told
    assert samples(tmp_path / "run") == samples(inputs / "alone")


@pytest.mark.slow
def test_from_a_host_file_with_a_device_map(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text(FAKE_SSH)
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("worker-0\nworker-1\n")
    (tmp_path / "map.yaml").write_text('actor: {devices: ["worker-1:0"]}\nrollout: {devices: ["worker-0:0"]}\n')
    words = ["--hostfile", str(tmp_path / "hosts"), "--device-map", str(tmp_path / "map.yaml"), "--address=127.0.0.1"]
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "FAKE_SSH_LOG": str(tmp_path / "ssh.log")}
    done = subprocess.run(
        [PYTHON, "-m", "meshloom", "launch", str(inputs / "run.yaml"), f"run_dir={tmp_path / 'run'}", *words],
        cwd=ROOT,
        env=environment(**path),
        capture_output=True,
        text=True,
        timeout=ENDS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert samples(tmp_path / "run") == samples(inputs / "alone")


@pytest.mark.slow
def test_a_worker_killed_under_torchrun_ends_all_and_the_run_goes_on_elsewhere(inputs: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    agents = torchrun(str(inputs / "run.yaml"), f"run_dir={run_dir}", "batch.steps=200", "checkpoint.every_steps=1")
    while not list(run_dir.glob("checkpoints/step-*")):
        assert all(agent.poll() is None for agent in agents), [agent.communicate() for agent in agents]
    processes = [process for agent in agents for process in psutil.Process(agent.pid).children(recursive=True)]
    workers = [process for process in processes if "meshloom.fabric.worker" in " ".join(process.cmdline())]
    assert len(workers) == 2
    os.kill(workers[1].pid, signal.SIGKILL)
    told = [agent.communicate(timeout=ENDS_S) for agent in agents]
    for _, errors in told:
        assert "was killed by SIGKILL" in errors, errors
    assert any("exitcode: 3" in errors for _, errors in told), told
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []
    assert read_status(run_dir)["state"] == "failed"
    saved = max(int(folder.name.partition("-")[2]) for folder in run_dir.glob("checkpoints/step-*"))
    more = (f"batch.steps={saved + 1}", "checkpoint.every_steps=1", "validation.every_steps=0")
    assert run_training(train_settings(inputs, run_dir, *more), resume=True) == 0
    assert read_status(run_dir)["state"] == "finished"
