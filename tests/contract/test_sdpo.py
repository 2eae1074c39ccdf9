"""Losses and gradients are those of TRL's SDPO and SDFT trainers on the same completions, with what the tables of
`docs/migration.md` name.

Both divide by the tokens of each row and then by all rows, SDPO also by those without a teacher's prompt. So their loss
is ours with `loss_aggregation="rows"`, times `gate/mean`; where all rows have one length, ours by tokens, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from datasets import Dataset
from support import tiny
from transformers import TrainerCallback
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

from trl_opsd import OPSDTrainer, RolloutBackend

END, ROWS = "<|im_end|>", 8
GROUPS = {
    "2+2=": [("5" + END, 0.0), ("4" + END, 1.0), ("four" + END, 1.5), ("22", 0.9)],
    "1+1=": [("3" + END, 0.0), ("two, I think" + END, 0.2), ("2" + END, 1.0), ("11", -1.0)],
    "why?": [("so." + END, 0.0), ("no" + END, 0.0), ("eh", 0.5), ("because" + END, 0.9)],
    "sky?": [("blue" + END, 2.0), ("blue too" + END, 1.0), ("red", 0.0), ("up" + END, 0.0)],
    "one?": [("I" + END, 1.0), ("i" + END, 1.0), ("l" + END, 0.0), ("|" + END, 0.0)],
    "two?": [("Z" + END, 0.0), ("z" + END, 1.0), ("s" + END, 0.0), ("S" + END, 1.0)],
}
"""Of a prompt, four completions and their rewards: several solve it, one, none, two; two in two of one length."""
FOUR, RAGGED, EVEN = list(GROUPS)[:4], ["2+2=", "sky?"], ["one?", "two?"]
"""Of the last two every row has a teacher, as each prompt was solved twice."""
SOLVED = [[1, 1, 1, 1, 1, 1, 0, 1], [0, 0, 0, 0, 1, 1, 1, 1]]
"""Of the rows of each step, those whose prompt another completion has solved."""
OPTIONS = {
    "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "max_steps": 2,
    "num_generations": 4, "shuffle_dataset": False, "max_completion_length": 24, "logging_steps": 1,
}  # fmt: skip


def prompts(texts: Iterable[str]) -> Dataset:
    system = {"role": "system", "content": "Be brief."}
    return Dataset.from_dict({"prompt": [[system, {"role": "user", "content": text}] for text in texts]})


def written(texts: list[str]) -> list[tuple[str, float]]:
    """The completions of prompts, those of one after the other."""
    seen: dict[str, int] = {}
    found = []
    for text in texts:
        seen[text] = seen.get(text, -1) + 1
        found.append(GROUPS[text][seen[text]])
    return found


def reward(completions: list[Any], **_: Any) -> list[float]:
    known = {text.removesuffix(END): value for group in GROUPS.values() for text, value in group}
    return [known[one[0]["content"]] for one in completions]


class Gradients(TrainerCallback):
    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.found.append(torch.cat([one.grad.flatten().clone() for one in model.parameters()]))


class TRLs:
    """TRL's trainers with these completions."""

    def __init__(self, *args: Any, **given: Any) -> None:
        self.batches: list[Any] = []
        self.losses: list[float] = []
        super().__init__(*args, **given)

    def sample_rollouts(self, inputs):
        self._written = written([row["prompt"][-1]["content"] for row in inputs])
        return super().sample_rollouts(inputs)

    def _generate(self, prompt_ids):
        return prompt_ids, [self.processing_class(text)["input_ids"] for text, _ in self._written]

    def _prepare_training_batch(self, inputs):
        self.batches.append(super()._prepare_training_batch(inputs))
        return self.batches[-1]

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.losses.append(loss.item())
        return loss


class Replaying(RolloutBackend):
    def bind(self, trainer):
        self.words = trainer.processing_class

    def complete(self, prompt_ids, step):
        texts = [self.words.decode(ids).split("user\n")[1].split(END)[0] for ids in prompt_ids]
        return self.words([text for text, _ in written(texts)])["input_ids"]


EMA = {"teacher_model_kind": "ema", "teacher_update_rate": 0.25}
BY_ROWS = {"loss_aggregation": "rows"}


def gaps(mine: Gradients, theirs: Gradients, shares: Iterable[float]) -> list[float]:
    """Of each step, how far a share of our gradient is from TRL's."""
    steps = zip(mine.found, theirs.found, shares, strict=True)
    return [float((share * one - other).norm() / other.norm()) for one, other, share in steps]


