"""The warm-up: demonstrations in, a Hugging Face folder out; the same seed gives the same policy."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer import Typer
from typer.testing import CliRunner

from envfarm.core.errors import ConfigError
from sandboxes.environments.stockroom.demonstrations import Flaws, demonstrations
from trainer_bridge.warmup import warmup
from trainer_bridge.warmup_data import Conversation, Encoder, read_conversations, render
from trainer_bridge.warmup_tokenizer import MARKERS, train_tokenizer
from trainer_bridge.warmup_tokenizer import blank_tokenizer as blank

pytestmark = pytest.mark.xdist_group("warmup")


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("demos") / "demos.jsonl"
    some = itertools.islice(demonstrations(0, Flaws(skip=0.3, slip=0.3)), 96)
    path.write_text("".join(json.dumps(conversation) + "\n" for conversation in some))
    return path


@pytest.fixture(scope="module")
def first(demos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("policies") / "first"
    warmup(demos, out, steps=3, batch=4, threads=1)
    return out


def weights(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_policy_made_from_scratch_loads_like_any_other(first: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(first)
    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    assert len(tokenizer) == model.config.vocab_size == 448
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_the_same_seed_gives_the_same_weights(demos: Path, first: Path, tmp_path: Path) -> None:
    warmup(demos, tmp_path / "again", steps=3, batch=4, threads=1)
    warmup(demos, tmp_path / "other", steps=3, batch=4, threads=1, seed=1)
    assert torch.equal(weights(first), weights(tmp_path / "again"))
    assert not torch.equal(weights(first), weights(tmp_path / "other"))


def test_a_later_phase_starts_from_a_folder_and_keeps_its_tokenizer(demos: Path, first: Path, tmp_path: Path) -> None:
    warmup(demos, tmp_path / "second", policy=first, steps=2, batch=4, learning_rate=1e-3, threads=1)
    assert (tmp_path / "second" / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()
    moved = (weights(tmp_path / "second") - weights(first)).abs().max()
    assert 0.0 < moved < 0.1


def test_the_command_reports_its_loss_and_the_loss_falls(demos: Path, tmp_path: Path) -> None:
    app = Typer()
    app.command()(warmup)
    arguments = [str(demos), "--out", str(tmp_path / "p"), "--steps", "70", "--batch", "8", "--threads", "1"]
    result = CliRunner().invoke(app, [*arguments, "--learning-rate", "2e-3"])
    assert result.exit_code == 0, result.output
    losses = [float(line.split("loss")[1].split()[0]) for line in result.output.splitlines() if "loss" in line]
    assert len(losses) == 2
    assert losses[1] < 0.7 * losses[0]


def test_only_what_the_assistant_says_is_learnt(demos: Path, first: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(first)
    encoder = Encoder(tokenizer)
    for conversation in read_conversations(demos):
        sequence = encoder.encode(render(tokenizer, conversation))
        learnt = tokenizer.decode([i for i, mark in zip(sequence.ids, sequence.learnt, strict=True) if mark])
        said = [message for message in conversation.messages if message["role"] == "assistant"]
        turns = learnt.split("<|im_end|>")
        assert turns.pop() == ""
        assert len(turns) == len(said)
        for turn, message in zip(turns, said, strict=True):
            assert message["content"] in turn
            for call in message.get("tool_calls", ()):
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                assert turn == f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_markers_are_single_tokens_that_decoding_keeps(first: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(first)
    for marker in MARKERS:
        ids = tokenizer.encode(marker, add_special_tokens=False)
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == marker


def test_a_tokenizer_learnt_from_one_text_still_spells_any_other() -> None:
    tokenizer = train_tokenizer(["<|im_start|>user\nhow many?<|im_end|>\n"] * 9, 300)
    for text in ("naïve ☃ 12 345\t<tool_call>", 'x"}}\n, {"name": "'):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no demonstrations at"),
        ("", "holds no conversation"),
        ('{"messages": []}\n{"messages": 3}\n', "line 2"),
        ('{"messages": [{"role": "user", "content": "Hi"}]}\n', "no assistant turn"),
    ],
)
def test_bad_demonstrations_are_refused_by_name(content: str | None, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "demos.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        warmup(path, tmp_path / "out", steps=1)


def test_a_folder_without_a_model_is_refused_by_name(demos: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no policy at"):
        warmup(demos, tmp_path / "out", policy=tmp_path, steps=1)


def test_the_template_takes_arguments_as_text_and_as_an_object() -> None:
    def conversation(arguments: object) -> Conversation:
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        asked = {"role": "user", "content": "?"}
        return Conversation(messages=[asked, {"role": "assistant", "content": "", "tool_calls": [call]}])

    tokenizer = blank()
    assert render(tokenizer, conversation('{"a": 1, "b": 2}')) == render(tokenizer, conversation({"a": 1, "b": 2}))
