"""Copying lists of tensors to their places, again and again, with checksums of what was read and of what is there.

Owns: the choice between one launch for all (``copy_kernels``) and torch's copies, and the tables of the former. Refuses to
know: what the tensors are. Always holds: nothing waits for the device; a place has the dtype and the size of what is copied
there.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshloom.weights.checksum import checksums_into

if TYPE_CHECKING:  # its kernels need Triton, which torch for the processor does not bring
    from meshloom.weights.copy_kernels import CopyPlan

Address = tuple[int, int, int]


class Copier:
    """Copies lists of tensors, each list under a number of its own.

    Args:
        kernels: copy what lies whole in memory by one launch; for CUDA, or Triton's interpreter.
    """

    def __init__(self, *, kernels: bool) -> None:
        self._kernels = kernels
        self._plans: dict[int, tuple[list[Address], CopyPlan]] = {}

    def copy(self, number: int, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy each source to its target."""
        plan, others = self._plan(number, sources, targets)
        if plan is not None:
            plan.run()
        _copy_each(others, sources, targets)

    def copy_and_sum(self, number: int, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The same.

        Returns:
            Checksums of the sources as they were read, and of the targets read afterwards, int64 [sources].
        """
        before, after = (torch.zeros(len(sources), dtype=torch.int64, device=targets[0].device) for _ in range(2))
        plan, others = self._plan(number, sources, targets)
        if plan is not None:
            plan.run_and_sum(before, after)
        _copy_each(others, sources, targets)
        for place in others:
            checksums_into(before[place : place + 1], [sources[place]])
            checksums_into(after[place : place + 1], [targets[place]])
        return before, after

    def _plan(
        self, number: int, sources: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> tuple["CopyPlan | None", list[int]]:
        """The plan of what one launch copies, if there is such, and the places of what it does not."""
        if not self._kernels:
            return None, list(range(len(sources)))
        from meshloom.weights.copy_kernels import CopyPlan, is_plain

        pairs = list(zip(sources, targets, strict=True))
        plain = [is_plain(*pair) for pair in pairs]
        places = [place for place, fits in enumerate(plain) if fits]
        others = [place for place, fits in enumerate(plain) if not fits]
        if not places:
            return None, others
        addresses = [(pairs[p][0].data_ptr(), pairs[p][1].data_ptr(), pairs[p][0].nbytes) for p in places]
        if number not in self._plans or self._plans[number][0] != addresses:
            self._plans[number] = addresses, CopyPlan(places, [pairs[p] for p in places])
        return self._plans[number][1], others


def _copy_each(places: list[int], sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    if places:
        torch._foreach_copy_([targets[p] for p in places], [sources[p] for p in places], non_blocking=True)
