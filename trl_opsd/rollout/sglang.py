"""Generates with an SGLang server: the main process sends the requests of all processes and broadcasts the answers.

Rows that are taken as they end are asked for by each process.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list

from trl_opsd.config import OPSDConfig
from trl_opsd.host import Host
from trl_opsd.models.head import model_shape
from trl_opsd.rollout.one_asks import asked_by_main, shared_errors
from trl_opsd.rollout.served import ServedRollout
from trl_opsd.rollout.sessions import check_reached_by_all, machines, session_with
from trl_opsd.rollout.sglang_answers import SGLangFacts
from trl_opsd.rollout.sglang_asking import SGLangAsking, SGLangRows
from trl_opsd.rollout.sglang_client import SGLangClient
from trl_opsd.rollout.sglang_options import sampling_params
from trl_opsd.rollout.sync_proof import RELATIVE
from trl_opsd.rollout.synced import check_student, dtype_of
from trl_opsd.rollout.weight_sync import Stream, saved_by, weights_of
from trl_opsd.types import Completion

logger = get_logger(__name__)

_MIN_BIAS = -1e9
"""The bias of an id that is never sampled; JSON has no infinity."""


class _SGLangEngine:
    """A server as an engine. All methods but `write_each` and `close` are collective; each process passes prompts of
    its own.

    Args:
        trainer ([`OPSDTrainer`]):
            Provides the processes.
        client ([`~rollout.sglang_client.SGLangClient`], *optional*):
            The connection to the server in the main process, `None` in the others.
        deadline (`float`):
            Seconds within which any request has to be answered.

    Attributes:
        facts ([`~rollout.sglang_answers.SGLangFacts`]): the server's configuration.
        device (`torch.device`): where weights have to be, to be sent.
    """

    name = "the SGLang server"

    def __init__(self, trainer: Host, client: SGLangClient | None, deadline: float) -> None:
        self._client, self._process = client, trainer.accelerator.process_index
        self._vocabulary = model_shape(trainer.model)[0]
        self.device = trainer.accelerator.device
        found: list[Any] = [None]
        with shared_errors():
            if client is not None:
                if not client.knows(self._vocabulary):
                    raise ValueError(
                        f"The model of the SGLang server at {client.url} knows fewer ids than the student, which has "
                        f"{self._vocabulary}: start it with the student's checkpoint."
                    )
                self.device = client.connect(self.device)
                found = [(client.url, client.facts)]
        ((url, facts),) = broadcast_object_list(found)
        self.facts: SGLangFacts = facts
        session = partial(session_with, "The SGLang server", "sglang_server_url", url, deadline)
        self._asking = client or SGLangAsking(url, session(), facts)
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
                For each prompt; besides those of [`~rollout.engine.Engine`] named as in SGLang's `sampling_params`.

        Raises:
            ServerError: The server did not answer every request.
        """
        ask = None if self._client is None else partial(self._client.write, vocabulary=self._vocabulary)
        return asked_by_main(list(zip(prompt_ids, options, strict=True)), ask, self._process)

    def write_each(self, prompt_ids: list[list[int]], options: list[dict[str, Any]]) -> SGLangRows:
        """Generates as `write`, and returns rows as they end.

        Raises:
            ValueError: The server is at an address that only one of several machines can reach.
        """
        check_reached_by_all(self.name, self._asking.url, self._machines, "`sglang_server_url`")
        return self._asking.write_each(list(zip(prompt_ids, options, strict=True)), self._vocabulary)

    def load(self, stream: Stream) -> None:
        """Replaces all weights.

        Args:
            stream ([`~rollout.weight_sync.Stream`]):
                Iterated by all processes, and sent by the main one.
        """
        with shared_errors(), stream as weights:
            if self._client is not None:
                self._client.update(weights)
        (self._asking.version,) = broadcast_object_list([self._asking.version])

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
            self._client.close()


class SGLangRollout(ServedRollout[_SGLangEngine]):
    """Generates with a separately started SGLang server, as `docs/rollouts.md` describes.

    Only the main process talks to the server: it sends the requests of all, and broadcasts the weights, with adapters
    merged on the way. The student itself is not changed. Rows of a `stream` are asked for by each process.

    Args:
        args ([`OPSDConfig`]):
            The options; those that cannot work are rejected here, before a model is loaded.

    Raises:
        ValueError: An option cannot work, or no server answers within `sglang_server_timeout` seconds.
    """

    def __init__(self, args: OPSDConfig) -> None:
        super().__init__(args)
        sampling_params(args, end_ids=[])
        # The other processes wait in a collective meanwhile, for at most `ddp_timeout`.
        self._deadline = 0.9 * args.ddp_timeout
        with shared_errors():
            self._client = SGLangClient(args, self._deadline) if args.process_index == 0 else None

    def __str__(self) -> str:
        return f"an SGLang server at {self._args.sglang_server_url}"

    def bind(self, trainer: Host) -> None:
        """Compares the server's configuration with the student's, and connects to it for weight syncs.

        Raises:
            ValueError: Student, device and server are incompatible.
        """
        check_student(trainer)
        engine = _SGLangEngine(trainer, self._client, self._deadline)
        served, dtype, context = engine.facts.dtype, dtype_of(trainer), trainer.limits.context
        if context is None or engine.facts.context < context:
            raise ValueError(
                f"The SGLang server takes {engine.facts.context} tokens of prompt and completion, the student "
                f"{context or 'any number'}: set `vllm_max_model_length={engine.facts.context}`, which is read for "
                "SGLang as well, so that prompts which are too long are refused before training, or start the server "
                "with a larger `--context-length` or more memory for its cache."
            )
        if served != dtype:
            logger.warning(
                f"The SGLang server computes in {served} and the student in {dtype}, so completions differ slightly "
                f"from the student's: start the server with `--dtype {str(dtype).removeprefix('torch.')}`."
            )
        sampling = sampling_params(self._args, list(trainer.eos_token_ids))
        masked = *range(trainer.limits.vocabulary, model_shape(trainer.model)[0]), *trainer.placeholders
        if masked:
            biased = {str(token): _MIN_BIAS for token in masked}
            sampling["logit_bias"] = {**(sampling.get("logit_bias") or {}), **biased}
        self._set_up(trainer, engine, sampling, max(dtype, served, key=RELATIVE.__getitem__))

    def _send(self) -> int:
        trainer = self._trainer
        how = self._engine.facts.dtype, self._engine.device, trainer.gathered
        stream = Stream(weights_of(trainer.model), *how, saved_by(trainer.model))
        self._engine.load(stream)
        return stream.bytes
