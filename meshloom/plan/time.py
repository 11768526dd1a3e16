"""The time ledger: seconds of a step, from a roofline of its devices and their links.

Owns: how phases make a step; names the cost model's parts in one place (``generation_time``, ``training_time``,
``movement_time``). Refuses to know: settings, which devices they are. Always holds: each second has a formula.
"""

from collections.abc import Iterable

from meshloom.plan.constants import Constants
from meshloom.plan.generation_time import Requests, decode_step, generate_time
from meshloom.plan.movement_time import movement_time, offload_time
from meshloom.plan.seconds import PhaseTime, Seconds
from meshloom.plan.training_time import forward_time, update_time

__all__ = [
    "PhaseTime",
    "Requests",
    "Seconds",
    "decode_step",
    "forward_time",
    "generate_time",
    "movement_time",
    "offload_time",
    "step_seconds",
    "update_time",
]


def step_seconds(
    rollout: Iterable[PhaseTime],
    training: Iterable[PhaseTime],
    constants: Constants,
    *,
    offload: float = 0.0,
    apart: bool = False,
) -> float:
    """Seconds of a step.

    Args:
        rollout: phases of the engines' devices.
        training: phases of the other roles' devices, in their order.
        constants: of the cost model.
        offload: seconds of what offload moves.
        apart: whether both are on devices of their own and a lag of a version or more lets them work at once.
    """
    sampled, trained = (sum(phase.seconds for phase in phases) for phases in (rollout, training))
    return (max(sampled, trained) if apart else sampled + trained) + offload + constants.beside_phases_s
