"""What the server of a teacher is asked for of a row, states or log-probabilities of tokens, and how answers are read.

L tokens of a row · n tokens that count · M states, or tokens known at each place · K requested tokens · V vocabulary ·
H hidden width; log-probabilities in nats
"""

from __future__ import annotations

import base64
import io
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from math import log
from statistics import median, pstdev
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig

from trl_opsd._compat.http import MIB, Response, Schema, WrongAnswerError, at, warn_in_main
from trl_opsd.models.backbone import logits_of, shape_of
from trl_opsd.teacher.checkpoint_head import CheckpointHead
from trl_opsd.types import OutputHead
from trl_opsd.types.known import MOST_IDS, KnownTokens, TokenHead

if TYPE_CHECKING:
    from trl_opsd.teacher.servers import TeacherServer

POOLING = 'vllm serve TEACHER --runner pooling --pooler-config \'{"task": "token_embed"}\''
"""How to start a server of states, for messages."""
SCORING = "vllm serve TEACHER --enable-scale-out --max-logprobs 128"
"""How to start a server that scores the student's tokens, for messages; vLLM from 0.32 on."""
TOP_K = 64
"""K where neither the option nor a server's limit says otherwise; and the tokens by which states are compared."""
KINDS = ("student_top_k", "teacher_top_k")
"""What a server that generates can offer."""
_ABOVE = 1e-2
"""Largest excess of a probability, or of a sum of some, over 1 that rounding explains."""
_SMALL = 1e-6
"""Least probability of all tokens that are not told, in a comparison."""
_BYTES = 120
"""Most bytes of one token in an answer."""
_MOST_APART, _MOST_SPREAD = 0.05, 0.04
"""Nats between two predictions for the same tokens, and the logarithm of the ratio of their log-probabilities' standard
deviations, that neither half precision nor other kernels reach."""
_SAME = 0.1
"""The same of the distance of two states of one token, relative to their length."""

Found = dict[int, float]
"""Log-probabilities by token id."""


class Row(NamedTuple):
    """What a server has to score for the targets of a row; equal where its request is."""

    ids: tuple[int, ...]
    """Prompt and completion up to the last token that counts, which is not sent where states are asked for."""
    places: tuple[int, ...]
    """Indices in `ids` of the tokens that count, from 1."""
    wanted: tuple[tuple[int, ...], ...] = ()
    """The student's candidates at each; empty where none are requested."""


