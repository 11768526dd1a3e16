"""The trainer's weights as an engine needs them: full tensors under the names of the Hugging Face folder.

Owns: undoing what training adds to a model: adapters are merged on the fly, tied tensors are named once. Refuses to know: who
receives. Always holds: the trainer's own weights are not touched; without adapters nothing is copied.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.train.model import TrainedModel

_ADAPTER = "default"


@dataclass(frozen=True)
class WeightsSource:
    """A trained model's weights, pulled tensor by tensor.

    Args:
        model: whose weights they are, with adapters or without.
    """

    model: TrainedModel

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, tied ones once, under their first name. A merged tensor is new and lives as long as it is
        held."""
        adapted = _adapted_layers(self.model.module)
        seen: set[int] = set()
        for name, tensor in self.model.weights():
            plain = _plain_name(name)
            if plain is None or tensor.data_ptr() in seen:
                continue
            seen.add(tensor.data_ptr())
            layer = adapted.get(name)
            yield plain, tensor if layer is None else _merged(tensor, layer)

    @property
    def tied(self) -> dict[str, str]:
        """Names of tensors that are another one's, by the name under which it comes: the head of a model with tied
        embeddings."""
        first: dict[int, str] = {}
        tied: dict[str, str] = {}
        for name, tensor in self.model.weights():
            plain = _plain_name(name)
            if plain is not None and first.setdefault(tensor.data_ptr(), plain) != plain:
                tied[plain] = first[tensor.data_ptr()]
        return tied


def _plain_name(name: str) -> str | None:
    """A tensor's name in the model's folder; none for the adapters' own."""
    if ".lora_" in name:
        return None
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _adapted_layers(module: nn.Module) -> dict[str, Any]:
    """Layers with an adapter, by the name of their base weight in the state dict."""
    if not hasattr(module, "peft_config"):
        return {}
    from peft.tuners.lora import LoraLayer

    return {
        f"{name}.base_layer.weight": layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)
    }


@torch.no_grad()
def _merged(weight: Tensor, layer: Any) -> Tensor:
    """``weight + scale · B · A``, added in float32, in the weight's dtype."""
    down, up = layer.lora_A[_ADAPTER].weight.float(), layer.lora_B[_ADAPTER].weight.float()
    return torch.addmm(weight.float(), up, down, alpha=layer.scaling[_ADAPTER]).to(weight.dtype)
