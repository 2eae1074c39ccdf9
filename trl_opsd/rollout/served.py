"""Generates with servers of any kind, to which weights or adapters are sent, and yields rows as they end.

Each process requests its own rows; those of a `stream` are taken as they end, and the student may be trained on some
while others are being generated. A kind of server adds paths, names, and how weights are sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar
from uuid import uuid4
from weakref import WeakSet

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object

from trl_opsd._compat.peft import CausalLM, Weight, is_peft
from trl_opsd._compat.torchao import fake_quantized
from trl_opsd.config import OPSDConfig
from trl_opsd.errors import ServerError
from trl_opsd.http.client import HTTPClient, Response, Responses, ServerKind, shown
from trl_opsd.models.backbone import model_shape
from trl_opsd.parallel.prefetch import Closable
from trl_opsd.parallel.rng import derived_seed
from trl_opsd.rollout.host import Host
from trl_opsd.rollout.sync_proof import RELATIVE
from trl_opsd.rollout.synced import Logprobs, SyncedRollout, check_student, dtype_of, note, version_of
from trl_opsd.rollout.weight_sync import (
    Layers,
    Stream,
    adapter_of,
    base_weights_of,
    chosen_sync,
    saved_by,
    weights_of,
)
from trl_opsd.types import Completion

T = TypeVar("T")

logger = get_logger(__name__)

MAX_RANK = 1024
"""Largest rank of an adapter, where a server does not tell its own; one that is too large is its error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The configuration that a server reports."""

    dtype: torch.dtype | None
    """The dtype it computes in; `None` where it does not tell."""
    context: int
    """Context length in tokens, prompt and completion together."""
    block_size: int
    """Tokens in a block of its prefix cache."""
    longest_prompt: int
    """Maximum tokens of a prompt; a longer one gets an empty completion."""
    model: str = ""
    """The name that requests to a vLLM server give its model."""
    device: str = ""
    """The type of an SGLang server's device, as torch calls it."""
    workers: int = 1
    """Processes of an SGLang server that hold a part of the weights."""
    no_weights: str = ""
    """Why it cannot be sent whole weights, and how to start one that can; empty where it can."""
    no_adapters: str = ""
    """The same of adapters."""
    max_rank: int | None = None
    """Largest rank of an adapter; `None` where it does not tell."""


