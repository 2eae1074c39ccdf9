"""Digits in pictures: what is drawn and who sees what of it, grading, the processor, and that the student learns."""

from __future__ import annotations

import json

import numpy
import pytest
import torch
from pictures import train
from pictures.student import batches, encoded, make_processor
from pictures.task import CELL, Scene, draw_scenes, right, rows
from transformers import AutoModelForImageTextToText, AutoProcessor


def test_only_the_crop_shows_the_digit():
    for scene in draw_scenes(50):
        pixels = numpy.asarray(scene.whole).mean(-1)
        x, y = scene.corner
        inside = numpy.asarray(scene.crop).mean(-1)
        assert (inside == pixels[y : y + CELL, x : x + CELL]).all()
        assert (inside < 80).sum() > 15
        pixels[y : y + CELL, x : x + CELL] = 255
        assert pixels.min() > 80
        assert (numpy.asarray(scene.whole) == numpy.asarray(Scene(scene.seed).whole)).all()


def test_only_the_teacher_sees_the_crop():
    scene = Scene(7)
    ((whole, crop),) = ((row["images"], row["teacher_images"]) for row in rows([scene], to_teacher="crop"))
    assert [image.tobytes() for image in (*whole, *crop)] == [scene.whole.tobytes(), scene.crop.tobytes()]
    assert set(rows([scene], "crop").column_names) == {"prompt", "images", "answer"}


def test_completions_are_graded_by_the_digit():
    said = [[{"role": "assistant", "content": text}] for text in ("2", "3", "22", "")]
    assert right(said, answer=["2"] * 4, prompts=None) == [1.0, 0.0, 0.0, 0.0]


def test_labels_are_digit_and_end_some_pixels_are_whole():
    processor, scenes = make_processor(), draw_scenes(3)
    crops, wholes = (encoded(processor, scenes, shown)["pixel_values"] for shown in ("crop", "whole"))
    for share, shown in ((0.0, crops), (1.0, wholes)):
        batch = next(batches(processor, scenes, share))
        learned = [processor.tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]]
        places = [[torch.equal(one, each) for each in shown].index(True) for one in batch["pixel_values"]]
        assert learned == [f"{scenes[place].answer}<|end|>" for place in places]
        assert processor.tokenizer.pad_token_id not in batch["input_ids"], "all words are known"


def test_two_steps_teach_only_who_sees_less(tmp_path, capsys):
    few = ["--output", str(tmp_path), "--student-steps", "2", "--steps", "2", "--held-out", "8"]
    crop, same = "student-0", "teacher-same-image-3"
    for options, name in ([], crop), (["--writer", "teacher", "--same-image", "--seed", "3"], same):
        found = train.main([*few, *options])
        assert json.loads((tmp_path / name / "metrics.json").read_text()) == found
        assert set(found) == {"whole_before", "whole_after", "crop_before", "crop_after", "seconds", "peak_gb"}
        assert f"crop_after    {found['crop_after']:.3f}\n" in capsys.readouterr().out
        assert AutoProcessor.from_pretrained(tmp_path / name).chat_template
    start, taught, untaught = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / name).lm_head.weight for name in ("student", crop, same)
    )
    assert not torch.equal(taught, start)
    assert torch.equal(untaught, start), "and the student that was made at first was loaded again"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_crop_teaches_the_student_to_read_whole_pictures(tmp_path):
    found = train.main(["--output", str(tmp_path)])
    assert found["whole_before"] < 0.7
    assert found["crop_before"] > 0.95
    assert found["whole_after"] > 0.9
    alone = train.main(["--output", str(tmp_path), "--same-image", "--steps", "20"])
    assert abs(alone["whole_after"] - alone["whole_before"]) < 0.1
