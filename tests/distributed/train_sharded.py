"""Trains variants in the processes of one strategy, has them generate, and is given what it must refuse."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import variants
from accelerate.utils import gather_object
from datasets import Dataset
from deepspeed.utils import safe_get_full_fp32_param
from support import fsdp_on_cpu, tiny, vision_language
from support.product_dtypes import WatchedTrainer
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from trl_opsd import HFRollout, OPSDTrainer
from trl_opsd._compat.sharding import in_zero3_model, is_split, whole
from trl_opsd.models.backbone import together
from trl_opsd.types.rollout import images_of

LENGTHS = (3, 20)
"""Tokens that each process generates; one finishes long before the other."""
FULL = variants.ALONE["full"]
UNPADDED = {**variants.ALONE["full, read unpadded"], "max_steps": 1}
SEEN = {**variants.ALONE["full, images"], "max_steps": 1}
WRITTEN: dict[str, list[dict[str, Any]]] = {
    "zero3": [
        {},
        {"ds3_gather_for_generation": False},
        {**SEEN, "ds3_gather_for_generation": False},
        UNPADDED,
        {**UNPADDED, "ds3_gather_for_generation": False},
    ],
    "fsdp2": [{}, SEEN, UNPADDED],
}
"""Options of students that generate themselves, where they are sharded; half of them are of the short run."""


def train(folder: Path, strategy: str, every: bool) -> dict[str, Any]:
    """In one process of a pair: the variants of the short run or all, and what else this strategy could do wrong."""
    found: dict[str, Any] = {"empty": [], "split": {}, "losses": {}, "described": {}, "trained": {}, "seconds": {}}
    # before there is a DeepSpeed config, which would split them
    students = {"qwen2": tiny.qwen2(32, seed=0), "trocr": variants.trocr(32)}
    students["qwen2_5_vl"] = vision_language.model("qwen2_5_vl", 32, 0, sees=True)
    of_strategy, is_sharded = variants.of(strategy, every), strategy in WRITTEN
    written = WRITTEN.get(strategy, [])
    found["generated"] = [
        generated(folder, students[options.get("family", "qwen2")], **{"max_steps": 1, **options})
        for options in (written if every else written[: (len(written) + 1) // 2])
    ]
    for name, (_, made_of) in of_strategy.items():
        began = time.process_time()
        trainer = variants.build(folder, made_of, processes=2)
        trainer.train()
        found["trained"][name] = variants.arrays(trainer)
        found["losses"][name] = tiny.logged(trainer, "loss")
        if trainer.accelerator.is_main_process:  # alone: a description must not wait for the other process
            found["described"][name] = repr(trainer)
        found.setdefault("wrapper", type(trainer.model_wrapped).__name__)
        found["split"][name] = any(map(is_split, trainer.model.parameters()))
        found["empty"].append(gather_object([trainer.rollout.empty]))
        if name == "full, zero3":
            found["share"] = sharded_teacher(trainer)
        found["seconds"][name] = time.process_time() - began
    if every or strategy != "fsdp2":
        found["used_before"] = used_before(folder, processes=2)
        half = variants.half(strategy)
        found["bfloat16"] = {name: in_bfloat16(folder, of_strategy[name][1]) for name in half[0 if every else -1 :]}
    if every or strategy == "zero3":
        found["accumulated"] = accumulated(folder)
    if strategy == "fsdp2":
        found["refused"] = refusal(folder, {"teacher_offload": "zero3"})
    if is_sharded:
        found["cannot_write"] = refusal(folder, {"teacher_model_kind": "live", "lmbda": 0.5, "seq_kd": True})
    if every:
        found["by_teacher"] = written_by_teacher(folder)
    found["processes"] = trainer.accelerator.num_processes
    trainer.accelerator.wait_for_everyone()
    return found


def used_before(folder: Path, processes: int) -> dict[str, Any]:
    """Results of a trainer that evaluates, trains, and does both again; and its weights after the first training."""
    trainer = variants.build(folder, FULL, processes, ddp_timeout=variants.TIMEOUT)
    evaluated, learned, trained, summed = [], [], [], []
    for _ in range(2):
        evaluated.append(trainer.evaluate(trainer.train_dataset)["eval_loss"])
        trainer.train()
        learned.append(tiny.logged(trainer, "loss"))
        trained.append(variants.arrays(trainer))
        summed.append(gather_object([float(sum(array.astype(float).sum() for array in trained[-1].values()))]))
    return {
        "evaluated": [*evaluated, trainer.evaluate(trainer.train_dataset)["eval_loss"]],
        "losses": learned[0],
        "summed": summed,
        "trained": trained[0],
        "moved": variants.largest_difference(*trained),
        "wrapper": type(trainer.model_wrapped).__name__,
        "timeouts": [group._get_backend(torch.device("cpu")).options._timeout.seconds for group in c10d._world.pg_map],
    }


class Sourced(OPSDTrainer):
    """Keeps where each completion that is taught comes from, its prompt, and itself."""

    def teach(self, rollout, rows):
        sources = [row.is_off_policy for row in rows]
        self.taught += zip(sources, rollout.prompt_lists(), rollout.completion_lists(), strict=True)
        return super().teach(rollout, rows)


def written_by_teacher(folder: Path) -> list[tuple[bool, list[int], list[int], list[int]]]:
    """With `seq_kd`, by greedy decoding: each row's source, prompt, completion, and what the teacher writes alone."""
    greedy = {"lmbda": 0.5, "seq_kd": True, "top_k": 1, "rows": 4, "max_steps": 4}
    trainer = variants.build(folder, FULL, 2, trainer_class=Sourced, **greedy)
    trainer.taught = []
    trainer.train()
    how = {"max_new_tokens": trainer.args.max_completion_length, "do_sample": False, "pad_token_id": 0}
    teacher = trainer.teacher_model
    alone = [
        teacher.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **how)[0, len(prompt) :]
        for _, prompt, _ in trainer.taught
    ]
    return gather_object([(*one, ids.tolist()) for one, ids in zip(trainer.taught, alone, strict=True)])


