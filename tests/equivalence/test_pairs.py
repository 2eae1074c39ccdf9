"""Options that meet: each pair is trained for some steps, in one process and in two, against loops in float64."""

from __future__ import annotations

import faulthandler
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from oracle import ANSWERED, ASKED, GATE, TEMPLATE, TOP_K, Oracle
from passed import functions_of
from support import forks, tiny
from support.byte_languages import byte_pairs
from support.scores import known_teacher

from trl_opsd import OPSDTrainer, RolloutBackend
from trl_opsd.cli.targets import write_targets
from trl_opsd.methods.rewards import Rewards
from trl_opsd.teacher import prefix

RATE, LIMIT = 0.03, 550
ROWS = {1: 8, 2: 12}
"""Of a step, by the number of processes: with two, four completions of a prompt may be in both."""
PROMPTS = [*tiny.PROMPTS, "b", "say:", "1, 2,", "Who"]
WORDS = tiny.tokenizer()
MINE, YOURS = byte_pairs(120, start=5000), byte_pairs(200)

WRITTEN = (" the", " teacher", "a", "er", " model", "g", " student", "ens", "e", "zq", " only", "n")
"""Some are one token of the teacher by bytes, and several of the student."""
LATE = ("student_entropy", "teacher_divergence", "teacher_confidence", "student_surprise")
VARIANTS: dict[str, dict[str, Any]] = {
    "contrast": {"contrast_weight": 0.5},
    "contrast, bounded": {"contrast_weight": 1.0, "contrast_clip": 3.0},
    "extrapolation": {"extrapolation": 1.25},
    "extrapolation below 1": {"extrapolation": 0.5},
    "anchor": {"anchor_weight": 0.3},
    "anchor, forward": {"anchor_weight": 0.3, "methods": ["anchored"]},
    "gate, number": {"reward_gate": GATE},
    "gate, reward": {"reward_gate": "reward"},
    "gate, advantage": {"reward_gate": "advantage"},
    "success": {"teacher_context": "group_success"},
    "success alone": {"teacher_context": "group_success", "success_threshold": 0.5, "columns": False},
    **{name: {"token_selection": name, "token_fraction": 0.5} for name in ("prefix", "random", *LATE)},
    "rising weights": {"methods": ["rising"]},
    "weights from 0": {"methods": ["from 0"]},
    "discount": {"methods": ["discounted"]},
    "equal turns": {"methods": ["equal turns"]},
    "iw-opd": {"methods": ["ahead"]},
    "growing": {"methods": ["growing"]},
    "rows alike": {"loss_aggregation": "rows"},
    "teachers weighted": {"loss_aggregation": "teachers", "teacher_weights": {"told": 1.0, "other": 3.0}},
    "no student": {"lmbda": 0.0},
    "half a student": {"lmbda": 0.5},
    "half a student, copied": {"lmbda": 0.5, "sft_weight": 0.3},
    "a beginning": {"begins": True},
    "a beginning, authors weighted": {"begins": True, "author_weights": {"student": 0.5, "dataset": 2.0}},
    "rewards that are logged": {"reward_funcs": "one"},
    "rewards": {"reward_funcs": "one", "reward_weight": 0.4},
    "rewards, unscaled": {"reward_funcs": "one", "reward_weight": 0.4, "scale_rewards": "none"},
    "two rewards": {
        "reward_funcs": "two", "reward_weight": 0.4, "reward_weights": [1.0, 0.5], "scale_rewards": "batch",
    },
    "two rewards, each scaled": {
        "reward_funcs": "two", "reward_weight": 0.4, "reward_weights": [0.5, 1.0],
        "multi_objective_aggregation": "normalize_then_sum",
    },
    "four completions": {"num_generations": 4},
    "temperatures": {"student_temperature": 0.7, "teacher_temperature": 1.3},
    "one micro-batch": {"max_tokens_per_microbatch": 100_000},
    "tiles of two": {"loss_chunk_tokens": 2},
    "shuffled": {"methods": ["shuffled"]},
    "unprivileged": {"methods": ["unprivileged"]},
    "constant": {"methods": ["constant"]},
    "skip, flat groups": {"methods": ["flat groups"]},
    "skip, near": {"methods": ["near"]},
    "bytes": {"cross_tokenizer": "bytes", "cross_tokenizer_missed": 1e-6},
    "a prompt of the completion": {"teacher_prompt_fn": "hint"},
    "a prompt of rewards": {"teacher_prompt_fn": "judgement"},
    "weights of prompts": {"methods": ["by visits"]},
    "feedback": {"environment_factory": "silent", "feedback_template": "({feedback})", "columns": False},
    "a user's method": {"methods": ["one"]},
    "no guard": {"collapse_guard": None},
    "quantised": {"student_quantization": "fp8"},
    "evaluated": {"eval_on_start": True, "eval_strategy": "steps"},
    "student's tokens": {"known": "student_top_k"},
    "teacher's tokens": {"known": "teacher_top_k"},
    "tokens of both": {"known": "both_top_k"},
    "stored": {"stored": True, "lmbda": 0.0},
    "clipped": {"kl_clip": 0.1},
    "buckets": {"top_k_teacher": 3},
    "prefixes": {"teacher_prefix_cache_gb": 0.001},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
}  # fmt: skip
"""Names in place of functions stand for those of `functions_of`."""
SUCCESS = {"success", "success alone"}
PULLED = {"rewards", "rewards, unscaled", "two rewards", "two rewards, each scaled"}
OF_GROUPS = {"gate, advantage", "skip, flat groups", *SUCCESS, *PULLED}
OF_REWARDS = {"gate, number", "gate, reward", "a prompt of rewards", *OF_GROUPS}
MIXED_STUDENT = {"no student", "half a student", "half a student, copied", "stored"}
SKIPPING = {"skip, flat groups", "skip, near", "weights of prompts"}
MIXING = {
    *OF_REWARDS,
    *MIXED_STUDENT,
    *SKIPPING,
    "a beginning",
    "four completions",
    "shuffled",
    "a user's method",
    "teachers weighted",
}
"""What reads several rows, so that two processes have to agree."""
THIRD_MODELS = {
    "contrast", "contrast, bounded", "extrapolation", "extrapolation below 1", "anchor", "anchor, forward",
}  # fmt: skip
CUT = {"clipped", "buckets"}
WHOLE = {*THIRD_MODELS, "temperatures", "bytes"} - {"anchor", "anchor, forward"}
OTHER_PROMPTS = {"unprivileged", "a prompt of the completion", "a prompt of rewards"}
"""Those of a teacher have no beginning in common; with `SUCCESS` some have."""
OTHER_READING = {*OTHER_PROMPTS, *SUCCESS, "feedback"}
"""With these a teacher reads more than columns in evaluations."""
KNOWN = {name for name, given in VARIANTS.items() if "known" in given}
REFUSED: list[tuple[str, set[str], str]] = [
    ("bytes", {*LATE, *THIRD_MODELS}, "`cross_tokenizer='bytes'` with `"),
    ("bytes", {"constant"}, "`cross_tokenizer='bytes'` with `Constant`"),
    ("bytes", {"iw-opd"}, "`cross_tokenizer='bytes'` with `WeighedAhead`"),
    *((name, OF_REWARDS, "`lmbda=0") for name in ("no student", "stored")),
    ("rising weights", {"weights from 0"}, "`methods` contains two of the name 'AlongCompletion'"),
    ("stored", {"evaluated"}, "there are targets of completions in the dataset alone"),
    ("feedback", {*SKIPPING, *SUCCESS, "a user's method"}, "`environment_factory` with"),
    *((name, {*WHOLE, *CUT}, "needs the whole distribution of each teacher") for name in KNOWN),
    ("bytes", CUT, "`cross_tokenizer='bytes'` with `"),
    ("constant", {"clipped"}, "a sum over vocabulary entries"),
    ("clipped", {"buckets"}, "a sum over vocabulary entries"),
    ("prefixes", {"compiled"}, "compile once per layer"),
    ("stored", {"bytes"}, "its targets cannot be stored"),
    ("stored", KNOWN - {"teacher's tokens"}, "cannot follow the student"),
    ("feedback", {"a prompt of the completion", "a prompt of rewards"}, "`environment_factory` with"),
    *((name, {"a prompt of the completion", "a prompt of rewards"}, "`teacher_prompt_fn` with") for name in SUCCESS),
]
"""What is refused with each of these, and what the error says."""


