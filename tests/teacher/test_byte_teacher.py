"""Teachers with a tokenizer of their own, through the trainer: losses, rows, options, and completions of all kinds."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from accelerate import PartialState
from controls import Shuffled
from peft import LoraConfig
from small_methods import AlongCompletion, Discounted
from support import tiny
from support.byte_languages import byte_pairs, outcomes
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedTokenizerFast

from trl_opsd import FixedRollout, Method, OPSDTrainer
from trl_opsd.bytes import teacher as bytewise
from trl_opsd.bytes.forks import Forking
from trl_opsd.bytes.ranges import _FLOOR, dense_byte_logarithms
from trl_opsd.bytes.table import ByteTargets, CoveringTree, Spelled
from trl_opsd.bytes.teacher import ByteTeacher
from trl_opsd.bytes.vocabulary import ByteVocabulary
from trl_opsd.teacher import FrozenTeacher, Teacher
from trl_opsd.teacher.frozen import Resident
from trl_opsd.types import OutputHead, Rollout, TeacherTargets

MINE, YOURS = byte_pairs(120, start=5000), byte_pairs(200)
PROMPTS = ["Once", "def f(x):", "  Ünï ", "2+2="]
END = "<|im_end|>"
ANSWERS = [
    " upon a time, the trainer of trainers\r\n trained.<|im_end|>",
    "\n    return the_same(options)",
    "\N{GRINNING FACE}\N{WAVING HAND SIGN} ok<|im_end|>",
    "4, and nothing else that the teacher says<|im_end|>",
]


def of_answers(words, prompts=PROMPTS, answers=ANSWERS):
    ids = (words(one)["input_ids"] for one in (prompts, answers))
    return FixedRollout(dict(zip(map(tuple, next(ids)), next(ids), strict=True)))


def models():
    return tiny.qwen2(32, vocab_size=len(MINE) + 3), tiny.qwen2(48, 1, vocab_size=len(YOURS) + 5)


@pytest.fixture
def make(make_trainer):
    def made(**given):
        student, teacher = models()
        rows = tiny.Dataset.from_dict({"prompt": PROMPTS * given.pop("many", 1), **given.pop("columns", {})})
        defaults = {
            "model": student,
            "teacher_model": teacher,
            "processing_class": MINE,
            "teacher_processing_class": YOURS,
            "rollout": of_answers(MINE),
            "train_dataset": rows,
            "cross_tokenizer": "bytes",
            "per_device_train_batch_size": 4,
        }
        return make_trainer(**{**defaults, **given})

    return made


def logits(model, prompt, ids):
    with torch.no_grad():
        found = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 :]
    return found.double()


def alone(answer, prompt, model, words, temperature):
    """What a model says of each next byte, summed over the tokens of each beginning of the text, each read alone."""
    vocabulary = ByteVocabulary.of(words, "it")
    ids, before = words(answer)["input_ids"], words(prompt)["input_ids"]
    text = answer.removesuffix(END)
    some = {tuple(vocabulary.ids_of(text[:size])) for size in range(len(text))} | {
        tuple(ids[:count]) for count in range(len(ids))
    }
    state = {
        path: number for number, path in enumerate(sorted({one[:at] for one in some for at in range(len(one) + 1)}))
    }
    nodes = [
        (len(b"".join(vocabulary.spelled(path))), [(state[path[:at]], path[at]) for at in range(len(path))])
        for path in state
    ]
    rows = torch.stack([logits(model, before, path)[-1] for path in state]) / temperature
    return dense_byte_logarithms(rows, vocabulary.texts, outcomes(vocabulary, ids), nodes, _FLOOR).log_softmax(-1)


def expected(answer, prompt, student, teacher, temperature=1.0, kept=slice(None)):
    """The reverse KL of one row, summed over the bytes of the kept tokens, each model alone, with loops over all."""
    mine, yours = (
        alone(answer, prompt, model, words, temperature) for model, words in ((student, MINE), (teacher, YOURS))
    )
    sizes = [len(one or b"-") for one in ByteVocabulary.of(MINE, "it").spelled(MINE(answer)["input_ids"])]
    is_kept = torch.zeros(len(sizes))
    is_kept[kept] = 1
    held = is_kept.repeat_interleave(torch.tensor(sizes)).bool()
    return float(((mine.exp() * (mine - yours)).sum(-1) * held).sum()), int(held.sum())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_is_that_of_rows_and_models_read_alone(make, temperature):
    trainer = make(
        divergence="reverse_kl",
        max_steps=1,
        temperature=temperature,
        max_completion_length=60,
        cross_tokenizer_missed=1e-6,
    )
    each = [
        expected(answer, prompt, trainer.model, trainer.teacher.teacher.model, temperature)
        for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)
    ]
    tokens = sum(map(len, MINE(ANSWERS)["input_ids"]))
    trainer.train()
    (loss,) = tiny.logged(trainer, "loss")
    assert loss == pytest.approx(sum(one for one, _ in each) / tokens, rel=2e-5)
    assert tiny.logged(trainer, "cross/used") == [1.0]
    assert tiny.logged(trainer, "cross/lost") == [0.0]


def trained(trainer):
    trainer.train()
    return tiny.weights(trainer), tiny.logged(trainer, "loss")


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
        {"max_tokens_per_microbatch": 30},
        {"loss_chunk_tokens": 1},
        {"loss_chunk_tokens": 5},
        {"padding_free": True},
        {"teacher_offload": "stream"},
        {"overlap": "step"},
        {"report": True},
    ],
    ids=str,
)
def test_weights_do_not_depend_on_how_rows_are_read(make, options):
    given = {"max_completion_length": 60, "learning_rate": 0.03, "optim": "sgd"}  # Adam makes much of a small rounding
    weights, losses = trained(make(**given))
    other, others = trained(make(**{**given, **options}))
    assert (weights - other).abs().max() < 1e-6
    assert others == pytest.approx(losses, rel=1e-4)
    assert (weights - tiny.weights(make())).abs().max() > 1e-3


def test_equal_tokenizer_gives_token_divergence_within_two_percent(make_trainer):
    losses = {}
    for mode in (None, "bytes"):
        trainer = make_trainer(cross_tokenizer=mode, teacher_processing_class=tiny.tokenizer(), max_steps=1)
        trainer.train()
        losses[mode] = tiny.logged(trainer, "loss")[0]
    assert losses["bytes"] == pytest.approx(losses[None], rel=0.02)
    assert losses["bytes"] < losses[None], "special tokens are one outcome"


class EveryThird(OPSDTrainer):
    """Trains on every third token."""

    def weigh(self, rollout, rows, targets):
        return super().weigh(rollout, rows, targets) * (torch.arange(rollout.weights.size(1)) % 3 == 2)


class SkipFirst(Method):
    skips = True

    def before(self, rows):
        for row in rows:
            row.prompt_weight = float(row["prompt"] != PROMPTS[0])


WITH_ZEROS = {
    "all": {},
    "random": {"token_selection": "random", "token_fraction": 0.5},
    "prefix": {"token_selection": "prefix", "token_fraction": 0.5},
    "places": {"methods": [AlongCompletion((0, 1))]},
    "weigh": {"cls": EveryThird},
    "skipped": {"methods": [SkipFirst()]},
    "gated": {"reward_funcs": lambda completions, **_: [float(len(one) < 20) for one in completions], "reward_gate": 1},
}
"""Options with which tokens or rows have no weight."""


@pytest.mark.parametrize("options", WITH_ZEROS.values(), ids=WITH_ZEROS)
@pytest.mark.parametrize("chunk", [None, 2])
def test_a_model_does_not_differ_from_itself(make, options, chunk):
    trainer = make(
        teacher_model=tiny.qwen2(32, vocab_size=len(MINE) + 3),
        teacher_processing_class=MINE,
        max_completion_length=60,
        loss_chunk_tokens=chunk,
        max_steps=1,
        **options,
    )
    trainer.train()
    assert tiny.logged(trainer, "loss")[0] < 1e-6
    assert tiny.logged(trainer, "cross/used")[0] > 0.5
    assert tiny.logged(trainer, "cross/lost") == [0.0]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"cls": EveryThird}, slice(2, None, 3)),
        ({"token_selection": "prefix", "token_fraction": 0.25}, None),
    ],
    ids=["weigh", "prefix"],
)
def test_tokens_without_weight_are_read_for_those_with(make, options, kept):
    """The text of a prefix ends within a token of the teacher."""
    given = {"divergence": "reverse_kl", "max_steps": 1, "max_completion_length": 60, "cross_tokenizer_missed": 1e-6}
    trainer = make(**given, **options)
    lengths = list(map(len, MINE(ANSWERS)["input_ids"]))
    keeps = [slice(math.ceil(0.25 * one)) if kept is None else kept for one in lengths]
    each = [
        expected(answer, prompt, trainer.model, trainer.teacher.teacher.model, kept=keep)
        for prompt, answer, keep in zip(PROMPTS, ANSWERS, keeps, strict=True)
    ]
    trainer.train()
    tokens = sum(len(range(length)[keep]) for length, keep in zip(lengths, keeps, strict=True))
    assert tiny.logged(trainer, "loss") == pytest.approx([sum(one for one, _ in each) / tokens], rel=2e-5)


def test_two_teachers_with_other_tokenizers_each_read_their_own_rows(make):
    columns = {"teacher": ["a", "b", "a", "b"]}
    teachers = {"a": tiny.qwen2(48, 1, vocab_size=len(YOURS) + 5), "b": tiny.qwen2(40, 2)}
    tokenizers = {"a": YOURS, "b": tiny.tokenizer()}
    trainer = make(
        columns=columns, teacher_model=teachers, teacher_processing_class=tokenizers, max_completion_length=60
    )
    trainer.train()
    by_name = [tiny.logged(trainer, f"divergence/teacher/{name}")[0] for name in "ab"]
    alone = []
    for name in "ab":
        other = make(
            teacher_model=tiny.qwen2(48, 1, vocab_size=len(YOURS) + 5) if name == "a" else tiny.qwen2(40, 2),
            teacher_processing_class=tokenizers[name],
            train_dataset=tiny.Dataset.from_dict({"prompt": PROMPTS["ab".index(name) :: 2]}),
            per_device_train_batch_size=2,
            max_completion_length=60,
        )
        other.train()
        alone.append(tiny.logged(other, "loss")[0])
    assert by_name == pytest.approx(alone, rel=1e-4)


def test_a_shuffled_teacher_reads_another_prompt_in_its_own_tokens(make):
    read, theirs = {}, tiny.tokenizer()

    class Reading(OPSDTrainer):
        def teach(self, rollout, rows):
            prompts, names = self.teaching._for_teachers(rollout, rows)
            for row, name, ids in zip(rows, names, prompts.prompt_lists(), strict=True):
                read[row["prompt"]] = {"a": YOURS, "b": theirs}[name].decode(ids)
            return super().teach(rollout, rows)

    make(
        cls=Reading,
        columns={"teacher": ["a", "b", "a", "b"]},
        teacher_model={"a": models()[1], "b": tiny.qwen2(40, 2)},
        teacher_processing_class={"a": YOURS, "b": theirs},
        methods=[Shuffled()],
        shuffle_dataset=False,
        max_completion_length=60,
        max_steps=1,
    ).train()
    assert read == dict(zip(PROMPTS, [*PROMPTS[1:], PROMPTS[0]], strict=True))


def test_options_that_change_rows_work_together(make):
    def short(completions, **_):
        return [-float(len(one)) for one in completions]

    trainer = make(
        columns={"privileged_context": [f"hint {number}, \N{SNOWMAN}" for number in range(4)]},
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
        teacher_prompt_template="{privileged_context} {prompt}",
        reward_funcs=short,
        reward_weight=0.1,
        eval_dataset=tiny.Dataset.from_dict({"prompt": PROMPTS, "privileged_context": ["x"] * 4}),
        eval_strategy="steps",
        eval_steps=1,
        divergence="jsd",
        methods=[Discounted(0.9)],
        token_selection="random",
        token_fraction=0.7,
        num_generations=2,
        max_completion_length=60,
    )
    trainer.train()
    assert len(tiny.logged(trainer, "eval_loss")) == 3
    assert all(0 < one < 2 for one in tiny.logged(trainer, "eval_cross/divergence"))
    rows = trainer.teaching.read_rows([trainer.train_dataset[0]])
    read = trainer.teaching.prompts.read(Rollout.of([[1]], [[2]], torch.device("cpu")), rows).prompt_lists()[0]
    assert "hint" in trainer.teaching.readers.tokenizers["teacher"].decode(read)


def test_resumed_run_has_the_weights_of_an_uninterrupted_one(make, tmp_path):
    given = {"output_dir": str(tmp_path / "run"), "max_steps": 4, "max_completion_length": 60, "many": 3}
    whole = make(**given, save_strategy="steps", save_steps=2)
    whole.train()
    resumed = make(**given)
    resumed.train(resume_from_checkpoint=str(Path(given["output_dir"]) / "checkpoint-2"))
    assert torch.equal(tiny.weights(whole), tiny.weights(resumed))
    other = make(**given, teacher_processing_class=byte_pairs(199))
    with pytest.raises(ValueError, match="teachers"):
        other.train(resume_from_checkpoint=str(Path(given["output_dir"]) / "checkpoint-2"))


def byte_teacher(mine, yours, teacher=None):
    args = {"loss_chunk_tokens": None, "teacher_cache_device": "auto", "cross_tokenizer_missed": 1e-3}
    host = SimpleNamespace(args=SimpleNamespace(**args), temperatures=(1.0, 1.0))
    teacher = teacher or FrozenTeacher(Resident(models()[1], torch.device("cpu")))
    return ByteTeacher(teacher, mine, yours, host, Forking("student", 1e-3))


@pytest.mark.parametrize(
    ("ids", "compared", "lost"),
    [
        ([], 0, 0),
        (MINE("the end")["input_ids"] + [MINE.eos_token_id], 8, 0),
        (MINE("cut of")["input_ids"], 6, 0),
        (MINE("two\r\nlines\r\n")["input_ids"], 12, 0),
        (MINE("\N{GRINNING FACE}!")["input_ids"], 5, 0),
        (MINE("ab\N{GRINNING FACE}")["input_ids"][:-1], 2, None),  # a character that is cut
        ([MINE.convert_tokens_to_ids("ÿ"), *MINE("ab")["input_ids"]], 0, None),  # no UTF-8
        ([MINE.eos_token_id, *MINE("after an end")["input_ids"]], 1, 12),
        (MINE("e\N{COMBINING ACUTE ACCENT} x")["input_ids"], 5, 0),
        (MINE("<think>so</think>")["input_ids"], 17, 0),
    ],
)
def test_completions_of_all_kinds(ids, compared, lost):
    mine, yours = ByteVocabulary.of(MINE, "mine"), ByteVocabulary.of(byte_pairs(200, special=("<|end|>",)), "yours")
    (reading,) = byte_teacher(mine, yours)._read([ids], [len(ids)], [None])
    assert len(reading.of_student.token) == compared
    spelled = mine.spelled(ids)
    text = b"".join(one or b"" for one in spelled)
    theirs = b"".join(one or b"" for one in yours.spelled(reading.ids))
    assert text[: len(theirs)] == theirs[: len(text)]
    total = int(mine.table.length[ids].sum()) if ids else 0
    assert lost is None or total - compared == lost
    assert sorted(reading.of_student.token.tolist()) == reading.of_student.token.tolist()


def test_a_context_that_is_full_loses_what_does_not_fit():
    mine, yours = (ByteVocabulary.of(one, "it") for one in (MINE, YOURS))
    ids = MINE("the teacher reads all of it, or only some")["input_ids"]
    teacher = byte_teacher(mine, yours)
    whole, some, none = teacher._read([ids] * 3, [len(ids)] * 3, [None, 5, -3])
    assert len(some.ids) == 5
    assert 0 < len(some.of_student.token) < len(whole.of_student.token)
    assert len(none.of_student.token) == 0


def test_ids_without_bytes_are_never_generated(make):
    trainer = make(rollout=None)
    with torch.no_grad():
        trainer.model.lm_head.weight[len(MINE) :] = 50 * trainer.model.lm_head.weight.abs().max()
    trainer.train()
    assert trainer.limits.vocabulary == len(MINE)
    assert all(one > 0 for one in tiny.logged(trainer, "cross/used"))


def test_a_prompt_that_is_skipped_has_no_bytes(make):
    trainer = make(
        methods=[SkipFirst()],
        max_completion_length=60,
    )
    trainer.train()
    alone = make(train_dataset=tiny.Dataset.from_dict({"prompt": PROMPTS[1:]}), per_device_train_batch_size=3,
                 max_completion_length=60)  # fmt: skip
    alone.train()
    assert tiny.logged(trainer, "loss")[0] == pytest.approx(tiny.logged(alone, "loss")[0], rel=1e-4)


def test_computing_in_bfloat16_rounds_products_only(make):
    losses = {}
    for bf16 in (False, True):
        trainer = make(bf16=bf16, max_steps=1, max_completion_length=60)
        trainer.train()
        losses[bf16] = tiny.logged(trainer, "loss")[0]
    assert 0 < abs(losses[True] - losses[False]) < 0.01 * losses[False]


def test_each_model_has_its_own_chat_template(make):
    theirs = byte_pairs(200)
    theirs.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[answer] "
    chats = [[{"role": "user", "content": one}] for one in PROMPTS]
    asked = dict(zip(PROMPTS, ANSWERS, strict=True))
    answers = {
        tuple(MINE.apply_chat_template(one, add_generation_prompt=True, return_dict=False)): MINE(
            asked[one[0]["content"]]
        )["input_ids"]
        for one in chats
    }
    seen = []

    class Noting(Teacher):
        """Notes what the teacher reads."""

        def __init__(self, teacher):
            self.teacher, self.head_, self.context_ = teacher, teacher.head, teacher.context

        head = property(lambda self: self.head_)
        context = property(lambda self: self.context_)

        def targets(self, rollout):
            seen.extend(theirs.decode(one) for one in rollout.prompt_lists())
            return self.teacher.targets(rollout)

    _, teacher = models()
    trainer = make(
        teacher_model=Noting(FrozenTeacher(Resident(teacher, torch.device("cpu")))),
        teacher_processing_class=theirs,
        train_dataset=tiny.Dataset.from_dict({"prompt": chats}),
        rollout=FixedRollout(answers),
        max_completion_length=60,
        max_steps=1,
    )
    trainer.train()
    assert set(PROMPTS) == {one.removeprefix("[user] ").removesuffix("\n[answer] ") for one in seen}
    assert 0 < tiny.logged(trainer, "loss")[0] < 50


def test_beginnings_before_tokens_that_do_not_count_are_read():
    """Tokens `the`, ` l`, `ic`, `e`: of the third byte's distribution the first one's state is a part."""
    reads = [[0, 0, 0], [1, 1, 0], [2, 1, 7], [2, 2, 0], [3, 2, 5], [3, 3, 0]]
    given = [[0, 1, 2, 3], [[2, 1, 9], [3, 2, 8]], reads, [[2, 0], [3, 1]]]
    tree = CoveringTree.of(*map(numpy.array, given))
    tree = replace(tree, read=torch.tensor([True, False]), column=50)
    row = ByteTargets(torch.zeros(4, 257), tree.token, torch.tensor([0.0, 0.1, 0.2, 0.3]), tree)
    whole, some = (
        Spelled.of([tree], [row.missed], [10], torch.tensor(places)) for places in ([10, 11, 12, 13], [10, 12])
    )
    assert whole.places.tolist() == [10, 11, 12, 60, 13]  # the state after the fork is in the order of bytes
    assert whole.token.tolist() == [0, 1, 2, 4]
    assert whole.branches.tolist() == [[3, 1, 9]]
    assert whole.leaves.tolist() == [[3, 2, 8, 1]]
    assert some.places.tolist() == [10, 11, 12]  # what is after the fork is read for the last byte alone
    assert some.token.tolist() == [0, 2]
    assert some.reads.tolist() == [[0, 0, 0], [1, 1, 7], [1, 2, 0]]
    assert some.kept.tolist() == [0, 2]
    assert some.missed.tolist() == pytest.approx([0.0, 0.2])
    assert whole.last.tolist() == [0, 1, 2, 4]
    # A token that the teacher does not read has no byte, but it counts, and is pulled towards.
    assert Spelled.of([tree], [row.missed], [10], torch.tensor([10, 17])).places.tolist() == [10, 17]
    given = [[0, 1, 1, 1], [[2, 1, 9]], [[0, 0, 0], [1, 1, 0], [2, 1, 7], [2, 2, 0], [3, 1, 8]], numpy.zeros((0, 2))]
    longer = replace(CoveringTree.of(*map(numpy.array, given)), read=torch.tensor([True]), column=50)
    assert Spelled.of([longer], [row.missed], [0], torch.arange(2)).last.tolist() == [0, 1, 2, 2]
    cut = row.cut(3)
    assert len(cut.hidden) == len(cut.missed) == len(cut.tree.token) == 3
    assert cut.tree.reads[:, 0].max() == 2
    assert cut.tree.fork.tolist() == [[2, 1, 9]]
    assert cut.tree.leaves.tolist() == [[2, 0]]
    assert row.cut(4) is row


@pytest.mark.parametrize("several", [False, True])
def test_completions_of_teachers_are_retold_in_the_students_tokens(make, several):
    """The text is the teacher's, up to its end; what has no room is counted."""
    written = []

    class Noting(OPSDTrainer):
        def teach(self, rollout, rows):
            written.extend(zip(rollout.completion_lists(), (row.request.teacher for row in rows), strict=True))
            return super().teach(rollout, rows)

    _, teacher = models()
    other, words = tiny.qwen2(40, 2, vocab_size=len(MINE)), {"a": YOURS, "b": MINE}
    given = {
        "columns": {"teacher": ["a", "b", "a", "b"]}, "teacher_model": {"a": teacher, "b": other},
        "teacher_processing_class": words,
    }  # fmt: skip
    trainer = make(
        cls=Noting, seq_kd=True, lmbda=0.0, sft_weight=1.0, max_completion_length=12, max_steps=2, rollout=None,
        **(given if several else {}),
    )  # fmt: skip
    told = list[tuple[str, str]]()
    for name, one in trainer._generation._teacher_rollouts.items():
        complete = one._rollout.complete

        def noting(prompts, step, complete=complete, words=words[name] if several else YOURS):
            found = complete(prompts, step)
            told.extend((words.decode(prompt), words.decode(ids)) for prompt, ids in zip(prompts, found, strict=True))
            return found

        one._rollout.complete = noting
    trainer.train()
    assert len(told) == len(written) == 8
    of_teachers, of_student = sorted(text for _, text in told), sorted(MINE.decode(ids) for ids, _ in written)
    assert sum(one == other for one, other in zip(of_teachers, of_student, strict=True)) < 8  # some have no room
    begun = [any(text.startswith(one.rstrip("\ufffd")) for text in of_teachers) for one in of_student]
    assert all(begun)
    assert all(len(ids) <= 12 for ids, _ in written)
    assert not any(ids == [MINE.eos_token_id] for ids, _ in written)  # nor is a text that cannot be told an end
    assert all(ids == MINE(MINE.decode(ids))["input_ids"] for ids, _ in written if "\ufffd" not in MINE.decode(ids))
    assert 0.2 < tiny.logged(trainer, "cross/retold")[0] < 1
    assert tiny.logged(trainer, "off_policy/share")[0] == 1


