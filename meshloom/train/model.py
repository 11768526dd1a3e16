"""A model that is trained: the verbs an algorithm is written with.

Owns: packed forward and backward on one device, the optimizer step, what of the model a checkpoint holds. Refuses to
know: which algorithm calls it. Always holds: the result does not depend on how samples are packed; every parameter that
should train has a gradient after the first update.

Legend: T tokens of a packed microbatch, C of them computed, N of them predicted, D hidden.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.config.settings import ModelSettings, OptimizerSettings
from meshloom.plan.compute import compiles, logits_chunk_bytes
from meshloom.samples import Samples, concat
from meshloom.train.attention import attends_in_graph, use_layouts
from meshloom.train.flops import Cost, Work, peak_flops
from meshloom.train.gather import take_rows
from meshloom.train.head import OutputHead, decoder_of, plain_model
from meshloom.train.layer_passes import LayerPasses
from meshloom.train.optimizer import Optimizer, StepStats
from meshloom.train.sharing import Computed, pack_samples
from meshloom.train.upload import upload, upload_samples
from meshloom.train.value_head import ValueHead, is_critic


@dataclass(frozen=True)
class LossParts:
    """What a loss returns for one microbatch.

    Args:
        total: its share of the update's loss, already divided by the update's denominators; a scalar with a gradient.
        stats: what is to be known about the update, by name: detached values that merge over microbatches with ``+``, such
            as sums, or records of sums and maxima.
    """

    total: Tensor
    stats: Mapping[str, Any]


Loss = Callable[..., LossParts]
"""Called with a microbatch on the device and what the model's head says of each token: log-probs [T] and entropies [T], or
a critic's values [T]; all are 0 where ``mask`` is false."""


@dataclass(frozen=True)
class MicrobatchBound:
    """What one device holds at once; never changes a result."""

    tokens: int
    samples: int | None = None


