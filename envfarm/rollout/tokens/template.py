"""Tokens by any Hugging Face chat template, one turn at a time.

What follows an answer is found on text: a short conversation with a stand-in for the assistant's message is rendered
with the replies, and everything from the stand-in's end-of-turn token on is what must be appended. The text between
variable parts of it depends only on roles, so it is kept as a *frame* and filled in; a template that changes the
texts it is given (trims, quotes) is rendered anew each time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from envfarm.core.errors import ConfigError
from envfarm.core.messages import AssistantMessage, Message, ToolCall, ToolSchema
from envfarm.rollout.tokens.builder import Extension, TokenBuilder
from envfarm.rollout.tokens.chat import as_plain_chat, template_message, template_tools
from envfarm.rollout.tokens.parsing import HermesReader
from envfarm.rollout.tokens.tokenizer import PolicyTokenizer

_SAID, _THOUGHT, _PROBE = "zqstandinqz", "zqthoughtqz", "zqprobeqz"
_KEPT = 64  # catalogues, and first prompts of each
_EPISODES = 1024  # whose tuple of tools is known by sight
_ASKED = Message(role="user", content="zqaskedqz")


class _Catalogue:
    """What one set of tools looks like to the template, and the frames found for it."""

    def __init__(self, tools: Sequence[ToolSchema], rendered: list[dict[str, Any]] | None, opening: str) -> None:
        self.tools = tools
        self.rendered = rendered
        self.opening = opening  # text of _ASKED up to where an answer begins
        self.frames: dict[tuple[object, ...], _Frame | None] = {}
        self.starts: dict[tuple[Message, ...], list[int]] = {}


class _Frame:
    """Fixed text with holes for fields of the replies; ``pieces[0] + field + pieces[1] + ...``."""

    def __init__(self, pieces: list[str], holes: list[tuple[int, str]]) -> None:
        self.pieces = pieces
        self.holes = holes


class TemplateBuilder(TokenBuilder):
    """A :class:`~envfarm.rollout.tokens.builder.TokenBuilder` over the template that the tokenizer brings.

    Raises :class:`ConfigError` when there is no template. ``stop_token_ids``: those of the generation config, the
    tokenizer's end of text, and the token with which the template ends an assistant message.
    """

    def __init__(self, tokenizer: PolicyTokenizer, stop_token_ids: Sequence[int] = ()) -> None:
        if not getattr(tokenizer.inner, "chat_template", None):
            raise ConfigError(f"{tokenizer.name_or_path} has no chat template; save one with its tokenizer")
        self._tokenizer = tokenizer
        self._knows_tools = self._probe_tools()
        self._knows_reasoning = _THOUGHT in self._text(
            [_ASKED, Message(role="assistant", content=_SAID, reasoning=_THOUGHT)], None
        )
        self._close = self._end_of_turn()
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        close = [] if self._close is None else [tokenizer.control[self._close]]
        self._stops = tuple(dict.fromkeys([*close, *stop_token_ids, *eos]))
        if not self._stops:
            raise ConfigError(f"{tokenizer.name_or_path}: nothing ends an answer; set eos_token_id")
        self._reader = HermesReader(tokenizer, self._stops)
        self._catalogues: dict[tuple[ToolSchema, ...], _Catalogue] = {}
        self._seen: dict[int, tuple[Sequence[ToolSchema], _Catalogue]] = {}  # by identity: hashing schemas is slow

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant message, the template's own first."""
        return self._stops

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """See :class:`TokenBuilder`."""
        catalogue, key = self._catalogue(tools), tuple(messages)
        found = catalogue.starts.get(key)
        if found is None:
            found = self._tokenizer.encode(self._text(messages, catalogue, prompt=True))
            _remember(catalogue.starts, key, found)
        return list(found)

    def extend(
        self,
        *,
        prompt_ids: list[int],
        output_ids: list[int],
        history: Sequence[Message],
        replies: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> Extension:
        """See :class:`TokenBuilder`."""
        del prompt_ids
        catalogue = self._catalogue(tools)
        reasoned = self._knows_reasoning and any(message.reasoning for message in history)
        tail = self._tail(replies, catalogue, reasoned=reasoned)
        if tail is None or self._close is None:
            text = self._text([*history, *replies], catalogue, prompt=True)
            return Extension(self._tokenizer.encode(text), replaces=True)
        ended = bool(output_ids) and output_ids[-1] in self._stops
        return Extension(self._tokenizer.encode(tail[len(self._close) :] if ended else tail))

    def parse(
        self, output_ids: list[int], *, prompt_ids: list[int], tools: Sequence[ToolSchema], truncated: bool
    ) -> AssistantMessage:
        """See :class:`TokenBuilder`."""
        del prompt_ids, tools
        return self._reader.read(output_ids, truncated=truncated)

    def _catalogue(self, tools: Sequence[ToolSchema]) -> _Catalogue:
        seen = self._seen.get(id(tools))
        if seen is not None and seen[0] is tools:
            return seen[1]
        key = tuple(tools)
        found = self._catalogues.get(key)
        if found is None:
            rendered = template_tools(tools, self._tokenizer.protect_all) if self._knows_tools else None
            found = _Catalogue(tools, rendered, "")
            found.opening = self._text([_ASKED], found, prompt=True)
            _remember(self._catalogues, key, found)
        if isinstance(tools, tuple):
            _remember(self._seen, id(tools), (tools, found), kept=_EPISODES)
        return found

    def _tail(self, replies: Sequence[Message], catalogue: _Catalogue, *, reasoned: bool) -> str | None:
        """Text from the end of the answer on, up to where the next begins; ``None``: the template rewrites history."""
        if not all(reply.content for reply in replies):  # templates may treat empty texts in their own way
            return self._rendered_tail(replies, catalogue, reasoned=reasoned)
        shape = (reasoned, *((r.role, bool(r.name), bool(r.tool_call_id)) for r in replies))
        if shape not in catalogue.frames:
            catalogue.frames[shape] = self._frame(replies, catalogue, reasoned=reasoned)
        frame = catalogue.frames[shape]
        if frame is None:
            return self._rendered_tail(replies, catalogue, reasoned=reasoned)
        protect = self._tokenizer.protect
        out = [frame.pieces[0]]
        for (index, field), piece in zip(frame.holes, frame.pieces[1:], strict=True):
            out += (protect(getattr(replies[index], field)), piece)
        return "".join(out)

    def _frame(self, replies: Sequence[Message], catalogue: _Catalogue, *, reasoned: bool) -> _Frame | None:
        """The frame of replies in this shape; ``None`` when their texts do not come through unchanged."""
        marks: dict[str, tuple[int, str]] = {}
        marked: list[Message] = []
        for index, reply in enumerate(replies):
            content = f' \n"zqcontent{index}qz"\n '
            name = f"zqname{index}qz" if reply.name else ""
            call = f"zqcall{index}qz" if reply.tool_call_id else ""
            marks |= {content: (index, "content"), name: (index, "name"), call: (index, "tool_call_id")}
            marked.append(Message(role=reply.role, content=content, name=name, tool_call_id=call))
        marks.pop("", None)
        tail = self._rendered_tail(marked, catalogue, reasoned=reasoned)
        if tail is None:
            return None
        split = re.split(f"({'|'.join(map(re.escape, marks))})", tail)
        holes = [marks[text] for text in split[1::2]]
        contents = [index for index, field in holes if field == "content"]
        whole = contents == list(range(len(replies))) and not any("zq" in piece for piece in split[::2])
        return _Frame(split[::2], holes) if whole else None

    def _rendered_tail(self, replies: Sequence[Message], catalogue: _Catalogue, *, reasoned: bool) -> str | None:
        if self._close is None:
            return None
        calls = tuple(ToolCall(r.tool_call_id, r.name or _PROBE, "{}") for r in replies if r.role == "tool")
        answer = Message(role="assistant", content=_SAID, tool_calls=calls, reasoning=_THOUGHT if reasoned else "")
        text = self._text([_ASKED, answer, *replies], catalogue, prompt=True)
        said = text.find(_SAID, len(catalogue.opening))
        if said < 0 or not text.startswith(catalogue.opening):
            return None
        if reasoned and _THOUGHT not in text[:said]:
            return None
        if not reasoned and said != len(catalogue.opening):
            return None
        closed = text.find(self._close, said)
        return None if closed < 0 else text[closed:]

    def _text(self, messages: Sequence[Message], catalogue: _Catalogue | None, *, prompt: bool = False) -> str:
        tools = None
        if catalogue is not None:
            tools = catalogue.rendered
            if not self._knows_tools:
                messages = as_plain_chat(messages, catalogue.tools)
        chat = [template_message(message, self._tokenizer.protect_all) for message in messages]
        return self._apply(chat, tools, prompt=prompt)

    def _apply(self, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self._tokenizer.inner.apply_chat_template(
                    chat, tools=tools, tokenize=False, add_generation_prompt=prompt
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message["role"] for message in chat)
            raise ConfigError(
                f"{self._tokenizer.name_or_path}: its chat template refuses messages of roles {roles}: {error}"
            ) from error

    def _probe_tools(self) -> bool:
        """Whether the template shows tools, calls and results."""
        schema = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
        tool = {"type": "function", "function": {"name": _PROBE, "description": "Probes.", "parameters": schema}}
        call = {"type": "function", "id": "call_0", "function": {"name": _PROBE, "arguments": {"x": "y"}}}
        asked = {"role": "user", "content": "x"}
        try:
            shows_tools = _PROBE in self._apply([asked], [tool], prompt=True)
            text = self._apply(
                [
                    asked,
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "content": _SAID, "name": "x", "tool_call_id": "call_0"},
                ],
                [],
                prompt=True,
            )
        except ConfigError:
            return False
        return shows_tools and _PROBE in text and _SAID in text

    def _end_of_turn(self) -> str | None:
        """The control token with which an answer ends; ``None``: there is none, so every turn is rendered anew."""
        text = self._text([_ASKED, Message(role="assistant", content=_SAID)], None)
        _, said, after = text.partition(_SAID)
        forms = [form for form in self._tokenizer.control if after.startswith(form)]
        return max(forms, key=len) if said and forms else None


def _remember(cache: dict[Any, Any], key: Any, value: Any, *, kept: int = _KEPT) -> None:
    if len(cache) >= kept:
        del cache[next(iter(cache))]
    cache[key] = value
