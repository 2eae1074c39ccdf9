"""Two processes whose rows call tools, their own or an environment's, for different numbers of turns write together."""

from __future__ import annotations

import faulthandler
import os
from functools import cache, partial

import pytest
from accelerate.utils import gather_object
from support import forks, fsdp_on_cpu, tiny
from trl.chat_template_utils import qwen3_chat_template

from trl_opsd import HFRollout, OPSDTrainer
from trl_opsd.loop import generation

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(forks.SECONDS + 60)]

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'
ANSWER = "four<|im_end|>"
CALLS = {"train": ((3, 1), (0, 0)), "evaluate": ((0, 0), (2, 1))}
"""Calls of the two rows of each process, before they answer."""
TURNS = {"train": [[2, 2, 1, 1], [2, 0, 0, 0]], "evaluate": [[2, 0, 0], [2, 2, 1]]}
"""Rows of each turn."""
LAUNCHES = {
    "ddp": ("ddp", {}),
    "zero3, not gathered": ("zero3_cpu", {"ds3_gather_for_generation": False}),
    "zero3": ("zero3_cpu", {}),
    "fsdp2": ("fsdp2_cpu", {}),
    "ddp, vllm": ("ddp", {"use_vllm": True}),
    "zero3, vllm": ("zero3_cpu", {"use_vllm": True}),
}
ENVIRONMENTS = ("zero3, not gathered", "fsdp2")
"""Launches whose tool is the method of an environment."""
LIMIT = 200
"""Seconds after which processes that wait for each other are ended."""


class Calling(OPSDTrainer):
    """Has its rollout write, which processes may do together, and puts calls and an answer in place of that."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.check, generation.checked_completions = generation.checked_completions, self.in_turn

    def in_turn(self, completions, host, prompt_ids, name):
        self.check(completions, host, prompt_ids, name)
        left = [calls - len(self.written) for calls in self.calls[self.accelerator.process_index]]
        self.written.append(len(prompt_ids))
        texts = [CALL if calls > 0 else ANSWER for calls in left if calls >= 0]
        return self.processing_class(texts)["input_ids"] if texts else []

    def teach(self, rollout, rows):
        pairs = zip(rollout.completion_ids, rollout.weights, strict=True)
        self.learned = [self.processing_class.decode(ids[weights == 1]) for ids, weights in pairs]
        return super().teach(rollout, rows)


class Calculator:
    def reset(self, **_): ...

    def add(self, a: int, b: int) -> int:
        return tiny.add(a, b)


Calculator.add.__doc__ = tiny.add.__doc__


def trained(folder, name, options):
    if "use_vllm" in options:
        _compile_nothing()
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    words = tiny.tokenizer()
    words.chat_template = qwen3_chat_template
    rows = tiny.rows(4).map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    args = tiny.config(folder / "out", max_completion_length=500, max_steps=1, per_device_eval_batch_size=2, **options)
    fsdp_on_cpu.allow()
    trainer = Calling(
        model=str(folder / "student"),
        teacher_model=str(folder / "teacher"),
        args=args,
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=words,
        rollout=None if args.use_vllm else HFRollout(),
        **({"environment_factory": Calculator} if name in ENVIRONMENTS else {"tools": [tiny.add]}),
    )
    if not args.use_vllm:
        trainer.generation_config.max_new_tokens = 3
    found = {}
    for what, calls in CALLS.items():
        trainer.written, trainer.calls = [], calls
        getattr(trainer, what)()
        found[what] = {"turns": gather_object([trainer.written]), "learned": sorted(gather_object(trainer.learned))}
    found["loss"], found["calls"] = (trainer.state.log_history[0][name] for name in ("loss", "tools/call_frequency"))
    faulthandler.cancel_dump_traceback_later()
    return found


def _compile_nothing():
    """It would take most of the time."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1"}
    from trl_opsd._compat.vllm import engine

    engine.LLM = partial(engine.LLM, enforce_eager=True)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tool_turns")
    for name, (width, seed) in {"student": (64, 0), "teacher": (48, 1)}.items():  # vLLM needs heads of 32
        tiny.qwen2(width, seed, max_position_embeddings=2048).save_pretrained(folder / name)

    @cache
    def launched(name):
        strategy, options = LAUNCHES[name]
        return forks.results(strategy, trained, folder, name, options)[0]

    return launched


long = [*LAUNCHES][2:]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name in long) + [pytest.mark.vllm] * ("vllm" in name))
        for name in LAUNCHES
    ],
)
def test_process_takes_part_in_tool_turns_of_others(launched, name):
    if "vllm" in name:
        pytest.importorskip("vllm")
    found = launched(name)
    for what, of_each in CALLS.items():
        assert found[what]["turns"] == TURNS[what]
        assert found[what]["learned"] == sorted(CALL * calls + ANSWER for each in of_each for calls in each)
    assert found["calls"] == 4 / 4
    assert found["loss"] == pytest.approx(launched("ddp")["loss"], abs=1e-5)
