"""A small model from nothing: an ordinary Hugging Face folder with tokenizer, chat template and random weights.

Owns: its shape and its vocabulary. Always holds: the folder is one that ``transformers`` loads; the same seed gives the
same weights.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Digits, signs and spaces stand alone, so that arithmetic is seen digit by digit; words keep the space before them.
_PIECES = r"\d|[^\s\w]| ?\p{L}+|\s"


def build_model(folder: Path, examples: Path, *, seed: int, tags: Sequence[str] = ("<answer>", "</answer>")) -> Path:
    """Write the folder.

    Args:
        folder: to be made.
        examples: problems with responses; the vocabulary is learned from their text.
        seed: of the random weights.
        tags: texts that are one token each.
    """
    tokenizer = _tokenizer(_texts(examples), tags)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _texts(examples: Path) -> Iterable[str]:
    for line in examples.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield f"user\n{row['prompt'][0]['content']}\nassistant\n{row['response']}"


def _tokenizer(texts: Iterable[str], tags: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer (every text has tokens), in which tags are one token each."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_SPECIAL[2], pad_token=_SPECIAL[0])
    fast.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    fast.chat_template = CHAT_TEMPLATE
    return fast
