"""A vision-language checkpoint learns from text exactly as in TRL, and its checkpoints load again with all parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig
from support import tiny, vision_language
from support.parity import Replaying, losses, trained
from transformers import (
    AutoProcessor,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
)
from trl import DistillationConfig

from trl_opsd import HFRollout, OPSDConfig, OPSDTrainer

LAYERS = r".*(language|text)_model.*(q_proj|in_proj_qkv|up_proj)"
MODELS = {"model": (32, 0), "teacher_model": (48, 1)}
SHORT = [("gemma3", False, True), ("gemma4", False, False), ("qwen2_vl", True, False)]
LONG = [(one, False, False) for one in vision_language.FAMILIES if one != "gemma4"]
LONG += [("gemma3", True, True), ("gemma4", True, False), ("mistral3", True, False)]


@pytest.mark.parametrize(
    ("family", "lora", "sees"), [*SHORT, *(pytest.param(*one, marks=pytest.mark.long) for one in LONG)]
)
def test_training_on_text_equals_trl(tmp_path, family, lora, sees):
    """With a processor where it sees, else with a tokenizer alone."""
    options = tiny.options(tmp_path, beta=0.5, learning_rate=1e-2, max_steps=2, optim="sgd")

    def run(cls: type, config: type) -> Any:
        given = {"peft_config": LoraConfig(r=4, target_modules=LAYERS) if lora else None}
        models = {name: vision_language.model(family, *of) for name, of in MODELS.items()}
        return trained(cls, config(**options), **(vision_language.arguments(family) if sees else models), **given)

    trls, ours = run(Replaying, DistillationConfig), run(OPSDTrainer, OPSDConfig)
    assert losses(trls).std() > 0
    assert (losses(trls) - losses(ours)).abs().max() <= 1e-5
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
    trainer = trained(OPSDTrainer, tiny.config(tmp_path / "out", **options), **given)
    again = AutoProcessor.from_pretrained(tmp_path / "out" / "checkpoint-3")
    assert isinstance(again, Gemma3Processor)
    assert again.tokenizer.get_vocab() == trainer.processing_class.get_vocab()
    assert Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "out" / "checkpoint-3")
