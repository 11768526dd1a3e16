"""The doctor: what it finds on a machine, what it misses for a run, and that it is light."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import meshloom.doctor
from meshloom.cli import main
from meshloom.doctor.gpus import links_in_words, read_links
from meshloom.doctor.nodes import node_list
from meshloom.doctor.packages import at_least, version_of
from tests.test_plan_outlook import DATA, public
from tests.test_plan_page import TINY, folder

CODES = {
    code
    for file in Path(meshloom.doctor.__file__).parent.glob("*.py")
    for code in re.findall(r'"(N\d{3})"', file.read_text())
}
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE", "PBS_NODEFILE")
LISTED = """\
0, NVIDIA H200, 143771, 4, 570.86.15, GPU-aaaa1111
1, NVIDIA H200, 143771, 81920, 570.86.15, GPU-bbbb2222
"""
HEAD = "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
NVLINK = f"""{HEAD}GPU0\t X \tNV18\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tPXB\t0-47\t0\t\tN/A
NIC0\tPIX\tPXB\t X

Legend:

  X    = Self
"""
PCIE = NVLINK.replace("NV18", "SYS")
OVERVIEW = "| NVIDIA-SMI 570.86.15     Driver Version: 570.86.15    CUDA Version: 12.8     |\n"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny model, in an environment that says nothing."""
    monkeypatch.chdir(tmp_path)
    for name in (*VARIABLES, *SLURM):
        monkeypatch.delenv(name, raising=False)
    folder(tmp_path / "m", TINY, 100)
    return tmp_path


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts an ``nvidia-smi`` on the PATH that says what it is told."""

    def install(listed: str = LISTED, matrix: str = NVLINK, code: int = 0) -> None:
        bin_folder = tmp_path / "bin"
        bin_folder.mkdir(exist_ok=True)
        for name, text in (("listed", listed), ("matrix", matrix), ("overview", OVERVIEW)):
            (bin_folder / name).write_text(text)
        choice = 'case "$1" in topo) f=matrix;; --query*) f=listed;; *) f=overview;; esac'
        script = f"#!/bin/sh\n{choice}\n/bin/cat {bin_folder}/$f\nexit {code}\n"
        (bin_folder / "nvidia-smi").write_text(script)
        (bin_folder / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{bin_folder}:/usr/bin:/bin")

    return install


def doctor(capsys: pytest.CaptureFixture[str], *args: str, run: bool = True) -> tuple[dict, dict[str, list[dict]]]:
    """What it says as JSON, and its findings by their codes; its exit code is checked."""
    capsys.readouterr()
    code = main(["doctor", *([*DATA, "model.path=m", "--kind", "train"] if run else []), *args, "--json"])
    said = json.loads(capsys.readouterr().out)
    found: dict[str, list[dict]] = {}
    for finding in said["findings"]:
        found.setdefault(finding["code"], []).append(finding)
    assert code == (0 if said["ok"] else 2)
    assert said["ok"] == all(finding["level"] != "required" for finding in said["findings"])
    assert set(found) <= CODES
    return said, found


def test_a_machine_alone_is_fine_where_meshloom_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    said, _ = doctor(capsys, run=False)
    assert said["ok"]
    assert said["facts"]["packages"]["torch"] == version_of("torch")
    assert {"processors", "memory", "disk", "open files", "locked memory"} <= set(said["facts"]["machine"])
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("nothing is missing\n")


def test_it_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from meshloom.cli import main; main(['doctor']);"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.endswith("[]\n")


def test_devices_links_and_driver_are_told(capsys: pytest.CaptureFixture[str], driver) -> None:
    driver()
    said, found = doctor(capsys, run=False)
    devices = said["facts"]["devices"]
    assert devices["GPU 0"] == "NVIDIA H200 (cluster.device=h200), 140.40 GiB, 4.00 MiB in use"
    assert devices["driver"] == "570.86.15, up to CUDA 12.8"
    assert devices["links"] == "NV18 (NVLink) between all pairs"
    assert [finding["where"] for finding in found["N013"]] == ["GPU 1"]


def test_what_devices_lack_for_a_run_is_named(capsys: pytest.CaptureFixture[str], driver, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    _, found = doctor(capsys, "device=cuda")
    assert found["N010"][0]["level"] == "required"
    driver(matrix=PCIE)
    spread = ("cluster.devices_per_node=2", "parallel.rollout.tensor=2", "cluster.device=h100")
    _, found = doctor(capsys, *spread, f"device_memory_bytes={150 * 2**30}")
    assert {"N012", "N018", "N019"} <= set(found) and not {"N010", "N011"} & set(found)
    _, found = doctor(capsys, "device=cuda", "cluster.devices_per_node=4")
    assert "set cluster.devices_per_node=2" in found["N011"][0]["fix"]
    driver(listed=LISTED.replace("1, NVIDIA H200", "1, NVIDIA A100-SXM4-40GB"))
    assert "N014" in doctor(capsys, run=False)[1]
    driver(listed="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", code=9)
    _, found = doctor(capsys, "device=cuda")
    assert "couldn't communicate" in found["N017"][0]["what"] and found["N017"][0]["level"] == "required"
    assert doctor(capsys, run=False)[1]["N017"][0]["level"] == "warning"


def test_a_torch_for_processors_is_named_where_there_are_gpus(capsys: pytest.CaptureFixture[str], driver) -> None:
    driver()
    built = (version_of("torch") or "").partition("+")[2]
    assert ("N015" in doctor(capsys, "device=cuda")[1]) == (built == "cpu")


def test_visible_devices_are_those_that_cuda_sees(capsys: pytest.CaptureFixture[str], driver, monkeypatch) -> None:
    driver()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bbbb")
    said, found = doctor(capsys, run=False)
    assert said["facts"]["devices"]["GPU 0"].endswith("hidden by CUDA_VISIBLE_DEVICES") and "N020" not in found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,7,1")
    said, found = doctor(capsys, "device=cuda", "cluster.devices_per_node=2")
    assert "'7'" in found["N020"][0]["what"] and "this one has 1" in found["N011"][0]["what"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hides 2" in doctor(capsys, "device=cuda")[1]["N010"][0]["what"]


def test_the_table_of_links_is_read_and_other_text_is_not() -> None:
    assert read_links(NVLINK) == {(0, 1): "NV18"}
    three = "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNV4\tSYS\nGPU1\tNV4\t X \tNODE\nGPU2\tSYS\tNODE\t X \n"
    links = read_links(three)
    assert links == {(0, 1): "NV4", (0, 2): "SYS", (1, 2): "NODE"}
    assert "NV4 (NVLink) between 1 pairs" in links_in_words(links)
    for text in ("", "failed\n", "GPU0\n", "\n\n"):
        assert not read_links(text)


def test_packages_that_settings_ask_for_are_required(capsys: pytest.CaptureFixture[str]) -> None:
    loggers = [name for name in ("wandb", "mlflow", "swanlab") if version_of(name) is None]
    _, found = doctor(
        capsys,
        f"logging.loggers=[{','.join(loggers)}]",
        "model.attention=flash_attn",
        "rollout.engine=vllm",
        "fabric=ray",
    )
    missing = {finding["what"].split()[0] for finding in found.get("N003", [])}
    expected = {*loggers, *(name for name in ("flash-attn", "vllm", "ray") if version_of(name) is None)}
    assert missing == expected and expected
    assert all("pip install" in finding["fix"] for finding in found["N003"])
    assert "N003" not in doctor(capsys)[1]


def test_versions_are_compared_by_their_numbers() -> None:
    assert at_least("2.13.0+cu128", "2.11") and at_least("2.11", "2.11") and at_least("10.0", "9.1")
    assert not at_least("2.9.1", "2.11") and not at_least("5.8.9rc1", "5.9")


def test_a_checkpoint_that_the_disk_does_not_hold_is_named(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    path = public(place, "Llama-3.1-70B")
    _, found = doctor(capsys, f"model.path={path}", "device=cpu")
    free = psutil.disk_usage(str(place)).free
    needed = 70_553_706_496 * (4 + 4 + 8)
    assert ("N032" in found) == (needed > free)
    assert ("N033" in found) == (free >= needed > free // 4)
    assert ("N030" in found) == (psutil.virtual_memory().total < 70_553_706_496 * 4)
    (place / "file").write_text("")
    assert "is a file" in doctor(capsys, "run_dir=file/run")[1]["N031"][0]["what"]


def test_a_slurm_allocation_is_held_against_the_run(capsys: pytest.CaptureFixture[str], monkeypatch, driver) -> None:
    driver()
    given = {"ID": "7", "NODELIST": "gpu[01-03],login1", "NUM_NODES": "4"}
    for name, value in given.items():
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    said, found = doctor(capsys, run=False)
    assert said["facts"]["nodes"]["SLURM nodes"] == "4: gpu[01-03],login1"
    eight = ("cluster.nodes=8", "cluster.devices_per_node=2", "device=cuda")
    _, found = doctor(capsys, *eight)
    assert "gives 4" in found["N050"][0]["what"] and "gives 1" in found["N055"][0]["what"] and "N056" not in found
    assert "N050" not in doctor(capsys, "cluster.nodes=4", "cluster.devices_per_node=1")[1]
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-")
    assert "N051" in doctor(capsys, run=False)[1]
    assert node_list("a[1-2],b") == ("a1", "a2", "b") and node_list("") == ()


def test_several_nodes_need_someone_to_name_them(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = doctor(capsys, "cluster.nodes=2", "cluster.devices_per_node=1")
    assert found["N056"][0]["level"] == "required"
    assert "N056" not in doctor(capsys, "cluster.nodes=2", "cluster.devices_per_node=1", "fabric=ray")[1]
    named = ("cluster.node_names=[no-such-host-1,no-such-host-2]", "cluster.nodes=2", "cluster.devices_per_node=1")
    _, found = doctor(capsys, *named)
    assert "N056" not in found and "no-such-host-[1-2]" in found["N054"][0]["what"]


def test_torchruns_variables_must_be_whole_and_fit_the_run(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    whole = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    for name, value in whole.items():
        monkeypatch.setenv(name, value)
    assert "MASTER_PORT" in doctor(capsys, run=False)[1]["N051"][0]["what"]
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        _, found = doctor(capsys, "cluster.devices_per_node=2", "cluster.nodes=1", "device=cpu")
        assert "started 4" in found["N050"][0]["what"] and "N053" in found and "N051" not in found
    assert "N053" not in doctor(capsys, run=False)[1]
    for name, value in (("MASTER_PORT", "99999999"), ("MASTER_PORT", "http"), ("RANK", "4"), ("WORLD_SIZE", "-1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert {"N051", "N053"} & set(doctor(capsys, run=False)[1])


def test_a_host_file_names_nodes_and_slots(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    two = ("cluster.nodes=2", "cluster.devices_per_node=8")
    (place / "hosts").write_text("# mine\nlocalhost slots=8\n\n127.0.0.1:4\n")
    said, found = doctor(capsys, *two, "--hostfile", "hosts")
    assert said["facts"]["nodes"]["hosts"] == "2: localhost, 127.0.0.1"
    assert "gives 127.0.0.1 4" in found["N055"][0]["what"] and not {"N050", "N052", "N056"} & set(found)
    for content in (b"", b"# nobody\n", b"\xff\xfe"):
        (place / "hosts").write_bytes(content)
        assert doctor(capsys, *two, "--hostfile", "hosts")[1]["N052"][0]["level"] == "required"
    assert "No such file" in doctor(capsys, "--hostfile", "nowhere")[1]["N052"][0]["what"]


def test_what_the_plan_refuses_is_missing_too(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = doctor(capsys, "model.path=nowhere", "batch.prompts_per_update=3")
    assert {"M001", "B001"} <= set(re.findall(r"\[(\w+)\]", " ".join(one["what"] for one in found["N060"])))
    assert main(["doctor", "no-such.yaml"]) == 2
    assert "there is no file no-such.yaml" in capsys.readouterr().err


def test_threads_that_take_more_than_there_is_are_warned_of(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert {"N042", "N043"} <= set(doctor(capsys, run=False)[1])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "N042" not in doctor(capsys, "cluster.devices_per_node=8")[1]


def test_every_code_is_in_the_documents() -> None:
    documented = set(re.findall(r"\bN\d{3}\b", Path(__file__).parents[1].joinpath("docs/doctor.md").read_text()))
    assert documented == CODES
