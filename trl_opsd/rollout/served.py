"""Generates with servers of any kind, to which weights or adapters are sent, and yields rows as they end.

Each process requests its own rows; those of a `stream` are taken as they end, and the student may be trained on some
while others are being generated. How a kind of server is called, and sent weights, is its client's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list

from trl_opsd._compat.peft import is_peft
from trl_opsd.config import OPSDConfig
from trl_opsd.http.client import Responses
from trl_opsd.models.backbone import model_shape
from trl_opsd.parallel.prefetch import Closable
from trl_opsd.parallel.rng import derived_seed
from trl_opsd.rollout.generation_client import GenerationClient, shared_errors
from trl_opsd.rollout.host import Host
from trl_opsd.rollout.sync_proof import RELATIVE
from trl_opsd.rollout.synced import Logprobs, SyncedRollout, check_student, dtype_of, note, version_of
from trl_opsd.rollout.weight_sync import Stream, adapter_of, base_weights_of, chosen_sync, saved_by
from trl_opsd.types import Completion

logger = get_logger(__name__)

MAX_RANK = 1024
"""Largest rank of an adapter, where a server does not tell its own; one that is too large is its error."""


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
