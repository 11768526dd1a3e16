"""Loading a Hugging Face folder: model, adapters.

Owns: what a usable folder is, and the errors when it is not one. Refuses to know: what the model is used for. Always
holds: weights come from safetensors only; nothing is fetched; no code of the folder runs.
"""

import warnings
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from meshloom.config.errors import UserError
from meshloom.config.settings import LoraSettings
from meshloom.plan.model_folder import read_model_folder
from meshloom.plan.scalar_head import SCORE
from meshloom.train.attention import use_layouts
from meshloom.train.head import check_head, decoder_of
from meshloom.train.threads import fit_threads

# A run has its own display; loading bars and warnings of a library would break it. What matters is an error here.
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
# The names that are to replace these are not in all versions that are supported.
warnings.filterwarnings("ignore", r"`\w*gradient_checkpointing\w*` is deprecated", FutureWarning)


def pick_device(name: str) -> torch.device:
    """The device a setting means, made the one that kernels and streams go to.

    Raises:
        UserError: if it is not there.
    """
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"{name!r} is not a device", where="device", fix="auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise UserError(
            f"device {name} is not there", where="device", why=f"{found} GPU(s) are visible", fix="auto or cpu"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def free_memory(device: torch.device) -> int | None:
    """Bytes free on a GPU; none for the processor. Opens the device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def describe_device(device: torch.device) -> dict[str, str | None]:
    """What a run notes of its device: its type, and the name that a GPU's driver gives."""
    return {"type": device.type, "name": torch.cuda.get_device_name(device) if device.type == "cuda" else None}


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Arithmetic of the model on a device."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def check_model_folder(path: str | Path, setting: str = "model.path") -> Path:
    """Check that a folder holds a model that can be loaded, without loading it.

    Args:
        path: the folder.
        setting: that names it.

    Raises:
        UserError: if the folder, its config.json or its weights are missing, damaged or pickles.
    """
    folder = Path(path)
    read_model_folder(folder, setting=setting)
    return folder


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a response: the generation config's, and the tokenizer's own."""
    listed = model.generation_config.eos_token_id if model.generation_config else None
    ids = [] if listed is None else list(listed) if isinstance(listed, list) else [listed]
    return tuple(dict.fromkeys([*ids, tokenizer.eos_token_id]))


def load_model(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    may_lack: frozenset[str] = frozenset(),
    setting: str = "model.path",
) -> PreTrainedModel:
    """A causal language model on a device, attending through layouts. What takes no part in text is frozen.

    Args:
        path: its folder.
        dtype: in which it computes.
        device: for all of it.
        may_lack: weights that the folder need not have, as they are not used.
        setting: that names the folder.

    Raises:
        UserError: if the folder cannot be loaded, weights are missing from it, or its family is not supported.
    """
    folder = check_model_folder(path, setting)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    try:
        # With a place for all of it, weights go from the files to the device without a whole model in memory before.
        model, info = AutoModelForCausalLM.from_pretrained(
            str(folder.resolve()),
            dtype=dtype,
            device_map={"": device},
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"the model in {folder} cannot be loaded: {error}", where=setting) from error
    if missing := sorted(set(info["missing_keys"]) - may_lack):
        raise UserError(
            f"{len(missing)} weights are missing from {folder}, among them {missing[0]}",
            where=setting,
            why="they would be random numbers",
        )
    use_layouts(model)
    fit_threads(device)
    model.eval()
    check_head(model)
    freeze_apart_from_text(model)
    return model


def freeze_apart_from_text(model: PreTrainedModel) -> None:
    """Freeze what takes no part in text."""
    for module in _apart_from_text(model).values():
        module.requires_grad_(False)


def _apart_from_text(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Modules with weights of their own that take no part in text, such as an image encoder, by name."""
    heads = filter(None, (model.get_output_embeddings(), model._modules.get(SCORE)))
    taken = {id(p) for part in (decoder_of(model), *heads) for p in part.parameters()}
    return {
        name: module
        for name, module in model.named_modules()
        if (own := list(module.parameters(recurse=False))) and not taken.intersection(map(id, own))
    }


def add_lora(model: PreTrainedModel, settings: LoraSettings, seed: int) -> torch.nn.Module:
    """Wrap a model in fresh adapters; only they require gradients.

    Raises:
        UserError: if the target modules are not in the model.
    """
    from peft import LoraConfig, get_peft_model

    targets = settings.target_modules
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules="all-linear" if targets == ("all-linear",) else list(targets),
        exclude_modules=list(_apart_from_text(model)) or None,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return get_peft_model(model, config, autocast_adapter_dtype=False)
        except ValueError as error:
            raise UserError(f"adapters cannot be added: {error}", where="model.lora.target_modules") from error
