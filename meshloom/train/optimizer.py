"""AdamW on float32 master weights, schedules per update, clipping.

Owns: gradients after the backward pass, the optimizer's state, the learning rate. Refuses to know: losses, samples.
Always holds: gradients add up over microbatches in float32 whatever the model's arithmetic; the learning rate depends on
the number of the update alone; a gradient that is not finite stops the run before it reaches a weight.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from meshloom.config.errors import RunFault
from meshloom.config.settings import OptimizerSettings
from meshloom.train.gradient_totals import GradientTotals


class NotFinite(RunFault):
    """A gradient, or its norm, has infinities or NaN."""

    def __init__(self, update: int, names: Sequence[str]) -> None:
        where = ", ".join(names)
        super().__init__(
            f"the gradient of update {update}{'' if names else ', as a whole,'} is not finite",
            where=where,
            why="" if names else "each gradient is finite: their squares add up to more than float32 holds",
            fix="look at the rewards and losses of this step; smaller rewards, a smaller optimizer.lr, or model.dtype=float32",
        )


@dataclass(frozen=True)
class StepStats:
    """What an update did: norm of the gradient before clipping, and the learning rate it used."""

    grad_norm: float
    learning_rate: float


def learning_rate(settings: OptimizerSettings, update: int, total_updates: int) -> float:
    """Learning rate of an update, counted from 0: linear warm-up, then the schedule over the updates that remain."""
    if update < settings.warmup_updates:
        return settings.lr * (update + 1) / settings.warmup_updates
    span = max(1, total_updates - settings.warmup_updates)
    done = min(1.0, (update - settings.warmup_updates) / span)
    shapes = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
    low = 1.0 if settings.schedule == "constant" else settings.min_lr_ratio
    return settings.lr * (low + (1.0 - low) * shapes[settings.schedule])


class StateTurns(Protocol):
    """Brings masters and moments to the device in turns."""

    def visit(self, *, changes: bool) -> Iterator[Collection[str]]:
        """As ``Optimizer.visit``."""
        ...


class Optimizer:
    """AdamW over the parameters of a module that require gradients.

    A parameter that is narrower than float32 gets a float32 master that the optimizer works on and that the parameter is
    rounded from after each update.

    Args:
        module: the model.
        settings: rates, decay, clipping.
    """

    def __init__(self, module: nn.Module, settings: OptimizerSettings) -> None:
        self.settings = settings
        self.updates = 0
        self.turns: StateTurns | None = None
        """What has the state elsewhere but for its turn; none where all of it stays on the device."""
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.masters = {name: self._master(p) for name, p in self.parameters.items()}
        self.copied = {name for name, p in self.parameters.items() if self._is_copy(p, self.masters[name])}
        """Names of parameters whose master is a float32 copy."""
        self._totals = GradientTotals({self.parameters[name]: self.masters[name] for name in self._in_order()})
        plain = _without_decay(module)
        decayed = [m for name, m in self.masters.items() if name not in plain]
        undecayed = [m for name, m in self.masters.items() if name in plain]
        groups = [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": undecayed, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)

    def gradient_total(self, parameter: Tensor) -> Callable[[], Tensor] | None:
        """What gives the float32 tensor that a parameter's gradients add up in; none if that is its own ``grad``, or if it is
        not trained."""
        for name, each in self.parameters.items():
            if each is parameter and name in self.copied:
                return partial(self._totals.of, each)
        return None

    def collect(self) -> None:
        """Take in the gradients of a backward pass; due after each."""
        self._totals.add_waiting()

    def step(self, total_updates: int) -> StepStats:
        """Clip, update, round to the model's arithmetic, forget the gradients.

        Raises:
            NotFinite: names the first parameters whose gradients are not finite; no weight has changed.
            RuntimeError: if no parameter has a gradient.
        """
        self.collect()
        grads = [m.grad for m in self.masters.values() if m.grad is not None]
        if not grads:
            raise RuntimeError("an update was asked for, but no parameter has a gradient")
        total_norm = self._norm(grads)
        norm = float(total_norm)  # the one time in an update that the processor waits for the device
        if not math.isfinite(norm):
            raise NotFinite(self.updates, self._not_finite()[:5])
        if self.settings.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(list(self.masters.values()), self.settings.max_grad_norm, total_norm)
        rate = learning_rate(self.settings, self.updates, total_updates)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        for names in self.visit(changes=True):
            self._update(names)
        self._forget_gradients()
        self.updates += 1
        return StepStats(norm, rate)

    def visit(self, *, changes: bool) -> Iterator[Collection[str]]:
        """Names of parameters whose masters and moments are on the device until the next are asked for: each once, all at once
        where nothing has them elsewhere.

        Args:
            changes: whether they get other values meanwhile.
        """
        if self.turns is None:
            yield self.masters.keys()
        else:
            yield from self.turns.visit(changes=changes)

    def _update(self, names: Collection[str]) -> None:
        """AdamW on these parameters, and their rounding. It works on each value by itself, so turns change no result."""
        here = {id(self.masters[name]) for name in names}
        groups = self.adamw.param_groups
        everything = [group["params"] for group in groups]
        for group, of_group in zip(groups, everything, strict=True):
            group["params"] = [master for master in of_group if id(master) in here]
        try:
            self.adamw.step()
        finally:
            for group, of_group in zip(groups, everything, strict=True):
                group["params"] = of_group
        self.publish(names)

    @torch.no_grad()
    def to(self, device: torch.device) -> None:
        """Move masters and moments to a device; the model's own parameters have moved already."""
        for name, master in self.masters.items():
            if name in self.copied:
                master.data = master.data.to(device)
        for state in self.adamw.state.values():
            state.update({kind: value.to(device) for kind, value in state.items()})

    @torch.no_grad()
    def publish(self, names: Collection[str]) -> None:
        """Round the masters of parameters into the model's own."""
        narrow = [name for name in names if name in self.copied]
        if narrow:
            torch._foreach_copy_([self.parameters[n] for n in narrow], [self.masters[n] for n in narrow])

    def _master(self, parameter: nn.Parameter) -> Tensor:
        """What the optimizer works on: the parameter itself, or a float32 copy of one that is narrower."""
        if parameter.dtype in (torch.float32, torch.float64):
            return parameter
        return parameter.detach().float().contiguous().clone().requires_grad_()

    def _is_copy(self, parameter: nn.Parameter, master: Tensor) -> bool:
        return master is not parameter

    def _in_order(self) -> list[str]:
        return [name for name in self.parameters if name in self.copied]

    def _norm(self, grads: list[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(grads)

    def _forget_gradients(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def _not_finite(self) -> list[str]:
        return [n for n, m in self.masters.items() if m.grad is not None and not torch.isfinite(m.grad).all()]

    def state_tensors(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Moments, step counts and masters, by ``kind/parameter``; the tensors themselves, not copies.

        Args:
            names: of the parameters; all by default.
        """
        state: dict[str, Tensor] = {}
        for name in self.masters if names is None else names:
            master = self.masters[name]
            for kind, value in self.adamw.state.get(master, {}).items():
                state[f"{kind}/{name}"] = value
            if name in self.copied:
                state[f"master/{name}"] = master.detach()
        return state

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Take the state that ``state_tensors`` gave, for the same parameters.

        Raises:
            KeyError: if a tensor belongs to no parameter.
        """
        self.updates = updates
        found: dict[str, dict[str, Tensor]] = {name: {} for name in self.masters}
        for key, value in tensors.items():
            kind, name = key.split("/", 1)
            found[name][kind] = value
        for names in self.visit(changes=True):
            for name in names:
                self._take_state(self.masters[name], found[name])
            self.publish(names)

    def _take_state(self, master: Tensor, given: Mapping[str, Tensor]) -> None:
        if "master" in given:
            master.copy_(given["master"])
        # The step count stays a float32 scalar where fused AdamW keeps it: with the parameter.
        moments = {kind: v.to(master.device, copy=True) for kind, v in given.items() if kind != "master"}
        if moments:
            self.adamw.state[master] = moments


def _without_decay(module: nn.Module) -> set[str]:
    """Names of biases, norms and embeddings: all vectors, and the tables of ``nn.Embedding``."""
    tables = {f"{name}.weight" for name, child in module.named_modules() if isinstance(child, nn.Embedding)}
    vectors: Iterable[str] = (name for name, p in module.named_parameters() if p.ndim < 2)
    return tables | set(vectors)
