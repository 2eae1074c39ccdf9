"""An engine is built for the longest row of the datasets, and later ones with longer prompts are refused at once."""

from __future__ import annotations

import pytest
from datasets import Dataset
from support import tiny
from trl.chat_template_utils import qwen3_chat_template

pytest.importorskip("vllm")

from trl_opsd.data import datasets
from trl_opsd.loop import teaching
from trl_opsd.rollout import vllm as backend
from trl_opsd.types import Completion

pytestmark = pytest.mark.vllm

COMPLETION = 24


class Recorder:
    """Takes an engine's arguments, and writes the first token of each prompt."""

    name, block_size, why_blind = "vLLM", 16, None

    def __init__(self, **options):
        self.options, self.written = options, 0

    def write(self, prompt_ids, options):
        self.written += len(prompt_ids)
        return [
            Completion(prompt_ids=ids, completion_ids=ids[:1], prompt_logprobs=[], logprobs=[]) for ids in prompt_ids
        ]

    def load(self, weights):
        assert all(True for _ in weights)

    def forget_prefixes(self):
        """Has no cache."""

    wipe_cache = forget_prefixes


@pytest.fixture
def make(make_trainer, tmp_path, monkeypatch):
    """Builds a trainer of a student with a context of 8192 tokens; an engine has room for prompts of 8."""
    monkeypatch.setattr(backend, "VLLMEngine", Recorder)
    monkeypatch.setattr(teaching, "_ROOMY", 8)
    tiny.qwen2(max_position_embeddings=8192).save_pretrained(tmp_path / "student")

    def make(train=(5, 60, 9), teachers=8192, **given):
        options = {"use_vllm": True, "max_completion_length": COMPLETION, "vllm_sync_check": "never", "rollout": None}
        teacher = tiny.qwen2(48, seed=1, max_position_embeddings=teachers)
        more = {"train_dataset": rows(*train), **options, **given}
        return make_trainer(model=str(tmp_path / "student"), teacher_model=teacher, **more)

    return make


def rows(*lengths):
    """Prompts of so many tokens: a byte is a token."""
    return Dataset.from_dict({"prompt": ["x" * length for length in lengths]})


def context(trainer):
    found = trainer.rollout.engine.options["max_model_len"]
    assert found == trainer.limits.context
    return found


def test_longest_row_of_all_datasets_sets_an_engines_length(make, monkeypatch):
    assert context(make()) == 60 + COMPLETION
    assert context(make(eval_dataset={"short": rows(4), "long": rows(300, 7)})) == 300 + COMPLETION
    assert context(make(train=(5, 7), eval_dataset=rows(6))) == 8 + COMPLETION, "for which no row is counted"
    dropped = make(train=(5, 9000, 60), overlong_prompts="drop")
    assert context(dropped) == 60 + COMPLETION, "of the rows that are left"
    assert context(make(teachers=83, overlong_prompts="drop")) == 83, "the teacher reads no longer rows"
    assert context(make(vllm_max_model_length=100)) == 100
    assert context(make(eval_dataset=rows(4).to_iterable_dataset())) == 8192, "a stream may have any prompt"
    assert context(make(eval_dataset=rows(4).with_transform(dict))) == 8192
    assert context(make(teachers=70, train=(5, 6, 9), eval_dataset=rows(4).to_iterable_dataset())) == 70
    messages, words = Dataset.from_dict({"prompt": [[{"role": "user", "content": "2+2"}]] * 3}), tiny.tokenizer()
    words.chat_template = qwen3_chat_template
    grows = make(train_dataset=messages, tools=[tiny.add], processing_class=words)
    assert context(grows) == 8192, "a conversation goes on until the context is full"

    counted, count = [], datasets._counted
    monkeypatch.setattr(datasets, "_counted", lambda *given: counted.append(len(given[1])) or count(*given))
    monkeypatch.setattr(teaching, "_ROOMY", 200)
    assert context(make(train=(5, *[80] * 50, 300, 9))) == 300 + COMPLETION
    assert sum(counted) <= 6, "the first, for each reader, and the longest: bytes tell of the others"
    monkeypatch.undo()
    monkeypatch.setattr(backend, "VLLMEngine", Recorder)
    assert context(make()) == 4096 + COMPLETION, "as its cache is small"


def test_longer_prompts_of_later_datasets_are_refused_before_generation(make):
    trainer = make(eval_dataset=rows(20, 21))
    longer = rows(30, 61)
    for name, use in {"eval_dataset": trainer.evaluate, "test_dataset": trainer.predict}.items():
        with pytest.raises(ValueError, match=rf"row 1 of {name} has 61 tokens.*the engine \(84 tokens\)"):
            use(longer)
    assert trainer.rollout.engine.written == 0
    assert trainer.evaluate(rows(59))["eval_loss"] > 0
    assert trainer.evaluate(rows(3, 60))["eval_loss"] > 0
    written = trainer.rollout.engine.written
    with pytest.raises(ValueError, match=r"The prompt in row 0 of an evaluation batch has 61 tokens.*of the engine"):
        trainer.evaluate(rows(61).to_iterable_dataset())
    assert trainer.rollout.engine.written == written
