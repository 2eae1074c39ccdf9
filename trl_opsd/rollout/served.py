"""Generates with a server of any kind, to which whole weights are sent, and yields rows as they end.

The student may be trained on some while others are being generated.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from accelerate.logging import get_logger

from trl_opsd.config import OPSDConfig
from trl_opsd.host import Host
from trl_opsd.models.backbone import model_shape
from trl_opsd.parallel.pulled import Endable
from trl_opsd.parallel.rng import derived_seed
from trl_opsd.rollout.engine import Rows
from trl_opsd.rollout.server_engine import GenerationClient, ServerEngine, shared_errors
from trl_opsd.rollout.sync_proof import RELATIVE
from trl_opsd.rollout.synced import Logprobs, SyncedRollout, check_student, dtype_of, key_of
from trl_opsd.rollout.weight_sync import Stream, saved_by
from trl_opsd.types import Completion, Weight

logger = get_logger(__name__)


class ServedRollout(SyncedRollout[ServerEngine]):
    """A rollout with a server, which has its own device and does not sleep.

    Only the main process talks to the server: it sends the requests of all, and broadcasts the weights, with adapters
    merged on the way. The student itself is not changed. Rows of a `stream` are requested by each process.
    """

    writes_apart: ClassVar[bool] = True

    def __init__(self, args: OPSDConfig, client: type[GenerationClient]) -> None:
        super().__init__(args)
        self._kind = client
        # The other processes wait in a collective meanwhile, for at most `ddp_timeout`.
        self._deadline = 0.9 * args.ddp_timeout
        with shared_errors():
            self._client = client(args, self._deadline) if args.process_index == 0 else None
        self._streams: WeakSet[Rows] = WeakSet()
        self._uses: Counter[int] = Counter()
        self._seeded: Host | None = None
        self._loads = 0

    def bind(self, trainer: Host) -> None:
        """Compares the server's configuration with the student's, and connects for weight syncs.

        An earlier connection ends, and so do its streams.

        Raises:
            ValueError: Student, device and server are incompatible.
        """
        check_student(trainer)
        engine = ServerEngine(trainer, self._kind, self._client, self._deadline)
        dtype = self._common_dtype(trainer, engine)
        masked = *range(trainer.limits.vocabulary, model_shape(trainer.model)[0]), *trainer.placeholders
        sampling = self._sampled(list(trainer.eos_token_ids), [str(token) for token in masked])
        self._give_up()
        engine.connect()
        logger.info(f"Weight sync with {engine.name}: 'full', because a server cannot be sent an adapter alone.")
        self._set_up(trainer, engine, sampling, dtype)

    def _common_dtype(self, trainer: Host, engine: ServerEngine) -> torch.dtype:
        """The less precise of the dtypes that server and student compute in."""
        served, dtype, context = engine.facts.dtype, dtype_of(trainer), trainer.limits.context
        name = self._kind.kind.name
        if context is None or engine.facts.context < context:
            raise ValueError(
                f"The {name} server takes {engine.facts.context} tokens of prompt and completion, the "
                f"student {context or 'any number'}: set `vllm_max_model_length={engine.facts.context}`, which is read "
                "for every engine, so that prompts which are too long are refused before training, or start the server "
                f"with {self._kind.longer_context}."
            )
        if served != dtype:
            logger.warning(
                f"The {name} server computes in {served} and the student in {dtype}, so completions differ "
                f"slightly from the student's: start the server with `--dtype {str(dtype).removeprefix('torch.')}`."
            )
        return max(dtype, served, key=RELATIVE.__getitem__)  # the one with the larger tolerance

    @abstractmethod
    def _sampled(self, end_ids: list[int], masked: list[str]) -> dict[str, Any]:
        """The options of every completion, which ends with the first of `end_ids` and has none of the `masked` ids."""

    @abstractmethod
    def _weights(self) -> list[Weight]:
        """The weights to send."""

    def _send(self) -> int:
        trainer, engine = self._trainer, self._engine
        how = engine.facts.dtype, engine.device, trainer.gathered
        stream = Stream(self._weights(), *how, saved_by(trainer.model))
        engine.load(stream)
        return stream.bytes

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        self._engine.check_connected()
        return super().complete(prompt_ids, step)

    def stream(self, prompt_ids: list[list[int]], step: int) -> Iterator[tuple[int, list[int]]]:
        rows = self.stream_completions(prompt_ids, step)
        known = self._known_logprobs()
        return Endable(self._ids(rows, prompt_ids, known), rows.close)

    def _ids(
        self, rows: Endable[tuple[int, Completion]], prompt_ids: list[list[int]], known: Logprobs | None
    ) -> Generator[tuple[int, list[int]], None, None]:
        for number, row in rows:
            if known is not None:
                known[key_of(prompt_ids[number], row.completion_ids)] = row.logprobs
            yield number, row.completion_ids

    def stream_completions(
        self, prompt_ids: list[list[int]], step: int, logprobs: bool = False
    ) -> Endable[tuple[int, Completion]]:
        """As `stream`, with everything the engine returns.

        Each row has its own seed, from `seed`, `step`, its number among the rows of all processes, and how often rows
        were generated at this step before, unless `generation_kwargs` has one.

        Args:
            prompt_ids, step:
                As for `complete`.
            logprobs (`bool`, *optional*, defaults to `False`):
                Whether each completion has its `logprobs`, by the weights that generated it.

        Returns:
            [`~parallel.pulled.Endable`]: the number of each prompt and its completion, as they end. It raises
            `RuntimeError` if weights were sent to the engine before the last row was taken.
        """
        self._engine.check_connected()
        with self.session():
            options = self._begun(prompt_ids)
            seeds = self._seeds(step, len(prompt_ids))
            wanted = {"logprobs": 0} if logprobs else {}
            written = self._engine.write_each(
                prompt_ids, [{"seed": seed, **own, **wanted} for seed, own in zip(seeds, options, strict=True)]
            )
        self._streams.add(written)
        return Endable(self._rows(written, prompt_ids), written.close)

    def _rows(self, written: Rows, prompt_ids: list[list[int]]) -> Generator[tuple[int, Completion], None, None]:
        missing = len(prompt_ids)
        with closing(written):
            for number, row in written:
                self._check_prompt(number, prompt_ids[number], row)
                missing -= 1
                yield number, row
        if missing:
            raise RuntimeError(
                f"{missing} of {len(prompt_ids)} rows were given up, because {self._engine.name} was sent weights or "
                "closed while it wrote them: take all rows of a stream first."
            )

    def sync_weights(self) -> None:
        """As for every engine. Cancels unfinished streams, so no completion mixes weight versions."""
        self._give_up()
        self._trainer.accelerator.wait_for_everyone()  # every process has cancelled its streams
        super().sync_weights()

    def close(self) -> None:
        self._give_up()
        super().close()

    def _give_up(self) -> None:
        for written in list(self._streams):
            written.close()

    def _seeds(self, step: int, rows: int) -> list[int]:
        """A seed for each row. Collective."""
        trainer = self._trainer
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
        return [derived_seed(self._args.seed, step, use, first + row) for row in range(rows)]

    def _wake(self, what: str) -> None:
        """A server does not sleep."""

    def _rest(self) -> None:
        """A server does not sleep."""
