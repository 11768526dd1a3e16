"""A Hugging Face folder from a run or a checkpoint.

Owns: which checkpoint of a run is taken, merging adapters. Always holds: the folder loads in transformers (and vLLM)
as it is; it is written aside and renamed.
"""

import os
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from meshloom.config.errors import UserError
from meshloom.observe.atomic import give_usual_modes
from meshloom.observe.run_folder import CHECKPOINTS_FOLDER
from meshloom.train.checkpoint_store import latest_checkpoint, verify
from meshloom.train.load import check_model_folder
from meshloom.train.snapshot import ADAPTER, MODEL


def export_model(source: Path, destination: Path, *, merge: bool = True) -> Path:
    """Write the model of a checkpoint as an ordinary folder.

    Args:
        source: a run folder (its newest checkpoint is taken), or a checkpoint.
        destination: must not exist.
        merge: for adapters: add them to the base; false: export the adapter alone, as a peft folder.

    Raises:
        UserError: if there is no complete checkpoint, it is damaged, or the destination exists.
    """
    if destination.exists():
        raise UserError(f"{destination} exists", where="destination", fix="another folder, or remove it first")
    checkpoint = _checkpoint(source)
    aside = destination.with_name(f".{destination.name}.writing-{os.getpid()}")
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        if (checkpoint / MODEL).is_dir():
            shutil.copytree(checkpoint / MODEL, aside)
        elif not merge:
            shutil.copytree(checkpoint / ADAPTER, aside)
        else:
            _merge(checkpoint / ADAPTER, aside)
        give_usual_modes(aside)
        aside.rename(destination)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return destination


def _checkpoint(source: Path) -> Path:
    if (source / MODEL).is_dir() or (source / ADAPTER).is_dir():
        verify(source)
        return source
    latest = latest_checkpoint(source / CHECKPOINTS_FOLDER)
    if latest is None:
        fix = "a run folder, or one of its checkpoints/step-*"
        raise UserError(f"{source} has no complete checkpoint", where="source", fix=fix)
    verify(latest)
    return latest


def _merge(adapter: Path, destination: Path) -> None:
    from peft import PeftConfig, PeftModel
    from transformers import AutoTokenizer

    base_path = PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path
    if Path(base_path).is_dir():
        check_model_folder(base_path)
    else:
        raise UserError(
            f"the adapter's base model {base_path} is not there",
            where=str(adapter / "adapter_config.json"),
            fix="put it there, or export without merging",
        )
    base = AutoModelForCausalLM.from_pretrained(base_path, dtype="auto", local_files_only=True, use_safetensors=True)
    with torch.no_grad():
        merged = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    merged.save_pretrained(destination)
    AutoTokenizer.from_pretrained(str(adapter), local_files_only=True).save_pretrained(destination)
