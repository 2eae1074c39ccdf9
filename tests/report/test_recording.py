"""What `report=True` records is what the loss compares, and nothing else about a training changes."""

from __future__ import annotations

import json
from itertools import pairwise
from zlib import crc32

import pytest
import torch
from datasets import Dataset
from environments.worlds import END, call, given, rows
from support import tiny

from trl_opsd import FixedRollout
from trl_opsd.report.samples import CHUNK, TEXT, TOKENS, log_of, recorded_in

EVALUATES = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "eval_dataset": tiny.rows(4)}


def check(trainer, prompt: str, answer: list[int], tokens, places=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens at these places have the probabilities of both models by their own forward passes, which are returned.

    [n, V] each.
    """
    words = trainer.processing_class
    ids = words(prompt)["input_ids"]
    read = torch.tensor([[*ids, *answer]])
    with torch.no_grad():
        student_nV, teacher_nV = (
            model(read).logits[0, len(ids) - 1 : -1].float().div(trainer.temperature).softmax(-1)
            for model in (trainer.model.eval(), trainer.teacher.model)
        )
    for place in range(len(answer)) if places is None else places:
        token, best = tokens[place], teacher_nV[place].topk(5)
        assert token.student == pytest.approx(student_nV[place, answer[place]].item(), rel=2e-3)
        assert token.teacher == pytest.approx(teacher_nV[place, answer[place]].item(), rel=2e-3)
        assert [share for _, share in token.choices] == pytest.approx(best.values.tolist(), rel=2e-3)
        assert token.choices[0][0].strip() == words.decode([best.indices[0].item()]).strip()
    return student_nV, teacher_nV


@pytest.mark.quick
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd", "sampled_reverse_kl"])
def test_every_token_has_numbers_of_both_models(make_trainer, tmp_path, divergence):
    given = {"temperature": 1.0 if "sampled" in divergence else 0.7, "beta": 0.5 if divergence == "jsd" else 1.0}
    given["per_device_eval_batch_size"] = 3
    trainer = make_trainer(report=True, divergence=divergence, eval_dataset=tiny.rows(8), **given)
    words, answers = trainer.processing_class, tiny.recorded(trainer.processing_class)
    trainer.evaluate()
    [found] = recorded_in(tmp_path)
    assert (found.step, found.split) == (0, "eval")
    by_checksum = sorted(tiny.PROMPTS, key=lambda prompt: crc32(repr(words(prompt)["input_ids"]).encode()))
    assert [one.prompt for one in found.samples] == by_checksum[:4], "of all three batches"
    for sample in found.samples:
        answer = answers[tuple(words(sample.prompt)["input_ids"])]
        assert "".join(one.text for one in sample.tokens) == words.decode(answer)
        assert not sample.is_cut
        for token, p, q in zip(sample.tokens, *check(trainer, sample.prompt, answer, sample.tokens), strict=True):
            kl = [(one * (one.log() - other.log())).sum().item() for one, other in ((q, p), (p, q))]
            jsd = sum((one * (one.log() - ((p + q) / 2).log())).sum().item() for one in (p, q)) / 2
            expected = {"forward_kl": kl[0], "jsd": jsd}.get(divergence, kl[1])
            assert token.divergence == pytest.approx(expected, rel=2e-3, abs=1e-5)


@pytest.mark.quick
def test_report_does_not_change_the_training(trained, tmp_path):
    options = {"logging_steps": 1, "gradient_accumulation_steps": 2, **EVALUATES}
    plain, recorded = (
        trained(report=report, output_dir=str(tmp_path / str(report)), **options) for report in (False, True)
    )
    assert torch.equal(tiny.weights(plain), tiny.weights(recorded))
    losses = [tiny.logged(one, "loss") for one in (plain, recorded)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    assert not list((tmp_path / "False").glob("report*"))

    found = recorded_in(tmp_path / "True")
    seen = [(one.split, one.step) for one in found]
    assert seen == [("eval", 0), ("train", 0), ("eval", 2), ("train", 2), ("eval", 3)]
    prompts = [[sample.prompt for sample in one.samples] for one in found if one.split == "eval"]
    assert prompts[0] == prompts[1] == prompts[2]
    assert len(prompts[0]) == 4
    assert log_of(tmp_path / "True") == json.loads(json.dumps(recorded.state.log_history))
    page = (tmp_path / "True" / "report.html").read_text()
    assert page.count("<figure>") >= 5
    assert "<dt>steps</dt><dd>3 of 4 prompts each" in page
    of_ends = [one for one in found if (one.split, one.step) != ("eval", 2)]
    assert page.count('class="tokens"') == sum(len(one.samples) for one in of_ends)


def test_resumed_run_continues_report_and_new_run_replaces_it(make_trainer, tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    make_trainer(report=True, max_steps=4, **saves).train()
    assert [one.step for one in recorded_in(tmp_path)] == [0, 3]
    make_trainer(report=True, max_steps=4, **saves).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [one.step for one in recorded_in(tmp_path)] == [0, 2, 3], "what came after step 2 is of the other course"
    assert [log["step"] for log in log_of(tmp_path) if "loss" in log] == [1, 2, 3, 4]
    make_trainer(report=True, max_steps=2).train()
    assert [one.step for one in recorded_in(tmp_path)] == [0, 1]
    assert json.loads((tmp_path / "report/trainer_state.json").read_text())["log_history"][-1]["step"] == 2


def test_evaluation_joins_next_training_and_second_training_replaces_it(make_trainer, tmp_path):
    make_trainer(report=True, max_steps=1).train()
    trainer = make_trainer(report=True, eval_dataset=tiny.rows(2))
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    seen = [("eval", 0), ("train", 0), ("train", 2), ("eval", 3)]
    assert [(one.split, one.step) for one in recorded_in(tmp_path)] == seen
    trainer.train()
    assert [(one.split, one.step) for one in recorded_in(tmp_path)] == [("train", 0), ("train", 2)]


def test_privileged_context_is_not_in_the_report(make_trainer, tmp_path):
    rows = Dataset.from_dict({"prompt": tiny.PROMPTS, "privileged_context": ["the secret is 7"] * 8})
    trainer = make_trainer(
        report=True, teacher_model=None, teacher_model_kind="live", train_dataset=rows, eval_dataset=rows, max_steps=1
    )
    trainer.evaluate()
    trainer.train()
    found = recorded_in(tmp_path)
    assert found
    assert any(token.divergence > 0 for one in found[-1].samples for token in one.tokens)
    for file in [*(tmp_path / "report").iterdir(), tmp_path / "report.html"]:
        assert "secret" not in file.read_text(), file.name


def test_tokens_outside_loss_have_no_divergence(make_trainer, tmp_path):
    long = [5 + place % 90 for place in range(TOKENS + 20)]
    rollout = FixedRollout(dict.fromkeys(tiny.recorded(tiny.tokenizer()), long))
    trainer = make_trainer(report=True, eval_dataset=tiny.rows(1), max_completion_length=TOKENS + 20, rollout=rollout)
    weigh = trainer.weigh

    def odd(rollout, rows, targets):
        weights = weigh(rollout, rows, targets)
        weights[:, 1::2] = 0
        return weights

    trainer.weigh = odd
    trainer.evaluate()
    [found] = recorded_in(tmp_path)
    [sample] = found.samples
    assert sample.is_cut
    assert len(sample.tokens) == TOKENS
    check(trainer, sample.prompt, long, sample.tokens, (0, 2 * CHUNK, TOKENS - 2))  # of several chunks
    assert all((token.divergence is None) == (place % 2 == 1) for place, token in enumerate(sample.tokens))


def look(times: int) -> str:
    """Looks.

    Args:
        times: How often.

    Returns:
        What is there.
    """
    return "<b>" * times


def test_trajectory_is_recorded_by_turn_however_long_an_answer_is(make_trainer, tmp_path):
    turns = [call("look", times=400), call("look", times=1), f"two{END}"]

    def script(prompt: str) -> str:
        return f"none{END}" if "count 0" in prompt else turns[prompt.count("<tool_response>")]

    trainer = make_trainer(
        **given(script, None, tools=[look], max_completion_length=2000, eval_dataset=rows(2)), report=True
    )
    trainer.evaluate()
    [found] = recorded_in(tmp_path)
    plain, acting = sorted(found.samples, key=lambda one: len(one.answers))
    assert not plain.answers
    ends = [0, *(end for end, _ in acting.answers), len(acting.tokens)]
    said = ["".join(token.text for token in acting.tokens[start:end]) for start, end in pairwise(ends)]
    assert said == turns
    assert not acting.is_cut
    long, short = (answer for _, answer in acting.answers)
    before, after = "\n<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert short == f"{before}<b>{after}"
    assert (len(long), long.startswith(f"{before}<b><b>"), long.endswith(f"<b>{after}")) == (TEXT + 3, True, True)

    [context], tokens = trainer.rollout.asked[-1], acting.tokens[ends[-2] :]
    words = trainer.processing_class
    both = check(trainer, words.decode(context), words(turns[-1])["input_ids"], tokens)
    for token, p, q in zip(tokens, *both, strict=True):
        assert token.divergence == pytest.approx((p * (p / q).log()).sum().item(), rel=2e-3)


def test_unwritable_report_does_not_stop_training(trained, tmp_path, caplog):
    (tmp_path / "report").write_text("a file is in the way")
    trainer = trained(report=True, logging_steps=1)
    assert trainer.state.global_step == 3
    assert caplog.text.count("the rest of this training is not recorded") == 1
