"""Rows with images are learned from as each alone in float64, also where a teacher sees others; text, as in TRL."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from PIL import Image
from support import parity, tiny, vision_language
from support.rollouts import Answering
from support.vision_language import answer, rows
from torch import Tensor
from transformers import AutoProcessor, Gemma3ForConditionalGeneration, Gemma3Processor, GenerationConfig
from trl import DistillationConfig

from trl_opsd import HFRollout, OPSDConfig, OPSDTrainer
from trl_opsd.types.rollout import cut_after_end

SHORT = ("gemma3", "qwen2_5_vl")
SEEING = [one if one in SHORT else pytest.param(one, marks=pytest.mark.long) for one in vision_language.SEEING]


LAYERS = r".*(language|text)_model.*(q_proj|in_proj_qkv|up_proj)"


def models(family: str, **other: Any) -> dict[str, Any]:
    teacher = vision_language.model(family, 48, 1, sees=True, **other)
    return {**vision_language.arguments(family), "teacher_model": teacher}


@pytest.mark.parametrize("blind", ["model", "teacher_model"])
def test_model_that_does_not_see_is_refused(make_trainer, blind):
    given = models("gemma3")
    for weight in given[blind].model.multi_modal_projector.parameters():
        torch.nn.init.zeros_(weight)
    with pytest.raises(ValueError, match="it does not see them"):
        make_trainer(train_dataset=rows([1] * 4), rollout=Answering(answer), **given).train()


# ---- Against each row alone, in float64 ------------------------------------------------------------------------------


def log_probs(model: Any, reader: Any, text: str, images: Sequence[Image.Image], completion: Sequence[int]) -> Tensor:
    """[C, V], float64, from the model's own forward pass on one row alone, with all that its processor returns."""
    made = reader.apply_chat_template(
        messages(text, images),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    prompt = made.pop("input_ids")
    made.pop("attention_mask")
    ids = torch.cat([prompt, torch.tensor([completion])], dim=1)
    taken = inspect.signature(getattr(model, "get_base_model", lambda: model)().forward).parameters
    zeros = torch.zeros(1, len(completion), dtype=torch.long)
    given = {
        name: torch.cat([value, zeros], dim=1) if value.shape == prompt.shape else value
        for name, value in made.items()
        if name in taken and (images or name not in ("token_type_ids", "mm_token_type_ids"))
    }
    given = {name: one.double() if one.is_floating_point() else one for name, one in given.items()}
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **given).logits
    return logits[0, prompt.size(1) - 1 : -1].double().log_softmax(-1)


def steps_in_float64(student: Any, teacher: Any, data: Dataset, readers: tuple[Any, Any], rate: float) -> list[float]:
    """Plain SGD on the mean forward KL, row by row, two rows a step; the losses, and the student changed in place."""
    student, teacher, found = student.double(), teacher.double().eval(), []
    trainable = [one for one in student.parameters() if one.requires_grad]
    for start in range(0, len(data), 2):
        some = [data[row] for row in (start, start + 1)]
        prompts = [ids_of(readers[0], row) for row in some]
        tokens = sum(len(answer(ids)) for ids in prompts)
        loss = torch.zeros((), dtype=torch.float64)
        for row, ids in zip(some, prompts, strict=True):
            text, theirs = row["prompt"][0]["content"], row.get("teacher_images")
            mine = log_probs(student, readers[0], text, row["images"], answer(ids))
            with torch.no_grad():
                images = row["images"] if theirs is None else theirs
                target = log_probs(teacher, readers[1], text, images, answer(ids))
            loss = loss + (target.exp() * (target - mine)).sum() / tokens
        gradients = torch.autograd.grad(loss, trainable, allow_unused=True)
        found.append(float(loss.detach()))
        with torch.no_grad():
            for one, gradient in zip(trainable, gradients, strict=True):
                if gradient is not None:
                    one.sub_(gradient, alpha=rate)
    return found


