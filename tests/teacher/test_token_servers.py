"""A teacher on a server that generates: what it tells is that of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from divergences import EntropyAwareKL
from served_lab import CPU, proposed
from support import tiny
from support.failing_server import Pretended, Scoring, pretended
from support.scores import known_teacher
from torch import Tensor

from trl_opsd import OPSDTrainer
from trl_opsd.errors import ServerError
from trl_opsd.losses import DIVERGENCES
from trl_opsd.teacher import servers
from trl_opsd.teacher.answers import kl
from trl_opsd.teacher.served import ServedTeacher, answers_of, chosen_targets
from trl_opsd.teacher.servers import TeacherServer
from trl_opsd.types import Rollout
from trl_opsd.types.known import KnownTokens

V, K = tiny.VOCABULARY, 8


def scoring(model: Any, fault: Any = None, **given: Any) -> Any:
    return pretended(model, fault, kind=Scoring, **{"words": tiny.tokenizer(), **given})


def known(checkpoint: Any, server: Any, targets: str = "both_top_k", top_k: int | None = K) -> Any:
    asked = TeacherServer(server.url, 20.0, 0.0)
    asked.look(tiny.tokenizer())
    return ServedTeacher(checkpoint[0], asked, answers_of(asked, targets, checkpoint[0], {}, CPU, V, top_k))


def check_known(teacher: ServedTeacher, model: Any, rollout: Rollout, targets: str = "both_top_k") -> None:
    """Each row's tokens, log-probabilities and rest are those of the model that reads the row alone."""
    found = teacher.targets(rollout).rows
    lists = zip(rollout.prompt_lists(), rollout.completion_lists(), strict=True)
    for number, (prompt, completion) in enumerate(lists):
        places = rollout.counts[number].nonzero().flatten().tolist()
        assert found[number].places.tolist() == places
        with torch.no_grad():
            logs_LV = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0].log_softmax(-1)
        told = KnownTokens.unpack(found[number].hidden)
        for row, place in enumerate(places):
            own, log_V = completion[place], logs_LV[len(prompt) + place - 1]
            ids = {
                *(rollout.candidates[number, place].tolist() if targets != "teacher_top_k" else [own]),
                *(log_V.topk(K).indices.tolist() if targets != "student_top_k" else [own]),
            }
            assert {*told.ids[row].tolist()} == ids
            assert int(told.ids[row, 0]) == own
            torch.testing.assert_close(told.logprobs[row], log_V[told.ids[row]], rtol=1e-6, atol=1e-6)
            rest = (1 - log_V[[*ids]].double().exp().sum()).log()
            assert float(told.rest[row]) == pytest.approx(float(rest), abs=1e-5)


APIS = {
    "vLLM": ({}, {"student_top_k", "teacher_top_k"}),
    "vLLM without the route": ({"scores_tokens": False}, {"teacher_top_k"}),
    "SGLang": ({"api": "sglang"}, {"teacher_top_k"}),
}


@pytest.mark.parametrize("name", APIS)
def test_each_server_tells_what_its_model_computes(checkpoint, name):
    given, offers = APIS[name]
    with scoring(checkpoint[1], **given) as server:
        for targets in ("student_top_k", "teacher_top_k", "both_top_k"):
            if {*offers} >= {"student_top_k", "teacher_top_k"} & {targets} and (
                targets != "both_top_k" or len(offers) == 2
            ):
                teacher = known(checkpoint, server, targets=targets)
                check_known(teacher, checkpoint[1], proposed(), targets)
                assert name.split(" w")[0] in str(teacher)
                assert teacher.noise < 1e-9
                assert teacher.context == (99 if name == "SGLang" else 191)
            else:
                with pytest.raises(ValueError, match=r"`teacher_server_targets='(student|both)_top_k'`: the teacher's"):
                    known(checkpoint, server, targets=targets)


def test_what_is_asked_for_follows_from_the_divergence():
    offers = frozenset({"student_top_k", "teacher_top_k"})
    found = {name: chosen_targets(offers, made()) for name, made in DIVERGENCES.items()}
    of_student = {"sampled_reverse_kl"}
    of_teacher = {"forward_kl", "skewed_forward_kl"}
    for name, targets in found.items():
        expected = "student_top_k" if name in of_student else "teacher_top_k" if name in of_teacher else "both_top_k"
        assert targets == expected
    assert chosen_targets(frozenset({"states"}), DIVERGENCES["jsd"]()) == "states"
    assert chosen_targets(frozenset({"teacher_top_k"}), DIVERGENCES["reverse_kl"]()) == "teacher_top_k"


def test_a_pooling_server_offers_states_alone(checkpoint):
    said = r"offers \['states'\] only: set one of these, or start vLLM 0.32 or newer with `vllm serve TEACHER --enable"
    with pretended(checkpoint[1]) as server, pytest.raises(ValueError, match=said):
        known(checkpoint, server)


def test_a_server_of_another_api_or_tokenizer_is_refused(checkpoint):
    words = tiny.tokenizer()
    words.decode = lambda ids: "something else"
    for given, said in (
        ({"api": "other"}, "expected a vLLM or SGLang server"),
        ({"words": words}, "another tokenizer"),
    ):
        with scoring(checkpoint[1], **given) as server, pytest.raises(ValueError, match=said):
            known(checkpoint, server)


def test_equal_rows_are_asked_once_and_own_tokens_ahead(checkpoint):
    with scoring(checkpoint[1]) as server:
        teacher, rollout = known(checkpoint, server, targets="teacher_top_k"), proposed()
        server.asked.clear()
        teacher.expect(rollout)
        check_known(teacher, checkpoint[1], rollout, "teacher_top_k")
        assert len(server.asked) == 4 + 1, "and one of the first rows again; 0 and 1 are one row, 2 counts nowhere"
        teacher = known(checkpoint, server, targets="student_top_k")
        server.asked.clear()
        teacher.expect(rollout)
        assert not server.asked, "the student has not read them yet"


