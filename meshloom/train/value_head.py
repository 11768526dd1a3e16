"""The head of a critic: one number from each hidden state, in place of the output head of a causal language model.

Owns: putting the head there, its first values, its names in files. Refuses to know: losses, what values are used for. Always
holds: the value of a token is read from the hidden state that predicts it, so it is the value *before* the token, and no value
knows the token that it judges; a fresh head is 0 everywhere, so first values are 0 whatever the seed; values leave in float32
(float64 for a float64 model).

The head is called ``score``, as in transformers' models for token classification, whose files a critic is saved as.

Legend: N rows, D hidden.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

from meshloom.plan.model_folder import ModelFolder, read_model_folder
from meshloom.plan.scalar_head import SCORE, has_scalar_head
from meshloom.train.head import plain_model
from meshloom.train.load import load_model

_LM_HEAD = frozenset({"lm_head.weight", "lm_head.bias"})


class ValueHead:
    """The projection to one number, with the interface that models use of ``OutputHead``.

    Args:
        model: with a scalar head.
    """

    columns = ("value",)
    part = None

    def __init__(self, model: nn.Module) -> None:
        self._linear: nn.Linear = plain_model(model).get_submodule(SCORE)
        self.gradient_total = None

    @property
    def weight(self) -> Tensor:
        """The projection, [1, D]."""
        return self._linear.weight

    def predict(self, hidden_ND: Tensor, targets_N: Tensor, *, temperature: float, chunk_bytes: int) -> tuple[Tensor]:
        """The value before each token, [N], differentiable; what the token is makes no difference."""
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        bias = self._linear.bias
        return ((hidden_ND.to(wide) @ self.weight.to(wide).T + bias.to(wide))[:, 0],)


def is_critic(model: nn.Module) -> bool:
    """Whether a model has a scalar head."""
    return isinstance(plain_model(model)._modules.get(SCORE), nn.Module)


def is_scalar(name: str) -> bool:
    """Whether a parameter is of a scalar head."""
    return name.startswith(f"{SCORE}.")


def head_of(model: PreTrainedModel) -> nn.Module:
    """A model's head: the scalar one of a critic, else the output head."""
    return model.get_submodule(SCORE) if is_critic(model) else model.get_output_embeddings()


def put_head(model: PreTrainedModel, head: nn.Module) -> None:
    """Put another module in the place of a model's head."""
    if is_critic(model):
        setattr(model, SCORE, head)
    else:
        model.set_output_embeddings(head)


@torch.no_grad()
def put_scalar_head(model: PreTrainedModel) -> None:
    """Replace a causal language model's output head by a scalar one of zeros, in place; its decoder alone computes then."""
    output = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is output)
    delattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
    like = model.get_input_embeddings().weight
    head = nn.Linear(model.config.get_text_config().hidden_size, 1, dtype=like.dtype, device=like.device)
    if not like.is_meta:
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    model.add_module(SCORE, head)
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
    model.config.num_labels = 1
    model._tied_weights_keys, model.all_tied_weights_keys = {}, {}


def load_value_model(path: str | Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The decoder of a folder with a scalar head: the folder's own, or a fresh one in place of an output head.

    Raises:
        UserError: if the folder cannot be loaded, or has a head of several outputs.
    """
    folder = read_model_folder(Path(path), setting="critic.model")
    scalar = has_scalar_head(folder)
    model = load_model(path, dtype, device, may_lack=_LM_HEAD if scalar else frozenset(), setting="critic.model")
    put_scalar_head(model)
    if scalar:
        for name, tensor in stored_head(folder).items():
            model.get_parameter(name).data.copy_(tensor)
    return model


def stored_head(folder: ModelFolder) -> dict[str, Tensor]:
    """The scalar head that a folder has, in host memory; empty where it has none."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.path.glob("*.safetensors")) if has_scalar_head(folder) else ():
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in sorted(opened.keys()) if is_scalar(name)}
    return found


def architecture_of(model: PreTrainedModel) -> str:
    """The class of transformers that a critic's folder is of, if the family has one."""
    plain = type(model).__name__.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    return str(CLASSIFIERS.get(model.config.model_type, f"{plain}ForTokenClassification"))
