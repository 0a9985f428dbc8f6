"""What a tool returned, as text of a bounded size."""

from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes.host.results import as_text, cut, exception_text
from sandboxes.isolation.processes.output import HeadTail


@given(st.text(st.characters(codec=None), max_size=300), st.integers(0, 400))
@settings(deadline=None, max_examples=200)
def test_cut_text_fits_in_its_bytes_and_is_valid(text, limit):
    content, was_cut = cut(text, limit)
    data = content.encode()
    assert len(data) <= limit
    assert was_cut == (len(text.encode("utf-8", "replace")) > limit)
    if not was_cut:
        assert data == text.encode("utf-8", "replace")


def test_a_cut_keeps_head_and_tail_and_says_how_much_is_missing():
    content, was_cut = cut("a" * 500 + "b" * 500, 200)
    assert was_cut
    assert content.startswith("aaa")
    assert content.endswith("bbb")
    assert "[... 800 of 1000 bytes cut ...]" in content


def test_strings_stay_and_other_values_become_json():
    assert as_text("plain") == "plain"
    assert as_text({"a": [1, None, True]}) == '{"a":[1,null,true]}'
    assert as_text(3) == "3"


@given(st.text(st.characters(codec=None)), st.integers(0, 3))
@settings(deadline=None, max_examples=50)
def test_an_exception_is_one_short_line(text, lines):
    shown = exception_text(ValueError(text + "\nmore" * lines))
    assert shown.startswith("ValueError")
    assert len(shown) <= 500
    assert "\n" not in shown


def test_an_exception_that_cannot_be_shown_is_named():
    class Rude(Exception):
        def __str__(self):
            raise RuntimeError

    assert exception_text(Rude()) == "Rude"


@given(st.lists(st.binary(max_size=50), max_size=40), st.integers(0, 64))
@settings(deadline=None, max_examples=200)
def test_head_and_tail_of_a_stream_do_not_depend_on_its_pieces(pieces, limit):
    whole = b"".join(pieces)
    fed, at_once = HeadTail(limit), HeadTail(limit)
    for piece in pieces:
        fed.feed(piece)
    at_once.feed(whole)
    assert fed.value() == at_once.value()
    assert fed.truncated == (len(whole) > limit)
    if not fed.truncated:
        assert fed.value() == whole
    else:
        head, tail = limit - limit // 2, limit // 2
        assert fed.value().startswith(whole[:head])
        assert fed.value().endswith(whole[len(whole) - tail :])
