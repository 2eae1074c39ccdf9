"""The placement of the teacher changes its memory use, and no number."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import dispatch_model, init_empty_weights
from support import tiny
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config
from trl.trainer import distillation_trainer

from trl_opsd import FrozenTeacher
from trl_opsd._compat.deepspeed import loading, reader_config
from trl_opsd.models.grouping import bytes_per_token
from trl_opsd.teacher import Resident, build
from trl_opsd.teacher.frozen import pass_groups
from trl_opsd.teacher.offloaded import HostBlock, Hosted, Streamed, parts_of, tensors_of
from trl_opsd.types import Rollout
from trl_opsd.types.targets import targets_device

CPU = torch.device("cpu")
TEACHERS = {
    "qwen2": lambda: tiny.qwen2(48, 1, num_hidden_layers=5),
    "qwen2_tied": lambda: tiny.qwen2(48, 1, num_hidden_layers=3, tie_word_embeddings=True),
    "gpt2": lambda: tiny.gpt2(48, 1),
    "gemma2": lambda: tiny.gemma2(48, 1, num_hidden_layers=4),
}


def rollout(rows: int = 6, prompt: int = 9, completion: int = 7, seed: int = 0) -> Rollout:
    """Random tokens, the prompts padded on the left by different amounts."""
    torch.manual_seed(seed)
    mask = torch.ones(rows, completion, dtype=torch.long)
    return Rollout(
        prompt_ids=torch.randint(3, tiny.VOCABULARY, (rows, prompt)),
        prompt_mask=(torch.arange(prompt) >= torch.arange(rows)[:, None] % 4).long(),
        completion_ids=torch.randint(3, tiny.VOCABULARY, (rows, completion)),
        completion_mask=mask,
        weights=mask.float(),
    )


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def addresses(model: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors_of(model)]


def storages(model: nn.Module) -> dict[int, int]:
    """Bytes of each piece of memory that a model's tensors lie in."""
    return {one.data_ptr(): one.nbytes() for one in (tensor.untyped_storage() for tensor in tensors_of(model))}


def few_rows(model: nn.Module, rows: int, length: int = 16) -> int:
    """A budget for the activations of that many rows and a half."""
    of_token, of_pair = bytes_per_token(model)
    one = length * (of_token + of_pair * length)
    return rows * one + one // 2


class TestNumbers:
    @pytest.mark.parametrize("teacher", TEACHERS)
    @pytest.mark.parametrize("placement", [Hosted, Streamed])
    @pytest.mark.parametrize("rows", [1, 2, 6])
    @pytest.mark.quick
    def test_targets_do_not_depend_on_the_placement(self, teacher, placement, rows):
        make = TEACHERS[teacher]
        expected, actual = (
            FrozenTeacher(where(make(), CPU), pass_bytes=few_rows(make(), rows)).targets(rollout())
            for where in (Resident, placement)
        )
        assert torch.equal(expected.hidden, actual.hidden)

    @pytest.mark.parametrize("odd", ["run out of order", "share weights"])
    def test_layers_of_any_kind_give_the_same_targets(self, odd):
        def made() -> Any:
            model = tiny.llama(48, 1, num_hidden_layers=3)
            first, second, third = model.model.layers
            if odd == "share weights":
                third.mlp = first.mlp
                shared = {id(parameter) for parameter in first.mlp.parameters()}
                assert shared <= {id(tensor) for tensor in parts_of(model).rest}
            else:
                model.model.layers = nn.ModuleList([first, third, second, third, third, first])
                model.config.num_hidden_layers = 6
            return model

        expected, actual = (FrozenTeacher(where(made(), CPU)).targets(rollout()) for where in (Resident, Streamed))
        assert torch.equal(expected.hidden, actual.hidden)


