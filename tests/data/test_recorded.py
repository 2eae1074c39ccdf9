"""Recorded episodes: TRL's SFT makes the same tokens of them; of its mask, what a student generates is learned."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import trl
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from support import tiny
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from trl_opsd import before_turn
from trl_opsd.data.completions import logger, recorded
from trl_opsd.data.prompts import tidy
from trl_opsd.types.rollout import Author, Given

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
IM_END, OF_TURN = ["<|im_end|>"], ["<|END_OF_TURN_TOKEN|>"]
FAMILIES: dict[str, tuple[list[str], dict[str, Any], set[str]]] = {
    # With calls: the tokens that end a turn, options of the template, and what SFT learns beside what is generated: the
    # opening of a later turn, with which the environment's answer ends, and what follows an end token.
    "qwen3": (IM_END, {}, {"\n"}),
    "qwen2_5": (IM_END, {}, {"\n"}),
    "qwen3_5_think": (IM_END, {}, {"\n", "<think>\n"}),
    "nemotron_3_ultra": (IM_END, {"enable_thinking": False}, {"\n", "<think></think>"}),
    "lfm2_v2": (IM_END, {}, {"\n"}),
    "glm4moe": (["<|user|>", "<|observation|>"], {}, set()),
    "gptoss": (["<|return|>", "<|call|>"], {}, {"<|start|>assistant"}),
    "muse_glimmer": (["<|eot|>"], {}, {"<|start|>assistant"}),
    # Without:
    "llama3": (["<|eot_id|>"], {}, set()),
    "gemma": (["<end_of_turn>"], {}, {"\n"}),
    "cohere": (OF_TURN, {}, set()),
    "phi3": (["<|end|>"], {}, {"\n<|end|>"}),
}
CALLING = list(FAMILIES)[:8]
MARK = re.compile(r"{%(-?)\s*(end)?generation\s*(-?)%}")


def words(family: str, kind: str = "_training") -> PreTrainedTokenizerFast:
    made = tiny.tokenizer()
    made.add_special_tokens({"additional_special_tokens": [*tiny.SPECIAL_TOKENS, *FAMILIES[family][0]]})
    made.chat_template = (TEMPLATES / f"{family}{kind}.jinja").read_text(encoding="utf-8")
    made.bos_token, made.eos_token = "<|endoftext|>", FAMILIES[family][0][0]
    return made


def episode(as_text: bool) -> list[dict[str, Any]]:
    """Two calls: in OpenAI's form, or as templates read it."""
    made: list[dict[str, Any]] = [{"role": "user", "content": "2+1+1?"}]
    for number, arguments in enumerate([{"a": 2, "b": 1}, {"a": 3, "b": 1}]):
        function = {"name": "add", "arguments": json.dumps(arguments) if as_text else arguments}
        call = {"id": f"id{number}", "type": "function", "function": function}
        made.append({"role": "assistant", "content": None if as_text else "", "tool_calls": [call]})
        answer = {"role": "tool", "tool_call_id": f"id{number}", "content": str(3 + number)}
        made.append(answer if as_text else {**answer, "name": "add"})
    return [*made, {"role": "assistant", "content": "It is 4."}]


TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "2+1+1?"},
    {"role": "assistant", "content": "It is 4."},
]


def cut(messages: list[dict[str, Any]]) -> dict[str, Any]:
    start = max(number for number, one in enumerate(messages) if one["role"] == "user") + 1
    return {"prompt": messages[:start], "completion": messages[start:]}


@cache
def of_sft(family: str, folder: str) -> tuple[list[int], list[bool]]:
    """Token ids and mask of a row as `SFTTrainer` trains on it."""
    row = cut(episode(as_text=False) if family in CALLING else TALK)
    row |= {"tools": [tiny.add], "chat_template_kwargs": FAMILIES[family][1]}
    trainer = SFTTrainer(
        tiny.qwen2(vocab_size=300),
        SFTConfig(folder, assistant_only_loss=True, max_length=None, max_steps=1, use_cpu=True, bf16=False),
        train_dataset=IterableDataset.from_generator(lambda: iter([row] * 2)),
        processing_class=words(family),
    )
    made = next(iter(trainer.train_dataset))
    return made["input_ids"], [one != -100 for one in made["labels"]]


def ours(family: str, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], Given]:
    """The prompt and the completion of the same row, out of a table with `None` in place of what a message lacks."""
    (row,) = Dataset.from_list([cut(episode(as_text=True) if family in CALLING else TALK)])
    assert family not in CALLING or {None} < {one["tool_call_id"] for one in row["completion"]}
    prompt, template = tidy(row["prompt"], ""), {"tools": [tiny.add], **FAMILIES[family][1]}
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True, **template)["input_ids"]
    ends = tokenizer.convert_tokens_to_ids(FAMILIES[family][0])
    return ids, recorded(row, "row 0", "completion", prompt, ids, tokenizer, template, ends)


