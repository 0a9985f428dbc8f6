"""The engine's numbers as Prometheus text, under SGLang's names where SGLang has them."""

from __future__ import annotations

from envfarm.inference.embedded.scheduler import Scheduler


def render(scheduler: Scheduler, *, waiting: int, model_name: str) -> str:
    """Exposition text (version 0.0.4)."""
    c = scheduler.counters
    rows = scheduler.rows
    throughput = c.generation_tokens / c.busy_seconds if c.busy_seconds else 0.0
    hit_rate = c.cached_tokens / c.prompt_tokens if c.prompt_tokens else 0.0
    gauges = {
        "sglang:num_running_reqs": (rows.active, "Running requests"),
        "sglang:num_queue_reqs": (waiting, "Waiting requests"),
        "sglang:num_used_tokens": (rows.tokens_held, "Tokens in running and idle rows"),
        "sglang:max_total_num_tokens": (rows.slots * rows.context, "Tokens that all rows can hold"),
        "sglang:token_usage": (rows.tokens_held / (rows.slots * rows.context), "Share of the rows in use"),
        "sglang:cache_hit_rate": (hit_rate, "Share of prompt tokens found computed"),
        "sglang:gen_throughput": (throughput, "Sampled tokens per second of busy time"),
    }
    totals = {
        "sglang:prompt_tokens_total": (c.prompt_tokens, "Prompt tokens"),
        "sglang:cached_tokens_total": (c.cached_tokens, "Prompt tokens found computed"),
        "sglang:generation_tokens_total": (c.generation_tokens, "Sampled tokens"),
        "sglang:num_requests_total": (c.requests, "Requests"),
        "sglang:num_aborted_requests_total": (c.aborted, "Aborted requests"),
        "sglang:num_retracted_requests_total": (c.retracted, "Requests whose keys and values were recomputed"),
        "envfarm:engine_passes_total": (c.passes, "Forward passes"),
        "envfarm:engine_busy_seconds_total": (c.busy_seconds, "Seconds in forward passes"),
    }
    label = f'{{model_name="{_escaped(model_name)}"}}'
    lines = []
    for kind, series in (("gauge", gauges), ("counter", totals)):
        for name, (value, text) in series.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name}{label} {float(value)!r}"]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
