"""Trains a drafter for a target, and counts what real speculative decoding accepts of it, before and after.

    python examples/drafter.py --output out/drafter

Target and drafter read the language of `two_tokenizers`; the drafter is too small for it. Both are made first.
transformers decodes with the drafter as `assistant_model`, four drafted tokens at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from fitting import fit
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from two_tokenizers.task import Language, batches, tokenizer

from trl_opsd import OPSDConfig, OPSDTrainer

SHAPES = {"target": (96, 2, 500), "drafter": (16, 1, 600)}
"""Width, layers, and steps of supervised training."""
DRAFTED = 4
"""Tokens that the drafter proposes before the target reads them."""
LONGEST = 48


def made(folder: Path, role: str) -> Any:
    """A model that has read the language, trained once."""
    if not (folder / "config.json").exists():
        language, (width, layers, steps) = Language(), SHAPES[role]
        words = tokenizer(language.sentences(1, 2000), 400)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(words),
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=256,
            eos_token_id=words.eos_token_id,
            bos_token_id=None,
            pad_token_id=words.pad_token_id,
        )
        model = LlamaForCausalLM(config)
        fit(model, batches(words, language, 2, 32), steps=steps)
        model.save_pretrained(folder)
        words.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def starts(seed: int, count: int) -> list[str]:
    """The first two words of as many sentences."""
    found = (one.split(" ")[:2] for one in Language().sentences(seed, 3 * count))
    return [" ".join(one) for one in found if len(one) == 2 and not one[1].endswith(".")][:count]


def decoded(target: Any, drafter: Any, prompts: Sequence[list[int]], sample: bool) -> dict[str, Any]:
    """Completes prompts by speculative decoding; counts the target's forward passes, and which tokens they tested.

    A draft is accepted if it stands in the result: one that is rejected is never drawn again in its place.
    """
    drafter.generation_config.num_assistant_tokens = DRAFTED
    drafter.generation_config.num_assistant_tokens_schedule = "constant"  # else it grows with each success
    drafter.generation_config.assistant_confidence_threshold = 0.0  # else drafts end where the drafter is unsure
    inputs: list[list[int]] = []
    hook = target.register_forward_pre_hook(
        lambda _, args, given: inputs.append(given["input_ids"][0].tolist()), with_kwargs=True
    )
    found: dict[str, Any] = {"completions": {}, "tested": [], "tokens": 0, "forwards": 0, "accepted": 0}
    for prompt in prompts:
        inputs.clear()
        ids = target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            assistant_model=drafter,
            do_sample=sample,
            top_k=0 if sample else None,
            max_new_tokens=LONGEST,
        )[0].tolist()
        place, tested = len(prompt), []
        for number, read in enumerate(inputs):
            drafts = read[1:] if number else read[len(prompt) :]  # after the prompt, or the last token
            pairs = list(zip(drafts, ids[place:], strict=False))
            kept = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
            tested += range(place, place + min(kept + 1, len(pairs)))
            found["accepted"] += kept
            place += kept + 1
        assert place in (len(ids), len(ids) + 1), "each forward pass adds its accepted drafts and a token"
        found["completions"][tuple(prompt)] = ids[len(prompt) :]
        found["tested"].append((ids, tested))
        found["tokens"] += len(ids) - len(prompt)
        found["forwards"] += len(inputs)
    hook.remove()
    return found


def measured(target: Any, drafter: Any, prompts: Sequence[list[int]]) -> dict[str, float]:
    """What speculative decoding accepts of a drafter, and tokens for each forward pass of the target."""
    torch.manual_seed(1)
    drafter.eval()
    found = {}
    for how, sample in (("sampled", True), ("greedy", False)):
        seen = decoded(target, drafter, prompts, sample)
        found[f"accepted, {how}"] = seen["accepted"] / sum(len(places) for _, places in seen["tested"])
        found[f"tokens per step, {how}"] = seen["tokens"] / seen["forwards"]
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/drafter"))
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps, each of 64 completions")
    parser.add_argument("--prompts", type=int, default=60, help="held-out prompts for speculative decoding")
    options = parser.parse_args(arguments)
    target = made(options.output / "target", "target")
    words = AutoTokenizer.from_pretrained(options.output / "target")
    held_out = words(list(dict.fromkeys(starts(4, 3 * options.prompts)))[: options.prompts])["input_ids"]
    trainer = OPSDTrainer(
        model=made(options.output / "drafter", "drafter"),
        teacher_model=target,
        args=OPSDConfig(
            str(options.output / "run"),
            divergence="negative_log_acceptance",
            lmbda=0.0,  # the target writes the rows: a drafter is asked after its texts
            seq_kd=True,
            max_steps=options.steps,
            per_device_train_batch_size=64,
            max_completion_length=LONGEST,
            learning_rate=5e-3,  # for a model this small; 2e-5 for a real one
            lr_scheduler_type="linear",
            warmup_steps=5,
            logging_steps=20,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_dict({"prompt": starts(100, 64 * options.steps)}),
        processing_class=words,
    )
    found = {"before": measured(target, trainer.model, held_out)}
    trainer.train()
    trainer.save_model(str(options.output / "trained"))
    found["after"] = measured(target, trainer.model, held_out)
    for name in found["before"]:
        print(f"{name:26}{found['before'][name]:.3f} before, {found['after'][name]:.3f} after")
    print(f"the drafter: {options.output / 'trained'}; its target: {options.output / 'target'}")
    return found


if __name__ == "__main__":
    main()
