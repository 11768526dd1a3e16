"""Compiling the layers ahead, in a process of its own, while the run that needs them still loads and generates.

Owns: that process, what it is told, and its end. Refuses to know: the run's weights and data. Always holds: a run gets no
number from it: all it leaves are entries in the compilers' caches on disk, which hold the code that the run would compile
itself; a run waits for it only before it would do that, for a bounded time, and goes on without it if it fails; it opens the
GPU after the run has, so a GPU that takes one process only is the run's.

This module needs no torch; the process itself is ``meshloom.train.rehearsal``.
"""

import json
import subprocess
import sys
from contextlib import suppress
from types import TracebackType
from typing import Self

from meshloom.config.settings import KlPlace, SftSettings, TrainSettings
from meshloom.plan.compute import compiles
from meshloom.plan.ledger import longest_sample_tokens, most_microbatch_tokens
from meshloom.plan.memory import on_gpu

_DEADLINE_S = 60.0
"""Most seconds a run waits; to compile all by itself takes less."""
_LEAST_FREE_BYTES = 8 * 2**30
"""Of a GPU beside an engine that has taken what it needs: twice what the process may take."""


class CompileAhead:
    """The process, where a run compiles on a GPU; a context that ends it. Elsewhere nothing happens.

    It is started before torch is imported here, as it has to import it too, and waits for ``begin``.

    Args:
        settings: of the run.

    ``after_engine`` says that ``begin`` must wait for the engine: vLLM measures the GPU's free memory as it starts and wants it
    still.
    """

    def __init__(self, settings: TrainSettings | SftSettings) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.after_engine = isinstance(settings, TrainSettings) and settings.rollout.engine == "vllm"
        if on_gpu(settings.device) and compiles(settings.model, gpu=True):
            self._process = subprocess.Popen(
                [sys.executable, "-m", "meshloom.train.rehearsal"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def begin(self, settings: TrainSettings | SftSettings, device: str, free_bytes: int | None = None) -> None:
        """Compile what the run will need, now that the run has opened its device.

        Args:
            settings: of the run.
            device: that it computes on.
            free_bytes: of the device's memory, where an engine has taken what it needs; too few leave all to the run.
        """
        if self._process is None or self._process.stdin is None:
            return
        told, self._process.stdin = self._process.stdin, None
        with suppress(BrokenPipeError), told:  # it may have ended; the run then compiles by itself
            if free_bytes is None or free_bytes >= _LEAST_FREE_BYTES:
                told.write(request(settings, device))

    def wait(self) -> None:
        """Wait until what was begun is compiled: what is almost done would else be done over again."""
        if self._process is not None and self._process.stdin is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_DEADLINE_S)


def request(settings: TrainSettings | SftSettings, device: str) -> str:
    """What the process is told: the model, its device, and sizes like those of the run's first pass."""
    tokens = most_microbatch_tokens(settings)
    group, asks = 1, False
    if isinstance(settings, TrainSettings):
        batch, group = settings.batch, settings.batch.samples_per_prompt
        one_update = batch.prompts_per_update in (None, batch.prompts_per_step) and batch.epochs_per_step == 1
        asks = not one_update or settings.algorithm.kl is not KlPlace.NONE
    told = {
        "model": settings.model.model_dump(mode="json"),
        "device": device,
        "tokens": tokens,
        "longest": min(tokens, longest_sample_tokens(settings)),
        "group": group,
        "asks": asks,
    }
    return json.dumps(told)
