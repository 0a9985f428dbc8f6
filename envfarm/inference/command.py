"""``envfarm engine``: the embedded inference engine as a process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from envfarm.core.errors import ConfigError


def engine(
    model: Annotated[str, typer.Option(help="Hugging Face model folder (safetensors), or a policy's name")],
    listen: Annotated[str, typer.Option(help="HOST:PORT; port 0 takes any free port")] = "127.0.0.1:0",
    address_file: Annotated[Path | None, typer.Option(help="where to write the bound address once serving")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of the model")] = 1,
    max_rows: Annotated[int, typer.Option(min=1, help="most requests that run at once")] = 128,
    context: Annotated[int, typer.Option(min=2, help="longest row in tokens, prompt and answer")] = 2048,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    weight_version: Annotated[int, typer.Option(min=0, help="version of the weights in the model folder")] = 0,
    seed: Annotated[int, typer.Option(help="makes the sampling seeds of requests that bring none")] = 0,
    max_queued: Annotated[int, typer.Option(min=1, help="most requests that wait; beyond, they get 503")] = 4096,
    kv_mib: Annotated[int, typer.Option(min=1, help="most memory for keys and values, MiB")] = 4096,
) -> None:
    """Serve a model on this machine's CPU with SGLang's HTTP API."""
    import asyncio

    host, port = _listen(listen)
    try:
        from envfarm.inference.embedded.serve import EngineSettings, serve
        from envfarm.inference.policies import folder_of
    except ImportError as error:
        raise ConfigError(
            f"the embedded engine needs torch and transformers ({error}): pip install 'envfarm[engine]'"
        ) from error
    settings = EngineSettings(
        model=folder_of(model),
        host=host,
        port=port,
        address_file=address_file,
        threads=threads,
        max_rows=max_rows,
        context=context,
        dtype=dtype,
        weight_version=str(weight_version),
        seed=seed,
        max_queued=max_queued,
        kv_bytes=kv_mib << 20,
    )
    asyncio.run(serve(settings))


def _listen(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--listen {text!r} is not HOST:PORT, such as 127.0.0.1:0")
    return host.strip("[]"), int(port)
