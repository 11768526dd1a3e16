"""How a decoder's layers run in training passes: compiled, and recomputed in the backward pass.

Owns: ``torch.compile`` of layers, and recompute around them. Refuses to know: what a layer computes, generation. Always holds:
outside ``active`` the model runs as transformers wrote it, so an engine on the same module never compiles; one piece of
compiled code serves all layers of a kind and all lengths; what cannot be compiled is an error.

Which layer calls and how samples are laid out decide nothing about the code: attention is one operator in it, which takes
them as tensors (``attention_op``), or, where another kernel attends, is called between two compiled pieces. Recompute is put
around a layer here, not by transformers, whose own place for it differs between versions and lies inside what is compiled
in some.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from traceback import clear_frames
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from meshloom.config.errors import UserError

_MOST_VARIANTS = 64
"""Compiled variants of one function: with and without gradients or adapters, windows, kinds of layers."""


class LayerPasses:
    """The layers of a decoder, and how they run inside ``active``.

    Args:
        decoder: the stack of layers, adapters in it or not.
        compiled: compile each layer, and the norms after the last.
        recompute: keep only each layer's input for the backward pass.
        backend: of ``torch.compile``.

    Raises:
        UserError: if either is asked for and the decoder has no layers of the usual kind.
    """

    def __init__(
        self, decoder: nn.Module, *, compiled: bool, recompute: bool, backend: str | Callable = "inductor"
    ) -> None:
        self._compiled, self._recompute = compiled, recompute
        self._layers = [m for m in decoder.modules() if isinstance(m, GradientCheckpointingLayer)]
        if (compiled or recompute) and not self._layers:
            raise UserError(
                f"{type(decoder).__name__} has no layers that can be compiled or recomputed one by one",
                where="model.compile" if compiled else "model.gradient_checkpointing",
                fix="model.compile=false model.gradient_checkpointing=false",
            )
        norms = [child for name, child in decoder.named_children() if "norm" in name] if compiled else []
        kinds = {type(module) for module in (*self._layers, *norms)}
        # One function for all layers of a kind: the layer is its first argument, and its weights are inputs of the code.
        forwards = {
            kind: torch.compile(kind.forward, dynamic=True, backend=backend) if compiled else kind.forward
            for kind in kinds
        }
        self._runs = [(layer, self._run_of(layer, forwards[type(layer)])) for layer in self._layers]
        self._runs += [(norm, partial(forwards[type(norm)], norm)) for norm in norms]

    def _run_of(self, layer: nn.Module, forward: Callable) -> Callable:
        run = partial(forward, layer)
        if not self._recompute:
            return run

        def run_again_in_backward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return run(*args, **kwargs)
            try:
                return checkpoint(run, *args, use_reentrant=False, **kwargs)
            except BaseException as error:
                # In torch 2.11, not in 2.13, the hooks for what is saved stay in force, for all that follows, while it lives.
                clear_frames(error.__traceback__)
                raise

        return run_again_in_backward

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run layers so inside, forward and backward.

        Raises:
            UserError: if a layer cannot be compiled.
        """
        if not self._compiled and not self._recompute:
            yield
            return
        for module, run in self._runs:
            module.forward = run
        try:
            with _limits(self._compiled):
                yield
        except _compile_errors(self._compiled) as error:
            said = [line.strip() for line in str(error).splitlines() if line.strip()]
            why = " ".join(said[:2]) or type(error).__name__
            raise UserError(
                "the model's layers cannot be compiled", where="model.compile", why=why, fix="model.compile=false"
            ) from error
        finally:
            for module, _ in self._runs:
                del module.forward


def _compile_errors(compiled: bool) -> tuple[type[Exception], ...]:
    if not compiled:
        return ()
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import InductorError

    return (TorchDynamoException, FailOnRecompileLimitHit, InductorError)


def _limits(compiled: bool) -> AbstractContextManager[None]:
    """Room for all variants inside; beyond it an error, as the code would else run uncompiled and nothing would say so. A
    layer's numbers, such as the epsilon of a norm, are constants of the code and not inputs that each call hands over."""
    if not compiled:
        return nullcontext()
    return torch._dynamo.config.patch(
        recompile_limit=_MOST_VARIANTS, fail_on_recompile_limit_hit=True, specialize_float=True
    )
