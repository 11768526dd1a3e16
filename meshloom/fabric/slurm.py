"""A process that srun has started.

Owns: reading SLURM's variables. Always holds: the script of a batch job is none of srun's processes, nor is one alone.
"""

import re
from collections.abc import Mapping

from meshloom.config.errors import UserError
from meshloom.fabric.tasks import Task
from meshloom.plan.host_names import expand

_FIRST_PORT, _NUM_PORTS = 20000, 20000


def task_of(variables: Mapping[str, str]) -> Task | None:
    """The task that SLURM's variables describe; none where srun has not started several processes.

    Args:
        variables: of the environment. ``MASTER_PORT`` beats the port that follows from the job's number.

    Raises:
        UserError: if the list of nodes cannot be read.
    """
    nodelist = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or ""
    needed = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    if not nodelist or not all(name in variables for name in needed) or _is_batch_script(variables):
        return None
    world_size = int(variables.get("SLURM_STEP_NUM_TASKS") or variables["SLURM_NTASKS"])
    if world_size < 2:
        return None
    hosts = hosts_of(nodelist)
    nodes = _tasks_of_nodes(variables, len(hosts), world_size)
    rank, local_rank = int(variables["SLURM_PROCID"]), int(variables["SLURM_LOCALID"])
    job = f"{variables.get('SLURM_JOB_ID', '0')}.{variables.get('SLURM_STEP_ID', '0')}"
    node_index = int(variables.get("SLURM_NODEID") or _node_of(rank, nodes))
    return Task(
        kind="slurm",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        node_index=node_index,
        nodes=nodes,
        master=(hosts[0], int(variables.get("MASTER_PORT") or _port(job))),
        has_store=False,
        key=job,
        name=variables.get("MESHLOOM_NODE") or variables.get("SLURMD_NODENAME") or hosts[node_index],
    )


def hosts_of(nodelist: str) -> list[str]:
    """Names in a list as SLURM writes it: ``gpu[01-03,07],login1``.

    Raises:
        UserError: if it cannot be read.
    """
    parts = [part for part in re.split(r",(?![^\[]*\])", nodelist) if part]
    try:
        return [name for part in parts for name in expand(part)]
    except ValueError as error:
        raise UserError("the list of nodes cannot be read", where="SLURM_JOB_NODELIST", why=str(error)) from error


def _is_batch_script(variables: Mapping[str, str]) -> bool:
    """The script of a batch job is given a task's variables too, but no step."""
    return variables.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in variables


def _tasks_of_nodes(variables: Mapping[str, str], num_nodes: int, world_size: int) -> tuple[int, ...]:
    """Tasks of each node, from ``4(x2),3``; evenly where SLURM does not say."""
    text = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE") or ""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    nodes = tuple(int(count) for count, times in found for _ in range(int(times or 1)))
    if sum(nodes) == world_size and len(nodes) == num_nodes:
        return nodes
    each, more = divmod(world_size, num_nodes)
    return tuple(each + (node < more) for node in range(num_nodes))


def _node_of(rank: int, nodes: tuple[int, ...]) -> int:
    node = 0
    while rank >= nodes[node]:
        rank, node = rank - nodes[node], node + 1
    return node


def _port(job: str) -> int:
    """A port that all tasks of a step come to by themselves."""
    number, _, step = job.partition(".")
    digits = [int(re.sub(r"\D", "", text) or 0) for text in (number, step)]
    return _FIRST_PORT + (digits[0] * 7 + digits[1]) % _NUM_PORTS
