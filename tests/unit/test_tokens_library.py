"""The library's renderers behind the same interface, taken only where they give the template's very ids."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers import qwen3
from tokenizers import AddedToken

from envfarm.core.errors import ConfigError
from envfarm.core.messages import Diagnosis, Message, ToolCall, ToolSchema
from envfarm.rollout.tokens import PolicyTokenizer, load_token_builder
from envfarm.rollout.tokens.library import LibraryBuilder
from envfarm.rollout.tokens.template import TemplateBuilder
from trainer_bridge.warmup_tokenizer import CHAT_TEMPLATE, train_tokenizer

#: What Qwen3's template does with text-only chats, written down from the library's description of it.
QWEN3_TEMPLATE = (
    "{%- set header = "
    + json.dumps(qwen3._TOOLS_HEADER)
    + " %}{%- set footer = "
    + json.dumps(qwen3._TOOLS_FOOTER)
    + " %}"
    """\
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + (first + '\\n\\n' if messages[0].role == 'system' else '') + header }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- footer + '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + first + '<|im_end|>\\n' }}
{%- endif %}
{%- set asked = namespace(last=messages | length - 1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set asked.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > asked.last and (loop.last or m.reasoning_content) %}
            {{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n' if m.content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' else '' }}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
    {%- elif not (m.role == 'system' and loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)
TOOLS = (ToolSchema(name="look", description="Looks.", parameters='{"type":"object","properties":{"at":{}}}'),)
CALL = ToolCall("call_0", "look", '{"at": "door"}')
CALL_TEXT = '<tool_call>\n{"name": "look", "arguments": {"at": "door"}}\n</tool_call>'


@functools.cache
def tokenizer() -> PolicyTokenizer:
    inner = train_tokenizer(["system user assistant look at the red door"] * 3, 300)
    inner.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    inner.chat_template = QWEN3_TEMPLATE
    return PolicyTokenizer(inner)


@functools.cache
def builders() -> tuple[LibraryBuilder, TemplateBuilder]:
    return LibraryBuilder(tokenizer(), "qwen3"), TemplateBuilder(tokenizer())


def saved(folder: Path, template: str) -> Path:
    inner = train_tokenizer(["system user assistant look at the red door"] * 3, 300)
    inner.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    inner.chat_template = template
    inner.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    return folder


controls = st.sampled_from([*sorted(tokenizer().control), "<", "<|im_end|"])
texts = st.lists(st.one_of(st.text("ab \n<>", max_size=6), controls), max_size=4).map("".join)


@settings(deadline=None, max_examples=60)
@given(system=texts, asked=texts, results=st.lists(texts, min_size=1, max_size=3), tools=st.sampled_from([(), TOOLS]))
def test_library_and_template_agree_turn_by_turn(system, asked, results, tools) -> None:
    library, template = builders()
    messages = [Message(role="system", content=system), Message(role="user", content=asked)]
    ids = library.start(messages, tools)
    assert tokenizer().decode(ids) == tokenizer().decode(template.start(messages, tools))
    output = [*tokenizer().encode(CALL_TEXT), tokenizer().control["<|im_end|>"]]
    messages.append(Message(role="assistant", tool_calls=(CALL,)))
    replies = [Message(role="tool", content=r, tool_call_id=f"call_{i}", name="look") for i, r in enumerate(results)]
    extensions = [
        builder.extend(prompt_ids=ids, output_ids=output, history=messages, replies=replies, tools=tools)
        for builder in (library, template)
    ]
    assert not extensions[0].replaces
    assert not extensions[1].replaces
    assert tokenizer().decode(extensions[0].token_ids) == tokenizer().decode(extensions[1].token_ids)
    control = set(tokenizer().control.values())
    assert [i for i in extensions[0].token_ids if i in control] == [i for i in extensions[1].token_ids if i in control]


def test_a_message_that_was_cut_off_is_closed_and_a_new_question_rewrites_reasoning() -> None:
    library, _ = builders()
    asked = [Message(role="user", content="look")]
    ids = library.start(asked, TOOLS)
    cut = tokenizer().encode("the red")
    reply = Message(role="tool", content="open", tool_call_id="call_0", name="look")
    history = [*asked, Message(role="assistant", content="the red")]
    extension = library.extend(prompt_ids=ids, output_ids=cut, history=history, replies=[reply], tools=TOOLS)
    assert extension.token_ids[0] == tokenizer().control["<|im_end|>"]
    question = library.extend(
        prompt_ids=ids, output_ids=cut, history=history, replies=[Message(role="user", content="and?")], tools=TOOLS
    )
    assert question.replaces


@settings(deadline=None, max_examples=60)
@given(output=st.lists(st.integers(0, 301), max_size=30), truncated=st.booleans())
def test_whatever_is_sampled_is_read_without_an_exception(output, truncated) -> None:
    library, _ = builders()
    library.parse(output, prompt_ids=[1], tools=TOOLS, truncated=truncated)


def test_the_folder_s_template_decides_whether_the_library_is_used(tmp_path: Path) -> None:
    exact = load_token_builder(saved(tmp_path / "exact", QWEN3_TEMPLATE))
    own = load_token_builder(saved(tmp_path / "own", CHAT_TEMPLATE))
    assert isinstance(exact, LibraryBuilder)
    assert isinstance(own, TemplateBuilder)
    assert set(exact.stop_token_ids) == set(own.stop_token_ids) == {2, 0}
    assert isinstance(load_token_builder(tmp_path / "exact", renderer="template"), TemplateBuilder)


def test_calls_of_a_format_that_only_the_library_knows_are_graded(tmp_path: Path) -> None:
    from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus

    from envfarm.rollout.tokens.library import _message

    good = ParsedToolCall(raw="", name="look", arguments={"at": "door"})
    broken = ParsedToolCall(raw="{", status=ToolCallParseStatus.INVALID_JSON)
    cut = ParsedToolCall(raw="{", status=ToolCallParseStatus.UNCLOSED_BLOCK)
    assert _message(ParsedResponse(content="x"), truncated=False).diagnosis is Diagnosis.NONE
    assert _message(ParsedResponse(content="", tool_calls=[good]), truncated=False).diagnosis is Diagnosis.OK
    both = _message(ParsedResponse(content="", tool_calls=[broken, good]), truncated=False)
    assert both.diagnosis is Diagnosis.SYNTAX
    assert both.tool_calls == (ToolCall("call_0", "look", '{"at":"door"}'),)
    assert "not valid JSON" in both.detail
    assert _message(ParsedResponse(content="", tool_calls=[good, cut]), truncated=True).diagnosis is Diagnosis.TRUNCATED
    assert _message(ParsedResponse(content="", tool_calls=[good, cut]), truncated=False).diagnosis is Diagnosis.SYNTAX


def test_unknown_formats_and_missing_folders_say_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_token_builder(tmp_path)
    folder = saved(tmp_path / "policy", CHAT_TEMPLATE)
    with pytest.raises(ConfigError, match="no-such-format"):
        load_token_builder(folder, renderer="no-such-format")
    with pytest.raises(ConfigError, match="glm-5"):
        load_token_builder(folder, renderer="glm-5")
