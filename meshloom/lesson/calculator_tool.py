"""The tool of the calculator lesson: a file that any run can name, ``environment.tools=[calculator_tool.py:calculator]``."""

import ast
import operator

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: whole numbers with +, - and *, such as "12*34".
    """
    if len(expression) > 100:
        raise ValueError("the expression is too long")
    return str(_value(ast.parse(expression, mode="eval").body))


def _value(node: ast.expr) -> int:
    """The value of a parsed expression; nothing but numbers and operators is known, and nothing is evaluated."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only whole numbers with +, - and * are understood")
