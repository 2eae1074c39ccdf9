"""Scores a generation batch with a causal language model in few passes, each row once, up to its last counting token.

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
from trl_opsd.types import Rollout, TeacherTargets
from trl_opsd.types.kept import Keeper

PASS_BYTES = 3_000_000_000
"""Bytes of the activations of one pass: of a 7B teacher, enough computation for an H100 to hide the copies of streamed
layers, and for the first one, which nothing hides, to be a small part."""
BUSY_TOKENS = {"cpu": 128, "accelerator": 4096}
"""Tokens of a pass below which padding is free, as fewer tokens take as long."""
MOST_TOKENS = {"cpu": 1024, "accelerator": math.inf}
"""Tokens of a pass beyond which a device gets slower: a CPU's caches no longer hold a layer's output."""


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
    """The last hidden states at the positions that predict the completion tokens that may count, kept by row."""
    bar = tqdm(groups, desc="teach", unit="pass", delay=5, leave=False, disable=not progress)
    keeper = Keeper(rollout.weights, cache_device)
    # Tokens after a row's last that counts need no state.
    rollout = rollout.ended()
    with torch.no_grad():
        for rows in bar:
            keeper.put(rows, run(completion_hidden, rollout.select(rows).cut().to(device), reading))
        # Surplus passes re-read one row so that collectives stay matched between processes.
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
    """The rows of each pass, within `pass_bytes`; `few` says that each pass copies or gathers the weights again."""
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
    """[`pass_groups`] from the rows' numbers of tokens."""
    if not reading.padded_up_to and is_split_model(model):
        return [[row] for row in range(len(lengths))]  # one pass per row, as processes must run equally many
    kind = "cpu" if device.type == "cpu" else "accelerator"

    def fits(tokens: int, width: int) -> bool:
        return tokens <= MOST_TOKENS[kind] and tokens * bytes_per_token(model, width) <= pass_bytes

    if reading.packed:
        return fewest_groups(lengths, fits, packed=True)
    # On an accelerator copies of weights hide only behind passes as large as possible: the fewest passes win.
    hidden = few and kind != "cpu"
    return cheapest_groups(lengths, fits, math.inf if hidden else BUSY_TOKENS[kind])


def max_over_processes(passes: int, device: torch.device) -> int:
    """The maximum over all processes. Collective."""
    if not distributed.is_initialized():
        return passes
    largest = torch.tensor(passes, device=device)
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    return int(largest)


def bytes_per_token(model: CausalLM, width: int) -> int:
    """Bytes of the activations of a token in a row of `width` tokens, estimated from the config alone."""
    # At once live ten vectors of the hidden width (residuals, norms in float32, attention), three of the inner width,
    # and a byte of mask for each token of the row; eager attention also keeps its scores, twice in float32.
    config = model.config.get_text_config()
    hidden = _largest(config, "hidden_size") or model_shape(model)[1]
    inner = _largest(config, "intermediate_size") or _largest(config, "n_inner") or 4 * hidden
    heads = _largest(config, "num_attention_heads")
    per_pair = max(8 * heads, 1) if config._attn_implementation == "eager" else 1
    return int(model.dtype.itemsize * (10 * hidden + 3 * inner) + per_pair * width)


def _largest(config: Any, name: str) -> int:
    """A size from the config, 0 if missing, the largest if stated per layer."""
    stated = getattr(config, name, None) or 0
    return max(stated) if isinstance(stated, list | tuple) else int(stated)
