"""Losses and gradients are those of TRL's SDPO and SDFT trainers on the same completions, with what the tables of
`docs/migration.md` name.

Both divide by the tokens of each row and then by all rows, SDPO also by those without a teacher's prompt. So their own
loss is ours with `loss_aggregation="rows"`, times `gate/mean`. Elsewhere each of TRL's rows is weighted so that every
token that has a teacher counts the same.
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

    is_by_token = False
    """Whether every token with a teacher counts the same, in place of TRL's own mean."""

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
        if self.is_by_token:
            whole, masks = self.batches[-1], ("completion_mask", "self_distillation_mask")
            mine, of_all = ((one[masks[0]] * one[masks[1]][:, None]).sum() for one in (inputs, whole))
            loss = loss * self.current_gradient_accumulation_steps * mine / of_all
        self.losses.append(loss.item())
        return loss


class Replaying(RolloutBackend):
    def bind(self, trainer):
        self.words = trainer.processing_class

    def complete(self, prompt_ids, step):
        texts = [self.words.decode(ids).split("user\n")[1].split(END)[0] for ids in prompt_ids]
        return self.words([text for text, _ in written(texts)])["input_ids"]


@pytest.mark.parametrize(
    ("mine", "theirs", "texts"),
    [
        ({"divergence": "reverse_kl"}, {"distillation_alpha": 1.0}, FOUR),
        ({"divergence": "forward_kl"}, {"distillation_alpha": 0.0}, FOUR),
        ({"divergence": "jsd", "beta": 0.3}, {"distillation_alpha": 0.3}, FOUR),
        ({"divergence": "reverse_kl", "teacher_model_kind": "ema"}, {"teacher_model_kind": "ema"}, FOUR),
        ({"divergence": "reverse_kl"}, {}, EVEN),
        ({"divergence": "reverse_kl", "loss_aggregation": "rows"}, {}, RAGGED),
        ({"divergence": "reverse_kl", "loss_aggregation": "rows"}, {}, FOUR),
    ],
    ids=["reverse KL", "forward KL", "JSD", "EMA", "one length", "rows", "rows without a teacher"],
)
def test_a_group_that_succeeds_teaches_as_in_trl(trained, tmp_path, mine, theirs, texts):
    tiny.save_pair(tmp_path)
    student = str(tmp_path / "student")
    args = SDPOConfig(
        **tiny.options(tmp_path, **OPTIONS, per_device_train_batch_size=1, gradient_accumulation_steps=ROWS),
        **{"teacher_model_kind": "live", "teacher_update_rate": 0.25, **theirs},
        distillation_mode="full_logits", distillation_is_clip=None, max_prompt_length=None,
        diagnostics_warning_interval=0,
    )  # fmt: skip
    of_trl = Gradients()
    given = {"train_dataset": prompts(texts), "processing_class": tiny.tokenizer(), "reward_funcs": reward}
    by_rows = "loss_aggregation" in mine
    trls = type("", (TRLs, SDPOTrainer), {"is_by_token": texts is FOUR and not by_rows})(
        model=student, args=args, callbacks=[of_trl], **given
    )
    trls.train()
    solved = SOLVED if texts is FOUR else [[1] * ROWS] * 2
    assert [batch["self_distillation_mask"].int().tolist() for batch in trls.batches] == solved

    gates: list[list[float]] = []

    class Ours(OPSDTrainer):
        def teach(self, rollout, rows):
            found = super().teach(rollout, rows)
            gates.append([row.gate for row in rows])
            return found

    template = "{prompt}" + args.solution_template.replace("successful_previous_attempt", "privileged_context")
    template += args.reprompt_template.removeprefix("{prompt}{solution}{feedback}")
    of_ours = Gradients()
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **OPTIONS}
    ours = trained(
        Ours, model=student, teacher_model=None, rollout=Replaying(), callbacks=[of_ours], **given, **options,
        **{"teacher_model_kind": "live", **({"teacher_update_rate": 0.25} if "ema" in mine.values() else {}), **mine},
        teacher_context="group_success", teacher_prompt_template=template,
    )  # fmt: skip
    assert gates == solved
    logs = [entry for entry in ours.state.log_history if "loss" in entry]
    assert [entry["gate/mean"] for entry in logs] == [sum(step) / ROWS for step in solved]
    for step, entry in enumerate(logs):
        expected = sum(trls.losses[ROWS * step : ROWS * (step + 1)])
        share = entry["gate/mean"] if by_rows else 1
        assert share * entry["loss"] == pytest.approx(expected, abs=2e-7)
        gap = (share * of_ours.found[step] - of_trl.found[step]).norm() / of_trl.found[step].norm()
        assert gap < 1e-5
        if share < 1:  # from here on the weights differ
            break


@pytest.mark.parametrize("alpha", [0.5, 0.0, 1.0])
def test_sdft_is_the_loss_by_rows(trained, tmp_path, alpha):
    """With TRL's default template; and by tokens it is another loss."""
    tiny.save_pair(tmp_path)
    student = str(tmp_path / "student")
    rows = prompts(FOUR).add_column("privileged_context", ["it is 4", "two", "for no reason, or many", "look up"])
    given = {"train_dataset": rows, "processing_class": tiny.tokenizer()}
    args = SDFTConfig(
        **tiny.options(tmp_path, **OPTIONS, per_device_train_batch_size=2, gradient_accumulation_steps=4),
        distillation_alpha=alpha, distillation_mode="full_logits",
    )  # fmt: skip
    of_trl = Gradients()
    trls = type("", (TRLs, SDFTTrainer), {})(model=student, args=args, callbacks=[of_trl], **given)
    trls.train()
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **OPTIONS, "beta": alpha}
    options |= {"model": student, "teacher_model": None, "teacher_model_kind": "base", **given}
    expected = [sum(trls.losses[4 * step : 4 * (step + 1)]) for step in range(2)]
    found = {}
    for aggregation in ("rows", "tokens"):
        of_ours = Gradients()
        how = {"rollout": Replaying(), "callbacks": [of_ours], "loss_aggregation": aggregation}
        ours = trained(**options, **how)
        found[aggregation] = [entry["loss"] for entry in ours.state.log_history if "loss" in entry]
        gaps = [(mine - other).norm() / other.norm() for mine, other in zip(of_ours.found, of_trl.found, strict=True)]
        assert (max(gaps) < 1e-5) == (aggregation == "rows")
    assert found["rows"] == pytest.approx(expected, abs=1e-6)
    assert found["tokens"] != pytest.approx(expected, rel=0.1)
