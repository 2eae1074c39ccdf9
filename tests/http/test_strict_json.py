"""JSON from outside is read, or refused with a `ValueError`."""

from __future__ import annotations

import pytest

from trl_opsd._compat import strict_json

pytestmark = pytest.mark.quick


def test_valid_json_is_read_as_by_the_standard_library():
    assert strict_json.loads('{"a": [1, 2.5, null, true, {"a": "b"}]}') == {"a": [1, 2.5, None, True, {"a": "b"}]}
    assert strict_json.loads(b'"\xc3\xa9"') == "é"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("[NaN]", "contains NaN"),
        ("-Infinity", "contains -Infinity"),
        ('{"a": 1, "a": 2}', "contains the key 'a' twice"),
        ("", "Expecting value"),
        (b"\xff\xfe\xfa", "decode"),
        ("9" * 5000, "digits"),
    ],
    ids=["lists", "objects", "nan", "infinity", "twice", "empty", "bytes", "digits"],
)
def test_invalid_json_is_a_value_error(text, message):
    with pytest.raises(ValueError, match=message):
        strict_json.loads(text)
