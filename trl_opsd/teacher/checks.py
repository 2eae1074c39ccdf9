"""Checks of teachers: of what is passed in, before anything is loaded; of the first targets, and of a user's own.

B rows · C completion tokens · n tokens of one completion · H hidden width
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trl_opsd._compat.peft import is_peft, without_peft
from trl_opsd._compat.trl import get_config_model_id
from trl_opsd.config import OPSDConfig
from trl_opsd.data.vocabulary import check_token_maps
from trl_opsd.http.urls import ONLY
from trl_opsd.models.checks import naming_trust
from trl_opsd.models.tokenizers import has_tokenizer
from trl_opsd.parallel.rng import preserved_rng
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.frozen import FrozenTeacher
from trl_opsd.teacher.location import location
from trl_opsd.teacher.self_teacher import share_memory
from trl_opsd.teacher.served_checks import check_served
from trl_opsd.types import OutputHead, Rollout, TeacherTargets

_FEW = 4
"""Rows whose first and last target are compared first; if they differ, as nearly always, nothing else is."""


def check_depends_on_input(rollout: Rollout, targets: TeacherTargets, teacher: str) -> None:
    """Refuses hidden states that are the same after different tokens; waits for the weights and one comparison."""
    counts_BC = rollout.weights.cpu() != 0
    places = {row: counts_BC[row].nonzero().squeeze(1) for row in counts_BC.any(1).nonzero().flatten().tolist()}
    few = [targets.of(row, places[row][[0, -1]]) for row in list(places)[:_FEW]]
    if not few or not (torch.cat(few) == few[0][0]).all():
        return
    first = few[0][:1]  # only now all others
    if not all((targets.of(row, of_row) == first).all() for row, of_row in places.items()):
        return
    read_BC = torch.cat([rollout.prompt_ids[:, -1:], rollout.completion_ids[:, :-1]], dim=1)
    read_N = read_BC.cpu()[counts_BC]
    if (read_N != read_N[0]).any():
        raise ValueError(
            f"The {teacher} has the same hidden state at all {len(read_N)} tokens of a generation batch, whatever "
            "it reads: its weights are zeroed or were not loaded; load it again. The student was not changed."
        )


logger = get_logger(__name__)

_CHANGED = 0.05
"""Least difference of states of different inputs, relative to the spread within a row; rounding stays below."""
_QUOTED = 200
"""Characters quoted of an error."""
_CALLED_AGAIN = (
    "(For this check the teacher was called a second time, for two rows: one that replays recorded answers in order is "
    "now ahead by one.)"
)


def prove_alignment(
    read: Callable[[Rollout], TeacherTargets], rollout: Rollout, targets: TeacherTargets, where: str
) -> None:
    """Refuses targets that have read the token they should predict; `where` is their method, for messages."""
    # A teacher may be collective, so every process calls it, also without the three such tokens that a verdict needs.
    row = int(rollout.counts.sum(-1).argmax())
    places = rollout.counts[row].nonzero().flatten().tolist()
    up_to_last = rollout.completion_mask[row, : places[-1] + 1 if places else 0].nonzero().flatten().tolist()
    # A row is scored again beside a copy with another token before its last one. Only the last target may differ: an
    # earlier difference means that states are shifted towards later tokens, none that they are shifted back.
    pair = _with_another_token(rollout.select([row, row]), up_to_last)
    try:
        with preserved_rng(rollout.completion_ids.device):
            hidden_2CH = read(pair).hidden
    except Exception as error:  # a teacher that looks targets up has none for the changed row
        logger.warning(
            f"`{where}` could not read a row in which one token was changed, {type(error).__name__}: "
            f"{next(iter(str(error).splitlines()), '')[:_QUOTED]}. So it is not known whether its targets are those of "
            f"the tokens that they are compared at. {_CALLED_AGAIN}"
        )
        return
    read_nH, changed_nH = hidden_2CH[:, places].float()
    # Nothing can be concluded without three tokens, without another token, or from NaNs, which other checks report.
    if len(places) < 3 or torch.equal(*pair.completion_ids) or not hidden_2CH[:, places].isfinite().all():
        return
    if _differ(read_nH, targets.of(row, torch.tensor(places)).to(read_nH)).any():
        logger.warning(
            f"`{where}` returned other states for a row when it reads the row again, without the others of its batch: "
            "are the rows in order, is the model in eval mode, and does padding leave it unchanged? "
            f"{_CALLED_AGAIN}"
        )
        return
    differ = _differ(read_nH, changed_nH).tolist()
    first = differ.index(True) if any(differ) else None
    if first is None:
        logger.warning(
            f"`{where}` returned states that do not depend on the token right before the one that they predict: are "
            "they one token behind, or do they come from a cache, whatever the completion is? The first target is the "
            f"state at the last token of the prompt. {_CALLED_AGAIN}"
        )
    elif first == 0:
        logger.warning(
            f"`{where}` returned states of which the first already depends on later tokens of the completion, maybe on "
            "the one that it predicts. If the teacher is to judge with hindsight, there is nothing to do; this is said "
            f"once. {_CALLED_AGAIN}"
        )
    elif too_far := len(places) - 1 - first:
        raise ValueError(
            f"`{where}` returned states that are {too_far} token{'s' * (too_far > 1)} too far on: they have read the "
            "token that they should predict. Of a model's states after P prompt tokens and C completion tokens return "
            f"`hidden[:, P - 1 : -1]`; the student was not changed. {_CALLED_AGAIN}"
        )


def _with_another_token(pair: Rollout, places: list[int]) -> Rollout:
    """Replaces the last but one of these tokens in the second row by another token of the row, if it has another."""
    ids_2C = pair.completion_ids.clone()
    last_but_one = places[-2:][:1]
    known = [*ids_2C[1, places].tolist(), *pair.prompt_lists()[1]]
    ids_2C[1, last_but_one] = next((one for one in known if one not in ids_2C[1, last_but_one]), 0)
    return replace(pair, completion_ids=ids_2C)


def _differ(one_nH: Tensor, other_nH: Tensor) -> Tensor:
    """[n], whether states differ by more than rounding."""
    apart = (one_nH - one_nH[:1]).abs().max()
    return (one_nH - other_nH).abs().amax(-1) > _CHANGED * apart


TeacherLike: TypeAlias = str | PreTrainedModel | Teacher
"""A path or model id, a model, or a teacher of the user's own."""