CONTROLS = {"shuffled", "unprivileged", "constant"}
APART: list[tuple[str, set[str]]] = [
    *((name, CONTROLS - {name}) for name in CONTROLS),
    *((name, SKIPPING - {name}) for name in SKIPPING),
    # the teacher of another row would read what its columns say, not what was made of them
    ("shuffled", {"a prompt of the completion", "a prompt of rewards", "feedback", *SUCCESS}),
    ("constant", {*LATE, "prefix", "random", "iw-opd"}),
    *((name, {"evaluated"}) for name in ("bytes", *KNOWN)),  # which log no agreement
]
"""Methods of `examples/methods` that replace what another one does, and what cannot be seen together."""


def cases() -> list[tuple[str, ...]]:
    """Each variant alone, each pair of different options, and some of three and four of them."""
    found: list[tuple[str, ...]] = [names for count in (1, 2) for names in combinations(count)]
    threes, draw = list(combinations(3)), random.Random(0)
    tempered = [names for names in threes if "temperatures" in names and len({*names} & THIRD_MODELS) == 2]
    drawn = [*draw.sample(threes, 150), *draw.sample(list(combinations(4)), 100)]
    return [*found, *tempered, *(names for names in drawn if names not in tempered)]


def combinations(count: int) -> Iterator[tuple[str, ...]]:
    """Of as many different options, none of which refuses another."""
    for names in itertools.combinations(VARIANTS, count):
        keys = [key for name in names for key in VARIANTS[name] if key != "methods"]
        is_apart = any(one in names and others & {*names} for one, others in APART)
        if len(keys) == len({*keys}) and not is_apart and (count < 3 or refusal(names) is None):
            yield names


