"""Messages, measures and repeated calls as a slot understands them."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfarm.core.errors import EnvironmentCodeError
from envfarm.core.messages import Message
from sandboxes.host.instance import as_messages, as_number, as_unit
from sandboxes.host.step import _canonical


def test_a_first_message_may_be_text_or_messages():
    assert as_messages("e", "", "go") == [Message(role="user", content="go")]
    assert [m.role for m in as_messages("e", "be good", "go")] == ["system", "user"]
    own = [Message(role="system", content="own"), Message(role="user", content="go")]
    assert as_messages("e", "be good", own) == own


@pytest.mark.parametrize("wrong", [None, 3, [], ["text"], {"role": "user"}])
def test_other_first_messages_name_the_environment_and_what_came(wrong):
    with pytest.raises(EnvironmentCodeError, match="environment 'e': reset returned"):
        as_messages("e", "", wrong)


def test_measures_are_finite_numbers_or_none():
    assert as_unit("e", "verify", None) is None
    assert as_unit("e", "verify", True) == 1.0
    assert as_number("e", "reward x", -3) == -3.0
    for wrong in (math.nan, math.inf, "1", b"1", [], object()):
        with pytest.raises(EnvironmentCodeError, match="expected a number or None"):
            as_number("e", "reward x", wrong)
    for wrong in (-0.01, 1.01):
        with pytest.raises(EnvironmentCodeError, match="expected 0 to 1"):
            as_unit("e", "verify", wrong)


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=5))
@settings(deadline=None, max_examples=50)
def test_equal_arguments_are_equal_whatever_their_order_and_spacing(arguments):
    import json

    shuffled = dict(reversed(arguments.items()))
    assert _canonical(json.dumps(arguments)) == _canonical(json.dumps(shuffled, indent=2, ensure_ascii=False))


def test_arguments_that_are_no_json_are_compared_as_text():
    assert _canonical("{not json") == b"{not json"
