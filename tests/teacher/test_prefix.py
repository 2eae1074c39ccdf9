"""A static teacher reads once what the rows of a batch share, and no target or loss depends on it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from support import tiny
from transformers import AutoModelForCausalLM

from trl_opsd import FrozenTeacher
from trl_opsd.models.backbone import backbone_of
from trl_opsd.teacher import Resident
from trl_opsd.teacher.offloaded import Hosted, Streamed
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
    given = {**tiny.sizes(32), "head_dim": 16, **sizes}
    return tiny.model(getattr(transformers, name)(**given), 1)


SLIDING = ["sliding_attention", "full_attention"]
FAMILIES = {
    "llama": lambda: tiny.llama(48, 1),
    "gemma3": lambda: other_family("Gemma3TextConfig", sliding_window=20, layer_types=SLIDING),
    "gpt2": lambda: tiny.gpt2(48, 1),
    "experts": lambda: other_family(
        "Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1
    ),
}


def sharing(model: Any, placement: Any = Resident, **given: Any) -> FrozenTeacher:
    return FrozenTeacher(placement(model, CPU), **{"prefix_bytes": 1e9, **given})


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
        for documents in ([DOCUMENT] * 3, [DOCUMENT], [DOCUMENT[:90] + OTHER] * 2 + [DOCUMENT], [DOCUMENT, OTHER]):
            check_equal(teacher, make(), after(*documents))
        assert teacher.prefix.saved == 2 * 150 + 150 + 3 * 90

    def test_a_family_without_keys_and_values_reads_whole_rows(self, caplog):
        PartialState()  # which warnings need
        model, again = (other_family("Lfm2Config", layer_types=["conv", "full_attention"]) for _ in range(2))
        teacher = sharing(model)
        assert f"{type(model).__name__}) cannot continue" in caplog.text
        with counted(model) as tokens:
            check_equal(teacher, again, given := after(DOCUMENT, DOCUMENT), tolerance=0)
        assert sum(tokens) >= sum(given.sizes)

    @pytest.mark.parametrize("placement", [Hosted, Streamed])
    def test_placements_give_the_same_targets(self, placement):
        teacher = sharing(qwen2(), placement)
        for documents in ([DOCUMENT] * 3, [DOCUMENT, DOCUMENT]):
            check_equal(teacher, qwen2(), after(*documents))
        assert teacher.prefix.kept == DOCUMENT

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

    @pytest.mark.parametrize("which", ["a row of no weight", "masked tokens", "one prompt"])
    def test_rows_of_any_kind_equal_whole_rows(self, which):
        given = rollout([[*DOCUMENT, *([] if which == "one prompt" else ids(4))] for _ in range(4)])
        if which == "a row of no weight":
            given.weights[1] = 0
        elif which == "masked tokens":
            given.prompt_mask[0, 40:44] = 0
            given.completion_mask[1, 0] = 0
        teacher = sharing(qwen2())
        check_equal(teacher, qwen2(), given)
        assert which != "one prompt" or teacher.prefix.kept == DOCUMENT[:-1], "all but its last token"

    def test_rows_as_long_as_the_context(self):
        for family in ("gpt2", "llama"):
            given = rollout([[*DOCUMENT, *ids(number)] for number in (2, 100, 99)], completion=1)
            assert max(given.sizes) in (251, 252)
            longest = Rollout.of(given.prompt_lists(), [ids(3), ids(6), ids(7)], CPU)
            assert max(longest.sizes) == 256
            check_equal(sharing(FAMILIES[family](), pad_to_multiple_of=64), FAMILIES[family](), longest)


class TestWork:
    def test_a_longer_prefix_is_cropped_and_a_shorter_one_extended(self):
        model = qwen2()
        teacher = sharing(model)
        for document, read in ((DOCUMENT, 150), (DOCUMENT[:100], 0), ([*DOCUMENT[:100], *OTHER], 140), (DOCUMENT, 50)):
            with counted(model) as tokens:
                check_equal(teacher, qwen2(), given := after(*[document] * 8))
            assert sum(tokens[: read > 0]) == read
            assert max(tokens[read > 0 :]) <= 8 * (max(given.sizes) - len(document))
        assert teacher.prefix.kept == DOCUMENT
        assert teacher.prefix.saved == 8 * (150 + 100 + 240 + 150) - 150 - 140 - 50

    @pytest.mark.parametrize("common", [0, 60], ids=["nothing in common", "less than a mask costs"])
    def test_rows_that_share_too_little_are_read_as_without(self, common):
        given = after(*[[*DOCUMENT[:common], *ids(120)] for _ in range(4)])
        teacher = sharing(qwen2())
        check_equal(teacher, qwen2(), given, tolerance=0)
        assert (teacher.prefix.computed, teacher.prefix.saved) == (sum(given.sizes), 0)


class TestMemory:
    def test_a_prefix_is_no_larger_than_the_limit(self):
        teacher = sharing(qwen2(), prefix_bytes=0.8 * PREFIX_BYTES)
        for _ in range(2):
            check_equal(teacher, qwen2(), after(*[DOCUMENT] * 8))
            assert teacher.prefix.kept == DOCUMENT[:120]

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


class TestTraining:
    @pytest.fixture
    def document(self) -> dict[str, Any]:
        """Options of a teacher that reads a document before each prompt."""
        template = "".join(chr(97 + one % 26) for one in DOCUMENT) + "{privileged_context}{prompt}"
        rows = tiny.rows(16).add_column("privileged_context", [f"hint {number}" for number in range(16)])
        return {"train_dataset": rows, "teacher_prompt_template": template, "max_steps": 3, "learning_rate": 1e-2}

    @pytest.fixture
    def adapters(self, tmp_path, document) -> dict[str, Any]:
        """Two of one base."""
        tiny.qwen2(32, 0).save_pretrained(tmp_path / "base")
        for seed, name in enumerate(("one", "two")):
            torch.manual_seed(seed)
            base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
            get_peft_model(base, LoraConfig(r=4, init_lora_weights=False)).save_pretrained(tmp_path / name)
        return {
            "train_dataset": document["train_dataset"].add_column("teacher", ["one", "two"] * 8),
            "teacher_model": {name: str(tmp_path / name) for name in ("one", "two")},
            "per_device_train_batch_size": 4,
        }

    @pytest.mark.parametrize("kind", ["another", "base", "adapters"])
    def test_losses_are_those_of_whole_rows(self, trained, document, adapters, kind):
        losses = {}
        for gigabytes in (0, 0.1):
            lora = LoraConfig(r=4, target_modules="all-linear")
            given = {
                "another": {"teacher_model": qwen2()},
                "base": {"teacher_model": None, "teacher_model_kind": "base", "peft_config": lora},
                "adapters": adapters,
            }[kind]
            trainer = trained(**{**document, **given, "teacher_prefix_cache_gb": gigabytes})
            losses[gigabytes] = tiny.logged(trainer, "divergence/mean")
            saved = tiny.logged(trainer, "teacher/prefix_saved")
            assert bool(saved) is bool(gigabytes)
        assert losses[0.1] == pytest.approx(losses[0], rel=1e-6)
        assert saved[1] > saved[0] > 0, "adapters that are trained are no change"
        assert kind == "adapters" or saved[2] >= 2 * 155, "all that two rows have in common"
        assert all(teacher.prefix.kept for teacher in trainer.teachers.values())

    @pytest.mark.parametrize("kind", ["live", "ema"])
    def test_a_teacher_that_changes_keeps_none(self, make_trainer, document, kind):
        trainer = make_trainer(teacher_model=None, teacher_model_kind=kind, teacher_prefix_cache_gb=0.5, **document)
        assert trainer.teacher.prefix is None
