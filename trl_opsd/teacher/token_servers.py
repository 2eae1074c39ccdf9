"""Generating servers that score a row's tokens: vLLM, SGLang, and others with OpenAI's API.

n places of a row · M tokens known at each · K requested tokens · V vocabulary size; log-probabilities in nats
"""

from __future__ import annotations

import asyncio
import base64
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from statistics import median
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trl_opsd.errors import ServerError
from trl_opsd.http.client import MIB, Count, Response, Schema, WrongAnswerError, at, warn_in_main
from trl_opsd.teacher.servers import KIND, MOST_APART, ModelServer, probe_ids
from trl_opsd.types.known import MOST_IDS

START = "vllm serve TEACHER --enable-scale-out --max-logprobs 128"
"""How to start a server that scores the student's tokens, for messages; vLLM from 0.32 on."""
_GENERATE, _COMPLETE = "/inference/v1/generate", "/v1/completions"
_TOO_MANY = 1_000_000
"""Tokens that no server tells: it answers how many it does."""
_OF_OPENAI = 5
"""Tokens that OpenAI's API tells at most."""
_ABOVE = 1e-2
"""Largest excess of a probability, or of a sum of some, over 1 that rounding explains."""
_MOVED = 1e-3
"""Nats by which another token before it moves some log-probability of a prediction at least."""
_SMALL = 1e-6
"""Least probability of all tokens that are not told, in a comparison."""
_BYTES = 120
"""Most bytes of one token in an answer."""
_CANNOT = (400, 403, 404, 405, 422, 501)
"""Statuses by which a server says that it does not offer something; others may be those of the moment."""
Found = dict[int, float]
"""Log-probabilities by token id."""
Told = tuple[Tensor, Tensor]
"""Ids and log-probabilities, [n, M] each, -1 and -inf where there is none."""


# What lists have for each of K tokens is read by `_table`: pydantic takes 20 µs for each, 6 s for a row of 4,096.
class _Scored(Schema):
    """vLLM's answer, at either of its routes."""

    scores: str | None = at("prompt_token_id_logprobs", default=None)
    top: list[dict[str, Any] | None] | None = at("prompt_logprobs", default=None)
    of_choice: list[dict[str, Any] | None] | None = at("choices", 0, "prompt_logprobs", default=None)


class _FromSGLang(Schema):
    own: list[tuple[float | None, int, Any]] = at("meta_info", "input_token_logprobs")
    top: list[list[Any] | None] = at("meta_info", "input_top_logprobs")


class _Echoed(Schema):
    texts: list[str] = at("choices", 0, "logprobs", "tokens")
    own: list[float | None] = at("choices", 0, "logprobs", "token_logprobs")
    top: list[dict[str, float] | None] = at("choices", 0, "logprobs", "top_logprobs")


class _Limits(Schema):
    """What SGLang takes, by its context and its memory."""

    max_req_input_len: Count


class _Detokenized(Schema):
    prompt: str | None = None
    text: str | None = None


