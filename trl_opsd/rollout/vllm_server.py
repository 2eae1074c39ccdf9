"""Generates with a vLLM server: the main process sends the requests of all processes and broadcasts the answers.

Rows that are taken as they end are asked for by each process.
"""

from __future__ import annotations

import json
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list

from trl_opsd._compat.vllm.architectures import may_have_head
from trl_opsd._compat.vllm.reload import HEAD
from trl_opsd.config import OPSDConfig
from trl_opsd.host import Host
from trl_opsd.models.head import model_shape
from trl_opsd.rollout.answers import ServerFacts
from trl_opsd.rollout.asking import Asking, RowClient
from trl_opsd.rollout.one_asks import asked_by_main, shared_errors
from trl_opsd.rollout.sampling import request_options
from trl_opsd.rollout.served import ServedRollout
from trl_opsd.rollout.server_client import ServerClient
from trl_opsd.rollout.sessions import check_reached_by_all, machines, session_with
from trl_opsd.rollout.sync_proof import RELATIVE
from trl_opsd.rollout.synced import check_student, dtype_of
from trl_opsd.rollout.weight_sync import Stream, saved_by, weights_of
from trl_opsd.run.bounded_http import Answers
from trl_opsd.types import Completion

logger = get_logger(__name__)

_REQUESTS = 16
"""Maximum of concurrent requests; prompts with the same options share one."""

_MIN_BIAS = -100.0
"""The lowest logit bias that a server accepts."""


class _ServedEngine:
    """A server as an engine. All methods but `write_each` and `close` are collective; each process passes prompts of
    its own.

    Args:
        trainer ([`OPSDTrainer`]):
            Provides the processes.
        client ([`~rollout.server_client.ServerClient`], *optional*):
            The connection to the server in the main process, `None` in the others.
        deadline (`float`):
            Seconds within which any request has to be answered.
    """

    name = "the vLLM server"

    def __init__(self, trainer: Host, client: ServerClient | None, deadline: float) -> None:
        self._client, self._process = client, trainer.accelerator.process_index
        found: list[Any] = [None]
        with shared_errors():
            if client is not None:
                found = [(client.facts(), client.base_url, client.model)]
                client.init_communicator(trainer.accelerator.device)
        ((facts, url, model),) = broadcast_object_list(found)
        self.facts: ServerFacts = facts
        session = partial(session_with, "The vLLM server", "vllm_server_base_url", url, deadline)
        self._asking: Asking = client or RowClient(url, model, session())
        self._machines = machines()

    @property
    def block_size(self) -> int:
        """Tokens in a block of the server's prefix cache."""
        return self.facts.block_size

    def write(self, prompt_ids: list[list[int]], options: list[dict[str, Any]]) -> list[Completion]:
        """Generates one completion for each prompt; processes may have different numbers of them.

        Args:
            prompt_ids (`list[list[int]]`):
                Not padded.
            options (`list[dict]`):
                For each prompt, named as in the server's API.

        Raises:
            ServerError: The server did not answer every request.
        """
        ask = None if self._client is None else partial(_answers, self._client)
        return asked_by_main(list(zip(prompt_ids, options, strict=True)), ask, self._process)

    def write_each(self, prompt_ids: list[list[int]], options: list[dict[str, Any]]) -> Answers[Completion]:
        """Generates as `write`, and returns rows as they end.

        Raises:
            ValueError: The server is at an address that only one of several machines can reach.
        """
        address = "`vllm_server_host` or `vllm_server_base_url`"
        check_reached_by_all(self.name, self._asking.base_url, self._machines, address)
        return self._asking.write_each(prompt_ids, options)

    def load(self, stream: Stream) -> None:
        """Replaces all weights.

        Args:
            stream ([`~rollout.weight_sync.Stream`]):
                Iterated by all processes, and sent by the main one.
        """
        with shared_errors(), stream as weights:
            if self._client is not None:
                self._client.update_named_params(stream.announced(), weights)

    def forget_prefixes(self) -> None:
        """Resets the prefix cache, which was computed with earlier weights."""
        with shared_errors():
            if self._client is not None:
                self._client.forget_prefixes()

    def wipe_cache(self) -> None:
        """No-op: the server loaded real weights; its cache holds no NaNs."""

    def close(self) -> None:
        """Disconnects from the server, so that another training run can use it."""
        if self._client is not None:
            self._client.close_communicator()