def test_more_tokens_than_a_server_tells_are_refused(checkpoint):
    with scoring(checkpoint[1], most=20) as server:
        assert known(checkpoint, server, top_k=None).student_k == 20
        with pytest.raises(
            ValueError, match="tells 20 tokens per position at most: set 20, or start it with `--max-lo"
        ):
            known(checkpoint, server, top_k=21)


@pytest.mark.long
def test_noise_is_that_of_two_answers(checkpoint):
    near = tiny.qwen2(64, seed=1)
    near.load_state_dict(checkpoint[1].state_dict())
    near.bfloat16()

    def rounded(server: Scoring, logs_LV: Tensor) -> Tensor:
        return server.computed(server.row.ids, near).float() if server.row.ids[-2:-1] == [1] else logs_LV

    with scoring(checkpoint[1], rounded) as server:
        teacher = known(checkpoint, server)
    ids = [place * (V - 1) // 7 for place in range(6)]
    with torch.no_grad():
        p_LV, q_LV = (
            m(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1) for m in (checkpoint[1], near)
        )
    whole = float((p_LV.exp() * (p_LV - q_LV)).sum(1).median())
    assert 0.1 * whole < teacher.noise <= 1.1 * whole, "of buckets it is at most that"
    assert kl([{0: -0.1}], [{0: -0.1}]) == 0.0


def test_an_id_beyond_the_vocabulary_is_not_sent(checkpoint):
    with scoring(checkpoint[1]) as server:
        teacher, rollout = known(checkpoint, server), proposed()
        rollout.completion_ids[5, 0] = V
        server.asked.clear()
        with pytest.raises(ValueError, match=f"token id {V}, but the teacher's vocabulary has {V}"):
            teacher.targets(rollout)
        assert not server.asked


def test_training_with_all_tokens_told_is_as_with_the_teacher(checkpoint, tmp_path):
    losses = []
    with scoring(checkpoint[1], most=400) as server:
        for number, given in enumerate(({}, {"teacher_server_url": server.url, "teacher_server_top_k": V})):
            args = tiny.config(tmp_path / str(number), max_steps=2, divergence="jsd", beta=0.3, **given)
            trainer = OPSDTrainer(
                model=tiny.qwen2(32),
                teacher_model=checkpoint[0],
                args=args,
                train_dataset=tiny.rows(),
                processing_class=tiny.tokenizer(),
            )
            trainer.train()
            losses.append(tiny.logged(trainer, "loss"))
    assert "the student's 259 likeliest tokens and its own 259" in str(trainer.teacher)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("kind", [Scoring, pytest.param(Pretended, marks=pytest.mark.long)])
def test_a_fine_tune_of_the_checkpoint_is_refused(checkpoint, tmp_path, kind):
    tuned = tiny.qwen2(64, seed=1)
    tuned.load_state_dict(checkpoint[1].state_dict())
    with torch.no_grad():
        tuned.model.layers[0].mlp.up_proj.weight.mul_(-1)  # with the same norms and head
    for model, said in ((checkpoint[1], None), (tuned, "from the checkpoint .*: it serves another model")):
        with pretended(model, kind=kind) as server:
            args = tiny.config(tmp_path / str(said is None), teacher_server_url=server.url, max_steps=1)
            given = {"train_dataset": tiny.rows(), "processing_class": tiny.tokenizer(), "args": args}
            if said is not None:
                with pytest.raises(ServerError, match=said):
                    OPSDTrainer(model=tiny.qwen2(32), teacher_model=checkpoint[0], **given)
                continue
            trainer = OPSDTrainer(model=tiny.qwen2(32), teacher_model=checkpoint[0], **given)
            trainer.train()
            assert 0 <= trainer.teacher.noise < 1e-6


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kl_clip": 0.1}, "`kl_clip=0.1`"),
        ({"top_k_teacher": 2}, "`top_k_teacher=2`"),
        ({"divergence": EntropyAwareKL()}, "`divergence=EntropyAwareKL.threshold=0.8.`"),
        ({"extrapolation": 0.0, "contrast_weight": 0.5}, "`methods='(Contrast|Extrapolation)'`"),
        ({"extrapolation": 0.0}, "`methods='Extrapolation'`"),
        ({"temperature": 0.5}, "`teacher_temperature=0.5`"),
        ({"certificate": True}, "`methods='Certificate'`"),
    ],
)
def test_what_needs_a_whole_distribution_is_refused_before_training(tmp_path, given, named):
    teacher = known_teacher(tiny.qwen2(48, seed=1), "both_top_k", 4)
    rows = tiny.rows().add_column("contrast_context", ["wrong"] * 8) if "contrast_weight" in given else tiny.rows()
    options = {"train_dataset": rows, "processing_class": tiny.tokenizer(), "args": tiny.config(tmp_path, **given)}
    with pytest.raises(ValueError, match=f"{named} needs the whole distribution .* of 'teacher'"):
        OPSDTrainer(model=tiny.qwen2(32), teacher_model=teacher, **options)


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
                return 503, b"", {"Retry-After": "0"}
            return posted(self, path, request)

        monkeypatch.setattr(Scoring, "posted", busy)
        asked = TeacherServer(server.url, 20.0, 5.0)
        asked.look()
        assert asked.limits.keys() == {"student_top_k", "teacher_top_k"}
        assert sorted(refused) == ["/inference/v1/generate", "/v1/completions"]
