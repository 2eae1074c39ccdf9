"""Images of dataset rows: from columns into the messages of a prompt, and from there through a model's processor."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from copy import copy
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any

from torch import Tensor
from transformers import ProcessorMixin

from trl_opsd.types.rollout import PromptIds, RowImages

IMAGE_COLUMNS = ("image", "images")
"""Columns with the images of a prompt, one or several, named as in TRL."""
TEACHER_IMAGE_COLUMNS = ("teacher_image", "teacher_images")
"""Columns with what a teacher sees in their place."""


def images_in(row: Mapping[str, Any], columns: tuple[str, str], where: str) -> list[Any] | None:
    """The images of a row in the columns for one and for several; `None` where there is no value."""
    one, several = (row.get(name) for name in columns)
    if one is not None and several:
        raise ValueError(f"{where} has images in both columns, {columns[0]!r} and {columns[1]!r}: remove one of them.")
    if several and (missing := sum(each is None for each in several)):
        if missing < len(several):
            raise ValueError(
                f"{where}: {missing} of {len(several)} in the column {columns[1]!r} are None: add them, or remove them."
            )
        return None
    return [one] if one is not None else None if several is None else list(several)


def places(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The parts of messages that stand for an image, in order."""
    contents = [one["content"] for one in messages if isinstance(one.get("content"), list)]
    return [part for content in contents for part in content if part.get("type") == "image"]