def check_teachers(teacher_model: Any, student: Any, args: OPSDConfig) -> None:
    """Checks the teachers as far as possible before anything is loaded: `TypeError` for what can be no teacher."""
    kind = args.teacher_model_kind
    if teacher_model is None and kind is None:
        raise ValueError(
            "There is no teacher: pass `teacher_model`, a model or a path, or set `teacher_model_name_or_path` in the "
            "config; or `teacher_model_kind='base'`, and the student teaches itself."
        )
    if teacher_model is not None and kind is not None:
        raise ValueError(
            f"There are two teachers: `teacher_model`, and the student itself by `teacher_model_kind={kind!r}`: leave "
            "one of them out."
        )
    if kind == "ema" and args.teacher_offload == "zero3":
        raise ValueError(
            "`teacher_offload='zero3'` with `teacher_model_kind='ema'`: every process keeps the whole average. Set "
            "`teacher_offload='cpu'` or 'stream', which keep the teacher in host memory."
        )
    if isinstance(teacher_model, Mapping):
        if len(teacher_model) < 2:
            raise ValueError(
                f"`teacher_model` is a dict with {len(teacher_model)} teachers: expected at least two names, or pass "
                "the teacher itself."
            )
        if args.teacher_offload == "zero3":
            raise ValueError(
                "`teacher_offload='zero3'` with several teachers: a sharded teacher needs all processes to read with "
                "it together, but one of them may have no row for it. Set `teacher_offload='stream'`."
            )
        for name, one in teacher_model.items():
            if not name:
                raise ValueError(
                    "`teacher_model` has an empty name: expected one that the column 'teacher' of each row may contain."
                )
            _check_one(one, student, f"`teacher_model[{name!r}]`", args)
    elif teacher_model is not None:
        _check_one(teacher_model, student, "`teacher_model`", args)
    check_served(teacher_model if isinstance(teacher_model, Mapping) else {ONLY: teacher_model}, args)


def check_named_once(teacher_model: Any, args: OPSDConfig) -> None:
    """Refuses a teacher that is passed to the trainer while the options name another one."""
    named = args.teacher_model_name_or_path  # may name the same teacher, as in TRL's script
    passed = teacher_model if isinstance(teacher_model, str) else getattr(teacher_model, "name_or_path", None)
    if teacher_model is None or named is None or passed == named:
        return
    what = repr(teacher_model) if isinstance(teacher_model, str) else f"a {type(teacher_model).__name__}"
    raise ValueError(
        f"There are two teachers: `teacher_model`, {what}, and `teacher_model_name_or_path={named!r}` in the config: "
        "leave one of them out."
    )


