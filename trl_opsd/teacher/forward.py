"""Reads a generation batch with a causal language model in as few passes as fit, each row once, without a graph.

B rows · P prompt tokens · C completion tokens · L = P + C · H hidden width
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from tqdm import tqdm

from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import Run, completion_hidden
from trl_opsd.models.head import model_shape
from trl_opsd.models.padding import PADDED, Reading
from trl_opsd.run.kept import Keeper
from trl_opsd.types import Rollout, TeacherTargets

PASS_BYTES = 2_000_000_000
"""Memory limit for the activations of one pass, in bytes; about enough for a pass to hide the copies of streamed
layers."""


def read(
    run: Run,
    rollout: Rollout,
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
        passes (`int`):
            Forward passes to make. Surplus passes re-read one row so that collectives stay matched between processes.
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
    chunks = list(rollout.chunks(-(-len(rollout.input_ids) // passes)))
    bar = tqdm(chunks, desc="teach", unit="pass", delay=5, leave=False, disable=not progress)
    keeper, start = Keeper(rollout.weights, cache_device), 0
    with torch.no_grad():
        for chunk in bar:
            end = start + len(chunk.input_ids)
            keeper.put(range(start, end), run(completion_hidden, chunk.to(device), reading))
            start = end
        for _ in range(passes - len(chunks)):
            run(completion_hidden, next(rollout.chunks(1)).to(device), reading)
    return keeper.targets()


def passes_needed(model: CausalLM, rollout: Rollout, pass_bytes: int = PASS_BYTES) -> int:
    """Passes whose activations fit `pass_bytes` each."""
    rows, length = rollout.input_ids.shape
    return -(-rows // rows_per_pass(model, length, pass_bytes))


def max_over_processes(passes: int, device: torch.device) -> int:
    """The largest number over all processes. Collective."""
    if not distributed.is_initialized():
        return passes
    largest = torch.tensor(passes, device=device)
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    return int(largest)


def rows_per_pass(model: CausalLM, length: int, pass_bytes: int = PASS_BYTES) -> int:
    """Rows of `length` tokens whose activations fit `pass_bytes`, at least one.

    An estimate from the model's config alone, so that it does not depend on the placement: per token ten vectors of the
    hidden width (residuals, norms in float32, attention) and three of the inner width live at once, and one byte of the
    attention mask for each token of the row; eager attention also keeps its scores, twice in float32. An inner width
    that the config does not state is assumed to be four times the hidden one; a missing number of heads counts as 0.
    """
    config = model.config.get_text_config()
    width = _largest(config, "hidden_size") or model_shape(model)[1]
    inner = _largest(config, "intermediate_size") or _largest(config, "n_inner") or 4 * width
    heads = _largest(config, "num_attention_heads")
    per_pair = max(8 * heads, 1) if config._attn_implementation == "eager" else 1
    per_token = model.dtype.itemsize * (10 * width + 3 * inner) + per_pair * length
    return int(max(1, pass_bytes // (length * per_token)))


def _largest(config: Any, name: str) -> int:
    """A size from the config, 0 if it is missing, the largest if it is stated per layer."""
    stated = getattr(config, name, None) or 0
    return max(stated) if isinstance(stated, list | tuple) else int(stated)