@pytest.mark.parametrize(
    ("ids", "text", "told"),
    [
        (YOURS("the end")["input_ids"], "the end", 7),
        (YOURS("ab\N{GRINNING FACE}")["input_ids"][:-1], "ab", 2),  # a character that is cut
        ([*YOURS("so")["input_ids"], YOURS.eos_token_id, *YOURS("on")["input_ids"]], "so<|im_end|>on", 5),
        ([], "", 0),
        ([len(YOURS) + 3], "", 0),  # no token
    ],
)
def test_text_is_retold_up_to_what_no_token_spells(ids, text, told):
    mine, yours = (ByteVocabulary.of(one, "it") for one in (MINE, YOURS))
    assert mine.retold(ids, yours) == (MINE(text)["input_ids"], told)


def test_only_text_that_is_told_whole_has_an_end(make):
    words = byte_pairs(199, special=("<|pad|>", "<|end|>"))
    words.eos_token = "<|end|>"  # an id that is text in the student's tokenizer
    trainer = make(seq_kd=True, lmbda=0.0, max_completion_length=12, rollout=None, teacher_processing_class=words)
    (writer,) = trainer._generation._teacher_rollouts.values()
    end = words.eos_token_id
    assert writer._host.generation_config.eos_token_id[0] == end != MINE.eos_token_id
    cut, told = words("ab\N{GRINNING FACE}")["input_ids"][:-1], partial(trainer.teacher.told, ends=[end])
    assert told([*words("ab")["input_ids"], end]) == [*MINE("ab")["input_ids"], MINE.eos_token_id]
    assert told(words("ab")["input_ids"]) == MINE("ab")["input_ids"]
    assert told([*cut, end]) == MINE("ab")["input_ids"]


