"""Rows whose images no model can be shown, and arguments with which nobody could read them."""

from __future__ import annotations

from typing import Any

from cases import Case, Lab
from datasets import Dataset
from support import tiny, vision_language

from trl_opsd import FixedRollout

TEXT = [{"role": "user", "content": "hi"}]
SIZES = {"model": 32, "teacher_model": 48}
ONE = {"prompt": TEXT, "image": "a.png"}


class Blind(FixedRollout):
    """A rollout of the user's own that reads token ids only."""

    reads_images = False


def parts(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": one} if isinstance(one, str) else one for one in content]}]


def shown(
    name: str,
    message: str,
    row: dict[str, Any],
    error: type[Exception] = ValueError,
    first: Any = TEXT,
    blind: str | None = None,
    **given: Any,
) -> Case:
    """The second of two rows is refused, before loading, by a trainer whose models see; `first` is text."""

    def provoke(lab: Lab) -> None:
        models = {}
        for role, width in SIZES.items():
            if role != blind:
                one = vision_language.model("gemma3", width, 0, sees=True)
                one.config.architectures = [type(one).__name__]
                one.config.save_pretrained(lab.folder / role)
                models[role] = str(lab.folder / role)
        data = Dataset.from_list([dict.fromkeys(row) | {"prompt": first}, row])
        seeing = {"processing_class": vision_language.processor("gemma3"), "train_dataset": data}
        lab.make(**{**models, **seeing, **given})

    return Case("images", name, message, provoke, error, before_loading=True)


PLACES = "images for {} places: expected one part {{'type': 'image'}} in its messages for each, or none at all"
SENDS = {"type": "image", "image": "a.png"}

CASES: list[Case] = [
    shown(
        "a tokenizer",
        "The prompt in row 1 of train_dataset has images, but `processing_class` is a tokenizer: pass the student",
        ONE,
        processing_class=tiny.tokenizer(),
    ),
    shown(
        "a text teacher without a caption",
        "The teacher's prompt in row 1 .* but the teacher reads text only: pass its processor .* 'teacher_prompt'",
        ONE,
        blind="teacher_model",
    ),
    shown(
        "a teacher behind a server",
        "The teacher's prompt in row 1 .* but the teacher reads text only",
        ONE,
        teacher_server_url="http://127.0.0.1:1",
    ),
    *(
        shown(
            kind,
            rf"row 1 .* message 0 has parts of type \['{kind}'\]: expected 'text' or 'image'",
            row,
            first=parts({"type": "text", "text": "hi"}),
        )
        for kind in ("video", "audio", "image_url")
        for row in [{"prompt": parts({"type": kind, kind: "a"})}]
    ),
    *(
        shown(
            name,
            f"{whose} in row 1 of train_dataset has {number} {PLACES.format(free)}",
            row,
            first=parts({"type": "text", "text": "hi"}),
        )
        for name, whose, number, free, row in [
            ("too few", "The prompt", 1, 2, {"prompt": parts("image", "image"), "images": ["a.png"]}),
            ("too many", "The prompt", 2, 1, {"prompt": parts("image"), "images": ["a.png"] * 2}),
            ("no place left", "The prompt", 1, 0, {"prompt": parts(SENDS), "images": ["a.png"]}),
            (
                "too many for the teacher",
                "The teacher's prompt",
                2,
                1,
                {"prompt": parts("image"), "images": ["a.png"], "teacher_images": ["a.png"] * 2},
            ),
        ]
    ),
    *(
        shown(
            f"both columns, {name}",
            f"row 1 of train_dataset has images in both columns, '{name}' and '{name}s'",
            {
                "prompt": TEXT,
                name: "a.png",
                f"{name}s": ["a.png"],
            },
        )
        for name in ("image", "teacher_image")
    ),
    shown(
        "some None in a list",
        "row 1 of train_dataset: 1 of 2 in the column 'images' are None: add them, or remove them",
        {"prompt": TEXT, "images": ["a.png", None]},
    ),
    shown("padding_free", "`padding_free=True` with images", ONE, padding_free=True),
    shown(
        "a rollout of one's own",
        r"The rollout \(Blind\) with images",
        ONE,
        rollout=Blind({}),
    ),
    shown(
        "text",
        r"The prompt in row 1 of train_dataset is text, but the row has images, which belong to a message: give",
        {"prompt": "a", "image": "a.png"},
        first="hi",
    ),
    shown(
        "no user message",
        "The prompt in row 1 of train_dataset has images, but no user message that could show them: add one",
        {"prompt": [{"role": "system", "content": "a"}], "image": "a.png"},
    ),
    *(
        shown(
            f"misspelt, {name}",
            f"train_dataset has an unknown column '{name}'; did you mean '{meant}'",
            {
                "prompt": TEXT,
                name: ["a.png"],
            },
        )
        for name, meant in [
            ("Images", "images"),
            ("imagess", "images"),
            ("Image", "image"),
            ("teacher_imgs", "teacher_images"),
            ("teacher_imagess", "teacher_images"),
            ("teacher_img", "teacher_image"),
        ]
    ),
]
