"""A student goes on with the beginning of a completion, and with the assistant's last message in a prompt."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from datasets import Dataset
from support import tiny, tool_calls, vision_language
from support.measured_sampler import Told
from support.rollouts import Answering, Apart

from trl_opsd import HFRollout
from trl_opsd.losses import SampledReverseKL
from trl_opsd.methods import OffPolicy
from trl_opsd.methods.rewards import Rewards
from trl_opsd.types.rollout import Author

WORDS = tiny.tokenizer()
WHOLE = tiny.recorded(WORDS)
TOLD = {"teacher_prompt": [f"Say it: {one}" for one in tiny.PROMPTS]}
HINTS = {"privileged_context": [f"hint {number}" for number in range(8)]}
OPTIONS = {"per_device_train_batch_size": 4, "max_steps": 3, "optim": "sgd", "learning_rate": 0.1}
BEGUN = [text[:number] or None for text, number in zip(tiny.ANSWERS, (1, 5, 0, 9, 2, 1, 3, 0), strict=True)]


def rest(context: list[int]) -> list[int]:
    """What is left of the recorded completion of a prompt."""
    prompt, whole = next(
        (list(prompt), ids) for prompt, ids in WHOLE.items() if [*prompt, *ids][: len(context)] == context
    )
    return whole[len(context) - len(prompt) :]


def columns(**more: Any) -> Dataset:
    return Dataset.from_dict({"prompt": tiny.PROMPTS, "completion_prefix": BEGUN, **more})


SAME: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding_free": {"padding_free": True, "max_tokens_per_microbatch": 90},
    "overlap, step": {"overlap": "step"},
    "overlap, ahead": {"overlap": "ahead"},
    "a teacher's own prompt": {"columns": TOLD},
    "its own teacher": {"columns": HINTS, "teacher_model": None, "teacher_model_kind": "live"},
    "a prefix's cache": {"columns": HINTS, "teacher_prefix_cache_gb": 0.01},
    "a random selection": {"token_selection": "random", "token_fraction": 0.5},
}


@pytest.mark.parametrize("name", SAME)
def test_a_beginning_is_as_if_the_student_had_written_it(trained, name):
    given = {**OPTIONS, **SAME[name]}
    more = given.pop("columns", {})
    rollout = lambda: Answering(rest, apart=True)  # noqa: E731
    whole = trained(train_dataset=Dataset.from_dict({"prompt": tiny.PROMPTS, **more}), rollout=rollout(), **given)
    begun = trained(train_dataset=columns(**more), rollout=rollout(), **given)
    assert sum(tiny.logged(begun, "tokens/dataset")) > 5
    assert not tiny.logged(whole, "tokens/dataset")
    torch.testing.assert_close(tiny.weights(begun), tiny.weights(whole), rtol=0, atol=1e-7)
    assert tiny.logged(begun, "divergence/mean") == pytest.approx(tiny.logged(whole, "divergence/mean"), rel=1e-5)
    lengths = [tiny.logged(one, "completions/mean_length") for one in (whole, begun)]
    assert all(one > other for one, other in zip(*lengths, strict=True)), "of what is generated alone"


def test_transformers_goes_on_as_after_both_in_one(make_trainer):
    trainer = make_trainer(rollout=HFRollout(), top_k=1, max_completion_length=6, train_dataset=columns())
    rollout = trainer.score(list(columns())).rollout
    for prompt, ids, text in zip(rollout.prompt_lists(), rollout.completion_lists(), BEGUN, strict=True):
        given = WORDS(text or "")["input_ids"]
        context = torch.tensor([[*prompt, *given]])
        free = trainer.model.generate(context, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=2)
        assert ids == [*given, *free[0, context.size(1) :].tolist()]


OPEN = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one two"}]


@pytest.mark.parametrize("text", ["one two ", "one two"])
def test_a_prompt_that_ends_with_an_answer_is_continued(make_trainer, text):
    prompt = [OPEN[0], {**OPEN[1], "content": text}]
    rows = Dataset.from_list([{"prompt": prompt, "teacher_prompt": [{"role": "system", "content": "x"}, *prompt]}] * 2)
    trainer = make_trainer(rollout=HFRollout(), train_dataset=rows, max_completion_length=4)
    batch = trainer.score(list(rows))
    shown = "<|im_start|>user\nCount.<|im_end|>\n<|im_start|>assistant\n" + text
    assert WORDS.batch_decode(batch.rollout.prompt_lists()) == [shown] * 2
    (read, *_), _ = trainer.teaching._for_teachers(batch.rollout, batch.rows)[0].prompt_lists(), None
    assert WORDS.decode(read) == "<|im_start|>system\nx<|im_end|>\n" + shown


def test_an_answer_and_a_beginning_are_one_message(make_trainer):
    """Also a completion of the dataset after such a prompt."""
    goes_on = [{"role": "assistant", "content": " three"}]
    for name, value in {"completion_prefix": " three", "completion": goes_on}.items():
        rows = Dataset.from_list([{"prompt": OPEN, name: value}] * 2)
        trainer = make_trainer(
            rollout=HFRollout(), train_dataset=rows, max_completion_length=9, lmbda=float(name != "completion")
        )
        ids = trainer.score(list(rows)).rollout.completion_lists()[0]
        assert WORDS.decode(ids).startswith(" three" if name == "completion_prefix" else " three<|im_end|>")


def test_a_row_goes_on_after_a_tools_answer(make_trainer):
    """The calls and answers before are given, and rewards see all of the conversation."""
    seen = []

    def told(completions, **_):
        seen.extend(completions)
        return [1.0] * len(completions)

    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    said = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "4"},
    ]
    row = {"prompt": [{"role": "user", "content": "2+2?"}], "completion_prefix": said}
    words = tool_calls.words()
    trainer = make_trainer(
        processing_class=words,
        tools=[tiny.add],
        rollout=Answering(lambda _: words("four<|im_end|>")["input_ids"]),
        train_dataset=Dataset.from_list([row] * 2),
        methods=[Rewards([told])],
        max_completion_length=60,
        model=tiny.qwen2(32, max_position_embeddings=2000),
        teacher_model=tiny.qwen2(48, 1, max_position_embeddings=2000),
    )
    rollout = trainer.score([row] * 2).rollout
    text, authors = words.decode(rollout.completion_lists()[0]), rollout.authors[0]
    assert "<tool_call>" in text
    assert text.endswith("<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\nfour<|im_end|>")
    parts = {one: words.decode(rollout.completion_ids[0][authors == one]) for one in Author}
    assert parts[Author.STUDENT] == "four<|im_end|>"
    assert parts[Author.DATASET].rstrip().endswith("</tool_call><|im_end|>")
    assert "<tool_response>" in parts[Author.ENVIRONMENT]
    assert (rollout.weights[0] == (authors != Author.ENVIRONMENT).float()).all()
    assert [one["role"] for one in seen[0]] == ["assistant", "tool", "assistant"]
    assert seen[0][-1]["content"] == "four"


def test_images_come_before_a_beginning(trained):
    data = vision_language.rows([1, 0, 2, 1, 0, 1, 1, 2])
    options = {**vision_language.arguments("qwen2_5_vl"), **OPTIONS, "shuffle_dataset": False, "max_steps": 2}
    answer, words = vision_language.answer, vision_language.tokenizer()
    whole = trained(train_dataset=data, rollout=Answering(answer), **options)
    prompts = whole.prompt_ids_of(whole.teaching.read_rows(list(data)))
    known = {tuple(ids): answer(ids) for ids in prompts}
    begun = data.add_column("completion_prefix", [words.decode(ids[:1]) for ids in known.values()])
    rollout = Answering(lambda ids: known[tuple(ids[:-1])][1:])
    found = trained(**{**options, **vision_language.arguments("qwen2_5_vl")}, train_dataset=begun, rollout=rollout)
    torch.testing.assert_close(tiny.weights(found), tiny.weights(whole), rtol=0, atol=2e-6)


def test_rows_whose_beginning_leaves_no_room_are_dropped(make_trainer):
    begun = Dataset.from_dict({"prompt": ["a"] * 4, "completion_prefix": ["so", "long " * 60, None, "it"]})
    trainer = make_trainer(train_dataset=begun, rollout=HFRollout(), overlong_prompts="drop")
    assert trainer.train_dataset["completion_prefix"] == ["so", None, "it"]
    stream = make_trainer(train_dataset=begun.to_iterable_dataset(), rollout=HFRollout(), overlong_prompts="drop")
    assert [row["completion_prefix"] for row in stream.train_dataset] == ["so", None, "it"]


def test_a_call_at_the_end_of_a_prompt_is_not_lost(make_trainer):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    rows = Dataset.from_list([{"prompt": [OPEN[0], call]}] * 2, on_mixed_types="use_json")
    trainer = make_trainer(processing_class=tool_calls.words(), train_dataset=rows, rollout=HFRollout())
    (ids, _) = trainer.prompt_ids_of(trainer.teaching.read_rows(list(rows)))
    assert trainer.processing_class.decode(ids).count("<tool_call>") == 1


def test_a_resumed_run_goes_on_alike(trained, tmp_path):
    options = {**OPTIONS, "train_dataset": columns(), "rollout": HFRollout(), "max_completion_length": 6}
    whole = trained(**options, save_strategy="steps", save_steps=1)
    resumed = trained(**options, resume=str(tmp_path / "checkpoint-1"))
    assert torch.equal(tiny.weights(resumed), tiny.weights(whole))


class Drawn(Told, Answering):
    """Completes by a function, and knows what tokens were drawn with."""

    def __init__(self) -> None:
        Apart.__init__(self, {})
        self._answer = rest

    complete = Answering.complete


def test_importance_weights_are_of_tokens_whose_sampler_is_known(make_trainer):
    """Loss and gradient against float64; what nobody has drawn weighs nothing, whatever a method says."""
    methods, kind = [OffPolicy(weights={"dataset": 0.5})], SampledReverseKL(clip_max=None)
    trainer = make_trainer(train_dataset=columns(), rollout=Drawn(), divergence=kind, methods=methods)
    batch = trainer.score(list(columns()))
    student, teacher = (deepcopy(one).double() for one in (trainer.model, trainer.teacher_model))
    total, loss = 0.0, torch.zeros((), dtype=torch.float64)
    for row, prompt, ids in zip(
        batch.rows, batch.rollout.prompt_lists(), batch.rollout.completion_lists(), strict=True
    ):
        logs = [one(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1] for one in (student, teacher)]
        own, its = (one.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0] for one in logs)
        start = len(row.given.ids)
        own, its = own[start:], its[start:]
        told = torch.tensor(Drawn().logprobs(prompt, ids[start:]), dtype=torch.float64)
        advantage = (own.detach() - told).exp() * (own - its).detach()
        loss, total = loss + (advantage * (1 + own - own.detach())).sum(), total + len(own)
    loss = loss / total
    loss.backward()
    found = trainer.compute_loss(trainer.model, batch, num_items_in_batch=None)
    found.backward()
    assert float(found) == pytest.approx(float(loss), rel=1e-5)
    for (name, one), other in zip(trainer.model.named_parameters(), student.parameters(), strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=2e-4, atol=2e-6, msg=name)