def test_ids_without_a_row_are_not_told():
    words = byte_pairs(120, start=5000)
    words.add_tokens(["<think>"])
    mine, yours = ByteVocabulary.of(words, "it").within(len(MINE)), ByteVocabulary.of(YOURS, "it")
    assert mine.retold(YOURS("so <think> on")["input_ids"], yours) == (MINE("so ")["input_ids"], 3)
    assert mine.trees([MINE("< thin k>")["input_ids"]])[0].tokens == len(MINE("< thin k>")["input_ids"])


def test_a_tokenizer_that_composes_tells_text_up_to_there():
    words = byte_pairs(120, start=5000)
    words.backend_tokenizer.normalizer = normalizers.NFC()
    mine, yours = ByteVocabulary.of(words, "it"), ByteVocabulary.of(YOURS, "it")
    ids, told = mine.retold(YOURS("nai\N{COMBINING DIAERESIS}ve words")["input_ids"], yours)
    assert (MINE.decode(ids), told) == ("na", 2)
    long = "\N{DEVANAGARI LETTER QA}" * 70
    assert len(mine.trees([YOURS("")["input_ids"], MINE(long)["input_ids"]])) == 2


def test_another_model_does_not_generate_from_the_students_ids(make):
    trainer = make(max_completion_length=20)
    for model in ("teacher", models()[1]):
        with pytest.raises(ValueError, match="prompts are ids of the student's tokens"), trainer.generating_with(model):
            pass


