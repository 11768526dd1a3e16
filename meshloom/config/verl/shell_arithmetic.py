"""What ``$((…))`` comes to: whole numbers and ``+ - * / %``.

Owns: those operators, as a shell has them. Refuses to know: variables, words. Always holds: nothing is run; anything else has
no value.
"""

import ast
import operator
import re
from collections.abc import Callable


def computed(text: str) -> str | None:
    """The value of an expression without variables; none if it is not computed here."""
    if not re.fullmatch(r"[\d\s()+*/%-]*", text):
        return None
    try:
        return str(_computed(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _quotient(left: int, right: int) -> int:
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda left, right: left - right * _quotient(left, right),
}


def _computed(node: ast.expr) -> int:
    """The value of whole numbers and + - * / %.

    Raises:
        ValueError: if there is anything else.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return _computed(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_computed(node.left), _computed(node.right))
    raise ValueError(f"{ast.unparse(node)} is not computed")