def runs(values: list[Any]) -> list[tuple[Any, slice]]:
    """Each value with the places where it stands."""
    groups = [(value, list(places)) for value, places in groupby(range(len(values)), values.__getitem__)]
    return [(value, slice(places[0], places[-1] + 1)) for value, places in groups]


@pytest.mark.parametrize("is_marked", [True, False], ids=["by marks", "turn by turn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_sft_and_those_learned_are_the_students(tmp_path_factory, family, is_marked):
    PartialState()
    ids, learned = of_sft(family, str(tmp_path_factory.getbasetemp()))
    tokenizer = words(family)
    if not is_marked:
        tokenizer.chat_template = MARK.sub(
            lambda mark: f"{{%{mark[1]} {'endif' if mark[2] else 'if true'} {mark[3]}%}}", tokenizer.chat_template
        )
    prompt, given = ours(family, tokenizer)
    whole = [*prompt, *given.ids]
    assert whole == ids[: len(whole)]
    own = [False] * len(prompt) + [author == Author.DATASET for author in given.authors]
    own += [False] * (len(ids) - len(own))
    assert all(theirs for mine, theirs in zip(own, learned, strict=True) if mine)
    turns = [ids[places] for is_own, places in runs(own) if is_own]
    assert len(turns) == (3 if family in CALLING else 1)
    assert all(tokenizer.decode(turn[-1:]) in FAMILIES[family][0] for turn in turns)
    beside = [theirs and not mine for mine, theirs in zip(own, learned, strict=True)]
    texts = {tokenizer.decode(ids[places]) for is_beside, places in runs(beside) if is_beside}
    assert texts == FAMILIES[family][2]


@pytest.mark.refusal
def test_a_template_whose_turns_are_no_prefixes_is_refused_with_the_turn():
    """Qwen3 thinks in the last message only, so the first call is another text once it is answered."""
    message = r"row 0: .* message 1 in another way .*assistant\\n<think>.* became .*assistant\\n<tool_call>"
    with pytest.raises(ValueError, match=message):
        ours("qwen3", words("qwen3", kind=""))


def test_a_template_that_leaves_calls_out_warns(caplog):
    PartialState()
    logger.warning_once.cache_clear()
    tokenizer = words("qwen2_5")
    ours("qwen2_5", tokenizer)
    assert not caplog.messages
    tokenizer.chat_template = tiny.CHAT_TEMPLATE
    ours("qwen2_5", tokenizer)
    assert "drops parts of the dataset's answers" in caplog.text


def test_messages_out_of_a_table_are_those_that_were_put_in():
    """A table gives each call the arguments of all, and each message the fields of all."""
    search = {"name": "search", "arguments": {"query": {"text": "sum", "tags": ["a"]}, "limit": 0}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": search}]}
    talks = [episode(as_text=False), [*TALK, called, {"role": "tool", "name": "search", "content": ""}]]
    stored = Dataset.from_list([{"messages": one} for one in talks])["messages"]
    assert stored[0][0]["tool_calls"] is None
    assert stored[0][1]["tool_calls"][0]["function"]["arguments"]["query"] is None
    assert [tidy(one, "") for one in stored] == talks
    assert tidy(episode(as_text=True), "") == episode(as_text=False)


# ---- What the student goes on with -----------------------------------------------------------------------------------

TOLD = [{"role": "system", "content": "Add."}, *TALK[:2], *episode(as_text=True)]
ROW = {"messages": TOLD, "topic": "sums"}


@pytest.mark.parametrize(("turn", "place"), [(0, 4), (1, 6), (2, 8)])
def test_an_episode_is_cut_before_a_turn(turn, place):
    assert before_turn(ROW, 0, turn) == {"prompt": TOLD[:place]}
    scored = before_turn(ROW, 0, turn, is_scored=True)
    assert scored == {"prompt": TOLD[:4], "completion_prefix": TOLD[4:place] or None}


def test_turns_are_drawn_by_row_and_seed():
    drawn = [[len(before_turn(ROW, number, seed=seed)["prompt"]) for number in range(300)] for seed in (0, 1)]
    assert drawn[0] != drawn[1]
    assert all(80 < one.count(place) < 120 for one in drawn for place in (4, 6, 8))
    rows = Dataset.from_list([ROW] * 300).map(before_turn, with_indices=True, remove_columns=["messages"])
    assert list(map(len, rows["prompt"])) == drawn[0]
    assert tidy(rows[0]["prompt"], "") == tidy(TOLD[: drawn[0][0]], "")
    assert {*rows["topic"]} == {"sums"}