def test_a_special_token_that_both_have_is_read_by_both():
    mine, yours = (ByteVocabulary.of(one, "it") for one in (MINE, YOURS))
    ids = [*MINE("so")["input_ids"], MINE.eos_token_id, *MINE("after an end")["input_ids"]]
    (reading,) = byte_teacher(mine, yours)._read([ids], [len(ids)], [None])
    assert len(reading.of_student.token) == 2 + 1 + 12
    assert reading.ids.count(YOURS.eos_token_id) == 1


def test_rows_that_are_read_together_are_as_each_alone():
    mine, yours = (ByteVocabulary.of(one, "it") for one in (MINE, YOURS))
    middle = [*MINE("so")["input_ids"], MINE.eos_token_id, *MINE("after")["input_ids"]]
    rows = [*MINE(ANSWERS)["input_ids"], [], middle, MINE("ab\N{GRINNING FACE}")["input_ids"][:-1], [len(MINE) + 2]]
    teacher, sizes = byte_teacher(mine, yours), [max(0, len(ids) - 1) for ids in rows]
    together = teacher._read(rows, sizes, [None] * len(rows))
    for ids, size, found in zip(rows, sizes, together, strict=True):
        (one,) = teacher._read([ids], [size], [None])
        assert found.ids == one.ids
        for tree, other in ((found.tree, one.tree), (found.of_student, one.of_student)):
            assert all(torch.equal(getattr(tree, name), getattr(other, name)) for name in ("token", "fork", "reads"))
            assert len(tree.reads) >= len(tree.token)