class TestOrder:
    """A prefetcher and the layers keep a journal: on a CPU nothing else shows what waits for what."""

    def journal(self, placement: Any, passes: int) -> list[str]:
        placed = placement(tiny.qwen2(48, 1, num_hidden_layers=3), CPU)
        prefetcher, names = placed.prefetcher, {id(placed._rest): "rest", id(placed._head): "head"}
        names |= {id(block): str(number) for number, block in enumerate(placed._blocks)}
        fetch, entries = prefetcher.fetch, []

        def fetched(block: HostBlock, buffer: torch.Tensor) -> str:
            fetch(block, buffer)
            entries.append(f"copy {names[id(block)]}")
            return names[id(block)]

        prefetcher.fetch, prefetcher.wait = fetched, lambda copy: entries.append(f"wait {copy}")
        for number, layer in enumerate(placed.model.model.layers):
            layer.self_attn.register_forward_hook(lambda *_, number=number: entries.append(f"compute {number}"))
        with placed.loaded(passes) as run, torch.no_grad():
            for _ in range(passes):
                run(lambda model: model.model(torch.tensor([[5, 6]])))
        return ", ".join(entries).removeprefix("copy head, wait head, copy rest, wait rest, ").split(", ")

    def test_a_hosted_layer_computes_when_it_has_arrived(self):
        first = ["copy 0", "wait 0", "copy 1", "copy 2", "compute 0", "wait 1", "compute 1", "wait 2", "compute 2"]
        again = ["wait 0", "compute 0", "wait 1", "compute 1", "wait 2", "compute 2"]
        assert self.journal(Hosted, 2) == first + again

    def test_a_streamed_layer_is_copied_while_the_one_before_computes(self):
        turns = ["wait {}", "copy {}", "compute {}"]
        layers = [(0, 1), (1, 2), (2, 0), (0, 1), (1, 2), (2, None)]
        expected = [text.format(after if "copy" in text else now) for now, after in layers for text in turns]
        assert self.journal(Streamed, 2) == ["copy 0", *(one for one in expected if "None" not in one)]


class TestPinned:
    def test_gpu_pins_weights_only_while_they_are_used(self, monkeypatch):
        pinned: dict[int, int] = {}
        runtime = SimpleNamespace(
            cudaHostRegister=lambda address, nbytes, _: pinned.update({address: nbytes}), cudaHostUnregister=pinned.pop
        )
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
        model = tiny.qwen2(160, 1)  # a layer takes 0.9 MB, which torch would round up to 1.05
        before = weights_of(model)
        blocks = [HostBlock(own, torch.device("cuda")) for _, own in parts_of(model).layers]
        nbytes = sum(tensor.nbytes for layer in model.model.layers for tensor in tensors_of(layer))
        assert nbytes <= sum(pinned.values()) <= 1.02 * nbytes
        assert {min(addresses(layer)) for layer in model.model.layers} == pinned.keys()
        del blocks
        assert not pinned
        assert all(map(torch.equal, weights_of(model), before)), "the weights outlive what pinned them"


