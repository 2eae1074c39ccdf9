"""Reads a generation batch with a causal language model in as few passes as fit, each row once and up to its last token
that counts, without a graph.

B rows · P prompt tokens · C completion tokens · L = P + C · H hidden width
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from tqdm import tqdm

from trl_opsd._compat.peft import CausalLM
from trl_opsd._compat.sharding import is_split_model
from trl_opsd.models.backbone import Run, completion_hidden
from trl_opsd.models.grouping import cheapest_groups, fewest_groups
from trl_opsd.models.head import model_shape
from trl_opsd.models.padding import PADDED, Reading
from trl_opsd.run.kept import Keeper
from trl_opsd.types import Rollout, TeacherTargets

PASS_BYTES = 3_000_000_000
"""Memory limit for the activations of one pass, in bytes: with those of a 7B teacher, long enough for an H100 to compute a
layer while it copies the next one, and for the first copies, which nothing hides, to be a small part."""
BUSY_TOKENS = {"cpu": 128, "accelerator": 4096}
"""Tokens of a pass below which padding costs nothing, as fewer tokens take as long."""
MOST_TOKENS = {"cpu": 1024, "accelerator": math.inf}
"""Tokens of a pass beyond which a device gets slower: a CPU, whose caches no longer hold what a layer leaves behind."""


def read(
    run: Run,
    rollout: Rollout,
    groups: Sequence[Sequence[int]],
    passes: int,
    device: torch.device,
    cache_device: str = "auto",
    progress: bool = False,
    reading: Reading = PADDED,
) -> TeacherTargets:
    """The last hidden states at the positions that predict the completion tokens that may count.

    Args:
        run (`Callable`):
            `run(function, *args)` calls `function(model, *args)`.
        rollout ([`~types.Rollout`]):
            B rows of at most C completion tokens.
        groups (`Sequence[Sequence[int]]`):
            The rows of each pass, each row once.
        passes (`int`):
            Forward passes to make, at least as many. Surplus passes re-read one row so that collectives stay matched
            between processes.
        device (`torch.device`):
            Where the model expects its inputs.
        cache_device (`str`, *optional*, defaults to `"auto"`):
            Where the result is kept until it is used: see `OPSDConfig.teacher_cache_device`.
        progress (`bool`, *optional*, defaults to `False`):
            Show a progress bar when reading takes longer than a few seconds.
        reading ([`~models.padding.Reading`], *optional*, defaults to `PADDED`):
            Which rows of a pass the model reads together.

    Returns:
        [`~types.TeacherTargets`]: Of B rows, kept by row.
    """
    bar = tqdm(groups, desc="teach", unit="pass", delay=5, leave=False, disable=not progress)
    keeper = Keeper(rollout.weights, cache_device)
    rollout = rollout.ended()
    with torch.no_grad():
        for rows in bar:
            keeper.put(rows, run(completion_hidden, rollout.select(rows).cut().to(device), reading))
        for _ in range(passes - len(groups)):
            run(completion_hidden, rollout.select([0]).cut().to(device), reading)
    return keeper.targets()


def pass_groups(
    model: CausalLM,
    rollout: Rollout,
    reading: Reading = PADDED,
    pass_bytes: int = PASS_BYTES,
    few: bool = False,
) -> list[list[int]]:
    """The rows of each pass, all of whose activations fit `pass_bytes`.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The model that reads them.
        rollout ([`~types.Rollout`]):
            The rows.
        reading ([`~models.padding.Reading`], *optional*, defaults to `PADDED`):
            How a pass reads them.
        pass_bytes (`int`, *optional*, defaults to 3 GB):
            Memory limit for the activations of one pass.
        few (`bool`, *optional*, defaults to `False`):
            Whether each pass copies or gathers the weights again.
    """
    lengths = [one.total for one in rollout.ended().measured()]
    return length_groups(model, lengths, rollout.prompt_ids.device, reading, pass_bytes, few)


def length_groups(
    model: CausalLM,
    lengths: Sequence[int],
    device: torch.device,
    reading: Reading = PADDED,
    pass_bytes: int = PASS_BYTES,
    few: bool = False,
) -> list[list[int]]:
    """As [`pass_groups`], of rows that are known by their numbers of tokens, read on a device."""
    if not reading.padded_up_to and is_split_model(model):
        return [[row] for row in range(len(lengths))]  # a row is a forward pass, of which all processes run as many
    kind = "cpu" if device.type == "cpu" else "accelerator"

    def fits(tokens: int, width: int) -> bool:
        return tokens <= MOST_TOKENS[kind] and tokens * bytes_per_token(model, width) <= pass_bytes

    if reading.packed:
        return fewest_groups(lengths, fits, packed=True)
    # Copied weights hide behind few tokens on a CPU, on an accelerator behind as many as a pass can hold.
    hidden = few and kind != "cpu"
    return cheapest_groups(lengths, fits, math.inf if hidden else BUSY_TOKENS[kind])


def max_over_processes(passes: int, device: torch.device) -> int:
    """The largest number over all processes. Collective."""
    if not distributed.is_initialized():
        return passes
    largest = torch.tensor(passes, device=device)
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    return int(largest)


def bytes_per_token(model: CausalLM, width: int) -> int:
    """Bytes of the activations of one token, in a row of `width` tokens.

    An estimate from the model's config alone, so that it does not depend on the placement: per token ten vectors of the
    hidden width (residuals, norms in float32, attention) and three of the inner width live at once, and one byte of the
    attention mask for each token of the row; eager attention also keeps its scores, twice in float32. An inner width
    that the config does not state is assumed to be four times the hidden one; a missing number of heads counts as 0.
    """
    config = model.config.get_text_config()
    hidden = _largest(config, "hidden_size") or model_shape(model)[1]
    inner = _largest(config, "intermediate_size") or _largest(config, "n_inner") or 4 * hidden
    heads = _largest(config, "num_attention_heads")
    per_pair = max(8 * heads, 1) if config._attn_implementation == "eager" else 1
    return int(model.dtype.itemsize * (10 * hidden + 3 * inner) + per_pair * width)


def _largest(config: Any, name: str) -> int:
    """A size from the config, 0 if it is missing, the largest if it is stated per layer."""
    stated = getattr(config, name, None) or 0
    return max(stated) if isinstance(stated, list | tuple) else int(stated)
