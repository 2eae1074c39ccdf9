"""Completions by both models have the distribution that is promised, token by token, and know it."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from types import MappingProxyType

import pytest
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from support import forks, tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from trl_opsd import HFRollout, OPSDTrainer
from trl_opsd.losses import LazyLogits, OutputHead, SampledReverseKL, dense_divergence
from trl_opsd.methods import Blend, OffPolicy, Speculative
from trl_opsd.types import Sampled
from trl_opsd.types.rollout import Author

STUDENT, TEACHER, DATASET = int(Author.STUDENT), int(Author.TEACHER), int(Author.DATASET)
TOKENS = {token: number for number, token in enumerate("_.abcdef")}
"""Padding, the end, and six others."""
END, MOST = TOKENS["."], 3


def words() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(TOKENS, unk_token="_"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="_", eos_token=".")


def sized(width: int) -> dict[str, int]:
    return {**tiny.sizes(width), "vocab_size": len(TOKENS), "eos_token_id": END}


def student():
    return tiny.model(Qwen2Config(**sized(16)), seed=3)


def teacher(seed: int = 4):
    return tiny.model(LlamaConfig(**sized(24)), seed)


def given(number: int = 8, **columns: str) -> Dataset:
    """Prompts of one token or two."""
    texts = [("ab", "c", "fa", "e")[row % 4] for row in range(number)]
    return Dataset.from_dict({"prompt": texts, **{name: [text] * number for name, text in columns.items()}})


@pytest.fixture
def made(make_trainer):
    def made(methods, **options):
        methods = methods if isinstance(methods, list) else [methods]
        models = {"model": student(), "teacher_model": teacher(), "processing_class": words(), "rollout": HFRollout()}
        options = {"train_dataset": given(), "max_completion_length": MOST, **options}
        return make_trainer(**{**models, "methods": methods, **options})

    return made


# ---- What is promised, in float64 ------------------------------------------------------------------------------------


class Promised:
    """By each beginning of a completion: the probability of each token by each author."""

    def __init__(self, method, student, teacher, prompt, teacher_prompt=None):
        self.method, self.models = method, [deepcopy(one).double().eval() for one in (student, teacher)]
        self.prompts, self.known = [prompt, teacher_prompt or prompt], {}

    @torch.no_grad()
    def after(self, ids):
        """[2, V]: what the student writes next, and the teacher."""
        if tuple(ids) not in self.known:
            contexts = (torch.tensor([[*prompt, *ids]]) for prompt in self.prompts)
            own, its = (
                one(context).logits[0, -1].softmax(-1) for one, context in zip(self.models, contexts, strict=True)
            )
            if isinstance(self.method, Blend):
                both = torch.stack([(1 - self.method.teacher) * own, self.method.teacher * its])
            else:
                among = torch.zeros_like(own).index_fill(0, its.argsort(descending=True)[: self.method.top_k], 1.0)
                both = torch.stack([own * among, (own * (1 - among)).sum() * its])
            self.known[tuple(ids)] = both, own, its
        return self.known[tuple(ids)]

    def all(self, beginning, ids=(), authors=(), probability=1.0):
        """All completions, with the author of each token and their probability."""
        if len(ids) == MOST or END in ids:
            yield (ids, authors), probability
            return
        both, _, _ = self.after([*beginning, *ids])
        for author, row in zip((STUDENT, TEACHER), both.tolist(), strict=True):
            for token, one in enumerate(row):
                yield from self.all(beginning, (*ids, token), (*authors, author), probability * one)

    def logprobs(self, beginning, ids):
        mixed = [self.after([*beginning, *ids[:place]])[0].sum(0)[token] for place, token in enumerate(ids)]
        return torch.stack(mixed).log().tolist()


def drawn(trainer, columns=MappingProxyType({}), number=8, seed=0):
    """Rows of one prompt that were written in a training."""
    trainer.model.train()
    rows = trainer.teaching.read_rows([{"prompt": "ab", **columns}] * number)
    contexts = trainer.prompt_ids_of(rows)
    trainer._generation.mark(rows)
    torch.manual_seed(seed)
    return rows, trainer.methods.complete(rows, contexts, trainer.complete)


def is_likely(expected, found, number):
    """By a chi-square test, in which outcomes that come fewer than five times count as one."""
    few = {one for one, probability in expected.items() if probability * number < 5}
    pairs = [(expected[one] * number, found[one]) for one in expected.keys() - few]
    pairs.append((sum(expected[one] for one in few) * number, sum(found[one] for one in few)))
    assert sum(count for _, count in pairs) == number, "what is impossible did not come"
    distance = sum((count - mean) ** 2 / mean for mean, count in pairs if mean > 0)
    freedom, value = torch.tensor([len(pairs) - 1, distance], dtype=torch.float64) / 2
    return torch.special.gammaincc(freedom, value) > 1e-3 if len(pairs) > 1 else True


WAYS = {
    "blend": (Blend(0.3), {}),
    "blocks of two": (Blend(0.6, block=2), {"teacher_prompt": "dcb"}),
    "the teacher": (Blend(1.0), {"teacher_prompt": "d", "completion_prefix": "fe"}),
    "speculative": (Speculative(top_k=3), {"teacher_prompt": "dcb", "completion_prefix": "f"}),
    "blocks of one": (Speculative(top_k=1, block=1), {}),
    "the student": (Speculative(top_k=99, block=2), {}),
}


@pytest.mark.parametrize("draws", [3000, pytest.param(20_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_and_authors_have_the_promised_distribution(made, way, draws):
    method, columns = WAYS[way]
    trainer = made(method, train_dataset=given(1000, **columns), per_device_train_batch_size=1000)
    rows, completions = drawn(trainer, columns, draws)
    prompt = words()("ab")["input_ids"]
    its, begun = (words()(columns.get(name, ""))["input_ids"] for name in ("teacher_prompt", "completion_prefix"))
    promised = Promised(method, trainer.model, trainer.teacher_model, prompt, its)
    expected = dict(promised.all(begun))
    found = Counter((tuple(ids), tuple(row.authors)) for row, ids in zip(rows, completions, strict=True))
    assert is_likely(expected, found, draws)
    authors = {author for _, authors in found for author in authors}
    assert authors == {"the teacher": {TEACHER}, "the student": {STUDENT}}.get(way, {STUDENT, TEACHER})
    for row, ids in zip(rows[:300], completions, strict=False):
        assert row.logprobs == pytest.approx(promised.logprobs(begun, ids), abs=1e-4)


def test_importance_weights_make_the_gradient_that_of_the_student(made):
    """The mean over what is drawn, of a first token, with the log-probabilities that rows know."""
    for method in (Blend(0.4), Speculative(top_k=2)):
        trainer = made(method, divergence="sampled_reverse_kl")
        promised = Promised(method, trainer.model, trainer.teacher_model, words()("ab")["input_ids"])
        rows, completions = drawn(trainer, number=600)
        known = {ids[0]: row.logprobs[0] for row, ids in zip(rows, completions, strict=True)}
        _, own, its = promised.after([])
        ids, told = torch.tensor([*known]), torch.tensor([*known.values()])
        assert own[ids].sum() > 0.999, "hardly a token is missing"
        logits = own.log().expand(len(ids), -1).clone().requires_grad_()
        sides = (
            LazyLogits(one, OutputHead(torch.eye(len(own)).double())) for one in (logits, its.log().expand_as(logits))
        )
        sampled = Sampled(ids, logprobs=told)
        value = dense_divergence(*sides, SampledReverseKL(clip_max=None), sampled=sampled).divergence
        (value * told.double().exp()).sum().backward()
        expected = own * ((own / its).log() - (own * (own / its).log()).sum())  # of the reverse KL
        assert logits.grad.sum(0).tolist() == pytest.approx(expected.tolist(), abs=5e-3)


# ---- In a training ---------------------------------------------------------------------------------------------------


class Reading(OPSDTrainer):
    """Counts the tokens of each row that the teacher is asked for, and how often; keeps the last batch."""

    def teach(self, rollout, rows):
        for row, weights in zip(rows, rollout.weights, strict=True):
            self.__dict__.setdefault("asked", []).append((row.place, int(weights.sum())))
        return super().teach(rollout, rows)

    def score(self, rows):
        self.batch = super().score(rows)
        return self.batch


def test_a_teacher_reads_each_block_once(made):
    for method in (Blend(0.4), Blend(0.1, block=2), Speculative(top_k=99, block=2), Speculative(top_k=1)):
        trainer = made(method, cls=Reading, max_completion_length=9)
        rows, completions = drawn(trainer)
        lengths = {row.place: len(ids) for row, ids in zip(rows, completions, strict=True)}
        tokens, reads = Counter(), Counter(place for place, _ in trainer.asked)
        for place, number in trainer.asked:
            tokens[place] += number
        if method != Speculative(top_k=1):  # whose tokens are dropped after one of the teacher
            assert tokens == lengths
        for row in rows:
            assert -(-lengths[row.place] // method.block) <= reads[row.place]
            assert reads[row.place] <= -(-lengths[row.place] // method.block) + row.authors.count(TEACHER)
        (logged,) = trainer._metrics["train"]["together/reads"]
        assert logged == reads.total() / len(rows)
        (share,) = trainer._metrics["train"]["together/teacher"]
        assert share == sum(row.authors.count(TEACHER) for row in rows) / sum(lengths.values())


def test_authors_and_logprobs_reach_the_loss_with_their_weights(made):
    trainer = made(
        [Blend(0.5), OffPolicy(weights={"teacher": 0.25, "dataset": 0.0})],
        cls=Reading,
        divergence="sampled_reverse_kl",
        teacher_model={"x": teacher(5), "y": teacher(6)},
        train_dataset=given(completion_prefix="fe").add_column("teacher", ["x", "y"] * 4),
        max_steps=1,
        per_device_train_batch_size=8,
    )
    before = deepcopy(trainer.model)
    trainer.train()
    rollout = trainer.batch.rollout
    for number, row in enumerate(trainer.batch.rows):
        ids, authors = rollout.completion_lists()[number], rollout.authors[number].tolist()
        assert authors[: len(ids)] == [DATASET] * 2 + row.authors
        weigh = {DATASET: 0.0, STUDENT: 1.0, TEACHER: 0.25}
        assert rollout.weights[number, : len(ids)].tolist() == [weigh[one] for one in authors[: len(ids)]]
        promised = Promised(Blend(0.5), before, trainer.teachers[row["teacher"]].model, rollout.prompt_lists()[number])
        told = rollout.logprobs[number, 2 : len(ids)].tolist()
        assert told == pytest.approx(promised.logprobs(ids[:2], ids[2:]), abs=1e-4)
    (log,) = (row for row in trainer.state.log_history if "importance/mean" in row)
    assert log["importance/mean"] != 1
    assert {log["tokens/teacher"], log["tokens/student"]} == {
        float((rollout.authors * (rollout.completion_mask != 0) == one).sum()) for one in (TEACHER, STUDENT)
    }


def test_the_student_writes_alone_after_until_step_and_in_evaluations(made):
    trainer = made(Blend(1.0, until_step=2), cls=Reading, max_steps=4, eval_dataset=given())
    assert not [name for name in trainer.evaluate() if "together" in name or "tokens/" in name]
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert [tiny.share_of_others(row) for row in logs] == [1, 1, 0, 0]
    assert [row.get("together/teacher") for row in logs] == [1, 1, None, None]
    assert trainer.batch.rollout.logprobs is None


def test_draws_of_the_teacher_follow_from_the_step_and_the_place(made):
    trainer = made(Blend(1.0), max_completion_length=9)
    (_, first), (_, again) = drawn(trainer), drawn(trainer, seed=1)
    assert first == again
    assert len({*map(tuple, first)}) > 4
    trainer.state.global_step = 1
    assert drawn(trainer)[1] != first


@pytest.mark.parametrize("method", [Blend(0.5), Speculative(top_k=2)], ids=str)
def test_a_resumed_run_is_the_same_bit_for_bit(made, tmp_path, method):
    options = {"max_completion_length": 9, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2}
    whole, resumed = (made(method, cls=Reading, output_dir=str(tmp_path / name), **options) for name in "ab")
    whole.train()
    torch.manual_seed(99)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert torch.equal(tiny.weights(whole), tiny.weights(resumed))
    assert tiny.logged(whole, "together/teacher") == tiny.logged(resumed, "together/teacher")


# ---- Several processes -----------------------------------------------------------------------------------------------


def written(folder, processes):
    """The place, tokens and authors of each row: where the teacher writes all, and where the dataset has written some,
    so that a process may have none to write.
    """
    found = []
    for method, lmbda in ((Blend(1.0), 1.0), (Speculative(top_k=1), 0.5)):
        sizes = {"max_steps": 6, "max_completion_length": 9, "per_device_train_batch_size": 4 // processes}
        args = tiny.config(folder, **sizes, lmbda=lmbda)
        rows = given(completion="a")
        trainer = Reading(student(), teacher(), args, rows, processing_class=words(), methods=[method])
        trainer.train()
        told = zip(trainer.batch.rows, trainer.batch.rollout.completion_lists(), strict=True)
        everyone = gather_object([[(row.place, ids, row.authors) for row, ids in told]])
        found.append(sorted((one for each in everyone for one in each), key=lambda one: one[0]))
    return found


@pytest.mark.distributed
@pytest.mark.timeout(forks.SECONDS + 60)
def test_rows_are_drawn_by_their_place_in_one_process_and_in_two(tmp_path):
    (alone,) = forks.results("alone", written, tmp_path, 1).values()
    in_two = forks.results("ddp", written, tmp_path, 2)[0]
    assert alone[0] == in_two[0]
    assert len({tuple(ids) for _, ids, _ in alone[0]}) > 1
    assert [place for place, *_ in in_two[1]] == [0, 1, 2, 3]