def refusal(folder: Path, made_of: dict[str, Any]) -> str:
    """The error at construction."""
    try:
        variants.build(folder, made_of, processes=2)
    except ValueError as error:
        return str(error)
    return "nothing"


def in_bfloat16(folder: Path, made_of: dict[str, Any]) -> dict[str, Any]:
    """Losses of a student that computes in bfloat16, the dtypes of its products and of its parameters, and its rotary
    frequencies afterwards.
    """
    trainer = variants.build(folder, made_of, 2, trainer_class=WatchedTrainer, bf16=True)
    with deepspeed_on_cpu():
        trainer.train()
    rollout = HFRollout()
    rollout.bind(trainer)
    with trainer.products, trainer.products.during("complete"):
        rollout.complete(trainer.tokenize(tiny.PROMPTS[:1]), step=0)
    kept = {str(parameter.dtype) for parameter in variants.weights(trainer).values()}
    (frequencies,) = (buffer for name, buffer in trainer.model.named_buffers() if name.endswith("rotary_emb.inv_freq"))
    return {
        "products": trainer.dtypes(),
        "kept": sorted(kept),
        "frequencies": frequencies.tolist(),
        "losses": tiny.logged(trainer, "loss"),
    }


def accumulated(folder: Path) -> float:
    """How far the gradient of 8 equal micro-batches is from that of one, relative to its norm, in bfloat16."""

    def stepped(calls: int, rate: float) -> Tensor:
        args = tiny.config(
            folder / "out",
            bf16=True,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=calls,
            max_steps=1,
            optim="sgd",
            learning_rate=rate,
            max_grad_norm=1e9,
        )
        fsdp_on_cpu.allow()
        trainer = OPSDTrainer(
            model=str(folder / "qwen2" / "student"),
            teacher_model=str(folder / "qwen2" / "teacher"),
            args=args,
            train_dataset=Dataset.from_dict({"prompt": tiny.PROMPTS[1:2] * 2 * calls}),
            processing_class=tiny.tokenizer(),
            rollout=variants.Recorded(),
        )
        with deepspeed_on_cpu():
            trainer.train()
        return torch.cat([master(one).double().flatten() for one in trainer.model.parameters()])

    def master(parameter: Tensor) -> Tensor:
        is_of_zero = hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")
        return safe_get_full_fp32_param(parameter) if is_of_zero else whole(parameter)

    start, one, many = stepped(1, 1e-30), stepped(1, 1.0), stepped(8, 1.0)
    return float((many - one).norm() / (one - start).norm())


