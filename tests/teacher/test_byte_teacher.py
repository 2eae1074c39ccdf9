"""Teachers with a tokenizer of their own, through the trainer: losses, rows, options, and completions of all kinds."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from controls import Shuffled
from peft import LoraConfig
from support import tiny
from support.byte_languages import byte_pairs, dense_byte_logarithms, outcomes
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from trl_opsd import FixedRollout, OPSDTrainer
from trl_opsd.bytes.forks import Forking
from trl_opsd.bytes.ranges import _FLOOR
from trl_opsd.bytes.table import ByteTargets, CoveringTree, Spelled
from trl_opsd.bytes.teacher import ByteTeacher
from trl_opsd.bytes.vocabulary import ByteVocabulary
from trl_opsd.teacher import FrozenTeacher, Teacher
from trl_opsd.teacher.frozen import Resident
from trl_opsd.types import Rollout, TeacherTargets

CPU = torch.device("cpu")
MINE, YOURS = byte_pairs(120, start=5000), byte_pairs(200)
PROMPTS = ["Once", "def f(x):", "  Ünï ", "2+2="]
END = "<|im_end|>"
ANSWERS = [
    " upon a time, the trainer of trainers\r\n trained.<|im_end|>",
    "\n    return the_same(options)",
    "\N{GRINNING FACE}\N{WAVING HAND SIGN} ok<|im_end|>",
    "4, and nothing else that the teacher says<|im_end|>",
]


def of_answers():
    ids = (MINE(one)["input_ids"] for one in (PROMPTS, ANSWERS))
    return FixedRollout(dict(zip(map(tuple, next(ids)), next(ids), strict=True)))


def models():
    return tiny.qwen2(32, vocab_size=len(MINE) + 3), tiny.qwen2(48, 1, vocab_size=len(YOURS) + 5)


@pytest.fixture
def make_trainer(make_trainer):
    def made(cls=OPSDTrainer, **given):
        student, teacher = models()
        rows = tiny.Dataset.from_dict({"prompt": PROMPTS * given.pop("many", 1), **given.pop("columns", {})})
        defaults = {
            "model": student,
            "teacher_model": teacher,
            "processing_class": MINE,
            "teacher_processing_class": YOURS,
            "rollout": of_answers(),
            "train_dataset": rows,
            "cross_tokenizer": "bytes",
            "per_device_train_batch_size": 4,
            "max_completion_length": 60,
        }
        return make_trainer(cls, **{**defaults, **given})

    return made


def alone(answer, prompt, model, words):
    """What a model says of each next byte, summed over the tokens of each beginning of the text, each read alone."""
    vocabulary = ByteVocabulary.of(words, "it")
    ids, before = words(answer)["input_ids"], words(prompt)["input_ids"]
    text = answer.removesuffix(END)
    some = {tuple(vocabulary.ids_of(text[:size])) for size in range(len(text))}
    some |= {tuple(ids[:count]) for count in range(len(ids))}
    paths = sorted({one[:at] for one in some for at in range(len(one) + 1)})
    state = {path: number for number, path in enumerate(paths)}
    nodes = [
        (len(b"".join(vocabulary.spelled(path))), [(state[path[:at]], path[at]) for at in range(len(path))])
        for path in paths
    ]
    with torch.no_grad():
        rows = torch.stack([model(torch.tensor([[*before, *path]])).logits[0, -1].double() for path in paths])
    return dense_byte_logarithms(rows, vocabulary.texts, outcomes(vocabulary, ids), nodes, _FLOOR).log_softmax(-1)


def expected(answer, prompt, student, teacher, kept):
    """The reverse KL of one row, summed over the bytes of the kept tokens, each model alone, with loops over all."""
    mine = alone(answer, prompt, student, MINE)
    yours = alone(answer, prompt, teacher.teacher.model, teacher.tokenizer)
    sizes = [len(one or b"-") for one in ByteVocabulary.of(MINE, "it").spelled(MINE(answer)["input_ids"])]
    is_kept = torch.zeros(len(sizes))
    is_kept[kept] = 1
    return float(((mine.exp() * (mine - yours)).sum(-1) * is_kept.repeat_interleave(torch.tensor(sizes))).sum())


class EveryThird(OPSDTrainer):
    def weigh(self, rollout, rows, targets):
        return super().weigh(rollout, rows, targets) * (torch.arange(rollout.weights.size(1)) % 3 == 2)


# Options, and the tokens of a row that have a weight; what else is beside bytes is in `equivalence/test_pairs.py`.
CASES = {
    "all": ({}, slice(None)),
    "adapted": ({"peft_config": LoraConfig(r=4)}, slice(None)),
    "every third": ({"cls": EveryThird}, slice(2, None, 3)),
    "two teachers": (
        {
            "columns": {"teacher": ["a", "b", "a", "b"]},
            "teacher_model": {"a": models()[1], "b": tiny.qwen2(40, 2)},
            "teacher_processing_class": {"a": YOURS, "b": tiny.tokenizer()},
        },
        slice(None),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_is_that_of_rows_and_models_read_alone(make_trainer, case):
    """Also of tokens that are read only for those with a weight."""
    options, keep = CASES[case]
    trainer = make_trainer(**options, divergence="reverse_kl", max_steps=1, cross_tokenizer_missed=1e-6)
    names = options.get("columns", {"teacher": ["teacher"] * 4})["teacher"]
    each = [
        expected(answer, prompt, trainer.model, trainer.teachers[name], keep)
        for prompt, answer, name in zip(PROMPTS, ANSWERS, names, strict=True)
    ]
    tokens = sum(len(ids[keep]) for ids in MINE(ANSWERS)["input_ids"])
    if case == "all":
        assert trainer.evaluate(trainer.train_dataset)["eval_loss"] == pytest.approx(sum(each) / tokens, rel=2e-5)
    trainer.train()
    assert tiny.logged(trainer, "loss") == pytest.approx([sum(each) / tokens], rel=2e-5)
    assert tiny.logged(trainer, "cross/used") == [1.0]
    assert tiny.logged(trainer, "cross/lost") == [0.0]


@pytest.fixture(scope="module")
def plain():
    return {}


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
def test_weights_do_not_depend_on_how_rows_are_read(make_trainer, trained, plain, options):
    given = {"learning_rate": 0.03, "optim": "sgd"}  # Adam makes much of a small rounding
    if not plain:
        plain["trainer"] = trained(**given)
    one, other = plain["trainer"], trained(**given, **options)
    assert (tiny.weights(one) - tiny.weights(other)).abs().max() < 1e-6
    assert tiny.logged(other, "loss") == pytest.approx(tiny.logged(one, "loss"), rel=1e-4)
    assert (tiny.weights(one) - tiny.weights(make_trainer())).abs().max() > 1e-3


@pytest.mark.parametrize("methods", [[], [Shuffled()]], ids=["own", "shuffled"])
def test_each_teacher_reads_prompts_in_its_own_template_and_tokens(make_trainer, methods):
    read, words, chats = {}, {"a": byte_pairs(200), "b": tiny.tokenizer()}, []
    for name, one in words.items():
        one.chat_template = name + "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[answer] "
    chats = [[{"role": "user", "content": one}] for one in PROMPTS]
    asked = MINE.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]

    class Reading(OPSDTrainer):
        def teach(self, rollout, rows):
            prompts, names = self.teaching._for_teachers(rollout, rows)
            for row, name, ids in zip(rows, names, prompts.prompt_lists(), strict=True):
                read[row["prompt"][0]["content"]] = words[name].decode(ids)
            return super().teach(rollout, rows)

    make_trainer(
        cls=Reading,
        train_dataset=tiny.Dataset.from_dict({"prompt": chats, "teacher": ["a", "b", "a", "b"]}),
        teacher_model={"a": models()[1], "b": tiny.qwen2(40, 2)},
        teacher_processing_class=words,
        rollout=FixedRollout(dict(zip(map(tuple, asked), MINE(ANSWERS)["input_ids"], strict=True))),
        methods=methods,
        shuffle_dataset=False,
        max_steps=1,
    ).train()
    told = [*PROMPTS[1:], PROMPTS[0]] if methods else PROMPTS
    expected = [f"{name}[user] {text}\n[answer] " for name, text in zip("abab", told, strict=True)]
    assert read == dict(zip(PROMPTS, expected, strict=True))


def test_resumed_run_has_the_weights_of_an_uninterrupted_one(trained, tmp_path):
    whole = trained(max_steps=4, many=3, save_strategy="steps", save_steps=2)
    given = {"max_steps": 4, "many": 3}
    resumed = trained(**given, resume=str(tmp_path / "checkpoint-2"))
    assert torch.equal(tiny.weights(whole), tiny.weights(resumed))
    with pytest.raises(ValueError, match="teachers"):
        trained(**given, teacher_processing_class=byte_pairs(199), resume=str(tmp_path / "checkpoint-2"))


def test_ids_without_bytes_are_never_generated(make_trainer):
    trainer = make_trainer(rollout=None)
    with torch.no_grad():
        trainer.model.lm_head.weight[len(MINE) :] = 50 * trainer.model.lm_head.weight.abs().max()
    trainer.train()
    assert trainer.limits.vocabulary == len(MINE)
    assert all(one > 0 for one in tiny.logged(trainer, "cross/used"))


def test_computing_in_bfloat16_rounds_products_only(trained):
    whole, half = (tiny.logged(trained(bf16=bf16, max_steps=1), "loss")[0] for bf16 in (False, True))
    assert 0 < abs(half - whole) < 0.01 * whole


def test_another_model_does_not_generate_from_the_students_ids(make_trainer):
    trainer = make_trainer(max_completion_length=20)
    for model in ("teacher", models()[1]):
        with pytest.raises(ValueError, match="ids of the student's tokenizer"), trainer.generating_with(model):
            pass


# ---- Completions of all kinds ----------------------------------------------------------------------------------------


def byte_teacher(mine, yours, teacher=None):
    args = {"loss_chunk_tokens": None, "teacher_cache_device": "auto", "cross_tokenizer_missed": 1e-3}
    host = SimpleNamespace(args=SimpleNamespace(**args), temperatures=(1.0, 1.0))
    teacher = teacher or FrozenTeacher(Resident(models()[1], CPU))
    return ByteTeacher(teacher, mine, yours, host, Forking("student", 1e-3))


AFTER_END = [MINE.eos_token_id, *MINE("after an end")["input_ids"]]
# Tokens of the student, how many of their bytes are compared, and how many are lost.
KINDS = [
    ([], 0, 0),
    (MINE("the end")["input_ids"] + [MINE.eos_token_id], 8, 0),
    (MINE("cut of")["input_ids"], 6, 0),
    (MINE("two\r\nlines\r\n")["input_ids"], 12, 0),
    (MINE("\N{GRINNING FACE}!")["input_ids"], 5, 0),
    (MINE("ab\N{GRINNING FACE}")["input_ids"][:-1], 2, None),  # a character that is cut
    ([MINE.convert_tokens_to_ids("ÿ"), *MINE("ab")["input_ids"]], 0, None),  # no UTF-8
    (AFTER_END, 1, 12),
    (MINE("e\N{COMBINING ACUTE ACCENT} x")["input_ids"], 5, 0),
    (MINE("<think>so</think>")["input_ids"], 17, 0),
    ([len(MINE) + 2], 1, None),  # no token
]


@pytest.mark.parametrize("end", [END, "<|end|>"])
def test_completions_of_all_kinds_are_read_together_as_each_alone(end):
    """A special token that both have is read by both."""
    mine, yours = ByteVocabulary.of(MINE, "mine"), ByteVocabulary.of(byte_pairs(200, special=(end,)), "yours")
    teacher, rows = byte_teacher(mine, yours), [ids for ids, *_ in KINDS]
    together = teacher._read(rows, [*map(len, rows)], [None] * len(rows))
    for (ids, compared, lost), found in zip(KINDS, together, strict=True):
        if end == END and ids is AFTER_END:
            compared, lost = 1 + 12, 0
            assert found.ids[0] == yours.tokenizer.eos_token_id
        tokens = found.of_student.token.tolist()
        assert len(tokens) == compared
        assert tokens == sorted(tokens)
        text, theirs = (
            b"".join(one or b"" for one in spelled) for spelled in (mine.spelled(ids), yours.spelled(found.ids))
        )
        assert text[: len(theirs)] == theirs[: len(text)]
        if lost is not None:
            assert (int(mine.table.length[ids].sum()) if ids else 0) - compared == lost
        (one,) = teacher._read([ids], [len(ids)], [None])
        assert found.ids == one.ids
        for tree, other in ((found.tree, one.tree), (found.of_student, one.of_student)):
            for name in ("token", "fork", "reads"):
                assert numpy.array_equal(getattr(tree, name), getattr(other, name))


def test_a_context_that_is_full_loses_what_does_not_fit():
    mine, yours = (ByteVocabulary.of(one, "it") for one in (MINE, YOURS))
    ids = MINE("the teacher reads all of it, or only some")["input_ids"]
    teacher = byte_teacher(mine, yours)
    whole, some, none = teacher._read([ids] * 3, [len(ids)] * 3, [None, 5, -3])
    assert len(some.ids) == 5
    assert 0 < len(some.of_student.token) < len(whole.of_student.token)
    assert len(none.of_student.token) == 0


def test_beginnings_before_tokens_that_do_not_count_are_read():
    """Tokens `the`, ` l`, `ic`, `e`: of the third byte's distribution the first one's state is a part."""
    reads = [[0, 0, 0], [1, 1, 0], [2, 1, 7], [2, 2, 0], [3, 2, 5], [3, 3, 0]]
    given = [[0, 1, 2, 3], [[2, 1, 9], [3, 2, 8]], reads, [[2, 0], [3, 1]]]
    tree = CoveringTree(*map(numpy.array, given), read=numpy.array([True, False]), column=50)
    row = ByteTargets(torch.zeros(4, 257), torch.from_numpy(tree.token), torch.tensor([0.0, 0.1, 0.2, 0.3]), tree)
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
    given = [[0, 1, 1, 1], [[2, 1, 9]], [[0, 0, 0], [1, 1, 0], [2, 1, 7], [2, 2, 0], [3, 1, 8]]]
    none = numpy.zeros((0, 2), int)
    longer = CoveringTree(*map(numpy.array, given), none, read=numpy.array([True]), column=50)
    assert Spelled.of([longer], [row.missed], [0], torch.arange(2)).last.tolist() == [0, 1, 2, 2]
    cut = row.cut(3)
    assert len(cut.hidden) == len(cut.missed) == len(cut.tree.token) == 3
    assert cut.tree.reads[:, 0].max() == 2
    assert cut.tree.fork.tolist() == [[2, 1, 9]]
    assert cut.tree.leaves.tolist() == [[2, 0]]
    assert row.cut(4) is row


@pytest.mark.parametrize("several", [False, True])
def test_completions_of_teachers_are_retold_in_the_students_tokens(make_trainer, several):
    """The text is the teacher's, up to its end; what has no room is counted."""
    written, told = [], []

    class Noting(OPSDTrainer):
        def teach(self, rollout, rows):
            written.extend(rollout.completion_lists())
            return super().teach(rollout, rows)

    words = {"a": YOURS, "b": MINE} if several else {"teacher": YOURS}
    given = {
        "columns": {"teacher": ["a", "b", "a", "b"]},
        "teacher_model": {"a": models()[1], "b": tiny.qwen2(40, 2, vocab_size=len(MINE))},
        "teacher_processing_class": words,
    }
    options = {"seq_kd": True, "lmbda": 0.0, "sft_weight": 1.0, "max_completion_length": 12, "max_steps": 2}
    trainer = make_trainer(cls=Noting, rollout=None, **options, **(given if several else {}))
    for name, one in trainer._generation._teacher_rollouts.items():
        complete = one._rollout.complete

        def noting(prompts, step, complete=complete, words=words[name]):
            found = complete(prompts, step)
            told.extend(map(words.decode, found))
            return found

        one._rollout.complete = noting
    trainer.train()
    assert len(told) == len(written) == 8
    texts = [MINE.decode(ids) for ids in written]
    assert sorted(texts) != sorted(told)  # some have no room
    assert all(any(one.startswith(text.rstrip("\ufffd")) for one in told) for text in texts)
    assert all(len(ids) <= 12 for ids in written)
    assert [MINE.eos_token_id] not in written  # nor is a text that cannot be told an end
    assert all(ids == MINE(text)["input_ids"] for ids, text in zip(written, texts, strict=True) if "\ufffd" not in text)
    assert 0.2 < tiny.logged(trainer, "cross/retold")[0] < 1
    assert tiny.share_of_others(trainer.state.log_history[0]) == 1


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


