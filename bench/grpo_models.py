"""Models and prompts for the whole-step benchmark, made in a process of their own.

Usage: python bench/grpo_models.py WORKLOAD FOLDER

``lesson`` is the quickstart's small model, warmed with its examples, on the quickstart's problems. ``large`` and
``tiny`` have no training behind them: their weights are random, but for a few that decide how long a response gets, so
that lengths are long-tailed from the first step and need no luck. Half of the vocabulary belongs to short responses,
half to long ones; the prompt's last token leads to either with the same chance, and each token to one of its own half, or to
the end token with a chance of 1/10 or 1/80 (``large``). The lengths are so a mixture of two geometric distributions.
Nothing of the model's computation is left out.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import meshloom  # noqa: F401  sets the process up before torch is imported

# isort: split
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from meshloom.config.load import load_settings
from meshloom.config.settings import SftSettings
from meshloom.lesson.model import build_model
from meshloom.lesson.problems import write_problems
from meshloom.lesson.settings import SFT_FILE, write_settings
from meshloom.loop.sft import run_sft
from meshloom.train.export import export_model

NUM_PROMPTS, PROMPT_TOKENS = 64, 32
SPECIAL = ("<pad>", "<end>", "<start>")
# A token's own half is e^6 times as likely to follow as the other half.
PULL = 3.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model without training: its size, and the mean lengths of its short and its long responses."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    short: int
    long: int


SHAPES = {
    "large": Shape(hidden=384, layers=8, heads=6, kv_heads=2, vocabulary=16384, short=10, long=80),
    "tiny": Shape(hidden=64, layers=2, heads=2, kv_heads=1, vocabulary=512, short=4, long=16),
}


def lesson(folder: Path) -> None:
    """The quickstart's model after some of its warm-up, and problems it has not seen."""
    data = write_problems(folder / "data", seed=0, num_examples=4000, num_train=NUM_PROMPTS)
    base = build_model(folder / "base", data.examples, seed=0)
    write_settings(folder, base=base, warm=folder / "model", data=data, seed=0, small=True)
    run_sft(load_settings(SftSettings, folder / SFT_FILE, ["batch.steps=100"]), resume=False)
    export_model(folder / "sft", folder / "model")
    rows = [json.loads(line) for line in data.train.read_text().splitlines()]
    write_prompts(folder, [(row["prompt"], row["reward_model"]["ground_truth"]) for row in rows])


def untrained(folder: Path, shape: Shape) -> None:
    """A Qwen3 model whose responses have long-tailed lengths."""
    half = (shape.vocabulary - len(SPECIAL)) // 2
    words = [f"w{i}" for i in range(shape.vocabulary - len(SPECIAL))]
    write_tokenizer(folder / "model", words)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        tie_word_embeddings=False,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        set_lengths(model, half, shape)
    model.save_pretrained(folder / "model")
    chosen = torch.randint(0, len(words), (NUM_PROMPTS, PROMPT_TOKENS - 1)).tolist()
    write_prompts(folder, [(" ".join([*(words[i] for i in prompt), SPECIAL[2]]), "") for prompt in chosen])


def set_lengths(model: Qwen3ForCausalLM, half: int, shape: Shape) -> None:
    """Make the end token as likely as the wanted mean lengths say, after a token of either half.

    Two of the hidden dimensions are kept for this: one is −1 or +1 by the token's half, the other always 1. Embeddings
    are large beside what the random layers add, so the final norm gives back nearly the token's own embedding.
    """
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.1)
        layer.mlp.down_proj.weight.mul_(0.1)
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    embedding.normal_()
    embedding[:, -2:] = 1.0
    embedding[len(SPECIAL) : len(SPECIAL) + half, -2] = -1.0
    embedding[2, -2] = 0.0
    head[:, -2:] = 0.0
    head[:, -2] = PULL
    head[len(SPECIAL) : len(SPECIAL) + half, -2] = -PULL
    # The other logits are about normal with this deviation, which raises their mean exponential.
    spread = float(head[:, :-2].std()) * math.sqrt(shape.hidden)
    total = math.log(half) + PULL + spread**2 / 2
    short, long = (total - math.log(mean - 1) for mean in (shape.short, shape.long))
    head[list(range(len(SPECIAL)))] = 0.0
    head[[0, 2], -1] = -30.0
    head[1, -2], head[1, -1] = (long - short) / 2, (long + short) / 2


def write_tokenizer(folder: Path, words: list[str]) -> None:
    """A tokenizer of whole words."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[1]).save_pretrained(
        folder
    )


def write_prompts(folder: Path, prompts: list[tuple[object, str]]) -> None:
    """One JSON object a line, as both sides read it."""
    lines = [json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in prompts]
    (folder / "prompts.jsonl").write_text("".join(lines))


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    if name == "lesson":
        lesson(folder)
    else:
        untrained(folder, SHAPES[name])


if __name__ == "__main__":
    main()
