"""The workers of a run: starting them, and ending them at once.

Owns: what each of them computes on, where they print, and what the controller lets go of when one fails. Refuses to know:
what runs on them, how processes are started and failures noticed (``fabric``). Always holds: a run that ends before it begins
leaves no log behind; after a failure nobody waits for rewards or environments that are yet to answer, and the error that the
run ends with is the worker's, not one that followed from it.
"""

import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from rich.console import Console

from meshloom.config.errors import RunFault, UserError
from meshloom.config.settings import SftSettings, TrainSettings
from meshloom.fabric.launch import PlannedNode, open_site
from meshloom.fabric.workers import Workers
from meshloom.loop.session import Session
from meshloom.observe.run_folder import LOGS_FOLDER, SETTINGS_FILE
from meshloom.plan.layout import Layout
from meshloom.train.load import pick_device


@contextmanager
def start_workers(settings: TrainSettings | SftSettings, layout: Layout, host: str) -> Iterator[Workers]:
    """The workers of a run, one a device; their logs are in the run folder, and leave with what ends it before it begins.

    Args:
        settings: of the run.
        layout: of its roles.
        host: class of the object in each worker, as ``module:name``.
    """
    topology = layout.topology
    nodes = _nodes(settings, layout)
    run_dir = Path(settings.run_dir)
    logs = run_dir / LOGS_FOLDER
    made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    roles = {rank: _roles_text(layout, rank) for rank in range(topology.num_devices)}
    count, on = topology.num_devices, f" on {topology.num_nodes} nodes" if topology.num_nodes > 1 else ""
    starting = f"starting {count} {'worker' if count == 1 else 'workers'}{on}; what they print: {logs}"
    Console().print(starting, markup=False, highlight=False, soft_wrap=True)
    try:
        with (
            open_site(
                nodes,
                fabric=settings.fabric,
                ray_address=settings.cluster.ray_address,
                named=bool(topology.names),
            ) as site,
            Workers(host, site=site, logs=logs, roles=roles) as workers,
        ):
            yield workers
    except (UserError, KeyboardInterrupt) as error:
        if not isinstance(error, RunFault) and not (run_dir / SETTINGS_FILE).exists():
            shutil.rmtree(logs, ignore_errors=True)
            for folder in made:
                with suppress(OSError):  # others may have put something there
                    folder.rmdir()
        raise


def _nodes(settings: TrainSettings | SftSettings, layout: Layout) -> list[PlannedNode]:
    """What each worker of each node computes on.

    Raises:
        UserError: if this machine has fewer GPUs than each node is asked for.
    """
    topology, device = layout.topology, pick_device(settings.device)
    count = topology.devices_per_node
    if device.index is not None:
        what = f"device={settings.device} names one GPU, and the run is over {topology.num_devices} devices"
        raise UserError(what, where="device", fix="device=cuda; CUDA_VISIBLE_DEVICES says which GPUs there are")
    if device.type == "cuda" and (found := torch.cuda.device_count()) < count:
        raise UserError(
            f"the run is over {count} devices of a node, and this machine shows {found}",
            where="cluster.devices_per_node",
            fix=f"cluster.devices_per_node={found}, or device=cpu",
        )
    devices = tuple(f"cuda:{index}" if device.type == "cuda" else "cpu" for index in range(count))
    return [PlannedNode(topology.node_name(node), devices) for node in range(topology.num_nodes)]


def _roles_text(layout: Layout, rank: int) -> str:
    return ", ".join(str(found.role) for found in layout.roles if found.devices.rank_of(rank) is not None)


@contextmanager
def closed_by_failure(workers: Workers) -> Iterator[ExitStack]:
    """What the controller waits for beside workers: once one of them has failed it is closed, and nobody waits for it."""
    waited_for, one_closes = ExitStack(), threading.Lock()

    def close() -> None:
        with one_closes:
            waited_for.close()

    workers.on_failure(close)
    try:
        yield waited_for
    finally:
        close()


@contextmanager
def stopping_at_once(workers: Workers, session: Session) -> Iterator[None]:
    """Who asks twice waits neither for what workers do nor for a checkpoint that they have yet to write. What goes wrong after
    a worker has failed goes wrong for that."""
    try:
        yield
    except KeyboardInterrupt:
        workers.close(at_once=True)
        with suppress(RuntimeError, UserError):  # what is not whole is taken away
            session.store.wait()
        raise
    except Exception:
        workers.raise_fault()
        raise
