"""``--backend NAME --backend-option KEY=VALUE``: what a factory gets, and what is refused."""

from enum import StrEnum
from pathlib import Path

import pytest

from envfarm.core import plugins
from envfarm.core.errors import ConfigError
from envfarm.gateway.backends import make_backend


class Pull(StrEnum):
    NEVER = "never"
    ALWAYS = "always"


class Made:
    def __init__(
        self,
        state: Path,
        *,
        environments: tuple[str, ...],
        slots: int,
        max_hosts: int = 1,
        lease: float = 60.0,
        tries: int = 3,
        loud: bool = False,
        pull: Pull = Pull.NEVER,
        folder: Path | None = None,
        mounts: tuple[str, ...] = (),
        own: float | str = 1.0,
    ) -> None:
        self.state, self.environments, self.slots, self.max_hosts = state, environments, slots, max_hosts
        self.lease, self.tries, self.loud, self.pull = lease, tries, loud, pull
        self.folder, self.mounts, self.own = folder, mounts, own


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(plugins, "load", lambda group, name: Made)

    def made(*options, hosts=2):
        return make_backend("made", Path("/s"), environments=("a", "b"), slots=4, hosts=hosts, options=options)

    return made


def test_options_are_read_as_the_factory_annotates_them(make):
    made = make("lease=2", "tries=5", "loud=true", "pull=always", "folder=/a/b", "mounts=/a:/b,/c:/d", "own=x=y")
    assert (made.lease, made.tries, made.loud, made.pull) == (2.0, 5, True, Pull.ALWAYS)
    assert (made.folder, made.mounts, made.own) == (Path("/a/b"), ("/a:/b", "/c:/d"), "x=y")
    assert isinstance(made.lease, float)


def test_a_dash_in_a_key_is_an_underscore_and_what_is_not_given_stays_as_it_is(make):
    assert make().lease == 60.0
    with pytest.raises(ConfigError, match="no option 'max_hosts'"):
        make("max-hosts=3")


def test_there_may_be_a_pool_for_each_environment_beside_the_first(make):
    assert make(hosts=2).max_hosts == 6


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("leese=3", r"no option 'leese'; did you mean 'lease'\? \(there is: folder .*, lease \(a number\), .*tries"),
        ("slots=3", "no option 'slots'"),
        ("lease", "'lease' is not KEY=VALUE"),
        ("tries=many", r"tries='many' of 'made': expected a whole number"),
        ("loud=perhaps", "expected true or false"),
        ("pull=sometimes", "expected Pull: Invalid enum value 'sometimes'"),
    ],
)
def test_a_wrong_option_is_named_with_what_there_is(make, word, said):
    with pytest.raises(ConfigError, match=said):
        make(word)


@pytest.mark.parametrize("name", plugins.names("envfarm.backends"))
def test_every_registered_backend_can_be_made_with_no_option_and_lists_its_own(name, tmp_path):
    with pytest.raises(ConfigError, match=r"no option 'nothing'.* \(there is: .+\)"):
        make_backend(name, tmp_path, environments=("stockroom",), slots=1, hosts=1, options=("nothing=1",))
