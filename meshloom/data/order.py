"""The order of prompts: endless, shuffled anew in each epoch, resumable.

Owns: which prompt comes next. Refuses to know: what a prompt is. Always holds: within an epoch every prompt comes exactly
once; the order depends on the seed, the epoch and the number of prompts alone, not on how many are taken at a time; a
loaded state continues exactly where it was saved.
"""

from typing import Any

import numpy as np

from meshloom.config.errors import UserError


class PromptOrder:
    """Indices of prompts, epoch after epoch.

    The permutation of an epoch sorts raw 64-bit draws of PCG64 (O'Neill 2014) seeded by (seed, epoch). numpy promises that
    raw draws stay the same in all its versions, which it does not promise for ``Generator.permutation``.

    Args:
        num_prompts: prompts of an epoch, at least one.
        seed: the run's seed, any integer.
        shuffle: a new order in each epoch; false: as they stand, every time.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool) -> None:
        if num_prompts < 1:
            raise ValueError(f"an order needs at least one prompt, got {num_prompts}")
        self.num_prompts, self.seed, self.shuffle = num_prompts, seed, shuffle
        self._epoch, self._position = 0, 0
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """Epochs completed: the number, from 0, of the epoch the next prompt belongs to."""
        return self._epoch

    @property
    def position(self) -> int:
        """Prompts already taken from the present epoch, less than ``num_prompts``."""
        return self._position

    def take(self, n: int) -> list[int]:
        """The next ``n`` indices; they may reach into the next epochs."""
        taken: list[int] = []
        while len(taken) < n:
            piece = self._order[self._position : self._position + n - len(taken)]
            taken += piece.tolist()
            self._position += len(piece)
            if self._position == self.num_prompts:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
        return taken

    def state(self) -> dict[str, Any]:
        """All that decides the indices to come, as JSON."""
        return {
            "num_prompts": self.num_prompts,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self._epoch,
            "position": self._position,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            UserError: if the state belongs to other prompts, another seed or another ``shuffle``.
        """
        own = self.state()
        for name in ("num_prompts", "seed", "shuffle"):
            if state[name] != own[name]:
                raise UserError(
                    "the checkpoint's order of prompts does not fit this run",
                    where=name,
                    why=f"it was saved with {state[name]}, the run has {own[name]}",
                    fix="resume with the same data and settings, or start a new run",
                )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_prompts)
        draws = np.random.PCG64(np.random.SeedSequence([self.seed % 2**64, epoch])).random_raw(self.num_prompts)
        return np.argsort(draws, kind="stable")
