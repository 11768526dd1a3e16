"""Random-weight models of the public Qwen2.5 shapes, and prompts, for the GPU benchmarks.

Weights of random numbers take as long as trained ones. What they do not give is an end: with ``mean_length`` a few
weights are set so that lengths are long-tailed for every engine alike, by plain sampling at temperature 1. Of the ordinary
tokens, three quarters are of a kind after which the end token follows with the chance 1 / short, the others of a kind with
1 / long; a token of one kind leads to its own kind. So three quarters of the responses have geometric lengths of mean
``short``, a quarter of mean ``long`` (0.4 and 2.9 times the wanted mean), cut at the longest response.

Usage: python bench/gpu_models.py FOLDER SIZE --tokenizer DIR [--mean-length TOKENS]

How: four hidden coordinates are written by the embedding and left alone by the layers. The first is large and fixes the norm
of the stream; the others say which kind, that this is a token, and that it is the prompt's last. The head is the embedding
itself (a copy where the model does not tie them), so a token's own rows raise its kind and lower the other.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import meshloom  # noqa: F401  sets the process up before torch is imported

# isort: split
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config

from meshloom.lesson.model import build_model
from meshloom.lesson.problems import write_problems

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
NORM, KIND, TOKEN, START = range(4)
KEPT = 4
STREAM_NORM = 30.0
PULL = 7.0
"""A token's own kind is e^(2·PULL) times as likely to follow as the other: a few in a million change it."""
NEVER = 30.0
LAYERS_ADD = 1e-3
"""Of what random layers would add to the stream; not nothing, since a GPU multiplies zeros faster."""


@dataclass(frozen=True)
class Shape:
    """Hidden size, width of the MLP, layers, heads, key-value heads, rows of the vocabulary, head tied to the embedding."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool


SHAPES = {
    "0.5b": Shape(896, 4864, 24, 14, 2, 151936, True),
    "1.5b": Shape(1536, 8960, 28, 12, 2, 151936, True),
    "3b": Shape(2048, 11008, 36, 16, 2, 151936, True),
    "7b": Shape(3584, 18944, 28, 28, 4, 152064, False),
    "tiny": Shape(64, 128, 2, 4, 2, 0, True),
}


@dataclass(frozen=True)
class Tail:
    """Mean lengths of the two kinds, and the share of responses that are long."""

    short: float
    long: float
    long_share: float = 0.25

    @classmethod
    def of_mean(cls, mean: float) -> "Tail":
        return cls(0.4 * mean, 2.9 * mean)

    def expected(self, longest: int) -> float:
        """Mean length when responses are cut at ``longest``: of a geometric one, m·(1 − (1 − 1/m)^longest)."""
        short, long = (m * (1 - (1 - 1 / m) ** longest) for m in (self.short, self.long))
        return (1 - self.long_share) * short + self.long_share * long


def config_of(shape: Shape, vocabulary: int, **tokens: int) -> Qwen2Config:
    """The configuration of a shape."""
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=32768,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        **tokens,
    )


def make_model(
    folder: Path, size: str, *, tokenizer: Path | None, mean_length: float | None = None, seed: int = 0
) -> Path:
    """Write a Hugging Face folder in bfloat16, unless it is there; it is whole or not there.

    Args:
        folder: to be made.
        size: one of ``SHAPES``.
        tokenizer: folder whose tokenizer is copied; none: the quickstart's, for ``tiny``.
        mean_length: mean of long-tailed lengths; none: plain random weights, for which an end token is pure chance.
        seed: of the weights.
    """
    if (folder / "config.json").exists():
        return folder
    aside = folder.with_name(f"{folder.name}.part{os.getpid()}")
    words = _tokenizer(aside, tokenizer)
    shape, device = SHAPES[size], "cuda" if torch.cuda.is_available() else "cpu"
    ends = {"bos_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    config = config_of(shape, max(shape.vocabulary, len(words)), **ends)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if mean_length is not None:
        set_lengths(model, words, Tail.of_mean(mean_length), seed)
    model.save_pretrained(aside)
    aside.rename(folder)
    return folder


def prepared(work: Path, size: str, *, tokenizer: Path | None, mean_length: float | None = None) -> Path:
    """A model's folder under a work folder, made in a process of its own so that this one never holds the GPU."""
    folder = work / (size if mean_length is None else f"{size}-tail{mean_length:g}")
    if size == "tiny":
        return make_model(folder, size, tokenizer=None, mean_length=mean_length)
    if tokenizer is None or not (tokenizer / TOKENIZER_FILES[0]).is_file():
        given = "" if tokenizer is None else f", and {tokenizer} has no {TOKENIZER_FILES[0]}"
        raise SystemExit(f"--tokenizer DIR is needed: a folder with the Qwen2 tokenizer{given}")
    if (folder / "config.json").exists():
        return folder
    more = [] if mean_length is None else ["--mean-length", str(mean_length)]
    subprocess.run([sys.executable, __file__, folder, size, "--tokenizer", tokenizer, *more], check=True)
    return folder


