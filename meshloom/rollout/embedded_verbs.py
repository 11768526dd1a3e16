"""The verbs that both embedded engines share: new weights, sleeping and waking.

Owns: whether the engine sleeps, the version of the weights. Refuses to know: how tokens are drawn. Always
holds: the cache has memory only while an engine generates, so sleeping frees nothing, and an engine that generates does not
sleep.
"""

from abc import ABC, abstractmethod
from typing import Protocol

from meshloom.config.errors import RunFault
from meshloom.rollout.endings import HearsEnds
from meshloom.rollout.peers import Alone, Peers
from meshloom.rollout.protocol import PromptCount


def logits_not_finite(version: int) -> RunFault:
    """What ends a run whose model predicts nothing any more.

    Args:
        version: of the weights; 0 are those that were loaded.
    """
    if version == 0:
        what, where = "the model gives logits that are not finite", "model.path"
        why, fix = (
            "its weights are broken, or too large for this arithmetic",
            "check the folder, or set model.dtype=float32",
        )
    else:
        what, where = f"the weights of version {version} give logits that are not finite", "optimizer.lr"
        why = "training has driven the weights so far that they overflow"
        fix = "a smaller optimizer.lr, more optimizer.warmup_updates or a smaller optimizer.max_grad_norm, in a new run"
    return RunFault(what, where=where, why=why, fix=fix)


class KeepsPrompts(Protocol):
    """A scheduler of a generation that is on."""

    def forget(self) -> None:
        """The weights have changed: what was computed is for the samples that run, and for no other."""
        ...


class EmbeddedVerbs(HearsEnds, ABC):
    """Base of the engines that sample with the trainer's own weights."""

    def __init__(self, peers: Peers | None) -> None:
        super().__init__()
        self._peers = peers or Alone()
        self.version = 0
        self._asleep = False
        self._prompts = PromptCount()

    @property
    @abstractmethod
    def _current(self) -> KeepsPrompts | None:
        """The scheduler of the generation that is on; none if there is none."""

    def first_says(self, number: int) -> int:
        """The number of the first of the devices that hold the model together; due on all of them."""
        return self._peers.first_says(number)

    def take_prompts(self) -> PromptCount:
        """Tokens of prompts since the last call."""
        taken, self._prompts = self._prompts, PromptCount()
        return taken

    def count_prompt(self, computed: int, reused: int) -> None:
        """Count a prompt's tokens."""
        self._prompts.add(computed, reused)

    def load_weights(self, version: int) -> None:
        """The module's weights were changed in place; tokens drawn from now on carry ``version``.

        Samples that run go on with the keys and values they have; what was kept for samples yet to start is forgotten.
        """
        self.version = version
        if self._current is not None:
            self._current.forget()

    def sleep(self) -> None:
        """Refuse to generate until ``wake``. The cache holds memory only while ``generate`` runs, so none is left to free.

        Raises:
            RuntimeError: if the engine is generating.
        """
        if self._current is not None:
            raise RuntimeError("the engine is generating; close its iterator before sleep()")
        self._asleep = True

    def wake(self) -> None:
        """Allow generating again."""
        self._asleep = False

    def _require_awake(self) -> None:
        if self._asleep:
            raise RuntimeError("the engine sleeps; call wake() before generate()")
