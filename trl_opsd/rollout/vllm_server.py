"""Lets a vLLM server write for the student: the main process asks for all, and all learn what came of it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object

from trl_opsd._compat.vllm.architectures import may_have_head
from trl_opsd._compat.vllm.reload import HEAD
from trl_opsd.config import OPSDConfig
from trl_opsd.host import Host
from trl_opsd.models.head import model_shape
from trl_opsd.rollout.answers import ServerFacts
from trl_opsd.rollout.sampling import request_options
from trl_opsd.rollout.server_client import ServerClient
from trl_opsd.rollout.sync_proof import RELATIVE
from trl_opsd.rollout.synced import SyncedRollout, check_student, dtype_of
from trl_opsd.rollout.weight_sync import Stream, saved_by, weights_of
from trl_opsd.run.errors import ServerError
from trl_opsd.types import Completion

logger = get_logger(__name__)

_REQUESTS = 16
"""Sent at the same time at most; prompts with the same options go in one."""

_NEVER = -100.0
"""The least a server lets be added to a logit."""


class _ServedEngine:
    """A server as an engine: every method is called by all processes together, each with prompts of its own.

    Args:
        trainer ([`OPSDTrainer`]):
            Gives the processes.
        client ([`~rollout.server_client.ServerClient`], *optional*):
            Speaks with the server; `None` but for the main process.
    """

    name = "the vLLM server"

    def __init__(self, trainer: Host, client: ServerClient | None) -> None:
        self._client, self._process = client, trainer.accelerator.process_index
        found: list[ServerFacts | None] = [None]
        with _together():
            if client is not None:
                found = [client.facts()]
                client.init_communicator(trainer.accelerator.device)
        (facts,) = broadcast_object_list(found)
        assert facts is not None, "the main process has asked"
        self.facts: ServerFacts = facts

    @property
    def block_size(self) -> int:
        """Tokens that are cached together."""
        return self.facts.block_size

    def write(self, prompt_ids: list[list[int]], options: list[dict[str, Any]]) -> list[Completion]:
        """Has one completion written for each prompt of each process; processes may have different numbers of them.

        Args:
            prompt_ids (`list[list[int]]`):
                Not padded.
            options (`list[dict]`):
                For each prompt, in the server's words.

        Raises:
            ServerError: The server did not answer, or not all of it.
        """
        asked_by_each = gather_object([list(zip(prompt_ids, options, strict=True))])
        answers: list[Any] = [None]
        with _together():
            if self._client is not None:
                rest = iter(_answers(self._client, [row for rows in asked_by_each for row in rows]))
                answers = [[[next(rest) for _ in rows] for rows in asked_by_each]]
        (of_each,) = broadcast_object_list(answers)
        mine: list[Completion] = of_each[self._process]
        return mine

    def load(self, stream: Stream) -> None:
        """Replaces all weights.

        Args:
            stream ([`~rollout.weight_sync.Stream`]):
                Drawn by all processes, and sent by the main one.
        """
        with _together(), stream as weights:
            if self._client is not None:
                self._client.update_named_params(stream.announced(), weights)

    def forget_prefixes(self) -> None:
        """Drops what was computed from prompts with weights that are no longer there."""
        with _together():
            if self._client is not None:
                self._client.forget_prefixes()

    def wipe_cache(self) -> None:
        """Nothing to wipe: a server starts from a checkpoint, so all it has ever computed are numbers."""

    def close(self) -> None:
        """Leaves the server; it can be joined by another training then."""
        if self._client is not None:
            self._client.close_communicator()


class VLLMServerRollout(SyncedRollout[_ServedEngine]):
    """Generates with a vLLM server that was started by itself, as `docs/rollouts.md` says.

    Only the main process speaks with the server: it asks on behalf of all, and broadcasts the weights, adapters worked
    in on the way. The student is only read.

    Args:
        args ([`OPSDConfig`]):
            The options; those that cannot work are refused here, before a model is loaded.

    Raises:
        ValueError: An option cannot work, or no server answers within `vllm_server_timeout` seconds.
    """

    def __init__(self, args: OPSDConfig) -> None:
        super().__init__(args)
        _check_options(args)
        # The others wait in a collective meanwhile, for as long as `ddp_timeout`.
        with _together():
            self._client = ServerClient(args, deadline=0.9 * args.ddp_timeout) if args.process_index == 0 else None

    def bind(self, trainer: Host) -> None:
        """Asks what the server runs, and opens the way for weights.

        Raises:
            ValueError: Student, device and server do not go together.
        """
        check_student(trainer)
        engine = _ServedEngine(trainer, self._client)
        served, dtype, context = engine.facts.dtype, dtype_of(trainer), trainer.limits.context
        if context is None or engine.facts.context < context:
            raise ValueError(
                f"The vLLM server takes {engine.facts.context} tokens of prompt and completion, the student "
                f"{context or 'any number'}: set `vllm_max_model_length={engine.facts.context}`, so that prompts which "
                "are too long are refused before training, or start the server with a larger `--max-model-len`."
            )
        if served != dtype:
            logger.warning(
                f"The vLLM server computes in {served} and the student in {dtype}, so completions are not quite the "
                f"student's: start the server with `--dtype {str(dtype).removeprefix('torch.')}`."
            )
        self._has_head = may_have_head(trainer.model.config)
        logger.info("Weight sync with vLLM: 'full', because a server takes no adapter by itself.")
        sampling = request_options(self._args, list(trainer.eos_token_ids))
        never = *range(trainer.limits.vocabulary, model_shape(trainer.model)[0]), *trainer.placeholders
        sampling["logit_bias"] = {**(sampling.get("logit_bias") or {}), **{str(token): _NEVER for token in never}}
        self._take(trainer, engine, sampling, max(dtype, served, key=RELATIVE.__getitem__))

    def _send(self) -> int:
        trainer = self._trainer
        how = self._engine.facts.dtype, trainer.accelerator.device, trainer.gathered
        weights = [weight for weight in weights_of(trainer.model) if self._has_head or weight.name != HEAD]
        stream = Stream(weights, *how, saved_by(trainer.model))
        self._engine.load(stream)
        return stream.bytes

    def _wake(self, what: str) -> None:
        """A server does not sleep."""

    def _rest(self) -> None:
        """A server waits."""


@contextmanager
def _together() -> Iterator[None]:
    """Has every process learn of an error of the main one, so that none waits for it.

    Raises:
        ServerError: In the other processes, with the words of the error.
    """
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    (told,) = broadcast_object_list([None if error is None else str(error)])
    if error is not None:
        raise error
    if told is not None:
        raise ServerError(told)


def _answers(client: ServerClient, rows: list[tuple[list[int], dict[str, Any]]]) -> list[Completion]:
    """Asks a server, in one request for all prompts with the same options, and puts the answers in order."""
    alike: dict[str, list[int]] = defaultdict(list)
    for number, (_, options) in enumerate(rows):
        alike[json.dumps(options, sort_keys=True)].append(number)

    def ask(numbers: list[int]) -> list[tuple[int, Completion]]:
        written = client.write([rows[number][0] for number in numbers], rows[numbers[0]][1])
        return list(zip(numbers, written, strict=True))

    with ThreadPoolExecutor(max_workers=_REQUESTS) as pool:
        found = dict(pair for pairs in pool.map(ask, alike.values()) for pair in pairs)
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
