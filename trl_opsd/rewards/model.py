"""A reward model, which scores a prompt with its completion, as a function like all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from trl_opsd._compat.deepspeed import loading
from trl_opsd._compat.trl import apply_chat_template

__all__ = ["RewardModel", "loaded_model"]


def loaded_model(path: str) -> Any:
    """The model at a path, unsharded in each process."""
    # Without the student's ZeRO-3 config, which would shard this model too.
    with loading(None):
        return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, use_safetensors=True)


@final
class RewardModel:
    """Scores completions with a model, as TRL's GRPO does, so many `rows` at a time."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any], rows: int) -> None:
        self._model = model.eval().requires_grad_(False)
        self._tokenizer, self._template, self._rows = tokenizer, template, rows
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        # The model finds a text's last token, where its logit is, as the last that is not padding.
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        """The reward of each completion."""
        texts = [self._text(prompt, one) for prompt, one in zip(prompts, completions, strict=True)]
        parts = [texts[at : at + self._rows] for at in range(0, len(texts), self._rows)]
        return [reward for part in parts for reward in self._scored(part)]

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + str(completion)
        rendered = apply_chat_template({"messages": [*prompt, *completion]}, self._tokenizer, **self._template)
        return str(rendered["text"])

    @torch.inference_mode()
    def _scored(self, texts: list[str]) -> list[float]:
        # The chat template has already added special tokens.
        read = self._tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        ).to(self._model.device)
        rewards: list[float] = self._model(**read).logits[:, 0].float().tolist()
        return rewards
