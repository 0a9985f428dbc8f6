"""Runs inside the sandbox, in any Python from 3.7 on: executes one piece of code after another in one scope.

Requests come on what was standard input: a line of a word and a length, then the code. Answers go to what was standard
output: the word and a status. Both are moved to high descriptors that programs started from here do not inherit. What
the code writes, to output or errors, goes to what was standard error. An interrupt counts only while code runs.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import linecache
import os
import signal
import sys
import traceback
import types

TYPE_CHECKING = False
if TYPE_CHECKING:  # takes long to load
    from typing import Any

_FRAMES = 5  # of a traceback that are shown
_NAME = "<session>"  # of this code
_DEAF = 125
_REQUESTS, _ANSWERS, _OUTPUT, _NOTHING = 240, 241, 242, 243


class _Runner:
    def __init__(self) -> None:
        for fd, wanted in ((0, _REQUESTS), (1, _ANSWERS), (2, _OUTPUT)):
            self._move(fd, wanted)
        null = os.open(os.devnull, os.O_RDONLY)
        self._move(null, _NOTHING)
        os.close(null)
        self.pid = os.getpid()
        self.running = False
        self.count = 0
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        self.scope = module.__dict__
        sys.path.insert(0, "")
        sys.argv = [""]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]

    def _move(self, fd: int, wanted: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, wanted) != wanted:
            raise OSError(f"descriptor {wanted} is taken")

    def serve(self) -> None:
        while True:
            header = self._read_line().split()
            if len(header) != 2:
                os._exit(0)
            source = self._read(int(header[1])).decode("utf-8", "replace")
            while True:
                try:
                    status = self.run(source)
                    break
                except KeyboardInterrupt:  # just behind the code: it has ended already
                    source = ""
            try:
                os.write(_ANSWERS, header[0] + b" %d\n" % status)
            except OSError:  # the code has closed it
                os._exit(_DEAF)

    def _read_line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            part = os.read(_REQUESTS, 1)
            if not part:
                return b""
            line += part
        return line

    def _read(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            part = os.read(_REQUESTS, length - len(data))
            if not part:
                os._exit(0)
            data += part
        return data

    def interrupt(self, number: int, frame: Any) -> None:  # noqa: ARG002 - of a handler
        if self.running and os.getpid() == self.pid:
            raise KeyboardInterrupt

    def streams(self) -> None:
        """Standard streams as they should be, whatever was done to them."""
        os.dup2(_NOTHING, 0)
        os.dup2(_OUTPUT, 1)
        os.dup2(_OUTPUT, 2)
        for name, fd in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
            stream = getattr(sys, name, None)
            if stream is None or getattr(stream, "closed", False):
                mode, errors = ("r", "strict") if fd == 0 else ("w", "backslashreplace")
                stream = os.fdopen(fd, mode, 1, encoding="utf-8", errors=errors, closefd=False)
                setattr(sys, name, stream)

    def run(self, source: str) -> int:
        self.streams()
        signal.signal(signal.SIGINT, self.interrupt)
        self.count += 1
        name = f"<call {self.count}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        status = 0
        try:
            self.execute(source, name)
        except SystemExit as end:
            self.running = False
            if end.code not in (None, 0):
                sys.stderr.write(f"SystemExit: {end.code}\n")
                status = 1
        except BaseException:
            self.running = False
            status = 1
            shown = _short(sys.exc_info())
            try:
                sys.stdout.flush()
                sys.stderr.write(shown)
            except Exception:  # the code has taken them away
                os.write(_OUTPUT, shown.encode("utf-8", "backslashreplace"))
        finally:
            self.running = False
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # closed, or something else that the code put there
                    stream.flush()
            if os.getpid() != self.pid:  # a fork of the code's that went on to its end
                os._exit(status)
        return status

    def execute(self, source: str, name: str) -> None:
        tree = ast.parse(source, name)
        last = tree.body[-1] if tree.body else None
        value = None
        if isinstance(last, ast.Expr):
            del tree.body[-1]
            value = compile(ast.Expression(last.value), name, "eval")
        body = compile(tree, name, "exec")
        self.running = True
        exec(body, self.scope)  # noqa: S102 - what all this is for
        if value is not None:
            shown = eval(value, self.scope)  # noqa: S307 - as above
            if shown is not None:
                self.scope["_"] = shown
                print(repr(shown))  # noqa: T201 - as above


def _short(info: Any) -> str:
    """A traceback without frames of this code, and of the rest the last few."""
    whole = traceback.TracebackException(*info)
    _shorten(whole, set())
    return "".join(whole.format() if whole.stack else whole.format_exception_only())


def _shorten(error: Any, seen: Any) -> None:
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    frames = [frame for frame in error.stack if frame.filename != _NAME]
    while frames and not frames[0].filename.startswith("<call "):
        del frames[0]
    error.stack = traceback.StackSummary.from_list(frames[-_FRAMES:])
    _shorten(error.__cause__, seen)
    _shorten(error.__context__, seen)


if __name__ == "__main__":
    _Runner().serve()
