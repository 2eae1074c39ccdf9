"""A student sharded over two processes by ZeRO-3 or FSDP2, with a vLLM engine in each or one over both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from support import forks, tiny

pytest.importorskip("vllm")

import vllm_lab
from vllm import SamplingParams
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from trl_opsd import OPSDTrainer
from trl_opsd._compat.sharding import is_split_model
from trl_opsd._compat.vllm import engine
from trl_opsd.errors import SyncError
from trl_opsd.rollout import weight_sync

pytestmark = [pytest.mark.distributed, pytest.mark.vllm, pytest.mark.timeout(forks.SECONDS + 60)]

VARIANTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "full": ("auto", None),
    "merged": ("full", {"use_dora": True}),
    "adapter": ("auto", {}),
}
"""`vllm_weight_sync` by name, and the options of the student's adapter, if it has one."""


def in_two(folder: Path, names: list[str], size: int) -> dict[str, Any]:
    weight_sync.BUCKET_BYTES = 2**15  # several buckets
    start_quickly()
    teacher = tiny.qwen2(48, seed=1)  # before there is a DeepSpeed config, so that it stays whole
    results: dict[str, Any] = {}
    for name in names:
        sync, adapter = VARIANTS[name]
        trainer = vllm_lab.trainer(
            folder / name,
            model=str(folder / "student"),
            teacher_model=teacher,
            peft_config=None if adapter is None else LoraConfig(r=4, target_modules="all-linear", **adapter),
            per_device_train_batch_size=1,
            vllm_weight_sync=sync,
            vllm_tensor_parallel_size=size,
        )
        if trainer.is_deepspeed_enabled:  # which would keep such small parameters whole
            config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
            config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        trainer.train()
        logged = [row for row in trainer.state.log_history if "sync/bytes" in row]
        results[name] = {
            "gaps": [row["rollout/logprob_gap"] for row in logged],
            "bytes": [row["sync/bytes"] for row in logged],
            "mode": trainer.rollout._mode,
            "processes": trainer.accelerator.num_processes,
            "split": is_split_model(trainer.accelerator.unwrap_model(trainer.model_wrapped)),
        }
    results["adapter bytes"] = adapter_bytes(trainer)
    results["held"] = held_by_proof(trainer)
    results["announced"] = announced_as_drawn(trainer)
    results["fault"] = fault_on_one(trainer)
    return results


def start_quickly() -> None:
    """Engines compile nothing, also not their sampler."""
    torch.compiler.set_stance("force_eager")
    # The memory that ranks on a CPU share has one name in all launches, ranks that are ended leave it, and more ranks
    # than cores wait long for each other in it. Elsewhere it is not used.
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda group: False


OF_EACH = (2, 0, 3, 1)
"""Prompts of each of four processes, of which two share an engine."""


def written_together(folder: Path, size: int) -> dict[str, Any]:
    """What engines over `size` processes generate from given seeds, and in an evaluation without sampling."""
    start_quickly()
    rows = 1 if size > 1 else 4
    trainer = vllm_lab.trainer(
        folder / f"over {size}",
        model=str(folder / "student"),
        eval_dataset=tiny.rows(7),
        vllm_tensor_parallel_size=size,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        eval_temperature=0.0,
    )
    rank, count = trainer.accelerator.process_index, trainer.accelerator.num_processes
    trainer.rollout.sync_weights()
    prompt_ids = trainer.tokenize(tiny.PROMPTS[: sum(OF_EACH)])
    options = [{"seed": seed, "max_tokens": 4 + seed, "logprobs": 0} for seed in range(len(prompt_ids))]
    first = sum(OF_EACH[:rank])
    mine = slice(first, first + OF_EACH[rank]) if count > 1 else slice(None)
    rows = trainer.rollout.engine.write(prompt_ids[mine], options[mine])
    trainer.model.train()
    drawn = trainer.complete(prompt_ids[:2])
    loss = trainer.evaluate()["eval_loss"]
    engine.SamplingParams = lambda **given: SamplingParams(**{**given, "seed": rank})
    try:
        trainer.rollout.engine.write(prompt_ids[:1], [{"max_tokens": 8, "ignore_eos": True}])
        said = ""
    except RuntimeError as error:
        said = str(error)
    return {
        "sampled": [(row.prompt_ids, row.completion_ids) for row in rows],
        "logprobs": [one for row in rows for one in row.logprobs],
        "drawn": drawn,
        "loss": loss,
        "in disagreement": said,
    }


