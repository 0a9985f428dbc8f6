"""The calculator is bounded arithmetic and nothing else."""

import contextlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfarm.core.errors import ToolError
from sandboxes.tools.calculator import evaluate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4) * 2 ** 5 / 7", 32.0),
        ("7 // 2 % 2", 1),
        ("-2 ** 2", -4),
        ("gcd(12, 18) + max(1, 2)", 8),
        ("10**-9999", 0),
    ],
)
def test_arithmetic_is_right(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["9**9**9**9", "2**100000", "1/0", "0**-1", "(-1)**0.5", "__import__('os')", "a", "1 if 1 else 2",
     "'x'*9", "(" * 500, "1+", "", "True", "[1]*9", "round(2.5, ndigits=1)", "exp(1000)", "max()",
     "1" * 2000, "9" * 900 + "**9", "(lambda: 1)()", "sqrt(-1)", "1j"],
)  # fmt: skip
def test_everything_else_is_refused_quickly_with_a_sentence(expression):
    start = time.monotonic()
    with pytest.raises(ToolError, match="error: "):
        evaluate(expression)
    assert time.monotonic() - start < 1


@given(st.text(alphabet="0123456789+-*/%().e, abcdefgi", max_size=60))
@settings(deadline=None, max_examples=200)
def test_any_text_is_a_number_or_a_tool_error(text):
    with contextlib.suppress(ToolError):
        assert isinstance(evaluate(text), int | float)
