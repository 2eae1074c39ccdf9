"""Below `lmbda=1`, rows are learned with the dataset's completion, token by token as the student would write it.

With `seq_kd` their own teacher writes them, from its own prompt.
"""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
from accelerate.logging import MultiProcessAdapter
from datasets import Dataset
from peft import LoraConfig
from small_methods import OffPolicyFirst
from support import tiny

from trl_opsd import FixedRollout, HFRollout, OPSDTrainer
from trl_opsd.data.completions import recorded
from trl_opsd.types.loss import columns

WORDS = tiny.tokenizer()
GIVEN = [f"the {number}th" for number in range(8)]
CHAT = [[{"role": "user", "content": prompt}] for prompt in tiny.PROMPTS]


def rows(kind: str = "text") -> Dataset:
    if kind == "text":
        return tiny.rows().add_column("completion", GIVEN)
    answers = [[{"role": "assistant", "content": text}] for text in GIVEN]
    if kind == "messages":
        return Dataset.from_dict({"prompt": CHAT, "completion": answers})
    whole = Dataset.from_list([{"messages": [*one, *answer]} for one, answer in zip(CHAT, answers, strict=True)])
    return whole if kind == "conversations" else whole.to_iterable_dataset(num_shards=2)


class Recording(OPSDTrainer):
    """Keeps what was asked of the student, and the row, prompt and completion of each row that was taught."""

    def __init__(self, *args, **kwargs):
        self.asked, self.taught = [], []
        super().__init__(*args, **kwargs)

    def complete(self, prompt_ids):
        self.asked += prompt_ids
        return super().complete(prompt_ids)

    def teach(self, rollout, rows):
        self.taught += zip(rows, rollout.prompt_lists(), rollout.completion_lists(), strict=True)
        return super().teach(rollout, rows)


OPTIONS = {"per_device_train_batch_size": 4, "max_steps": 4, "rollout": None}


@pytest.fixture
def trained(trained):
    return lambda kind="text", **given: trained(**{"cls": Recording, "train_dataset": rows(kind), **OPTIONS, **given})


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["text", "messages", "conversations", "stream"])
def test_lmbda_0_learns_every_row_with_its_completion(trained, kind):
    trainer = trained(kind, lmbda=0.0, remove_unused_columns=True)
    assert trainer.asked == []
    assert len(trainer.taught) == 16
    for row, prompt, completion in trainer.taught:
        text = row["completion"] if kind == "text" else row["completion"][0]["content"]
        assert WORDS.decode(completion) == f"{text}<|im_end|>"
        question = row["prompt"] if kind == "text" else row["prompt"][0]["content"]
        assert GIVEN.index(text) == tiny.PROMPTS.index(question)
        assert question in WORDS.decode(prompt)
    assert {tiny.share_of_others(row) for row in trainer.state.log_history if "loss" in row} == {1.0}


class Comparing(Recording):
    """Keeps weight and divergence of each completion, too."""

    def compare(self, student, rollout, targets, num_items):
        parts = super().compare(student, rollout, targets, num_items)
        if self.model.training:
            sums = columns(parts.rows, "weight", "divergence").tolist()
            self.learned = [*getattr(self, "learned", ()), *zip(rollout.completion_lists(), sums, strict=True)]
        return parts


def test_lmbda_divides_rows_and_logs_the_share_and_both_divergences(trained):
    trainer = trained(cls=Comparing, lmbda=0.5, eval_dataset=tiny.rows(4), max_steps=8, max_completion_length=8)
    given = [row["completion"] == WORDS.decode(ids[:-1]) for row, _, ids in trainer.taught]
    assert 8 <= sum(given) <= 24, "of 32"
    assert len({tuple(given[at : at + 4]) for at in range(0, 32, 4)}) > 2, "other places in each step"
    assert len(trainer.asked) == 32 - sum(given), "the student writes no row that the dataset has"
    logs = [row for row in trainer.state.log_history if "loss" in row]
    for step, row in enumerate(logs):
        for name, is_given in (("dataset", True), ("student", False)):
            learned = trainer.learned[4 * step : 4 * step + 4]
            sums = [one for ids, one in learned if (WORDS.decode(ids[:-1]) in GIVEN) == is_given]
            mean = sum(divergence for _, divergence in sums) / sum(weight for weight, _ in sums) if sums else None
            is_mixed = any(given[4 * step : 4 * step + 4])
            assert row.get(f"divergence/{name}") == (mean and pytest.approx(mean, rel=1e-5) if is_mixed else None)
            assert row.get(f"tokens/{name}") == (sum(weight for weight, _ in sums) or None if is_mixed else None)
    before = len(trainer.asked)
    assert not [name for name in trainer.evaluate() if "dataset" in name or "divergence/student" in name]
    assert len(trainer.asked) == before + 4, "an evaluation is of the student"


