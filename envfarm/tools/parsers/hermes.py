r"""Hermes-style calls as Qwen2.5 and Qwen3 write them.

::

    <think> ... </think> text
    <tool_call>
    {"name": "quantity", "arguments": {"item": "blue mug"}}
    </tool_call>
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from envfarm.core.messages import AssistantMessage, Diagnosis, ToolCall
from envfarm.tools.payload import MAX_DEPTH, encodable, excerpt, json_fault, too_deep

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
_TAG = re.compile(r"</?tool_call>")
# To the next tag outside JSON strings (a tag inside one is an argument's text, not the end of the call), or to a
# quote that its line does not close. JSON strings hold no line breaks.
_STRING = r'"[^"\\\n]*(?:\\[^\n][^"\\\n]*)*'
_BODY = re.compile(rf'(?:[^"<]+|{_STRING}"|<(?!/?tool_call>))*')
_BROKEN_STRING = re.compile(rf"{_STRING}\\?")  # even where the text ends on a backslash
_SHAPE = 'write {"name": ..., "arguments": {...}} between the tool_call tags'


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


_decode = msgspec.json.Decoder(_Call).decode


class _Block(NamedTuple):
    """One ``<tool_call>``: where its body starts and ends, and the tag found there (empty: end of text)."""

    start: int
    end: int
    tag: str


def parse_hermes(text: str, truncated: bool = False) -> AssistantMessage:
    """See :func:`envfarm.tools.parsers.parse`. Malformed blocks stay in ``content``, so that nothing is lost.

    Reasoning is what ``<think>`` at the beginning encloses, or, since templates may have written that tag
    themselves, everything up to a ``</think>`` that stands before the first call. No call is read inside it.
    """
    text = encodable(text)
    reasoning, at = _reasoning(text)
    if text.find(OPEN, at) < 0 and text.find(CLOSE, at) < 0:
        return AssistantMessage(content=text[at:].strip(), reasoning=reasoning)
    return _Reader(text, truncated).read(reasoning, at)


def _reasoning(text: str) -> tuple[str, int]:
    """Reasoning, and where the rest starts. Unclosed reasoning takes all of the text."""
    opened = text.find(THINK) if text.lstrip().startswith(THINK) else -1
    closed = text.find(THOUGHT)
    if opened >= 0:
        end = closed if closed >= 0 else len(text)
        return text[opened + len(THINK) : end].strip(), min(len(text), end + len(THOUGHT))
    first_call = text.find(OPEN)
    if closed >= 0 and (first_call < 0 or closed < first_call):
        return text[:closed].strip(), closed + len(THOUGHT)
    return "", 0


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    return match.end() if match else start


class _Reader:
    """One pass over one text; each character is looked at a bounded number of times."""

    def __init__(self, text: str, truncated: bool) -> None:
        self.text = text
        self.truncated = truncated
        self.broken_until = 0
        self.calls: list[ToolCall] = []
        self.content: list[str] = []
        self.begun = 0
        self.diagnosis = Diagnosis.OK
        self.detail = ""

    def read(self, reasoning: str, at: int) -> AssistantMessage:
        text = self.text
        while (tag := _TAG.search(text, at)) is not None:
            self.content.append(text[at : tag.start()])
            if tag[0] == CLOSE:
                self.fault(f"A closing tool_call tag has no opening one before it; {_SHAPE}")
                self.content.append(CLOSE)
                at = tag.end()
            else:
                at = self.block(tag.start(), self.extent(tag.end()))
        self.content.append(text[at:])
        return AssistantMessage(
            content="".join(self.content).strip(),
            reasoning=reasoning,
            tool_calls=tuple(self.calls),
            diagnosis=self.diagnosis,
            detail=self.detail,
        )

    def extent(self, start: int) -> _Block:
        """The block whose body starts at ``start``.

        After a quote that its line does not close, strings are not looked for until that line ends: what is read
        as a string can be wrong there, and looking again and again would cost quadratic time.
        """
        if start >= self.broken_until:
            end = _end(_BODY, self.text, start)
            if end == len(self.text):
                return _Block(start, end, "")
            if self.text[end] == "<":
                return _Block(start, end, CLOSE if self.text[end + 1] == "/" else OPEN)
            self.broken_until = _end(_BROKEN_STRING, self.text, end)
            if self.truncated and self.broken_until == len(self.text):
                return _Block(start, len(self.text), "")  # cut inside a string, whatever tags that string holds
        tag = _TAG.search(self.text, start)
        return _Block(start, tag.start(), tag[0]) if tag else _Block(start, len(self.text), "")

    def block(self, opened: int, block: _Block) -> int:
        """Read one block; returns where to go on."""
        self.begun += 1
        body = self.text[block.start : block.end]
        if block.tag == CLOSE:
            after = block.end + len(CLOSE)
            if fault := self.call(body):
                self.fault(fault)
                self.content.append(self.text[opened:after])
            return after
        if block.tag or not self.truncated:
            self.fault(f"Tool call {self.begun} has no closing tag; {_SHAPE}")
        else:
            detail = f"Tool call {self.begun} was cut off by the token limit; write less before it"
            self.fault(detail, Diagnosis.TRUNCATED)
        self.content.append(self.text[opened : block.end])
        return block.end

    def call(self, body: str) -> str:
        """Keep the call in ``body``; returns what is wrong with it, if anything."""
        label = f"Tool call {self.begun}"
        if too_deep(body):
            return f"{label} nests deeper than {MAX_DEPTH} levels; write flatter arguments"
        try:
            call = _decode(body)
        except msgspec.ValidationError as error:
            return f"{label} has the wrong shape: {json_fault(error, body)}; {_SHAPE}"
        except (msgspec.DecodeError, RecursionError) as error:
            return f"{label} is not valid JSON: {json_fault(error, body)}; {_SHAPE}"
        arguments = bytes(call.arguments).decode()
        if not arguments.startswith("{"):
            return f'{label}: "arguments" must be a JSON object, got {excerpt(arguments)}'
        self.calls.append(ToolCall(f"call_{len(self.calls)}", call.name, arguments))
        return ""

    def fault(self, detail: str, diagnosis: Diagnosis = Diagnosis.SYNTAX) -> None:
        """Note the first fault's sentence and the worst grade."""
        self.detail = self.detail or f"{detail}."
        if self.diagnosis is not Diagnosis.TRUNCATED:
            self.diagnosis = diagnosis
