"""A process that torchrun has started.

Owns: reading its variables. Always holds: without all of them, no process is taken for one of torchrun's.
"""

from collections.abc import Mapping

from meshloom.fabric.tasks import Task

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def task_of(variables: Mapping[str, str]) -> Task | None:
    """The task that torchrun's variables describe; none where they are not set.

    Args:
        variables: of the environment.
    """
    if not all(name in variables for name in _NEEDED):
        return None
    rank, world_size, local_rank = (int(variables[name]) for name in _NEEDED[:3])
    slots = int(variables.get("LOCAL_WORLD_SIZE", world_size))
    restart = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Task(
        kind="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        node_index=int(variables.get("GROUP_RANK", rank // slots)),
        nodes=(slots,) * (world_size // slots),
        master=(variables["MASTER_ADDR"], int(variables["MASTER_PORT"])),
        has_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        key=f"{variables.get('TORCHELASTIC_RUN_ID', 'run')}/{restart}",
        name=variables.get("MESHLOOM_NODE", ""),
    )
