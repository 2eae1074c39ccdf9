"""A reward model, which scores a prompt with its completion, as a function like all others.

B rows · L tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from trl_opsd._compat.deepspeed import loading
from trl_opsd._compat.sharding import in_zero3_model
from trl_opsd._compat.trl import apply_chat_template, get_config_model_id

__all__ = ["RewardModel", "check_model", "loaded_model", "loaded_tokenizer"]

_HOW = "pass a model with one label, `AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)`"


def check_model(source: Any, called: str) -> None:
    """Refuses a reward model that is missing, does not give one number, or is sharded; by its config if not loaded."""
    if isinstance(source, str):
        try:
            config = AutoConfig.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"`{called}={source!r}` is neither a folder nor a model id that can be read: correct it; a model with "
                f"Python code of its own has to be loaded by you, and passed as an object. {str(error).splitlines()[0]}"
            ) from error
        kinds = config.architectures or []
    else:
        config, kinds = source.config, [type(source).__name__]
        if in_zero3_model(source):
            raise ValueError(
                f"`{called}` was split over the processes by the student's ZeRO-3 config while it was loaded: pass its "
                "path, or load it before the config is built."
            )
    # transformers would add a head with random weights, and any text would get some number.
    if kinds and not any("SequenceClassification" in kind or "RewardModel" in kind for kind in kinds):
        raise ValueError(
            f"`{called}` is a {kinds[0]}, whose weights have no head that gives one number for a text: {_HOW}."
        )
    if config.num_labels != 1:
        raise ValueError(f"`{called}` gives {config.num_labels} numbers for a text: {_HOW}.")


def loaded_tokenizer(source: Any, called: str) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder of a reward model."""
    path = source if isinstance(source, str) else get_config_model_id(source.config)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"`{called}`: there is no tokenizer at {path!r}, where its model comes from: pass it, as "
            "`reward_processing_classes`."
        ) from error
    return tokenizer


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
