r"""What is typed into a persistent shell. Pure.

The shell reads its standard input, is interactive without a terminal, and writes nothing itself: its own output goes to
/dev/null. Descriptor 9 is where it answers, 8 where commands write; commands have neither, so that nothing they print,
close or leave running can touch an answer. They are given to ``eval``, so that an error of syntax is theirs alone.

Interactive, since only then is there a way to stop a command of several parts and keep the shell: a signal's trap
interrupts the shell at the next place where it looks for traps, which is when its child has been killed. An interrupt
sent directly would get lost, since a shell waiting for a child leaves it to the child.
"""

from __future__ import annotations

BECOME = "exec 9>&1 8>&2 >/dev/null 2>&1; command -v bash && exec bash --norc --noprofile --noediting +H -i; exec sh -i"
HELLO = (
    "PS1= PS2= kind=1; unset HISTFILE PROMPT_COMMAND\n"
    "if [ -n \"$BASH_VERSION\" ]; then set +o history; eval 'kind=$((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1]))'; "
    "if [ $kind -lt 501 ]; then kind=2; else kind=3; fi; fi\n"
)
SH, OLD_BASH, BASH = "sh", "old bash", "bash"
KINDS = {1: SH, 2: OLD_BASH, 3: BASH}
_STREAMS = "</dev/null >&8 2>&8 8>&- 9>&-"


def quoted(text: str) -> str:
    """``text`` as one word of a shell."""
    return "'" + text.replace("'", "'\\''") + "'"


def command_lines(kind: str, command: str, status: int) -> str:
    """Run ``command``; it sees ``status`` as that of the command before."""
    before = f"(exit {status})\n" if status else ""
    lines = f"trap 'trap - INT; \\kill -INT $$' USR1\n__command={quoted(command)}\n{before}"
    if kind == SH:
        return f'{lines}command eval "$__command" {_STREAMS}\n'
    # Sourced: bash 5.2 loses its place in its input when what an interactive shell evaluates has an error of syntax.
    return f"{lines}. /dev/fd/7 7<<<'eval \"$__command\" 7<&-' {_STREAMS}\n"


def answer_line(word: str, number: str = "$?") -> str:
    """Answer with ``word`` and a number. What cannot answer any more ends. ``set -e`` holds for one command only."""
    return f"{{ \\command printf '%s %s\\n' {word} \"{number}\"; }} >&9 || exit 125\nset +e\n"


def new_pipe_lines(kind: str) -> str:
    """Make a pipe, with 7 as its end for reading and 6 for writing."""
    if kind == OLD_BASH:  # its here-documents are files
        return "exec 7< <(:)\nexec 6>/dev/fd/7\n"
    return "exec 7<<END\n\nEND\nread -r __command <&7\nexec 6>/dev/fd/7\n"  # an empty one would be /dev/null


def take_pipe_line(*, followed: bool) -> str:
    """Have commands write into that pipe, if somebody reads it."""
    return ("exec 8>&6 " if followed else "exec ") + "6>&- 7<&-\n"
