"""The nodes of a run: what a scheduler, a launcher or a host file gives, against what the run takes.

Owns: findings about them. Refuses to know: how processes are started. Always holds: nothing is sent to another machine; names
are looked up only where a run has several nodes. Codes: N050 to N056.
"""

import errno
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from meshloom.config.launch_environment import TORCHRUN, LaunchEnvironment
from meshloom.doctor.findings import Report
from meshloom.doctor.needs import Needs
from meshloom.plan.host_names import expand, fold

_PORT = 29500
"""torchrun's own default."""
_MOST_NAMES = 64


def examine_nodes(report: Report, environment: LaunchEnvironment, needs: Needs, host_file: Path | None) -> None:
    """Facts and findings about nodes."""
    report.fact("nodes", "this host", socket.gethostname())
    names: tuple[str, ...] = ()
    sources: list[str] = []
    if environment.slurm.get("SLURM_JOB_ID"):
        sources.append("SLURM")
        names = _slurm(report, environment.slurm, needs)
    if environment.torchrun:
        sources += _torchrun(report, environment.torchrun, needs)
    files = {name: Path(file) for name, file in environment.host_files.items()}
    if host_file is not None:
        files = {"--hostfile": host_file, **files}
    for name, file in files.items():
        sources.append(f"{name} {file}")
        names = _host_file(report, name, file, needs, required=file == host_file) or names
    if needs.asks_ray:
        sources.append("a Ray cluster (fabric=ray)")
    report.fact("nodes", "launched by", ", ".join(sources) or "nothing that says so: this machine alone")
    for name, value in environment.libraries.items():
        report.fact("nodes", name, value)
    if needs.nodes > 1 and not sources and len(set(needs.node_names)) < 2:
        what = f"the run takes {needs.nodes} nodes, and nothing says which they are"
        fix = "a SLURM allocation, torchrun, --hostfile for `meshloom launch`, fabric=ray, or cluster.node_names"
        report.require("N056", what, where="cluster.nodes", fix=fix)
    _names(report, names or needs.node_names, needs)
    _ports(report, environment.torchrun)


def _compare(report: Report, source: str, nodes: int, needs: Needs) -> None:
    if nodes < needs.nodes:
        what = f"the run takes {needs.nodes} nodes, and {source} gives {nodes}"
        report.require("N050", what, where="cluster.nodes", fix=f"ask for {needs.nodes}, or set cluster.nodes={nodes}")
    elif nodes > needs.nodes > 1:
        what = f"{source} gives {nodes} nodes, and the run takes {needs.nodes}"
        report.warn("N050", what, where="cluster.nodes", fix=f"set cluster.nodes={nodes} to use them all")


def _slurm(report: Report, given: Mapping[str, str], needs: Needs) -> tuple[str, ...]:
    """The nodes of an allocation."""
    report.fact("nodes", "SLURM job", given["SLURM_JOB_ID"])
    listed = given.get("SLURM_JOB_NODELIST", "")
    names: tuple[str, ...] = ()
    try:
        names = node_list(listed)
    except ValueError as error:
        report.warn("N051", f"SLURM_JOB_NODELIST={listed} cannot be read: {error}", where="SLURM_JOB_NODELIST")
    count = given.get("SLURM_JOB_NUM_NODES", "")
    nodes = int(count) if count.isdecimal() else len(names)
    report.fact("nodes", "SLURM nodes", f"{nodes}: {listed}" if listed else nodes)
    if nodes:
        _compare(report, "the SLURM allocation", nodes, needs)
    gpus = given.get("SLURM_GPUS_ON_NODE", "")
    if needs.gpu and gpus.isdecimal() and int(gpus) < needs.devices_per_node:
        what = f"the run takes {needs.devices_per_node} devices of each node, and SLURM gives {gpus}"
        fix = f"ask for --gpus-per-node={needs.devices_per_node}, or set cluster.devices_per_node={gpus}"
        report.require("N055", what, where="cluster.devices_per_node", fix=fix)
    return names


def node_list(text: str) -> tuple[str, ...]:
    """Names of SLURM's list: ``gpu[01-04],login1``.

    Raises:
        ValueError: if it cannot be read.
    """
    parts = re.split(r",(?![^\[]*\])", text) if text else []
    return tuple(name for part in parts for name in expand(part))