class Random(Teacher):
    """Knows nothing, and keeps no more than its states."""

    def __init__(self, head):
        self._head = head

    head = property(lambda self: self._head)
    context = None

    def targets(self, rollout):
        return TeacherTargets(hidden=torch.randn(*rollout.completion_ids.shape, self.head.weight.size(1)))


@pytest.mark.long
def test_besides_targets_the_memory_is_that_of_a_few_rows(monkeypatch):
    PartialState()  # which warnings need
    rows = 64
    monkeypatch.setattr(bytewise, "_ROWS", 1)
    mine, yours = (ByteVocabulary.of(one, "it") for one in (MINE, YOURS))
    teacher = byte_teacher(mine, yours, Random(OutputHead(torch.randn(len(YOURS), 4))))
    teacher._checked._unproved.clear()
    ids = MINE("a text of which there are several copies, and nothing else in it")["input_ids"]
    rollout = Rollout.of([[3]] * rows, [ids] * rows, torch.device("cpu"))
    assert mine.table.order.nbytes + yours.table.order.nbytes < 10_000  # made before what is measured
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        targets = teacher.targets(rollout)
    now = peak = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    kept = sum(row.hidden.nbytes for row in targets.rows)
    assert kept > 4_000_000
    assert peak < 2.5 * kept


