"""A static teacher whose rows share prefixes reads these once, and no target or loss depends on it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from support import tiny
from transformers import AutoModelForCausalLM

from trl_opsd import FrozenTeacher, OPSDConfig
from trl_opsd.models.backbone import backbone_of
from trl_opsd.teacher import Resident, prefix
from trl_opsd.teacher.offloaded import Hosted, Streamed
from trl_opsd.teacher.prefix import PrefixMemory
from trl_opsd.teacher.prefix_choice import LEAST, chosen_prefixes
from trl_opsd.types import Rollout

CPU = torch.device("cpu")
DRAW = random.Random(0)


def ids(number: int) -> list[int]:
    return [DRAW.randint(3, tiny.VOCABULARY - 1) for _ in range(number)]


DOCUMENT, OTHER = ids(150), ids(140)
PREFIX_BYTES = 2 * 2 * 24 * 4 * len(DOCUMENT)
"""Of the document in `qwen2`: keys and values of two layers, of one head of width 24, in float32."""


def rollout(prompts: Sequence[list[int]], completion: int = 6) -> Rollout:
    return Rollout.of(prompts, [ids(DRAW.randint(1, completion)) for _ in prompts], CPU)


def after(*documents: list[int]) -> Rollout:
    return rollout([[*document, *ids(DRAW.randint(2, 9))] for document in documents])


def qwen2() -> Any:
    return tiny.qwen2(48, 1)


def other_family(name: str, **sizes: Any) -> Any:
    given = {**tiny._sizes(32), "head_dim": 16, **sizes}
    return tiny.model(getattr(transformers, name)(**given), 1)


SLIDING = ["sliding_attention", "full_attention"]
FAMILIES = {
    "llama": lambda: tiny.llama(48, 1),
    "qwen3": lambda: other_family("Qwen3Config"),
    "gemma2": lambda: tiny.gemma2(48, 1, sliding_window=20),
    "gemma3": lambda: other_family("Gemma3TextConfig", sliding_window=20, layer_types=SLIDING),
    "gpt2": lambda: tiny.gpt2(48, 1),
    "experts": lambda: other_family(
        "Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1
    ),
}
RECURRENT = {
    "mamba2": lambda: tiny.model(
        transformers.Mamba2Config(
            vocab_size=259, hidden_size=32, num_hidden_layers=2, state_size=8, head_dim=16, num_heads=4, n_groups=1
        )
    ),
    "lfm2": lambda: other_family("Lfm2Config", layer_types=["conv", "full_attention"]),
}


def sharing(model: Any, memory: PrefixMemory | None = None, placement: Any = Resident, **given: Any) -> FrozenTeacher:
    return FrozenTeacher(placement(model, CPU), prefix_memory=memory or PrefixMemory(1e9), **given)


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """The tokens that a model is called with, of each pass, padding included."""
    tokens: list[int] = []
    hook = backbone_of(model).register_forward_pre_hook(
        lambda _, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    yield tokens
    hook.remove()


def check_equal(teacher: FrozenTeacher, model: Any, given: Rollout, tolerance: float = 1e-6) -> None:
    """Targets are those of a teacher that reads whole rows."""
    expected, found = FrozenTeacher(Resident(model, CPU)).targets(given).hidden, teacher.targets(given).hidden
    assert (found - expected).norm() <= tolerance * expected.norm()


class TestNumbers:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_targets_equal_those_of_whole_rows(self, family):
        make = FAMILIES[family]
        teacher = sharing(make())
        for documents in ([DOCUMENT] * 3, [DOCUMENT], [DOCUMENT[:90] + OTHER] * 2 + [DOCUMENT, OTHER]):
            check_equal(teacher, make(), after(*documents))
        assert teacher.prefixes is not None
        assert teacher.prefixes.saved > 4 * 80

    @pytest.mark.parametrize("family", RECURRENT)
    def test_a_family_without_keys_and_values_reads_whole_rows(self, family, caplog):
        PartialState()  # which warnings need
        model = RECURRENT[family]()
        teacher = sharing(model)
        assert "has no effect on this teacher" in caplog.text
        assert type(model).__name__ in caplog.text
        with counted(model) as tokens:
            check_equal(teacher, RECURRENT[family](), given := after(DOCUMENT, DOCUMENT), tolerance=0)
        assert sum(tokens) >= sum(given.sizes)

    @pytest.mark.parametrize("placement", [Hosted, Streamed])
    def test_placements_give_the_same_targets(self, placement):
        teacher, memory = sharing(qwen2(), memory := PrefixMemory(1e9), placement), memory
        for documents in ([DOCUMENT] * 3, [DOCUMENT, OTHER]):
            check_equal(teacher, qwen2(), after(*documents))
        assert memory.held == PREFIX_BYTES

    def test_half_precision_is_as_close_as_its_rounding(self):
        given = after(*[DOCUMENT] * 4)
        exact = FrozenTeacher(Resident(qwen2(), CPU)).targets(given).hidden
        whole, found = (
            teacher.targets(given).hidden.float()
            for teacher in (FrozenTeacher(Resident(qwen2().bfloat16(), CPU)), sharing(qwen2().bfloat16()))
        )
        assert (found - exact).norm() <= 1.2 * (whole - exact).norm()

    def test_autocast_has_keys_and_values_of_its_own(self):
        teacher, whole = sharing(qwen2()), FrozenTeacher(Resident(qwen2(), CPU))
        for enabled in (True, False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                given = after(*[DOCUMENT] * 3)
                found, expected = teacher.targets(given).hidden, whole.targets(given).hidden
            assert (found - expected).norm() <= (1e-2 if enabled else 1e-6) * expected.norm()

    def test_rows_without_a_token_that_counts_are_read(self):
        given = after(*[DOCUMENT] * 3)
        given.weights[1] = 0
        check_equal(sharing(qwen2()), qwen2(), given)

    def test_completions_of_one_prompt_share_all_but_its_last_token(self):
        model = qwen2()
        teacher, prompts = sharing(model), [DOCUMENT] * 4
        check_equal(teacher, qwen2(), rollout(prompts))
        assert [len(one.ids) for one in teacher.prefixes.kept] == [len(DOCUMENT) - 1]

    def test_masked_tokens_are_read_as_in_whole_rows(self):
        given = rollout([[*DOCUMENT, *ids(4)] for _ in range(3)])
        given.prompt_mask[0, 40:44] = 0
        given.completion_mask[1, 0] = 0
        check_equal(sharing(qwen2()), qwen2(), given)

    def test_rows_as_long_as_the_context(self):
        for family in ("gpt2", "llama"):
            given = rollout([[*DOCUMENT, *ids(number)] for number in (2, 100, 99)], completion=1)
            assert max(given.sizes) in (251, 252)
            longest = Rollout.of(given.prompt_lists(), [ids(3), ids(6), ids(7)], CPU)
            assert max(longest.sizes) == 256
            check_equal(sharing(FAMILIES[family](), pad_to_multiple_of=64), FAMILIES[family](), longest)

    def test_training_losses_are_those_of_whole_rows(self, make_trainer):
        losses = {}
        for gigabytes in (0, 0.1):
            trainer = make_trainer(
                teacher_model=qwen2(), teacher_prefix_cache_gb=gigabytes, max_steps=3, learning_rate=1e-2, **document()
            )  # fmt: skip
            trainer.train()
            losses[gigabytes] = tiny.logged(trainer, "divergence/mean")
            saved = tiny.logged(trainer, "teacher/prefix_saved")
            assert bool(saved) is bool(gigabytes)
        assert losses[0.1] == pytest.approx(losses[0], rel=1e-6)
        assert saved[2] >= 2 * 155, "all that two rows have in common"


def document() -> dict[str, Any]:
    """Options of a teacher that reads a document before each prompt."""
    template = "".join(chr(97 + one % 26) for one in DOCUMENT) + "{privileged_context}{prompt}"
    rows = tiny.rows(16).add_column("privileged_context", [f"hint {number}" for number in range(16)])
    return {"train_dataset": rows, "teacher_prompt_template": template}


class TestWork:
    def test_a_document_is_read_once(self):
        model = qwen2()
        teacher, given = sharing(model), after(*[DOCUMENT] * 4)
        with counted(model) as tokens:
            teacher.targets(given)
        rest = max(given.sizes) - len(DOCUMENT)
        assert tokens[0] == len(DOCUMENT)
        assert sum(tokens[1:]) <= 4 * rest
        with counted(model) as tokens:
            teacher.targets(given := after(DOCUMENT))
        assert tokens == [given.sizes[0] - len(DOCUMENT)]

    def test_single_rows_learn_what_is_shared_at_the_second_step(self):
        model = qwen2()
        teacher = sharing(model)
        with counted(model) as tokens:
            rows = [after(DOCUMENT) for _ in range(3)]
            for row in rows:
                check_equal(teacher, qwen2(), row)
        first, second, third = ((row.sizes[0]) for row in rows)
        assert tokens == [first, len(DOCUMENT), second - len(DOCUMENT), third - len(DOCUMENT)]

    def test_a_longer_prefix_is_cropped(self, monkeypatch):
        monkeypatch.setitem(prefix.PASS_TOKENS, "cpu", 1)
        model = qwen2()
        teacher = sharing(model)
        teacher.targets(after(*[DOCUMENT] * 3))
        with counted(model) as tokens:
            check_equal(teacher, qwen2(), given := after(DOCUMENT[:100]))
        assert sum(tokens) == given.sizes[0] - 100
        assert [len(one.ids) for one in teacher.prefixes.kept] == [150]

    def test_nested_prefixes_are_read_once_each(self, monkeypatch):
        monkeypatch.setitem(prefix.PASS_TOKENS, "cpu", 1)
        model, system = qwen2(), ids(60)
        teacher, documents = sharing(model), [[*system, *ids(70)] for _ in range(2)]
        given = after(*documents[:1] * 3, *documents[1:] * 3, system)
        with counted(model) as tokens:
            check_equal(teacher, qwen2(), given)
        assert [(one.begin, len(one.ids)) for one in teacher.prefixes.kept] == [(0, 60), (60, 130), (60, 130)]
        assert tokens[:2] == [60, 140]
        assert teacher.prefixes.computed == sum(given.sizes) - teacher.prefixes.saved
        assert teacher.prefixes.saved == 6 * 130 + 60 - 200

    def test_rows_that_share_nothing_are_read_as_without(self):
        given = after(ids(40), ids(50), DOCUMENT)
        check_equal(sharing(qwen2()), qwen2(), given, tolerance=0)

    @pytest.mark.long
    def test_a_cache_never_grows_beyond_the_rows_of_256_calls(self):
        teacher = sharing(qwen2())
        for _ in range(3):
            teacher.targets(after(*[ids(2) for _ in range(100)]))
        assert len(teacher.prefixes._prompts) == prefix.REMEMBERED


class TestMemory:
    def test_the_least_recently_used_go_first(self):
        documents = [ids(150) for _ in range(3)]
        memory = PrefixMemory(2.5 * PREFIX_BYTES)
        teacher = sharing(qwen2(), memory)
        for number in (0, 1, 0, 2):
            check_equal(teacher, qwen2(), after(*[documents[number]] * 3))
            assert memory.held <= memory.limit
        assert {one.ids[:150].tobytes() for one in teacher.prefixes.kept} == {
            np.array(documents[number]).tobytes() for number in (0, 2)
        }

    def test_there_is_room_before_a_segment_is_read(self, monkeypatch):
        held, read = [], prefix.keys_and_values

        def noting(*given: Any) -> Any:
            held.append(memory.held)
            return read(*given)

        monkeypatch.setattr(prefix, "keys_and_values", noting)
        memory = PrefixMemory(1.5 * PREFIX_BYTES)
        teacher = sharing(qwen2(), memory)
        for one in (DOCUMENT, OTHER):
            teacher.targets(after(*[one] * 3))
        assert held == [0, 0]
        memory.limit = 0
        teacher.targets(after(ids(3)))
        assert memory.held == 0

    @pytest.mark.parametrize("share", [0.5, 1.5])
    def test_a_call_uses_no_more_than_the_limit(self, share):
        memory = PrefixMemory(share * PREFIX_BYTES)
        teacher = sharing(qwen2(), memory)
        check_equal(teacher, qwen2(), after(*[DOCUMENT] * 3, *[OTHER] * 3))
        assert teacher.prefixes.saved <= (share > 1) * 3 * len(DOCUMENT), "the other document is in whole rows"
        for _ in range(2):
            check_equal(teacher, qwen2(), after(*[DOCUMENT] * 3, *[OTHER] * 3))
            assert len(teacher.prefixes.kept) == (share > 1)
            assert memory.held <= memory.limit

    def test_teachers_share_the_limit(self):
        memory = PrefixMemory(1.5 * PREFIX_BYTES)
        first, second = (sharing(qwen2(), memory) for _ in range(2))
        first.targets(after(*[DOCUMENT] * 3))
        second.targets(after(*[DOCUMENT] * 3))
        assert (first.prefixes.kept, len(second.prefixes.kept)) == ([], 1)
        del second
        assert memory.held == 0, "of a teacher that is gone"

    @pytest.mark.parametrize("through", ["in place", ".data", "another tensor"])
    def test_changed_weights_drop_what_is_kept(self, through):
        model, changed = qwen2(), qwen2()
        teacher = sharing(model)
        teacher.targets(given := after(*[DOCUMENT] * 3))
        for one in (model, changed):
            with torch.no_grad():
                weight = one.model.layers[0].self_attn.k_proj.weight
                if through == "in place":
                    weight[3, 5] += 1
                elif through == ".data":
                    weight.data += 0.1
                else:
                    weight.data = weight.data * 1.5
        check_equal(teacher, changed, given)

    def test_adapters_of_one_base_have_their_own(self, make_trainer, tmp_path):
        tiny.qwen2(32, 0).save_pretrained(tmp_path / "base")
        for seed, name in enumerate(("one", "two")):
            torch.manual_seed(seed)
            base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
            get_peft_model(base, LoraConfig(r=4, init_lora_weights=False)).save_pretrained(tmp_path / name)
        losses = []
        for gigabytes in (0, 0.1):
            given = document()
            given["train_dataset"] = given["train_dataset"].add_column("teacher", ["one", "two"] * 8)
            trainer = make_trainer(
                teacher_model={name: str(tmp_path / name) for name in ("one", "two")},
                teacher_prefix_cache_gb=gigabytes, max_steps=2, **given,
            )  # fmt: skip
            trainer.train()
            losses.append(tiny.logged(trainer, "divergence/mean"))
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)
        assert all(teacher.prefixes.kept for teacher in trainer.teachers.values())


class TestOptions:
    def test_the_student_as_it_was_passed_is_static(self, make_trainer):
        losses = []
        for gigabytes in (0, 0.1):
            lora = LoraConfig(r=4, target_modules="all-linear")
            trainer = make_trainer(
                teacher_model=None, teacher_model_kind="base", peft_config=lora, learning_rate=1e-2, max_steps=3,
                teacher_prefix_cache_gb=gigabytes, **document(),
            )  # fmt: skip
            trainer.train()
            losses.append(tiny.logged(trainer, "divergence/mean"))
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)
        saved = tiny.logged(trainer, "teacher/prefix_saved")
        assert saved[1] > saved[0] > 0, "adapters that are trained are no change"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"teacher_prefix_cache_gb": -1}, "expected greater than or equal to 0"),
        ],
    )
    def test_options_that_do_not_fit_are_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            OPSDConfig("out", bf16=False, **{"teacher_prefix_cache_gb": 0.5, **options})

    @pytest.mark.parametrize("kind", ["live", "ema"])
    def test_a_teacher_that_changes_keeps_none(self, make_trainer, kind):
        options = {"teacher_model_kind": kind, "teacher_prefix_cache_gb": 0.5, "max_steps": 1}
        trainer = make_trainer(teacher_model=None, **options, **document())
        assert trainer.teacher.prefixes is None


def brute(prompts: list[Any], lengths: list[int], earlier: list[Any], kept: list[Any], pass_tokens: int) -> float:
    """The least cost over all sets of prefixes, each row with the longest that it begins with."""
    candidates = {tuple(one[:end]) for one in prompts for end in range(LEAST, len(one) + 1)}
    common = {
        tuple(one[: _common(one, other)]) for one, other in itertools.product([*prompts, *earlier, *kept], repeat=2)
    }
    candidates &= common
    best = float("inf")
    for number in range(3):
        for chosen in itertools.combinations(sorted(candidates), number):
            best = min(best, cost(chosen, prompts, lengths, earlier, kept, pass_tokens))
    return best


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    differing = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def cost(
    chosen: Sequence[tuple[int, ...]], prompts: Any, lengths: Any, earlier: Any, kept: Any, pass_tokens: int
) -> float:
    """Tokens of the passes that read these prefixes and the rows, less what an earlier call's row would save."""
    total = 0.0
    for ids_ in chosen:
        above = max((len(one) for one in chosen if len(one) < len(ids_) and ids_[: len(one)] == one), default=0)
        known = max([above, *(_common(ids_, one) for one in kept)])
        total += max(len(ids_) - known, pass_tokens) if known < len(ids_) else 0
        if known < len(ids_) and any(_common(ids_, one) == len(ids_) for one in earlier):
            total -= len(ids_) - above
    groups: dict[tuple[int, ...], int] = {}
    for prompt, length in zip(prompts, lengths, strict=True):
        fitting = max((one for one in chosen if tuple(prompt[: len(one)]) == one), key=len, default=())
        groups[fitting] = groups.get(fitting, 0) + length - len(fitting)
    return total + sum(max(one, pass_tokens) for one in groups.values())