def _torchrun(report: Report, given: Mapping[str, str], needs: Needs) -> list[str]:
    needed = [name for name in TORCHRUN if name != "LOCAL_WORLD_SIZE"]
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return []
    missing = [name for name in needed if name not in given]
    for name, value in given.items():
        report.fact("nodes", name, value)
    if missing:
        what = f"{', '.join(name for name in given)} are set, and {', '.join(missing)} are not"
        fix = "start through torchrun, or unset them"
        report.require("N051", what, where="environment", why="a launcher sets all of them", fix=fix)
        return ["something like torchrun"]
    wrong = [name for name in needed if name != "MASTER_ADDR" and not given[name].isdecimal()]
    if wrong or int(given["RANK"]) >= int(given["WORLD_SIZE"]):
        what = ", ".join(f"{name}={given[name]}" for name in wrong or ("RANK", "WORLD_SIZE"))
        why = "" if wrong else "ranks count from 0"
        report.require(
            "N051", f"{what} cannot be", where="environment", why=why, fix="start through torchrun, or unset them"
        )
        return ["torchrun"]
    world, wanted = int(given["WORLD_SIZE"]), needs.nodes * needs.devices_per_node
    if world != wanted and needs.run_dir is not None:
        what = f"the run takes {wanted} devices, and torchrun has started {world} processes"
        fix = f"torchrun --nnodes={needs.nodes} --nproc-per-node={needs.devices_per_node}"
        report.require("N050", what, where="cluster", fix=fix)
    return ["torchrun"]


def _host_file(report: Report, name: str, file: Path, needs: Needs, *, required: bool) -> tuple[str, ...]:
    """Hosts of a file: one a line, with ``slots=8`` or ``:8`` behind it, or as often as it has slots."""
    tell = report.require if required else report.warn
    try:
        lines = [line.partition("#")[0].strip() for line in file.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror or "" if isinstance(error, OSError) else "it is not UTF-8 text"
        tell("N052", f"the host file {file} cannot be read: {why}", where=name, fix="name a file of hosts, one a line")
        return ()
    slots: dict[str, int] = {}
    for line in filter(None, lines):
        found = re.match(r"^([^\s:]+)(?::(\d+))?(?:.*?\b(?:slots|max_slots)\s*=\s*(\d+))?", line)
        if found is None:
            tell("N052", f"the line {line!r} of {file} names no host", where=name, fix="one looks like node1 slots=8")
            continue
        slots[found[1]] = slots.get(found[1], 0) + int(found[2] or found[3] or 1)
    if not slots:
        tell("N052", f"the host file {file} names no host", where=name, fix="name a file of hosts, one a line")
        return ()
    report.fact("nodes", "hosts", f"{len(slots)}: {', '.join(fold(slots)[:8])}")
    _compare(report, f"the host file {file}", len(slots), needs)
    few = [host for host, count in slots.items() if 1 < count < needs.devices_per_node]
    if few:
        what = f"the run takes {needs.devices_per_node} devices of each node, and {file} gives {few[0]} {slots[few[0]]}"
        tell("N055", what, where="cluster.devices_per_node", fix=f"write slots={needs.devices_per_node}")
    return tuple(slots)


def _names(report: Report, names: tuple[str, ...], needs: Needs) -> None:
    """Whether the machines can be found by their names."""
    if needs.nodes < 2 and len(names) < 2:
        return
    unknown = [name for name in (socket.gethostname(), *names[:_MOST_NAMES]) if not _resolves(name)]
    if unknown:
        what = f"no address is known for {', '.join(fold(dict.fromkeys(unknown))[:8])}"
        fix = "write them into /etc/hosts of all nodes, or name them as the network does (cluster.node_names)"
        report.warn("N054", what, where="cluster.node_names", why="nodes find each other by name", fix=fix)


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):
        return False
    return True


def _ports(report: Report, given: Mapping[str, str]) -> None:
    """Whether the port is free where processes meet; on this host only."""
    text = given.get("MASTER_PORT", "")
    port = int(text) if text.isdecimal() else _PORT
    if not 0 < port < 65536:
        report.require("N053", f"MASTER_PORT={text} is no port", where="MASTER_PORT", fix="one of 1024 to 65535")
        return
    taken = _is_taken(port)
    report.fact("nodes", f"port {port}", "in use" if taken else "free")
    if taken and text and given.get("RANK", "0") == "0":
        why = "another program listens there, or torchrun itself, which then is no fault"
        report.warn(
            "N053", f"port {port} of this host is in use", where="MASTER_PORT", why=why, fix="another MASTER_PORT"
        )


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno in (errno.EADDRINUSE, errno.EACCES)
    return False
