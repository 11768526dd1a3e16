"""Seconds of bytes that move: weights to an engine, and what offload brings and takes away.

Owns: which way bytes take, and what it gives. Refuses to know: when they move. Always holds: a link's rate is its maker's,
times a constant that is listed.
"""

from collections.abc import Iterable, Iterator

from meshloom.plan.constants import Cluster, Constants
from meshloom.plan.residency import EngineRole, ModelRole, Move, Phase, Residency
from meshloom.plan.seconds import PhaseTime, Seconds


def movement_time(
    engine: EngineRole, source: ModelRole, cluster: Cluster, constants: Constants, *, apart: bool
) -> PhaseTime:
    """Weights from a trained role to an engine.

    Args:
        engine: that receives; one without weights of its own gets nothing.
        source: that sends.
        cluster: the devices.
        constants: of the cost model.
        apart: whether the engine is on other devices.
    """
    if not engine.own_weights:
        return PhaseTime(phase=Phase.SYNC, role=engine.name, parts=())
    count = source.model.total * engine.width / engine.tensor
    devices = source.cut.devices
    if apart:
        rate, how = (
            cluster.link(devices + engine.tensor, 1, constants, moving=True),
            "over the link between the devices",
        )
    elif devices > 1:
        rate, how = cluster.link(devices, 1, constants), "gathered from all devices"
    else:
        rate, how = cluster.device.memory_bandwidth * constants.copy_share / 2, "copied on the device"
    formula = f"{count / 1e9:,.2f} GB, {how}"
    part = Seconds(name="weights", seconds=count / rate, formula=formula, over_devices=apart or devices > 1)
    return PhaseTime(phase=Phase.SYNC, role=engine.name, parts=(part,))


def offload_time(moves: Iterable[Move], cluster: Cluster, constants: Constants) -> Iterator[Seconds]:
    """What offload moves in a step, each of a node's devices over its own link to the host, and all of them to one disk."""
    for move in moves:
        rate = cluster.device.host_bandwidth * constants.host_share
        if move.at is Residency.DISK:
            rate = min(rate, constants.disk_bandwidth / cluster.devices_per_node)
        formula = f"{move.bytes / 1e9:,.2f} GB × {move.ways}, {move.at}"
        yield Seconds(name=f"{move.role}: {move.name}", seconds=move.seconds(rate), formula=formula)