class TokenServer(ModelServer):
    """A server that generates, and what it tells.

    With a `tokenizer`, the student's, its own is compared: a `ValueError` if it has another.
    """

    api = ""
    """Its kind, for messages."""
    limits: dict[str, int | None]
    """The largest K of each of the targets that it offers, as in `teacher_server_targets`; `None` where it has none."""
    missing: dict[str, str]
    """Why it does not offer the rest."""
    last_id = -1
    """The last id of the vocabulary."""
    id_of: Mapping[str, int]
    """Ids by text, where a server tells texts."""
    noise: float | None = None
    """Nats between two answers for the same tokens; known after `prove`."""

    def __init__(
        self, url: str, deadline: float, timeout: float, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        super().__init__(url, deadline, timeout)
        self._background.run(self.answer(lambda seconds: self._look(tokenizer, seconds), "told its offer"))

    async def _look(self, tokenizer: PreTrainedTokenizerBase | None, seconds: float) -> None:
        """Finds out what it offers."""
        self.limits, self.missing, self.id_of = {}, {}, {}
        context = self.model.max_model_len
        self.context = None if context is None else context - 1  # a token is generated after the row
        if self.model.owned_by == "sglang":
            self.api, self.limits["teacher_top_k"] = "SGLang", None
            self.missing["student_top_k"] = "SGLang scores one list of tokens for all positions of a row"
            info = await self._try("GET", "/server_info", seconds)
            if info.status == 404:  # its name before 0.5.6
                info = await self._try("GET", "/get_server_info", seconds)
            self.context = info.parse(_Limits).max_req_input_len - 1  # it refuses a row of this length
        else:
            await self._look_for_routes(tokenizer, seconds)
        if "states" not in self.limits:
            self.missing["states"] = "it generates, and sends no hidden states"
        if tokenizer is not None and self.api in ("vLLM", "SGLang"):  # another's texts are compared in each answer
            await self._check_tokenizer(tokenizer, seconds)

    async def _try(self, method: str, path: str, seconds: float, body: Any = None) -> Response:
        """The answer to what it may not offer; a `ServerError` if it could not answer now."""
        answer = await self.request(method, path, seconds=seconds, **({} if body is None else {"json": body}))
        return answer if answer.status in _CANNOT else answer.check_status()

    async def _look_for_routes(self, tokenizer: PreTrainedTokenizerBase | None, seconds: float) -> None:
        body: dict[str, Any] = {"prompt": [0, 1], "max_tokens": 1, "prompt_logprobs": _TOO_MANY}
        found = await self._try("POST", _COMPLETE, seconds, {**body, "model": self.model.id})
        if allowed := re.search(r"max allowed: (\d+)", found.text):
            self.api, self.limits["teacher_top_k"] = "vLLM", int(allowed[1])
            scored = {"prompt_logprob_token_ids": [[0]], "prompt_logprob_start": 0, "max_tokens": 1}
            body = {"model": self.model.id, "token_ids": [0, 1], "sampling_params": scored}
            answer = await self._try("POST", _GENERATE, seconds, body)
            if answer.status == 200 and answer.parse(_Scored).scores is not None:
                self.limits["student_top_k"] = int(allowed[1])
            else:
                said = f"{_GENERATE} returned {answer.status}: {answer.text[:200]}"
                self.missing["student_top_k"] = f"{said}; start vLLM 0.32 or newer, with `{START}`"
        elif found.status in (404, 405, 501):
            self.api, self.limits["states"] = "vLLM (pooling)", None
            for one in ("student_top_k", "teacher_top_k"):
                self.missing[one] = f"it has no {_COMPLETE}: it does not generate; start it with `{START}`"
        else:
            self.api, self.limits["teacher_top_k"] = "an OpenAI-compatible server", _OF_OPENAI
            self.missing["student_top_k"] = "its API tells the likeliest tokens alone"
            if tokenizer is not None:
                texts = [tokenizer.decode([one]) for one in range(len(tokenizer))]
                count = Counter(texts)
                self.id_of = {text: number for number, text in enumerate(texts) if count[text] == 1}

    async def _check_tokenizer(self, tokenizer: PreTrainedTokenizerBase, seconds: float) -> None:
        """Compares texts of some tokens."""
        special = {*tokenizer.all_special_ids}  # which some servers leave out
        ids = [one for one in range(0, len(tokenizer), max(1, len(tokenizer) // 16)) if one not in special]
        answer = await self._try("POST", "/detokenize", seconds, {"model": self.model.id, "tokens": ids})
        if answer.status != 200:
            warn_in_main(
                f"{answer.request} returned {answer.status}, so that the tokenizer of the teacher's server is not "
                "compared: make sure that it is the student's."
            )
            return
        said = answer.parse(_Detokenized)
        theirs, ours = said.prompt or said.text or "", tokenizer.decode(ids)
        if "".join(theirs.split()) != "".join(ours.split()):
            raise ValueError(
                f"The teacher's server at {self.url} has another tokenizer: the ids {ids} are {theirs!r} to it and "
                f"{ours!r} here. A server that tells probabilities of tokens needs the student's tokenizer; with "
                "`cross_tokenizer='bytes'`, load the teacher instead."
            )

    def prove(self, vocabulary: int, student_k: int, teacher_k: int) -> list[Found]:
        """Compares what it returns for short rows; returns what it did for the first, for `are_same`."""
        row, self.last_id = probe_ids(vocabulary), vocabulary - 1
        other = (row[0] + 1) % vocabulary
        # All predictions are of what comes before the last token, so that it changes none; the one before changes the
        # last. The first row is read twice, for the noise.
        rows = [row, row, [*row[:-1], other], [*row[:-2], other, row[-1]]]
        spread = [place * (vocabulary - 1) // max(1, student_k - 1) for place in range(student_k)]
        wanted = list(dict.fromkeys([*row, other, *spread]))[: max(student_k, len(row) + 1)] if student_k else []
        asked = [self.start(each, range(1, 8), _same(wanted, 7), teacher_k) for each in rows]
        first, again, changed_last, changed_before = (_by_place(*each.result()) for each in asked)
        # At the last place, without the tokens that only one may tell.
        before, after = (_but(each[-1:], row[-1], other) for each in (first, changed_last))
        if kl(before, after) > MOST_APART:
            raise WrongAnswerError(
                f"{KIND.subject} at {self.url} tells log-probabilities that depend on the token they predict, "
                f"{kl(before, after):.2g} nats apart: they are a position ahead, or its attention is bidirectional."
            )
        if not _is_moved(first[-1], changed_before[-1]):
            raise WrongAnswerError(
                f"{KIND.subject} at {self.url} tells the same log-probabilities after different tokens: its weights "
                "are zeroed or were not loaded, or they are a position behind."
            )
        self.noise, self._is_proved = kl(first, again), True
        return first

    def start(
        self, ids: Sequence[int], places: Sequence[int], wanted: Tensor | None, top_k: int
    ) -> Future[tuple[Tensor, Tensor]]:
        """Starts to score the tokens at `places` of a row of token ids; the first place is at least 1.

        `wanted`, [n, K], are ids to score at each place, -1 for none, the row's own among them, and `top_k` the number
        of the teacher's likeliest. The future has ids and log-probabilities, [n, M] each, -1 where there is none, or a
        `ServerError`.
        """
        answer = self.answer(
            lambda seconds: self._scores(ids, places, wanted, top_k, seconds), f"scored a row of {len(ids)} tokens"
        )
        return self._background.start(answer)

    async def _scores(
        self, ids: Sequence[int], places: Sequence[int], wanted: Tensor | None, top_k: int, seconds: float
    ) -> tuple[Tensor, Tensor]:
        """Ids and log-probabilities, [n, M] each, as `start` returns them."""
        first, model = places[0] - 1, self.model.id
        many = MIB + len(ids) * (_BYTES * (top_k + 1) + 8 * (0 if wanted is None else wanted.size(1)))
        if self.api == "SGLang":
            body: dict[str, Any] = {
                "input_ids": list(ids),
                "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": first,
                "top_logprobs_num": top_k,
            }
            path, read = "/generate", self._of_sglang
        elif self.api != "vLLM":
            body = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0}
            body |= {"echo": True, "logprobs": top_k}
            path, read = _COMPLETE, self._of_openai
        elif wanted is None:
            body = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k}
            path, read = _COMPLETE, self._of_vllm
        else:
            rows: list[list[int]] = [[-1]] * (len(ids) - 1 - first)
            for place, row in zip(places, wanted.tolist(), strict=True):
                rows[place - 1 - first] = row
            asked = {"prompt_logprob_token_ids": rows, "prompt_logprob_start": first}
            sampling = {"max_tokens": 1, "temperature": 1.0, **asked, **({"prompt_logprobs": top_k} if top_k else {})}
            body = {"model": model, "token_ids": list(ids), "sampling_params": sampling}
            path, read = _GENERATE, self._of_vllm
        response = await self.request("POST", path, json=body, seconds=seconds, max_bytes=many)
        response.check_status("" if self.api == "SGLang" else f" Start it with `{START}`.")

        def told() -> Told:
            try:
                parts = read(response, ids, places, wanted, top_k)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                raise WrongAnswerError(
                    f"{response.request} returned what are no log-probabilities by token ({error!r:.200})."
                ) from error
            return self._checked(response.request, parts, ids, places, top_k)

        # In a thread, because reading a long row would block the other requests of this loop.
        return await asyncio.to_thread(told)

    def _of_vllm(
        self, response: Response, ids: Sequence[int], places: Sequence[int], wanted: Tensor | None, top_k: int
    ) -> list[Told]:
        """The likeliest tokens, and the requested ones."""
        answer, found = response.parse(_Scored), list[Told]()
        if wanted is not None:
            shape = (len(ids) - places[0], wanted.size(1))
            if answer.scores is None:
                raise WrongAnswerError(
                    f"{response.request} returned no scores of the {shape[1]} tokens asked for at each position, as "
                    "vLLM does without an error where its prefix cache holds their beginning: start it with "
                    f"`{START}`, and without anything that shares prefixes of such requests."
                )
            told_nK = _array(response.request, answer.scores, shape)[torch.tensor(places) - places[0]]
            found.append((wanted, told_nK.masked_fill(wanted < 0, -torch.inf)))
        if top_k:
            rows = answer.top if answer.of_choice is None else answer.of_choice
            if rows is None or len(rows) != len(ids):
                raise WrongAnswerError(
                    f"{response.request} returned log-probabilities of {len(rows or ())} positions, expected "
                    f"{len(ids)}: start it with `{START}`."
                )
            each = [rows[place] or {} for place in places]
            found.insert(0, _table([(int(token), told["logprob"]) for token, told in row.items()] for row in each))
        return found

    def _of_sglang(self, response: Response, ids: Sequence[int], places: Sequence[int], *_: Any) -> list[Told]:
        answer, first = response.parse(_FromSGLang), places[0] - 1
        # SGLang 0.5.23 names the last id of a vocabulary 0, beside its own log-probability.
        expected = [0 if token == self.last_id else token for token in ids[first:]]
        if [token for _, token, _ in answer.own] != expected or len(answer.top) != len(answer.own):
            raise WrongAnswerError(
                f"{response.request} returned log-probabilities of {len(answer.own)} tokens, {len(answer.top)} with "
                f"the likeliest, expected those of the last {len(ids) - first} of the row."
            )
        top = _table([(token, score) for score, token, _ in answer.top[place - first] or ()] for place in places)
        return [top, _table(_own(ids[place], answer.own[place - first][0]) for place in places)]

    def _of_openai(self, response: Response, ids: Sequence[int], places: Sequence[int], *_: Any) -> list[Told]:
        try:
            answer = response.parse(_Echoed)
        except ServerError as error:
            raise WrongAnswerError(
                f"{error} It has to take token ids with `echo` and `logprobs`; or start one with `{START}`."
            ) from error
        lengths = {len(one) for one in (answer.texts, answer.own, answer.top)}
        named = zip(answer.texts, ids, strict=False)
        known = [self.id_of[text] == token for text, token in named if text in self.id_of]
        if lengths not in ({len(ids)}, {len(ids) + 1}) or 2 * sum(known) < len(known):
            raise WrongAnswerError(
                f"{response.request} returned log-probabilities of {len(answer.own)} tokens for {len(ids)}, "
                f"{known.count(False)} with the text of another token: another tokenizer, or a server that does not "
                "take token ids."
            )
        found = []
        for place in places:
            # A text that several tokens have says nothing of one of them: it stays with all others. The row's own may
            # be shown with what is before it, as the text of another token.
            mine = answer.texts[place]
            top = {text: score for text, score in (answer.top[place] or {}).items() if text != mine}
            told = {self.id_of[text]: score for text, score in top.items() if text in self.id_of}
            found.append({**told, **dict(_own(ids[place], answer.own[place]))}.items())
        return [_table(found)]

    def _checked(
        self, asked: str, found: list[Told], ids: Sequence[int], places: Sequence[int], top_k: int
    ) -> tuple[Tensor, Tensor]:
        """All of a place, no id twice; raises `WrongAnswerError` for what no distribution tells."""
        count_n, least_k = (found[0][0] >= 0).sum(1), top_k if self.api in ("vLLM", "SGLang") else 0
        ids_nM, logs_nM = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
        is_own_n = (ids_nM == torch.tensor([ids[place] for place in places])[:, None]).any(1)
        is_wrong_n = ~is_own_n | (count_n < least_k) | ((count_n > top_k + 1) & (top_k > 0))
        if is_wrong_n.any():
            at = int(is_wrong_n.nonzero()[0])
            raise WrongAnswerError(
                f"{asked} told {int(count_n[at])} of {top_k or 'the'} tokens at position {places[at]}"
                f"{', and not its own' * (not is_own_n[at])}: start it with `{START}`."
            )
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
            raise WrongAnswerError(
                f"{asked} returned log-probabilities of up to {largest:.3g} nats, whose probabilities add up to "
                f"{mass:.3g}: start it without `--logprobs-mode`."
            )
        if top_k and len(found) > 1:  # what is told beside the likeliest is no likelier than these
            least_n = found[0][1].topk(top_k, 1).values[:, -1]
            is_other_n |= logs_nM.topk(top_k, 1).values[:, -1].exp() > least_n.exp() + _ABOVE
        if is_other_n.any():
            raise WrongAnswerError(
                f"{asked} told two probabilities of one token at position {places[int(is_other_n.nonzero()[0])]}, or "
                f"others than the likeliest {top_k}: it mixes up answers; restart it."
            )
        # An excluded token has the lowest finite number, as in a head with a bias of -inf.
        least = torch.finfo(torch.float32).min
        return ids_nM, torch.where(ids_nM >= 0, logs_nM.clamp(min=least, max=0.0), logs_nM)


def kl(one: list[Found], other: list[Found]) -> float:
    """The median over places of the KL, in nats, between two answers, over what either tells and all else together.

    At the first place of a row of arbitrary ids half precision alone is 0.2 nats off, which a mean would be made of.

    A token that only one tells is to the other at most as likely as those that it tells instead.
    """
    each = []
    for mine, theirs in zip(one, other, strict=True):
        pair = (
            torch.tensor(
                [
                    [mine.get(token, _most(mine, theirs, token)), theirs.get(token, _most(theirs, mine, token))]
                    for token in sorted(mine.keys() | theirs.keys())
                ],
                dtype=torch.float64,
            )
            .reshape(-1, 2)
            .T
        )
        rest_21 = (1 - pair.exp().sum(1, keepdim=True)).clamp(min=_SMALL).log()
        log_p, log_q = torch.cat([pair, rest_21], 1)
        each.append(float((log_p.exp() * (log_p - log_q)).sum()))
    return max(0.0, median(each))


def _most(told: Found, by_other: Found, token: int) -> float:
    """At most the log-probability of a token that the other one tells alone."""
    instead = [told[one] for one in told.keys() - by_other.keys()] or told.values()
    return min(by_other.get(token, 0.0), *instead)


def _but(told: list[Found], *left_out: int) -> list[Found]:
    return [{token: score for token, score in one.items() if token not in left_out} for one in told]


def _is_moved(one: Found, other: Found) -> bool:
    """Whether two predictions differ."""
    return one.keys() != other.keys() or max(abs(one[token] - other[token]) for token in one) > _MOVED


def are_same(one: list[Found], other: list[Found]) -> bool:
    """Whether the same model can have told both for the same places."""
    return kl(one, other) <= MOST_APART


def _same(wanted: list[int], places: int) -> Tensor | None:
    return torch.tensor([wanted] * places) if wanted else None


def _by_place(ids_nM: Tensor, logs_nM: Tensor) -> list[Found]:
    rows = zip(ids_nM.tolist(), logs_nM.tolist(), strict=True)
    return [{token: score for token, score in zip(*row, strict=True) if token >= 0} for row in rows]


def _own(token: int, score: float | None) -> list[tuple[int, float]]:
    return [] if score is None else [(token, score)]


def _table(rows: Iterable[Iterable[tuple[int, float]]]) -> Told:
    """Ids and log-probabilities of each place; a `ValueError` for an id that is none."""
    each = [[*row] for row in rows]
    there_nM = torch.arange(max(map(len, each)))[None] < torch.tensor([*map(len, each)])[:, None]
    ids_nM, logs_nM = torch.full(there_nM.shape, -1), torch.full(there_nM.shape, -torch.inf)
    count = int(there_nM.sum())
    ids = np.fromiter((token for row in each for token, _ in row), np.int64, count)
    if count and not 0 <= ids.min() <= ids.max() < MOST_IDS:
        raise ValueError(f"ids from {ids.min()} to {ids.max()}")
    ids_nM[there_nM] = torch.from_numpy(ids)
    logs_nM[there_nM] = torch.from_numpy(np.fromiter((one for row in each for _, one in row), np.float32, count))
    return ids_nM, logs_nM


def _array(asked: str, encoded: str, shape: tuple[int, ...]) -> Tensor:
    """The numbers of a base64 `.npy` file, if they have this shape."""
    try:
        file = io.BytesIO(base64.b64decode(encoded))
        np.lib.format.read_magic(file)
        is_shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    except (ValueError, SyntaxError, TokenError) as error:
        raise WrongAnswerError(f"{asked} returned scores that are no array: {error}.") from error
    left = bytearray(file.read())
    if is_shape != shape or is_fortran or dtype != np.float32 or len(left) != 4 * shape[0] * shape[1]:
        raise WrongAnswerError(
            f"{asked} returned scores of shape {list(is_shape)} in {dtype}, {len(left)} bytes, expected {list(shape)} "
            "in float32: a row for each position."
        )
    return torch.frombuffer(left, dtype=torch.float32).view(shape)