@pytest.mark.parametrize("lmbda", [0.0, 0.5])
def test_completion_metrics_cover_rows_of_the_student_only(trained, lmbda):
    """The dataset's repeat themselves, the student's do not."""
    repeated = tiny.rows().add_column("completion", ["a" * 48] * 8)
    written = WORDS("".join(chr(97 + number % 26) for number in range(40)))["input_ids"]
    rollout = FixedRollout({tuple(ids): written for ids in WORDS(tiny.PROMPTS)["input_ids"]})
    given = {"max_completion_length": 48, "max_steps": 6, "rollout": rollout}
    trainer = trained(train_dataset=repeated, lmbda=lmbda, **given)
    logs = [row for row in trainer.state.log_history if "loss" in row]
    ratios = [row.get("completions/repeated_ratio") for row in logs]
    assert ratios == [0.0 if tiny.share_of_others(row) < 1 else None for row in logs]
    assert (0.0 in ratios) == (lmbda > 0)


@pytest.mark.parametrize("by_teacher", [False, True])
def test_a_resumed_run_takes_the_same_rows_and_samples(trained, tmp_path, by_teacher):
    options = {"lmbda": 0.5, "seq_kd": by_teacher, "max_completion_length": 8, "rollout": HFRollout()}
    whole = trained(**options, save_strategy="steps", save_steps=2)
    random.seed(7)
    resumed = trained(**options, resume=str(tmp_path / "checkpoint-2"))
    assert resumed.taught == whole.taught[8:]
    assert torch.equal(tiny.weights(resumed), tiny.weights(whole))


def test_off_policy_first_ends_on_policy_and_resumes(trained, tmp_path):
    options = {"lmbda": 0.0, "sft_weight": 0.5, "max_completion_length": 8, "methods": [OffPolicyFirst(until=0.75)]}
    whole = trained(**options, save_strategy="steps", save_steps=1)
    shares = [tiny.share_of_others(row) for row in whole.state.log_history if "loss" in row]
    assert shares[0] == 1
    assert 0 < sum(shares[1:3]) < 2
    assert shares[3] == 0
    assert len(whole.asked) == sum(not row.is_off_policy for row, *_ in whole.taught)
    assert [row.nll_weight for row, *_ in whole.taught] == [0.5 * row.is_off_policy for row, *_ in whole.taught]
    resumed = trained(**options, resume=str(tmp_path / "checkpoint-1"))
    assert resumed.taught == whole.taught[4:]


def test_dataset_completions_are_cut_like_rollouts(trained):
    ends = ["one<|im_end|>two", "x" * 50, *GIVEN[2:]]
    trainer = trained(train_dataset=tiny.rows().add_column("completion", ends), lmbda=0.0)
    found = {row["prompt"]: WORDS.decode(ids) for row, _, ids in trainer.taught}
    assert found[tiny.PROMPTS[0]] == "one<|im_end|>"
    assert found[tiny.PROMPTS[1]] == "x" * 24


REFUSED = [
    (tiny.rows(), "train_dataset has no column 'completion', which `lmbda` below 1 needs", ValueError),
    (tiny.rows(2).add_column("completion", ["a", None]), "in row 1 of train_dataset is None", TypeError),
    (tiny.rows(2).add_column("completion", ["a", ""]), "in row 1 of train_dataset is empty", ValueError),
    (tiny.rows(2).add_column("completion", CHAT[:2]), "is messages, but the prompt is text", ValueError),
    (Dataset.from_dict({"prompt": CHAT, "completion": CHAT}), "expected 'assistant'", ValueError),
]


@pytest.mark.before_loading
@pytest.mark.quick
@pytest.mark.parametrize(("dataset", "words", "error"), REFUSED)
def test_completions_that_cannot_be_learned_are_refused_before_loading(make_trainer, dataset, words, error):
    with pytest.raises(error, match=words):
        make_trainer(train_dataset=dataset, lmbda=0.5)


def test_a_template_that_rewrites_the_prompt_is_refused(trained):
    words = tiny.tokenizer()
    words.chat_template = tiny.CHAT_TEMPLATE.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>{% endif %}"
    )
    with pytest.raises(ValueError, match=r"does not start with the student's prompt, which ends with '.*<think>'"):
        trained("messages", lmbda=0.0, processing_class=words)


def test_template_that_drops_part_of_an_answer_warns_once(trained, caplog):
    words = tiny.tokenizer()
    words.chat_template = tiny.CHAT_TEMPLATE.replace("message['content']", "message['content'].split('|')[-1]")
    answers = [[{"role": "assistant", "content": f"because|{text}"}] for text in GIVEN]
    for given, said in ((rows("messages"), 0), (Dataset.from_dict({"prompt": CHAT, "completion": answers}), 1)):
        caplog.clear()
        MultiProcessAdapter.warning_once.cache_clear()  # an earlier test may have warned
        trainer = trained(lmbda=0.0, train_dataset=given, processing_class=words)
        assert caplog.text.count("the dataset's answers") == said
    assert all("because" not in WORDS.decode(ids) for _, _, ids in trainer.taught)


@pytest.mark.parametrize(("ends", "last"), [([5], 5), ([], None)])
def test_text_completion_ends_with_an_end_token_of_the_run(ends, last):
    row = {"prompt": "a", "completion": "b"}
    given = recorded(row, "row 0", "completion", "a", WORDS("a")["input_ids"], WORDS, {}, ends)
    assert given.ids == [*WORDS("b")["input_ids"], *([] if last is None else [last])]