def test_only_text_that_is_told_whole_has_an_end(make_trainer):
    words = byte_pairs(199, special=("<|pad|>", "<|end|>"))
    words.eos_token = "<|end|>"  # an id that is text in the student's tokenizer
    given = {"seq_kd": True, "lmbda": 0.0, "max_completion_length": 12, "rollout": None}
    trainer = make_trainer(**given, teacher_processing_class=words)
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


# ---- Teachers of one's own -------------------------------------------------------------------------------------------


class Own(Teacher):
    """Reads rows as they are; returns states some tokens ahead."""

    def __init__(self, ahead=0):
        self.inner, self.ahead = FrozenTeacher(Resident(models()[1], CPU)), ahead

    head = property(lambda self: self.inner.head)
    context = None

    def targets(self, rollout):
        assert type(rollout) is Rollout
        return TeacherTargets(hidden=self.inner.targets(rollout).hidden.roll(-self.ahead, 1))


def test_who_cannot_read_forks_is_named_and_compared_without(trained, caplog):
    """Of an untrained pair little is certain then."""
    used = {}
    for limit in (0.01, 0.5, 1.0):
        caplog.clear()
        trainer = trained(teacher_model=Own(), cross_tokenizer_missed=limit, max_steps=1)
        used[limit] = tiny.logged(trainer, "cross/used")[0]
        assert ("the teacher cannot score alternative tokens" in caplog.text) == (limit < 1)
        assert "the student cannot" not in caplog.text
    assert used[0.01] < used[0.5] < used[1.0] == 1


def test_a_teacher_of_ones_own_is_proved_aligned(trained):
    with pytest.raises(ValueError, match="returned states that are 1 token ahead"):
        trained(teacher_model=Own(ahead=1))


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
