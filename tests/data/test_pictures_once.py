"""A picture is read once a step for all that need it, ahead of its step, and never instead of another."""

from __future__ import annotations

import io
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset, Value
from datasets import Image as ImageFeature
from support import vision_language
from support.rollouts import Answering
from support.vision_language import answer, picture
from transformers import TrainerCallback

from trl_opsd.data.images import Pictures, read_with_images
from trl_opsd.loop import batch


@contextmanager
def noted(processor: Any) -> Iterator[list[tuple[int, tuple[Any, ...]]]]:
    """Patch size and first pixels of what image processors of this class are given."""
    kind, calls = type(processor.image_processor), []
    original = kind.__call__

    def called(inner: Any, images: Any, **options: Any) -> Any:
        calls.append((inner.patch_size, tuple(image.getpixel((0, 0)) for image in images[0])))
        return original(inner, images, **options)

    with patch.object(kind, "__call__", called):
        yield calls


class AtOnce:
    """In place of threads."""

    def __init__(self, *_: Any) -> None: ...

    def submit(self, task: Any) -> None:
        task()

    def shutdown(self, **_: Any) -> None: ...


class Counted(TrainerCallback):
    """How often an image processor was called in each step and each evaluation, and for one picture at most."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls, self.numbers, self.most = calls, [], 0

    def on_step_begin(self, *args: Any, **given: Any) -> None:
        self.calls.clear()

    def on_step_end(self, *args: Any, **given: Any) -> None:
        self.numbers.append(len(self.calls))
        self.most = max(self.most, *Counter(self.calls).values(), 0, 0)
        self.calls.clear()

    on_evaluate = on_step_end


def written(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def trained(trained):
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_generations": 2}
    options |= {"num_train_epochs": 2, "max_steps": -1, "eval_strategy": "steps", "eval_steps": 1, "optim": "sgd"}
    data = vision_language.rows([1, 2] * 4).add_column("privileged_context", [f"It is {row}." for row in range(8)])
    options |= {"train_dataset": data.select(range(6)), "eval_dataset": data.select([6, 7]), "learning_rate": 1e-2}
    options |= {"rollout": Answering(answer)}
    return lambda **given: trained(**{**vision_language.arguments("qwen2_5_vl"), **options, **given})


@pytest.mark.parametrize("unit", [16, pytest.param(32, marks=pytest.mark.long)])
def test_a_picture_is_processed_once_and_before_its_step(trained, unit):
    """For both rows of its prompt, and a teacher that reads more; for one with other settings once more."""
    theirs = vision_language.processor("qwen2_5_vl", unit)
    given = {"teacher_model": vision_language.model("qwen2_5_vl", 48, 1, sees=True, unit=unit)}
    with noted(theirs) as calls, patch.object(batch, "ThreadPoolExecutor", AtOnce):
        counted = Counted(calls)
        trained(callbacks=[counted], teacher_processing_class=theirs, **given)
    assert counted.most == 1
    # The first step of an epoch reads its own two prompts and the next two; its last, none. An evaluation has two.
    assert counted.numbers == [number * (unit // 16) for number in (4, 2, 2, 2, 0, 2) * 2]


def test_a_row_is_decoded_once_per_step(make_trainer):
    data, decode, decoded = vision_language.rows([1, 2] * 4), ImageFeature.decode_example, []
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 2}
    trainer = make_trainer(train_dataset=data, **vision_language.arguments("qwen2_5_vl"), **given)
    count = {"side_effect": lambda *args, **given: decoded.append(1) or decode(*args, **given), "autospec": True}
    with patch.object(ImageFeature, "decode_example", **count):
        once = list(data), len(decoded)
        batches = list(trainer.get_train_dataloader())
    assert [len(rows) for rows in batches] == [4] * 4
    assert len(decoded) == 2 * once[1]
    for rows in batches:
        assert [row["prompt"] for row in rows[::2]] == [row["prompt"] for row in rows[1::2]]
        for row in rows:
            (expected,) = [one for one in once[0] if one["prompt"] == row["prompt"]]
            assert row.keys() == expected.keys()
            assert row["images"] == expected["images"]
    batches[0][0]["images"] = None
    assert batches[0][1]["images"], "rows are apart"


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("column", "error"),
    [
        (Value("binary"), r"row 0 of the batch of step 3: image 0 cannot be read: image file is trunc"),
        (ImageFeature(), "trunc"),
    ],
)
def test_a_broken_image_is_an_error_of_its_own_step(make_trainer, column, error):
    files = [written(picture(seed)) for seed in range(3)]
    data = [{"prompt": [{"role": "user", "content": "?"}], "image": one} for one in (*files[:2], files[2][:3000])]
    given = {**vision_language.arguments("qwen2_5_vl"), "per_device_train_batch_size": 1, "shuffle_dataset": False}
    rows = Dataset.from_list(data).cast_column("image", column)
    trainer = make_trainer(train_dataset=rows, rollout=Answering(answer), **given)
    with pytest.raises((ValueError, OSError), match=error):
        trainer.train()
    assert trainer.state.global_step == 2


# ---- What is kept ----------------------------------------------------------------------------------------------------


def test_threads_wait_for_what_another_makes_and_get_its_error():
    pictures, calls = Pictures(), []
    pictures.begin(is_training=True)

    def make() -> int:
        calls.append(1)
        time.sleep(0.05)
        raise OSError("broken")

    with ThreadPoolExecutor() as pool:
        found = [pool.submit(pictures.made, "one", make) for _ in range(4)]
        assert [str(one.exception()) for one in found] == ["broken"] * 4
    assert len(calls) == 1


def test_what_was_made_ahead_outlives_an_evaluation_and_one_step():
    pictures, made = Pictures(), []

    def make(key: str) -> int:
        return pictures.made(key, lambda: len(made.append(key) or made), ahead=key == "next")

    pictures.begin(is_training=True)
    assert (make("now"), make("next"), make("now")) == (1, 2, 1)
    for _ in range(2):
        pictures.begin(is_training=False)
        make("evaluated")
    pictures.begin(is_training=True)
    assert pictures.made("next", lambda: 0) == 2
    assert pictures.made("now", lambda: 0) == 0
    pictures.begin(is_training=True)
    assert pictures.made("next", lambda: 0) == 0
    assert made == ["now", "next", "evaluated", "evaluated"]


def test_a_picture_that_is_gone_is_not_taken_for_another():
    """To which it may have given its id."""
    reader, pictures = vision_language.processor("qwen2_5_vl"), Pictures()
    pictures.begin(is_training=True)
    for seed in range(6):
        messages = [{"role": "user", "content": [{"type": "image", "image": picture(seed)}]}]
        expected = read_with_images(reader, messages).images.values["pixel_values"]
        assert torch.equal(read_with_images(reader, messages, pictures).images.values["pixel_values"], expected)
        del messages


def test_no_picture_is_kept_after_checks_or_training(make_trainer):
    """A dataset with a transform is read row by row when it is checked."""
    data = vision_language.rows([1, 2] * 4).with_transform(lambda batch: batch)
    trainer = make_trainer(
        train_dataset=data, **vision_language.arguments("qwen2_5_vl"), rollout=Answering(answer), max_steps=1
    )
    assert trainer.pictures._made == {}
    trainer.train()
    assert trainer.pictures._made == {}
    assert trainer.pictures.made("late", lambda: 1) == 1
    assert trainer.pictures._made == {}, "a thread that was not done when the training ended"
    assert trainer._generation.rows == ()
