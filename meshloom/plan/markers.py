"""The markers a chat template writes between turns, such as ``<|im_end|>``, and the tokenizer's files.

Owns: what such a marker looks like, and which of them a tokenizer has not as tokens. Refuses to know: how a template is
rendered, how a text is cut. Always holds: nothing of a file is run; what cannot be read is not judged; it takes no time.

Codes: D data.
"""

import json
import re
from pathlib import Path

from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings
from meshloom.plan.findings import Findings

_MARKER = re.compile(r"<\|[^\s|<>{}'\"]+\|>|<｜[^\s<>{}'\"]+｜>|<(?:start|end)_of_turn>")


def markers_in(template: str) -> list[str]:
    """Markers that a text or a template has, each once: those of ChatML and Llama, DeepSeek, and Gemma. Others, such as
    ``[INST]``, are ordinary text in some families."""
    return list(dict.fromkeys(_MARKER.findall(template)))


def check_markers(found: Findings, settings: TrainSettings | SftSettings | EvalSettings) -> None:
    """Warn of a template's markers that are no tokens: a model that learned them as tokens does not know them in pieces."""
    if settings.data.chat_template == "never":
        return
    if unknown := _without_token(Path(settings.model.path)):
        found.warn(
            "D006",
            "model.path",
            f"the chat template writes {', '.join(unknown)}, which the tokenizer cuts into pieces",
            why="it has no such token; right only for a model that was trained so",
            fix="a chat_template.jinja and a tokenizer.json that belong together",
        )


def _without_token(folder: Path) -> list[str]:
    """Markers of a folder's template for which its tokenizer has no token; none if that cannot be read."""
    if not (markers := markers_in(_template(folder))):
        return []
    files = [_bytes(folder / name) for name in ("tokenizer.json", "tokenizer_config.json")]
    if not files[0]:
        return []
    return [marker for marker in markers if not any(form in file for form in _forms(marker) for file in files)]


def _forms(token: str) -> list[bytes]:
    """How a token stands in a file of JSON, which takes seconds to be parsed. Within a template quotes are escaped."""
    return [json.dumps(token).encode(), json.dumps(token, ensure_ascii=False).encode()]


def _template(folder: Path) -> str:
    """Where transformers looks for it, one after the other; empty if there is none. It may be several, by name."""
    if own := _bytes(folder / "chat_template.jinja"):
        return own.decode(errors="replace")
    try:
        values = json.loads(_bytes(folder / "chat_template.json") or _bytes(folder / "tokenizer_config.json"))
    except (ValueError, RecursionError):
        return ""
    return str(values.get("chat_template") or "") if isinstance(values, dict) else ""


def _bytes(path: Path) -> bytes:
    """Of a file; none if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
