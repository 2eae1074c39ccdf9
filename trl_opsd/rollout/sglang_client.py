"""An HTTP client of an SGLang server: each request is sent once, has a deadline, and is checked before it is sent.

SGLang's server ends if it is sent an empty prompt or an id outside of its vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import torch
from torch import Tensor

from trl_opsd._compat.weight_group import MEET_SECONDS, WeightGroup
from trl_opsd.config import OPSDConfig
from trl_opsd.rollout import sglang_answers as answers
from trl_opsd.rollout.weight_sync import BUCKET_BYTES
from trl_opsd.run.bounded_http import BoundedSession, is_loopback
from trl_opsd.run.errors import ServerError
from trl_opsd.types import Completion

logger = logging.getLogger(__name__)

_HEALTH_SECONDS = 30.0
"""A health check writes a token, which takes a second, and up to 20 on a server that is busy with others."""
_IDLE_SECONDS = 10.0
"""A server may still be ending requests that it has answered."""
_OF_THE_PROTOCOL = ("logprobs", "prompt_logprobs", "max_tokens", "seed")
"""Options of `Engine.write` that are named otherwise in SGLang, or not read by it."""


class SGLangClient:
    """A connection to an SGLang server, in the main process.

    Args:
        args ([`OPSDConfig`]):
            The address of the server, and how long to wait for it.
        deadline (`float`):
            Seconds within which any request has to be answered, to the last byte.

    Raises:
        ValueError: No server answers within `sglang_server_timeout` seconds.
        ServerError: An answer is not an SGLang server's. Every method may raise it.
    """

    def __init__(self, args: OPSDConfig, deadline: float) -> None:
        self.url = str(args.sglang_server_url).rstrip("/")
        self._host = urlsplit(self.url).hostname or ""
        origin = ", nine tenths of `ddp_timeout`: see its log, and raise `ddp_timeout` if it only needs longer."
        self._deadline = deadline
        # A proxy cannot reach our loopback.
        self._session = BoundedSession(
            "The SGLang server", "sglang_server_url", deadline, origin, trust_env=not is_loopback(self._host)
        )
        self._group: WeightGroup | None = None
        self._run, self._sent = uuid4().hex[:8], 0
        self._version: str | None = None
        self._wait_for_server(args.sglang_server_timeout)
        self.facts = answers.facts(self._session.get(f"{self.url}/server_info").json())

    def _wait_for_server(self, seconds: float) -> None:
        began, has_warned = monotonic(), False
        while why := self._health_error():
            if monotonic() - began >= seconds:
                raise ValueError(
                    f"No SGLang server at {self.url} after `sglang_server_timeout={seconds:g}` seconds: {why}. Start "
                    "one as docs/rollouts.md says, or correct `sglang_server_url`."
                )
            if not has_warned:
                logger.warning(f"No SGLang server at {self.url} yet, waiting for up to {seconds:g} seconds.")
                has_warned = True
            sleep(min(2.0, seconds))

    def _health_error(self) -> str | None:
        try:
            status = self._session.get(f"{self.url}/health", seconds=_HEALTH_SECONDS).status_code
        except ServerError as error:
            return str(error)
        return None if status == 200 else f"/health answers {status}, not 200"

    # ---- Completions --------------------------------------------------------------------------------------------

    def knows(self, vocabulary: int) -> bool:
        """Whether the server's model has this many ids or more; another would end at the first that it lacks."""
        asked = {"max_new_tokens": 1, "logit_bias": {str(vocabulary - 1): 0.0}}
        answer = self._session.post(f"{self.url}/generate", json={"input_ids": [0], "sampling_params": asked})
        if answer.status_code == 400 and b"logit_bias" in answer.content:
            return False
        _accepted(answer)
        return True

    def write(self, rows: list[tuple[list[int], dict[str, Any]]], vocabulary: int) -> list[Completion]:
        """Generates one completion for each prompt; a prompt that fills the context of the server gets an empty one.

        Args:
            rows (`list[tuple[list[int], dict]]`):
                Prompts and their options. `logprobs`, `prompt_logprobs`, `max_tokens` and `seed` are those of
                [`~rollout.engine.Engine.write`], all others are named as in SGLang's `sampling_params`.
            vocabulary (`int`):
                Number of ids that may be sent.

        Raises:
            ValueError: A prompt is empty, or has an id outside of the vocabulary. Nothing was sent.
        """
        for number, (ids, _) in enumerate(rows):
            _check_prompt(number, ids, vocabulary)
        asked = {number: row for number, row in enumerate(rows) if len(row[0]) <= self.facts.longest_prompt}
        if len(asked) < len(rows):
            logger.warning(
                f"{len(rows) - len(asked)} prompts of a batch have more than {self.facts.longest_prompt} tokens, the "
                "longest that the SGLang server reads: their completions are empty."
            )
        written = dict(zip(asked, self._ask(list(asked.values())), strict=True))
        empty = [Completion(prompt_ids=ids, completion_ids=[], prompt_logprobs=[], logprobs=[]) for ids, _ in rows]
        return [written.get(number, nothing) for number, nothing in enumerate(empty)]

    def _ask(self, rows: list[tuple[list[int], dict[str, Any]]]) -> list[Completion]:
        """Sends all rows in one request, as the server would be full before the last of several."""
        if not rows:
            return []
        names = [f"{uuid4().hex}-{number}" for number in range(len(rows))]
        prompts = [ids for ids, _ in rows]
        sampling = [self._sampling(ids, options) for ids, options in rows]
        scored = [_scored(options) for _, options in rows]
        answer = self._session.post(
            f"{self.url}/generate",
            json={
                "rid": names,
                "input_ids": prompts,
                "sampling_params": sampling,
                "return_logprob": [this is not None for this in scored],
                "logprob_start_len": [0 if this else -1 for this in scored],
            },
            max_bytes=answers.max_answer_bytes(prompts, [one["max_new_tokens"] for one in sampling]),
        )
        found = _accepted(answer).json(list)
        if len(found) != len(rows):
            raise ServerError(f"The SGLang server answered {len(found)} rows to {len(rows)} prompts.")
        return [
            answers.completion(*row, version=self._version)
            for row in zip(found, names, prompts, sampling, scored, strict=True)
        ]

    def _sampling(self, ids: list[int], options: dict[str, Any]) -> dict[str, Any]:
        """One row's `sampling_params`. A completion ends with the context of the server, at the latest."""
        others = {name: value for name, value in options.items() if name not in _OF_THE_PROTOCOL}
        most = min(options["max_tokens"], self.facts.room - len(ids))
        return {"stop_token_ids": [], **others, "max_new_tokens": most}

    # ---- Weights ------------------------------------------------------------------------------------------------

    def connect(self, device: torch.device) -> torch.device:
        """Joins a group with the server's workers, that weights are broadcast in.

        Args:
            device (`torch.device`):
                Where the student is.

        Returns:
            `torch.device`: Where weights have to be, to be sent.
        """
        on_gpus = device.type == self.facts.device == "cuda"
        backend = "nccl" if on_gpus else "gloo"
        # A run that was killed may have left it open; a server that is not updating refuses this.
        self._session.post(f"{self.url}/end_weight_update", json={})
        self._name = f"trl_opsd_{uuid4().hex}"
        group = WeightGroup(self._name, self._host, self.facts.workers, backend)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(
                self._call,
                "init_weights_update_group",
                within=MEET_SECONDS,
                master_address=group.address,
                master_port=group.port,
                rank_offset=1,
                world_size=1 + self.facts.workers,
                group_name=self._name,
                backend=backend,
            )
            try:
                group.meet()
            except RuntimeError as error:
                asked.result()  # the server may say why
                raise ServerError(
                    f"The SGLang server at {self.url} did not come to {group.address} port {group.port} of this "
                    f"machine to be sent weights: {error}"
                ) from error
            asked.result()
        self._group = group
        return device if on_gpus else torch.device("cpu")

    def update(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Replaces all weights, some at a time. If it fails, those of the server are not known."""
        if self._group is None:
            raise ServerError(
                f"The SGLang server at {self.url} takes no weights after an update has failed: begin the training anew."
            )
        group, self._group, self._version = self._group, None, None  # until all have arrived
        self._sent += 1
        version = f"{self._run}-{self._sent}"
        try:
            self._call("begin_weight_update", selector="target")
            with ThreadPoolExecutor(1) as pool:
                for bucket in _buckets(weights):
                    self._send(pool, group, bucket)
            self._call("end_weight_update")
            self._call("update_weight_version", new_version=version, abort_all_requests=False)
        except BaseException:
            group.close()  # the server would wait for the rest
            raise
        self._group, self._version = group, version

    def _send(self, pool: ThreadPoolExecutor, group: WeightGroup, bucket: list[tuple[str, Tensor]]) -> None:
        asked = pool.submit(
            self._call,
            "update_weights_from_distributed",
            names=[name for name, _ in bucket],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            shapes=[list(tensor.shape) for _, tensor in bucket],
            group_name=self._name,
            selector="target",
            flush_cache=False,
        )
        sent = [group.send(tensor, self._deadline) for _, tensor in bucket]
        asked.result()  # before waiting: a server that refuses does not receive
        for one in sent:
            one.wait()

    def forget_prefixes(self) -> None:
        """Resets the prefix cache, which was computed with earlier weights."""
        answer = self._session.post(f"{self.url}/flush_cache", params={"timeout": _IDLE_SECONDS})
        if answer.status_code != 200:
            raise ServerError(
                f"The SGLang server at {self.url} did not reset its prefix cache, as it does while it serves other "
                f"requests; completions would come from earlier weights. Use it for a single training run. It says: "
                f"{answer.text[:300]}"
            )

    def close(self) -> None:
        """Leaves the group, so that another training run can use the server."""
        group, self._group = self._group, None
        if group is not None:
            self._call("destroy_weights_update_group", group_name=self._name)
            group.close()

    def _call(self, path: str, within: float | None = None, **asked: Any) -> None:
        answer = _accepted(self._session.post(f"{self.url}/{path}", json=asked, seconds=within)).json()
        if answer.get("success") is not True:
            raise ServerError(f"The SGLang server, asked for /{path}, answered {str(answer)[:500]}.")


def _check_prompt(number: int, ids: list[int], vocabulary: int) -> None:
    if not ids:
        raise ValueError(f"Prompt {number} of a batch is empty, and cannot be sent to an SGLang server.")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise ValueError(
                f"Prompt {number} of a batch has the id {token!r}, and cannot be sent to an SGLang server: expected "
                f"ids from 0 to {vocabulary - 1}."
            )


def _scored(options: dict[str, Any]) -> bool | None:
    """Whether log-probabilities of the prompt are asked for, or only of the completion; `None` for neither."""
    if options.get("prompt_logprobs") is not None:
        return True
    return None if options.get("logprobs") is None else False


def _buckets(weights: Iterator[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Groups weights, as the server holds those of one request besides its own."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _accepted(answer: Any) -> Any:
    """The answer, if its status is 200."""
    if answer.status_code != 200:
        raise ServerError(f"{answer.asked} answered {answer.status_code}: {answer.text[:500]}")
    return answer
