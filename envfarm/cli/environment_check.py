"""The checks behind ``envfarm env test``: a real host behind a real gateway, driven by scripted calls."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from envfarm.cli.local_farm import local_farm
from envfarm.core.episode import EnvironmentInfo, Opened, StepAnswer
from envfarm.core.errors import FarmError
from envfarm.core.ids import new_id
from envfarm.core.messages import AssistantMessage, Diagnosis, ToolCall, ToolSchema
from envfarm.core.outcome import OutcomeKind
from envfarm.core.task import SPLITS, Task
from envfarm.wire.episode_client import EpisodeClient

_STEP_SECONDS = 20.0


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was tried and what came of it."""

    name: str
    ok: bool
    detail: str = ""


async def check_environment(name: str, state: Path) -> list[Check]:
    """Run every check; a failing one does not stop those that can still be made."""
    async with (
        local_farm(state, environments=[name], policy=None, slots=4) as farm,
        EpisodeClient(farm.channel) as client,
    ):
        return [check async for check in _checks(client, name)]


async def _checks(client: EpisodeClient, name: str) -> AsyncIterator[Check]:
    info = (await client.describe(name))[0]
    yield Check(name="loads, and its tools have schemas", ok=bool(info.tools), detail=_names(info))
    tasks: list[Task] = []
    for split in SPLITS:
        try:
            page = await client.tasks(name, split, 0, 3)
        except FarmError as error:
            yield Check(name=f"gives tasks for {split}", ok=False, detail=str(error))
            continue
        yield Check(name=f"gives tasks for {split}", ok=bool(page), detail=", ".join(t.id for t in page))
        tasks = tasks or page
    if not tasks:
        return
    yield await _repeatable(client, name, tasks[0])
    for tool in info.tools:
        yield await _tool_answers(client, name, tasks[0], tool)
    yield await _bad_input(client, name, tasks[0])
    yield await _ends(client, name, tasks[0], info)


def _names(info: EnvironmentInfo) -> str:
    return ", ".join(t.name for t in info.tools) or "no tools; mark methods with @tool"


async def _open(client: EpisodeClient, name: str, task: Task) -> Opened:
    return await client.open(environment=name, task=task, seed=7, request_id=new_id("try"), timeout=_STEP_SECONDS)


async def _repeatable(client: EpisodeClient, name: str, task: Task) -> Check:
    title = "same task and seed, same beginning"
    try:
        first, second = await _open(client, name, task), await _open(client, name, task)
        await client.close(first.handle)
        await client.close(second.handle)
    except FarmError as error:
        return Check(name=title, ok=False, detail=str(error))
    return Check(name=title, ok=first.messages == second.messages, detail=first.messages[-1].content[:100])


async def _tool_answers(client: EpisodeClient, name: str, task: Task, tool: ToolSchema) -> Check:
    title = f"tool {tool.name} answers"
    arguments = msgspec.json.encode(example(msgspec.json.decode(tool.parameters))).decode()
    message = AssistantMessage(tool_calls=(ToolCall("call_0", tool.name, arguments),), diagnosis=Diagnosis.OK)
    try:
        opened = await _open(client, name, task)
        answer = await client.step(opened.handle, 0, message, timeout=_STEP_SECONDS)
        await client.close(opened.handle)
    except FarmError as error:
        return Check(name=title, ok=False, detail=str(error))
    broken = _fault(answer)
    content = answer.results[0].content if answer.results else ""
    return Check(name=title, ok=not broken, detail=broken or f"{arguments} → {content[:80]}")


def _fault(answer: StepAnswer) -> str:
    """What is wrong with an answer to a well-formed call; a tool may say no, but nothing may break."""
    if answer.outcome is not None and answer.outcome.kind is OutcomeKind.INFRA_FAILED:
        return str(answer.outcome)
    for part in ("progress", "completion"):
        value = answer.parts.get(part)
        if value is not None and not -1.0 <= value <= 1.0:
            return f"{part} is {value}; it must stay in [0, 1] (its difference in [-1, 1])"
    return ""


async def _bad_input(client: EpisodeClient, name: str, task: Task) -> Check:
    title = "malformed and unknown calls are observations"
    wrong = [
        AssistantMessage(diagnosis=Diagnosis.SYNTAX, detail="the call is not valid JSON"),
        AssistantMessage(tool_calls=(ToolCall("call_0", "no_such_tool", "{}"),), diagnosis=Diagnosis.OK),
    ]
    try:
        opened = await _open(client, name, task)
        answers = [
            await client.step(opened.handle, i, message, timeout=_STEP_SECONDS) for i, message in enumerate(wrong)
        ]
        await client.close(opened.handle)
    except FarmError as error:
        return Check(name=title, ok=False, detail=str(error))
    said = [m.content for a in answers for m in a.messages]
    return Check(name=title, ok=not any(a.done for a in answers), detail=" / ".join(s[:60] for s in said))


async def _ends(client: EpisodeClient, name: str, task: Task, info: EnvironmentInfo) -> Check:
    title = "an episode ends and is judged"
    try:
        opened = await _open(client, name, task)
        answer = None
        for index in range(info.limits.steps):
            message = AssistantMessage(content="I do not know.", diagnosis=Diagnosis.NONE)
            answer = await client.step(opened.handle, index, message, timeout=_STEP_SECONDS)
            if answer.done:
                break
        await client.close(opened.handle)
    except FarmError as error:
        return Check(name=title, ok=False, detail=str(error))
    if answer is None or not answer.done:
        return Check(name=title, ok=False, detail=f"still open after {info.limits.steps} steps")
    parts = ", ".join(f"{k} {'-' if v is None else f'{v:+.2f}'}" for k, v in answer.parts.items())
    return Check(name=title, ok=not _fault(answer), detail=f"{answer.outcome}: {parts}")


def example(schema: dict[str, Any], root: dict[str, Any] | None = None) -> Any:
    """A smallest value that fits ``schema`` (required properties only)."""
    root = root or schema
    if "$ref" in schema:
        target: Any = root
        for key in schema["$ref"].removeprefix("#/").split("/"):
            target = target[key]
        return example(target, root)
    for key in ("default", "const"):
        if key in schema:
            return schema[key]
    if "enum" in schema:
        return schema["enum"][0]
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return example(schema[key][0], root)
    return _example_of_type(schema, root)


def _example_of_type(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties", {})
        return {key: example(properties.get(key, {}), root) for key in schema.get("required", [])}
    if kind == "array":
        return list(itertools.repeat(example(schema.get("items", {}), root), schema.get("minItems", 0)))
    if kind in ("integer", "number"):
        return schema.get("minimum", 1)
    return {"boolean": True, "null": None}.get(kind, "a" * max(1, schema.get("minLength", 1)))
