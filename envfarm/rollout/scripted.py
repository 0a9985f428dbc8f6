"""An engine that says what it is told, so that environments and workers can be tried without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from envfarm.core.engine import EngineStatus, GenerateRequest, Generation, VersionSpan
from envfarm.core.errors import ConfigError
from envfarm.rollout.tokens import PolicyTokenizer

Script = Callable[[str], str]


class ScriptedEngine:
    """Implements :class:`envfarm.core.engine.Engine` with texts instead of a model.

    ``script`` maps the decoded prompt to the text of the answer, or is a list of answers, one per turn, of which the
    last is repeated; turns are counted per ``routing_key``. Answers are tokenised with control tokens recognised, end
    with the request's first stop token, and have log-probability 0: the policy was certain.
    """

    def __init__(self, tokenizer: PolicyTokenizer, script: Script | Sequence[str], *, version: int = 0) -> None:
        if not callable(script) and not script:
            raise ConfigError("a script needs at least one answer")
        self.version = version
        self._tokenizer = tokenizer
        self._script = script
        self._turns: dict[str, int] = {}
        self._tokens = 0

    async def generate(self, request: GenerateRequest, *, timeout: float) -> Generation:
        """The next answer, cut at ``max_new_tokens``."""
        del timeout
        await asyncio.sleep(0)
        ids = self._tokenizer.encode(self._answer(request)) + list(request.sampling.stop_token_ids[:1])
        kept = ids[: request.sampling.max_new_tokens]
        self._tokens += len(kept)
        return Generation(
            output_ids=kept,
            logprobs=[0.0] * len(kept),
            finish="stop" if len(kept) == len(ids) else "length",
            versions=(VersionSpan(self.version, 0, len(kept)),),
            prompt_tokens=len(request.input_ids),
        )

    def _answer(self, request: GenerateRequest) -> str:
        if callable(self._script):
            return self._script(self._tokenizer.decode(list(request.input_ids)))
        turn = self._turns.get(request.routing_key, 0)
        self._turns[request.routing_key] = turn + 1
        return self._script[min(turn, len(self._script) - 1)]

    async def abort(self, rid: str) -> None:
        """Nothing runs for long."""

    async def update_weights_from_disk(self, path: str, *, version: int, timeout: float) -> None:
        """Only the version changes."""
        del path, timeout
        self.version = version

    async def status(self) -> Sequence[EngineStatus]:
        """One engine, always healthy."""
        return [EngineStatus(url="scripted", model_path="script", version=self.version, tokens_generated=self._tokens)]

    async def close(self) -> None:
        """Nothing to close."""