def free(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the parts for images that do not hold one."""
    return [part for part in parts if part.get("image") is None]


def filled(
    messages: list[dict[str, Any]], images: Sequence[Any] | None, where: str, replace: bool = False
) -> list[dict[str, Any]]:
    """Messages with images in their places; without places all of them precede the text of the first user message.

    As TRL's `prepare_multimodal_messages`; with `replace` also in places that have an image.
    """
    parted = [in_parts(one) for one in messages]
    if images and not places(parted):
        if not (users := [one for one in parted if one["role"] == "user"]):
            raise ValueError(f"{where} has images, but no user message that could show them: add one.")
        users[0]["content"] = [*({"type": "image"} for _ in images), *users[0]["content"]]
    if not (found := places(parted)):
        return messages
    empty = found if replace and images is not None else free(found)
    if len(empty) != len(images or ()):
        raise ValueError(
            f"{where} has {len(images or ())} images for {len(empty)} places: expected one part {{'type': 'image'}} in "
            "its messages for each, or none at all, so that all precede the text of the first user message."
        )
    for part, image in zip(empty, images or (), strict=True):
        part["image"] = image
    return parted


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A copy whose content is a list of parts, without the empty fields that a column of a dataset gives all parts."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    parts = [{name: value for name, value in part.items() if value is not None} for part in content or ()]
    return {**message, "content": parts}


# ---- What rows, student and teachers need of an image, made once -----------------------------------------------------


class Pictures:
    """What was made of the pictures of a generation batch of training and of the next, or of one of an evaluation.

    Args:
        pins (`bool`, *optional*, defaults to `False`):
            Whether tensors are pinned, so that copies to a device do not wait.
    """

    def __init__(self, pins: bool = False) -> None:
        self.pins, self._batch, self._lock, self._keeps = pins, 0, Lock(), False
        self._made: dict[Hashable, tuple[int, Future[Any]]] = {}
        """The latest batch that needs it, and what was made or is being made."""
        self.options: dict[str, dict[str, Any]] = {}
        """With which a processor calls its image processor, by the settings of the latter."""

    def begin(self, is_training: bool) -> None:
        """Begins a batch, and drops what was not made ahead for it."""
        with self._lock:
            self._made = {key: one for key, one in self._made.items() if one[0] > self._batch}
            self._batch, self._keeps = self._batch + is_training, True

    def clear(self) -> None:
        """Drops everything, and keeps nothing until the next batch: not what checks of a dataset read."""
        with self._lock:
            self._made, self._keeps = {}, False

    def made(self, key: Hashable, make: Callable[[], Any], ahead: bool = False) -> Any:
        """What `make` returns, or raises; called once for a key, and waited for if another thread does."""
        with self._lock:
            is_new = key not in self._made
            batch, value = self._made.get(key, (0, Future[Any]()))
            if self._keeps:
                self._made[key] = max(batch, self._batch + ahead), value
        if is_new:
            try:
                value.set_result(make())
            except BaseException as error:
                value.set_exception(error)
        return value.result()


class Processing:
    """An image processor that processes the pictures of a row once."""

    def __init__(self, inner: Any, pictures: Pictures, ahead: bool = False) -> None:
        self._inner, self._pictures, self._ahead = inner, pictures, ahead
        self._settings = f"{type(inner).__name__} {inner.to_json_string()}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, images: list[list[Any]], **options: Any) -> Any:
        self._pictures.options[self._settings] = options

        def make() -> Any:
            found = self._inner(images, **options)
            if self._pictures.pins:
                found.update({name: one.pin_memory() for name, one in found.items() if isinstance(one, Tensor)})
            return images, found  # the pictures too: another object could get the id of one that is gone

        key = self._settings, repr(options), *(tuple(map(id, row)) for row in images)
        return copy(self._pictures.made(key, make, self._ahead)[1])

    def begin(self, images: list[Any]) -> None:
        """Processes the pictures of a row with the options of those before."""
        if (options := self._pictures.options.get(self._settings)) is not None:
            self([images], **options)


# ---- Through a processor ---------------------------------------------------------------------------------------------


@contextmanager
def naming(number: int) -> Iterator[None]:
    """Raises `ValueError` with the number of an image for whatever a decoder or a processor has against it."""
    try:
        yield
    except Exception as error:
        what = str(error).rstrip(".") or type(error).__name__
        raise ValueError(f"image {number} cannot be read: {what}. Replace it, or remove the row.") from error


def opened(image: Any) -> Any:
    """An image as PIL has it, upright and in RGB; raises whatever is wrong with it."""
    from PIL import ImageOps  # only who reads images needs it

    found = _undecoded(image)
    upright = ImageOps.exif_transpose(found).convert("RGB")
    if found is not image:
        found.close()  # else the file of an animation stays open
    return upright


def size_of(image: Any) -> tuple[int, int]:
    """Height and width of an image once it is upright, from the header of its file."""
    found = _undecoded(image)
    # EXIF rotates by a quarter from 5 on; of a PNG that keeps it behind its pixels, it would decode them.
    is_turned = "exif" in found.info and found.getexif().get(_ORIENTATION, 1) >= 5
    if found is not image:
        found.close()
    return (found.width, found.height) if is_turned else (found.height, found.width)


_ORIENTATION = 0x0112
"""The EXIF tag."""


def _undecoded(image: Any) -> Any:
    """An image as PIL has it; of a file only the header is read."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(image, Mapping):  # `datasets.Image`, as it is stored
        image = image.get("path") if image.get("bytes") is None else image["bytes"]
    if isinstance(image, str | Path) and not os.path.isfile(image):
        raise FileNotFoundError(f"there is no file {str(image)[:80]!r}")
    try:
        if isinstance(image, str | Path | bytes):
            image = Image.open(BytesIO(image) if isinstance(image, bytes) else image)
    except UnidentifiedImageError as error:
        raise ValueError("it is no image file") from error
    found = image if isinstance(image, Image.Image) else Image.fromarray(image)
    if found.mode.startswith(("I", "F")):
        raise ValueError(f"its mode is {found.mode!r}, and RGB would clip it: convert it to 8 bits per channel")
    return found


def tokens_of(processor: Any, sizes: Sequence[tuple[int, int]]) -> int | None:
    """Tokens of images of these sizes (height, width); `None` if the processor does not say."""
    count = getattr(processor, "_get_num_multimodal_tokens", None)  # transformers' own, used by vLLM
    try:
        return None if count is None else sum(count(image_sizes=[list(size) for size in sizes])["num_image_tokens"])
    except (AttributeError, KeyError, TypeError):  # LLaVA's image processor needs a crop size, and SigLIP's has none
        return None


def tokens_in(processor: Any, messages: Sequence[Mapping[str, Any]]) -> int | None:
    """Tokens of the images in messages, by the headers of their files; `None` if the processor does not say."""
    found = []
    for number, part in enumerate(places(messages)):
        with naming(number):
            found.append(tokens_of(processor, [size_of(part["image"])]))
    counts = [one for one in found if one is not None]
    return sum(counts) if len(counts) == len(found) else None


def settings_of(processor: ProcessorMixin | None) -> dict[str, Any] | None:
    """All that decides what a processor makes of a prompt with images, but for its tokenizer."""
    if processor is None:
        return None
    named = {name: value for name, value in processor.to_dict().items() if not name.endswith("name_or_path")}
    return {**named, "class": type(processor).__name__, "chat_template": processor.chat_template}


def typed_placeholder(messages: Sequence[Mapping[str, Any]], marks: Collection[str]) -> str | None:
    """A placeholder of images in the text of messages, where it would be taken for one."""
    contents = [one.get("content") for one in messages]
    texts = [each if isinstance(each, str) else " ".join(p.get("text") or "" for p in each or ()) for each in contents]
    return next((mark for mark in marks if any(mark in text for text in texts)), None)


def _opened_once(image: Any, pictures: Pictures, ahead: bool = False) -> Any:
    """An image as [`opened`], once for each object, path or file in memory."""
    stored = (image.get("bytes") or image.get("path")) if isinstance(image, Mapping) else image
    key = stored if isinstance(stored, str | bytes | Path) else id(image)
    return pictures.made(key, lambda: (image, opened(image)), ahead)[1]


def begin_reading(processor: ProcessorMixin, images: Sequence[Any], pictures: Pictures, ahead: bool) -> None:
    """Opens the images of a row and has them processed, so that [`read_with_images`] finds them done."""
    found = [_opened_once(one, pictures, ahead) for one in images]
    Processing(processor.image_processor, pictures, ahead).begin(found)


def read_with_images(
    processor: ProcessorMixin, messages: list[dict[str, Any]], pictures: Pictures | None = None, **template: Any
) -> PromptIds:
    """The token ids of messages with images, as the processor makes them for this row alone.

    Raises:
        ValueError: The processor or the decoder refuses an image, or the ids.
    """
    pictures, originals = pictures or Pictures(), []
    for number, part in enumerate(places(messages)):
        with naming(number):
            originals.append(_opened_once(part["image"], pictures))
    processor = copy(processor)
    processor.image_processor = Processing(processor.image_processor, pictures)
    images = iter(originals)
    messages = [
        {**one, "content": [{**part, "image": next(images)} if part["type"] == "image" else part for part in content]}
        if isinstance(content := one.get("content"), list)
        else one
        for one in messages
    ]
    template = {"add_generation_prompt": True, **template}
    try:
        made = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt", **template)
        text = processor.apply_chat_template(messages, tokenize=False, **template)
    except Exception as error:
        for number, one in enumerate(originals):
            with naming(number):  # it may be the size of one
                tokens_of(processor, [(one.height, one.width)])
        raise ValueError(f"its processor rejects it: {type(error).__name__}: {error}") from error
    ids = made.pop("input_ids")
    made.pop("attention_mask", None)
    kinds = {name: value[0] for name, value in made.items() if value.shape == ids.shape}
    values = {name: value for name, value in made.items() if name not in kinds}
    # As `apply_chat_template` does: a start token that the template writes is not added again.
    bos = processor.tokenizer.bos_token
    unexpanded = processor.tokenizer(text, add_special_tokens=bos is None or not text.startswith(bos))["input_ids"]
    positions = _positions(processor, values)
    return PromptIds(ids[0].tolist(), RowImages(values, kinds, tuple(originals), positions, tuple(unexpanded)))


def probe_prompts(read: Callable[[list[dict[str, Any]]], PromptIds]) -> list[PromptIds]:
    """Prompts to examine a model with: one image, another of the same size, and two; none of them is a user's."""
    from PIL import Image

    down = Image.linear_gradient("L").resize((96, 64))
    of_each = [[down], [down.rotate(180)], [down.resize((64, 48)), down]]
    text = {"type": "text", "text": "?"}
    return [
        read([{"role": "user", "content": [*({"type": "image", "image": one} for one in images), text]}])
        for images in of_each
    ]


def _positions(processor: ProcessorMixin, values: Mapping[str, Any]) -> int:
    """Patches of all images, of 14 pixels where the processor does not say: what the vision tower reads."""
    tower = processor.image_processor
    side = getattr(tower, "patch_size", None) or getattr(processor, "patch_size", None) or 14
    side = side.get("height", 14) if isinstance(side, Mapping) else side
    return values["pixel_values"].numel() // (3 * side * side * (getattr(tower, "temporal_patch_size", None) or 1))
