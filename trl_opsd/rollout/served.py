"""Generates with a server, to which weights or adapters are sent, and yields rows as they end.

Each process requests its own rows; those of a `stream` are taken as they end, and the student may be trained on some
while others are being generated. What vLLM and SGLang name and do differently is in `vllm_server.py` and `sglang.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from uuid import uuid4
from weakref import WeakSet

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object

from trl_opsd._compat.http import HTTPClient, Response, Responses
from trl_opsd._compat.peft import is_peft
from trl_opsd._compat.torchao import fake_quantized
from trl_opsd.config import OPSDConfig
from trl_opsd.errors import ServerError
from trl_opsd.models.backbone import model_shape
from trl_opsd.parallel.prefetch import Closable
from trl_opsd.parallel.rng import derived_seed
from trl_opsd.rollout.host import Host
from trl_opsd.rollout.sync_proof import RELATIVE
from trl_opsd.rollout.synced import Logprobs, SyncedRollout, check_student, dtype_of, note, version_of
from trl_opsd.rollout.weight_sync import Stream, adapter_of, base_weights_of, chosen_sync, saved_by
from trl_opsd.types import Completion

if TYPE_CHECKING:
    from trl_opsd.rollout.sglang import SGLangServer
    from trl_opsd.rollout.vllm_server import VLLMServer

T = TypeVar("T")

logger = get_logger(__name__)

MAX_RANK = 1024
"""Largest rank of an adapter, where a server does not tell its own; one that is too large is its error."""


class ServedRollout(SyncedRollout):
    """A rollout with a server, which has its own device and does not sleep; the student itself is not changed.

    It is its own [`~rollout.base.Engine`]. Each process requests its own rows; the main one alone sends weights.

    Args:
        args ([`OPSDConfig`]):
            The options.
        server (`type`):
            The kind of server.
    """

    generates_out_of_process: ClassVar[bool] = True

    def __init__(self, args: OPSDConfig, server: type[VLLMServer] | type[SGLangServer]) -> None:
        super().__init__(args)
        server.sampling(args, end_ids=[])  # rejects options that cannot work
        deadline = 0.9 * args.ddp_timeout  # meanwhile other processes may wait in a collective
        origin = " (90% of `ddp_timeout`): see its log, and raise `ddp_timeout` if it just needs more time."
        with shared_errors():  # each process has to reach it: a loopback address is another server on each machine
            http = HTTPClient(server.kind, server.address(args), deadline, origin)
            http.wait_until_up(args.vllm_server_timeout)
            self.server = server(args, http)
        self.name, self.block_size = f"the {server.kind.name}", self.server.block_size
        self._streams: WeakSet[Responses[Completion]] = WeakSet()
        self._run, self._adapters, self._is_closed = uuid4().hex[:12], 0, False

    def __str__(self) -> str:
        kind = self.server.kind.name
        return f"{'an' if kind == 'SGLang server' else 'a'} {kind} at {self.server.http.url}"

    def bind(self, trainer: Host) -> None:
        """Compares the server's configuration with the student's, and connects for weight syncs.

        An earlier connection ends, and so do its streams.

        Raises:
            ValueError: Student, device and server are incompatible.
        """
        check_student(trainer)
        server, model, rows = self.server, trainer.model, model_shape(trainer.model)[0]
        with shared_errors():  # processes that asked several servers may have been told several things
            dtype = self._common_dtype(trainer)
        sampling = server.sampling(self.args, list(trainer.eos_token_ids))
        if masked := [*range(trainer.limits.vocabulary, rows), *trainer.placeholders]:
            never = {str(token): server.min_bias for token in masked}
            sampling["logit_bias"] = {**(sampling.get("logit_bias") or {}), **never}
        self._cancel_streams()
        self._unload_adapter(server.adapter)  # of another student
        against = server.why_no_adapter(model)
        if fake_quantized(model):
            against = "the student computes with quantised weights, which the server does not have"
        requested, ranks = self.args.vllm_weight_sync, [server.max_rank or MAX_RANK]
        with shared_errors():
            mode, why = chosen_sync(requested, model, ranks, against)
            if mode == "full" and server.no_weights:
                others = f", nor its adapter alone ({why})" if is_peft(model) else ""
                raise ValueError(f"{server.no_weights}{others}.")
        (self._mode,) = broadcast_object_list([mode])
        device = trainer.accelerator.device
        self._device = device if self._mode == "adapter" else self._in_main(lambda: server.open(device)) or device
        logger.info(f"Weight sync with {self.name}: {self._mode!r}, because {why}.")
        self._base: Any = None
        self._is_closed = False
        self.set_up(trainer, self, sampling, dtype)

    def _common_dtype(self, trainer: Host) -> torch.dtype:
        """The less precise of the dtypes that server and student compute in."""
        dtype, context, server = dtype_of(trainer), trainer.limits.context, self.server
        name, url, served = server.kind.name, server.http.url, server.dtype
        if context is None or server.context < context:
            raise ValueError(
                f"The {name}'s context is {server.context} tokens, the student's {context or 'unlimited'}: set "
                f"`vllm_max_model_length={server.context}` (used for every engine), so that prompts that are too long "
                f"are rejected before training, or start the server with {server.longer_context}, at {url}."
            )
        if served in (None, dtype):
            return dtype
        logger.warning(
            f"The {name} at {url} computes in {served}, but the student in {dtype}, so completions differ "
            f"slightly from the student's: start the server with `--dtype {str(dtype).removeprefix('torch.')}`."
        )
        return max(dtype, served, key=RELATIVE.__getitem__)  # the one with the larger tolerance

    def wake(self, what: str) -> None:
        """A server does not sleep; raises `ServerError` if the rollout was closed."""
        if self._is_closed:
            raise ServerError(
                f"{self.name} at {self.server.http.url} is disconnected: the rollout was closed. Build a new trainer."
            )

    def close(self) -> None:
        self._cancel_streams()
        self._is_closed = True
        self.server.close()
        self._unload_adapter(self.server.adapter)

    def _in_main(self, call: Callable[[], T]) -> T | None:
        """Calls it in the main process alone, whose error is raised in all. Collective."""
        with shared_errors():
            return call() if self.args.process_index == 0 else None

    # ---- Weights ------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """As for every engine. Cancels unfinished streams, so no completion mixes weight versions."""
        self._cancel_streams()
        self.trainer.accelerator.wait_for_everyone()  # every process has cancelled its streams
        if self._mode == "adapter":
            # A base that was written to, or moved when a wrapper was made, may be another than the server's.
            base = version_of(weight.base for weight in base_weights_of(self.trainer.model))
            moved = torch.tensor([base != self._base], device=self.trainer.accelerator.device)
            self._base, self._proved = base, self._proved and not self.trainer.accelerator.gather(moved).any()
        super().sync_weights()

    def send_weights(self) -> int:
        server, model, gathered = self.server, self.trainer.model, self.trainer.gathered
        dtype = server.dtype or dtype_of(self.trainer)
        if self._mode == "adapter":
            layers, sent = adapter_of(model, dtype, torch.device("cpu"), gathered)
            # Each has a name of its own, so that no prefix cached with another can be read.
            before, self._adapters = server.adapter, self._adapters + 1
            name = f"trl_opsd-{self._run}-{self._adapters}"
            self._in_main(lambda: server.put_adapter(name, layers))
            (name,) = broadcast_object_list([name])
            self._unload_adapter(before)
            server.adapter = name
            return sent
        stream = Stream(server.weights(model), dtype, self._device, gathered, saved_by(model))
        with shared_errors(), stream:  # all processes iterate over it
            if self.args.process_index == 0:
                server.update(stream)
        # With it each process checks which weights its completions are from.
        (server.version,) = broadcast_object_list([server.version])
        return stream.bytes

    def _unload_adapter(self, name: str | None) -> None:
        """Unloads an adapter that is not used any more; what remains of it on the server does not matter."""
        self.server.adapter = None
        if name is not None and self.args.process_index == 0:
            try:
                self.server.drop_adapter(name)
            except ServerError as error:
                logger.warning(f"{self.name} at {self.server.http.url} did not unload {name!r}: {error}")

    def forget_prefixes(self) -> None:
        """Resets the prefix cache, which earlier weights computed; cached blocks are kept apart by adapter name."""
        if self._mode == "full":
            self._in_main(self.server.reset_prefixes)

    # ---- Generation ---------------------------------------------------------------------------------------------

    def _prepared(self, prompt_ids: list[list[int]]) -> list[dict[str, Any]]:
        """As for every engine, with a seed for each row where generations have to repeat, from this process's state."""
        options, args = super()._prepared(prompt_ids), self.args
        # A server has a random state of its own; with seeds, vLLM has no fused sampler for `top_p` and `top_k`.
        if self.trainer.model.training and not (args.deterministic or args.full_determinism):
            return options
        return [{"seed": int(torch.randint(2**63 - 1, ())), **own} for own in options]

    def write(self, prompt_ids: list[list[int]], options: list[dict[str, Any]]) -> list[Completion]:
        """Generates one completion for each prompt; processes may have different numbers of them. Collective."""
        with shared_errors():
            found = dict(self.write_each(prompt_ids, options))
        return [found[number] for number in range(len(prompt_ids))]

    def write_each(self, prompt_ids: list[list[int]], options: list[dict[str, Any]]) -> Responses[Completion]:
        """Generates as `write`, without other processes, and returns rows as they end. All requests have begun then."""
        server = self.server
        bodies = [server.body(*row) for row in zip(prompt_ids, options, strict=True)]
        version = server.version  # of now: newer weights may be sent before a response is read

        def read(number: int, response: Response) -> Completion:
            ids, body = prompt_ids[number], bodies[number]
            if body is None:
                return Completion(prompt_ids=ids, completion_ids=[], prompt_logprobs=[], logprobs=[])
            return server.read(ids, body, version, response)

        return server.http.post_each(server.path, bodies, read)

    def stream(self, prompt_ids: list[list[int]], step: int) -> Iterator[tuple[int, list[int]]]:
        """As for every rollout; raises `RuntimeError` if weights were sent before the last row was taken."""
        with self.session():
            responses = self.write_each(prompt_ids, self._prepared(prompt_ids))
        self._streams.add(responses)
        return Closable(self._checked(responses, prompt_ids, self._new_logprobs()), responses.close)

    def one_by_one(self, prompt_ids: list[list[int]], step: int) -> Callable[[int, list[int]], list[int]]:
        """As for every rollout. Where a row has a seed, each turn has another, by the number of its tokens so far."""
        with self.session():
            options = self._prepared(prompt_ids)
            known, limits, given = self._new_logprobs(), self.trainer.limits, "seed" in self._sampling

        def ask(number: int, ids: list[int]) -> list[int]:
            begun, own = len(ids) - len(prompt_ids[number]), options[number]
            room = min(limits.room(len(ids)), limits.completion - begun)
            seed = {} if given or "seed" not in own else {"seed": derived_seed(own["seed"], begun)}
            responses = self.write_each([ids], [{**own, **seed, "max_tokens": room}])
            self._streams.add(responses)
            ((_, found),) = self._checked(responses, [ids], known)
            return found

        return ask

    def _checked(
        self, responses: Responses[Completion], prompt_ids: list[list[int]], known: Logprobs
    ) -> Generator[tuple[int, list[int]], None, None]:
        missing = len(prompt_ids)
        with closing(responses):
            for number, row in responses:
                self._check_prompt(number, prompt_ids[number], row)
                note(known, prompt_ids[number], row)
                missing -= 1
                yield number, row.completion_ids
        if missing:
            raise RuntimeError(
                f"{missing} of {len(prompt_ids)} rows were dropped, because {self.name} was sent weights or closed "
                "while it generated them: consume the whole stream first."
            )

    def _cancel_streams(self) -> None:
        for rows in list(self._streams):
            rows.close()


@contextmanager
def shared_errors() -> Iterator[None]:
    """Raises an error of any process in all, elsewhere as `ServerError`, so that none waits for it. Collective."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    messages = gather_object([None if error is None else str(error)])
    if error is not None:
        raise error
    for message in messages:
        if message is not None:  # the error itself cannot always be sent
            raise ServerError(message)