class TestBytes:
    @pytest.mark.parametrize("teacher", TEACHERS)
    def test_streaming_holds_at_most_two_layers_beside_head_and_rest(self, teacher):
        model = TEACHERS[teacher]()
        parts = parts_of(model)
        layer = max(sum(tensor.nbytes for tensor in own) for _, own in parts.layers)
        head = sum(tensor.nbytes for tensor in parts.head)
        rest = sum(tensor.nbytes for tensor in parts.rest)
        padding = 256 * len(tensors_of(model))
        streamed = FrozenTeacher(Streamed(model, CPU))
        prefetcher = streamed.placement.prefetcher
        assert head <= prefetcher.held_bytes <= head + padding
        streamed.targets(rollout())
        assert 2 * layer + head + rest <= prefetcher.peak_bytes <= 2 * layer + head + rest + padding
        assert prefetcher.held_bytes <= head + padding
        whole = sum(tensor.nbytes for tensor in tensors_of(model))
        assert len(parts.layers) == 2 or prefetcher.peak_bytes < whole - layer / 2

    def test_the_recorded_peak_is_the_allocated_peak(self):
        model = tiny.qwen2(128, 1, num_hidden_layers=6)
        streamed = FrozenTeacher(Streamed(model, CPU))
        prefetcher = streamed.placement.prefetcher
        head = prefetcher.held_bytes
        one = rollout(rows=1, prompt=2, completion=2)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            streamed.targets(one)
        now = peak = 0
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        for event in sorted(events, key=lambda event: event.start_ns()):
            now += event.nbytes()
            peak = max(peak, now)
        activations = 100_000  # four tokens; a layer has 590 kB
        assert prefetcher.peak_bytes - head <= peak <= prefetcher.peak_bytes - head + activations

    def test_a_failed_pass_leaves_the_host_weights_in_place(self):
        for placement in (Hosted, Streamed):
            teacher = FrozenTeacher(placement(TEACHERS["qwen2"](), CPU))
            before, held = addresses(teacher.model), teacher.placement.prefetcher.held_bytes
            expected = teacher.targets(rollout()).hidden
            broken = rollout()
            broken.completion_ids[3, 2] = tiny.VOCABULARY + 5  # no such embedding
            with pytest.raises(IndexError):
                teacher.targets(broken)
            stop = teacher.model.model.layers[2].register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                teacher.targets(rollout())
            stop.remove()
            assert addresses(teacher.model) == before
            assert teacher.placement.prefetcher.held_bytes == held
            assert torch.equal(teacher.targets(rollout()).hidden, expected)

    def test_a_pass_does_not_compute_on_the_host_weights(self):
        """Where the device is the host, the other tests are meaningful only with separate buffers."""
        for placement in (Hosted, Streamed):
            teacher = FrozenTeacher(placement(TEACHERS["qwen2"](), CPU))
            masters, seen = set(addresses(teacher.model)), []
            for module in (teacher.model.model.embed_tokens, *(one.mlp for one in teacher.model.model.layers)):
                module.register_forward_hook(lambda module, *_, seen=seen: seen.extend(addresses(module)))
            teacher.targets(rollout())
            assert len(seen) == 1 + 5 * 3
            assert not masters.intersection(seen)
            assert set(addresses(teacher.model)) == masters

    def test_a_hosted_model_is_in_host_memory_once_and_on_the_device_while_it_scores(self):
        model = TEACHERS["qwen2"]()
        held = storages(model)
        hosted = FrozenTeacher(Hosted(model, CPU))
        packed, prefetcher = storages(model), hosted.placement.prefetcher
        assert sum(packed.values()) <= sum(held.values()) + 256 * len(held)
        assert len(packed) == 5 + 2, "one piece for each layer, the head, the rest"
        hosted.targets(rollout())
        assert prefetcher.peak_bytes >= sum(tensor.nbytes for tensor in tensors_of(model))
        assert prefetcher.held_bytes <= hosted.head.weight.nbytes + 256


class TestPasses:
    def config(self, **overrides: Any) -> Any:
        seven_billion = Qwen2Config(
            hidden_size=3584, intermediate_size=18944, num_attention_heads=28, attn_implementation="sdpa", **overrides
        )
        return SimpleNamespace(config=seven_billion, dtype=torch.bfloat16)

    def test_passes_are_long_enough_to_hide_the_streaming(self):
        """9 to 14 thousand tokens hide the copies of a model of any size, but that of the first layer."""
        first, *_ = pass_groups(self.config(), [2048] * 64, torch.device("meta"), passes_are_costly=True)
        assert 14_000 <= 2048 * len(first) <= 20_000

    def test_the_scores_of_eager_attention_are_counted(self):
        eager = self.config()
        eager.config._attn_implementation = "eager"
        assert bytes_per_token(eager)[1] * 2048 > bytes_per_token(eager)[0], "at this length more than all else"

    @pytest.mark.parametrize(
        ("choice", "nbytes", "where"),
        [("auto", 10**9, "cuda"), ("auto", 10**9 + 1, "cpu"), ("accelerator", 10**12, "cuda"), ("cpu", 1, "cpu")],
    )
    def test_the_device_of_targets_follows_from_option_and_size(self, choice, nbytes, where):
        assert targets_device(choice, nbytes, torch.device("cuda")) == torch.device(where)


