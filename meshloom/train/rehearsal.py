"""One update of a stand-in, so that all that a run compiles is in the compilers' caches on disk.

Owns: the stand-in: a model of the run's configuration and random weights, with no more layers than show all kinds of them and a
small vocabulary. Refuses to know: who asked. Always holds: the pass is the trainer's own, and as a compiled piece serves all
layers and all lengths, a run's first pass then finds its pieces made; a GPU is shared with the run, so little of it is taken.

Usage: echo '{"model": {"path": "DIR"}, "device": "cuda", "tokens": 8192, "longest": 546, "group": 8}' |
       python -m meshloom.train.rehearsal
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch._inductor.compile_fx  # noqa: F401  while the run imports as much
from torch._inductor.async_compile import maybe_warm_pool
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from meshloom.config.settings import ModelSettings
from meshloom.samples import Samples
from meshloom.train.attention import use_layouts
from meshloom.train.load import add_lora, pick_device, pick_dtype
from meshloom.train.model import LossParts, MicrobatchBound, TrainedModel

_ROWS, _DIVISOR = 8192, 16
"""Rows of the stand-in's vocabulary. Kernels differ by whether a size is a multiple of 16, and by nothing else of it."""
_PROMPT_SHARE = 8
"""Which part of a sample its prompt is."""
_MOST_TOKENS = 8192
"""Of the pass: as good a hint of sizes as more, in less memory."""
_MOST_BYTES = 4 * 2**30
"""Of a GPU; a stand-in that needs more ends."""
_BEHIND = 5
"""How much later than the run's this process gets the processor, in steps of ``nice``."""


def rehearse(
    settings: ModelSettings, device: str, *, tokens: int, longest: int, group: int, asks: bool = False
) -> None:
    """Compile all that an update needs.

    Args:
        settings: the run's model.
        device: to compile for.
        tokens: of a pass.
        longest: tokens of its longest sample.
        group: samples that begin with the same prompt.
        asks: whether the run asks for log-probs without gradients too.
    """
    where, tokens = pick_device(device), min(tokens, _MOST_TOKENS)
    if where.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(_MOST_BYTES / torch.cuda.mem_get_info(where)[1], where)
    plain = stand_in(settings.path, pick_dtype(settings.dtype, where), where)
    module = plain if settings.lora is None else add_lora(plain, settings.lora, seed=0)
    learns = [parameter for parameter in module.parameters() if parameter.requires_grad]
    trained = TrainedModel(module, settings, MicrobatchBound(tokens), None)
    for parameter in learns:
        parameter.requires_grad_()
    samples = filled(tokens, min(longest, tokens), group=group, rows=trained.head.weight.shape[0])
    trained.forward_backward(samples, lambda _, logprob_T, __: LossParts(logprob_T.mean(), {}), temperature=1.0)
    if asks:
        trained.forward(samples, temperature=1.0)


def stand_in(path: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A small model whose layers compile like those of the model in a folder, attending through layouts."""
    config = AutoConfig.from_pretrained(str(Path(path).resolve()), local_files_only=True).get_text_config()
    kinds = config.to_dict().get("layer_types")
    if kinds:
        config.num_hidden_layers = 1 + max(kinds.index(kind) for kind in set(kinds))
        config.layer_types = kinds[: config.num_hidden_layers]
    else:
        config.num_hidden_layers = 1
    config.vocab_size = min(config.vocab_size, _ROWS + config.vocab_size % _DIVISOR)
    config.pad_token_id = None  # it may be beyond the vocabulary
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    use_layouts(model)
    return model


def filled(tokens: int, longest: int, *, group: int, rows: int) -> Samples:
    """Samples that fill a microbatch, in groups that begin with one prompt, all but equally long.

    Args:
        tokens: of all samples, at most.
        longest: tokens of a sample, at least 2.
        group: samples that begin with the same prompt.
        rows: of the vocabulary.
    """
    lengths_S = torch.tensor([longest - number % 2 for number in range(tokens // longest)])
    number_T = torch.repeat_interleave(torch.arange(len(lengths_S)), lengths_S)
    place_T = torch.cat([torch.arange(length) for length in lengths_S.tolist()])
    prompt = max(1, longest // _PROMPT_SHARE)
    ids_T = torch.where(place_T < prompt, number_T // group, number_T) + place_T
    return Samples(lengths_S, {"ids": ids_T % rows, "mask": place_T >= prompt})


def main() -> None:
    """Wait to be told what to compile, everything being imported; nothing told means that the run has ended."""
    os.nice(_BEHIND)
    if torch.cuda.is_available():
        # Kernels are compiled one by one in this process until its workers are there, which takes seconds.
        maybe_warm_pool()
    if text := sys.stdin.read():
        told = json.loads(text)
        rehearse(ModelSettings(**told.pop("model")), told.pop("device"), **told)
        # Nothing here has to be put in order, and closing the GPU would keep the run waiting.
        os._exit(0)


if __name__ == "__main__":
    main()
