"""The function behind `trl-opsd plan`."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Annotated

import typer


class Engine(StrEnum):
    """What writes completions."""

    transformers = "transformers"
    vllm = "vllm"
    server = "server"


def plan(
    student: Annotated[str, typer.Argument(help="Folder, config.json or Hub id of the student.")],
    teacher: Annotated[
        str | None, typer.Argument(help="The same of the teacher; left out, the student teaches itself.")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Devices.")] = 1,
    gpu_memory: Annotated[float, typer.Option(min=0.001, help="Memory of each, in GB of 1e9 bytes.")] = 80.0,
    host_memory: Annotated[float | None, typer.Option(min=0.001, help="Memory of the machine, in GB.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of an optimizer step on each device.")] = 8,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 512,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a completion.")] = 512,
    engine: Annotated[
        Engine, typer.Option(help="What writes: transformers, vllm in the same process, or a vLLM server apart.")
    ] = Engine.transformers,
    lora: Annotated[int | None, typer.Option(min=1, help="Rank of an adapter on all linear layers.")] = None,
    bf16: Annotated[bool, typer.Option(help="Compute in bfloat16; otherwise float32.")] = True,
    checkpointing: Annotated[bool, typer.Option(help="Gradient checkpointing.")] = True,
    tflops: Annotated[float, typer.Option(min=0.001, help="TFLOP/s that a device reaches.")] = 400.0,
    bandwidth: Annotated[float, typer.Option(min=0.001, help="GB/s that it reads of its memory.")] = 2000.0,
    link: Annotated[float, typer.Option(min=0.001, help="GB/s from the machine's memory to a device.")] = 32.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")] = False,
) -> None:
    """Says whether a training fits, with which options, and what is too large, from the configs of both models.

    With AdamW. No weights are read. All numbers are estimates.

    Exit status: 0 if it fits, 1 if it does not, 2 for bad usage.
    """
    from trl_opsd.cli.plan.memory import Load, tracer
    from trl_opsd.cli.plan.search import best, considered
    from trl_opsd.cli.plan.seconds import Rates
    from trl_opsd.cli.plan.shapes import shape_of
    from trl_opsd.cli.plan.shown import Asked, document, show

    sources = student, student if teacher is None else teacher
    shapes = shape_of(sources[0]), shape_of(sources[1])
    for role, shape in zip(("student", "teacher"), shapes, strict=True):
        if shape.context is not None and prompt + length > shape.context:
            raise ValueError(
                f"`--prompt {prompt}` and `--length {length}` are {prompt + length} tokens, and the {role}'s context "
                f"has {shape.context}: lower one of them."
            )
    load = Load(gpus, batch, prompt, length, bf16, checkpointing, lora, int(gpu_memory * 1e9))
    rates = Rates(tflops * 1e12, bandwidth * 1e9, link * 1e9)
    asked = Asked(sources, shapes, load, rates, gpu_memory * 1e9)
    host = None if host_memory is None else host_memory * 1e9
    search = partial(considered, *shapes, load, asked.memory, host, asked.shares_weights)
    activations = tracer(shapes[0], load)
    plans = search(engine.value, activations)
    found = best(plans)
    if as_json:
        print(document(found, plans, asked))
    else:
        show(found, plans, asked)
        if found.fits and engine is Engine.transformers and best(search("vllm", activations)).fits:
            print("vLLM in the same process would fit, too: --engine vllm.")
    raise typer.Exit(0 if found.fits else 1)
