"""Chooses a policy's token builder: the library's where it is exact for this model, else the template's own."""

from __future__ import annotations

from pathlib import Path

import msgspec

from envfarm.core.errors import ConfigError
from envfarm.core.messages import Message, ToolCall, ToolSchema
from envfarm.rollout.tokens.builder import TokenBuilder
from envfarm.rollout.tokens.library import LibraryBuilder
from envfarm.rollout.tokens.template import TemplateBuilder
from envfarm.rollout.tokens.tokenizer import PolicyTokenizer, generation_stop_ids, load_tokenizer

_BY_MODEL_TYPE = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen3.5",
    "glm4_moe": "glm-4.5",
    "gpt_oss": "gpt-oss",
    "deepseek_v3": "deepseek-v3",
    "minimax_m2": "minimax-m2",
    "llama": "llama-3",
}
_TOOL = ToolSchema(
    name="look", description="Looks.", parameters='{"type":"object","properties":{"at":{"type":"string"}}}'
)
_ASKED = (Message(role="system", content="Be brief."), Message(role="user", content="Look at the red door."))
_PROBES: tuple[tuple[Message, ...], ...] = (
    _ASKED[1:],
    _ASKED,
    (
        *_ASKED,
        Message(role="assistant", tool_calls=(ToolCall("call_0", "look", '{"at": "red door"}'),)),
        Message(role="tool", content="open", tool_call_id="call_0", name="look"),
    ),
)


def load_token_builder(folder: str | Path, *, renderer: str = "auto") -> TokenBuilder:
    """The token builder of the policy in ``folder``.

    ``renderer``: ``auto``, ``template`` (the folder's chat template), or a name of the library ``renderers``.
    ``auto`` takes the library's renderer of the folder's model type only if it renders probe conversations to
    the very ids that the chat template gives. Raises :class:`ConfigError`. Takes up to seconds: call it in a
    thread.
    """
    tokenizer = load_tokenizer(folder)
    stops = generation_stop_ids(folder)
    if renderer == "template":
        return TemplateBuilder(tokenizer, stops)
    if renderer != "auto":
        return LibraryBuilder(tokenizer, renderer, stops)
    name = _BY_MODEL_TYPE.get(_model_type(folder))
    if name is not None and (found := _exact(tokenizer, name, stops)) is not None:
        return found
    return TemplateBuilder(tokenizer, stops)


def _model_type(folder: str | Path) -> str:
    config = Path(folder) / "config.json"
    return str(msgspec.json.decode(config.read_bytes()).get("model_type", "")) if config.is_file() else ""


def _exact(tokenizer: PolicyTokenizer, name: str, stops: tuple[int, ...]) -> LibraryBuilder | None:
    try:
        library, template = LibraryBuilder(tokenizer, name, stops), TemplateBuilder(tokenizer, stops)
        for messages in _PROBES:
            for tools in ((), (_TOOL,)):
                if library.start(messages, tools) != template.start(messages, tools):
                    return None
    except ConfigError:
        return None
    return library
