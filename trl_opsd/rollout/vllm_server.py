"""A vLLM server: what it is sent, how its responses are read, and how TRL's client sends weights."""

from __future__ import annotations

import atexit
import gc
import json
import os
import socket
import weakref
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from time import monotonic, sleep
from typing import Annotated, Any
from urllib.parse import urlsplit

import torch
from accelerate.utils import patch_environment
from safetensors.torch import save_file

from trl_opsd._compat.http import Count, HTTPClient, Response, Schema, ServerKind, TokenId, at, warn_in_main
from trl_opsd._compat.peft import CausalLM, Weight, is_peft, without_peft
from trl_opsd._compat.trl import VLLMClient
from trl_opsd._compat.urls import ROLLOUT_TOKEN, is_this_machine, url_of
from trl_opsd._compat.values import pydantic
from trl_opsd._compat.versions import untested
from trl_opsd._compat.vllm.supported import HEAD, may_have_head, why_no_adapter
from trl_opsd.config import OPSDConfig
from trl_opsd.errors import ServerError
from trl_opsd.rollout.vllm_sampling import request_options
from trl_opsd.rollout.weight_sync import Layers, Stream, adapter_layers, as_saved_by_peft, weights_of
from trl_opsd.types import Completion

_ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --max-lora-rank 64 --max-loras 2"
"""How to start a server that loads adapters: two at a time, as a new one comes before the old one goes."""
_LARGEST_BLOCK = 128
"""Tokens in a block of a prefix cache at most, of servers that do not tell."""
_ABORT_SECONDS = 10.0
"""A server ends requests whose connection was closed only after the current decoding step."""


# ---- Responses -------------------------------------------------------------------------------------------------------


class _Models(Schema):
    first: str = at("data", 0, "id")
    context: Count = at("data", 0, "max_model_len")


class _Info(Schema):
    dtype: str = at("vllm_config", "model_config", "dtype")
    block_size: Count = at("vllm_config", "cache_config", "block_size")
    weight_transfer_config: Any = at("vllm_config", "weight_transfer_config", default=None)
    max_lora_rank: Count | None = at("vllm_config", "lora_config", "max_lora_rank", default=None)


class _Version(Schema):
    version: str


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


