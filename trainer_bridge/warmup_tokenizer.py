"""Tokenizer of a small policy made from scratch: byte-level BPE that keeps calls short and copying easy.

Three choices matter for a model of a few hundred thousand parameters that must copy names and numbers:

* a space is a token of its own, so that a word is the same token wherever it stands;
* digits are tokens of their own, so that a number is copied digit by digit;
* the fixed text of a Hermes tool call (``{"name": "`` and so on) stays whole, so that a call takes about ten tokens.

Being byte-level, it still encodes any text without loss.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")

WORD_PATTERN = r'\n?\{"name": "|", "arguments": \{|"[a-z_]+": "?|"?\}\}\n?|, |[A-Za-z_]+|[0-9]|\s|[^\sA-Za-z_0-9]'

# ChatML turns with Hermes tool calls. Tools are listed as name(arguments): a small model has little context to spend.
# ``arguments`` may be the text of a JSON object or the object; a tool's answer is a user turn, as in Qwen's templates.
CHAT_TEMPLATE = """\
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content }}
    {%- endif %}
    {%- if tools %}
        {{- '\\n<tools>\\n' }}
        {%- for tool in tools %}
            {%- set function = tool.function if tool.function is defined else tool %}
            {{- function.name + '(' + (function.parameters.properties.keys() | join(', ')) + ')\\n' }}
        {%- endfor %}
        {{- '</tools>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function if call.function is defined else call %}
            {%- set arguments = function.arguments %}
            {{- '\\n' if message.content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- (arguments if arguments is string else arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_SPLIT = re.compile("|".join(re.escape(token) for token in (*SPECIAL_TOKENS, *MARKERS)))


def blank_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the chat template: enough to render conversations as text."""
    return _train((), vocabulary=256 + len(SPECIAL_TOKENS) + len(MARKERS))


def train_tokenizer(rendered: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of ``vocabulary`` entries learnt from conversations as the chat template renders them."""
    return _train(_between_markers(rendered), vocabulary)


def _between_markers(rendered: Iterable[str]) -> Iterator[str]:
    for text in rendered:
        yield from filter(None, _SPLIT.split(text))


def _train(pieces: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(MARKERS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    # Not special: an engine that skips special tokens must still show where a call begins and ends.
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    wrapped: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