def _check_one(teacher_model: Any, student: Any, called: str, args: OPSDConfig) -> None:
    if teacher_model is student and not isinstance(student, str):
        raise ValueError(
            f"{called} and `model` are the same object: load the teacher as a separate object, or set "
            "`teacher_model_kind`, and the student teaches itself."
        )
    known = isinstance(teacher_model, TeacherLike)
    if not known and not (isinstance(teacher_model, nn.Module) and is_peft(teacher_model)):
        raise TypeError(
            f"{called} is a {type(teacher_model).__name__}: expected a path, a `PreTrainedModel`, a `PeftModel`, "
            "a `trl_opsd.Teacher`, or a dict of them by name."
        )
    if args.teacher_model_init_kwargs and not isinstance(teacher_model, str):
        raise ValueError(
            f"`teacher_model_init_kwargs` says how to load a teacher, but {called} is given as an object: remove it, "
            "or pass the path of the teacher."
        )
    if share_memory(teacher_model, student):
        raise ValueError(
            f"{called} shares parameters with the student, so it would be trained too: load the teacher as a separate "
            "object."
        )


def check_own(teacher: Teacher) -> None:
    """Refuses a user's teacher whose head or context has another type (`TypeError`)."""
    name, head, context = type(teacher).__name__, teacher.head, teacher.context
    if not isinstance(head, OutputHead):
        raise TypeError(
            f"`{name}.head` is a {type(head).__name__}: expected a `trl_opsd.losses.OutputHead`, which `OutputHead.of` "
            "reads from a model."
        )
    if context is not None and (not isinstance(context, int) or context < 1):
        raise TypeError(
            f"`{name}.context` is {context!r}: expected a number of tokens, or None where there is no limit."
        )


def check_tokenizers(
    tokenizer: PreTrainedTokenizerBase | None, teachers: Mapping[str, Any], given: Any, args: OPSDConfig
) -> None:
    """Refuses teachers whose tokenizer maps ids differently than the student's, before a teacher is loaded."""
    if tokenizer is None:
        return
    if isinstance(given, Mapping) and (unknown := set(given) - set(teachers)):
        raise ValueError(
            f"`teacher_processing_class` names {sorted(unknown)}, but the teachers are {sorted(teachers)}: use their "
            "names."
        )
    # Without a given tokenizer, the one at the teacher's path or where the object was loaded from is compared.
    for name, teacher in teachers.items():
        theirs = given.get(name) if isinstance(given, Mapping) else given
        source = None
        if theirs is None and isinstance(teacher, str):
            theirs = _tokenizer_beside(teacher, args)
        elif theirs is None and (source := _source(teacher)):
            theirs = _tokenizer_kept(source, name, args)
        if theirs is not None:
            check_token_maps(tokenizer, theirs, name, source)


def _tokenizer_beside(path: str, args: OPSDConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer at the path or model id that a teacher will be loaded from, or `None` if there is none."""
    options = location(args)
    if not has_tokenizer(path, {name: value for name, value in options.items() if name != "trust_remote_code"}):
        logger.warning(f"{path} has no tokenizer; the student's is assumed.")
        return None
    code = naming_trust(f"The tokenizer of the teacher ({path})", "teacher_trust_remote_code", tokenizer_of=path)
    with nullcontext() if options.get("trust_remote_code") else code:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, **options)
    return tokenizer


def _source(teacher: Any) -> str | None:
    """The path or model id that a teacher object was loaded from, if known."""
    model = teacher.model if isinstance(teacher, FrozenTeacher) else teacher
    return get_config_model_id(without_peft(model).config) if isinstance(model, nn.Module) else None


def _tokenizer_kept(source: str, name: str, args: OPSDConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer that a loaded teacher was saved with, if it can be loaded without the network."""
    here = {"local_files_only": True}
    try:
        found = has_tokenizer(source, here)
    except (OSError, ValueError):  # neither a folder nor the form of a model id
        found = False
    if not found:
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, trust_remote_code=args.teacher_trust_remote_code, **here
        )
    except (OSError, ValueError) as error:
        logger.warning(
            f"The {name} was loaded from {source}, and its tokenizer is not compared with the student's, since it "
            f"cannot be read ({str(error).splitlines()[0]}): pass it as `teacher_processing_class`."
        )
        return None
    return tokenizer