def messages(text: str, images: Sequence[Image.Image]) -> list[dict[str, Any]]:
    parts = [*({"type": "image", "image": one} for one in images), {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def ids_of(reader: Any, row: Any) -> list[int]:
    content = messages(row["prompt"][0]["content"], row["images"]) if row["images"] else row["prompt"]
    return reader.apply_chat_template(content, add_generation_prompt=True, tokenize=True, return_dict=True)[
        "input_ids"
    ][0]


CASES = {
    "mixed": ([0, 1, 2, 1], None, {}),
    "teacher sees others": ([1, 0, 2, 1], [2, 1, 0, 1], {}),
    "teacher's processor": ([1, 2, 0, 1], None, {"unit": 32}),
    "adapter": ([1, 0, 2, 1], None, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", SEEING)
def test_each_row_is_learned_from_as_alone(trained, family, case):
    numbers, theirs, other = CASES[case]
    data, readers = rows(numbers, theirs), [vision_language.processor(family, **one) for one in ({}, other)]
    both = models(family, **other)
    if case == "adapter":
        adapter = LoraConfig(r=4, target_modules=LAYERS, init_lora_weights=False)
        both["model"] = get_peft_model(both["model"], adapter)
    student, teacher = copy.deepcopy(both["model"]).train(), copy.deepcopy(both["teacher_model"])
    expected = steps_in_float64(student, teacher, data, readers, 1e-2)
    options = {"divergence": "forward_kl", "learning_rate": 1e-2, "max_steps": 2, "optim": "sgd", "max_grad_norm": 1e9}
    given = {**both, "rollout": Answering(answer), "teacher_processing_class": readers[1], "train_dataset": data}
    ours = trained(**given, **options, shuffle_dataset=False)
    assert tiny.logged(ours, "loss") == pytest.approx(expected, abs=5e-6)
    for mine, wanted in zip(ours.model.parameters(), student.parameters(), strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=0, atol=2e-5)  # of changes up to 4e-2


# ---- Rollouts --------------------------------------------------------------------------------------------------------


@pytest.fixture
def generating(make_trainer):
    """A trainer of models that see and decode greedily, and the prompts of rows."""

    def generating(family: str, data: Dataset, ends: list[int], tokens: int) -> tuple[OPSDTrainer, list[list[int]]]:
        given = {**models(family), "train_dataset": data, "rollout": HFRollout(), "max_completion_length": tokens}
        given["model"].generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=0)
        trainer = make_trainer(**given, generation_kwargs={"do_sample": False})
        return trainer, trainer.prompt_ids_of(trainer.teaching.read_rows(list(data)))

    return generating


@pytest.mark.parametrize("family", SEEING)
def test_rollouts_see_images(generating, family):
    ends = list(range(2, 200, 12))  # so that rows leave the batch one after the other
    data, reader = rows([0, 1, 2, 1, 2, 0]), vision_language.processor(family)
    trainer, prompts = generating(family, data, ends, 12)
    alone = copy.deepcopy(trainer.model).double().eval()
    for row, ids in zip(data, trainer.complete(prompts), strict=True):
        found = []
        while len(found) < 12 and not (found and found[-1] in ends):
            scores = log_probs(alone, reader, row["prompt"][0]["content"], row["images"], [*found, 0])[-1]
            scores[trainer.placeholders] = -torch.inf
            found.append(int(scores[: trainer.limits.vocabulary].argmax()))
        assert ids == cut_after_end(found, ends)


def test_rows_leave_batches_larger_than_their_images_pixels(generating):
    trainer, prompts = generating("llava", rows([1] * 36), [42, 63, 66, 164], 6)
    together = trainer.complete(prompts)
    assert len(set(map(len, together))) > 1, "some leave before others"
    assert together[30:] == trainer.complete(prompts[30:])


# ---- Checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_checkpoint_is_resumed_and_the_best_one_loaded(trained, tmp_path):
    """Which have other names than the model: transformers' trainer loads none of those, and only warns."""
    options = {"learning_rate": 1e-2, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    options |= {"train_dataset": rows([1, 0, 2, 1] * 2), "rollout": HFRollout()}
    whole = trained(**options, **models("gemma3"))
    resumed = trained(**options, **models("gemma3"), resume=str(tmp_path / "checkpoint-2"))
    assert torch.equal(tiny.weights(resumed), tiny.weights(whole))

    options |= {"learning_rate": 1.0, "max_steps": 2, "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": False}
    options |= {"rollout": Answering(answer), "eval_dataset": rows([1, 0])}
    ended = trained(**options, **models("gemma3"))
    assert ended.state.best_model_checkpoint.endswith("checkpoint-1")
    best = type(ended.model).from_pretrained(ended.state.best_model_checkpoint)
    for mine, expected in zip(ended.model.parameters(), best.parameters(), strict=True):
        assert torch.equal(mine, expected)


# ---- On text ---------------------------------------------------------------------------------------------------------


WIDTHS = {"model": (32, 0), "teacher_model": (48, 1)}
ON_TEXT = [("gemma3", False, True), ("gemma4", False, False), ("qwen2_vl", True, False)]
MORE_ON_TEXT = [(one, False, False) for one in vision_language.FAMILIES if one != "gemma4"]
MORE_ON_TEXT += [("gemma3", True, True), ("gemma4", True, False), ("mistral3", True, False)]


@pytest.mark.parametrize(
    ("family", "lora", "sees"), [*ON_TEXT, *(pytest.param(*one, marks=pytest.mark.long) for one in MORE_ON_TEXT)]
)
def test_training_on_text_equals_trl(tmp_path, family, lora, sees):
    """With a processor where it sees, else with a tokenizer alone."""
    options = tiny.options(tmp_path, beta=0.5, learning_rate=1e-2, max_steps=2, optim="sgd")

    def run(cls: type, config: type) -> Any:
        given = {"peft_config": LoraConfig(r=4, target_modules=LAYERS) if lora else None}
        models = {name: vision_language.model(family, *of) for name, of in WIDTHS.items()}
        return parity.trained(
            cls, config(**options), **(vision_language.arguments(family) if sees else models), **given
        )

    trls, ours = run(parity.Replaying, DistillationConfig), run(OPSDTrainer, OPSDConfig)
    assert parity.losses(trls).std() > 0
    assert (parity.losses(trls) - parity.losses(ours)).abs().max() <= 1e-5
    torch.testing.assert_close(tiny.weights(ours), tiny.weights(trls), rtol=0, atol=1e-5)
    assert ours.args.ddp_find_unused_parameters is (None if lora else True), "text leaves the vision tower untrained"


@pytest.mark.parametrize("family", ["gemma3", "qwen2_vl"])
def test_image_placeholders_are_never_generated(make_trainer, family):
    student = vision_language.model(family, 32, 0)
    trainer = make_trainer(model=student, rollout=HFRollout(), generation_kwargs={"do_sample": False})
    prompts = trainer.tokenize(tiny.PROMPTS[:2])
    before = trainer.complete(prompts)
    with torch.no_grad():
        weight = student.get_output_embeddings().weight
        weight[vision_language.PLACEHOLDER] = 2 * weight[before[0][0]]
    assert trainer.complete(prompts) == before
    trainer.generation_config.suppress_tokens = [7]  # further suppressed tokens do not replace it
    assert vision_language.PLACEHOLDER not in {token for ids in trainer.complete(prompts) for token in ids}
    assert trainer.placeholders == [vision_language.PLACEHOLDER]


def test_checkpoints_have_the_processor_and_empty_image_columns_are_text(tmp_path):
    given = vision_language.arguments("gemma3")
    for part in ("model", "processing_class"):
        given[part].save_pretrained(tmp_path / "student")
    rows = tiny.rows().add_column("images", [[]] * 8).add_column("image", [None] * 8)
    given |= {"model": str(tmp_path / "student"), "processing_class": None, "train_dataset": rows}
    options = {"save_strategy": "steps", "save_steps": 3, "remove_unused_columns": False}
    trainer = parity.trained(OPSDTrainer, tiny.config(tmp_path / "out", **options), **given)
    again = AutoProcessor.from_pretrained(tmp_path / "out" / "checkpoint-3")
    assert isinstance(again, Gemma3Processor)
    assert again.tokenizer.get_vocab() == trainer.processing_class.get_vocab()
    assert Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "out" / "checkpoint-3")
