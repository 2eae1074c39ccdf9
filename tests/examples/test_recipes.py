"""Each recipe and each common case trains as it says, and published ones are measured; here with tiny models."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import train
import yaml
from datasets import Dataset
from published import evaluate, prepare
from support import tiny
from support.failing_server import pretended
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_opsd.cli.merge import Experts
from trl_opsd.cli.options import OptionParser
from trl_opsd.teacher.teachers import Teachers

EXAMPLES = Path(train.__file__).parent
ROOMS = ("cases", "recipes", "published")
FILES = {path.stem: path for room in ROOMS for path in sorted((EXAMPLES / room).glob("*.yaml"))}
OF_AGENTS = "agents"
"""The case of another script, which test_agents.py runs."""
COLUMNS = dict.fromkeys(("self_distillation", "opsd", "sdft", "concise"), "privileged_context")
COLUMNS |= dict.fromkeys(("context_distillation", "few_shot"), "teacher_prompt")
COLUMNS |= dict.fromkeys(("tropd", "reopd"), "completion_prefix")
COLUMNS |= {"gkd": "completion", "several_teachers": "teacher", "mopd": "teacher"}
"""What rows have besides `prompt`."""

HINT = "THE HINT"
SMALLER = {"max_completion_length": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
SMALLER |= {"use_vllm": False, "gradient_checkpointing": False, "teacher_offload": "none", "warmup_steps": 0}
SMALLER |= {"max_tokens_per_microbatch": 200, "num_generations": 2}
"""Options that only say how large a run is, and where; set where a recipe has them."""
ALWAYS = {"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "bf16": False}
DIVERGENCES = {"forward_kl": "ForwardKL", "reverse_kl": "ReverseKL", "jsd": "GeneralizedJSD"}
DIVERGENCES |= {"sampled_reverse_kl": "SampledReverseKL", "negative_log_acceptance": "NegativeLogAcceptance"}


def length(completions, **_):
    """A reward, by its name on the command line."""
    return [float(len(one[0]["content"])) for one in completions]


def rows(name, options, folder):
    """Rows of a recipe, with a hint in whatever the teacher alone may see."""

    def chat(text, role="user"):
        return [{"role": role, "content": text}]

    teachers = sorted(options.get("teacher_models", ["none"]))
    columns = {
        "privileged_context": lambda _: HINT,
        "completion": lambda _: chat("4", "assistant"),
        "completion_prefix": lambda _: "4",
        "teacher_prompt": lambda _: chat(f"{HINT} 2+2="),
        "teacher": lambda place: teachers[place % len(teachers)],
    }
    if is_published := name in prepare.SOURCES:
        columns |= {"problem": tiny.PROMPTS.__getitem__, "solution": lambda _: HINT, "answer": lambda _: 4}
        columns["extra_info"] = lambda place: {"domain": teachers[place % len(teachers)]}
    own = columns if is_published else {COLUMNS[name]: columns[COLUMNS[name]]} if name in COLUMNS else {}
    made = [
        {"prompt": chat(text), **{column: value(place) for column, value in own.items()}}
        for place, text in enumerate(tiny.PROMPTS)
    ]
    Dataset.from_list(made).to_json(folder / ("data.jsonl" if is_published else "rows.jsonl"))
    if is_published:
        prepare.main([name, f"{folder}/rows.jsonl", f"--dataset={folder}/data.jsonl"])
    return f"{folder}/rows.jsonl"


@pytest.fixture(scope="module", params=sorted(FILES.keys() - {OF_AGENTS}))
def run(request, disk, tmp_path_factory):
    """A recipe: its options, its trainer after two steps, what the teachers have read, and which."""
    name, folder, read, targets = request.param, tmp_path_factory.mktemp(request.param), [], Teachers.targets
    options = yaml.safe_load(FILES[name].read_text())
    data = rows(name, options, folder)
    models = {"model_name_or_path": disk.student} | ({} if "experts" in options else {"dataset_name": data})
    if "teacher_model_name_or_path" in options:
        models["teacher_model_name_or_path"] = disk.teacher
    if "teacher_models" in options:
        models["teacher_models"] = dict.fromkeys(options["teacher_models"], disk.teacher)
    if "experts" in options:
        one = {"model": disk.teacher, "dataset": data, "test": data, "metric": f"{__name__}.length"}
        models["experts"] = {expert: {**one} for expert in options["experts"]}
    if "rewards" in (options.get("methods") or {}):
        options["methods"]["rewards"] |= {"functions": [f"{__name__}.length"], "threshold": 0.0}

    def reading(teachers, rollout, names, *references):
        if names:  # else one reads in its own tokens
            read.extend(zip(rollout.prompt_lists(), rollout.completion_lists(), names, strict=True))
        return targets(teachers, rollout, names, *references)

    smaller = {option: value for option, value in SMALLER.items() if option in options} | ALWAYS
    smaller |= {"save_strategy": "steps", "save_steps": 1} if name in prepare.SOURCES else {}
    file = folder / "recipe.yaml"
    teacher = AutoModelForCausalLM.from_pretrained(disk.teacher) if "teacher_server_url" in options else None
    with pytest.MonkeyPatch.context() as patched, pretended(teacher) if teacher else nullcontext() as server:
        if server:
            models["teacher_server_url"] = server.url
        file.write_text(yaml.safe_dump({**options, **models, **smaller, "output_dir": str(folder / "out")}))
        patched.setattr(Teachers, "targets", reading)
        patched.setattr(Experts, "evaluate", lambda *_: None)  # tests/cli/test_merge.py measures
        trainer = train.main(["--config", str(file)])
    decode = trainer.processing_class.decode
    read = [(decode(prompt), decode(completion), teacher) for prompt, completion, teacher in read]
    return SimpleNamespace(name=name, options=options, trainer=trainer, read=read, folder=folder)


def test_a_recipe_trains_with_its_own_options(run):
    trainer, options = run.trainer, run.options
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in logged] == [1, 2]
    assert all(row["grad_norm"] > 0 for row in logged)
    models = ("model_name_or_path", "teacher_model_name_or_path", "teacher_server_url")
    kept = options.keys() & vars(trainer.args).keys() - {*SMALLER, *ALWAYS, *models, "output_dir", "save_steps"}
    assert {option: getattr(trainer.args, option) for option in kept} == {option: options[option] for option in kept}
    assert type(trainer.divergence).__name__ == DIVERGENCES[options["divergence"]]
    adapters = [one for one, _ in trainer.model.named_parameters() if "lora_A" in one]
    assert bool(adapters) is options.get("use_peft", False)
    assert not adapters or trainer.model.peft_config["default"].r == options["lora_r"]


def test_teacher_of_a_recipe_scores_its_rows(run):
    assert (len(run.read) > 16) if run.name == "speculative" else len(run.read) == 8  # each block, too
    hinted = {HINT in prompt for prompt, *_ in run.read}
    assert hinted == {COLUMNS.get(run.name) in ("privileged_context", "teacher_prompt")}
    completions = [completion for _, completion, _ in run.read]
    of_dataset = sum(completion.startswith("4") for completion in completions)
    begin = {"gkd": range(1, 8), "tropd": [8], "reopd": [8]}
    assert of_dataset in begin.get(run.name, [0])
    teacher_writes = run.name == "speculative" or run.options.get("seq_kd", False)
    assert ("tokens/teacher" in run.trainer.state.log_history[0]) == teacher_writes
    logged = run.trainer.state.log_history[0]
    if run.name == "sdpo":  # another completion of the prompt
        solved = [
            prompt.partition("A correct solution:\n\n")[2].partition("\n\nNow solve")[0] for prompt, *_ in run.read
        ]
        others = [run.read[place + 1 - 2 * (place % 2)][1] for place in range(8)]
        assert [re.sub(r"<\|\w+\|>", "", one).strip() for one in others] == solved
    if "teacher_models" in run.options:
        assert {teacher for *_, teacher in run.read} == set(run.options["teacher_models"])
    if run.name == "drafter":
        assert 0 < logged["acceptance"] < 1
    if run.name == "open_mopd":
        assert "loss_share/teacher/instructions" in logged


def test_a_case_is_short_and_opens_with_its_command():
    for name, path in FILES.items():
        text = path.read_text()
        assert f"--config {path.relative_to(EXAMPLES.parent)}" in text, name
        OptionParser().check(["--config", str(path)])
        assert path.parent.name != "cases" or (len(text.splitlines()) <= 25 and "For your own" in text), name


VARIANTS = {"opsd": "--divergence=reverse_kl", "mopd": "--methods={}"}


@pytest.mark.parametrize("run", VARIANTS, indirect=True)
def test_published_recipe_and_its_variant_are_measured(run, disk):
    first, second, out = run.folder / "out", run.folder / "second", run.folder / "measured"
    given = ["--config", f"{run.folder}/recipe.yaml", "--learning_rate=0.01", f"--output_dir={second}"]
    other = train.main([*given, VARIANTS[run.name]])
    assert type(other.divergence).__name__ == "ReverseKL"
    if run.name == "mopd":  # the first step has three rows of one teacher, and one of another
        shares = [one.state.log_history[0]["loss_share/teacher/code"] for one in (run.trainer, other)]
        assert shares == pytest.approx([1 / 2, 3 / 4])
    asked = [disk.student, str(first), str(second), f"--dataset={run.folder}/data.jsonl", f"--grader={__name__}.length"]
    asked += ["--engine=transformers", "--samples=1", "--max_tokens=9", "--temperature=0", f"--output={out}"]
    evaluate.main([*asked, "--share=1/2"])
    assert len([*out.glob("*.jsonl")]) == 2
    lines, names = evaluate.main(asked), [f"{one}/checkpoint-{step}" for one in (first, second) for step in (1, 2)]
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {one}" for one in (disk.student, *names)]
    words, written = AutoTokenizer.from_pretrained(disk.student), []
    prompt = words.apply_chat_template(prepare.asked("a"), add_generation_prompt=True, return_tensors="pt")
    for path in (disk.student, names[-1]):
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        ids = model.generate(**prompt, max_new_tokens=9, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        written.append(words.decode(ids, skip_special_tokens=True))
        found = json.loads((out / f"{path[1:].replace('/', '--')}.jsonl").read_text().splitlines()[2])
        assert (found["completion"], found["cut"]) == (written[-1], 2 not in ids)
    assert written[0] != written[1], "the checkpoint was measured, not its base"


def test_figures_of_known_completions(tmp_path):
    for name, of in {"a": [[1, 0], [1, 1], [0, 0]], "b": [[1, 1], [1, 1], [0, 1]]}.items():
        each = [{"problem": at, "reward": one, "cut": one == 0} for at, pair in enumerate(of) for one in pair]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, each)))
    (tmp_path / "data.json").write_text(json.dumps({"problem": "?", "answer": 4}))
    asked = ["a", "b", f"--dataset={tmp_path}/data.json", f"--grader={__name__}.length", f"--output={tmp_path}"]
    table = ["| a | 0.500 | 0.289 | 0.000 | 0.000 | 0.500 |", "| b | 0.833 | 0.167 | 0.333 | 0.167 | 0.167 |"]
    assert evaluate.main(asked)[2:] == table
    with pytest.raises(ValueError, match="other settings"):
        evaluate.main([*asked, "--samples=2"])
    completions = [{"problem": 1, "completion": "4"}, {"problem": 0, "completion": "4"}]
    given = ([{"answer": 3, "solution": "4"}, {"answer": 4, "solution": "3"}], "answer", completions)
    assert evaluate.rewarded(lambda solution, **_: [one == "4" for one in solution], *given) == [1.0, 0.0]
    with pytest.raises(ValueError, match="gives no reward for"):
        evaluate.rewarded(lambda solution, **_: [None for _ in solution], *given)
