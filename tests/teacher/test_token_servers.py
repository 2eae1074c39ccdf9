"""A teacher on a server that generates: what it tells is that of the model, also where it meets other options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from divergences import EntropyAwareKL
from served_lab import V, check_known, proposed, tokens_teacher
from support import serving, tiny
from support.failing_server import Pretended, Scoring, pretended
from support.rollouts import Apart
from support.scores import known_teacher
from torch import Tensor
from transformers import AutoModelForCausalLM

from trl_opsd.errors import ServerError
from trl_opsd.losses import DIVERGENCES
from trl_opsd.teacher import servers
from trl_opsd.teacher.answers import kl
from trl_opsd.teacher.served import chosen_targets
from trl_opsd.teacher.servers import TeacherServer


def scoring(model: Any, fault: Any = None, **given: Any) -> Any:
    return pretended(model, fault, kind=Scoring, **{"words": tiny.tokenizer(), **given})


APIS = {
    "vLLM": ({}, ["student_top_k", "teacher_top_k", "both_top_k"]),
    "vLLM without the route": ({"scores_tokens": False}, ["teacher_top_k"]),
    "SGLang": ({"api": "sglang"}, ["teacher_top_k"]),
}


@pytest.mark.parametrize("name", APIS)
def test_each_server_tells_what_its_model_computes(checkpoint, name):
    given, offers = APIS[name]
    with scoring(checkpoint[1], **given) as server:
        for targets in ("student_top_k", "teacher_top_k", "both_top_k"):
            if targets not in offers:
                with pytest.raises(ValueError, match=r"`teacher_server_targets='(student|both)_top_k'`: the teacher's"):
                    tokens_teacher(checkpoint[0], server.url, targets)
                continue
            teacher = tokens_teacher(checkpoint[0], server.url, targets)
            check_known(teacher, checkpoint[1], proposed(), targets)
            assert name.split(" w")[0] in str(teacher)
            assert teacher.noise < 1e-9
            assert teacher.context == (99 if name == "SGLang" else 191)


def test_what_is_asked_for_follows_from_the_divergence():
    both = {"student_top_k", "teacher_top_k"}
    expected = {"sampled_reverse_kl": "student_top_k", "forward_kl": "teacher_top_k"}
    expected["skewed_forward_kl"] = "teacher_top_k"
    for name, made in DIVERGENCES.items():
        assert chosen_targets(both, made()) == expected.get(name, "both_top_k")
    assert chosen_targets({"states"}, DIVERGENCES["jsd"]()) == "states"
    assert chosen_targets({"teacher_top_k"}, DIVERGENCES["reverse_kl"]()) == "teacher_top_k"


def misreading() -> Any:
    words = tiny.tokenizer()
    words.decode = lambda ids: "something else"
    return words


@pytest.mark.parametrize(
    ("given", "top_k", "said"),
    [
        ({"kind": Pretended}, 8, r"offers \['states'\] only"),
        ({"kind": Scoring, "api": "other"}, 8, "expected a vLLM or SGLang server"),
        ({"kind": Scoring, "words": misreading()}, 8, "another tokenizer"),
        ({"kind": Scoring, "most": 20}, 21, "tells 20 tokens per position at most"),
    ],
)
def test_a_server_that_cannot_tell_what_is_asked_is_refused(checkpoint, given, top_k, said):
    with pretended(checkpoint[1], **given) as server, pytest.raises(ValueError, match=said):
        tokens_teacher(checkpoint[0], server.url, top_k=top_k)


def test_as_many_tokens_are_asked_for_as_a_server_tells(checkpoint):
    with scoring(checkpoint[1], most=20) as server:
        assert tokens_teacher(checkpoint[0], server.url, top_k=None).student_k == 20


def test_equal_rows_are_asked_once_and_own_tokens_ahead(checkpoint):
    with scoring(checkpoint[1]) as server:
        teacher, rollout = tokens_teacher(checkpoint[0], server.url, "teacher_top_k"), proposed()
        server.asked.clear()
        teacher.expect(rollout)
        check_known(teacher, checkpoint[1], rollout, "teacher_top_k")
        assert len(server.asked) == 4 + 1, "and one of the first rows again; 0 and 1 are one row, 2 counts nowhere"
        teacher = tokens_teacher(checkpoint[0], server.url, "student_top_k")
        server.asked.clear()
        teacher.expect(rollout)
        assert not server.asked, "the student has not read them yet"


@pytest.mark.long
def test_noise_is_that_of_two_answers(checkpoint):
    near = tiny.qwen2(64, seed=1)
    near.load_state_dict(checkpoint[1].state_dict())
    near.bfloat16()

    def rounded(server: Scoring, logs_LV: Tensor) -> Tensor:
        return server.computed(server.row.ids, near).float() if server.row.ids[-2:-1] == [1] else logs_LV

    with scoring(checkpoint[1], rounded) as server:
        teacher = tokens_teacher(checkpoint[0], server.url)
    ids = [place * (V - 1) // 7 for place in range(6)]
    with torch.no_grad():
        p_LV, q_LV = (
            m(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1) for m in (checkpoint[1], near)
        )
    whole = float((p_LV.exp() * (p_LV - q_LV)).sum(1).median())
    assert 0.1 * whole < teacher.noise <= 1.1 * whole, "of buckets it is at most that"


def test_training_with_all_tokens_told_is_as_with_the_teacher(trained, make_trainer, checkpoint):
    given = {"teacher_model": checkpoint[0], "rollout": None, "max_steps": 2, "divergence": "jsd", "beta": 0.3}
    expected = tiny.logged(trained(**given), "loss")
    with scoring(checkpoint[1], most=400) as server:
        trainer = trained(**given, teacher_server_url=server.url, teacher_server_top_k=V)
        assert tiny.logged(trainer, "loss") == pytest.approx(expected, rel=1e-5)
        assert "the student's 259 likeliest tokens and its own 259" in str(trainer.teacher)
        assert 0 <= trainer.teacher.noise < 1e-6
        with torch.no_grad():
            server.model = tiny.qwen2(64, seed=1).eval()
            server.model.load_state_dict(checkpoint[1].state_dict())
            server.model.model.layers[0].mlp.up_proj.weight.mul_(-1)  # a fine-tune has the same norms and head
        with pytest.raises(ServerError, match=r"from the checkpoint .*: it serves another model"):
            make_trainer(**given, teacher_server_url=server.url)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kl_clip": 0.1}, "`kl_clip=0.1`"),
        ({"top_k_teacher": 2}, "`top_k_teacher=2`"),
        ({"divergence": EntropyAwareKL()}, "`divergence=EntropyAwareKL.threshold=0.8.`"),
        ({"extrapolation": 0.0, "contrast_weight": 0.5}, "`methods='(Contrast|Extrapolation)'`"),
        ({"extrapolation": 0.0}, "`methods='Extrapolation'`"),
        ({"temperature": 0.5}, "`teacher_temperature=0.5`"),
    ],
)
def test_what_needs_a_whole_distribution_is_refused_before_training(make_trainer, given, named):
    teacher, rows = known_teacher(tiny.qwen2(48, seed=1), "both_top_k", 4), tiny.rows()
    if "contrast_weight" in given:
        rows = rows.add_column("contrast_context", ["wrong"] * 8)
    with pytest.raises(ValueError, match=f"{named} needs the whole distribution .* 'teacher' gives"):
        make_trainer(teacher_model=teacher, train_dataset=rows, **given)


def test_servers_that_tell_no_token_in_common_are_apart():
    one, other = [{token: -1.0 - token for token in ids} for ids in ((0, 1, 2), (3, 4, 5))]
    assert kl([one], [other]) > 0.5
    assert kl([one], [one]) < 1e-9


def test_a_passing_fault_is_not_another_kind(checkpoint, monkeypatch):
    monkeypatch.setattr(servers, "PAUSE", 0.01)
    with scoring(checkpoint[1]) as server:
        posted, refused = Scoring.posted, []

        def busy(self: Scoring, path: str, request: Any) -> Any:
            if path != "/detokenize" and refused.count(path) < 1:
                refused.append(path)
                return 503, b"", {}
            return posted(self, path, request)

        monkeypatch.setattr(Scoring, "posted", busy)
        asked = TeacherServer(server.url, 20.0, 5.0)
        asked.look(tiny.tokenizer())
        assert asked.limits.keys() == {"student_top_k", "teacher_top_k"}
        assert sorted(refused) == ["/inference/v1/generate", "/v1/completions"]


# ---- With overlap, evaluation, the report, resuming and other teachers -----------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("targets", ["student_top_k", "teacher_top_k"])
def test_overlap_evaluation_and_report_change_no_loss(trained, checkpoint, tmp_path, targets):
    found = []
    with scoring(checkpoint[1]) as server:
        for overlap in (None, "step", "ahead"):
            given = {"overlap": overlap, "eval_strategy": "steps", "eval_steps": 1, "eval_dataset": tiny.rows()}
            given |= {"teacher_server_targets": targets, "teacher_server_top_k": 6, "divergence": "jsd", "beta": 0.5}
            made = trained(
                teacher_model=checkpoint[0],
                rollout=Apart(tiny.recorded(tiny.tokenizer())),
                teacher_server_url=server.url,
                report=True,
                output_dir=str(tmp_path / str(overlap)),
                **given,
            )
            found.append([*tiny.logged(made, "loss"), *tiny.logged(made, "eval_loss")])
            assert (tmp_path / str(overlap) / "report.html").exists()
    assert len(found[0]) == 6
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.long
def test_other_targets_are_another_objective_to_a_resume(trained, checkpoint):
    with scoring(checkpoint[1]) as server:
        given = {"teacher_model": checkpoint[0], "save_strategy": "steps", "save_steps": 1, "max_steps": 4}
        given |= {"teacher_server_url": server.url, "teacher_server_top_k": 6, "rollout": None}
        given |= {"teacher_server_targets": "student_top_k"}
        trained(**{**given, "max_steps": 3})
        trained(**given, resume=True)
        for other in ({"teacher_server_top_k": 7}, {"teacher_server_targets": "teacher_top_k"}):
            with pytest.raises(ValueError, match="teachers: "):
                trained(**{**given, **other}, resume=True)


def test_teachers_behind_either_server_and_here_teach_together(trained, checkpoint, tmp_path):
    """The first tells all of its tokens, the second states, the third is here; all are told more than the student."""
    other = serving.save_teacher(tmp_path / "other", seed=2)
    rows = tiny.rows().add_column("teacher", ["a", "b", "c", "a"] * 2)
    rows = rows.add_column("privileged_context", [f"hint {number}" for number in range(8)])
    losses = []
    with scoring(checkpoint[1], most=400) as one, pretended(AutoModelForCausalLM.from_pretrained(other)) as two:
        told = {"teacher_server_url": {"a": one.url, "b": two.url}, "teacher_server_top_k": V, "max_steps": 2}
        for given in ({"max_steps": 2}, told):
            made = trained(
                teacher_model={"a": checkpoint[0], "b": other, "c": tiny.llama(64, seed=2)},
                teacher_prompt_template="{privileged_context} {prompt}",
                train_dataset=rows,
                divergence="forward_kl",
                **given,
            )
            losses.append(tiny.logged(made, "loss"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
