"""A calculator over Python's expression syntax, with every operation bounded."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from envfarm.core.environment import Toolset, tool
from envfarm.core.errors import ToolError

Number = int | float
MAX_CHARACTERS = 1000
MAX_BITS = 4096
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "max": max,
    "min": min,
    "round": round,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "gcd": math.gcd,
    "floor": math.floor,
    "ceil": math.ceil,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


class Calculator(Toolset):
    """Arithmetic for models that are bad at it."""

    @tool
    def calculator(self, expression: str) -> str:
        """Evaluate an arithmetic expression, for example (3 + 4) * 2 ** 5 / 7.

        Args:
            expression: Numbers, + - * / // % **, parentheses, abs, min, max, round, sqrt, exp, log, sin, cos, tan,
                gcd, floor, ceil, pi and e.
        """
        return str(evaluate(expression))


def evaluate(expression: str) -> Number:
    """Value of ``expression``. Raises :class:`ToolError` for anything that is not bounded arithmetic."""
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"error: the expression has {len(expression)} characters; at most {MAX_CHARACTERS} are allowed")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _checked(_value(tree.body))
    except ToolError:
        raise
    except (SyntaxError, RecursionError, MemoryError):
        raise ToolError(f"error: {expression[:80]!r} is not an arithmetic expression") from None
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ToolError(f"error: {error}") from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _checked(node.value)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            return _checked(_BINARY[type(node.op)](left, right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _call(node.func.id, [_value(argument) for argument in node.args])
    raise ToolError(f"error: {ast.unparse(node)[:80]!r} is not allowed here; use numbers, operators and functions")


def _call(name: str, arguments: list[Any]) -> Any:
    function = _FUNCTIONS.get(name)
    if function is None:
        raise ToolError(f"error: there is no function {name!r}; there is: {', '.join(_FUNCTIONS)}")
    return _checked(function(*arguments))


def _power(base: Number, exponent: Number) -> Number:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and exponent > 0 and int(base).bit_length() * exponent > MAX_BITS:
        raise ToolError(f"error: {base} ** {exponent} is too large")
    return _checked(base**exponent)


def _checked(value: Any) -> Number:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ToolError("error: the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolError("error: the number is too large")
    return value
