"""Pages of one file: elements from data, and a page's assembly from its template.

Owns: escaping. Refuses to know: what a page shows. Always holds: text becomes text; only what this module made is markup. A
page loads nothing, from nowhere, and its policy names the style and script that may act by their hashes.
"""

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

Attribute = str | int | float | bool | None


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def el(name: str, *children: Any, **attributes: Attribute) -> Markup:
    """An element.

    Args:
        name: of the element.
        children: markup, text that is escaped, numbers, or iterables of these; none is left out.
        attributes: ``class_`` is ``class``, other underscores are hyphens; none and false are left out, true has no value.
    """
    return Markup(f"<{name}{_attributes(attributes)}>{join(children)}</{name}>")


def void(name: str, **attributes: Attribute) -> Markup:
    """An element that is empty by its nature, such as ``br`` or a shape of a picture."""
    return Markup(f"<{name}{_attributes(attributes)}/>")


def _attributes(attributes: Mapping[str, Attribute]) -> str:
    texts: list[str] = []
    for key, value in attributes.items():
        name = key.rstrip("_").replace("_", "-")
        if value is True:
            texts.append(f" {name}")
        elif value is not None and value is not False:
            texts.append(f' {name}="{html.escape(str(value))}"')
    return "".join(texts)


def join(children: Any, between: str = "") -> Markup:
    """Children one after the other, with a text between them."""
    return Markup(html.escape(between).join(_pieces(children)))


def _pieces(child: Any) -> Iterable[str]:
    if child is None or child is False:
        return
    if isinstance(child, Markup):
        yield child
    elif isinstance(child, str | int | float):
        yield html.escape(str(child))
    else:
        for each in child:
            yield from _pieces(each)


def script_safe(value: Any) -> str:
    """JSON that can stand inside a script element: no character in it can end the element or begin a comment."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def page_file(name: str) -> str:
    """A file of ``page/``: a template, style or script."""
    return (files("meshloom.observe") / "page" / name).read_text("utf-8")


def assemble(template: str, title: str, styles: Sequence[str], scripts: Sequence[str] = (), **parts: str) -> str:
    """A page from a template of ``page/``.

    Args:
        template: its name. What stands between ``@@`` marks is replaced: ``title``, ``style``, ``script``, their hashes
            ``style_hash`` and ``script_hash``, and ``parts``.
        title: text.
        styles: names of style files, in order.
        scripts: names of script files, in order.
        parts: further replacements by their names: markup, or JSON that ``script_safe`` made.
    """
    style, script = "\n".join(map(page_file, styles)), "\n".join(map(page_file, scripts))
    known: Mapping[str, str] = {
        "title": html.escape(title),
        "style": style,
        "style_hash": _hash(style),
        "script": script,
        "script_hash": _hash(script),
        **parts,
    }
    pieces = page_file(template).split("@@")
    # Odd pieces are names between marks; what is put in is never searched for marks again.
    return "".join(known[piece] if at % 2 else piece for at, piece in enumerate(pieces))


def _hash(text: str) -> str:
    """The content's hash as a content security policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
