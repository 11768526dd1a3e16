"""Compiling the layers ahead, in a process of its own, while the run that needs them still loads and generates.

Owns: that process, what it is told, and its end. Refuses to know: the run's weights and data. Always holds: a run never waits
for it, and gets no number from it: all it leaves are entries in the compilers' caches on disk, which hold the code that the run
would compile itself; it opens the GPU after the run has, so a GPU that takes one process only is the run's.

This module needs no torch; the process itself is ``meshloom.train.rehearsal``.
"""

import json
import subprocess
import sys
from contextlib import suppress
from types import TracebackType
from typing import Self

from meshloom.config.settings import SftSettings, TrainSettings
from meshloom.plan.compute import compiles
from meshloom.plan.ledger import longest_sample_tokens, most_microbatch_tokens
from meshloom.plan.memory import on_gpu


class CompileAhead:
    """The process, where a run compiles on a GPU; a context that ends it. Elsewhere nothing happens, nor beside vLLM, which
    measures the GPU's free memory as it starts and wants it still.

    It is started before torch is imported here, as it has to import it too, and waits for ``begin``.

    Args:
        settings: of the run.
    """

    def __init__(self, settings: TrainSettings | SftSettings) -> None:
        self._process: subprocess.Popen[str] | None = None
        vllm = isinstance(settings, TrainSettings) and settings.rollout.engine == "vllm"
        if on_gpu(settings.device) and compiles(settings.model, gpu=True) and not vllm:
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

    def begin(self, settings: TrainSettings | SftSettings, device: str) -> None:
        """Compile what the run will need, now that the run has opened its device.

        Args:
            settings: of the run.
            device: that it computes on.
        """
        if self._process is None or self._process.stdin is None:
            return
        told, self._process.stdin = self._process.stdin, None
        with suppress(BrokenPipeError), told:  # it may have ended; the run then compiles by itself
            told.write(request(settings, device))


def request(settings: TrainSettings | SftSettings, device: str) -> str:
    """What the process is told: the model, its device, and sizes like those of the run's first pass."""
    tokens = most_microbatch_tokens(settings)
    group = settings.batch.samples_per_prompt if isinstance(settings, TrainSettings) else 1
    told = {
        "model": settings.model.model_dump(mode="json"),
        "device": device,
        "tokens": tokens,
        "longest": min(tokens, longest_sample_tokens(settings)),
        "group": group,
    }
    return json.dumps(told)