class GenerationClient(ABC):
    """A server that generates, as an [`~rollout.base.Engine`]; its failures are `ServerError`.

    Each process requests its own rows; the main one alone reads `facts`, connects, and sends weights: all public
    methods of all kinds but `write_each` are collective.
    """

    kind: ClassVar[ServerKind]
    path: ClassVar[str]
    """Where a completion is requested."""
    longer_context: ClassVar[str]
    """How to start the server with a longer context, in words."""
    min_bias: ClassVar[float]
    """The logit bias of a token that is never sampled."""

    def __init__(self, args: OPSDConfig, deadline: float, facts: Facts | None = None) -> None:
        self.args, self.url = args, self.address(args)
        self.name, self._is_main = f"the {self.kind.name} server", args.process_index == 0
        origin = " (90% of `ddp_timeout`): see its log, and raise `ddp_timeout` if it just needs more time."
        self.http = HTTPClient(self.kind, self.url, deadline, origin)
        if facts is None:
            self.http.wait_until_up(getattr(args, self.kind.timeout))
        self.facts = self.read_facts() if facts is None else facts
        self.block_size = self.facts.block_size
        self.vocabulary, self.device = 0, args.device  # of the student, set by `connect`
        self.version: str | None = None
        """The weights that completions have to be generated with, where the server reports them."""
        self.adapter: str | None = None
        """The adapter that completions are requested from, by its name on the server."""
        self._takes_adapters = self._is_given_back = False
        self._run = uuid4().hex[:12]
        self._adapters = 0

    # ---- Of a kind of server ------------------------------------------------------------------------------------

    @classmethod
    def check(cls, args: OPSDConfig) -> None:
        """Rejects options that cannot work, before a model is loaded."""
        cls.sampling(args, end_ids=[])

    @staticmethod
    @abstractmethod
    def address(args: OPSDConfig) -> str:
        """The address of the server, without a trailing slash."""

    @staticmethod
    @abstractmethod
    def sampling(args: OPSDConfig, end_ids: list[int]) -> dict[str, Any]:
        """The options of every completion but its length; it ends with the first of `end_ids`."""

    @classmethod
    def weights(cls, model: CausalLM) -> list[Weight]:
        """The weights to send."""
        return weights_of(model)

    @abstractmethod
    def read_facts(self) -> Facts:
        """The configuration that the server reports."""

    @abstractmethod
    def body(self, ids: list[int], options: dict[str, Any]) -> dict[str, Any]:
        """The request for a prompt."""

    @abstractmethod
    def read(self, ids: list[int], body: dict[str, Any], version: str | None, response: Response) -> Completion:
        """The completion in the response to a request, which has to be of the weights `version`."""

    @abstractmethod
    def open(self, device: torch.device) -> torch.device:
        """Connects to send weights, again if it was connected, and returns the device where they have to be."""

    @abstractmethod
    def connected(self) -> Any:
        """The connection; a `ServerError` if it was closed, or the server may not have the latest weights."""

    @abstractmethod
    def update(self, stream: Stream, /) -> None:
        """Replaces all weights by those of a stream that was entered."""

    @abstractmethod
    def reset_prefixes(self) -> None:
        """Resets the prefix cache."""

    @abstractmethod
    def close(self) -> None:
        """Disconnects, if it is connected, so that another training run can use the server."""

    @abstractmethod
    def put_adapter(self, name: str, layers: Layers) -> None:
        """Loads an adapter under a name that was never used."""

    @abstractmethod
    def drop_adapter(self, name: str) -> None:
        """Unloads it."""

    def why_no_adapter(self, model: CausalLM) -> str | None:
        """Why an adapter of this student cannot be sent alone, or `None` if it can."""
        if fake_quantized(model):
            return "the student computes with quantised weights, which the server does not have"
        return self.facts.no_adapters or None

    # ---- Of all kinds -------------------------------------------------------------------------------------------

    def write(self, prompt_ids: list[list[int]], options: list[dict[str, Any]]) -> list[Completion]:
        """Generates one completion for each prompt; processes may have different numbers of them."""
        with shared_errors():
            found = dict(self.write_each(prompt_ids, options))
        return [found[number] for number in range(len(prompt_ids))]

    def write_each(self, prompt_ids: list[list[int]], options: list[dict[str, Any]]) -> Responses[Completion]:
        """Generates as `write`, without other processes, and returns rows as they end. All requests have begun then."""
        fitting = self._fitting(prompt_ids)
        bodies = [
            self.body(ids, own) if fits else None for ids, own, fits in zip(prompt_ids, options, fitting, strict=True)
        ]
        version = self.version  # of now: newer weights may be sent before a response is read

        def read(number: int, response: Response) -> Completion:
            ids, body = prompt_ids[number], bodies[number]
            if body is None:
                return Completion(prompt_ids=ids, completion_ids=[], prompt_logprobs=[], logprobs=[])
            return self.read(ids, body, version, response)

        return self.http.post_each(self.path, bodies, read)

    def _fitting(self, prompt_ids: list[list[int]]) -> list[bool]:
        """Whether each prompt is short enough; a `ValueError` for ids that cannot be sent."""
        # SGLang's server ends if it is sent an empty prompt or an id outside of its vocabulary.
        for number, ids in enumerate(prompt_ids):
            if not ids or not all(type(token) is int and 0 <= token < self.vocabulary for token in ids):
                raise ValueError(
                    f"Prompt {number} of a batch, {shown(ids)}, cannot be sent to {self.name}: expected token ids from "
                    f"0 to {self.vocabulary - 1}, at least one."
                )
        longest = self.facts.longest_prompt
        fitting = [len(ids) <= longest for ids in prompt_ids]
        if long := fitting.count(False):
            logger.warning(
                f"{long} prompts of a batch exceed {longest} tokens, the limit of {self.name}: their completions are "
                "empty."
            )
        return fitting

    def _in_main(self, call: Callable[[], T]) -> T | None:
        """Calls it in the main process alone, whose error is raised in all."""
        with shared_errors():
            return call() if self._is_main else None

    def connect(self, vocabulary: int, device: torch.device, by_adapter: bool = False) -> None:
        """Connects to send the weights of a student, which has so many tokens and is on a device, or its adapters."""
        self.vocabulary, self._takes_adapters, self._is_given_back = vocabulary, by_adapter, False
        self._forget_adapter()  # of another student
        if by_adapter:
            return
        self.device = self._in_main(lambda: self.open(device)) or device  # where weights have to be from now on

    def check_connected(self) -> None:
        """Raises `ServerError` if it was closed, or weights cannot be sent any more."""
        if not self._takes_adapters:
            self._in_main(self.connected)
        elif self._is_given_back:
            raise ServerError(f"{self.name} at {self.url} was given back: the rollout was closed. Build a new trainer.")

    def load(self, stream: Stream) -> None:
        """Replaces all weights; all processes iterate over the stream, and the main one sends it."""
        with shared_errors(), stream:
            if self._is_main:
                self.update(stream)
        # With it each process checks which weights its completions are from.
        (self.version,) = broadcast_object_list([self.version])

    def load_adapter(self, layers: Layers) -> None:
        """Replaces the adapter, under a name of its own, so that no prefix cached with another can be read. Collective.

        The one before is unloaded once no completion is requested from it.
        """
        before, self._adapters = self.adapter, self._adapters + 1
        name = f"trl_opsd-{self._run}-{self._adapters}"
        with shared_errors():
            if self._is_main:
                self.put_adapter(name, layers)
        (self.adapter,) = broadcast_object_list([name])
        if before is not None and self._is_main:
            self._drop(before)

    def _drop(self, name: str) -> None:
        """Unloads an adapter that is not used any more; what remains of it on the server does not matter."""
        try:
            self.drop_adapter(name)
        except ServerError as error:
            logger.warning(f"{self.name} at {self.url} did not unload {name!r}: {error}")

    def give_back(self) -> None:
        """As `close`, and unloads the adapter."""
        self.close()
        self._is_given_back = True
        self._forget_adapter()

    def _forget_adapter(self) -> None:
        adapter, self.adapter = self.adapter, None
        if adapter is not None and self._is_main:
            self._drop(adapter)

    def forget_prefixes(self) -> None:
        """Resets the prefix cache, which earlier weights computed; cached blocks are kept apart by adapter name."""
        if not self._takes_adapters:
            self._in_main(self.reset_prefixes)

    def wipe_cache(self) -> None:  # noqa: B027
        """No-op: the server loaded real weights; its cache holds no NaNs."""


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


