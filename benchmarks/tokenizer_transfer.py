"""Moves a pretrained chat model to another tokenizer: the model itself is the teacher of its own body with new tokens.

    python benchmarks/tokenizer_transfer.py --model out/smollm2 --output out/transfer

The student has a byte-level tokenizer of 4,000 merges, learned from Python's own manual. The embedding of a token is
the mean of those of the model's tokens that spell it. That breaks it, and each training repairs some of it: by bytes on
its own completions, on the teacher's in its own tokens, or on these first. A line of `results.jsonl` is one training.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import torch
from datasets import Dataset
from real_model.questions import FACTS, questions
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd.data.byte_vocabulary import ByteVocabulary

MERGES, TOKENS, ROWS = 4000, 24, 4
MANUAL = "\n".join(topics.values())
WAYS: dict[str, list[tuple[float, dict[str, Any]]]] = {
    "nothing": [],
    "bytes": [(1.0, {"divergence": "jsd"})],
    "samples": [(1.0, {"divergence": "forward_kl", "seq_kd": True, "lmbda": 0.0, "sft_weight": 1.0})],
}
"""Of each way its parts, with their share of the steps."""
WAYS["samples, then bytes"] = [(0.5, WAYS["samples"][0][1]), (0.5, WAYS["bytes"][0][1])]


def tokenizer(of: Any) -> PreTrainedTokenizerFast:
    """Byte-level, with the special tokens and the chat template of a model's."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [str(one) for one in of.added_tokens_decoder.values() if one.special]
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + len(letters) + MERGES, special_tokens=special, initial_alphabet=letters,
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator([MANUAL[: len(MANUAL) * 4 // 5]], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=of.eos_token, pad_token=of.pad_token, chat_template=of.chat_template
    )


def transplanted(path: str) -> tuple[Any, PreTrainedTokenizerFast]:
    """The model with another tokenizer."""
    model, words = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), AutoTokenizer.from_pretrained(path)
    mine = tokenizer(words)
    yours, spelled = ByteVocabulary.of(words, "it"), ByteVocabulary.of(mine, "the student").texts
    old, rows = model.get_input_embeddings().weight.detach().clone(), list[torch.Tensor]()
    for number, name in enumerate(mine.convert_ids_to_tokens(range(len(mine)))):
        text = spelled[number]
        # A part of a character has the embedding of its bytes.
        ids = [words.convert_tokens_to_ids(name)] if text is None else yours.ids_of(text.decode(errors="ignore"))
        ids = ids or [yours.texts.index(bytes([byte])) for byte in text or b"" if bytes([byte]) in yours.texts] or [0]
        rows.append(old[ids].mean(0))
    model.resize_token_embeddings(len(mine))
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.stack(rows))
    model.config.eos_token_id = model.generation_config.eos_token_id = mine.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = mine.pad_token_id
    return model, mine


def chat(question: str) -> list[dict[str, str]]:
    """With a short system prompt in place of a long one."""
    return [{"role": "system", "content": "Answer."}, {"role": "user", "content": question}]


@torch.no_grad()
def measured(model: Any, words: Any) -> dict[str, float]:
    """Nats per byte of prose that no tokenizer has read and of the answer's language, and the facts that it knows."""
    model.eval()
    prose = MANUAL[len(MANUAL) * 9 // 10 :][:12_000]
    nats = bytes_ = 0.0
    for at in range(0, len(prose), 1500):
        ids = words(prose[at : at + 1500], return_tensors="pt", add_special_tokens=False)["input_ids"]
        logs = model(ids).logits[0, :-1].log_softmax(-1)
        nats -= float(logs.gather(1, ids[0, 1:, None]).sum())
        bytes_ += len(words.decode(ids[0, 1:]).encode())
    asked = [words.apply_chat_template(chat(one), tokenize=False, add_generation_prompt=True) for one in FACTS]
    batch = words(asked, padding=True, padding_side="left", return_tensors="pt", add_special_tokens=False)
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    made = model.generate(**given, do_sample=False, max_new_tokens=TOKENS)[:, given["input_ids"].size(1) :]
    said = zip(words.batch_decode(made, skip_special_tokens=True), FACTS.values(), strict=True)
    right = [any(one.lower() in text.lower() for one in known) for text, known in said]
    return {"nats_per_byte": nats / bytes_, "facts": sum(right) / len(right)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the folder of a chat model")
    parser.add_argument("--steps", type=int, default=40, help=f"each of {ROWS} completions of {TOKENS} tokens")
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY")
    parser.add_argument("--output", type=Path, default=Path("out/transfer"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    teacher = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    its = AutoTokenizer.from_pretrained(options.model)
    print("teacher", of_teacher := measured(teacher, its))
    rows = Dataset.from_dict({"prompt": [chat(one) for one in questions()]})
    for way in options.ways:
        student, words = transplanted(options.model)
        start, logs = time.monotonic(), list[dict[str, Any]]()
        for share, given in WAYS[way]:
            trainer = OPSDTrainer(
                model=student,
                teacher_model=teacher,
                args=OPSDConfig(
                    str(options.output / "run"), cross_tokenizer="bytes", max_steps=round(share * options.steps),
                    per_device_train_batch_size=ROWS, max_completion_length=TOKENS, learning_rate=options.rate,
                    warmup_steps=3, logging_steps=5, save_strategy="no", report_to="none", disable_tqdm=True,
                    gradient_checkpointing=False, collapse_guard=None, **given,
                ),
                train_dataset=rows,
                processing_class=words,
                teacher_processing_class=its,
            )  # fmt: skip
            trainer.train()
            logs += [one for one in trainer.state.log_history if "cross/used" in one]
        found = {"way": way, "steps": options.steps, "rate": options.rate, "seconds": time.monotonic() - start}
        found |= {f"teacher_{name}": value for name, value in of_teacher.items()} | measured(student, words)
        found |= {name: sum(one[name] for one in logs) / len(logs) for name in ("cross/used", "cross/forks") if logs}
        print(found)
        with (options.output / "results.jsonl").open("a") as out:
            out.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
