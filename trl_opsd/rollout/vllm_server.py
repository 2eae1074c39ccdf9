"""Generates with a vLLM server: what it is sent, how its responses are read, and how TRL's client sends weights."""

from __future__ import annotations

import atexit
import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from time import monotonic, sleep
from typing import Annotated, Any
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import torch
from accelerate.utils import patch_environment
from safetensors.torch import save_file

from trl_opsd._compat.peft import CausalLM, Weight, is_peft, without_peft
from trl_opsd._compat.trl import VLLMClient
from trl_opsd._compat.values import pydantic
from trl_opsd._compat.vllm.supported import HEAD, may_have_head, why_no_adapter
from trl_opsd.config import OPSDConfig
from trl_opsd.errors import ServerError
from trl_opsd.http.client import Count, HTTPClient, Response, Schema, ServerKind, TokenId, at
from trl_opsd.http.urls import ROLLOUT_TOKEN, is_this_machine, url_of
from trl_opsd.rollout.served import Facts, GenerationClient
from trl_opsd.rollout.vllm_sampling import request_options
from trl_opsd.rollout.weight_sync import Layers, Stream, adapter_layers, as_saved_by_peft
from trl_opsd.types import Completion

SENDS_FROM = "cuda"
"""The type of device that TRL's client can send weights from: it has only NCCL."""

_ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --max-lora-rank 64 --max-loras 2"
"""How to start a server that loads adapters: two at a time, as a new one comes before the old one goes."""
_LARGEST_BLOCK = 128
"""Tokens in a block of a prefix cache at most, of servers that do not tell."""
_ABORT_SECONDS = 10.0
"""A server ends requests whose connection was closed only after the current decoding step."""


# ---- Responses -------------------------------------------------------------------------------------------------------


class _Models(Schema):
    first: str = at("data", 0, "id")
    context: Count | None = at("data", 0, "max_model_len", default=None)


class _Info(Schema):
    dtype: str = at("vllm_config", "model_config", "dtype")
    max_model_len: Count = at("vllm_config", "model_config", "max_model_len")
    block_size: Count = at("vllm_config", "cache_config", "block_size")
    weight_transfer_config: Any = at("vllm_config", "weight_transfer_config", default=None)
    max_lora_rank: Count | None = at("vllm_config", "lora_config", "max_lora_rank", default=None)


class _WorldSize(Schema):
    world_size: Count


class _Reset(Schema):
    success: bool = True


class _TokenLogprob(Schema):
    logprob: pydantic.FiniteFloat


class _Choice(Schema):
    token_ids: list[TokenId]
    prompt_token_ids: list[TokenId]
    logprobs: list[pydantic.FiniteFloat] = at("logprobs", "token_logprobs", default=[])
    prompt_logprobs: list[dict[str, _TokenLogprob] | None] | None = None


class _Completions(Schema):
    choices: Annotated[list[_Choice], pydantic.Field(min_length=1, max_length=1)]


# ---- Requests --------------------------------------------------------------------------------------------------------


def check_sends(device: torch.device) -> None:
    """Refuses a device from which whole weights cannot be sent."""
    if device.type != SENDS_FROM:
        raise ValueError(
            f"`vllm_mode='server'` on the device '{device}': whole weights are sent to a vLLM server with NCCL, which "
            "needs a CUDA device. Train an adapter (`peft_config`) and start a server that loads adapters, as "
            "docs/generation.md says, or use an SGLang server (`sglang_server_url`)."
        )


