"""Tiny models, a tokenizer and rows, all made here: nothing is downloaded, and every number has a fixed seed."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from trl_opsd import OPSDConfig
from trl_opsd.methods.rewards import Rewards
from trl_opsd.types import Rollout

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte and three special ones: 259 ids, any text, a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL_TOKENS,
        chat_template=CHAT_TEMPLATE,
    )


VOCABULARY = 259


def model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random model whose predictions are far from uniform, so that a wrong divergence shows."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        made.get_output_embeddings().weight.mul_(12)
    return made


def qwen2(width: int = 32, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Rotary positions, untied head."""
    return model(Qwen2Config(**{**sizes(width), **overrides}), seed)


def llama(width: int = 32, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """As Qwen2, without biases."""
    return model(LlamaConfig(**{**sizes(width), **overrides}), seed)


def gemma2(width: int = 32, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Caps its logits."""
    special = {"head_dim": 16, "final_logit_softcapping": 5.0, "tie_word_embeddings": True}
    return model(Gemma2Config(**{**sizes(width), **special, **overrides}), seed)


def gpt2(width: int = 32, seed: int = 0, dropout: float = 0.0, **overrides: Any) -> PreTrainedModel:
    """Learned absolute positions, a tied head, and dropout if asked for."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=256,
        n_embd=width,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=2,
        **overrides,
    )
    return model(config, seed)


def sizes(width: int) -> dict[str, Any]:
    """Fields of a config."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


PROMPTS = ["2+2=", "The sky is", "a", "Count: one two", "red, green,", "x", "why?", "Once upon a time"]
ANSWERS = [
    "4<|im_end|>",
    " blue today<|im_end|>",
    "bc",
    " three four five<|im_end|>",
    " blue",
    "yz<|im_end|>",
    " so.",
    " a<|im_end|>",
]


def rows(number: int = 8) -> Dataset:
    """Prompts of different lengths."""
    return Dataset.from_dict({"prompt": [PROMPTS[i % len(PROMPTS)] for i in range(number)]})


def recorded(words: PreTrainedTokenizerFast) -> dict[tuple[int, ...], list[int]]:
    """Completions of different lengths, some without an end token, by prompt."""
    prompts, answers = words(PROMPTS)["input_ids"], words(ANSWERS)["input_ids"]
    return {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}


def add(a: int, b: int) -> int:
    """A tool: adds.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The sum.
    """
    return a + b


def rollout(prompt_ids: torch.Tensor, completion_ids: torch.Tensor, mask: torch.Tensor) -> Rollout:
    """Whole prompts, and completions of which every real token counts."""
    return Rollout(
        prompt_ids=prompt_ids,
        prompt_mask=torch.ones_like(prompt_ids),
        completion_ids=completion_ids,
        completion_mask=mask,
        weights=mask.float(),
    )


def logged(trainer: Any, name: str) -> list[float]:
    """What a trainer has logged under a name."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def share_of_others(log: dict[str, float]) -> float:
    """Share of the tokens in the loss that the student has not written, by the log of a step."""
    tokens = {one: log.get(f"tokens/{one}", 0.0) for one in ("student", "teacher", "dataset", "environment")}
    return 1 - tokens["student"] / sum(tokens.values()) if any(tokens.values()) else 0.0


def weights(trainer: Any) -> torch.Tensor:
    """A copy of the student's weights, in one piece, in host memory."""
    return torch.cat([one.detach().flatten() for one in trainer.model.parameters()]).cpu()


def config(folder: Any, **overrides: Any) -> OPSDConfig:
    """Three optimizer steps of two rows, in float32, quietly."""
    return OPSDConfig(**options(folder, **overrides))


def save_pair(folder: Any) -> None:
    """Saves a student and a teacher with their tokenizer, in folders of these names."""
    for name, model in {"student": qwen2(32, seed=0), "teacher": qwen2(48, seed=1)}.items():
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)


SETTINGS = {
    "contrast_weight": ("contrast", "weight"), "contrast_clip": ("contrast", "clip"),
    "extrapolation": ("extrapolation", "factor"), "anchor_weight": ("anchor", "weight"),
    "token_selection": ("token_selection", "criterion"), "token_fraction": ("token_selection", "fraction"),
    "loss_aggregation": ("aggregation", "by"), "teacher_weights": ("aggregation", "weights"),
    "student_quantization": ("student_quantization", "format"), "sft_weight": ("off_policy", "nll_weight"),
    "author_weights": ("off_policy", "weights"),
}  # fmt: skip
"""Settings of methods by the flat names that tests give them, beside options."""


def with_methods(options: dict[str, Any]) -> dict[str, Any]:
    """Options in which such settings stand in `methods`, where methods have them."""
    found = {name: value for name, value in options.items() if name not in (*SETTINGS, "collapse_guard")}
    given = found.pop("methods", None)
    if given is not None and not isinstance(given, dict):
        return {**found, "methods": given}
    methods: dict[str, Any] = dict(given or {})
    for name, (method, setting) in SETTINGS.items():
        if options.get(name) not in (None, "tokens"):
            methods.setdefault(method, {})[setting] = options[name]
    if options.get("collapse_guard", True) is None:
        methods["collapse_guard"] = {"warns": False}
    return {**found, **({"methods": methods} if methods else {})}


REWARDS = {
    "reward_funcs": "functions", "reward_processing_classes": "tokenizers", "reward_weight": "weight",
    "reward_weights": "weights", "scale_rewards": "scale", "multi_objective_aggregation": "aggregation",
    "reward_gate": "gate", "teacher_context": "context", "success_threshold": "threshold",
}  # fmt: skip
"""Settings of `Rewards` by the names that TRL and tests have for them."""


def rewards(given: dict[str, Any]) -> list[Rewards]:
    """`Rewards` with such settings, taken out of what is given to a trainer and its config; none where all are off."""
    settings = {REWARDS[name]: given.pop(name) for name in [*given] if name in REWARDS}
    found = {name: value for name, value in settings.items() if value is not None and (name, value) != ("weight", 0)}
    return [Rewards(**found)] if found else []


def options(folder: Any, **overrides: Any) -> dict[str, Any]:
    """The options of [`config`], as TRL's own config takes them too."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": 3,
        "max_completion_length": 24,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        **with_methods(overrides),
    }