def test_unknown_token_id_names_its_row(trained):
    words = tiny.tokenizer()
    words.add_tokens(["<new>"])
    dataset = tiny.rows().add_column("completion", ["<new>", *GIVEN[1:]])
    with pytest.raises(ValueError, match=r"The completion in row .* contains the token id"):
        trained(train_dataset=dataset, processing_class=words, lmbda=0.0)


def test_sums_of_an_interrupted_step_are_not_logged_later(make_trainer):
    class Once(Recording):
        compared = 0

        def compare(self, *given):
            self.compared += 1
            if self.compared == 2:
                raise KeyboardInterrupt
            return super().compare(*given)

    options = {"lmbda": 0.5, "gradient_accumulation_steps": 2, "max_steps": 2}
    trainer = make_trainer(cls=Once, train_dataset=rows(), **{**OPTIONS, **options})
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer._stats._waiting, "of the first of two micro-batches"
    trainer.taught.clear()
    trainer.train()
    given = [row["completion"] == WORDS.decode(ids[:-1]) for row, _, ids in trainer.taught]
    for name, those in ("dataset", True), ("student", False):
        sizes = [len(ids) * (one is those) for (*_, ids), one in zip(trainer.taught, given, strict=True)]
        assert tiny.logged(trainer, f"tokens/{name}") == [sum(sizes[at : at + 8]) for at in (0, 8)]


# ---- Completions of the teacher --------------------------------------------------------------------------------------


LENGTH = 6
GREEDY = {**OPTIONS, "cls": Recording, "top_k": 1, "seq_kd": True, "max_completion_length": LENGTH, "max_steps": 2}
SECRETS = tiny.rows().add_column("privileged_context", [f"It is {number}." for number in range(8)])


def greedy(model, prompt, vocabulary=None):
    """What a model writes after a prompt, one token after the other, without `generate`."""
    ids, start = list(prompt), len(prompt)
    while len(ids) < start + LENGTH and (len(ids) == start or ids[-1] != WORDS.eos_token_id):
        with torch.no_grad():
            ids.append(model(torch.tensor([ids])).logits[0, -1, :vocabulary].argmax().item())
    return ids[start:]


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_the_teacher_writes_and_the_student_does_not(trained, offload):
    trainer = trained(**GREEDY, lmbda=0.0, teacher_offload=offload)
    assert trainer.asked == []
    assert len(trainer.taught) == 8
    for _, prompt, completion in trainer.taught:
        assert completion == greedy(trainer.teacher_model, prompt)
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert {tiny.share_of_others(row) for row in logs} == {1.0}
    assert not trainer.teacher_model.training


def test_a_share_of_rows_is_of_the_teacher_and_evaluations_are_of_the_student(trained):
    trainer = trained(**{**GREEDY, "max_steps": 4}, lmbda=0.5, learning_rate=1e-12, eval_dataset=tiny.rows(4))
    by_student = [ids == greedy(trainer.model, prompt) for _, prompt, ids in trainer.taught]
    by_teacher = [ids == greedy(trainer.teacher_model, prompt) for _, prompt, ids in trainer.taught]
    assert all(one != other for one, other in zip(by_student, by_teacher, strict=True))
    assert 4 <= sum(by_teacher) <= 12, "of 16"
    assert len(trainer.asked) == sum(by_student)
    trainer.evaluate()
    assert len(trainer.asked) == sum(by_student) + 4


@pytest.mark.parametrize("kind", [None, "base", "live", "ema"])
def test_the_teacher_writes_from_its_own_prompt(trained, kind):
    own = {} if kind is None else {"teacher_model": None, "teacher_model_kind": kind}
    if kind == "base":
        own["peft_config"] = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    trainer = trained(**GREEDY, lmbda=0.0, learning_rate=1e-12, train_dataset=SECRETS, **own)
    writes = trainer.model if kind else trainer.teacher_model
    with trainer.model.disable_adapter() if kind == "base" else nullcontext():
        for row, prompt, completion in trainer.taught:
            secret = WORDS(f"{row['privileged_context']}\n\n{row['prompt']}")["input_ids"]
            assert completion == greedy(writes, secret)
            assert WORDS.decode(prompt) == row["prompt"], "the student learns to write it without"
    assert any(completion != greedy(writes, prompt) for _, prompt, completion in trainer.taught)


def test_each_of_several_teachers_writes_its_rows(trained):
    teachers = {"wide": tiny.qwen2(48, seed=1), "narrow": tiny.qwen2(16, seed=2)}
    dataset = tiny.rows().add_column("teacher", ["wide", "narrow", "narrow", "wide"] * 2)
    trainer = trained(**GREEDY, lmbda=0.0, teacher_model=teachers, train_dataset=dataset)
    assert {row["teacher"] for row, _, _ in trainer.taught} == set(teachers)
    for row, prompt, completion in trainer.taught:
        assert completion == greedy(teachers[row["teacher"]], prompt)
