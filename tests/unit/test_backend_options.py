"""``--backend-option KEY=VALUE``: what becomes of the words, and what is refused."""

import pytest

from envfarm.core.errors import ConfigError
from envfarm.gateway.backend_options import check, parsed


def make(state, *, environments, slots, max_hosts=1, folder=None, wait=60.0):
    pass


def test_numbers_and_truth_values_are_values_and_all_else_is_text():
    words = ["folder=/run/x", "wait=1.5", "max-pulls=3", "reload=true", "empty=", "equation=a=b", "list=[1]"]
    assert parsed(words) == {
        "folder": "/run/x",
        "wait": 1.5,
        "max_pulls": 3,
        "reload": True,
        "empty": "",
        "equation": "a=b",
        "list": "[1]",
    }


@pytest.mark.parametrize("word", ["folder", "=x", "a b=c", ""])
def test_a_word_of_another_shape_is_refused(word):
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parsed([word])


def test_an_option_that_the_backend_does_not_have_is_told_with_those_that_it_has():
    with pytest.raises(ConfigError, match=r"no option 'foldr'.*folder, wait"):
        check("attached", make, {"foldr": "x"})


def test_what_has_a_flag_of_its_own_is_no_option():
    with pytest.raises(ConfigError, match="no option 'slots'"):
        check("attached", make, {"slots": 3})
