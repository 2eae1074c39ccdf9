"""Odd pictures are read as the same picture in RGB, and broken ones are errors with the row and the image."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as PILImage
from support import vision_language
from support.vision_language import picture

from trl_opsd.data.images import opened, read_with_images, size_of

PICTURE = picture(0, 40, 56)
TURNED = PILImage.Exif()
TURNED[0x0112] = 6
MESSAGES = List({"role": Value("string"), "content": Value("string")})


def written(image: PILImage.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def claiming(width: int, height: int) -> bytes:
    """A small PNG whose header has another size."""
    data = bytearray(written(PICTURE))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def decoded(data: bytes) -> PILImage.Image:
    return PILImage.open(io.BytesIO(data)).convert("RGB")


def are_equal(one: PILImage.Image, other: PILImage.Image) -> bool:
    """Whether they have the same mode and pixels, whatever else is known of them."""
    return one.mode == other.mode and np.array_equal(one, other)


SMALL, PALETTE = PICTURE.convert("L"), PICTURE.convert("P")
JPEG, CMYK = written(PICTURE, "JPEG"), written(PICTURE.convert("CMYK"), "JPEG")
GIF = written(PICTURE, "GIF", save_all=True, append_images=[picture(1, 40, 56)])

ODD = {
    "RGB": (written(PICTURE), PICTURE),
    "greyscale": (written(SMALL), SMALL.convert("RGB")),
    "greyscale with alpha": (written(PICTURE.convert("LA")), SMALL.convert("RGB")),
    "1 bit": (written(PICTURE.convert("1")), PICTURE.convert("1").convert("RGB")),
    "palette with a transparent colour": (written(PALETTE, transparency=0), PALETTE.convert("RGB")),
    "alpha": (written(PICTURE.convert("RGBA")), PICTURE),
    "CMYK": (CMYK, decoded(CMYK)),
    "turned by EXIF": (written(PICTURE, "JPEG", exif=TURNED), decoded(JPEG).transpose(PILImage.Transpose.ROTATE_270)),
    "a line": (written(PICTURE.resize((1000, 1))), PICTURE.resize((1000, 1))),
    "an animation": (GIF, decoded(GIF)),
}
WAYS = {
    "bytes": lambda data, file: data,
    "stored": lambda data, file: {"bytes": data, "path": None},
    "stored path": lambda data, file: {"bytes": None, "path": str(file)},
    "path": lambda data, file: str(file),
    "Path": lambda data, file: file,
    "PIL": lambda data, file: PILImage.open(io.BytesIO(data)),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_pictures_are_read_as_the_same_picture_in_rgb(tmp_path, case):
    data, expected = ODD[case]
    (tmp_path / "image").write_bytes(data)
    for way in WAYS:
        given = WAYS[way](data, tmp_path / "image")
        assert size_of(given) == (expected.height, expected.width), way
        assert are_equal(opened(given), expected), way


DEEP = PILImage.fromarray(np.arange(2240, dtype=np.uint16).reshape(40, 56) * 29)
BROKEN = {
    "cut PNG": (written(PICTURE)[:3000], "truncated", False),
    "cut JPEG": (JPEG[:1500], "truncated", False),
    "nothing": (b"", "it is no image file", True),
    "text": (b"hello", "it is no image file", True),
    "a bomb": (claiming(30000, 30000), "900000000 pixels", True),
    "16 bits": (written(DEEP), "'I;16', and RGB would clip it", True),
    "floats": (written(DEEP.convert("F"), "TIFF"), "'F', and RGB would clip it", True),
    "a line to Qwen": (written(PICTURE.resize((1000, 1))), "aspect ratio", False),
}


@pytest.mark.refusal
@pytest.mark.parametrize("case", BROKEN)
def test_broken_pictures_are_refused_and_numbered(tmp_path, case):
    data, named, _ = BROKEN[case]
    (tmp_path / "image").write_bytes(data)
    reader = vision_language.processor("qwen2_5_vl" if "Qwen" in case else "gemma3")
    for way in ("bytes", "stored", "path"):
        images = [{"type": "image", "image": one} for one in (PICTURE, WAYS[way](data, tmp_path / "image"))]
        with pytest.raises(ValueError, match=f"^image 1 cannot be read: .*{named}"):
            read_with_images(reader, [{"role": "user", "content": images}])


# ---- In a dataset ----------------------------------------------------------------------------------------------------


def rows(last: bytes | str, number: int = 4) -> Dataset:
    """Rows whose last picture is this file, or at this path."""
    found = [{"prompt": [{"role": "user", "content": str(row)}], "image": written(PICTURE)} for row in range(number)]
    found[-1]["image"] = last
    files = [
        {**row, "image": {"path": one} if isinstance(one := row["image"], str) else {"bytes": one}} for row in found
    ]
    return Dataset.from_list(files, features=Features({"prompt": MESSAGES, "image": Image()}))


@pytest.mark.refusal
@pytest.mark.parametrize("case", [*(name for name, (*_, in_header) in BROKEN.items() if in_header), "missing"])
def test_what_the_header_shows_is_refused_at_construction(make_trainer, case):
    data, named, _ = BROKEN.get(case, ("/no/such.png", "'/no/such.png'", True))
    with pytest.raises(ValueError, match=f"row 3 of train_dataset: image 0 cannot be read: .*{named}"):
        make_trainer(**vision_language.arguments(), train_dataset=rows(data))
