"""Generates with an SGLang server: what it is sent, how its responses are read, and how it gets weights.

SGLang's server ends if it is sent an empty prompt or an id outside of its vocabulary: prompts are checked before they
come here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import torch
from torch import Tensor

from trl_opsd._compat.weight_group import MEET_SECONDS, WeightGroup
from trl_opsd.config import OPSDConfig
from trl_opsd.errors import ServerError
from trl_opsd.http.client import Count, Response, Schema, ServerKind
from trl_opsd.http.urls import ROLLOUT_TOKEN
from trl_opsd.rollout.engine import Row
from trl_opsd.rollout.served import ServedRollout
from trl_opsd.rollout.server_engine import Facts, GenerationClient
from trl_opsd.rollout.sglang_requests import GenerateRequest, SGLangRows, sampling_params
from trl_opsd.rollout.weight_sync import BUCKET_BYTES, weights_of
from trl_opsd.types import Completion, Weight

logger = logging.getLogger(__name__)

_MIN_BIAS = -1e9
"""The bias of an id that is never sampled; JSON has no infinity."""
_IDLE_SECONDS = 10.0
"""A server may still be ending requests that it has answered, or whose connection was closed."""
_BYTES_PER_SECOND = 1e7
"""Slower networks are not waited for."""
_AFTER_LONGEST = 5
"""Tokens that fit after the longest prompt that a server accepts."""
_UNUSED = 2
"""Tokens of its context that a server leaves unused."""


class SGLangRollout(ServedRollout):
    """Generates with a separately started SGLang server (docs/generation.md); checks options before models load."""

    def __init__(self, args: OPSDConfig) -> None:
        sampling_params(args, end_ids=[])
        super().__init__(args, SGLangClient)

    def __str__(self) -> str:
        return f"an SGLang server at {self._args.sglang_server_url}"

    def _sampled(self, end_ids: list[int], masked: list[str]) -> dict[str, Any]:
        options = sampling_params(self._args, end_ids)
        bias = {**(options.get("logit_bias") or {}), **dict.fromkeys(masked, _MIN_BIAS)}
        return {**options, "logit_bias": bias} if bias else options

    def _weights(self) -> list[Weight]:
        return weights_of(self._trainer.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangFacts(Facts):
    """The configuration that a server reports."""

    device: str
    """The type of its device: `"cuda"`, `"cpu"`, ..."""
    longest_prompt: int
    """Tokens of the longest prompt that it accepts."""
    workers: int
    """Processes that hold a part of the weights."""

    @property
    def room(self) -> int:
        """Tokens of prompt and completion together."""
        return self.context - _UNUSED


class _Info(Schema):
    dtype: str
    device: str
    dp_size: int
    pp_size: int
    tp_size: Count
    page_size: Count
    max_req_input_len: Count
    enable_deterministic_inference: bool


class _Done(Schema):
    success: bool = False


class SGLangClient(GenerationClient):
    """Requests completions from an SGLang server, and sends it weights in a process group with its workers."""

    kind = ServerKind(
        name="SGLang",
        subject="The SGLang server",
        option="sglang_server_url",
        address="`sglang_server_url`",
        timeout="sglang_server_timeout",
        start="as docs/generation.md says",
        token=ROLLOUT_TOKEN,
        health_seconds=30.0,  # the check generates a token, which takes a second, and up to 20 on a busy server
    )
    longer_context = "a larger `--context-length` or more memory for its cache"
    facts: SGLangFacts
    _group: WeightGroup | None = None
    _run, _sent = "", 0

    @staticmethod
    def address(args: OPSDConfig) -> str:
        return str(args.sglang_server_url).rstrip("/")

    def read_facts(self) -> SGLangFacts:
        info = self.http.get("/server_info").parse(_Info)
        dtype = {"float": "float32", "half": "float16"}.get(info.dtype, info.dtype)
        if dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(
                f"The SGLang server was started with `--dtype {info.dtype}`, and does not say what that became: start "
                "it with `--dtype bfloat16`, 'float32' or 'float16', as the student computes."
            )
        for size, flag in ((info.dp_size, "--data-parallel-size"), (info.pp_size, "--pipeline-parallel-size")):
            if size != 1:
                raise ValueError(
                    f"The SGLang server was started with `{flag} {size}`: SGLang takes new weights only without; use "
                    "`--tensor-parallel-size`."
                )
        if info.enable_deterministic_inference:
            raise ValueError(
                "The SGLang server was started with `--enable-deterministic-inference`, which samples all completions "
                "with the same numbers: start it without."
            )
        longest = info.max_req_input_len - 1  # the server refuses this many
        return SGLangFacts(
            dtype=getattr(torch, dtype), device=info.device, longest_prompt=longest, workers=info.tp_size,
            context=longest + _AFTER_LONGEST + _UNUSED, block_size=info.page_size,
        )  # fmt: skip

    def write(self, rows: Sequence[Row]) -> list[Completion]:
        """Generates one completion for each prompt, in one request, so that the server can fill its batches.

        A prompt that fills the server's context gets an empty completion.
        """
        fitting, found = self._fitting(rows)
        if fitting:
            request = GenerateRequest([rows[number] for number in fitting], self.facts.room, self.version)
            response = self.http.post("/generate", json=request.body, max_bytes=request.max_bytes)
            found.update(zip(fitting, request.completions(response), strict=True))
        return [found[number] for number in range(len(rows))]

    def write_each(self, rows: Sequence[Row]) -> SGLangRows:
        fitting, unsent = self._fitting(rows)
        requests = [GenerateRequest([rows[number]], self.facts.room, self.version) for number in fitting]
        responses = self.http.post_each(
            "/generate", [(one.body, one.max_bytes) for one in requests],
            lambda number, response: requests[number].completions(response)[0],
        )  # fmt: skip
        return SGLangRows(unsent, fitting, responses)

    def _fitting(self, rows: Sequence[Row]) -> tuple[list[int], dict[int, Completion]]:
        """The numbers of the prompts that fit the server, and empty completions for the others."""
        fitting, empty = [], {}
        for number, (ids, _) in enumerate(rows):
            if len(ids) <= self.facts.longest_prompt:
                fitting.append(number)
            else:
                empty[number] = Completion(prompt_ids=ids, completion_ids=[], prompt_logprobs=[], logprobs=[])
        if empty:
            logger.warning(
                f"{len(empty)} prompts of a batch have more than {self.facts.longest_prompt} tokens, the longest that "
                "the SGLang server reads: their completions are empty."
            )
        return fitting, empty

    def try_bias(self, token: int) -> Response:
        sampling = {"max_new_tokens": 1, "logit_bias": {str(token): 0.0}}
        return self.http.post("/generate", json={"input_ids": [0], "sampling_params": sampling})

    def connect(self, device: torch.device) -> torch.device:
        """Joins a process group with the server's workers to broadcast weights; returns where these have to be."""
        with suppress(ServerError):  # another server may be at this address now
            self.close()  # a connection of another student
        on_gpus = device.type == self.facts.device == "cuda"
        backend = "nccl" if on_gpus else "gloo"
        # A run that was killed may have left it open; a server that is not updating refuses this.
        self.http.post("/end_weight_update", json={})
        self._name = f"trl_opsd_{uuid4().hex}"
        group = WeightGroup(self._name, urlsplit(self.url).hostname or "", self.facts.workers, backend)
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(
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
                joining.result()  # the server may say why
                raise ServerError(
                    f"The SGLang server at {self.url} did not come to {group.address} port {group.port} of this "
                    f"machine to be sent weights: {error}"
                ) from error
            try:
                joining.result()
            except ServerError:
                group.abandon()
                raise
        self._group = group
        return device if on_gpus else torch.device("cpu")

    def check_connected(self) -> None:
        self._connected()

    def _connected(self) -> WeightGroup:
        if self._group is None:
            raise ServerError(
                f"The SGLang server at {self.url} is not connected to any more, after an update has failed or the "
                "rollout was closed: begin the training anew."
            )
        return self._group

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces all weights, bucket by bucket. If it fails, those of the server are unknown."""
        group = self._connected()
        self._group = self.version = None  # until all have arrived
        self._run, self._sent = self._run or uuid4().hex[:8], self._sent + 1
        version = f"{self._run}-{self._sent}"
        try:
            self._call("begin_weight_update", selector="target")
            with ThreadPoolExecutor(1) as pool:
                for bucket in _buckets(weights):
                    self._send(pool, group, bucket)
            self._call("end_weight_update")
            self._call("update_weight_version", new_version=version, abort_all_requests=False)
        except BaseException:
            group.abandon()
            raise
        self._group, self.version = group, version

    def _send(self, pool: ThreadPoolExecutor, group: WeightGroup, bucket: list[tuple[str, Tensor]]) -> None:
        receiving = pool.submit(
            self._call,
            "update_weights_from_distributed",
            names=[name for name, _ in bucket],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            shapes=[list(tensor.shape) for _, tensor in bucket],
            group_name=self._name,
            selector="target",
            flush_cache=False,
        )
        seconds = MEET_SECONDS + sum(tensor.nbytes for _, tensor in bucket) / _BYTES_PER_SECOND
        sent = [group.send(tensor, seconds) for _, tensor in bucket]
        receiving.result()  # before waiting: a server that refuses does not receive
        for one in sent:
            one.wait()

    def forget_prefixes(self) -> None:
        """Resets the prefix cache, which was computed with earlier weights."""
        response = self.http.post("/flush_cache", params={"timeout": _IDLE_SECONDS})
        if response.status != 200:
            raise ServerError(
                f"The SGLang server at {self.url} did not reset its prefix cache, as it does while it serves other "
                f"requests; completions would come from earlier weights. Use it for a single training run. It says: "
                f"{response.text[:300]}"
            )

    def close(self) -> None:
        """Leaves the group, so that another training run can use the server."""
        group, self._group = self._group, None
        if group is not None:
            try:
                self._call("destroy_weights_update_group", group_name=self._name)
            finally:
                group.close()

    def _call(self, path: str, within: float | None = None, **body: Any) -> None:
        response = self.http.post(f"/{path}", json=body, seconds=within).check_status()
        if not response.parse(_Done).success:
            raise ServerError(f"{response.request} answered {response.text[:500]}.")


def _buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Groups weights, since the server holds those of a request besides its own."""
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
