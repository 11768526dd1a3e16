"""What of a model a checkpoint holds, and the Hugging Face folder that users take away.

Owns: copying weights and optimizer to host memory between two steps, writing them as safetensors, reading them back.
Refuses to know: when to save, and what else a checkpoint holds. Always holds: a snapshot does not change when training
goes on; a folder written here is loaded by transformers and peft as it is.

A snapshot's files: ``model/`` (a Hugging Face folder in the training dtype) or ``adapter/`` (a peft folder), with the
tokenizer, and ``optimizer.safetensors`` (float32 masters where the model is narrower, and moments). Those of a critic are
``critic/`` and ``critic_optimizer.safetensors``.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from meshloom.train.head import plain_model
from meshloom.train.model import TrainedModel
from meshloom.train.value_head import architecture_of, is_critic

MODEL, ADAPTER, OPTIMIZER = "model", "adapter", "optimizer.safetensors"
CRITIC, CRITIC_OPTIMIZER = "critic", "critic_optimizer.safetensors"


def model_name(model: TrainedModel) -> str:
    """Folder of a model's whole weights in a checkpoint."""
    return CRITIC if is_critic(model.module) else MODEL


def optimizer_name(model: TrainedModel) -> str:
    """File of its optimizer."""
    return CRITIC_OPTIMIZER if is_critic(model.module) else OPTIMIZER


def _host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory; tensors that share memory (tied weights) still share it."""
    copies: dict[int, Tensor] = {}
    return {
        name: copies.setdefault(tensor.data_ptr() or id(tensor), tensor.detach().to("cpu", copy=True))
        for name, tensor in tensors.items()
    }


def _saved_weights(model: TrainedModel) -> dict[str, Tensor]:
    """The tensors a checkpoint holds: all weights, or the adapters'."""
    if model.settings.lora is None:
        return dict(model.weights())
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model.module)


def snapshot_bytes(model: TrainedModel) -> int:
    """About what the files of a model's snapshots will take, known before the first update."""
    unique = {tensor.data_ptr(): tensor for tensor in _saved_weights(model).values()}
    total = sum(tensor.nbytes for tensor in unique.values())
    if model.optimizer is not None:
        for name, master in model.optimizer.masters.items():
            copies = 2 if master is model.optimizer.parameters[name] else 3
            total += copies * master.nbytes
    return total


@dataclass(frozen=True)
class ModelSnapshot:
    """A model between two steps, in host memory."""

    model: TrainedModel
    tokenizer: PreTrainedTokenizerBase
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    updates: int

    @classmethod
    def take(cls, model: TrainedModel, tokenizer: PreTrainedTokenizerBase) -> "ModelSnapshot":
        """Copy what decides the future of a model."""
        weights = _saved_weights(model)
        optimizer: dict[str, Tensor] = {}
        if model.optimizer is not None:
            for names in model.optimizer.visit(changes=False):
                optimizer |= _host(model.optimizer.state_tensors(names))
        updates = 0 if model.optimizer is None else model.optimizer.updates
        return cls(model, tokenizer, _host(weights), optimizer, updates)

    @property
    def num_bytes(self) -> int:
        """About what the files take."""
        unique = {id(t): t for t in (*self.weights.values(), *self.optimizer.values())}
        return sum(t.numel() * t.itemsize for t in unique.values())

    def write(self, folder: Path) -> None:
        """Write the snapshot's files."""
        if self.model.settings.lora is None:
            self._write_model(folder / model_name(self.model))
        else:
            self._write_adapter(folder / ADAPTER)
        if self.model.optimizer is not None:  # of no tensors before the first update
            save_file(self.optimizer, folder / optimizer_name(self.model))

    def _write_model(self, folder: Path) -> None:
        plain = plain_model(self.model.module)
        plain.save_pretrained(folder, state_dict=self.weights)
        if is_critic(plain):
            config = json.loads((folder / "config.json").read_text())
            config["architectures"] = [architecture_of(plain)]
            (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        self.tokenizer.save_pretrained(folder)

    def _write_adapter(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        save_adapter_config(self.model, folder)
        save_file(self.weights, folder / "adapter_model.safetensors")
        self.tokenizer.save_pretrained(folder)


def save_adapter_config(model: TrainedModel, folder: Path) -> None:
    """Write the adapters' settings; peft keeps names of layers as a set, whose order is another one in each process."""
    settings = model.module.peft_config["default"]
    settings.save_pretrained(str(folder))
    written = json.loads((folder / "adapter_config.json").read_text())
    if isinstance(written["target_modules"], list):
        written["target_modules"].sort()
    (folder / "adapter_config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")


@dataclass(frozen=True)
class ModelSnapshots:
    """Several models between two steps."""

    parts: Sequence[ModelSnapshot]

    @property
    def num_bytes(self) -> int:
        """About what all files take."""
        return sum(part.num_bytes for part in self.parts)

    def write(self, folder: Path) -> None:
        """Write the files of all."""
        for part in self.parts:
            part.write(folder)


@torch.no_grad()
def restore(model: TrainedModel, folder: Path, updates: int) -> None:
    """Load a snapshot's adapters and optimizer into a model built from the same settings.

    The weights of a model without adapters are not read here: build it from ``folder / MODEL``, or a critic from
    ``folder / CRITIC``. All files are read through host memory.

    Args:
        model: the model to fill.
        folder: a complete checkpoint.
        updates: optimizer updates made before it was saved.
    """
    if model.settings.lora is not None:
        from peft import set_peft_model_state_dict

        result = set_peft_model_state_dict(model.module, load_file(folder / ADAPTER / "adapter_model.safetensors"))
        if result.unexpected_keys:
            raise ValueError(f"adapter weights fit no layer: {result.unexpected_keys[:3]}")
    if model.optimizer is not None:
        model.optimizer.load_state_tensors(load_file(folder / optimizer_name(model)), updates)
