"""An SGLang server: what it is sent, how its responses are read, and how it gets weights."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pickle import dumps
from typing import Any, Literal
from urllib.parse import urlsplit
from uuid import uuid4

import torch
from torch import Tensor

from trl_opsd._compat.http import Count, HTTPClient, Response, Schema, ServerKind, TokenId, shown
from trl_opsd._compat.peft import CausalLM
from trl_opsd._compat.urls import ROLLOUT_TOKEN, url_of
from trl_opsd._compat.values import pydantic
from trl_opsd._compat.weight_group import MEET_SECONDS, WeightGroup
from trl_opsd.config import OPSDConfig
from trl_opsd.errors import ServerError
from trl_opsd.options.rules import refuse
from trl_opsd.rollout.weight_sync import Layers, as_saved_by_peft, buckets, weights_of
from trl_opsd.types import Completion

_ADAPTERS = "--enable-lora --max-lora-rank 64 --lora-target-modules all"
"""What an SGLang server is started with to load adapters."""
_IDLE_SECONDS = 10.0
"""A server may still be ending requests that it has answered, or whose connection was closed."""
_BYTES_PER_SECOND = 1e7
"""Slower networks are not waited for."""
_AFTER_LONGEST = 5
"""Tokens that fit after the longest prompt that a server accepts."""
_UNUSED = 2
"""Tokens of its context that a server leaves unused."""
_GRAMMARS = ("regex", "json_schema", "ebnf", "structural_tag")
"""Options that end a completion where the grammar does."""
_KNOWN = (
    "temperature", "frequency_penalty", "presence_penalty", "min_new_tokens", "logit_bias", "custom_params",
    "stop_token_ids", "ignore_eos", *_GRAMMARS,
)  # fmt: skip
"""Options that `generation_kwargs` may have. Others are ignored by a server, set here, or about text."""
_OF_THE_PROTOCOL = ("logprobs", "prompt_logprobs", "max_tokens", "seed")
"""Options that SGLang names differently or ignores."""


def sampling_params(args: OPSDConfig, end_ids: list[int]) -> dict[str, Any]:
    """The `sampling_params` of every completion but its length; it ends with the first of `end_ids`."""
    given = args.generation_kwargs or {}
    for name, value in given.items():
        if name not in _KNOWN:
            raise ValueError(
                f"`generation_kwargs={{{name!r}: {value!r}}}` is not an option of a rollout with SGLang: expected one "
                f"of {', '.join(_KNOWN)}."
            )
    both = given.get("ignore_eos") and given.get("stop_token_ids")
    refuse([(both, f"`generation_kwargs={given}`", "SGLang's 'ignore_eos' ignores 'stop_token_ids'; remove one")])
    return {
        "temperature": args.temperature,
        "top_p": 1.0 if args.top_p is None else args.top_p,
        "top_k": args.top_k or -1,  # -1: all tokens
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty or 1.0,
        **given,
        "stop_token_ids": end_ids,
        "ignore_eos": not end_ids,
    }


# ---- Responses -------------------------------------------------------------------------------------------------------

_Logprob = tuple[pydantic.FiniteFloat | None, TokenId, Any]
"""Log-probability, token id, and its text."""


class _WeightSpan(Schema):
    version: str


class _Meta(Schema):
    model_config = pydantic.ConfigDict(strict=False)  # tuples are lists in JSON
    prompt_tokens: int
    finish_reason: dict[str, Any]
    weight_version: str | None = None
    weight_versions: list[_WeightSpan] | None = None
    input_token_logprobs: list[_Logprob] | None = None
    output_token_logprobs: list[_Logprob] | None = None


class _Row(Schema):
    output_ids: list[TokenId]
    meta_info: _Meta

    def check_end(self, sampling: dict[str, Any]) -> None:
        """Raises `ServerError` unless it ended as requested."""
        ids, reason = self.output_ids, self.meta_info.finish_reason
        limit, ends, kind = sampling["max_new_tokens"], sampling["stop_token_ids"], reason.get("type")
        if kind == "length" and len(ids) == limit:
            return
        is_stopped = kind == "stop" and bool(ids) and ids[-1] == reason.get("matched")
        if is_stopped and (ids[-1] in ends or any(sampling.get(grammar) for grammar in _GRAMMARS)):
            return
        hint = " Start it with a checkpoint that has the student's end tokens." if is_stopped else ""
        raise ServerError(
            f"The SGLang server generated {len(ids)} tokens and reported the finish reason {shown(reason)}: expected "
            f"{limit} tokens, or fewer with one of {shown(ends)} as the last.{hint}"
        )


def _logprobs(entries: list[_Logprob] | None, ids: list[int]) -> list[float]:
    """The log-probabilities of tokens; the first of a prompt has none."""
    found = [(token, logprob) for logprob, token, _ in entries or () if logprob is not None]
    if [token for token, _ in found] != ids:
        raise ServerError(
            f"The SGLang server returned the log-probabilities {shown(entries)}: expected a finite one for each of "
            f"{len(ids)} tokens."
        )
    return [logprob for _, logprob in found]


# ---- Requests --------------------------------------------------------------------------------------------------------


class _Info(Schema):
    dtype: Literal["float", "half", "float32", "float16", "bfloat16"]  # of 'auto' it does not tell the actual one
    device: str
    dp_size: Literal[1]  # SGLang takes new weights only without these two; use `--tensor-parallel-size`
    pp_size: Literal[1]
    tp_size: Count
    page_size: Count
    max_req_input_len: Count
    enable_deterministic_inference: Literal[False]  # which samples all completions with the same random numbers
    enable_lora: bool | None = None
    max_lora_rank: int | None = None


class _Done(Schema):
    success: bool = False


class SGLangServer:
    """An SGLang server, which is sent weights in a process group with its workers."""

    kind = ServerKind(
        name="SGLang server",
        address="`sglang_server_url`",
        timeout="vllm_server_timeout",
        start="as described in docs/generation.md",
        token=ROLLOUT_TOKEN,
        health_seconds=30.0,  # the check generates a token, which takes a second, and up to 20 on a busy server
    )
    path = "/generate"
    longer_context = "a larger `--context-length` or more memory for its cache"
    min_bias = -1e9  # JSON has no infinity
    sampling = staticmethod(sampling_params)
    weights = staticmethod(weights_of)
    no_weights = ""
    version: str | None = None
    """The weights that completions have to be generated with."""
    adapter: str | None = None
    """The adapter that completions are requested from, by its name on the server."""
    _group: WeightGroup | None = None

    @staticmethod
    def address(args: OPSDConfig) -> str:
        """The address of the server, without a trailing slash."""
        return url_of("sglang_server_url", args.sglang_server_url)

    def __init__(self, args: OPSDConfig, http: HTTPClient) -> None:
        """Reads its configuration; a `ServerError` if it cannot work."""
        self.http = http
        info = http.get("/server_info").parse(_Info)
        self.dtype: torch.dtype = getattr(torch, info.dtype)
        self.context = info.max_req_input_len - 1 + _AFTER_LONGEST + _UNUSED
        self.block_size, self.max_rank = info.page_size, info.max_lora_rank
        self._device, self._workers, self._takes_adapters = info.device, info.tp_size, bool(info.enable_lora)

    def why_no_adapter(self, model: CausalLM) -> str | None:
        """Why an adapter cannot be sent alone, or `None` if it can."""
        return None if self._takes_adapters else f"the server was started without adapters: use `{_ADAPTERS}`"

    def body(self, ids: list[int], options: dict[str, Any]) -> dict[str, Any] | None:
        """The request for a prompt; `None` for one that the server refuses, as it is too long."""
        room = self.context - _UNUSED - len(ids)
        if room < _AFTER_LONGEST:
            return None
        sampling = {name: value for name, value in options.items() if name not in _OF_THE_PROTOCOL}
        of_prompt = options.get("prompt_logprobs") is not None
        return {
            "input_ids": ids,
            "sampling_params": {"stop_token_ids": [], **sampling, "max_new_tokens": min(options["max_tokens"], room)},
            "return_logprob": of_prompt or options.get("logprobs") is not None,
            "logprob_start_len": 0 if of_prompt else -1,
            **({} if self.adapter is None else {"lora_path": self.adapter}),
        }

    def read(self, ids: list[int], body: dict[str, Any], version: str | None, response: Response) -> Completion:
        """The completion in the response to a request, which has to be of the weights `version`."""
        found = response.parse(_Row)
        meta = found.meta_info
        if meta.prompt_tokens != len(ids):
            raise ServerError(f"The SGLang server counted {meta.prompt_tokens} tokens in a prompt of {len(ids)}.")
        found.check_end(body["sampling_params"])
        versions = {meta.weight_version, *(span.version for span in meta.weight_versions or ())}
        if version and versions != {version}:
            raise ServerError(
                f"The SGLang server generated with the weights {sorted(map(str, versions))}, but {version!r} were sent "
                "last: another program sent it weights. Use it for a single training run."
            )
        return Completion(
            prompt_ids=ids,
            completion_ids=found.output_ids,
            prompt_logprobs=_logprobs(meta.input_token_logprobs, ids[1:]) if not body["logprob_start_len"] else [],
            logprobs=_logprobs(meta.output_token_logprobs, found.output_ids) if body["return_logprob"] else [],
        )

    def open(self, device: torch.device) -> torch.device:
        """Joins a process group with the server's workers to broadcast weights; returns where these have to be."""
        with suppress(ServerError):  # another server may be at this address now
            self.close()  # a connection of another student
        on_gpus = device.type == self._device == "cuda"
        backend = "nccl" if on_gpus else "gloo"
        # A run that was killed may have left it open; a server that is not updating refuses this.
        self.http.post("/end_weight_update", json={})
        self._name = f"trl_opsd_{uuid4().hex}"
        group = WeightGroup(self._name, urlsplit(self.http.url).hostname or "", self._workers, backend)
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(
                self._call,
                "init_weights_update_group",
                within=MEET_SECONDS,
                master_address=group.address,
                master_port=group.port,
                rank_offset=1,
                world_size=1 + self._workers,
                group_name=self._name,
                backend=backend,
            )
            try:
                group.meet()
            except RuntimeError as error:
                joining.result()  # the server may say why
                raise ServerError(
                    f"The SGLang server at {self.http.url} did not connect to {group.address} port {group.port} of "
                    f"this machine for weight transfer: {error}"
                ) from error
            try:
                joining.result()
            except ServerError:
                group.abandon()
                raise
        self._group = group
        return device if on_gpus else torch.device("cpu")

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces all weights, bucket by bucket. If it fails, those of the server are unknown."""
        group, self._group, self.version = self._group, None, None  # until all have arrived
        if group is None:
            raise ServerError(
                f"The SGLang server at {self.http.url} is disconnected, because an update failed: restart the training."
            )
        version = uuid4().hex
        try:
            self._call("begin_weight_update", selector="target")
            with ThreadPoolExecutor(1) as pool:
                for bucket in buckets(weights, lambda weight: weight[1].nbytes):
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

    def reset_prefixes(self) -> None:
        """Resets the prefix cache."""
        response = self.http.post("/flush_cache", params={"timeout": _IDLE_SECONDS})
        if response.status != 200:
            raise ServerError(
                f"The SGLang server at {self.http.url} did not reset its prefix cache, which happens while it serves "
                "other requests; completions would come from earlier weights. Use it for a single training run. Its "
                f"response: {response.text[:300]}"
            )

    def close(self) -> None:
        """Leaves the process group."""
        group, self._group = self._group, None
        if group is not None:
            try:
                self._call("destroy_weights_update_group", group_name=self._name)
            finally:
                group.close()

    def put_adapter(self, name: str, layers: Layers) -> None:
        """Sends its tensors with the request, so that no disk is shared; the server compares their digests."""
        tensors, config = as_saved_by_peft(layers)
        # A plain pickle has the numbers themselves, where torch's own would have the name of shared memory.
        payload = base64.b64encode(dumps(tensors)).decode()
        digests = {key: sha256(one.view(torch.uint8).numpy().tobytes()).hexdigest() for key, one in tensors.items()}
        self._call(
            "load_lora_adapter_from_tensors",
            lora_name=name,
            config_dict=config,
            serialized_named_tensors=[payload] * self._workers,
            expected_checksums=digests,
        )

    def drop_adapter(self, name: str) -> None:
        """Unloads an adapter."""
        self._call("unload_lora_adapter", lora_name=name)

    def _call(self, path: str, within: float | None = None, **body: Any) -> None:
        response = self.http.post(f"/{path}", json=body, seconds=within).check_status()
        if not response.parse(_Done).success:
            raise ServerError(f"{response.request} returned {response.text[:500]}.")
