"""Gives a pretrained model a smaller tokenizer, and repairs it by distillation from the model as it was.

    python examples/real_model/convert.py out/smollm2
    python benchmarks/tokenizer_transfer.py --model out/smollm2 --output out/transfer --rates 1e-4 3e-4

The new tokenizer has some thousand merges; the embedding of each token begins as the mean of the old ones that spell
it. A line of `results.jsonl` is one training, and what it holds is not trained again.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import torch
from datasets import Dataset
from real_model.distil import MODULES, fast_dtype
from real_model.questions import FACTS, questions
from tokenizers import Tokenizer, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, TokenizersBackend

from trl_opsd import OPSDConfig, OPSDTrainer

TOKENS = 32
"""The longest completion."""

SYSTEM = {"role": "system", "content": "Answer in one sentence."}
"""Shorter than that of the template, which is most of a prompt."""

CAPITALS = """
Portugal Lisbon, Greece Athens, Egypt Cairo, China Beijing, Austria Vienna, Poland Warsaw, Ireland Dublin, Norway Oslo,
Sweden Stockholm, Finland Helsinki, Denmark Copenhagen, Hungary Budapest, Cuba Havana, Kenya Nairobi, Peru Lima,
Canada Ottawa, Australia Canberra, Thailand Bangkok, Iran Tehran, Iraq Baghdad
"""
NAMES = dict(one.split() for one in " ".join(CAPITALS.split()).split(", "))
KNOWN = {**FACTS, **{f"What is the capital of {land}?": [city] for land, city in NAMES.items()}}
"""Questions, and words that an answer has to contain one of; none is trained on."""

COMMON: dict[str, Any] = {
    **{"per_device_train_batch_size": 8, "max_completion_length": TOKENS, "gradient_checkpointing": False},
    **{"bf16": fast_dtype() == "bfloat16", "use_cpu": not torch.cuda.is_available()},
    **{"save_strategy": "no", "report_to": "none", "disable_tqdm": True},
}
JSD = {"cross_tokenizer": "bytes", "divergence": "jsd"}
FORWARD = {"cross_tokenizer": "bytes", "divergence": "forward_kl"}
SAMPLES = {**FORWARD, "seq_kd": True, "lmbda": 0.0, "methods": {"off_policy": {"nll_weight": 1.0}}}
"""The teacher writes; the student is compared by bytes there, and also told what it wrote."""

METHODS: dict[str, list[dict[str, Any]]] = {
    "nothing": [],
    "samples": [SAMPLES],
    "samples, then bytes, forward KL": [SAMPLES, FORWARD],
    "samples, then bytes, JSD": [SAMPLES, JSD],
    "bytes, forward KL": [FORWARD],
    "bytes, JSD": [JSD],
}
"""The stages of each, which share its steps."""


def smaller(words: Any, merges: int) -> TokenizersBackend:
    """A tokenizer of the same kind, with the same special tokens and chat template, and merges of English manuals."""
    backend = Tokenizer.from_str(words.backend_tokenizer.to_str())
    special = [one.content for one in words.added_tokens_decoder.values() if one.special]
    alphabet = sorted(token for token in words.get_vocab() if len(token) == 1)
    size, quiet = merges + len(alphabet) + len(special), {"show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, **quiet)
    backend.train_from_iterator(list(topics.values()), trainer)
    kept = {name: getattr(words, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return TokenizersBackend(tokenizer_object=backend, chat_template=words.chat_template, padding_side="left", **kept)


def loaded(path: str | Path, dtype: str) -> tuple[Any, Any]:
    """A model and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)), AutoTokenizer.from_pretrained(path)