def refusal(names: tuple[str, ...]) -> str | None:
    """What the error of these options says, if they are refused."""
    return next((said for one, others, said in REFUSED if one in names and others & {*names}), None)


def beginning(number: int) -> str | None:
    """What the student goes on with in a row, `None` in some: letters that are in no token with others."""
    return None if number % 3 == 2 else "#" * (1 + number % 4)


class Answering(RolloutBackend):
    """Answers by words that follow from the prompt, the step, and which answer it is; the first prompts get more."""

    def __init__(self, words: Any) -> None:
        self.words = words

    def bind(self, trainer: Any) -> None:
        self.trainer, self.process = trainer, trainer.accelerator.process_index

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        texts = []
        for place, text in enumerate(self.words.batch_decode(prompt_ids)):
            asked = text.removeprefix(ASKED).replace(ANSWERED, "")
            number = next(n for n, one in enumerate(PROMPTS) if asked in (one, f"{one}{beginning(n)}"))
            draw = random.Random(f"{number} {step} {place} {self.process} 19")
            said = draw.choices(WRITTEN, k=draw.randint(1, 3) + 2 * (number < 3))
            texts.append("".join(said) + draw.choice(("", "<|im_end|>")))
        return [ids[: self.trainer.limits.completion] for ids in self.words(texts)["input_ids"]]


class Recorded(OPSDTrainer):
    """Records the rows that are taught, with their places among those of all processes."""

    def teach(self, rollout: Any, rows: Any) -> Any:
        if not self.model.training:
            seen = zip(rows, rollout.completion_lists(), strict=True)
            self.evaluated += [(self.state.global_step, {**row, "ids": ids}) for row, ids in seen]
            return super().teach(rollout, rows)
        for row, ids, weights in zip(rows, rollout.completion_lists(), rollout.weights, strict=True):
            seen = {"ids": ids, "off_policy": row.is_off_policy, "skipped": not row.prompt_weight}
            seen |= {"given": 0 if row.is_off_policy else len(row.given.ids)}
            kept = weights[: len(ids)].nonzero()[:, 0].tolist()
            self.read.append((self.state.global_step, row.place, {**row, **seen, "kept": kept}))
        return super().teach(rollout, rows)


def models(by_bytes: bool) -> tuple[Any, Any]:
    sizes = (len(MINE), len(YOURS)) if by_bytes else (tiny.VOCABULARY,) * 2
    return tiny.qwen2(32, 0, vocab_size=sizes[0]), tiny.qwen2(48, 1, vocab_size=sizes[1])


