"""Measures how long a trainer takes to build with many rows, and its peak memory, beside TRL's.

    python benchmarks/construction.py                                  # chats that fit the context easily
    python benchmarks/construction.py --rows 20000 --words 400 --context 4096      # chats that have to be tokenized

Each trainer is built in a process of its own, or in two that `torchrun` starts (gloo, on the CPU), in turns; seconds
are the smallest of the repeats, and those of the slowest process. Models are tiny and in memory, so that the rows show:
TRL looks at none of them before training. The imports of `trl` and `trl_opsd` do not count, but what a first trainer
imports does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from children import peak_bytes, report, reports

PROGRAMS = ("trl", "ours", "again")
"""TRL; ours with an empty cache; and ours once more, with the cache that the first time has filled."""


def make_dataset(rows: int, words: int, shuffled: bool, folder: str) -> str:
    """Chats of two messages, saved as a user would find them: on disk, shuffled by indices if asked for."""
    from datasets import Dataset

    def chats() -> Any:
        for number in range(rows):
            question = f"What is {number} times {number}?" + " Think." * words
            yield {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]}

    path = str(Path(folder) / f"{rows}-{words}-{shuffled}")
    dataset = Dataset.from_generator(chats, cache_dir=str(Path(folder) / "made"))
    (dataset.shuffle(seed=0) if shuffled else dataset).save_to_disk(path)
    return path


def make_tokenizer() -> Any:
    """One token for each byte, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=special[2],
        pad_token=special[0],
        chat_template=(
            "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
    )


def make_model(context: int) -> Any:
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context,
    )
    return AutoModelForCausalLM.from_config(config)


def build(program: str, path: str, context: int) -> dict[str, float]:
    """Builds one trainer in this process, and says what it cost."""
    from datasets import load_from_disk
    from trl import DistillationConfig, DistillationTrainer

    from trl_opsd import OPSDConfig, OPSDTrainer

    counted = 0

    class Counting(OPSDTrainer):
        def tokenize(self, prompts: list[Any], **chat_template_kwargs: Any) -> list[list[int]]:
            nonlocal counted
            counted += len(prompts)
            return super().tokenize(prompts, **chat_template_kwargs)

    trainer, config = (DistillationTrainer, DistillationConfig) if program == "trl" else (Counting, OPSDConfig)
    with tempfile.TemporaryDirectory() as folder:
        options = config(
            folder,
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            max_completion_length=64,
            gradient_checkpointing=False,
        )
        given = {"train_dataset": load_from_disk(path), "processing_class": make_tokenizer(), "args": options}
        models = make_model(context), make_model(context)
        start = time.perf_counter()
        trainer(*models, **given)
        seconds = time.perf_counter() - start
        rows = len(given["train_dataset"])
    return {"seconds": seconds, "peak": peak_bytes(), "rows": rows, "counted": counted}


def launched(program: str, path: str, args: argparse.Namespace, processes: int, cache: str) -> dict[str, float]:
    """Builds one in new processes; the seconds of the slowest, and the largest peak."""
    options = ("--build", program, "--path", path, "--context", str(args.context))
    found = reports(__file__, *options, processes=processes, HF_DATASETS_CACHE=cache, OMP_NUM_THREADS="1")
    return {name: max(one[name] for one in found) for name in found[0]}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for rows in args.rows:
            path = make_dataset(rows, args.words, args.shuffled, folder)
            for processes in args.processes:
                best: dict[str, dict[str, float]] = {}
                for repeat in range(args.repeats):
                    cache = str(Path(folder) / f"cache-{rows}-{processes}-{repeat}")
                    for program in PROGRAMS:
                        one = launched(program, path, args, processes, cache)
                        before = best.setdefault(program, one)
                        best[program] = {name: min(one[name], before[name]) for name in one}
                found += [{"program": name, "processes": processes, **one} for name, one in best.items()]
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Seconds, their ratio to TRL's, the peak of a process's memory, and the rows that a process tokenized."""
    lines = [f"{'rows':>8}{'processes':>11}  {'program':9}{'seconds':>9}{'vs TRL':>9}{'peak MB':>9}{'tokenized':>11}"]
    trl = {(one["rows"], one["processes"]): one["seconds"] for one in found if one["program"] == "trl"}
    for one in found:
        ratio = one["seconds"] / trl[one["rows"], one["processes"]]
        lines.append(
            f"{one['rows']:8}{one['processes']:11}  {one['program']:9}{one['seconds']:9.2f}{ratio:8.2f}x"
            f"{one['peak'] / 1e6:9.0f}{one['counted']:11}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000, 200_000])
    parser.add_argument("--words", type=int, default=8, help="words added to each question, of 7 bytes and tokens each")
    parser.add_argument("--context", type=int, default=4096, help="context of the models, in tokens")
    parser.add_argument("--shuffled", action="store_true", help="shuffle the rows, which stores their order apart")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--build", choices=PROGRAMS, help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.build:
        report(build(args.build, args.path, args.context))
        return
    found = measure(args)
    print(json.dumps(found, indent=2) if args.json else table(found))


if __name__ == "__main__":
    main()