def transplanted(path: str, folder: Path, merges: int) -> None:
    """Writes the student: the model, where each token is the mean of the tokens that spelled it."""
    model, words = loaded(path, "float32")
    new, ids, old_VH = smaller(words, merges), words.get_vocab(), model.get_input_embeddings().weight.detach().clone()
    spell = words.backend_tokenizer.model.tokenize
    model.resize_token_embeddings(len(new), mean_resizing=False)
    with torch.no_grad():
        for token, number in new.get_vocab().items():
            spelled = [ids[token]] if token in ids else [one.id for one in spell(token)]
            model.get_input_embeddings().weight[number] = old_VH[spelled].mean(0)
    for config in (model.config, model.generation_config):
        config.update({name: getattr(new, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")})
    print(f"{len(new):,} tokens, of which {sum(token in ids for token in new.get_vocab()):,} are the teacher's")
    model.save_pretrained(folder)
    new.save_pretrained(folder)


def conversations(asked: list[str]) -> list[list[dict[str, str]]]:
    return [[SYSTEM, {"role": "user", "content": one}] for one in asked]


def chat(words: Any, asked: list[str]) -> list[str]:
    """Prompts as a model reads them."""
    return [words.apply_chat_template(one, add_generation_prompt=True, tokenize=False) for one in conversations(asked)]


@torch.no_grad()
def written(model: Any, words: Any, asked: list[str]) -> list[str]:
    """Greedy answers."""
    batch = words(chat(words, asked), padding=True, padding_side="left", return_tensors="pt").to(model.device)
    found = model.generate(**batch, do_sample=False, max_new_tokens=TOKENS)
    return words.batch_decode(found[:, batch["input_ids"].size(1) :], skip_special_tokens=True)


@torch.no_grad()
def nats_per_byte(model: Any, words: Any, before: list[str], texts: list[str]) -> float:
    """What a model needs for texts after others."""
    nats = 0.0
    for start, text in zip(before, texts, strict=True):
        given, ids = words(start)["input_ids"], words(text)["input_ids"]
        logits = model(torch.tensor([[*given, *ids]], device=model.device)).logits[0, len(given) - 1 : -1].float()
        nats += float(torch.nn.functional.cross_entropy(logits.cpu(), torch.tensor(ids), reduction="sum"))
    return nats / sum(len(text.encode()) for text in texts)


def measured(model: Any, words: Any, answers: dict[str, str]) -> dict[str, Any]:
    """How likely English text and the teacher's answers are, and which share of the known questions is answered."""
    model.eval()
    texts = [(inspect.getdoc(module) or "")[:1000] for module in MODULES]
    said = written(model, words, list(KNOWN))
    right = [any(one.lower() in text.lower() for one in KNOWN[asked]) for asked, text in zip(KNOWN, said, strict=True)]
    return {
        "text": nats_per_byte(model, words, ["<|endoftext|>"] * len(texts), texts),
        "answers": nats_per_byte(model, words, chat(words, list(answers)), list(answers.values())),
        "facts": sum(right) / len(right),
        "said": [*said[:3], *written(model, words, list(answers)[:3])],
    }


def trained(asked: argparse.Namespace, teacher: Any, key: dict[str, Any], answers: dict[str, str]) -> dict[str, Any]:
    """What a method makes of the student."""
    model, words = loaded(asked.output / "student", "float32")
    stages, logs = METHODS[key["method"]], []
    for number, options in enumerate(stages):
        steps = {"max_steps": asked.steps // len(stages), "warmup_steps": 3, "logging_steps": 5}
        # other prompts in the second stage
        chosen = {**COMMON, **steps, "learning_rate": key["rate"], "seed": key["seed"] + 100 * number, **options}
        args = OPSDConfig(str(asked.output / "run"), **chosen)
        rows = Dataset.from_dict({"prompt": conversations(questions())})
        given = {"processing_class": words, "teacher_processing_class": teacher[1]}
        trainer = OPSDTrainer(model, teacher[0], args, train_dataset=rows, **given)
        trainer.train()
        logs += trainer.state.log_history
    seconds = sum(one.get("train_runtime", 0) for one in logs)
    names = [f"cross/{one}" for one in ("divergence", "used", "lost", "escape", "forks", "retold")]
    curves = {name: [one[name] for one in logs if name in one and "loss" in one] for name in names}
    return {**measured(model, words, answers), "seconds_per_step": seconds / asked.steps, **curves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a chat model with byte-level BPE and a tied head")
    parser.add_argument("--output", type=Path, default=Path("out/transfer"))
    parser.add_argument("--merges", type=int, default=4000, help="of the tokenizer, in a new output folder")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps, each of 8 completions")
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="NAME")
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    file, before = asked.output / "results.jsonl", asked.output / "answers.json"
    if not (asked.output / "student" / "config.json").exists():
        transplanted(asked.model, asked.output / "student", asked.merges)
    teacher = loaded(asked.model, fast_dtype())
    if not before.exists():
        held_out = questions(held_out=True)[::8]
        answers = dict(zip(held_out, written(*teacher, held_out), strict=True))
        before.write_text(json.dumps({"answers": answers, "teacher": measured(*teacher, answers)}, indent=1))
    known = json.loads(before.read_text())
    print("teacher", {name: known["teacher"][name] for name in ("text", "answers", "facts")}, flush=True)
    for seed, rate, method in product(asked.seeds, asked.rates, asked.methods):
        done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        key = (
            {"method": method, "rate": rate, "seed": seed, "steps": asked.steps}
            if METHODS[method]
            else {"method": method}
        )
        found = next((one for one in done if key.items() <= one.items()), None)
        if found is None:
            found = {**key, **trained(asked, teacher, key, known["answers"])}
            with file.open("a") as out:
                out.write(json.dumps(found) + "\n")
        numbers = (f"{name} {found[name]:.3f}" for name in ("text", "answers", "facts", "seconds_per_step"))
        print(" ".join(map(str, key.values())), *numbers, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