class Ahead(Teacher):
    """Returns states one token ahead."""

    def __init__(self, teacher):
        self.teacher = teacher

    head = property(lambda self: self.teacher.head)
    context = None

    def targets(self, rollout):
        hidden = self.teacher.targets(rollout).hidden
        return TeacherTargets(hidden=hidden.roll(-1, 1))


class Plain(Teacher):
    """Reads rows as they are."""

    def __init__(self, model):
        self.inner = FrozenTeacher(Resident(model, torch.device("cpu")))

    head = property(lambda self: self.inner.head)
    context = None

    def targets(self, rollout):
        assert type(rollout) is Rollout
        return self.inner.targets(rollout)


def test_who_cannot_read_forks_is_named_and_compared_without(make, caplog):
    """Of an untrained pair little is certain then."""
    used = {}
    for limit in (0.01, 0.5, 1.0):
        caplog.clear()
        trainer = make(
            teacher_model=Plain(models()[1]), max_completion_length=60, cross_tokenizer_missed=limit, max_steps=1
        )
        trainer.train()
        used[limit] = tiny.logged(trainer, "cross/used")[0]
        assert ("the teacher cannot read tokens that branch off" in caplog.text) == (limit < 1)
        assert "the student cannot" not in caplog.text
    assert used[0.01] < used[0.5] < used[1.0] == 1