class ServedRollout(SyncedRollout[GenerationClient]):
    """A rollout with a server, which has its own device and does not sleep; the student itself is not changed.

    Args:
        args ([`OPSDConfig`]):
            The options.
        client (`type[GenerationClient]`):
            The client of its kind of server.
    """

    generates_out_of_process: ClassVar[bool] = True

    def __init__(self, args: OPSDConfig, client: type[GenerationClient]) -> None:
        super().__init__(args)
        client.check(args)
        # The other processes wait in a collective meanwhile, for at most `ddp_timeout`.
        deadline, is_main = 0.9 * args.ddp_timeout, args.process_index == 0
        with shared_errors():
            mine = client(args, deadline) if is_main else None
        (facts,) = broadcast_object_list([mine and mine.facts])
        self._server = mine or client(args, deadline, facts)
        with shared_errors():
            if not is_main:  # each process sends requests, and a loopback address is another server on each machine
                self._server.http.wait_until_up(0.0)
        self._streams: WeakSet[Responses[Completion]] = WeakSet()
        self._uses: Counter[int] = Counter()
        self._seeded: Host | None = None
        self._loads = 0

    def __str__(self) -> str:
        kind = self._server.kind.name
        return f"{'an' if kind == 'SGLang' else 'a'} {kind} server at {self._server.url}"

    def bind(self, trainer: Host) -> None:
        """Compares the server's configuration with the student's, and connects for weight syncs.

        An earlier connection ends, and so do its streams.

        Raises:
            ValueError: Student, device and server are incompatible.
        """
        check_student(trainer)
        engine, vocabulary = self._server, model_shape(trainer.model)[0]
        dtype = self._common_dtype(trainer)
        sampling = engine.sampling(self.args, list(trainer.eos_token_ids))
        if masked := [*range(trainer.limits.vocabulary, vocabulary), *trainer.placeholders]:
            never = {str(token): engine.min_bias for token in masked}
            sampling["logit_bias"] = {**(sampling.get("logit_bias") or {}), **never}
        self._cancel_streams()
        ranks, against = [engine.facts.max_rank or MAX_RANK], engine.why_no_adapter(trainer.model)
        self._mode, why = chosen_sync(self.args.vllm_weight_sync, trainer.model, ranks, against)
        if self._mode == "full" and (refused := engine.facts.no_weights):
            others = f", nor its adapter alone ({why})" if is_peft(trainer.model) else ""
            raise ValueError(f"{refused}{others}.")
        engine.connect(vocabulary, trainer.accelerator.device, self._mode == "adapter")
        logger.info(f"Weight sync with {engine.name}: {self._mode!r}, because {why}.")
        self._base: Any = None
        self.set_up(trainer, engine, sampling, dtype)

    def _common_dtype(self, trainer: Host) -> torch.dtype:
        """The less precise of the dtypes that server and student compute in."""
        dtype, context, server = dtype_of(trainer), trainer.limits.context, self._server
        name, served = server.kind.name, server.facts.dtype
        if context is None or server.facts.context < context:
            raise ValueError(
                f"The {name} server's context is {server.facts.context} tokens, the student's "
                f"{context or 'unlimited'}: set `vllm_max_model_length={server.facts.context}` (used for every "
                "engine), so that prompts that are too long are rejected before training, or start the server with "
                f"{server.longer_context}, at {server.url}."
            )
        if served in (None, dtype):
            return dtype
        logger.warning(
            f"The {name} server at {server.url} computes in {served}, but the student in {dtype}, so completions "
            "differ slightly from the student's: start the server with "
            f"`--dtype {str(dtype).removeprefix('torch.')}`."
        )
        return max(dtype, served, key=RELATIVE.__getitem__)  # the one with the larger tolerance

    def send_weights(self) -> int:
        engine, model = self.engine, self.trainer.model
        dtype, gathered = dtype_of(self.trainer), self.trainer.gathered
        computed = engine.facts.dtype or dtype
        if self._mode == "adapter":
            layers, sent = adapter_of(model, computed, torch.device("cpu"), gathered)
            engine.load_adapter(layers)
            return sent
        stream = Stream(engine.weights(model), computed, engine.device, gathered, saved_by(model))
        engine.load(stream)
        return stream.bytes

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

    def close(self) -> None:
        self._cancel_streams()
        self._server.give_back()

    def _cancel_streams(self) -> None:
        for rows in list(self._streams):
            rows.close()

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        self.engine.check_connected()
        return super().complete(prompt_ids, step)

    def stream(self, prompt_ids: list[list[int]], step: int) -> Iterator[tuple[int, list[int]]]:
        """As for every rollout; raises `RuntimeError` if weights were sent before the last row was taken.

        Each row has its own seed, from `seed`, `step`, its number among the rows of all processes, and how often rows
        were generated at this step before, unless `generation_kwargs` has one.
        """
        self.engine.check_connected()
        with self.session():
            options = self._prepared(prompt_ids)
            seeds = self._seeds(step, len(prompt_ids))
            responses = self.engine.write_each(
                prompt_ids, [{"seed": seed, **own} for seed, own in zip(seeds, options, strict=True)]
            )
        self._streams.add(responses)
        return Closable(self._checked(responses, prompt_ids, self._new_logprobs()), responses.close)

    def one_by_one(self, prompt_ids: list[list[int]], step: int) -> Callable[[int, list[int]], list[int]]:
        """As for every rollout. Each turn has its own seed, of its row and of the number of its tokens so far."""
        self.engine.check_connected()
        with self.session():
            options = self._prepared(prompt_ids)
            seeds, known, limits = self._seeds(step, len(prompt_ids)), self._new_logprobs(), self.trainer.limits

        def ask(number: int, ids: list[int]) -> list[int]:
            begun = len(ids) - len(prompt_ids[number])
            room = min(limits.room(len(ids)), limits.completion - begun)
            seed = derived_seed(seeds[number], begun)
            responses = self.engine.write_each([ids], [{"seed": seed, **options[number], "max_tokens": room}])
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
                f"{missing} of {len(prompt_ids)} rows were dropped, because {self.engine.name} was sent weights or "
                "closed while it generated them: consume the whole stream first."
            )

    def _seeds(self, step: int, rows: int) -> list[int]:
        """A seed for each row. Collective."""
        trainer = self.trainer
        if self._seeded is not trainer:
            self._seeded, self._uses = trainer, Counter()
        elif trainer.loads != self._loads and step:  # resumed: the rows from this step on are generated again
            self._uses = Counter({before: uses for before, uses in self._uses.items() if before < step})
        self._loads = trainer.loads
        # A second generation at a step, as in an evaluation, has other seeds than the first.
        use = self._uses[step]
        self._uses[step] += 1
        accelerator = trainer.accelerator
        counts = accelerator.gather(torch.tensor([rows], device=accelerator.device)).tolist()
        first = sum(counts[: accelerator.process_index])
        return [derived_seed(self.args.seed, step, use, first + row) for row in range(rows)]
