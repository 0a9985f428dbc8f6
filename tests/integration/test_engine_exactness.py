"""The engine's log-probabilities are those of a plain forward pass, whatever happened to the batch on the way."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from envfarm.core.errors import ConfigError, EngineError  # noqa: E402
from envfarm.inference.embedded.model import CausalModel  # noqa: E402
from envfarm.inference.embedded.request import Request  # noqa: E402
from envfarm.inference.embedded.scheduler import Scheduler  # noqa: E402
from envfarm.inference.embedded.serve import EngineSettings, load  # noqa: E402

torch.set_num_threads(1)
VOCAB = 128
TOLERANCE = 1e-4


def write_model(folder, kind, seed, layers=2):
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**shape)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**shape))
    model.save_pretrained(folder)


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folders(request, tmp_path_factory):
    made = {}
    for version in ("0", "1", "2"):
        made[version] = tmp_path_factory.mktemp(f"{request.param}-{version}")
        write_model(made[version], request.param, int(version))
    return made


@pytest.fixture(scope="module")
def plain(folders):
    return {version: AutoModelForCausalLM.from_pretrained(folder) for version, folder in folders.items()}


def scheduler(folders, slots=8, context=256):
    return Scheduler(CausalModel(folders["0"], dtype=torch.float32), slots=slots, context=context, version="0")


def ask(tokens, *, rid="r", key="", new=8, temperature=1.0, seed=0, stops=(), top_p=1.0, top_k=-1):
    return Request(
        rid=rid,
        key=key,
        tokens=np.asarray(tokens, np.int64),
        max_new_tokens=new,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stops=stops,
        seed=seed,
    )


def run(engine, *requests, until=10_000):
    for request in requests:
        engine.add(request)
    done = []
    for _ in range(until):
        if engine.idle:
            break
        done += engine.step()
    return done


def worst_difference(plain, request):
    """Largest |engine - plain forward| over the sampled tokens, each under the version its span names."""
    worst = 0.0
    spans = request.version_spans()
    bounds = [0, *(end for _, _, end in spans)]
    assert [start for _, start, _ in spans] == bounds[:-1]
    assert bounds[-1] == len(request.logprobs)
    for version, start, end in spans:
        with torch.inference_mode():
            logits = plain[version](input_ids=torch.from_numpy(request.tokens)[None], use_cache=False).logits[0]
        scale = request.temperature or 1.0
        scored = torch.log_softmax(logits.float() / scale, -1)
        places = np.arange(start, end) + request.prompt_length
        expected = scored[places - 1, request.tokens[places]].numpy()
        worst = max(worst, float(np.abs(expected - request.logprobs[start:end]).max()))
    return worst


def tokens(rng, count):
    return rng.integers(0, VOCAB, count)


def test_conversations_of_mixed_lengths_score_as_a_plain_forward_pass(folders, plain):
    rng = np.random.default_rng(1)
    engine = scheduler(folders, slots=6)
    system = tokens(rng, 40)
    talks = {str(i): np.concatenate([system, tokens(rng, rng.integers(1, 30))]) for i in range(10)}
    for turn in range(3):
        done = run(
            engine,
            *(
                ask(
                    t,
                    rid=f"{k}-{turn}",
                    key=k,
                    new=int(rng.integers(1, 20)),
                    temperature=[0.0, 0.7, 1.0][int(k) % 3],
                    top_p=0.9,
                )
                for k, t in talks.items()
            ),
        )
        assert len(done) == 10
        for request in done:
            assert worst_difference(plain, request) < TOLERANCE
            talks[request.key] = np.concatenate([request.tokens, tokens(rng, rng.integers(1, 12))])


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_requests_aborts_pauses_and_weight_swaps_keeps_scores_exact(folders, plain, seed):
    rng = np.random.default_rng(seed)
    engine = scheduler(folders, slots=5)
    weights = {v: engine.model.read_weights(f) for v, f in folders.items()}
    system = tokens(rng, 24)
    history, ended, sent = {}, [], 0
    for _ in range(120):
        event = rng.random()
        if event < 0.35:
            key = str(rng.integers(0, 6))
            prompt = np.concatenate([history.get(key, system)[:150], tokens(rng, rng.integers(1, 20))])
            engine.add(ask(prompt, rid=str(sent), key=key, new=int(rng.integers(1, 25)), seed=sent))
            sent += 1
        elif event < 0.40:
            ended += engine.abort(lambda r: int(r.rid) % 5 == 0, "test")
        elif event < 0.45:
            ended += engine.pause(["retract", "in_place", "abort"][int(rng.integers(0, 3))])
            engine.resume()
        elif event < 0.50:
            version = str(rng.integers(0, 3))
            engine.swap(weights[version], version)
        for request in engine.step():
            ended.append(request)
            history[request.key] = request.tokens
    ended += run(engine)
    assert len(ended) == sent
    assert max(worst_difference(plain, request) for request in ended) < TOLERANCE
    assert any(len(r.version_spans()) > 1 for r in ended)
    assert engine.counters.cached_tokens > 0


def test_a_swap_between_two_tokens_splits_the_answer_there(folders, plain):
    engine = scheduler(folders)
    engine.add(ask([1, 2, 3], new=10))
    for _ in range(4):
        engine.step()
    engine.swap(engine.model.read_weights(folders["1"]), "1")
    (request,) = run(engine)
    assert request.version_spans() == [("0", 0, 4), ("1", 4, 10)]
    assert request.retractions == 1
    assert worst_difference(plain, request) < TOLERANCE


def test_rows_cached_under_older_weights_are_never_used_again(folders, plain):
    engine = scheduler(folders)
    prompt = tokens(np.random.default_rng(3), 50)
    (first,) = run(engine, ask(prompt, key="episode"))
    engine.swap(engine.model.read_weights(folders["1"]), "1")
    (second,) = run(engine, ask(np.concatenate([first.tokens, [1]]), key="episode"))
    assert second.cached_tokens == 0
    assert second.version_spans() == [("1", 0, 8)]
    assert worst_difference(plain, second) < TOLERANCE


def test_the_next_turn_of_an_episode_computes_only_what_was_appended(folders):
    engine = scheduler(folders)
    (first,) = run(engine, ask(range(60), key="episode", new=5))
    (second,) = run(engine, ask([*first.tokens, 1, 2, 3], key="episode", new=5))
    assert second.cached_tokens == 64  # the last sampled token was never fed to the model


def test_a_prefix_that_many_requests_share_is_computed_once(folders, plain):
    engine = scheduler(folders, slots=8)
    system = list(range(100))
    done = run(engine, *(ask([*system, i, i + 1], rid=str(i), key=str(i)) for i in range(8)))
    assert sum(r.cached_tokens == 100 for r in done) == 7
    assert max(worst_difference(plain, r) for r in done) < TOLERANCE


def test_an_idle_row_is_evicted_when_room_is_needed_the_longest_unused_first(folders):
    engine = scheduler(folders, slots=3)
    rng = np.random.default_rng(0)
    prompts = {k: tokens(rng, 20) for k in "abcd"}
    for key in "abca":  # b is now the longest unused
        run(engine, ask(prompts[key], key=key, new=1))
    run(engine, ask(prompts["d"], key="d", new=1))
    cached = {}
    for key in "acb":
        (request,) = run(engine, ask(prompts[key], key=key, new=1))
        cached[key] = request.cached_tokens
    assert cached["a"] == cached["c"] == 19
    assert cached["b"] == 0


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_seeded_request_samples_the_same_alone_and_in_company(folders, temperature):
    prompt = list(range(30))
    (alone,) = run(scheduler(folders), ask(prompt, new=30, seed=11, temperature=temperature))
    rng = np.random.default_rng(5)
    company = [ask(tokens(rng, rng.integers(1, 80)), rid=f"o{i}", new=20, seed=i) for i in range(6)]
    engine = scheduler(folders)
    done = run(engine, *company[:3], ask(prompt, rid="x", new=30, seed=11, temperature=temperature), *company[3:])
    (again,) = [r for r in done if r.rid == "x"]
    assert again.output_ids == alone.output_ids


def test_a_stop_token_ends_the_answer_and_stays_in_it(folders):
    (free,) = run(scheduler(folders), ask([5, 6, 7], new=12, seed=2))
    stop = free.output_ids[6]
    (stopped,) = run(scheduler(folders), ask([5, 6, 7], new=12, seed=2, stops=(stop,)))
    cut = free.output_ids.index(stop) + 1
    assert stopped.output_ids == free.output_ids[:cut]
    assert (stopped.finish, stopped.detail) == ("stop", str(stop))


def test_a_long_prompt_is_taken_in_pieces_while_others_decode(folders, plain):
    engine = scheduler(folders, context=900)
    engine._budget = 16
    engine.add(ask([1, 2, 3], rid="short", new=40))
    engine.step()
    engine.add(ask(tokens(np.random.default_rng(0), 400), rid="long", new=5))
    engine.step()
    assert engine.rows.length[0] == 5, "the short one went on"
    assert engine.rows.cached[1] == 17, "the long one took its share"
    done = run(engine)
    assert len(done) == 2
    assert max(worst_difference(plain, r) for r in done) < TOLERANCE


def test_diverged_weights_abort_requests_and_do_not_poison_those_that_come_later(folders, plain):
    engine = scheduler(folders, slots=2)
    good = engine.model.read_weights(folders["0"])
    bad = {name: torch.full_like(tensor, float("nan")) for name, tensor in good.items()}
    engine.add(ask(range(60), rid="a", new=10))
    engine.step()
    engine.swap(bad, "1")
    (ended,) = run(engine)
    assert ended.finish == "abort"
    assert "not finite" in ended.detail
    assert ended.version_spans() == [("0", 0, 1)]
    engine.swap(good, "0")
    done = run(engine, ask([1, 2], rid="b"), ask(range(80), rid="c"))
    assert max(worst_difference(plain, r) for r in done) < TOLERANCE


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(folders, plain, tmp_path):
    engine = scheduler(folders)
    write_model(tmp_path, "qwen3", 9, layers=3)
    with pytest.raises(EngineError, match="do not fit"):
        engine.model.read_weights(tmp_path)
    (request,) = run(engine, ask([1, 2, 3]))
    assert worst_difference(plain, request) < TOLERANCE


def test_rows_are_as_many_as_the_memory_for_keys_and_values_allows(folders):
    row = CausalModel(folders["0"], dtype=torch.float32).kv_row_bytes(256)
    settings = EngineSettings(model=folders["0"], context=256, max_rows=50, kv_bytes=5 * row)
    assert load(settings).rows.slots == 5
    with pytest.raises(ConfigError, match="--kv-mib"):
        load(EngineSettings(model=folders["0"], context=256, kv_bytes=row - 1))


def test_a_folder_whose_weights_are_incomplete_or_broken_is_refused(folders, tmp_path):
    shutil.copytree(folders["0"], tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack model\.norm\.weight"):
        load(EngineSettings(model=tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match="cannot load"):
        load(EngineSettings(model=tmp_path))


def test_a_model_with_sliding_windows_is_refused_with_what_can_serve_it(folders, tmp_path):
    shutil.copytree(folders["0"], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"layer_types": ["full_attention", "sliding_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="serve it with SGLang"):
        load(EngineSettings(model=tmp_path))
