"""Conversations of an expert clerk at work, clean or flawed, as data for a supervised warm-up.

The expert asks the real environment, so that every number it is told is the number a policy would be told. Flaws are
made on purpose: a policy that copies them has something to unlearn. Run as a command it writes JSON lines, each
``{"messages": [...], "tools": [...]}`` in OpenAI's chat form::

    python -m sandboxes.environments.stockroom.demonstrations --count 22400 > clean.jsonl
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from random import Random
from typing import Annotated, Any

import msgspec
import typer

from envfarm.core.environment import marked_tools
from envfarm.core.ids import derived_seed
from envfarm.core.messages import ToolCall
from envfarm.core.task import Task
from envfarm.tools.parsers import parse
from envfarm.tools.schema import schemas
from envfarm.tools.validation import Catalogue
from sandboxes.environments.stockroom.environment import Stockroom
from sandboxes.environments.stockroom.questions import FAMILIES, TRAINING_ITEMS, Call, Question, Shelf, draw_question

Json = dict[str, Any]

ARITHMETIC = ("add", "multiply", "compare")
CONFUSED_WITH = {"quantity": "price", "price": "quantity", "add": "multiply", "multiply": "add"}
DISTRACTIONS = (Call("weather", {"city": "Paris"}), Call("ring_bell", {}), Call("clock", {}))
TOOLS = schemas(Stockroom)
CATALOGUE = Catalogue(TOOLS)


class Flaws(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities of the clerk's faults; all zero is the expert.

    ``skip`` (per conversation): never does the arithmetic, and answers with the last number it was told.
    ``slip`` (per step): first a useless, broken or ill-fitting call, then carries on as if nothing had been.
    ``mistake`` (per step): the wrong tool or the wrong answer, and does not notice.
    """

    skip: float = 0.0
    slip: float = 0.0
    mistake: float = 0.0


def demonstrations(seed: int, flaws: Flaws | None = None) -> Iterator[Json]:
    """Endless conversations about training items, all families in turn; no task of any split is among them."""
    flaws = flaws or Flaws()
    tools = [schema.openai() for schema in TOOLS]
    for index in itertools.count():
        rng = Random(derived_seed("stockroom", "demonstration", seed, index))
        question = draw_question(rng.getrandbits(48), FAMILIES[index % len(FAMILIES)], TRAINING_ITEMS)
        yield {"messages": _Clerk(question, rng, flaws).work(), "tools": tools}


class _Clerk:
    """One conversation in the making."""

    def __init__(self, question: Question, rng: Random, flaws: Flaws) -> None:
        self._question = question
        self._rng = rng
        self._flaws = flaws
        self._stockroom = Stockroom()
        first = self._stockroom.reset(Task(id="demonstration", data=msgspec.to_builtins(question)))
        self._tools = marked_tools(self._stockroom)
        self._messages: list[Json] = [
            {"role": "system", "content": Stockroom.system_prompt},
            {"role": "user", "content": first},
        ]
        self._last_number = 0

    def work(self) -> list[Json]:
        """All messages up to the call of ``answer``, which nobody replies to."""
        shelf = Shelf(self._question.shelf)
        skips = self._rng.random() < self._flaws.skip
        for call in self._question.needed(shelf):
            if skips and call.tool in ARITHMETIC:
                self._answer(self._last_number)
                return self._messages
            self._perhaps_slip(call)
            self._call(self._perhaps_mistaken(call))
        right = Call("answer", {"value": self._question.answer(shelf)})
        self._perhaps_slip(right)
        self._answer(self._perhaps_mistaken(right).arguments["value"])
        return self._messages

    def _call(self, call: Call) -> None:
        function, _ = self._tools[call.tool]
        result = function(**call.arguments)
        if isinstance(result, int):
            self._last_number = result
        self._say(call)
        self._messages.append({"role": "tool", "content": str(result)})

    def _answer(self, value: int) -> None:
        self._say(Call("answer", {"value": value}))

    def _say(self, call: Call) -> None:
        function = {"name": call.tool, "arguments": json.dumps(call.arguments)}
        self._messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )

    def _perhaps_slip(self, call: Call) -> None:
        if self._rng.random() >= self._flaws.slip:
            return
        kind = self._rng.choice(("distraction", "broken", "ill-fitting"))
        if kind == "distraction":
            self._call(self._rng.choice(DISTRACTIONS))
        elif kind == "broken":
            self._say_broken(call)
        else:
            self._say_ill_fitting(call)

    def _say_broken(self, call: Call) -> None:
        """JSON that lacks its last brace; what the farm says about it comes as a user message."""
        body = json.dumps({"name": call.tool, "arguments": call.arguments})[:-1]
        text = f"<tool_call>\n{body}\n</tool_call>"
        self._messages.append({"role": "assistant", "content": text})
        self._messages.append({"role": "user", "content": parse("hermes", text).detail})

    def _say_ill_fitting(self, call: Call) -> None:
        """One argument under another name; what the farm says about it comes as the tool's result."""
        name, value = next(iter(call.arguments.items()))
        wrong = Call(call.tool, {"item" if name == "value" else "value": value})
        verdict = CATALOGUE.check(ToolCall("call_0", wrong.tool, json.dumps(wrong.arguments)))
        self._say(wrong)
        self._messages.append({"role": "tool", "content": f"error: {verdict.detail}"})

    def _perhaps_mistaken(self, call: Call) -> Call:
        if self._rng.random() >= self._flaws.mistake:
            return call
        if call.tool in CONFUSED_WITH:
            return Call(CONFUSED_WITH[call.tool], call.arguments)
        return Call(call.tool, {name: self._rng.randint(1, 99) for name in call.arguments})


def write(
    count: Annotated[int, typer.Option(help="Conversations to write.", min=1)] = 22_400,
    seed: Annotated[int, typer.Option(help="Another seed, other conversations.")] = 0,
    skip: Annotated[float, typer.Option(help="Share that skips the arithmetic.", min=0, max=1)] = 0.0,
    slip: Annotated[float, typer.Option(help="Chance of a recoverable slip per step.", min=0, max=1)] = 0.0,
    mistake: Annotated[float, typer.Option(help="Chance of an unnoticed mistake per step.", min=0, max=1)] = 0.0,
) -> None:
    """Write conversations of the stockroom's clerk to standard output, one JSON object a line."""
    encode = msgspec.json.Encoder().encode
    for conversation in itertools.islice(demonstrations(seed, Flaws(skip=skip, slip=slip, mistake=mistake)), count):
        sys.stdout.buffer.write(encode(conversation) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    typer.run(write)
