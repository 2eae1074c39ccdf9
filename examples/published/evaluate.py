"""Measures avg@k of models, adapters and all checkpoints of a run on problems with known answers.

    python examples/published/evaluate.py Qwen/Qwen3-1.7B out/opsd-forward \
        --dataset HuggingFaceH4/aime_2024 --samples 12 --output out/aime24

Writes the completions of each model to a file in OUTPUT; a model that has one is not measured again. So eight processes
can share the models (`--share 0/8` to `7/8`), and one more prints the table. Differences are from the first model.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DatasetMixtureConfig, ScriptArguments

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from published.prepare import BOXED

from trl_opsd.cli.train import loaded
from trl_opsd.methods.reward_functions import found_function

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks that vLLM makes room for."""
Samples = list[list[tuple[Sequence[int], bool]]]
"""By problem, the token ids of its completions, each with whether it was cut at `max_tokens`."""


# ---- Models ---------------------------------------------------------------------------------------------------------


def models_of(path: str) -> list[str]:
    """All checkpoints of a run in the order of their steps, or the model or adapter itself."""
    found = sorted(Path(path).glob("checkpoint-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
    return [str(one) for one in found] or [path]


def adapter_of(path: str) -> dict[str, Any]:
    """The config of the adapter in a folder; empty for a model."""
    file = Path(path, "adapter_config.json")
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def base_of(path: str) -> str:
    return adapter_of(path).get("base_model_name_or_path", path)


class Transformers:
    """Generates with `generate`, the samples of one problem at a time."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given, self._device = given, torch.accelerator.current_accelerator() or torch.device("cpu")
        drawn = {"temperature": given.temperature, "top_p": given.top_p, "top_k": max(given.top_k, 0)}
        is_greedy = given.temperature == 0
        self._sampling = dict.fromkeys(drawn) if is_greedy else drawn
        self._sampling |= {"do_sample": not is_greedy, "max_new_tokens": given.max_tokens}

    def __call__(self, path: str, prompts: Sequence[list[int]]) -> Samples:
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").to(self._device).eval()
        ends = torch.tensor(model.generation_config.eos_token_id, device=self._device)
        torch.manual_seed(self._given.seed)
        found: Samples = []
        for prompt in prompts:
            ids = torch.tensor([prompt] * self._given.samples, device=self._device)
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), **self._sampling)
            written = whole[:, len(prompt) :]
            has_end = torch.isin(written, ends).any(1).tolist()
            found.append([(ids, not ended) for ids, ended in zip(written.tolist(), has_end, strict=True)])
        return found


class VLLM:
    """Generates with an engine for one base at a time, which the base and its adapters share."""

    def __init__(self, given: argparse.Namespace) -> None:
        rank = max((adapter_of(path).get("r", 0) for path in given.models), default=0)
        self._given, self._base, self._engine = given, "", None
        self._lora = {"enable_lora": True, "max_lora_rank": min(one for one in RANKS if one >= rank)} if rank else {}

    def __call__(self, path: str, prompts: Sequence[list[int]]) -> Samples:
        from vllm import LLM, SamplingParams
        from vllm.lora.request import LoRARequest

        given, base = self._given, base_of(path)
        if base != self._base:
            self._engine = None
            gc.collect()  # its memory is free before the next engine asks for it
            length = max(map(len, prompts)) + given.max_tokens
            self._base, self._engine = base, LLM(base, max_model_len=length, seed=given.seed, **self._lora)
        drawn = {"temperature": given.temperature, "top_p": given.top_p, "top_k": given.top_k}
        outputs = self._engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(n=given.samples, max_tokens=given.max_tokens, **drawn),
            lora_request=None if path == base else LoRARequest(path, 1 + given.models.index(path), path),
        )
        return [[(one.token_ids, one.finish_reason == "length") for one in output.outputs] for output in outputs]


# ---- Problems and graders -------------------------------------------------------------------------------------------


def messages(row: Mapping[str, Any], given: argparse.Namespace) -> list[dict[str, str]]:
    """What is asked: the messages of a row as they are, a text with the instruction."""
    question = row[given.question]
    text = f"{question}\n\n{given.instruction}" if given.instruction else question
    return question if isinstance(question, list) else [{"role": "user", "content": text}]


def ifeval(completions: Sequence[Any], **columns: Sequence[Any]) -> list[float]:
    """1 for a completion that, after its thoughts, follows all instructions of a row of `google/IFEval` strictly."""
    from if_verifiable import IFEvalSample, evaluate_output_for_sample

    names = ("key", "prompt", "instruction_id_list", "kwargs")
    found = []
    for (message,), *sample in zip(completions, *(columns[name] for name in names), strict=True):
        answer = message["content"].rpartition("</think>")[2].strip()
        found.append(evaluate_output_for_sample("ifeval", IFEvalSample(*sample), answer)[1].binary_strict)
    return found


def rewarded(
    grader: Callable[..., Sequence[float | None]],
    rows: Sequence[Mapping[str, Any]],
    answer: str,
    completions: Sequence[Mapping[str, Any]],
) -> list[float]:
    """The rewards of a function that is called as TRL calls it, with the column `answer` as `solution`."""
    each = [rows[one["problem"]] for one in completions]
    columns = {name: [row[name] for row in each] for name in rows[0]}
    if answer in columns:
        columns["solution"] = [str(one) for one in columns[answer]]
    said = grader(completions=[[{"role": "assistant", "content": one["completion"]}] for one in completions], **columns)
    if None in said:
        row = each[[*said].index(None)]
        raise ValueError(f"The grader gives no reward for {row}: expected an answer that it can read, as `--answer`.")
    return [float(one) for one in said]


# ---- Figures --------------------------------------------------------------------------------------------------------


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of one value for each problem, and its standard error over problems."""
    return statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5


def table(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Lines of Markdown, from the graded completions of each model."""
    lines, start = (
        ["| model | mean | standard error | difference | standard error | cut |", "|---" * 6 + "|"],
        dict[int, float](),
    )
    for name, completions in measured.items():
        rewards = defaultdict[int, list[float]](list)
        for one in completions:
            rewards[one["problem"]].append(one["reward"])
        means = {problem: statistics.fmean(of) for problem, of in rewards.items()}
        start = start or means
        gaps = [mean - start[problem] for problem, mean in means.items()]
        cut = statistics.fmean(one["cut"] for one in completions)
        figures = (*mean_and_error([*means.values()]), *mean_and_error(gaps), cut)
        lines.append(f"| {name} | {' | '.join(f'{one:.3f}' for one in figures)} |")
    return lines


def write(file: Path, text: str) -> None:
    """A file that other processes see whole or not at all."""
    unfinished = file.with_suffix(f".{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.rename(file)


# ---- Command line ---------------------------------------------------------------------------------------------------


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="a model, the folder of an adapter, or of a run with checkpoints")
    parser.add_argument("--dataset", required=True, help="a name on the Hub, or a file")
    parser.add_argument("--question", default="problem", help="column: text, or messages")
    parser.add_argument("--answer", default="answer", help="column, which the grader gets as `solution`")
    parser.add_argument("--instruction", default=BOXED, help="after a question that is text")
    parser.add_argument("--chat_template_kwargs", type=json.loads, default={}, help="JSON")
    parser.add_argument("--grader", default="accuracy_reward", help="one of trl.rewards, `ifeval`, module.function")
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--samples", type=int, default=12, help="completions of each problem")
    parser.add_argument("--max_tokens", type=int, default=38912)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--top_k", type=int, default=0, help="0 for all tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", default="0/1", help="I/N: measures every Nth model from the Ith, the first is 0")
    parser.add_argument("--output", type=Path, required=True, help="a folder for one dataset and its settings")
    given = parser.parse_args(arguments)
    given.models = [one for path in given.models for one in models_of(path)]
    return given


def main(arguments: Sequence[str] | None = None) -> list[str]:
    given = options(arguments)
    place, number = map(int, given.share.split("/"))
    settings = {name: value for name, value in vars(given).items() if name not in ("models", "share", "output")}
    given.output.mkdir(parents=True, exist_ok=True)
    if (file := given.output / "settings.json").exists() and (before := json.loads(file.read_text())) != settings:
        raise ValueError(f"{given.output} has completions with other settings, {before}: pass another --output.")
    write(file, json.dumps(settings, indent=1))
    grader = ifeval if given.grader == "ifeval" else found_function(given.grader)
    rows = [*next(iter(loaded(ScriptArguments(dataset_name=given.dataset), DatasetMixtureConfig()).values()))]
    unanswered = [{"problem": problem, "completion": ""} for problem in range(len(rows))]
    rewarded(grader, rows, given.answer, unanswered)  # raises what it would after hours
    generate = {"vllm": VLLM, "transformers": Transformers}[given.engine](given)
    files = {path: given.output / f"{path.strip('/').replace('/', '--')}.jsonl" for path in given.models}
    for path in given.models[place::number]:
        if files[path].exists():
            continue
        words = AutoTokenizer.from_pretrained(base_of(path))
        template = {"add_generation_prompt": True, "return_dict": True, **given.chat_template_kwargs}
        prompts = [words.apply_chat_template(messages(row, given), **template)["input_ids"] for row in rows]
        completions = [
            {"problem": problem, "completion": words.decode(ids, skip_special_tokens=True), "cut": cut}
            for problem, samples in enumerate(generate(path, prompts))
            for ids, cut in samples
        ]
        rewards = rewarded(grader, rows, given.answer, completions)
        lines = [json.dumps({**one, "reward": reward}) for one, reward in zip(completions, rewards, strict=True)]
        write(files[path], "\n".join(lines))
    if number > 1:
        return []
    measured = {path: file.read_text(encoding="utf-8").splitlines() for path, file in files.items()}
    lines = table({path: [*map(json.loads, written)] for path, written in measured.items()})
    print("\n".join(lines))
    return lines


if __name__ == "__main__":
    main()
