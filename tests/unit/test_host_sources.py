"""When a host that reloads sees a change in the code of its environments."""

import os

from sandboxes.host.sources import Sources


def test_a_change_counts_once_it_has_settled(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("one = 1\n")
    sources = Sources([f"{file}:Mine"])
    assert not sources.changed()
    file.write_text("three = 3\n")
    assert not sources.changed()  # it may be half written
    assert sources.changed()


def test_a_change_of_the_time_alone_counts_and_one_that_is_taken_back_does_not(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("one = 1\n")
    before = file.stat()
    sources = Sources([f"{file}:Mine"])
    os.utime(file, ns=(1, 1))
    assert [sources.changed(), sources.changed()] == [False, True]
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [sources.changed(), sources.changed()] == [False, False]


def test_files_beside_and_below_count_and_hidden_ones_and_other_kinds_do_not(tmp_path):
    (tmp_path / "mine.py").write_text("")
    sources = Sources([f"{tmp_path / 'mine.py'}:Mine"])
    for ignored in ("notes.txt", ".git/x.py", "__pycache__/mine.py"):
        (tmp_path / ignored).parent.mkdir(exist_ok=True)
        (tmp_path / ignored).write_text("x")
    assert [sources.changed(), sources.changed()] == [False, False]
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "part.py").write_text("x = 1")
    assert [sources.changed(), sources.changed()] == [False, True]


def test_a_file_that_is_not_there_yet_is_seen_when_it_comes(tmp_path):
    sources = Sources([f"{tmp_path / 'late.py'}:Late", "no_such_package:Late", "no_such_name"])
    (tmp_path / "late.py").write_text("x = 1")
    assert [sources.changed(), sources.changed()] == [False, True]


def test_of_a_registered_environment_its_package_is_watched():
    sources = Sources(["stockroom"])
    assert any(name.endswith("stockroom/environment.py") or "stockroom" in name for name in sources._first)