def other(by_bytes: bool) -> Any:
    """Another teacher."""
    return tiny.qwen2(48, 3, vocab_size=len(YOURS) if by_bytes else tiny.VOCABULARY)


def options_of(names: tuple[str, ...]) -> dict[str, Any]:
    """The options of a run; `columns` says whether the dataset has contexts."""
    given = {key: value for name in names for key, value in VARIANTS[name].items()}
    if methods := [one for name in names for one in VARIANTS[name].get("methods", ())]:
        given["methods"] = sorted(methods, key=("equal turns", "constant").__contains__)  # these read what others weigh
    given["max_completion_length"] = 60
    given.setdefault("num_generations", 2 if {*names} & OF_GROUPS else 1)
    if "constant" not in names:  # which has no divergence
        kinds = ("forward_kl", "reverse_kl") if "skip, near" in names else ("forward_kl", "reverse_kl", "jsd")
        given["divergence"] = kinds[sum(map(len, names)) % len(kinds)]
    return given


def trained(folder: Path, names: tuple[str, ...], processes: int = 1, keeps: bool = False) -> dict[str, Any]:
    """The losses and weights of a run, and the rows of its steps; or why it was refused. Collective.

    With targets that are stored, one of the same options `keeps` them first, and does not train.
    """
    options, rows = options_of(names), ROWS[processes]
    if (is_stored := options.pop("stored", False)) and not keeps:
        if "refused" in (found := trained(folder, names, processes, keeps=True)):
            return found
        options["teacher_targets"] = str(folder / "+".join(names))  # of this run alone
    prompts = PROMPTS[: rows // options["num_generations"]]
    if {*names} & OF_REWARDS:
        options.setdefault("reward_funcs", "one")
    arguments = functions_of(options)
    columns: dict[str, list[Any]] = {"prompt": prompts}
    if is_acted := "environment_factory" in arguments:
        columns["prompt"] = [[{"role": "user", "content": prompt}] for prompt in prompts]
    if options.pop("columns", True):
        columns["privileged_context"] = [f"hint {number}" for number in range(len(prompts))]
    if "contrast_weight" in options:
        columns["contrast_context"] = [f"wrong {7 * number % 5}" for number in range(len(prompts))]
    if "lmbda" in options:
        texts = [f" given {number}, the end"[: 8 + number] for number in range(len(prompts))]
        columns["completion"] = [[{"role": "assistant", "content": one}] for one in texts] if is_acted else texts
    if options.pop("begins", False):
        columns["completion_prefix"] = [beginning(number) for number in range(len(prompts))]
    by_bytes = "cross_tokenizer" in options
    student, teacher = models(by_bytes)
    words = MINE if by_bytes else WORDS
    several = {}
    if known := options.pop("known", None):
        teacher = known_teacher(teacher, known, TOP_K)
    several |= {"other": other(by_bytes)} if "teacher_weights" in options else {}
    if several:
        teacher, named = {"told": teacher, **several}, ["told", "other" if "other" in several else "told"]
        columns["teacher"] = [named[number % 2] for number in range(len(prompts))]
    is_long = bool({*names} & SKIPPING)
    is_told = len(columns) > 1 or bool({*names} & SUCCESS) or is_acted
    # Prompts of a few tokens would not be worth it.
    short = mock.patch.object(prefix, "MASKED", 1), mock.patch.dict(prefix.PASS_TOKENS, cpu=1)
    with warnings.catch_warnings(), short[0], short[1]:
        warnings.simplefilter("ignore")
        try:
            args = tiny.config(
                folder, **options, per_device_train_batch_size=2, gradient_accumulation_steps=rows // 2 // processes,
                per_device_eval_batch_size=2, max_steps=(most := 3 if is_long else 2), eval_steps=most, optim="sgd",
                shuffle_dataset=False, learning_rate=RATE, max_grad_norm=1e9,
                **({"teacher_prompt_template": TEMPLATE} if is_told else {}),
            )  # fmt: skip
            trainer = Recorded(
                model=student,
                teacher_model=None if is_stored and not keeps else teacher,
                args=args,
                train_dataset=Dataset.from_dict(columns),
                eval_dataset=Dataset.from_dict(columns) if "eval_strategy" in options else None,
                processing_class=words,
                teacher_processing_class=YOURS if by_bytes else None,
                rollout=Answering(words),
                **arguments,
            )
            trainer.read, trainer.evaluated = [], []
            if keeps:
                write_targets(trainer, folder / "+".join(names))
                return {}
            trainer.train()
        except ValueError as error:
            return {"refused": str(error)}
    steps: list[list[Any]] = [[] for _ in range(args.max_steps)]
    for step, place, row in sorted(gather_object(trainer.read), key=lambda one: one[:2]):
        assert place == len(steps[step])
        steps[step].append(row)
    evaluated = [[row for step, row in gather_object(trainer.evaluated) if step == at] for at in (0, args.max_steps)]
    logs = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    of_clocks = ("time/", "tokens_per_second")
    names = {"mine/weights", *(name for name in OPSDTrainer.known_metrics if not name.startswith(of_clocks))}
    return {
        "steps": steps,
        "metrics": {name: values for name in names if (values := tiny.logged(trainer, name))},
        "evaluated": evaluated,
        "agreements": tiny.logged(trainer, "eval_agreement/first"),
        "losses": [logs.get(step + 1) for step in range(args.max_steps)],
        "weights": tiny.weights(trainer).numpy(),  # which travels between processes without shared memory
    }


def expected(options: dict[str, Any], found: dict[str, Any]) -> tuple[list[float], torch.Tensor, list[Any]]:
    """The losses, weights and agreements in float64."""
    by_bytes = "cross_tokenizer" in options
    student, teacher = models(by_bytes)
    words, theirs = (MINE, YOURS) if by_bytes else (WORDS, None)
    teachers = {"told": teacher, "other": other(by_bytes)}
    oracle = Oracle(student, teachers, words, options, RATE, theirs)
    before, after = found["evaluated"]
    agreements = [oracle.agreement(before)] if before else []
    losses = [oracle.step(rows) for rows in found["steps"]]
    return losses, flat(student), [*agreements, *([oracle.agreement(after)] if after else [])]


def flat(model: Any) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def check(names: tuple[str, ...], found: dict[str, Any]) -> None:
    """A run is refused by its message, or has the losses and weights of float64."""
    if (said := refusal(names)) is not None:
        assert said in found["refused"]
        return
    assert "refused" not in found, found["refused"]
    if "prefixes" in names and not {*names} & {*OTHER_PROMPTS, *SUCCESS, *KNOWN, "stored"}:
        assert sum(found["metrics"]["teacher/prefix_saved"]) > 0
    losses, weights, agreements = expected(options_of(names), found)
    # a step in which no row counts has no loss
    assert [one or 0.0 for one in found["losses"]] == pytest.approx(losses, rel=1e-5, abs=1e-7)
    assert len(found["agreements"]) == 2 * ("evaluated" in names)
    if not {*names} & OTHER_READING:
        assert found["agreements"] == pytest.approx(agreements, rel=1e-4)
    moved = float((weights - flat(models("bytes" in names)[0])).abs().max())
    off = float((weights - torch.from_numpy(found["weights"])).abs().max())
    assert off <= 1e-5 * moved + 2e-7


def trained_in_two(folder: Path, cases: list[tuple[str, ...]]) -> list[dict[str, Any]]:
    """The runs of both processes; one that does not finish prints its stack and ends."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    found = [trained(folder, names, 2) for names in cases]
    faulthandler.cancel_dump_traceback_later()
    return found


def some(of: list[tuple[str, ...]], count: int) -> list[tuple[str, ...]]:
    """As many pairs of these."""
    pairs = [names for names in of if len(names) == 2]
    return pairs[:: len(pairs) // count][:count]


FIRST = [
    ("extrapolation", "anchor", "temperatures"),
    ("anchor", "prefix", "stored"),
    ("contrast, bounded", "extrapolation below 1", "temperatures"),
    ("contrast", "anchor, forward", "teachers weighted"),
    ("anchor", "teacher_divergence", "one micro-batch"),
    ("temperatures", "bytes"),
    ("prefix", "bytes"),
    ("teacher_divergence", "weights of prompts"),
]
CASES = [*dict.fromkeys([*cases(), *FIRST])]
MIXED = [names for names in CASES if MIXING & {*names}]
SHORT = [*some(CASES, 13), *FIRST]
SHORT_MIXED = [*some(MIXED, 4), ("half a student", "a beginning"), ("half a student", "a user's method")]
LAUNCHED = 100  # runs of a launch


def sampled(all_cases: list[tuple[str, ...]], short: list[tuple[str, ...]]) -> Any:
    """A test of each of these; in the short run, of some."""
    marked = [pytest.param(names, marks=() if names in short else pytest.mark.long) for names in all_cases]
    return pytest.mark.parametrize("names", marked, ids="+".join)


@sampled(CASES, SHORT)
def test_options_together_equal_float64(tmp_path, names):
    check(names, trained(tmp_path, names))


def test_every_option_of_a_method_is_in_the_pairs():
    """With a value other than its default; whether that has an effect is tested below."""
    options = dict.fromkeys([*tiny.SETTINGS, "feedback_template"])
    options |= {flat: getattr(Rewards, name) for flat, name in tiny.REWARDS.items() if name != "tokenizers"}
    tried = {key for given in VARIANTS.values() for key, value in given.items() if value != options.get(key)}
    functions = {key for key in signature(OPSDTrainer).parameters if key.endswith(("_fn", "_funcs", "methods"))}
    assert {*options, *functions} - tried == set()


UNSEEN = {
    "num_generations", "environment_factory", "reward_funcs", "collapse_guard", "columns",
    "eval_on_start", "eval_strategy", "max_tokens_per_microbatch", "loss_chunk_tokens", "lmbda",
    "teacher_prefix_cache_gb", "stored", "cross_tokenizer", "cross_tokenizer_missed", "torch_compile",
    "torch_compile_backend", "begins",
}  # fmt: skip
"""What has no effect on the loss of given completions by itself."""


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [one for one, given in VARIANTS.items() if given.keys() - UNSEEN or {"lmbda", "begins"} & {*given}]
)
def test_runs_differ_from_those_without_the_option(tmp_path, name):
    """Else a test of a pair would tell nothing of it."""
    found, options = trained(tmp_path, (name,)), options_of((name,))
    if "lmbda" in options:
        assert any(row["off_policy"] for rows in found["steps"] for row in rows)
    if "begins" in options:
        assert any(row["given"] for rows in found["steps"] for row in rows)
    if name == "growing":
        first, second = (max(len(row["ids"]) for row in rows) for rows in found["steps"])
        assert first == 3 < 5 < second, "and with as many steps as by default, at most 4"
        return
    for key in VARIANTS[name].keys() - UNSEEN:
        try:
            losses, *_ = expected({one: value for one, value in options.items() if one != key}, found)
        except (AssertionError, KeyError):  # other prompts are skipped, or tokens selected
            continue
        assert any(abs(one - (other or 0.0)) > 1e-4 for one, other in zip(losses, found["losses"], strict=True))


@pytest.fixture(scope="module")
def in_two(tmp_path_factory) -> Callable[[tuple[str, ...]], dict[str, Any]]:
    """The run of two processes; the short ones are in one launch."""
    launched: dict[int, dict[int, Any]] = {}

    def found(names: tuple[str, ...]) -> dict[str, Any]:
        long = [one for one in MIXED if one not in SHORT_MIXED]
        number = -1 if names in SHORT_MIXED else long.index(names) // LAUNCHED
        together = SHORT_MIXED if number < 0 else long[number * LAUNCHED : (number + 1) * LAUNCHED]
        if number not in launched:
            launched[number] = forks.results("ddp", trained_in_two, tmp_path_factory.mktemp("two"), together)
        one, other = (launched[number][rank][together.index(names)] for rank in (0, 1))
        assert one.get("refused") == other.get("refused")
        assert one.get("metrics") == other.get("metrics")
        assert "refused" in one or (one["weights"] == other["weights"]).all()
        return one

    return found


@pytest.mark.distributed
@pytest.mark.timeout(forks.SECONDS + 60)
@sampled(MIXED, SHORT_MIXED)
def test_options_that_read_several_rows_equal_float64_in_two_processes(in_two, names):
    check(names, in_two(names))
