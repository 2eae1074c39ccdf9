"""Images stay with their rows under each option: with those that change no number, all weights are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from support import tiny, vision_language
from support.rollouts import Answering
from support.tool_calls import CALL, CallsOnce
from support.vision_language import answer, rows
from trl.chat_template_utils import add_response_schema, qwen3_vl_chat_template

from trl_opsd import HFRollout, OPSDTrainer

NUMBERS = [1, 0, 2, 1, 0, 1, 1, 2]
WORDS = vision_language.tokenizer()


@pytest.fixture
def trained(trained):
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2, "optim": "sgd"}
    options |= {"learning_rate": 1e-2, "shuffle_dataset": False, "train_dataset": rows(NUMBERS)}
    options |= {"rollout": Answering(answer, apart=True)}
    return lambda cls=OPSDTrainer, **given: trained(
        cls, **{**vision_language.arguments("qwen2_5_vl"), **options, **given}
    )


def others() -> dict[str, Any]:
    return {name: vision_language.model("qwen2_5_vl", 48, 1, sees=True) for name in ("one", "two")}


SAME: dict[str, dict[str, Any]] = {
    "a budget of tokens": {"max_tokens_per_microbatch": 90},
    "rows as they end": {"overlap": "step"},
    "two teachers alike": {"teacher_model": others},
}


@pytest.mark.parametrize("case", SAME)
def test_images_stay_with_their_rows(trained, case):
    options = {name: value() if callable(value) else value for name, value in SAME[case].items()}
    if case.startswith("two"):
        options["train_dataset"] = rows(NUMBERS).add_column("teacher", ["one", "two", "two", "one"] * 2)
    expected, found = trained(), trained(**options)
    mine, theirs = (tiny.logged(each, "loss") for each in (found, expected))
    assert mine == pytest.approx(theirs, abs=1e-6)
    torch.testing.assert_close(tiny.weights(found), tiny.weights(expected), rtol=0, atol=2e-6)


@pytest.mark.parametrize("overlap", ["step", "ahead"])
def test_a_step_without_images_follows_one_with_them(trained, overlap):
    data, options = rows([1, 0, 2, 1, 0, 0, 0, 0]), {"overlap": overlap, "overlap_max_divergence": 1e9}
    expected = trained(train_dataset=data)
    found = trained(train_dataset=data, **(options if overlap == "ahead" else {"overlap": overlap}))
    torch.testing.assert_close(tiny.weights(found), tiny.weights(expected), rtol=0, atol=2e-6)


class Keeping(OPSDTrainer):
    """Keeps what each row was taught with."""

    def __init__(self, *args: Any, **given: Any) -> None:
        self.taught: list[tuple[Any, Any, list[int], list[int]]] = []
        super().__init__(*args, **given)

    def teach(self, rollout, rows):
        seen = rollout.images or [None] * len(rows)
        self.taught += zip(rows, seen, rollout.prompt_lists(), rollout.completion_lists(), strict=True)
        return super().teach(rollout, rows)


def test_completions_of_rows_with_images_are_learned(trained):
    expected, data = trained(), rows(NUMBERS)
    answers = [answer(ids) for ids in expected.prompt_ids_of(expected.teaching.read_rows(list(data)))]
    said = [[{"role": "assistant", "content": WORDS.decode(ids[:-1])}] for ids in answers]
    found = trained(Keeping, lmbda=0.0, train_dataset=data.add_column("completion", said))
    assert [ids for *_, ids in found.taught] == answers
    assert [len(row["images"]) for row, *_ in found.taught] == NUMBERS
    torch.testing.assert_close(tiny.weights(found), tiny.weights(expected), rtol=0, atol=2e-6)


def test_the_teacher_writes_what_it_sees(trained):
    """With `seq_kd`, from its own images: prompts and the student's images are alike."""
    image, size = vision_language.picture(0), (70, 90)
    same = {"prompt": [{"role": "user", "content": "a"}], "images": [image]}
    theirs = [[vision_language.picture(seed, *size)] for seed in (1, 2, 1, 3)]
    data = Dataset.from_list([{**same, "teacher_images": one} for one in theirs])
    options = {"lmbda": 0.0, "seq_kd": True, "top_k": 1, "max_completion_length": 12, "max_steps": 1}
    found = trained(Keeping, rollout=HFRollout(), train_dataset=data, **options)
    first, second, again, third = ([*prompt, *ids] for *_, prompt, ids in found.taught)
    assert first == again
    assert len({tuple(one) for one in (first, second, third)}) > 1


def test_generations_and_reward_functions_share_a_prompts_images(trained):
    got: list[tuple[int, list[int]]] = []

    def reward(completions: list[Any], completion_ids: list[list[int]], images: list[Any], **_: Any) -> list[float]:
        assert all(hasattr(one, "size") for each in images for one in each)
        got.extend((len(each), ids) for each, ids in zip(images, completion_ids, strict=True))
        return [float(len(ids)) for ids in completion_ids]

    options = {"num_generations": 2, "reward_funcs": reward, "reward_weight": 0.5}
    found = trained(Keeping, rollout=HFRollout(), max_completion_length=6, **options)
    numbers = [len(row["images"]) for row, *_ in found.taught]
    assert numbers == [number for number, _ in got] == [1, 1, 0, 0, 2, 2, 1, 1]
    for (_, one, prompt, _), (_, other, again, _) in zip(found.taught[::2], found.taught[1::2], strict=True):
        assert prompt == again
        assert (one is None) == (other is None)
        if one is not None:
            assert all(torch.equal(value, other.values[name]) for name, value in one.values.items())


class SeesAndCalls(CallsOnce):
    """For each prompt, keeps how many images it has."""

    reads_images = True

    def __init__(self) -> None:
        self.seen: list[int] = []

    def complete(self, prompt_ids: list[Any], step: int) -> list[list[int]]:
        self.seen += [0 if ids.images is None else len(ids.images.originals) for ids in prompt_ids]
        return super().complete(prompt_ids, step)


def test_a_tool_is_called_in_rows_with_images(trained):
    reader, marks = vision_language.processor("qwen3_vl"), "<|vision_start|><|image_pad|><|vision_end|>"
    reader.chat_template = qwen3_vl_chat_template
    add_response_schema(reader)
    reader.chat_template = reader.tokenizer.chat_template = qwen3_vl_chat_template.replace(marks, "<boi><image><eoi>")
    given = {"processing_class": reader, "tools": [tiny.add], "rollout": SeesAndCalls(), "max_completion_length": 400}
    for role, width in {"model": 32, "teacher_model": 48}.items():
        given[role] = vision_language.model("qwen3_vl", width, 0, sees=True, max_position_embeddings=4096)
    found = trained(Keeping, **given)
    for row, images, prompt, completion in found.taught:
        text = reader.decode(completion)
        assert text.startswith(CALL)
        assert text.endswith("four<|im_end|>")
        assert "<tool_response>\n4\n</tool_response>" in text
        assert (images is None) == (not row["images"])
        if images is not None:
            assert len(images.originals) == len(row["images"])
            assert prompt.count(reader.image_token_id) == images.kinds["mm_token_type_ids"].sum()
    assert found.rollout.seen == [1, 0, 2, 1, 1, 0, 2, 1, 0, 1, 1, 2, 0, 1, 1, 2], "in both turns"
    assert found.state.log_history[0]["tools/call_frequency"] == 1