class VLLMServerClient(GenerationClient):
    """Requests completions from a vLLM server, and sends it weights. It does not report which weights it used."""

    kind = ServerKind(
        name="vLLM",
        subject="The vLLM server",
        address="`vllm_server_host`, `vllm_server_port` or `vllm_server_base_url`",
        timeout="vllm_server_timeout",
        start="as described in docs/generation.md",
        token=ROLLOUT_TOKEN,
        health_seconds=10.0,
    )
    path = "/v1/completions"
    longer_context = "a larger `--max-model-len`"
    min_bias = -100.0  # the lowest that a server accepts
    sampling = staticmethod(request_options)
    _sender: _Sender | None = None

    @classmethod
    def check(cls, args: OPSDConfig) -> None:
        if args.vllm_enable_sleep_mode:
            raise ValueError(
                "`vllm_enable_sleep_mode=True` with `vllm_mode='server'`: a server has its own device and does not "
                "sleep: set it to False."
            )
        super().check(args)
        if args.vllm_weight_sync == "full":
            check_sends(args.device)

    @staticmethod
    def address(args: OPSDConfig) -> str:
        given = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        return url_of("vllm_server_base_url", given)

    @classmethod
    def weights(cls, model: CausalLM) -> list[Weight]:
        has_head = may_have_head(model.config)
        return [weight for weight in super().weights(model) if has_head or weight.name != HEAD]

    def read_facts(self) -> Facts:
        model = self.http.get("/v1/models").parse(_Models)
        response, why = self.http.get("/server_info", params={"config_format": "json"}), ""
        info = None if response.status == 404 else response.parse(_Info)
        if info is None:
            why = (
                f"The vLLM server at {self.url} does not expose its development endpoints, which receive weights: "
                "start it with `VLLM_SERVER_DEV_MODE=1` in its environment"
            )
        elif info.weight_transfer_config is None:
            why = (
                f"The vLLM server at {self.url} cannot be sent weights: start it with "
                """`--weight-transfer-config '{"backend": "nccl"}'`, as described in docs/generation.md"""
            )
        no_adapters = "`vllm_weight_sync='full'`" if self.args.vllm_weight_sync == "full" else self._why_no_adapters()
        length = model.context if info is None else info.max_model_len
        if why and (no_adapters or length is None):
            raise ValueError(f"{why}. Nor can it be sent adapters: {no_adapters or 'its context length is unknown'}.")
        assert length is not None, "an info has it"
        return Facts(
            model=model.first,
            dtype=None if info is None else getattr(torch, info.dtype.removeprefix("torch.")),
            context=length,
            longest_prompt=length,
            block_size=_LARGEST_BLOCK if info is None else info.block_size,
            no_weights=why,
            no_adapters=no_adapters,
            max_rank=None if info is None else info.max_lora_rank,
        )

    def _why_no_adapters(self) -> str:
        """Asks for an adapter that is not there, and reads from the error whether one could be."""
        nowhere = {"lora_name": "trl_opsd-none", "lora_path": "/nonexistent/trl_opsd"}
        said = self.http.post("/v1/load_lora_adapter", json=nowhere)
        if nowhere["lora_path"] in said.text:  # looked for
            return ""
        return f"the vLLM server loads no adapters while it runs ({said.status}): start it with `{_ADAPTERS}`"

    def why_no_adapter(self, model: CausalLM) -> str | None:
        return super().why_no_adapter(model) or (
            why_no_adapter(without_peft(model).config, "auto", adapter_layers(model)) if is_peft(model) else None
        )

    def put_adapter(self, name: str, layers: Layers) -> None:
        """Writes it to disk, where alone a vLLM server can read it, in the folder of the run."""
        folder = self._folder(name)
        tensors, config = as_saved_by_peft(layers)
        try:
            folder.mkdir(parents=True)
            save_file(tensors, folder / "adapter_model.safetensors")
            (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
            said = self.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)})
            where = f" It reads {folder}, below `output_dir`, which has to be on a disk that both machines have."
            said.check_status(where if said.status == 404 else "")
        except BaseException:
            rmtree(folder, ignore_errors=True)
            raise

    def drop_adapter(self, name: str) -> None:
        rmtree(self._folder(name), ignore_errors=True)
        with suppress(OSError):
            self._folder(name).parent.rmdir()  # once it is empty
        self.http.post("/v1/unload_lora_adapter", json={"lora_name": name}).check_status()

    def _folder(self, name: str) -> Path:
        return Path(self.args.output_dir).absolute() / "_served_adapters" / name  # which is not pushed to a hub

    def body(self, ids: list[int], options: dict[str, Any]) -> dict[str, Any]:
        # Ids instead of text, which does not determine the ids.
        same = {"model": self.adapter or self.facts.model, "return_token_ids": True, "return_tokens_as_token_ids": True}
        return {**same, **options, "prompt": ids}

    def read(self, ids: list[int], body: dict[str, Any], version: str | None, response: Response) -> Completion:
        (choice,) = response.parse(_Completions).choices
        scores: dict[str, list[float]] = {"logprobs": [], "prompt_logprobs": []}
        if body.get("logprobs") is not None:
            scores["logprobs"] = self._each(choice.logprobs, choice.token_ids, "logprobs")
        if body.get("prompt_logprobs") is not None:  # the first token has no context
            scored = zip(choice.prompt_logprobs or (), ids, strict=False)
            found = [entry[str(token)].logprob for entry, token in scored if entry and str(token) in entry]
            scores["prompt_logprobs"] = self._each(found, ids[1:], "prompt_logprobs")
        return Completion(prompt_ids=choice.prompt_token_ids, completion_ids=choice.token_ids, **scores)

    def _each(self, found: list[float], tokens: list[int], name: str) -> list[float]:
        if len(found) != len(tokens):
            raise ServerError(f"The vLLM server returned {len(found)} of {len(tokens)} log-probabilities, {name}.")
        return found

    def open(self, device: torch.device) -> torch.device:
        """Connects to send weights; a server on this machine is met on loopback, not on a public address.

        An earlier connection of this process over the same port is closed: only one client at a time can have it.
        """
        check_sends(self.args.device)
        port = self.args.vllm_group_port
        _connected.get(port, self).close()  # the earlier client listens at the port until it is closed
        self.close()
        _check_free(port)
        self._sender = _Sender(self.http, port)
        try:
            is_here = is_this_machine(urlsplit(self.url).hostname) and "VLLM_HOST_IP" not in os.environ
            with patch_environment(**({"VLLM_HOST_IP": "127.0.0.1"} if is_here else {})):
                self._sender.init_communicator(device)
        except BaseException:
            self.close()  # else the port would be held
            raise
        _connected[port] = self
        return device

    def connected(self) -> _Sender:
        if self._sender is None:  # a vLLM server does not say whose weights it has
            raise ServerError(
                f"The vLLM server at {self.url} is disconnected: the rollout was closed, or another trainer in this "
                f"process connected through `vllm_group_port={self.args.vllm_group_port}`. Build a new "
                "trainer; two at the same time each need their own server and port."
            )
        return self._sender

    def update(self, stream: Stream) -> None:
        """Replaces all weights while no row is generated: new weights during a decoding step would end the server."""
        sender = self.connected()
        self.reset_prefixes()
        sender.update_named_params(stream.announced(), iter(stream))

    def reset_prefixes(self) -> None:
        """Resets the prefix cache; waits for rows that are being cancelled."""
        began = monotonic()
        while True:
            response = self.http.post("/reset_prefix_cache", json={}).check_status()
            if not response.content or response.parse(_Reset).success:
                return
            if monotonic() - began >= _ABORT_SECONDS:
                raise ServerError(
                    f"The vLLM server at {self.url} did not reset its prefix cache because it is serving other "
                    "requests; completions would come from earlier weights. Use it for a single training run."
                )
            sleep(0.1)

    def close(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            # TRL registers it, which would keep the connection until the program ends.
            atexit.unregister(sender.close_communicator)
            sender.close_communicator()


_connected: WeakValueDictionary[int, VLLMServerClient] = WeakValueDictionary()
"""The client of this process that last used each group port."""


class _Sender(VLLMClient):
    """The part of TRL's client that sends weights, with our requests: TRL's wait forever, and are sent again."""

    def __init__(self, http: HTTPClient, port: int) -> None:
        # Not TRL's `__init__`, which sends requests.
        self._http, self.base_url, self.group_port = http, http.url, port
        self.communicator, self._updating_weights = None, False

    def get_server_info(self) -> dict[str, Any]:
        return {"weight_transfer_config": "checked at the start"}

    def get_world_size(self) -> int:
        return self._http.get("/get_world_size").parse(_WorldSize).world_size

    def _post(self, url: str, **request: Any) -> dict[str, Any]:
        self._http.post(url.removeprefix(self.base_url), **request).check_status()
        return {}  # TRL reads nothing of it


def _check_free(port: int) -> None:
    """Rejects a port that is in use: the server would connect to that, and both would wait for minutes."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ValueError(
                f"Cannot listen on `vllm_group_port={port}`, to which the vLLM server connects ({error}): set it to a "
                "free port; another training on this machine may use it."
            ) from error
