"""Vocabularies and languages over bytes that are small enough to know everything about them."""

from __future__ import annotations

from types import SimpleNamespace

from trl_opsd.data.byte_vocabulary import ByteVocabulary

WORDS = (b"a", b"b", b"c", b" ", b"ab", b"abc", b"abcab", b" a", b" ab", b"ca", b"cab", b"bb", b"\xff", b"\xffa", b"bca")


def small_vocabulary() -> ByteVocabulary:
    """A vocabulary with two special tokens, and tokens that begin like others."""
    texts = (None, *WORDS, None)
    return ByteVocabulary(SimpleNamespace(), texts, frozenset({0, len(texts) - 1}))  # type: ignore[arg-type]