class VLLMServer:
    """A vLLM server, which does not report which weights it used."""

    kind = ServerKind(
        name="vLLM server",
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
    version: str | None = None
    """The weights that completions have to be generated with, where the server reports them."""
    adapter: str | None = None
    """The adapter that completions are requested from, by its name on the server."""
    _sender: _Sender | None = None

    @staticmethod
    def address(args: OPSDConfig) -> str:
        """The address of the server, without a trailing slash."""
        given = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        return url_of("vllm_server_base_url", given)

    def __init__(self, args: OPSDConfig, http: HTTPClient) -> None:
        """Reads its configuration; a `ValueError` if it can be sent neither weights nor adapters."""
        self._args, self.http = args, http
        about = http.get("/version")
        if about.status == 200 and (warning := untested({"vllm": about.parse(_Version).version})):
            warn_in_main(f"The server at {http.url} has another vLLM. {warning}")
        model = http.get("/v1/models").parse(_Models)
        self._model, self.context = model.first, model.context
        response = http.get("/server_info", params={"config_format": "json"})
        info = None if response.status == 404 else response.parse(_Info)
        # Without development mode it does not tell its dtype and its largest rank.
        self.dtype: torch.dtype | None = getattr(torch, info.dtype.removeprefix("torch.")) if info else None
        self.block_size = info.block_size if info else _LARGEST_BLOCK
        self.max_rank = info.max_lora_rank if info else None
        self.no_weights = self.no_adapters = ""
        if info is None or info.weight_transfer_config is None:
            self.no_weights = (
                f"The vLLM server at {http.url} cannot be sent weights: start it with `VLLM_SERVER_DEV_MODE=1` in its "
                """environment and `--weight-transfer-config '{"backend": "nccl"}'`, as docs/generation.md says"""
            )
        if args.vllm_weight_sync != "full":
            # Asks for an adapter that is not there; the error says whether it was looked for.
            nowhere = {"lora_name": "trl_opsd-none", "lora_path": "/nonexistent/trl_opsd"}
            said = http.post("/v1/load_lora_adapter", json=nowhere)
            if nowhere["lora_path"] not in said.text:
                self.no_adapters = f"it loads no adapters while it runs ({said.status}): start it with `{_ADAPTERS}`"
        if self.no_weights and (self.no_adapters or args.vllm_weight_sync == "full"):
            raise ValueError(f"{self.no_weights}. Adapters: {self.no_adapters or 'excluded by `vllm_weight_sync`'}.")

    def why_no_adapter(self, model: CausalLM) -> str | None:
        """Why an adapter of this student cannot be sent alone, or `None` if it can."""
        if self.no_adapters or not is_peft(model):
            return self.no_adapters or None
        return why_no_adapter(without_peft(model).config, "auto", adapter_layers(model))

    def body(self, ids: list[int], options: dict[str, Any]) -> dict[str, Any] | None:
        """The request for a prompt; `None` where there is no room after it."""
        if options["max_tokens"] < 1:
            return None
        # Ids instead of text, which does not determine the ids.
        same = {"model": self.adapter or self._model, "return_token_ids": True, "return_tokens_as_token_ids": True}
        return {**same, **options, "prompt": ids}

    def read(self, ids: list[int], body: dict[str, Any], version: str | None, response: Response) -> Completion:
        """The completion in the response to a request."""
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

    def weights(self, model: CausalLM) -> list[Weight]:
        """The weights to send: no head to a model that always uses its embeddings instead."""
        has_head = may_have_head(model.config)
        return [weight for weight in weights_of(model) if has_head or weight.name != HEAD]

    def open(self, device: torch.device) -> torch.device:
        """Connects to send weights, again if it was connected, and returns the device where they have to be."""
        self.close()
        gc.collect()  # a dropped trainer's connection
        port = self._args.vllm_group_port
        try:
            socket.create_server(("", port)).close()
        except OSError as error:  # else the server would connect to what listens there, and both wait for minutes
            raise ValueError(
                f"Cannot listen on `vllm_group_port={port}`, to which the vLLM server connects ({error}): close the "
                "rollout of the trainer that does (`trainer.rollout.close()`), or set it to a free port."
            ) from error
        self._sender = _Sender(self.http, port)
        # A server on this machine is met on loopback, not on a public address.
        is_here = is_this_machine(urlsplit(self.http.url).hostname) and "VLLM_HOST_IP" not in os.environ
        try:
            with patch_environment(**({"VLLM_HOST_IP": "127.0.0.1"} if is_here else {})):
                self._sender.init_communicator(device)
        except BaseException:
            self.close()  # else the port would be held
            raise
        # TRL registers it, which would keep the connection of a dropped trainer until the program ends.
        atexit.unregister(self._sender.close_communicator)
        weakref.finalize(self, self._sender.close_communicator)
        return device

    def update(self, stream: Stream) -> None:
        """Replaces all weights while no row is generated: new weights during a decoding step would end the server."""
        assert self._sender is not None, "a closed rollout sends nothing"
        self.reset_prefixes()
        self._sender.update_named_params(stream.announced(), iter(stream))

    def reset_prefixes(self) -> None:
        """Resets the prefix cache; waits for rows that are being cancelled."""
        began = monotonic()
        while True:
            response = self.http.post("/reset_prefix_cache", json={}).check_status()
            if not response.content or response.parse(_Reset).success:
                return
            if monotonic() - began >= _ABORT_SECONDS:
                raise ServerError(
                    f"The vLLM server at {self.http.url} did not reset its prefix cache because it is serving other "
                    "requests; completions would come from earlier weights. Use it for a single training run."
                )
            sleep(0.1)

    def close(self) -> None:
        """Disconnects, so that another training run can use the server."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close_communicator()

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
        return Path(self._args.output_dir).absolute() / "_served_adapters" / name  # which is not pushed to a hub


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
