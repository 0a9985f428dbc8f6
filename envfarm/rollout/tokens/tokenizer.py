"""A policy's tokenizer, with text of others kept from spelling control tokens.

Chat templates paste messages between control tokens, and tokenizers turn *any* text that looks like a control token
into it. So a user or a tool could forge turns. :meth:`PolicyTokenizer.protect` marks such places in a text with a
private character; :meth:`PolicyTokenizer.encode` cuts there, so that the pieces are spelled with ordinary tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from envfarm.core.errors import ConfigError

CUT = "\ue000"  # from the private use area; doubled where a text holds it itself
_CUTS = re.compile(f"{CUT}{CUT}|{CUT}")
_CACHED_CHARS = 512  # replies repeat, and are short; longer texts would fill memory


class PolicyTokenizer:
    """Wraps a fast Hugging Face tokenizer. Also serves the library ``renderers`` as its tokenizer.

    Raises :class:`ConfigError` when a control token cannot be spelled with ordinary tokens: then nothing could keep
    user text apart from control tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError("this policy has no fast tokenizer (tokenizer.json); convert it with transformers first")
        self.inner = tokenizer
        self._backend = backend
        self.name_or_path: str = tokenizer.name_or_path
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.all_special_tokens: list[str] = list(tokenizer.all_special_tokens)
        self.control: dict[str, int] = {
            token.content: index for index, token in tokenizer.added_tokens_decoder.items() if len(token.content) > 1
        }
        forms = sorted(self.control, key=len, reverse=True)
        self._controls = re.compile(f"(?=({'|'.join(map(re.escape, forms))}))") if forms else None
        self._encode_cached = lru_cache(maxsize=4096)(self._encode)
        self._check_spelling()

    def protect(self, text: str) -> str:
        """``text`` with a mark inside everything that looks like a control token; :meth:`encode` removes the marks."""
        if CUT in text:
            text = text.replace(CUT, CUT + CUT)
        if self._controls is None:
            return text
        places = [match.start() + 1 for match in self._controls.finditer(text)]
        if not places:
            return text
        return CUT.join(text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True))

    def protect_all(self, value: Any) -> Any:
        """:meth:`protect` on every string inside a JSON-like value."""
        if isinstance(value, str):
            return self.protect(value)
        if isinstance(value, Mapping):
            return {self.protect(str(key)): self.protect_all(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect_all(item) for item in value]
        return value

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """Ids of ``text``; no token is added, control tokens are recognised except where :meth:`protect` cut."""
        return list(self._encode_cached(text)) if len(text) <= _CACHED_CHARS else list(self._encode(text))

    def decode(self, ids: Sequence[int] | int, *_: Any, **__: Any) -> str:
        """The text that ``ids`` spell, control tokens included."""
        return str(self._backend.decode([ids] if isinstance(ids, int) else list(ids), skip_special_tokens=False))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Id of a token, or ids of several."""
        return self.inner.convert_tokens_to_ids(tokens)

    def _encode(self, text: str) -> tuple[int, ...]:
        if CUT not in text:
            return tuple(self._backend.encode(text, add_special_tokens=False).ids)
        ids: list[int] = []
        for piece in _pieces(text):
            ids += self._backend.encode(piece, add_special_tokens=False).ids
        return tuple(ids)

    def _check_spelling(self) -> None:
        for form in self.control:
            ids = self._encode(self.protect(form))
            if self.decode(ids) != form or self.control[form] in ids:
                raise ConfigError(
                    f"{self.name_or_path}: its tokenizer cannot spell {form!r} without the control token itself, so a"
                    " user could forge it; use a tokenizer with a byte-level vocabulary"
                )


def load_tokenizer(folder: str | Path) -> PolicyTokenizer:
    """The tokenizer of a Hugging Face folder. Raises :class:`ConfigError` when there is none.

    ``tokenizer.json`` describes a fast tokenizer completely; going by its class name would import torch, 470 MB.
    """
    path = Path(folder)
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(f"{path} is not a policy folder: no tokenizer.json in it")
    from transformers import PreTrainedTokenizerFast

    try:
        return PolicyTokenizer(PreTrainedTokenizerFast.from_pretrained(str(path)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: its tokenizer cannot be loaded ({error})") from error


def generation_stop_ids(folder: str | Path) -> tuple[int, ...]:
    """``eos_token_id`` of ``generation_config.json``; empty when the file or the entry is absent."""
    path = Path(folder) / "generation_config.json"
    if not path.is_file():
        return ()
    found = msgspec.json.decode(path.read_bytes()).get("eos_token_id")
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)


def _pieces(text: str) -> list[str]:
    """``text`` cut at single marks; a doubled mark is the character itself."""
    pieces, start = [""], 0
    for match in _CUTS.finditer(text):
        pieces[-1] += text[start : match.start()]
        if len(match.group()) == 2:
            pieces[-1] += CUT
        else:
            pieces.append("")
        start = match.end()
    pieces[-1] += text[start:]
    return [piece for piece in pieces if piece]