@pytest.mark.parametrize("pass_tokens", [1, 60])
def test_the_choice_of_prefixes_is_the_cheapest(pass_tokens):
    """Among all sets of up to two."""
    draw, closest = random.Random(0), []
    for _ in range(30):
        a, b = ([draw.randint(1, 9) for _ in range(number)] for number in (draw.randint(33, 80), draw.randint(33, 80)))
        bodies = [a, [*a, *b], b, [*a, *b], a]
        prompts = [[*draw.choice(bodies), *(draw.randint(1, 9) for _ in range(3))] for _ in range(draw.randint(1, 5))]
        earlier = [[*draw.choice(bodies), 0] for _ in range(draw.randint(0, 2))]
        kept = [draw.choice(bodies)] * draw.randint(0, 1)
        lengths = [len(prompt) + draw.randint(1, 20) for prompt in prompts]
        arrays = [[np.array(one) for one in some] for some in (prompts, earlier, kept)]
        chosen = [tuple(one.tolist()) for one in chosen_prefixes(arrays[0], lengths, arrays[1], arrays[2], pass_tokens)]
        found = cost(chosen, prompts, lengths, earlier, kept, pass_tokens)
        closest.append(found / brute(prompts, lengths, earlier, kept, pass_tokens))
    assert sorted(closest)[len(closest) // 2] <= 1.0
    assert max(closest) <= 1.05