def _tokenizer(folder: Path, source: Path | None) -> PreTrainedTokenizerBase:
    """Put a tokenizer into a folder, and load it."""
    folder.mkdir(parents=True, exist_ok=True)
    if source is None:
        data = write_problems(folder / "lesson", seed=0, num_examples=200, num_train=8)
        source = build_model(folder / "lesson" / "model", data.examples, seed=0)
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy(source / name, folder / name)
    return AutoTokenizer.from_pretrained(folder)


def set_lengths(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tail: Tail, seed: int) -> None:
    """Make the end token as likely as the tail says, after a token of either kind."""
    start = chat_ids(tokenizer, "1")[-1]
    special = set(tokenizer.all_special_ids)
    ordinary = torch.tensor([i for i in range(len(tokenizer)) if i not in special and i != start])
    kind = torch.ones(len(ordinary))
    long = torch.randperm(len(ordinary), generator=torch.Generator().manual_seed(seed))
    kind[long[: round(tail.long_share * len(ordinary))]] = -1.0
    with torch.no_grad():
        _keep_from_layers(model)
        rows = model.get_input_embeddings().weight
        rows[:, :KEPT] = torch.tensor([STREAM_NORM, 0.0, NEVER / PULL, 0.0]).to(rows)
        rows[ordinary, TOKEN], rows[start, TOKEN], rows[start, START] = 1.0, 1.0, 1.0
        rows[ordinary, KIND] = kind.to(rows)
        # At the end: own kind's logit 0, the other's −2·PULL, and the end token's such that its chance is 1 / mean.
        short, long_ = (
            math.log(count) - math.log(mean - 1)
            for count, mean in ((int((kind > 0).sum()), tail.short), (int((kind < 0).sum()), tail.long))
        )
        rows[tokenizer.eos_token_id] = 0.0
        end = [STREAM_NORM, (short - long_) / (2 * PULL), -(short + long_) / (2 * PULL), -NEVER]
        rows[tokenizer.eos_token_id, :KEPT] = torch.tensor(end).to(rows)
        rest = float(rows[ordinary[:1000], KEPT:].float().square().sum(-1).mean())
        rms = math.sqrt((STREAM_NORM**2 + 2.0 + rest) / rows.shape[1])
        model.model.norm.weight[:KEPT] = torch.tensor([0.0, PULL * rms, -PULL * rms, rms]).to(rows)
        if not model.config.tie_word_embeddings:
            model.get_output_embeddings().weight.copy_(rows)


def _keep_from_layers(model: PreTrainedModel) -> None:
    """Let no layer read or write the kept coordinates, and all of them together add little to the stream's norm.

    Of ordinary random weights each of 28 layers adds a share of what it reads, and the chance of an end falls a hundredfold.
    """
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight *= LAYERS_ADD
        layer.mlp.down_proj.weight *= LAYERS_ADD
        layer.self_attn.o_proj.weight[:KEPT] = 0.0
        layer.mlp.down_proj.weight[:KEPT] = 0.0
        layer.input_layernorm.weight[:KEPT] = 0.0
        layer.post_attention_layernorm.weight[:KEPT] = 0.0


def chat_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of a question as a chat, ready for the answer."""
    chat = [{"role": "user", "content": text}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def questions(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Sums of two numbers under 100, and their answers."""
    pairs = torch.randint(0, 100, (count, 2), generator=torch.Generator().manual_seed(seed)).tolist()
    return [(f"What is {a}+{b}? Answer with the number only.", str(a + b)) for a, b in pairs]


def write_prompts(folder: Path, rows: list[tuple[str, str]], name: str = "train") -> Path:
    """The same rows as JSON Lines (ours, TRL) and as Parquet (verl). Returns the JSON Lines."""
    folder.mkdir(parents=True, exist_ok=True)
    chats = [[{"role": "user", "content": question}] for question, _ in rows]
    lines = [json.dumps({"prompt": chat, "answer": a}) + "\n" for chat, (_, a) in zip(chats, rows, strict=True)]
    (folder / f"{name}.jsonl").write_text("".join(lines))
    records = [
        {
            "data_source": "bench",
            "prompt": chat,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": i, "split": name},
        }
        for i, (chat, (_, answer)) in enumerate(zip(chats, rows, strict=True))
    ]
    pq.write_table(pa.Table.from_pylist(records), folder / f"{name}.parquet")
    return folder / f"{name}.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("size", choices=list(SHAPES))
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--mean-length", type=float)
    options = parser.parse_args()
    make_model(options.folder, options.size, tokenizer=options.tokenizer, mean_length=options.mean_length)


if __name__ == "__main__":
    main()