def test_a_teacher_of_ones_own_is_proved_aligned(make):
    _, teacher = models()
    inner = FrozenTeacher(Resident(teacher, torch.device("cpu")))
    with pytest.raises(ValueError, match="returned states that are 1 token ahead"):
        make(teacher_model=Ahead(inner), max_completion_length=60).train()


def test_runs_of_spaces_that_are_added_tokens_are_spaces():
    """As in Gemma's tokenizer, where merges lead to them too."""
    spaces = ["\N{LOWER ONE EIGHTH BLOCK}" * count for count in (1, 2)]
    letters = [*map(chr, range(33, 127)), *spaces]
    vocabulary = {
        token: number for number, token in enumerate(["</s>", *(f"<0x{one:02X}>" for one in range(256)), *letters])
    }
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[(spaces[0], spaces[0])], byte_fallback=True, unk_token="</s>"))
    backend.normalizer = normalizers.Replace(" ", spaces[0])
    backend.decoder = decoders.Sequence([decoders.Replace(spaces[0], " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens([AddedToken(spaces[1], normalized=False, special=False)])
    words = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    found = ByteVocabulary.of(words, "it")
    assert found.spelled(found.ids_of("a  b")) == [b"a", b"  ", b"b"]
    assert found.spelled([words.convert_tokens_to_ids("<0x41>")]) == [b"A"]
