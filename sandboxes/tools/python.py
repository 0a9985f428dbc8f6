"""Python for models: code runs in the sandbox, shows what it prints and the value of its last expression."""

from __future__ import annotations

from envfarm.core.environment import Toolset, tool
from envfarm.core.errors import IsolationError
from envfarm.core.sandbox import ExecResult
from sandboxes.isolation.bwrap import python

_NOT_FOUND = 127  # of the shell
# Runs inside the sandbox. Frames of this runner are left out of tracebacks.
_RUNNER = """
import ast, sys, traceback
source = sys.stdin.read()
sys.stdin.close()
try:
    tree = ast.parse(source, "<code>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    scope = {"__name__": "__main__"}
    exec(compile(tree, "<code>", "exec"), scope)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<code>", "eval"), scope)
        if value is not None:
            print(repr(value))
except SystemExit:
    raise
except BaseException as error:
    sys.stdout.flush()
    kind, _, trace = sys.exc_info()
    while trace is not None and trace.tb_frame.f_code.co_filename != "<code>":
        trace = trace.tb_next
    lines = traceback.format_exception(kind, error.with_traceback(trace), trace, limit=-3, chain=False)
    sys.stderr.write("".join(lines))
    sys.exit(1)
"""


class Python(Toolset):
    """One tool that runs code. Nothing is kept between two calls but the files of the workspace."""

    executes = True

    @tool
    async def python(self, code: str) -> str:
        """Run Python code and return what it prints and the value of its last expression.

        Args:
            code: The program. It has the standard library, no network, and a folder of its own.
        """
        argv = [python(), "-I", "-B", "-X", "utf8", "-c", _RUNNER]
        result = await self.sandbox.exec(argv, stdin=code.encode("utf-8", "replace"))
        if result.exit_code == _NOT_FOUND and b"not found" in result.stderr:
            raise IsolationError(f"{argv[0]} cannot be reached from inside the sandbox")
        return shown(result)


def shown(result: ExecResult) -> str:
    """Output and errors of a run as the model sees them."""
    out = result.stdout.decode("utf-8", "replace")
    errors = result.stderr.decode("utf-8", "replace").strip()
    parts = [out.rstrip("\n")] if out.strip() else []
    if errors:
        parts.append(errors)
    if result.timed_out:
        parts.append(f"error: stopped after {result.seconds:.1f} s")
    elif result.exit_code not in (0, 1) or (result.exit_code == 1 and not errors):
        parts.append(_ended(result.exit_code))
    return "\n".join(parts) or "(no output)"


def _ended(code: int | None) -> str:
    if code in (137, -9):
        return "error: killed, for too much memory, disk or output"
    return f"error: the program ended with status {code}"
