"""Run as a process of its own: forks a pair of processes for each strategy, which train all its variants.

PYTHONPATH=tests python tests/distributed/train_sharded.py FOLDER ddp zero2 zero3 fsdp2

Writes the results to `FOLDER/<strategy>`; the models are in `FOLDER`.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import forks
import fsdp_on_cpu
import tiny
import torch
import variants
from accelerate.utils import gather_object
from datasets import Dataset
from deepspeed.utils import safe_get_full_fp32_param
from products import WatchedTrainer
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from trl_opsd import HFRollout, OPSDTrainer
from trl_opsd._compat.sharding import in_zero3_model, is_split, whole

LENGTHS = (3, 60)
"""Tokens that each process generates; one finishes long before the other."""
FULL = variants.ALONE["full"]


def train(folder: Path, strategy: str) -> None:
    """Trains all variants in one process of a pair."""
    results: dict[str, Any] = {"empty": [], "split": {}, "losses": {}, "described": {}}
    trained: dict[str, Tensor] = {}
    whole, trocr = (
        tiny.qwen2(32, seed=0),
        variants.trocr(32),
    )  # before there is a DeepSpeed config, which would split them
    if strategy in ("zero3", "fsdp2"):
        results["generated"] = generated(folder, whole)
        results["unpadded"] = generated(folder, trocr, **variants.ALONE["full, read unpadded"], max_steps=1)
    if strategy == "zero3":
        results["not_gathered"] = generated(folder, whole, ds3_gather_for_generation=False, max_steps=1)
        results["unpadded_not_gathered"] = generated(
            folder, trocr, **variants.ALONE["full, read unpadded"], ds3_gather_for_generation=False, max_steps=1
        )
    for name, (_, made_of) in variants.of(strategy).items():
        trainer = variants.build(folder, made_of, processes=2)
        trainer.train()
        trained |= {f"{name}/{parameter}": tensor for parameter, tensor in variants.weights(trainer).items()}
        results["losses"][name] = losses(trainer)
        if trainer.accelerator.is_main_process:  # alone: a description must not wait for the other process
            results["described"][name] = repr(trainer)
        results["wrapper"] = results.get("wrapper") or type(trainer.model_wrapped).__name__  # of "full"
        results["split"][name] = any(map(is_split, trainer.model.parameters()))
        results["empty"].append(gather_object([trainer.rollout.empty]))
        if name == "full, zero3":
            results["share"] = sharded_teacher(trainer)
    results["used_before"], after = used_before(folder, processes=2)
    trained |= {f"{variants.AFTER}/{parameter}": tensor for parameter, tensor in after.items()}
    results["losses"][variants.AFTER] = results["used_before"]["losses"]
    results["bfloat16"] = {
        name: in_bfloat16(folder, variants.of(strategy)[name][1]) for name in variants.half(strategy)
    }
    results["accumulated"] = accumulated(folder)
    results["processes"] = trainer.accelerator.num_processes
    if strategy == "fsdp2":
        results["refused"] = refusal(folder, {"teacher_offload": "zero3"})
    if strategy in ("zero3", "fsdp2"):
        results["cannot_write"] = refusal(folder, {"teacher_model_kind": "live", "lmbda": 0.5, "seq_kd": True})
    results["by_teacher"] = written_by_teacher(folder)
    if trainer.accelerator.is_main_process:
        out = folder / strategy
        out.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in trained.items()}, out / "weights.safetensors")
        (out / "results.json").write_text(json.dumps(results))
    trainer.accelerator.wait_for_everyone()


def train_alone(folder: Path, strategy: str) -> None:
    """Trains in a single process that is launched like those of a pair."""
    results, trained = used_before(folder, processes=1)
    out = folder / f"{strategy}, one process"
    out.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in trained.items()}, out / "weights.safetensors")
    (out / "results.json").write_text(json.dumps(results))


def used_before(folder: Path, processes: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Results of a trainer that evaluates, trains, and does both again; and its weights after the first training."""
    trainer = variants.build(folder, FULL, processes, ddp_timeout=variants.TIMEOUT)
    trainer.eval_dataset = trainer.train_dataset
    evaluated, learned, trained, summed = [], [], [], []
    for _ in range(2):
        evaluated.append(trainer.evaluate()["eval_loss"])
        trainer.train()
        learned.append(losses(trainer))
        trained.append(variants.weights(trainer))
        of_each = gather_object([float(sum(tensor.double().sum() for tensor in trained[-1].values()))])
        summed.append(of_each)
    return {
        "evaluated": [*evaluated, trainer.evaluate()["eval_loss"]],
        "losses": learned[0],
        "summed": summed,
        "moved": variants.largest_difference(*trained),
        "wrapper": type(trainer.model_wrapped).__name__,
        "timeouts": [group._get_backend(torch.device("cpu")).options._timeout.seconds for group in c10d._world.pg_map],
    }, trained[0]


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
        "losses": losses(trainer),
    }


def accumulated(folder: Path) -> float:
    """How far the gradient of 16 equal micro-batches is from that of one, relative to its norm, in bfloat16."""

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

    start, one, many = stepped(1, 1e-30), stepped(1, 1.0), stepped(16, 1.0)
    return float((many - one).norm() / (one - start).norm())


def deepspeed_on_cpu() -> AbstractContextManager[Any]:
    """On an accelerator DeepSpeed ends autocast; on a CPU it looks for that of an accelerator, and finds none."""
    ended = torch.autocast("cpu", enabled=False)
    return mock.patch("deepspeed.runtime.engine.autocast_if_enabled", return_value=ended)


def losses(trainer: OPSDTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def generated(folder: Path, whole: Any, **options: Any) -> dict[str, Any]:
    """A student that generates itself: its losses, and greedy completions of two prompts per process, one short and one
    long, beside those that an unsharded student with the same weights generates alone.
    """
    trainer = variants.build(folder, FULL, 2, HFRollout(), **options)
    trainer.train()
    process, losses_of_steps = trainer.accelerator.process_index, losses(trainer)
    prompt_ids = trainer.tokenize(tiny.PROMPTS[2 * process : 2 * process + 2])
    trainer.generation_config.do_sample = False
    trainer.generation_config.min_new_tokens = LENGTHS[process]
    trainer.readers = replace(trainer.readers, student_limits=replace(trainer.limits, completion=LENGTHS[process]))
    written = trainer.complete(prompt_ids)
    beside_none = trainer.complete(prompt_ids if process == 0 else [])

    whole.load_state_dict(variants.weights(trainer))
    how = {"max_new_tokens": LENGTHS[process], "min_new_tokens": LENGTHS[process], "do_sample": False}
    by_itself = [whole.generate(torch.tensor([ids]), **how)[0, len(ids) :].tolist() for ids in prompt_ids]
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


def main(folder: Path, strategies: list[str]) -> None:
    for strategy in strategies:
        began = time.monotonic()
        forks.launch(strategy if strategy == "ddp" else f"{strategy}_cpu", train, folder, strategy)
        print(f"{strategy}: {time.monotonic() - began:.0f} s", flush=True)
        if strategy != "ddp":  # which would not wrap a single process
            forks.launch(f"{strategy}_cpu", train_alone, folder, strategy, processes=1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
