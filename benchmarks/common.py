"""What benchmarks share: options, tables, files of trainings, random models. It knows no benchmark."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import pandas
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config
from transformers.utils.logging import disable_progress_bar


def options(about: str | None, given: Sequence[str] | None = None, **defaults: Any) -> argparse.Namespace:
    """The options of a command line, and `--json`.

    Args:
        about (`str`):
            The help.
        given (`Sequence[str]`, *optional*):
            The command line, in place of that of the process.
        **defaults (`Any`):
            A default for each option, whose type is its own; that of a list takes several values.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=_Help)
    for name, default in {**defaults, "json": False}.items():
        flag, several = f"--{name.replace('_', '-')}", isinstance(default, list)
        kind = type(default[0] if several else default)
        if isinstance(default, torch.dtype):
            kind = _dtype
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=" ")
        else:
            parser.add_argument(flag, type=kind, nargs="+" if several else None, default=default, help=" ")
    return parser.parse_args(given)


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def device() -> torch.device:
    """The accelerator, or the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def settled(clock: Callable[[], float] = perf_counter) -> float:
    """Seconds by a clock, once the device has done what was queued."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return clock()


def show(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Prints a row of a table for each of `rows`, or all as JSON."""
    print(json.dumps(rows, indent=2) if as_json else table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """Columns by name, lists in one cell; names inside a dict have that of the dict in front."""
    flat = pandas.json_normalize(rows).map(lambda one: ", ".join(map(_short, one)) if isinstance(one, list) else one)
    return flat.to_string(index=False, na_rep="", float_format=_short)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def read(path: str) -> list[dict[str, Any]]:
    """The lines of a study."""
    file = Path(path)
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def studied(path: str, keys: Iterable[dict[str, Any]], train: Callable[..., dict[str, Any]]) -> None:
    """Trains with the values of each key that has no line in the file yet, and appends one.

    So a study can be interrupted, and several can fill one file.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    disable_progress_bar()
    for key in keys:
        if not any(key.items() <= one.items() for one in read(path)):
            line = {**key, **train(*key.values())}
            with Path(path).open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(", ".join(map(str, key.values())), "done", flush=True)


def summary(lines: list[dict[str, Any]], by: list[str], columns: dict[str, int]) -> str:
    """Means over seeds with their ranges, in Markdown.

    Args:
        lines (`list[dict[str, Any]]`):
            Those of a study.
        by (`list[str]`):
            What tells the rows of the table apart.
        columns (`dict[str, int]`):
            Figures with their decimals. Rows stand in the order of the first, the largest first.
    """
    grouped = pandas.DataFrame(lines).groupby(by)[list(columns)]
    means, least, most = grouped.mean(), grouped.min(), grouped.max()
    heads = [*by, *columns]
    shown = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in means.sort_values([*by[:-1], next(iter(columns))], ascending=[*[True] * (len(by) - 1), False]).index:
        cells = list(map(str, name if isinstance(name, tuple) else [name]))
        for column, decimals in columns.items():
            mean, low, high = (f"{one.loc[name, column]:.{decimals}f}" for one in (means, least, most))
            cells.append(mean if low == high else f"{mean} ({low}–{high})")
        shown.append(f"| {' | '.join(cells)} |")
    return "\n".join(shown)


def qwen2(
    width: int,
    layers: int,
    vocabulary: int,
    *,
    heads: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    on: torch.device | str = "cpu",
    **more: Any,
) -> PreTrainedModel:
    """A random model of Qwen2's architecture, made on its device.

    Args:
        width (`int`):
            Size of its hidden states.
        layers (`int`):
            Number of its layers.
        vocabulary (`int`):
            Rows of its head.
        heads (`int`):
            Heads of its attention.
        seed (`int`, *optional*, defaults to 0):
            Seed of its weights.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Dtype of its weights.
        on (`torch.device` or `str`, *optional*, defaults to `"cpu"`):
            Device that it is made on.
        **more (`Any`):
            Other fields of its config.
    """
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": vocabulary}
    ends = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 4096}
    torch.manual_seed(seed)
    with torch.device(on):
        return AutoModelForCausalLM.from_config(Qwen2Config(**{**sizes, **ends, **more}), dtype=dtype)
