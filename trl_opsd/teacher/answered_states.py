"""Checks the hidden states that a server answers: one per token, finite, and made by the teacher's final norm.

L tokens of a row · M states of an answer · H hidden width
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trl_opsd.errors import ServerError
from trl_opsd.http.client import MIB
from trl_opsd.teacher.checkpoint_head import FinalNorm

START = 'vllm serve TEACHER --runner pooling --pooler-config \'{"task": "token_embed"}\''
"""How to start a server, for messages."""

_ABOVE = {torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Largest excess of the root mean square of the norm's input over 1 that rounding explains."""
_BELOW = 0.9
"""Least median of it: a norm's epsilon lowers it where the residual stream is tiny. Measured 0.9976."""
_SAME = 0.1
"""Relative distance of two states of one token that neither half precision nor other kernels reach."""


class WrongStatesError(ServerError):
    """A server answered, but not with the teacher's states; it cannot be trusted with other rows either."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known of a teacher's states before any was seen."""

    path: str
    """The checkpoint, for messages."""
    width: int
    """H."""
    norm: FinalNorm | None
    """The norm that made the states; `None` if unknown."""

    def max_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Byte limit of an answer: vLLM answers preempted rows more than once."""
        return 4 * tokens * self.width * dtype.itemsize + MIB

    def states(self, asked: str, content: bytearray, tokens: int, dtype: torch.dtype) -> Tensor:
        """The states of a row, [L, H], in the memory of the answer; raises `WrongStatesError` for others."""
        # Each number is checked, in about 1 ns. `asked` is the beginning of messages.
        row_bytes = self.width * dtype.itemsize
        if len(content) % row_bytes or len(content) < min(tokens, 2) * row_bytes:
            last = f" Is it only the last one? Start the server with `{START}`." if len(content) <= row_bytes else ""
            raise WrongStatesError(
                f"{asked} answered {len(content)} bytes for {tokens} tokens, expected {tokens * row_bytes}: {tokens} "
                f"states of {self.width} numbers in {_word(dtype)}.{last} It has to serve {self.path!r}."
            )
        states_MH = torch.frombuffer(content, dtype=dtype).view(-1, self.width)
        # More states than tokens are accepted where the surplus repeats the row's beginning.
        if len(states_MH) < tokens or not _repeats(states_MH[:-tokens], states_MH[-tokens:]):
            raise WrongStatesError(
                f"{asked} answered {len(states_MH)} states for {tokens} tokens: it does not return one for each token; "
                f"start it with `{START}`."
            )
        states_LH = states_MH[-tokens:]
        self._check(asked, states_LH)
        return states_LH

    def _check(self, asked: str, states_LH: Tensor) -> None:
        rms_L = (self.norm or FinalNorm(torch.ones(self.width), torch.zeros(self.width))).rms(states_LH)
        lowest, highest, median = (float(one) for one in (rms_L.min(), rms_L.max(), rms_L.median()))
        if not highest < math.inf and (places := (~states_LH.isfinite().all(-1)).nonzero().flatten().tolist()):
            raise WrongStatesError(
                f"{asked} answered NaN or infinite states, at {len(places)} of {len(states_LH)} tokens, the first at "
                f"{places[0]}: its weights or its dtype are at fault; start it with the checkpoint's `--dtype`."
            )
        if self.norm is None or (highest <= 1 + _ABOVE[states_LH.dtype] and median >= _BELOW):
            return
        # A pooler's default normalisation is the likeliest cause, and has its own remedy.
        if ((states_LH.float().norm(dim=-1) - 1).abs() < 1e-2).all():
            raise WrongStatesError(
                f"{asked} answered states that are normalised to length 1, although the request says "
                "`use_activation: false`: switch off what normalises them in the server, or use vLLM 0.31 or 0.32."
            )
        raise WrongStatesError(
            f"{asked} answered states that the final norm of {self.path!r} cannot have made: what it was given has a "
            f"root mean square of {lowest:.3g} to {highest:.3g}, where it is 1 for its own. It serves another model or "
            f"revision, or states of another layer: start it with {self.path!r}, and with nothing that changes the "
            "states."
        )


def served_dtype(states: Tensor) -> torch.dtype:
    """The dtype that states were computed in, from float32 values: the smallest that loses nothing."""
    halves = (torch.bfloat16, torch.float16)
    return next((dtype for dtype in halves if torch.equal(states.to(dtype).float(), states)), torch.float32)


def distance(one: Tensor, other: Tensor) -> float:
    """Largest distance of two states of a token, relative to their length."""
    return float(((one - other).float().norm(dim=-1) / other.float().norm(dim=-1).clamp(min=1e-9)).max())


def are_same(one: Tensor, other: Tensor) -> bool:
    """Whether the same model can have given both for the same tokens."""
    return len(one) == 0 or distance(one, other) < _SAME


def _repeats(extra_KH: Tensor, states_LH: Tensor) -> bool:
    """Whether surplus states are repeated beginnings of the row, as vLLM returns for preempted rows."""
    # vLLM keeps the states of a row that was preempted and computed again from its first token
    # (vllm-project/vllm#55192), so that the last L are the whole row. A new request would be preempted as well.
    at = 0
    for state_H in extra_KH:
        if at == len(states_LH) or not are_same(state_H[None], states_LH[at : at + 1]):
            at = 0
        if not are_same(state_H[None], states_LH[at : at + 1]):
            return False
        at += 1
    return True


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
