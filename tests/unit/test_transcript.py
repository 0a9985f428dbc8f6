"""What is shown of a command's output: whole when it fits, else both ends; always harmless text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes.isolation.processes.output import HeadTail
from sandboxes.tools.exchange import Answers
from sandboxes.tools.shell_lines import quoted
from sandboxes.tools.transcript import readable, transcript

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")))


def fed(data, keep, pieces=7):
    output = HeadTail(keep)
    for start in range(0, len(data), pieces):
        output.feed(data[start : start + pieces])
    return output


@settings(deadline=None)
@given(TEXT)
def test_text_that_fits_is_shown_as_it_is(text):
    data = text.encode()
    assert transcript(fed(data, len(data) + 1), max(200, len(data))) == text


@settings(deadline=None)
@given(st.binary(max_size=3000), st.integers(200, 1000), st.integers(1, 50))
def test_whatever_the_bytes_the_limit_holds_and_nothing_harmful_is_in_it(data, limit, pieces):
    shown = transcript(fed(data, limit, pieces), limit)
    assert len(shown.encode()) <= limit
    assert all(char in "\n\t" or (ord(char) >= 32 and not 127 <= ord(char) < 160) for char in shown)


@settings(deadline=None)
@given(st.text("aé漢😀", min_size=300, max_size=900), st.integers(200, 280))
def test_a_cut_keeps_both_ends_splits_no_character_and_counts_what_is_left_out(text, limit):
    data = text.encode()
    shown = transcript(fed(data, limit), limit)
    if len(data) <= limit:
        assert shown == text
        return
    before, notice, after = shown.split("\n")
    assert text.startswith(before)
    assert text.endswith(after)
    left_out = int(notice.split()[1])
    assert left_out == len(data) - len(before.encode()) - len(after.encode())
    assert f"of {len(data)} bytes" in notice


def test_escape_sequences_and_carriage_returns_become_plain_text():
    assert readable(b"\x1b[1;31mred\x1b[0m\r\n10%\r20%\x1b]0;title\x07\x00") == "red\n10%\n20%\N{REPLACEMENT CHARACTER}"


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(0, 255), st.integers(1, 9))
def test_an_answer_is_found_among_anything_and_only_by_its_word(noise, status, pieces):
    answers = Answers("0123456789abcdef")
    data = b"\n".join(noise) + b"\nfedcba9876543210 1\n 0123456789abcdef 2\n0123456789abcdef x\n"
    for start in range(0, len(data), pieces):
        answers.feed(data[start : start + pieces])
    assert answers.status is None
    answers.feed(b"0123456789abcdef %d\n" % status)
    assert answers.status == status


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_a_quoted_text_is_one_word_of_a_shell(text):
    word = quoted(text)
    assert word[0] == word[-1] == "'"
    assert word[1:-1].replace("'\\''", "") == text.replace("'", "")
