"""Teaches a student a language from a teacher that has another tokenizer, by distributions over the next byte.

    python examples/two_tokenizers/train.py --output out/two_tokenizers

Makes the teacher, which has read the language, and the student, which has read its words mostly at random: minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trl_opsd import OPSDConfig, OPSDTrainer
from two_tokenizers.task import END, Language, batches, prompts, tokenizer

SHAPES = {"teacher": (128, 560, 500, 0.0), "student": (96, 360, 250, 0.7)}
"""Width, token ids, steps of supervised training, and the noise of what was read in it."""


def made(folder: Path, role: str) -> tuple[Any, Any]:
    """A model and its tokenizer, trained once: the teacher on the language, the student on mostly random words."""
    if not (folder / "config.json").exists():
        width, size, steps, noise = SHAPES[role]
        language = Language(noise)
        words = tokenizer(language.sentences(1, 2000), size)
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(words),
                hidden_size=width,
                intermediate_size=3 * width,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=256,
                eos_token_id=words.eos_token_id,
                bos_token_id=None,
                pad_token_id=words.pad_token_id,
            )
        )
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.05, steps)
        for _, batch in zip(range(steps), batches(words, language, 2, 32), strict=False):
            model(**batch).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.save_pretrained(folder)
        words.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def measured(model: Any, words: Any, count: int = 200) -> dict[str, float]:
    """What a model has learned of the language: how it reads sentences of it, and writes some."""
    language, was_training = Language(), model.training
    model.eval()
    texts = language.sentences(3, count)
    batch = words([text + END for text in texts], padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    nats = float(model(**batch, labels=labels).loss) * int((labels[:, 1:] != -100).sum())
    torch.manual_seed(0)
    starts = words(list(prompts(language, 4, count)["prompt"]), padding=True, padding_side="left", return_tensors="pt")
    written = model.generate(**starts, do_sample=True, max_new_tokens=64, top_k=0)
    right = [language.right(text) for text in words.batch_decode(written, skip_special_tokens=True)]
    used = {one for text in words.batch_decode(written, skip_special_tokens=True) for one in text.rstrip(".").split()}
    model.train(was_training)
    return {
        "nats_per_byte": nats / sum(len(text) + 1 for text in texts),
        "right": sum(one for one, _ in right) / max(sum(all_ for _, all_ in right), 1),
        "words": len(used & set(language.words)),
    }


def main(arguments: Sequence[str] | None = None, trainer_class: type[OPSDTrainer] = OPSDTrainer) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/two_tokenizers"))
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps, each of 32 completions")
    parser.add_argument("--divergence", default="jsd")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--samples", type=int, default=0, help="steps before these, on completions of the teacher")
    parser.add_argument("--missed", type=float, default=0.01, help="the option `cross_tokenizer_missed`")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and sampling")
    options = parser.parse_args(arguments)
    teacher, its_words = made(options.output / "teacher", "teacher")
    student, words = made(options.output / "student", "student")
    before, start = measured(student, words), time.monotonic()

    def a_trainer(cls: type[OPSDTrainer], steps: int, **given: Any) -> OPSDTrainer:
        chosen: dict[str, Any] = {
            "cross_tokenizer": "bytes",
            "cross_tokenizer_missed": options.missed,
            "divergence": options.divergence,
            "max_steps": steps,
            "per_device_train_batch_size": 32,
            "max_completion_length": 64,
            "learning_rate": options.learning_rate,
            "warmup_steps": 10,
            "logging_steps": 10,
            "seed": options.seed,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        return cls(
            model=student,
            teacher_model=teacher,
            args=OPSDConfig(str(options.output / "run"), **{**chosen, **given}),
            eval_dataset=prompts(Language(), 4, 64),
            train_dataset=prompts(Language(), 5 + options.seed, 32 * (options.samples + options.steps)),
            processing_class=words,
            teacher_processing_class=its_words,
        )

    # The distance is measured in the same way, whatever is trained with.
    judge = a_trainer(OPSDTrainer, 1, divergence="reverse_kl", cross_tokenizer_missed=0.01)
    trainer = a_trainer(trainer_class, max(1, options.steps))
    to_teacher = [judge.evaluate()["eval_cross/divergence"]]
    if options.samples:
        # The teacher writes, and the student is also told what it wrote.
        a_trainer(
            OPSDTrainer, options.samples, seq_kd=True, lmbda=0.0, methods={"off_policy": {"nll_weight": 1.0}}
        ).train()
    if options.steps:
        trainer.train()
    trainer.save_model()
    to_teacher.append(judge.evaluate()["eval_cross/divergence"])
    after, seconds = measured(student, words), time.monotonic() - start
    used = [one["cross/used"] for one in trainer.state.log_history if "cross/used" in one]
    found = {
        **{f"{name}_before": value for name, value in before.items()},
        **{f"{name}_after": value for name, value in after.items()},
        "teacher_nats_per_byte": measured(teacher, its_words)["nats_per_byte"],
        "divergence_before": to_teacher[0],
        "divergence_after": to_teacher[1],
        "used": sum(used) / max(len(used), 1),
        "seconds": seconds,
    }
    for name, value in found.items():
        print(f"{name:22} {value:.3f}")
    options.output.joinpath("result.json").write_text(json.dumps(found))
    print(f"the student: {trainer.args.output_dir}")
    return found


if __name__ == "__main__":
    main()