def deepspeed_on_cpu() -> AbstractContextManager[Any]:
    """On an accelerator DeepSpeed ends autocast; on a CPU it looks for that of an accelerator, and finds none."""
    ended = torch.autocast("cpu", enabled=False)
    return mock.patch("deepspeed.runtime.engine.autocast_if_enabled", return_value=ended)


def generated(folder: Path, whole: Any, **options: Any) -> dict[str, Any]:
    """A student that generates itself: its losses, and greedy completions of two prompts per process, one short and one
    long, beside those that an unsharded student with the same weights generates alone.
    """
    trainer = variants.build(folder, FULL, 2, HFRollout(), **options)
    trainer.train()
    process, losses_of_steps = trainer.accelerator.process_index, tiny.logged(trainer, "loss")
    prompt_ids = trainer.tokenize(tiny.PROMPTS[2 * process : 2 * process + 2])
    if trainer.reads_images:  # one process has images, the other none
        rows = [trainer.train_dataset[row] for row in ((0, 3), (1, 4))[process]]
        prompt_ids = trainer.prompt_ids_of(trainer.teaching.read_rows(rows))
    trainer.generation_config.do_sample = False
    trainer.generation_config.min_new_tokens = LENGTHS[process]
    trainer.teaching.readers = replace(
        trainer.readers, student_limits=replace(trainer.limits, completion=LENGTHS[process])
    )
    written = trainer.complete(prompt_ids)
    beside_none = trainer.complete(prompt_ids if process == 0 else [])

    whole.load_state_dict(variants.weights(trainer))
    how = {"max_new_tokens": LENGTHS[process], "min_new_tokens": LENGTHS[process], "do_sample": False}
    seen = [together(images_of([ids]), [0], len(ids)) for ids in prompt_ids]
    by_itself = [
        whole.generate(torch.tensor([ids]), **images, **how)[0, len(ids) :].tolist()
        for ids, images in zip(prompt_ids, seen, strict=True)
    ]
    of_all = {"written": written, "alone": by_itself, "beside_none": beside_none}
    return {"losses": losses_of_steps, **{name: gather_object(each) for name, each in of_all.items()}}


def sharded_teacher(trainer: OPSDTrainer) -> dict[str, Any]:
    """The part of the teacher that this process holds, and how often it reads when it has fewer rows than the other."""
    parameters = list(trainer.teacher.model.parameters())
    shares = [parameter.ds_tensor for parameter in parameters]
    engine = trainer.teacher.placement._read._engine
    return {
        "layer": max(
            sum(one.ds_numel for one in layer.parameters()) for layer in trainer.teacher.model.base_model.layers
        ),
        "ahead": [engine.zero_prefetch_bucket_size(), engine.zero_max_live_parameters()],
        "whole": sum(parameter.ds_numel for parameter in parameters),
        "share": sum(share.numel() for share in shares),
        "devices": sorted({str(share.device) for share in shares}),
        "gathered_between": sum(parameter.numel() for parameter in parameters if parameter.dim() > 1),
        "agreed": trainer.teacher.placement.passes_to_run(1 + trainer.accelerator.process_index),
        "split": in_zero3_model(trainer.teacher.model),
    }
