"""The critic's loss.

Owns: the clipped squared error. Always holds: it is halved here, and divided only by the reducer.

Legend: T tokens end to end.
"""

import torch
from torch import Tensor


def value_loss(value_T: Tensor, old_value_T: Tensor, returns_T: Tensor, mask_T: Tensor, *, clip: float) -> Tensor:
    """½ · max((V − R)², (clip(V, V_old ± clip) − R)²) per token, to be reduced; [T], differentiable in ``value_T``.

    From the reference implementation of PPO (Schulman et al. 2017, arXiv:1707.06347).

    Args:
        value_T: the critic's values now.
        old_value_T: its values when the advantages were computed.
        returns_T: what it should have said.
        mask_T: the model's own tokens, bool; the loss is 0 elsewhere.
        clip: how far a value may move from the old one before it gains nothing.
    """
    value_T, old_T, returns_T = (torch.where(mask_T, x, 0.0) for x in (value_T, old_value_T, returns_T))
    clipped_T = torch.clamp(value_T, old_T - clip, old_T + clip)
    return 0.5 * torch.maximum((value_T - returns_T).square(), (clipped_T - returns_T).square())
