"""The output head of a causal language model: from hidden states to logits.

Owns: which weight projects to the vocabulary, and what a family does to the logits afterwards (scaling, soft cap).
Refuses to know: which rows are wanted, sampling, losses. Always holds: sampler and trainer use this one function, so
they cannot disagree about it; weights are read when used, so an update in place is seen; logits leave in float32
(float64 for a float64 model).

Legend: N rows, D hidden, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshloom.config.errors import UserError
from meshloom.train.attention import PackedAttention
from meshloom.train.logprobs import logprobs_and_entropy
from meshloom.train.products import wide_product
from meshloom.train.vocabulary import VocabularyPart


def plain_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself, out of a peft wrapper if there is one (adapters stay in its layers)."""
    return model if isinstance(model, PreTrainedModel) else model.get_base_model()


def decoder_of(model: nn.Module) -> PreTrainedModel:
    """The stack of layers without the output head: ids in, ``last_hidden_state`` out."""
    return plain_model(model).get_decoder()


class OutputHead:
    """The projection to the vocabulary of a causal language model.

    Args:
        model: a transformers causal language model, or one in a peft wrapper.

    Raises:
        UserError: if the head is not a plain linear layer (none at all, or an adapter on it).
    """

    columns = ("logprob", "entropy")
    """What a model with this head says of each token that it predicts."""

    def __init__(self, model: nn.Module) -> None:
        base = plain_model(model)
        linear = base.get_output_embeddings()
        if not isinstance(linear, nn.Linear):
            raise UserError(
                f"the output head of {type(base).__name__} is {type(linear).__name__}, not a plain linear layer",
                why="log-probabilities are computed from its weight in chunks, past any adapter on it",
                fix="leave the head out of the adapter's target modules",
            )
        self._linear = linear
        config = base.config.get_text_config().to_dict()
        self.scale: float = _scale(config)
        self.softcap: float | None = config.get("final_logit_softcapping")
        self.gradient_total: Callable[[], Tensor] | None = None
        """Gives the float32 tensor [V, D] that the weight's gradient may be added to, past its ``grad``; what else uses the
        weight, such as a tied embedding, adds its own by ``grad``."""
        self.part: VocabularyPart | None = None
        """Which part of the vocabulary the weight is of, if it is cut over ranks."""

    @property
    def weight(self) -> Tensor:
        """The projection, [V, D]."""
        return self._linear.weight

    @property
    def bias(self) -> Tensor | None:
        """Its bias, [V], if the family has one."""
        return self._linear.bias

    def predict(
        self, hidden_ND: Tensor, targets_N: Tensor, *, temperature: float, chunk_bytes: int
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each target and entropy of each distribution, [N]: see ``logprobs_and_entropy``."""
        return logprobs_and_entropy(self, hidden_ND, targets_N, temperature=temperature, chunk_bytes=chunk_bytes)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits of hidden states, [N, V]. Differentiable in the hidden states and the weight.

        Those of a bfloat16 model are never rounded to bfloat16 without gradients: its steps are 0.06 to 0.12 for the logits
        of likely tokens. With gradients they are.
        """
        if hidden_ND.dtype == torch.bfloat16 and not torch.is_grad_enabled():
            projected = wide_product(hidden_ND, self.weight.T)
            return self.finish(projected if self.bias is None else projected + self.bias)
        return self.finish(nn.functional.linear(hidden_ND, self.weight, self.bias))

    def finish(self, projected_NV: Tensor) -> Tensor:
        """What comes after the matrix product: float32, scaling, soft cap. Works on any slice of the vocabulary."""
        logits = projected_NV if projected_NV.dtype == torch.float64 else projected_NV.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def _scale(config: dict) -> float:
    """What a family multiplies its logits by."""
    family = config["model_type"]
    if family.startswith("granite"):
        return 1.0 / config.get("logits_scaling", 1.0)
    if family.startswith("cohere"):
        return float(config.get("logit_scale", 1.0))
    return 1.0


@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """Compare the head with the model's own forward on a few tokens: a family with a rule unknown here is refused.

    The model must attend through layouts (``use_layouts``).

    Raises:
        UserError: if the logits differ.
    """
    device = plain_model(model).get_input_embeddings().weight.device
    ids = torch.arange(4, device=device)[None]
    inputs = {"input_ids": ids, "position_ids": ids, "layout": PackedAttention([4]), "use_cache": False}
    was_training = model.training
    model.eval()
    try:
        theirs = plain_model(model)(**inputs).logits[0].float()
        ours = OutputHead(model).logits(decoder_of(model)(**inputs).last_hidden_state[0]).float()
    finally:
        model.train(was_training)
    check_logits(plain_model(model), theirs, ours)


def check_logits(model: PreTrainedModel, theirs: Tensor, ours: Tensor) -> None:
    """Compare logits of a model's own forward with the head's.

    Raises:
        UserError: if they differ, or are no numbers.
    """
    if not bool(theirs.isfinite().all()):
        raise _no_numbers(model)
    gap, size = float((theirs - ours).abs().max()), float(theirs.abs().max())
    if not gap <= 0.02 * size + 1e-6:
        raise UserError(
            f"{type(model).__name__} changes its logits in a way that is not known here",
            why=f"its own logits and ours differ by {gap:.3g}, the largest is {size:.3g}",
        )


def _no_numbers(model: PreTrainedModel) -> UserError:
    """What to say of logits that are NaN or infinite: the first weight of this rank that is, if one is."""
    from torch.distributed.tensor import DTensor

    parts = ((name, p.to_local() if isinstance(p, DTensor) else p) for name, p in model.named_parameters())
    found = next((name for name, part in parts if not bool(part.isfinite().all())), None)
    what = "the model gives logits that are NaN or infinite"
    if found is None:
        why = "values are too large for the dtype that it computes in, or weights of another rank are NaN"
        return UserError(
            what, where="model.path", why=why, fix="model.dtype=float32, or fetch or export the model again"
        )
    why = f"{found} has values that are NaN or infinite"
    return UserError(what, where="model.path", why=why, fix="fetch or export the model again")
