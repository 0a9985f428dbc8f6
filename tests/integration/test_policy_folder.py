"""The shipped policy: an ordinary Hugging Face folder that knows its tools and carries one bad habit."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import envfarm
from envfarm.core.messages import Message, ToolCall
from envfarm.core.task import Task
from envfarm.rollout.tokens import TokenBuilder, load_token_builder
from envfarm.tools.schema import call_arguments, functions, schemas
from envfarm.tools.validation import Catalogue
from sandboxes.environments.stockroom import Stockroom
from sandboxes.environments.stockroom.demonstrations import Flaws, demonstrations

FOLDER = Path(envfarm.__file__).parent / "inference" / "policies" / "stockroom"
TOOLS = schemas(Stockroom)
CATALOGUE = Catalogue(TOOLS)

pytestmark = pytest.mark.xdist_group("policy")


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@cache
def model() -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


@cache
def builder() -> TokenBuilder:
    return load_token_builder(FOLDER)


def encode(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


def test_the_folder_is_small_and_holds_safetensors_a_card_and_a_chat_template() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) <= 8 * 2**20
    names = {path.name for path in FOLDER.iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "README.md"} <= names
    assert "chat_template.jinja" in names
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"F32"}  # noqa: SIM118 - not a dict


def test_it_loads_as_any_causal_model_and_stops_at_the_end_of_a_turn() -> None:
    assert model().config.model_type == "qwen3"
    assert model().num_parameters() == 292_656
    assert model().config.vocab_size == len(tokenizer()) == 448
    assert model().generation_config.eos_token_id == tokenizer().convert_tokens_to_ids("<|im_end|>")


def test_the_system_prompt_with_all_tools_is_about_eighty_tokens() -> None:
    system = [{"role": "system", "content": Stockroom.system_prompt}]
    text = tokenizer().apply_chat_template(system, tools=[tool.openai() for tool in TOOLS], tokenize=False)
    assert len(encode(text)) <= 100


def test_a_call_takes_at_most_fifteen_tokens() -> None:
    for conversation in itertools.islice(demonstrations(0), 60):
        for message in conversation["messages"]:
            for call in message.get("tool_calls", ()):
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                text = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call><|im_end|>'
                ids = encode(text)
                assert len(ids) <= 15
                assert tokenizer().decode(ids) == text


@pytest.mark.parametrize("flaws", [Flaws(), Flaws(skip=0.5, slip=0.5, mistake=0.2)])
def test_ids_of_a_conversation_built_turn_by_turn_are_those_of_the_whole(flaws: Flaws) -> None:
    for conversation in itertools.islice(demonstrations(1, flaws), 40):
        whole = tokenizer().apply_chat_template(conversation["messages"], tools=conversation["tools"], tokenize=False)
        history = [_message(message) for message in conversation["messages"]]
        ids = builder().start(history[:2], TOOLS)
        for index in range(2, len(history), 2):
            said = tokenizer().apply_chat_template(conversation["messages"][: index + 1], tokenize=False)
            turn = said.rpartition("<|im_start|>assistant\n")[2].removesuffix("\n")
            sampled = encode(turn)
            ids = ids + sampled
            if index + 1 < len(history):
                extension = builder().extend(
                    prompt_ids=ids[: -len(sampled)],
                    output_ids=sampled,
                    history=history[: index + 1],
                    replies=history[index + 1 : index + 2],
                    tools=TOOLS,
                )
                assert not extension.replaces
                ids = ids + extension.token_ids
        ids += encode("\n")
        assert ids == encode(whole)


def _message(message: dict[str, Any]) -> Message:
    calls = tuple(
        ToolCall("call_0", call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    )
    is_result = message["role"] == "tool"
    return Message(
        role=message["role"],
        content=message["content"],
        tool_calls=calls,
        tool_call_id="call_0" if is_result else "",
    )


@pytest.mark.slow
def test_it_starts_far_from_perfect_with_a_skill_that_shows() -> None:
    """Sampled at temperature 1 on test tasks: some questions are answered, most arithmetic is skipped."""
    torch.manual_seed(0)
    tasks = list(Stockroom().tasks("test"))[:48]
    done = [_play(task) for task in tasks]
    assert 0.1 <= sum(done) / len(done) <= 0.5


@torch.inference_mode()
def _play(task: Task) -> float:
    stockroom = Stockroom()
    tools = functions(stockroom)
    history = [
        Message(role="system", content=Stockroom.system_prompt),
        Message(role="user", content=stockroom.reset(task)),
    ]
    ids = builder().start(history, TOOLS)
    for _ in range(Stockroom.limits.steps):
        out = model().generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=True,
            max_new_tokens=48,
        )
        sampled = out[0, len(ids) :].tolist()
        message = builder().parse(sampled, prompt_ids=ids, tools=TOOLS, truncated=False)
        if not message.tool_calls and message.diagnosis == "none":
            return stockroom.verify()
        replies = []
        for call in message.tool_calls[:1]:
            verdict = CATALOGUE.check(call)
            if not verdict.ok:
                replies.append(
                    Message(role="tool", content=f"error: {verdict.detail}", tool_call_id=call.id, name=call.name)
                )
                continue
            function, mark = tools[call.name]
            result = function(**call_arguments(function, call.arguments))
            if mark.ends:
                return stockroom.verify()
            replies.append(Message(role="tool", content=str(result), tool_call_id=call.id, name=call.name))
        history.append(Message(role="assistant", content=message.content, tool_calls=message.tool_calls))
        replies = replies or [Message(role="user", content=message.detail)]
        extension = builder().extend(prompt_ids=ids, output_ids=sampled, history=history, replies=replies, tools=TOOLS)
        history += replies
        ids = ids + sampled + extension.token_ids
    return stockroom.verify()