def adapter_bytes(trainer: OPSDTrainer) -> int:
    device, gathered = trainer.accelerator.device, trainer.gathered
    return weight_sync.adapter_of(trainer.model, torch.float32, device, gathered)[1]


def held_by_proof(trainer: OPSDTrainer) -> float:
    """The share of the student that this process holds when a sync begins to be verified."""
    student = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    parameters, held = list(student.parameters()), list[int]()
    hook = student.register_forward_pre_hook(lambda *_: held.append(sum(one.numel() for one in parameters)))
    trainer.rollout.sync_weights()  # which the last step has changed
    hook.remove()
    return held[0] / sum(getattr(one, "ds_numel", one.numel()) for one in parameters)


def announced_as_drawn(trainer: OPSDTrainer) -> bool:
    """Whether names, dtypes and shapes are known before anything is gathered, as a server needs them first."""
    stream = weight_sync.Stream(
        weight_sync.weights_of(trainer.model), torch.bfloat16, trainer.accelerator.device, trainer.gathered
    )
    announced = stream.announced()
    with torch.no_grad(), stream as weights:
        drawn = [(name, str(part.dtype).removeprefix("torch."), list(part.shape)) for name, part in weights]
    return announced == drawn and len(drawn) > 0


def fault_on_one(trainer: OPSDTrainer) -> list[str]:
    """Sends a wrong adapter to the engine of one process: all processes must end with an error, and none may wait."""
    engine = trainer.rollout.engine
    load = engine.load_adapter
    if trainer.accelerator.process_index == 1:
        engine.load_adapter = lambda layers: load({name: (a, b + 1, s) for name, (a, b, s) in layers.items()})
    try:
        trainer.rollout.sync_weights()
        said = "nothing"
    except SyncError:
        said = "an error"
    everyone = [None] * trainer.accelerator.num_processes
    torch.distributed.all_gather_object(everyone, said)
    return everyone


@pytest.mark.parametrize(
    ("strategy", "names", "size"),
    [
        ("zero3_cpu", ["adapter"], 1),
        *(
            pytest.param(strategy, names, size, marks=pytest.mark.long)
            # FSDP2 merges an adapter in shards, ZeRO-3 in whole tensors; "merged" sends all, as "full"
            for strategy, names in {"zero3_cpu": ["full", "adapter"], "fsdp2_cpu": ["merged", "adapter"]}.items()
            for size in (1, 2)
        ),
    ],
)
def test_engines_get_whole_sharded_student(tmp_path, strategy, names, size):
    tiny.qwen2(64, seed=0).save_pretrained(tmp_path / "student")
    results = forks.results(strategy, in_two, tmp_path, names, size)[0]
    for name in names:
        found = results[name]
        assert found["split"]
        assert found["processes"] == 2
        assert found["mode"] == ("adapter" if name == "adapter" else "full")
        assert len(found["gaps"]) == 3, "a sync before each of three steps"
        assert max(found["gaps"]) <= 1e-4
    first, *later = results["adapter"]["bytes"]
    assert first > later[0], "the base is sent once"
    assert later == [results["adapter bytes"]] * 2
    assert results["announced"]
    assert results["fault"] == ["an error", "an error"], "although only one engine was wrong"
    if names == ["adapter"]:
        assert results["held"] < 0.3, "the student is not gathered to verify a sync"


@pytest.mark.long
def test_engines_over_two_processes_generate_what_one_does(tmp_path):
    tiny.qwen2(64, seed=0).save_pretrained(tmp_path / "student")
    together = forks.results("ddp", written_together, tmp_path, 2, processes=4)
    (alone,) = forks.results("alone", written_together, tmp_path, 1).values()
    assert [len(of_one["sampled"]) for of_one in together.values()] == [*OF_EACH]
    for name, tolerance in {"sampled": None, "logprobs": 1e-4}.items():
        found = [one for of_one in together.values() for one in of_one[name]]
        assert found == (alone[name] if tolerance is None else pytest.approx(alone[name], abs=tolerance))
    assert len({str(of_one["drawn"]) for of_one in together.values()}) == 4, "each process has seeds of its own"
    for of_one in together.values():
        assert of_one["loss"] == pytest.approx(alone["loss"], abs=1e-5)
        assert "sampled different tokens" in of_one["in disagreement"]
    assert not alone["in disagreement"]