class VLLMServerRollout(ServedRollout[_ServedEngine]):
    """Generates with a separately started vLLM server, as `docs/rollouts.md` describes.

    Only the main process talks to the server: it sends the requests of all, and broadcasts the weights, with adapters
    merged on the way. The student itself is not changed. Rows of a `stream` are asked for by each process.

    Args:
        args ([`OPSDConfig`]):
            The options; those that cannot work are rejected here, before a model is loaded.

    Raises:
        ValueError: An option cannot work, or no server answers within `vllm_server_timeout` seconds.
    """

    def __init__(self, args: OPSDConfig) -> None:
        super().__init__(args)
        _check_options(args)
        # The other processes wait in a collective meanwhile, for at most `ddp_timeout`.
        self._deadline = 0.9 * args.ddp_timeout
        with shared_errors():
            self._client = ServerClient(args, self._deadline) if args.process_index == 0 else None

    def __str__(self) -> str:
        args = self._args
        return f"a vLLM server at {args.vllm_server_base_url or f'{args.vllm_server_host}:{args.vllm_server_port}'}"

    def bind(self, trainer: Host) -> None:
        """Reads the server's configuration, and connects to it for weight syncs.

        Raises:
            ValueError: Student, device and server are incompatible.
        """
        check_student(trainer)
        engine = _ServedEngine(trainer, self._client, self._deadline)
        served, dtype, context = engine.facts.dtype, dtype_of(trainer), trainer.limits.context
        if context is None or engine.facts.context < context:
            raise ValueError(
                f"The vLLM server takes {engine.facts.context} tokens of prompt and completion, the student "
                f"{context or 'any number'}: set `vllm_max_model_length={engine.facts.context}`, so that prompts which "
                "are too long are refused before training, or start the server with a larger `--max-model-len`."
            )
        if served != dtype:
            logger.warning(
                f"The vLLM server computes in {served} and the student in {dtype}, so completions differ slightly "
                f"from the student's: start the server with `--dtype {str(dtype).removeprefix('torch.')}`."
            )
        self._has_head = may_have_head(trainer.model.config)
        logger.info("Weight sync with vLLM: 'full', because a server cannot be sent an adapter alone.")
        sampling = request_options(self._args, list(trainer.eos_token_ids))
        masked = *range(trainer.limits.vocabulary, model_shape(trainer.model)[0]), *trainer.placeholders
        sampling["logit_bias"] = {**(sampling.get("logit_bias") or {}), **{str(token): _MIN_BIAS for token in masked}}
        self._set_up(trainer, engine, sampling, max(dtype, served, key=RELATIVE.__getitem__))

    def _send(self) -> int:
        trainer = self._trainer
        how = self._engine.facts.dtype, trainer.accelerator.device, trainer.gathered
        weights = [weight for weight in weights_of(trainer.model) if self._has_head or weight.name != HEAD]
        stream = Stream(weights, *how, saved_by(trainer.model))
        self._engine.load(stream)
        return stream.bytes


def _answers(client: ServerClient, rows: list[tuple[list[int], dict[str, Any]]]) -> list[Completion]:
    """Sends one request for all prompts with the same options, and returns the completions in order."""
    by_options: dict[str, list[int]] = defaultdict(list)
    for number, (_, options) in enumerate(rows):
        by_options[json.dumps(options, sort_keys=True)].append(number)

    def ask(numbers: list[int]) -> list[tuple[int, Completion]]:
        written = client.write([rows[number][0] for number in numbers], rows[numbers[0]][1])
        return list(zip(numbers, written, strict=True))

    with ThreadPoolExecutor(max_workers=_REQUESTS) as pool:
        found = dict(pair for pairs in pool.map(ask, by_options.values()) for pair in pairs)
    return [found[number] for number in range(len(rows))]


def _check_options(args: OPSDConfig) -> None:
    if args.vllm_weight_sync == "adapter":
        raise ValueError(
            "`vllm_weight_sync='adapter'` with `vllm_mode='server'`: a server takes whole weights only: use 'auto'."
        )
    if args.vllm_enable_sleep_mode:
        raise ValueError(
            "`vllm_enable_sleep_mode=True` with `vllm_mode='server'`: a server has a device of its own and does not "
            "sleep: set it to False."
        )
    request_options(args, end_ids=[])
