"""One process and two learn the same under DDP, ZeRO-2, ZeRO-3 and FSDP2; students that are sharded generate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from unittest import mock

import pytest
import torch
import variants
from accelerate.utils import gather_object
from deepspeed.utils import safe_get_full_fp32_param
from support import forks, tiny, vision_language
from support.product_dtypes import PHASES, WatchedTrainer
from torch.distributed import distributed_c10d as c10d

from trl_opsd import HFRollout
from trl_opsd._compat.sharding import in_zero3_model, is_split, whole
from trl_opsd.models.backbone import together
from trl_opsd.types.rollout import images_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(forks.SECONDS + 60)]


@dataclass(frozen=True)
class Strategy:
    """A launch file, the class that it wraps the student in (a launch may silently use another), and its name."""

    config: str
    wrapper: str
    described: str


STRATEGIES = {
    "ddp": Strategy("ddp", "DistributedDataParallel", "2, data parallelism (DDP), on cpu"),
    "zero2": Strategy("zero2_cpu", "DeepSpeedEngine", "2, DeepSpeed ZeRO-2, on cpu"),
    "zero3": Strategy("zero3_cpu", "DeepSpeedEngine", "2, DeepSpeed ZeRO-3, on cpu"),
    "fsdp2": Strategy("fsdp2_cpu", "FSDPQwen2ForCausalLM", "2, FSDP2, on cpu"),
}
TOLERANCE = 1e-5
"""A tenth of one step of AdamW at a learning rate of 1e-4."""
LENGTHS = (3, 20)
"""Tokens that each process generates; one finishes long before the other."""
FULL = variants.ALONE["full"]
UNPADDED = {**variants.ALONE["full, read unpadded"], "max_steps": 1}
SEEN = {**variants.ALONE["full, images"], "max_steps": 1}
APART = {"ds3_gather_for_generation": False}
WRITTEN = {"zero3": [{}, APART, {**SEEN, **APART}, UNPADDED, {**UNPADDED, **APART}], "fsdp2": [{}, SEEN, UNPADDED]}
"""Options of students that generate themselves, where they are sharded; the first three are of the short run."""
TIMEOUT = 555
"""`ddp_timeout` of one trainer, in seconds."""

# ---- In each process -------------------------------------------------------------------------------------------------


def train(folder, strategy, every):
    """In one process of a pair: the variants of the short run or all, and what else this strategy could do wrong."""
    found = {"empty": {}, "split": set(), "losses": {}, "described": {}, "trained": {}}
    # before there is a DeepSpeed config, which would split them
    students = {"qwen2": tiny.qwen2(32, seed=0), "trocr": variants.trocr(32)}
    students["qwen2_5_vl"] = vision_language.model("qwen2_5_vl", 32, 0, sees=True)
    found["generated"] = [
        generated(folder, students[options.get("family", "qwen2")], **{"max_steps": 1, **options})
        for options in WRITTEN.get(strategy, [])[: None if every else 3]
    ]
    of_strategy = variants.of(strategy, every)
    for name, (_, made_of) in of_strategy.items():
        trainer = variants.build(folder, made_of, processes=2)
        trainer.train()
        found["trained"][name] = variants.arrays(trainer)
        found["losses"][name] = tiny.logged(trainer, "loss")
        if trainer.accelerator.is_main_process:  # alone: a description must not wait for the other process
            found["described"][name] = repr(trainer)
        found.setdefault("wrapper", type(trainer.model_wrapped).__name__)
        found["split"].add(any(map(is_split, trainer.model.parameters())))
        found["empty"][name] = gather_object([trainer.rollout.empty])
        if name == "full, zero3":
            found["share"] = sharded_teacher(trainer)
    found["used_before"] = used_before(folder, processes=2)
    half = variants.half(strategy)
    found["bfloat16"] = {name: in_bfloat16(folder, of_strategy[name][1]) for name in half[0 if every else -1 :]}
    if every or strategy == "zero3":
        found["accumulated"] = accumulated(folder)
    if strategy == "fsdp2":
        found["refused"] = refusal(folder, {"teacher_offload": "zero3"})
    if strategy in WRITTEN:
        found["cannot_write"] = refusal(folder, {"teacher_model_kind": "live", "lmbda": 0.5, "seq_kd": True})
    found["processes"] = trainer.accelerator.num_processes
    trainer.accelerator.wait_for_everyone()
    return found


def used_before(folder, processes):
    """Results of a trainer that evaluates, trains, and does both again; and its weights after the first training."""
    trainer = variants.build(folder, FULL, processes, ddp_timeout=TIMEOUT)
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
        "timeouts": {group._get_backend(torch.device("cpu")).options._timeout.seconds for group in c10d._world.pg_map},
    }


def refusal(folder, made_of):
    """The error at construction."""
    try:
        variants.build(folder, made_of, processes=2)
    except ValueError as error:
        return str(error)
    return "nothing"


def in_bfloat16(folder, made_of):
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
        "kept": kept,
        "frequencies": frequencies.tolist(),
        "losses": tiny.logged(trainer, "loss"),
    }


def accumulated(folder):
    """How far the gradient of 8 equal micro-batches is from that of one, relative to its norm, in bfloat16."""

    def stepped(calls, rate):
        made_of = {"rows_read": [1] * 2 * calls, "gradient_accumulation_steps": calls, "bf16": True, "optim": "sgd"}
        trainer = variants.build(folder, made_of, 2, max_steps=1, learning_rate=rate, max_grad_norm=1e9)
        with deepspeed_on_cpu():
            trainer.train()
        return torch.cat([master(one).double().flatten() for one in trainer.model.parameters()])

    def master(parameter):
        is_of_zero = hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")
        return safe_get_full_fp32_param(parameter) if is_of_zero else whole(parameter)

    start, one, many = stepped(1, 1e-30), stepped(1, 1.0), stepped(8, 1.0)
    return float((many - one).norm() / (one - start).norm())


def deepspeed_on_cpu():
    """On an accelerator DeepSpeed ends autocast; on a CPU it looks for that of an accelerator, and finds none."""
    ended = torch.autocast("cpu", enabled=False)
    return mock.patch("deepspeed.runtime.engine.autocast_if_enabled", return_value=ended)


def generated(folder, alone, **options):
    """A student that generates itself: its losses, and greedy completions of two prompts per process, one short and one
    long, beside those that an unsharded student with the same weights generates alone.
    """
    trainer = variants.build(folder, FULL, 2, HFRollout(), **options)
    trainer.train()
    process, losses = trainer.accelerator.process_index, tiny.logged(trainer, "loss")
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

    alone.load_state_dict(variants.weights(trainer))
    how = {"max_new_tokens": LENGTHS[process], "min_new_tokens": LENGTHS[process], "do_sample": False}
    seen = [together(images_of([ids]), [0], len(ids)) for ids in prompt_ids]
    by_itself = [
        alone.generate(torch.tensor([ids]), **images, **how)[0, len(ids) :].tolist()
        for ids, images in zip(prompt_ids, seen, strict=True)
    ]
    of_all = {"written": written, "alone": by_itself, "beside_none": beside_none}
    return {"losses": losses, **{name: gather_object(each) for name, each in of_all.items()}}


def sharded_teacher(trainer):
    """The part of the teacher that this process holds, and how often it reads when it has fewer rows than the other."""
    model, placement = trainer.teacher.model, trainer.teacher.placement
    parameters = list(model.parameters())
    shares = [parameter.ds_tensor for parameter in parameters]
    engine = placement._read._engine
    return {
        "layer": max(sum(one.ds_numel for one in layer.parameters()) for layer in model.base_model.layers),
        "ahead": [engine.zero_prefetch_bucket_size(), engine.zero_max_live_parameters()],
        "whole": sum(parameter.ds_numel for parameter in parameters),
        "share": sum(share.numel() for share in shares),
        "devices": {str(share.device) for share in shares},
        "gathered_between": sum(parameter.numel() for parameter in parameters if parameter.dim() > 1),
        "agreed": placement.passes_to_run(1 + trainer.accelerator.process_index),
        "split": in_zero3_model(model),
    }


# ---- What one process learns, and what two have to -------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    variants.save_models(folder)
    return folder


@pytest.fixture(scope="module")
def alone(models):
    """Trains a variant in one process, once; its weights, the losses of three steps and the trainer in words."""

    @cache
    def trained(name):
        trainer = variants.build(models, variants.ALONE[name], processes=1)
        before = {name: array.copy() for name, array in variants.arrays(trainer).items()}
        trainer.train()
        weights = variants.arrays(trainer)
        assert variants.largest_difference(before, weights) > 20 * TOLERANCE, f"{name} learns nothing"
        return weights, tiny.logged(trainer, "loss"), repr(trainer)

    return trained


@pytest.mark.parametrize(
    ("strategy", "every"),
    [
        *((strategy, False) for strategy in variants.SHORT),
        *(pytest.param(strategy, True, marks=pytest.mark.long) for strategy in STRATEGIES),
    ],
    ids=lambda value: {True: "every variant", False: "some variants"}.get(value, value),
)
def test_two_processes_learn_what_one_learns(models, alone, strategy, every):
    of = STRATEGIES[strategy]
    found = forks.results(of.config, train, models, strategy, every)[0]
    of_strategy, differences = variants.of(strategy, every), {}
    for name, (same, _) in of_strategy.items():
        weights, losses, of_one = alone(same)
        exact = variants.EXACT.get(same)
        # In another batch shape a half-precision teacher rounds differently: its error is as large as against float32,
        # and two such errors may add up.
        allowed = TOLERANCE if exact is None else 2 * variants.largest_difference(weights, alone(exact)[0])
        of_losses = (
            TOLERANCE if exact is None else 2 * max(abs(a - b) for a, b in zip(losses, alone(exact)[1], strict=True))
        )
        differences[name] = variants.largest_difference(found["trained"][name], weights) / allowed
        assert found["losses"][name] == pytest.approx(losses, abs=of_losses), name
        described = found["described"][name]
        assert of.described in described
        assert ("sharded over the processes" in " ".join(described.split())) is (", zero3" in name)
        student = described.partition("\n  teacher")[0]
        assert student == of_one.partition("\n  teacher")[0], "sizes are those of all shards together"
    assert max(differences.values()) <= 1, differences

    assert (found["processes"], found["wrapper"]) == (2, of.wrapper)
    assert found["split"] == {strategy in WRITTEN}
    by_teacher = "full, some by the teacher"  # which writes the row that is empty elsewhere
    assert [name for name, empty in found["empty"].items() if sorted(empty) == [0, 0] and name != by_teacher] == []
    _check_used_before(strategy, found["used_before"], alone("full"))
    assert found["used_before"]["timeouts"] == {TIMEOUT}, "a group waits for less, or more, than `ddp_timeout`"
    for name, half in found["bfloat16"].items():
        _check_bfloat16(strategy, name, half, alone(of_strategy[name][0])[1])
    assert found.get("accumulated", 0) < 1e-5, "micro-batches add up in less than float32"
    for one in found["generated"]:
        assert [len(ids) for ids in one["written"]] == [3, 3, 20, 20]
        assert one["written"] == one["alone"]
        assert one["beside_none"] == one["alone"][:2], "where the other process has no prompts"
    if strategy in WRITTEN:
        assert "cannot generate completions, which needs a whole model in each process" in found["cannot_write"]
    if strategy == "zero3":
        _check_sharded_teacher(found["share"])
        gathered, not_gathered = found["generated"][:2]
        assert not_gathered["losses"] == pytest.approx(gathered["losses"], abs=TOLERANCE)
    if strategy == "fsdp2":
        assert "the launch has no DeepSpeed ZeRO-3" in found["refused"]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp2"])
def test_single_process_that_evaluates_first_learns_the_same(strategy, models, alone):
    """DDP would not wrap a single process."""
    found = forks.results(STRATEGIES[strategy].config, used_before, models, 1, processes=1)[0]
    _check_used_before(strategy, found, alone("full"))


def _check_used_before(strategy, found, alone):
    assert found["wrapper"] == STRATEGIES[strategy].wrapper
    assert found["losses"] == pytest.approx(alone[1], abs=TOLERANCE)
    assert variants.largest_difference(found["trained"], alone[0]) <= TOLERANCE
    assert all(len(set(of_each)) == 1 for of_each in found["summed"]), "each process trains a model of its own"
    before, once, twice = found["evaluated"]
    assert twice < once < before
    assert found["moved"] > 20 * TOLERANCE, "the second training learns nothing"


def _check_bfloat16(strategy, name, half, in_float32):
    assert half["products"] == {phase: ["bfloat16"] for phase in PHASES}
    frozen_base = strategy == "ddp" and name.startswith("lora")  # which launchers that shard it cast by themselves
    kept = {"torch.bfloat16"} if strategy.startswith("zero") else {"torch.float32"}
    assert half["kept"] == (kept | {"torch.bfloat16"} if frozen_base else kept)
    frequencies = tiny.qwen2(32, seed=0).model.rotary_emb.inv_freq.tolist()
    assert half["frequencies"] == frequencies, "rounded, they rotate late positions wrongly"
    assert half["losses"] == pytest.approx(in_float32, abs=1e-2)
    assert all(torch.tensor(loss).bfloat16().item() != loss for loss in half["losses"]), "the loss is not rounded"


def _check_sharded_teacher(found):
    assert found["split"]
    assert found["share"] == pytest.approx(found["whole"] / 2, rel=0.01)
    assert found["devices"] == {"cpu"}
    assert found["gathered_between"] == 0
    assert found["agreed"] == 2
    assert found["ahead"] == [found["layer"], 2 * found["layer"]], "a layer is gathered while another computes"