class Answers(ABC):
    """Requests for one kind of targets, and their answers, [n, W]."""

    head: OutputHead
    """Turns answers into logits; of states known after [`settle`]."""
    config: Any = None
    """The checkpoint's, if there is one."""
    student_k = 0
    """Number of the student's tokens that are requested at each place."""
    form: str | None = None
    """What a fingerprint says of it, beside its vocabulary: another choice is another objective."""
    vocabulary: int
    start: str
    """How to start such a server, for messages."""

    @abstractmethod
    def request(self, row: Row, model: str) -> tuple[str, dict[str, Any], int]:
        """Path and body of a request, and the most bytes of its answer."""

    @abstractmethod
    def read(self, response: Response, row: Row) -> Tensor:
        """[n, W]; raises an error, which says what came, for what cannot be the answer."""

    @abstractmethod
    def told(self, answer_nW: Tensor) -> list[Found]:
        """The predictions that an answer tells, to compare them."""

    def settle(self, answers: Sequence[Tensor]) -> None:  # noqa: B027 (tokens need nothing of the first answers)
        """Finds out from the first answers what is not known before."""

    def probes(self) -> list[Row]:
        """The two rows that a server is proved by: they differ in the last token but one, the last that is read."""
        # An id outside the vocabulary is not tried: where the tokenizer has more ids than the model, vLLM accepts it.
        ids = [place * (self.vocabulary - 1) // 7 for place in range(8)]  # up to the last id
        k, last = self.student_k, self.vocabulary - 1
        some = dict.fromkeys([*ids, 1, *(place * last // max(1, k - 1) for place in range(k))])
        wanted = (tuple(some)[: max(k, len(ids) + 1)],) * len(ids) if k else ()
        return [Row((*ids[:-1], one, 0), tuple(range(1, 9)), wanted) for one in (ids[-1], 1)]


class States(Answers):
    """Hidden states, of vLLM's pooling; the head is of the checkpoint at a path."""

    start = POOLING

    def __init__(self, path: str, options: Mapping[str, Any], device: torch.device) -> None:
        self._path, self._device = path, device
        self._checkpoint = CheckpointHead(path, options)
        self.config, self.vocabulary = self._checkpoint.config, self._checkpoint.vocabulary
        self.dtype = torch.float32  # of the server, from `settle` on

    def __str__(self) -> str:
        rows, width = shape_of(self.head)
        size = f"{width * self.dtype.itemsize} bytes per token in {_word(self.dtype)}"
        return f"{size}; its head, {rows} x {width}, on {self.head.weight.device}"

    def request(self, row: Row, model: str) -> tuple[str, dict[str, Any], int]:
        body = {
            "model": model,
            "input": row.ids[:-1],
            "task": "token_embed",
            "use_activation": False,  # else they are normalised to length 1
            "encoding_format": "bytes_only",  # "bytes" describes them in a header, which gets too long
            "embed_dtype": _word(self.dtype),
            "endianness": sys.byteorder,
        }
        # vLLM answers preempted rows more than once.
        return "/pooling", body, 4 * len(row.ids) * self._checkpoint.width * self.dtype.itemsize + MIB

    def read(self, response: Response, row: Row) -> Tensor:
        width, tokens, size = self._checkpoint.width, len(row.ids) - 1, len(response.content)
        of_row = width * self.dtype.itemsize
        is_whole = size >= tokens * of_row and size % of_row == 0
        states_MH = torch.frombuffer(response.content, dtype=self.dtype).view(-1, width) if is_whole else None
        # More states than tokens are accepted where the surplus repeats the row's beginning.
        if states_MH is None or not _repeats(states_MH[:-tokens], states_MH[-tokens:]):
            raise ValueError(
                f"{size} bytes for {tokens} tokens, expected {tokens * of_row}: one state per token, of {width} "
                f"numbers in {_word(self.dtype)}"
            )
        states_LH = states_MH[-tokens:]
        if not states_LH.isfinite().all():
            raise ValueError("NaN or infinite states")
        return states_LH[torch.tensor(row.places) - 1]

    def settle(self, answers: Sequence[Tensor]) -> None:
        if all((one.norm(dim=-1) - 1).abs().median() < 1e-2 for one in answers):
            raise WrongAnswerError(
                "The teacher's server returned states normalised to length 1, although the request sets "
                "`use_activation: false`: turn off normalisation in the server, or use vLLM 0.31 or 0.32."
            )
        # The smallest that loses nothing of float32 values is that in which they were computed.
        halves = (torch.bfloat16, torch.float16)
        is_exact = {dtype: all(torch.equal(one.to(dtype).float(), one) for one in answers) for dtype in halves}
        self.dtype = next((one for one in halves if is_exact[one]), torch.float32)
        self.head = self._checkpoint.head(self.dtype, self._device)

    def told(self, answer_nW: Tensor) -> list[Found]:
        with torch.autocast(self.head.weight.device.type, enabled=False):
            logs_nV = logits_of(answer_nW.to(self.head.weight), self.head).float().log_softmax(-1)
        most = logs_nV.topk(min(TOP_K, logs_nV.size(1)))
        return _by_place(most.indices, most.values)


# What lists have for each of K tokens is read by `_table`: pydantic takes 20 µs for each, 6 s for a row of 4,096.
class _FromVLLM(Schema):
    """vLLM's answer, at either of its routes."""

    scores: str | None = at("prompt_token_id_logprobs", default=None)
    top: list[dict[str, Any] | None] | None = at("prompt_logprobs", default=None)
    of_choice: list[dict[str, Any] | None] | None = at("choices", 0, "prompt_logprobs", default=None)


class _FromSGLang(Schema):
    own: list[tuple[float | None, int, Any]] = at("meta_info", "input_token_logprobs")
    top: list[list[Any] | None] = at("meta_info", "input_top_logprobs")


_Told = tuple[Tensor, Tensor]
"""Ids and log-probabilities, [n, M] each, -1 and -inf where there is none."""


class Tokens(Answers):
    """Log-probabilities of the student's or the teacher's likeliest tokens: [`KnownTokens`], packed.

    `targets` is a value of `teacher_server_targets`, of the checkpoint at `path`; `options` are such as `revision`. The
    vocabulary is that of its config, or else `vocabulary`, the student's.
    """

    start = SCORING

    def __init__(
        self,
        server: TeacherServer,
        targets: str,
        path: str,
        options: Mapping[str, Any],
        device: torch.device,
        vocabulary: int,
        top_k: int | None,
    ) -> None:
        kinds = KINDS if targets == "both_top_k" else (targets,)
        if not {*kinds} <= server.limits.keys():
            raise ValueError(
                f"`teacher_server_targets={targets!r}`: the teacher's server at {server.url} ({server.api}) offers "
                f"{sorted(server.limits)} only: set one of these, or start vLLM 0.32 or newer with `{SCORING}`."
            )
        self.api, self.vocabulary = server.api, vocabulary
        try:
            self.config = AutoConfig.from_pretrained(path, **options)
            self.vocabulary = self.config.get_text_config().vocab_size
        except (OSError, ValueError):  # somebody else's server: the checkpoint need not be here
            warn_in_main(f"No config is found at {path!r}: assuming that the teacher has the student's vocabulary.")
        limits = [limit for one in kinds if (limit := server.limits[one]) is not None]
        if top_k is not None and limits and top_k > min(limits):
            raise ValueError(
                f"`teacher_server_top_k={top_k}`: the teacher's server tells {min(limits)} tokens per position at "
                f"most: set {min(limits)}, or start it with `--max-logprobs {top_k}`."
            )
        self.top_k = min(top_k or min(TOP_K, *limits, TOP_K), self.vocabulary)
        self.student_k, self._teacher_k = (self.top_k * (one in kinds) for one in KINDS)
        self.form = f"{' and '.join(kinds)} {self.top_k}"
        self._known = self.student_k + self._teacher_k + 1
        self.head = TokenHead.sized(self.vocabulary, self._known, device)
        whose = {"student_top_k": "the student's", "teacher_top_k": "its own"}
        self._words = " and ".join(f"{whose[one]} {self.top_k} likeliest tokens" for one in kinds)

    def __str__(self) -> str:
        rows, width = self.head.weight.shape
        return f"{self.api}, which tells {self._words} of {rows}, {4 * width} bytes per token"

    def request(self, row: Row, model: str) -> tuple[str, dict[str, Any], int]:
        ids, first, k = row.ids, row.places[0] - 1, self._teacher_k
        most = MIB + len(ids) * (_BYTES * (k + 1) + 8 * len(row.wanted[0] if row.wanted else ()))
        one: dict[str, Any] = {"max_tokens": 1, "temperature": 1.0}
        if self.api == "SGLang":
            sampling: dict[str, Any] = {"max_new_tokens": 1, "temperature": 1.0}
            asked = {"return_logprob": True, "logprob_start_len": first, "top_logprobs_num": k}
            return "/generate", {"input_ids": ids, "sampling_params": sampling, **asked}, most
        if not row.wanted:
            return "/v1/completions", {"model": model, "prompt": ids, **one, "prompt_logprobs": k}, most
        rows: list[Sequence[int]] = [[-1]] * (len(ids) - 1 - first)
        for place, wanted in zip(row.places, row.wanted, strict=True):
            rows[place - 1 - first] = wanted
        sampling = {**one, "prompt_logprob_token_ids": rows, "prompt_logprob_start": first}
        sampling |= {"prompt_logprobs": k} if k else {}
        return "/inference/v1/generate", {"model": model, "token_ids": ids, "sampling_params": sampling}, most

    def read(self, response: Response, row: Row) -> Tensor:
        parts = self._of_sglang(response, row) if self.api == "SGLang" else self._of_vllm(response, row)
        return self.packed(row, *self._checked(parts, row))

    def packed(self, row: Row, ids_nM: Tensor, logs_nM: Tensor) -> Tensor:
        """Packs ids and log-probabilities, the row's own token first, since the loss may need its probability."""
        own_n1 = torch.tensor([row.ids[place] for place in row.places])[:, None]
        first_nM = (ids_nM != own_n1).int().sort(dim=1, stable=True).indices
        known = max(self._known, ids_nM.size(1))  # of a probe there may be more
        return KnownTokens.of(ids_nM.gather(1, first_nM), logs_nM.gather(1, first_nM), known).packed()

    def told(self, answer_nW: Tensor) -> list[Found]:
        known = KnownTokens.unpack(answer_nW)
        return _by_place(known.ids, known.logprobs)

    def _of_vllm(self, response: Response, row: Row) -> list[_Told]:
        """The likeliest tokens, and the requested ones."""
        answer, found = response.parse(_FromVLLM), list[_Told]()
        ids, places = row.ids, row.places
        if row.wanted:
            wanted_nK = torch.tensor(row.wanted)
            shape = (len(ids) - places[0], wanted_nK.size(1))
            # vLLM sends none, without an error, where its prefix cache holds the beginning of the row.
            scores = np.load(io.BytesIO(base64.b64decode(answer.scores or "")), allow_pickle=False)
            if scores.shape != shape or scores.dtype != np.float32:
                raise ValueError(f"scores of shape {scores.shape} in {scores.dtype}, expected {shape} in float32")
            told_nK = torch.from_numpy(scores)[torch.tensor(places) - places[0]]
            found.append((wanted_nK, told_nK.masked_fill(wanted_nK < 0, -torch.inf)))
        if self._teacher_k or not row.wanted:
            rows = answer.top if answer.of_choice is None else answer.of_choice
            if rows is None or len(rows) != len(ids):
                raise ValueError(f"log-probabilities of {len(rows or ())} positions, expected {len(ids)}")
            each = [rows[place] or {} for place in places]
            found.insert(0, _table([(int(token), told["logprob"]) for token, told in one.items()] for one in each))
        return found

    def _of_sglang(self, response: Response, row: Row) -> list[_Told]:
        answer, first = response.parse(_FromSGLang), row.places[0] - 1
        # SGLang 0.5.23 names the last id of a vocabulary 0, beside its own log-probability.
        expected = [0 if token == self.vocabulary - 1 else token for token in row.ids[first:]]
        if [token for _, token, _ in answer.own] != expected or len(answer.top) != len(answer.own):
            raise ValueError(f"log-probabilities of other tokens than the last {len(row.ids) - first} of the row")
        top = _table([(token, score) for score, token, _ in answer.top[place - first] or ()] for place in row.places)
        scores = [(row.ids[place], answer.own[place - first][0]) for place in row.places]
        return [top, _table([(token, score)] if score is not None else [] for token, score in scores)]

    def _checked(self, found: list[_Told], row: Row) -> _Told:
        """All of a place, no id twice; raises `ValueError` for what no distribution tells."""
        count_n, top_k, places = (found[0][0] >= 0).sum(1), self._teacher_k, row.places
        ids_nM, logs_nM = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
        is_own_n = (ids_nM == torch.tensor([row.ids[place] for place in places])[:, None]).any(1)
        is_wrong_n = ~is_own_n | (count_n < top_k) | ((count_n > top_k + 1) & (top_k > 0))
        if is_wrong_n.any():
            at = int(is_wrong_n.nonzero()[0])
            raise ValueError(f"{int(count_n[at])} of {top_k or 'the'} tokens at position {places[at]}, or not its own")
        # The first of equal ids stays: the likeliest come first.
        ids_nM, order_nM = ids_nM.sort(dim=1, stable=True)
        logs_nM = logs_nM.gather(1, order_nM)
        again_nM = (ids_nM == ids_nM.roll(1, 1)) & (ids_nM >= 0)
        again_nM[:, 0] = False
        is_other_n = ((logs_nM.exp() - logs_nM.roll(1, 1).exp()).abs() > _ABOVE).logical_and(again_nM).any(1)
        ids_nM = ids_nM.masked_fill(again_nM, -1)
        logs_nM = logs_nM.masked_fill(again_nM, -torch.inf)
        largest, mass = float(logs_nM.nan_to_num(nan=torch.inf).amax()), float(logs_nM.double().exp().sum(1).max())
        if not (largest <= _ABOVE and mass <= 1 + _ABOVE):
            raise ValueError(f"log-probabilities of up to {largest:.3g} nats, whose probabilities add up to {mass:.3g}")
        if top_k and len(found) > 1:  # what is told beside the likeliest is no likelier than these
            least_n = found[0][1].topk(top_k, 1).values[:, -1]
            is_other_n |= logs_nM.topk(top_k, 1).values[:, -1].exp() > least_n.exp() + _ABOVE
        if is_other_n.any():
            raise ValueError("two probabilities of one token, or tokens that are not the likeliest")
        # An excluded token has the lowest finite number, as in a head with a bias of -inf.
        least = torch.finfo(torch.float32).min
        return ids_nM, torch.where(ids_nM >= 0, logs_nM.clamp(min=least, max=0.0), logs_nM)


# ---- Comparisons -----------------------------------------------------------------------------------------------------


def kl(one: list[Found], other: list[Found]) -> float:
    """The median over places of the KL, in nats, between two answers, over what either tells and all else together.

    At the first place of a row of arbitrary ids half precision alone is 0.2 nats off, which a mean would be made of.
    A token that only one tells is to the other at most as likely as those that it tells instead.
    """
    each = []
    for mine, theirs in zip(one, other, strict=True):
        tokens = sorted(mine.keys() | theirs.keys())
        pair = [[told.get(token, _most(told, than, token)) for token in tokens] for told, than in
                ((mine, theirs), (theirs, mine))]  # fmt: skip
        pair_2M = torch.tensor(pair, dtype=torch.float64)
        rest_21 = (1 - pair_2M.exp().sum(1, keepdim=True)).clamp(min=_SMALL).log()
        log_p, log_q = torch.cat([pair_2M, rest_21], 1)
        each.append(float((log_p.exp() * (log_p - log_q)).sum()))
    return max(0.0, median(each))


def _most(told: Found, by_other: Found, token: int) -> float:
    """At most the log-probability of a token that the other one tells alone."""
    instead = [told[one] for one in told.keys() - by_other.keys()] or told.values()
    return min(by_other.get(token, 0.0), *instead)


def difference(one: list[Found], other: list[Found]) -> str:
    """By how much two answers for the same tokens differ, if that is more than one model's can; else empty."""
    nats, ratios = kl(one, other), [1.0]
    for mine, theirs in zip(one, other, strict=True):
        if len(both := mine.keys() & theirs.keys()) >= 8:  # fewer have no telling spread
            ratios.append(_spread(mine, both) / _spread(theirs, both))
    # A KL hardly sees logits that are all a few per cent too large.
    ratio = median(ratios[1:] or ratios)
    if nats <= _MOST_APART and abs(log(ratio)) <= _MOST_SPREAD:
        return ""
    return f"{nats:.2g} nats apart, with log-probabilities {ratio:.3g} times as far from each other,"


def _spread(told: Found, tokens: Iterable[int]) -> float:
    return max(1e-9, pstdev(told[token] for token in tokens))


def without(told: list[Found], *left_out: int) -> list[Found]:
    """Predictions without some tokens."""
    return [{token: score for token, score in one.items() if token not in left_out} for one in told]


def _by_place(ids_nM: Tensor, logs_nM: Tensor) -> list[Found]:
    return [dict(zip(*row, strict=True)) for row in zip(ids_nM.tolist(), logs_nM.tolist(), strict=True)]


# ---- Parts of answers ------------------------------------------------------------------------------------------------


def _word(dtype: torch.dtype) -> str:
    """The name of a dtype in options and requests."""
    return str(dtype).removeprefix("torch.")


def _repeats(extra_KH: Tensor, states_LH: Tensor) -> bool:
    """Whether surplus states are repeated beginnings of the row, as vLLM returns for preempted rows."""
    # vLLM keeps the states of a row that was preempted and computed again from its first token
    # (vllm-project/vllm#55192), so that the last L are the whole row. A new request would be preempted as well.

    at = 0
    for state_H in extra_KH.float():
        goes_on = at < len(states_LH) and _is_near(state_H, states_LH[at])
        if not goes_on and not _is_near(state_H, states_LH[0]):
            return False
        at = at + 1 if goes_on else 1
    return True


def _is_near(one_H: Tensor, other_H: Tensor) -> bool:
    return bool((one_H - other_H).norm() <= _SAME * other_H.norm())


def _table(rows: Iterable[Iterable[tuple[int, float]]]) -> _Told:
    """Ids and log-probabilities of each place; a `ValueError` for an id that is none."""
    each = [[*row] for row in rows]
    ids = [torch.tensor([token for token, _ in row], dtype=torch.int64) for row in each]
    logs = [torch.tensor([score for _, score in row], dtype=torch.float32) for row in each]
    found = torch.cat(ids) if ids else torch.zeros(0)
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < MOST_IDS:
        raise ValueError(f"token ids from {int(found.min())} to {int(found.max())}")
    return pad_sequence(ids, batch_first=True, padding_value=-1), pad_sequence(
        logs, batch_first=True, padding_value=-torch.inf
    )