@pytest.mark.parametrize(
    ("mine", "theirs", "texts"),
    [
        ({"divergence": "reverse_kl", **BY_ROWS}, {"distillation_alpha": 1.0}, FOUR),
        ({"divergence": "forward_kl", **BY_ROWS}, {"distillation_alpha": 0.0}, FOUR),
        ({"divergence": "jsd", "beta": 0.3, **BY_ROWS}, {"distillation_alpha": 0.3}, FOUR),
        ({"divergence": "reverse_kl", **EMA, **BY_ROWS}, EMA, RAGGED),
        ({"divergence": "reverse_kl"}, {}, EVEN),
    ],
    ids=["reverse KL", "forward KL", "JSD", "EMA", "one length"],
)
def test_a_group_that_succeeds_teaches_as_in_trl(trained, tmp_path, mine, theirs, texts):
    tiny.save_pair(tmp_path)
    student, gates = str(tmp_path / "student"), []
    given = {"train_dataset": prompts(texts), "processing_class": tiny.tokenizer(), "reward_funcs": reward}
    args = SDPOConfig(
        **tiny.options(tmp_path, **OPTIONS, per_device_train_batch_size=1, gradient_accumulation_steps=ROWS),
        **{"teacher_model_kind": "live", **theirs},
        distillation_mode="full_logits", distillation_is_clip=None, max_prompt_length=None,
        diagnostics_warning_interval=0,
    )  # fmt: skip
    trls = type("", (TRLs, SDPOTrainer), {})(model=student, args=args, callbacks=[of_trl := Gradients()], **given)
    trls.train()
    solved = SOLVED if texts is FOUR else [[1] * ROWS] * 2
    assert [batch["self_distillation_mask"].int().tolist() for batch in trls.batches] == solved

    class Ours(OPSDTrainer):
        def teach(self, rollout, rows):
            found = super().teach(rollout, rows)
            gates.append([row.gate for row in rows])
            return found

    template = "{prompt}" + args.solution_template.replace("successful_previous_attempt", "privileged_context")
    template += args.reprompt_template.removeprefix("{prompt}{solution}{feedback}")
    ours = trained(
        Ours, model=student, teacher_model=None, rollout=Replaying(), callbacks=[of_ours := Gradients()], **given,
        **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "teacher_model_kind": "live", **mine},
        **OPTIONS, teacher_context="group_success", teacher_prompt_template=template,
    )  # fmt: skip
    assert gates == solved
    shares = tiny.logged(ours, "gate/mean")
    assert shares == [sum(step) / ROWS for step in solved]
    same = 1 if shares[0] < 1 else 2  # after a step with a share the weights differ
    expected = [sum(trls.losses[ROWS * step : ROWS * (step + 1)]) for step in range(same)]
    found = [share * one for share, one in zip(shares, tiny.logged(ours, "loss"), strict=True)]
    assert found[:same] == pytest.approx(expected, abs=2e-7)
    assert max(gaps(of_ours, of_trl, shares)[:same]) < 1e-5


@pytest.mark.parametrize("alpha", [0.5, 0.0, 1.0])
def test_sdft_is_the_loss_by_rows(trained, tmp_path, alpha):
    """With TRL's default template; and by tokens it is another loss."""
    tiny.save_pair(tmp_path)
    rows = prompts(FOUR).add_column("privileged_context", ["it is 4", "two", "for no reason, or many", "look up"])
    given = {"model": str(tmp_path / "student"), "train_dataset": rows, "processing_class": tiny.tokenizer()}
    args = SDFTConfig(
        **tiny.options(tmp_path, **OPTIONS, per_device_train_batch_size=2, gradient_accumulation_steps=4),
        distillation_alpha=alpha, distillation_mode="full_logits",
    )  # fmt: skip
    trls = type("", (TRLs, SDFTTrainer), {})(args=args, callbacks=[of_trl := Gradients()], **given)
    trls.train()
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **OPTIONS, "beta": alpha}
    options |= {"teacher_model": None, "teacher_model_kind": "base", "rollout": Replaying(), **given}
    ours = trained(**options, **BY_ROWS, callbacks=[of_ours := Gradients()])
    expected = [sum(trls.losses[4 * step : 4 * (step + 1)]) for step in range(2)]
    assert tiny.logged(ours, "loss") == pytest.approx(expected, abs=1e-6)
    assert max(gaps(of_ours, of_trl, [1, 1])) < 1e-5
    by_tokens = trained(**{**options, "rollout": Replaying()})
    assert tiny.logged(by_tokens, "loss") != pytest.approx(expected, rel=0.1)