class TrainedModel:
    """One model on one device, with or without an optimizer.

    Args:
        module: a causal language model that attends through layouts, or one in a peft wrapper; with a scalar head in place of
            the output head it is a critic (``train.value_head``).
        settings: chunk size, compiling, recompute; ``auto`` recompute, which a run decides before, is none here.
        bound: size of a microbatch.
        optimizer: none for a model that is only asked (a reference).
    """

    def __init__(
        self, module: nn.Module, settings: ModelSettings, bound: MicrobatchBound, optimizer: OptimizerSettings | None
    ) -> None:
        self.module, self.settings, self.bound = module, settings, bound
        self.decoder, self.head = decoder_of(module), self._head()
        self.device = self.head.weight.device
        self.chunk_bytes = logits_chunk_bytes(settings, gpu=self.device.type == "cuda")
        if optimizer is None:
            module.requires_grad_(False)
        compiled = compiles(settings, gpu=self.device.type == "cuda")
        self.in_graph = compiled and self._attends_in_graph()
        if self.in_graph:
            use_layouts(plain_model(module), in_graph=True)
        self.layers = LayerPasses(
            self.decoder,
            compiled=compiled,
            recompute=settings.gradient_checkpointing is True and optimizer is not None,
        )
        self.optimizer = None if optimizer is None else self._optimizer(optimizer)
        self._gradients_checked = False
        self._submodules = [(child, ".lora_dropout." in name) for name, child in module.named_modules()]
        self._weight_places: list[tuple[str, nn.Module, str]] = []
        self._work = Work()
        if self.optimizer is not None:
            self.head.gradient_total = self.optimizer.gradient_total(self.head.weight)

    def forward(self, samples: Samples, *, temperature: float = 1.0, adapters: bool = True) -> tuple[Tensor, ...]:
        """Log-probabilities and entropies, or a critic's values, without gradients.

        Args:
            samples: with ``ids`` and ``mask``.
            temperature: of the distribution, above 0; nothing to a critic.
            adapters: false asks the base model under the adapters.

        Returns:
            Tensors [T] on the CPU, as the head's ``columns`` name them, 0 where ``mask`` is false.
        """
        self._set_mode(adapter_dropout=False)
        packed = self._pack(samples)
        parts = []
        with torch.no_grad(), self.layers.active(), nullcontext() if adapters else self.module.disable_adapter():
            for indices in packed:
                microbatch = samples.select(indices)
                predicted = self._predict(microbatch, temperature)
                parts.append(Samples(microbatch.lengths, dict(zip(self.head.columns, predicted, strict=True))))
        together = concat(parts)
        # Only here does the processor wait for the device.
        together = together.with_tokens(**{name: column.cpu() for name, column in together.tokens.items()})
        together = together.select(torch.tensor([i for indices in packed for i in indices]).argsort())
        return tuple(together[name] for name in self.head.columns)

    def forward_backward(self, samples: Samples, loss: Loss, *, temperature: float = 1.0) -> dict[str, Any]:
        """Add the gradient of one update's loss, microbatch by microbatch.

        Args:
            samples: all samples of the update, with ``ids``, ``mask`` and what the loss reads.
            loss: gives each microbatch's share of the update's loss.
            temperature: of the distribution the log-probs are of; nothing to a critic.

        Returns:
            ``loss``, and what the loss reported, merged over microbatches, by name.
        """
        self._set_mode(adapter_dropout=True)
        merged: dict[str, Any] = {}
        for indices in self._pack(samples):
            microbatch = samples.select(indices)
            with self.layers.active():
                predicted = self._predict(microbatch, temperature)
                parts = loss(upload_samples(microbatch, self.device), *predicted)
                parts.total.backward()
                if self.optimizer is not None:
                    self.optimizer.collect()
            for name, value in {"loss": parts.total.detach(), **parts.stats}.items():
                merged[name] = merged[name] + value if name in merged else value
        if self.optimizer is not None and not self._gradients_checked:
            self._check_gradients()
        return merged

    def optim_step(self, total_updates: int) -> StepStats:
        """One optimizer update from the gradients added so far.

        Args:
            total_updates: updates of the whole run, for the schedule.
        """
        return self.optimizer.step(total_updates)

    def take_utilization(self, seconds: float) -> dict[str, float]:
        """Share of the device's peak that passes with gradients have reached since the last call, if the peak is known.

        Args:
            seconds: that they took, in all.

        Returns:
            ``mfu``, without attention, and ``mfu_attention``, what attention adds to it; or nothing.
        """
        work, self._work = self._work, Work()
        config = plain_model(self.module).config.get_text_config()
        heads = config.num_attention_heads
        width = heads * (config.to_dict().get("head_dim") or config.hidden_size // heads)
        cost = Cost.of(self.decoder, self.head.weight, layers=config.num_hidden_layers, query_width=width)
        peak = peak_flops(self.device, self.head.weight.dtype)
        if cost is None or peak is None or not work.tokens or seconds <= 0:
            return {}
        could = peak * seconds
        return {"mfu": work.flops(cost) / could, "mfu_attention": work.attention_flops(cost) / could}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors as the Hugging Face folder has them, adapters apart; the tensors themselves, not copies."""
        if not self._weight_places:
            self._weight_places = [_place_of(self.module, name) for name in self.module.state_dict()]
        yield from ((name, getattr(owner, leaf).detach()) for name, owner, leaf in self._weight_places)

    def to(self, device: torch.device) -> None:
        """Move the model to a device, with its optimizer."""
        self.module.to(device)
        self.device = device
        if self.optimizer is not None:
            self.optimizer.to(device)

    def _head(self) -> OutputHead | ValueHead:
        return ValueHead(self.module) if is_critic(self.module) else OutputHead(self.module)

    def _attends_in_graph(self) -> bool:
        return attends_in_graph(self.settings.attention, self.head.weight)

    def _optimizer(self, settings: OptimizerSettings) -> Optimizer:
        return Optimizer(self.module, settings)

    def _set_mode(self, *, adapter_dropout: bool) -> None:
        """Evaluation mode, but for the adapters' own dropout. The model's would make sampler and trainer disagree."""
        for module, of_adapter in self._submodules:
            training = adapter_dropout and of_adapter
            if module.training is not training:
                module.training = training

    def _pack(self, samples: Samples) -> list[list[int]]:
        if bool(samples["mask"][samples.offsets[:-1]].any()):
            raise ValueError("the first token of a sample cannot be trained on: nothing comes before it")
        return pack_samples(samples, tokens_per_microbatch=self.bound.tokens, samples_per_microbatch=self.bound.samples)

    def _predict(self, microbatch: Samples, temperature: float) -> tuple[Tensor, ...]:
        """What the head says of a microbatch's tokens, each [T], on the device. Only rows that predict a masked one meet it."""
        computed, moved = self._send(microbatch)
        return self._on_tokens(microbatch, moved, self._compute(moved, computed, temperature))

    def _send(self, microbatch: Samples) -> tuple[Computed, dict[str, Tensor]]:
        """What is computed of a microbatch, and the tensors that this takes, on the device."""
        computed = Computed.of(microbatch)
        ids_T, target_N = microbatch["ids"], microbatch["mask"].nonzero().squeeze(-1)
        here = {"ids_C": ids_T[computed.tokens_C], "target_N": target_N, "target_ids_N": ids_T[target_N]}
        moved = upload(here | computed.tensors() | self._own_work(computed), self.device)
        computed = computed.with_tensors(moved)
        if torch.is_grad_enabled():
            self._work += Work(len(moved["ids_C"]), len(target_N), computed.pairs())
        return computed, moved

    def _on_tokens(
        self, microbatch: Samples, moved: Mapping[str, Tensor], columns_N: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """What is said of predicted tokens at their places among all, [T]."""
        zeros_T = torch.zeros(microbatch.num_tokens, dtype=columns_N[0].dtype, device=self.device)
        place = (moved["target_N"],)
        return tuple(zeros_T.index_put(place, column_N) for column_N in columns_N)

    def _own_work(self, computed: Computed) -> dict[str, Tensor]:
        """What else the device needs to know of what is computed, by name."""
        return {}

    def _compute(self, moved: Mapping[str, Tensor], computed: Computed, temperature: float) -> tuple[Tensor, ...]:
        """What the head says of what is predicted, each [N]; all tensors are on the device."""
        layout = computed.layout(self.settings.attention)
        if self.in_graph:
            layout.prepare(self.device)
        hidden_CD = self.decoder(
            input_ids=moved["ids_C"][None],
            position_ids=computed.positions_C[None],
            layout=layout,
            use_cache=False,
        ).last_hidden_state[0]
        return self.head.predict(
            take_rows(hidden_CD, computed.predictors),
            moved["target_ids_N"],
            temperature=temperature,
            chunk_bytes=self.chunk_bytes,
        )

    def _check_gradients(self) -> None:
        """Refuse to train a model some of whose parameters get no gradient at all."""
        without = [name for name, master in self.optimizer.masters.items() if master.grad is None]
        if without:
            raise RuntimeError(f"{len(without)} parameters that should train got no gradient, among them {without[:3]}")
        self._gradients_checked = True


def _place_of(module: nn.Module, name: str) -> tuple[str, nn.Module, str]:
    """A tensor's name in the state dict, the module that holds it, and its name there."""
    path, _, leaf = name.rpartition(".")
    return name, module.get_submodule(path), leaf