class TestLoading:
    def test_the_students_deepspeed_config_is_restored_after_loading(self):
        students = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
        try:
            with loading(None):
                assert not is_deepspeed_zero3_enabled()
            assert is_deepspeed_zero3_enabled()
            with pytest.raises(ZeroDivisionError), loading(None):
                raise ZeroDivisionError
            assert is_deepspeed_zero3_enabled()
            with loading({"zero_optimization": {"stage": 0}}):
                assert not is_deepspeed_zero3_enabled()
            assert is_deepspeed_zero3_enabled()
        finally:
            unset_hf_deepspeed_config()
            del students

    def test_the_deepspeed_config_of_the_teacher_reads_the_next_layer_ahead(self):
        config = reader_config(torch.bfloat16, 64, torch.device("cuda"), layer=900)
        assert not {"optimizer", "scheduler", "gradient_accumulation_steps", "train_batch_size"} & set(config)
        assert (config["bf16"]["enabled"], config["fp16"]["enabled"]) == (True, False)
        assert config["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}
        ahead = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters")
        assert [config["zero_optimization"][name] for name in ahead] == [900, 1800], "the next layer, beside this one"

    @pytest.mark.parametrize("offload", ["none", "cpu", "stream"])
    def test_a_teacher_from_a_path_gives_the_same_targets(self, make_trainer, tmp_path, offload):
        teacher = tiny.qwen2(48, 1)
        teacher.save_pretrained(tmp_path / "teacher")
        trainer = make_trainer(teacher_model=str(tmp_path / "teacher"), teacher_offload=offload)
        expected = FrozenTeacher(Resident(teacher, CPU)).targets(rollout())
        assert torch.equal(trainer.teacher.targets(rollout()).hidden, expected.hidden)


def mapped(**places: Any) -> Any:
    model = tiny.qwen2(48, 1)
    model.hf_device_map = places
    return model


def unlisted() -> Any:
    model = tiny.qwen2(48, 1)
    model.model.layers = nn.Sequential(*model.model.layers)
    return model


def quantised() -> Any:
    model = tiny.qwen2(48, 1)
    model.is_quantized = True
    return model


def empty() -> Any:
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(tiny.qwen2(48, 1).config)


def on_disk(folder: Path) -> Any:
    """A model whose first layer is in a file."""
    names = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
    places = {name: "disk" if name == "model.layers.0" else "cpu" for name in names}
    return dispatch_model(tiny.qwen2(), places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


class TestRefusals:
    @pytest.mark.refusal
    @pytest.mark.parametrize(
        ("teacher", "offload", "message"),
        [
            (unlisted(), "stream", "does not keep its layers in a `torch.nn.ModuleList`"),
            (mapped(model="cpu"), "cpu", "its weights cannot be moved"),
            (quantised(), "stream", "its weights cannot be moved"),
        ],
    )
    def test_a_teacher_that_cannot_be_moved_is_refused(self, make_trainer, teacher, offload, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            make_trainer(teacher_model=teacher, teacher_offload=offload)

    @pytest.mark.parametrize("teacher", [quantised(), mapped(model="cpu")])
    def test_without_offload_an_immovable_teacher_is_accepted(self, make_trainer, teacher):
        teacher.to = None  # a quantised model must not be moved, even to its own device
        trainer = make_trainer(teacher_model=teacher)
        assert trainer.teacher.targets(rollout()).hidden.shape == (6, 7, 48)

    @pytest.mark.refusal
    @pytest.mark.parametrize("who", ["student", "teacher"])
    @pytest.mark.parametrize(
        ("made", "named"),
        [
            (lambda _: mapped(one=0, two=1), "0, 1"),
            (lambda _: mapped(one="cpu", two="disk"), "cpu, disk"),
            (lambda _: empty(), "meta"),
            (on_disk, ".*meta"),
        ],
        ids=["accelerators", "disk", "no values", "a layer in a file"],
    )
    def test_a_model_on_other_devices_is_refused(self, make_trainer, tmp_path, who, made, named):
        said = rf"The {who} \(Qwen2ForCausalLM\) is not in memory of cpu, .* onto {named}: load"
        with pytest.raises(ValueError, match=said):
            make_trainer(**{"model" if who == "student" else "teacher_model": made(tmp_path)})

    @pytest.mark.before_loading
    def test_one_process_loads_onto_its_own_accelerator_only(self, make_trainer, tmp_path, monkeypatch):
        def loaded(path, **how):
            raise RuntimeError(how["device_map"])

        own = torch.device("cuda", 0)
        args = tiny.config(tmp_path)
        for module in (build, distillation_trainer):
            monkeypatch.setattr(module, "create_model_from_path", loaded)
        vars(args)["_setup_devices"] = own
        for load in (partial(make_trainer, args=args), partial(build.build_teacher, "teacher", args)):
            with pytest.raises(RuntimeError, match=re.escape(str({"": own}))):
                load()
