"""Where texts may be cut into tokens: the canonical ones of each beginning, as a tree beside a row's own tokens.

A tokenizer writes the beginning `x[:m]` of a text in one way, and all but the last of these tokens are those of a
shorter beginning. So the token sequences that a model may have written, whatever comes next, form a tree with a node
for each place between two bytes (the covering tree of arXiv 2506.14123), or two where a tokenizer looks ahead, as after
spaces. Between bytes that are neighbours in no token every sequence has a border: a text is a row of regions that are
cut independently, and words come again. Where several sequences end with a region, the row's own goes on, and the
others add to the byte after it.

P byte positions · L bytes of a region · N tokens · K nodes of a region · B borders of its tree · F forks · X leaves
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np

from trl_opsd.bytes.table import ROOT, CoveringTree, Numbers

_REMEMBERED = 256_000_000
"""Bytes of the pieces that are remembered."""
_CONTEXT, _LONG = 64, 192
"""Bytes before a place that its tokens depend on at most, in regions of more bytes than this."""
_SPACES = [chr(one).encode() for one in range(0x3001) if chr(one).isspace()]
_FOLLOWING = ("", "\ua4d0", "\r")
"""What may follow a run of spaces: nothing known, what is no space, a line break; rare ones, since those that are
merged with a space leave no border before them."""


class Nodes:
    """The borders within some bytes, each by the tokens up to there; the first is the one before them."""

    def __init__(self) -> None:
        self.place, self.parent, self.token = [0], [0], [0]
        self.after: dict[tuple[int, int], int] = {}

    def add(self, node: int, token: int, size: int) -> int:
        """The node after a token of so many bytes that follows another node."""
        if (found := self.after.get((node, token))) is None:
            found = self.after[node, token] = len(self.place)
            self.place.append(self.place[node] + size)
            self.parent.append(node)
            self.token.append(token)
        return found


class Cutter:
    """Finds the covering trees of texts.

    Args:
        vocabulary ([`~bytes.vocabulary.ByteVocabulary`]):
            The tokens.
    """

    def __init__(self, vocabulary: Any) -> None:
        self._words, self._pieces, self._held = vocabulary, dict[tuple[int, ...], tuple[CoveringTree, ...]](), 0
        self._texts: Sequence[bytes | None] = vocabulary.texts
        spelled = [one for one in self._texts if one]
        joined, ends = np.frombuffer(b"".join(spelled), np.uint8), np.cumsum([len(one) for one in spelled])
        inside = np.ones(len(joined), bool)
        inside[ends - 1] = False
        self._are_neighbours = np.zeros((256, 256), bool)
        self._are_neighbours[joined[:-1][inside[:-1]], joined[1:][inside[:-1]]] = True
        # The first byte of a character after a space may be that of a space, too: it leaves open how they are cut.
        self._are_neighbours[np.ix_([one[-1] for one in _SPACES], [one[0] for one in _SPACES if len(one) > 1])] = True
        backend = getattr(vocabulary.tokenizer, "backend_tokenizer", None)
        known: dict[str, int] = getattr(vocabulary.tokenizer, "get_vocab", dict)()
        self._single = [known.get(f"<0x{byte:02X}>") for byte in range(256)]
        self._backend = backend if self._single[0xE4] is None else None

    def trees(self, rows: Sequence[Sequence[int]]) -> list[CoveringTree]:
        """The covering tree of each row of tokens."""
        parts = [self._parts(ids) for ids in rows]
        if self._held > _REMEMBERED:
            self._pieces.clear()
            self._held = 0
        if new := [*{one for part in parts for one in part if one not in self._pieces}]:
            self._learn(new)
        found = [self._tree([*chain.from_iterable(self._pieces[one] for one in part)]) for part in parts]
        for ids in new:
            if sum(len(one.token) for one in self._pieces[ids]) > _LONG:  # which hardly comes again
                del self._pieces[ids]
            else:
                each = ((one.token, one.fork, one.reads, one.leaves) for one in self._pieces[ids])
                self._held += sum(array.nbytes for array in chain.from_iterable(each))
        return found

    def _parts(self, ids: Sequence[int]) -> list[tuple[int, ...]]:
        """The tokens of each region of a row; a special one is a region."""
        if not ids:
            return []
        texts = self._words.spelled(ids)
        bytes_P = np.frombuffer(b"".join(one or b"\0" for one in texts), np.uint8)
        ends_N = np.cumsum([len(one or b"-") for one in texts])[:-1]
        before, after = bytes_P[ends_N - 1], bytes_P[ends_N]
        # A character is never divided, as its beginning has no tokens of its own.
        divides = ~self._are_neighbours[before, after] & (after & 0xC0 != 0x80)
        special = np.array([one is None for one in texts], bool)
        cuts = (divides | special[1:] | special[:-1]).nonzero()[0] + 1
        return [tuple(ids[at:to]) for at, to in pairwise([0, *cuts.tolist(), len(ids)])]

    def _learn(self, pieces: Sequence[tuple[int, ...]]) -> None:
        spelled = [self._words.spelled(ids) for ids in pieces]
        regions = [b"".join(one or b"" for one in texts) for texts in spelled]
        walks, each = self._walks(regions), self._nodes(regions)
        for ids, texts, region, walk_3W, nodes in zip(pieces, spelled, regions, walks, each, strict=True):
            if not region:
                nothing = np.zeros((0, 3), np.int32)
                of_one = np.zeros(1, np.int32), nothing, np.array([[0, 0, ROOT]], np.int32), nothing[:, :2]
                self._pieces[ids] = (CoveringTree(*of_one, read=np.zeros(0, bool)),)
            elif len(region) > _LONG and (at := _agree_again(ids, texts, nodes, len(region))):
                # Beside tokens that are not canonical the others would be forks up to the end of a long region.
                parts = ids[:at], ids[at:]
                self._learn(parts)
                self._pieces[ids] = (*self._pieces[parts[0]], *self._pieces[parts[1]])
            else:
                self._pieces[ids] = (_piece(ids, texts, nodes, walk_3W),)

    def _walks(self, regions: Sequence[bytes]) -> list[Numbers]:
        """From each place one byte further at a time, as long as there are tokens that go on."""
        keys, nodes = self._words.steps
        first = self._words.table.first.numpy()
        joined = np.frombuffer(b"".join(regions), np.uint8)
        sizes = np.array([len(one) for one in regions], np.int64)
        stop_P = np.repeat(sizes.cumsum(), sizes)
        place_A = start_A = np.arange(len(joined))
        node_A, found = np.full(len(joined), ROOT, np.int64), list[Numbers]()
        while len(place_A):
            found.append(np.stack([start_A, place_A, node_A]))
            # The first byte after a region may differ: tokens that go on until then are read, and none beyond.
            inside_A = place_A < stop_P[start_A]
            start_A, place_A, node_A = start_A[inside_A], place_A[inside_A], node_A[inside_A]
            key_A = node_A << 8 | joined[place_A]
            edge_A = keys.searchsorted(key_A)
            next_A = nodes[edge_A]
            alive_A = keys[edge_A] == key_A
            alive_A &= first[next_A + 1] > first[next_A]
            start_A, place_A, node_A = start_A[alive_A], place_A[alive_A] + 1, next_A[alive_A]
        all_3A = np.concatenate([np.zeros((3, 0), np.int64), *found], 1)
        all_3A = all_3A[:, all_3A[0].argsort(kind="stable")]
        ends = np.searchsorted(all_3A[0], sizes.cumsum())
        starts = sizes.cumsum() - sizes
        return [
            (all_3A[:, at:to] - [[start], [start], [0]]).astype(np.int32)
            for at, to, start in zip([0, *ends[:-1]], ends, starts, strict=True)
        ]

    def _nodes(self, regions: Sequence[bytes]) -> list[Nodes]:
        """The borders in each region of the canonical tokens of its beginnings."""
        found = [Nodes() for _ in regions]
        # A region, the node that a text begins at, and the place up to which its tokens are borders.
        asked, texts = list[tuple[int, int, int]](), list[str]()
        for number, region in enumerate(regions):
            valid = valid_text(region)[1]  # a row may end within a character
            if valid:
                places, restarts = self._restarts(region[:valid], found[number])
                for place in range(1, valid + 1):
                    if place == valid or region[place] & 0xC0 != 0x80:
                        # The last one that the tokens before this place do not depend on.
                        last = max(0, bisect_right(places, place - _CONTEXT) - 1)
                        text = region[places[last] : place].decode()
                        # Pre-tokenizers cut a run of spaces by what follows it, which need not be what this text has.
                        more = _FOLLOWING if len(text) > 1 and text[-2:].isspace() else ("",)
                        asked.extend((number, restarts[last], place) for _ in more)
                        texts.extend(text + one for one in more)
        for (number, node, place), text, ids in zip(asked, texts, self._words.ids_of_each(texts), strict=True):
            spelled, nodes = self._words.spelled(ids), found[number]
            if b"".join(one or b"\0" for one in spelled) == text.encode():
                for token, some in zip(ids, spelled, strict=True):
                    if nodes.place[node] + len(some or b"") > place:
                        break
                    node = nodes.add(node, token, len(some or b""))
        for region, nodes in zip(regions, found, strict=True):
            of_place = dict(zip(nodes.place, range(len(nodes.place)), strict=True))
            for place in range(1, valid := valid_text(region)[1]):
                if region[place] & 0xC0 == 0x80 and (within := self._within(region[:valid], place)) is not None:
                    size = len(self._texts[within] or b"")
                    if (parent := of_place.get(place - size)) is not None:
                        of_place[place] = nodes.add(parent, within, size)
        return found

    def _restarts(self, region: bytes, nodes: Nodes) -> tuple[list[int], list[int]]:
        """Places from which a long region has the tokens that the whole has, ascending, with their nodes."""
        places, found = [0], [0]
        if len(region) <= _LONG:
            return places, found
        (whole,) = self._words.ids_of_each([region.decode()])
        node = place = 0
        for number, (token, some) in enumerate(zip(whole, self._words.spelled(whole), strict=True)):
            if not region.startswith(some or b"\0", place):  # a tokenizer has changed it
                break
            if place - places[-1] >= _CONTEXT and region[place] & 0xC0 != 0x80:
                (rest,) = self._words.ids_of_each([region[place : place + 2 * _CONTEXT].decode(errors="ignore")])
                if rest[:4] == whole[number : number + 4]:
                    places.append(place)
                    found.append(node)
            size = len(some or b"")
            node, place = nodes.add(node, token, size), place + size
        return places, found

    def _within(self, region: bytes, place: int) -> int | None:
        """The last token up to a place within a character."""
        if (single := self._single[region[place - 1]]) is not None:
            return int(single)
        if self._backend is None:
            return None
        end = place + 1
        while end < len(region) and region[end] & 0xC0 == 0x80:
            end += 1
        text, begins = region[:end].decode(), 0
        if self._backend.pre_tokenizer is not None:
            begins = len(text[: self._backend.pre_tokenizer.pre_tokenize_str(text)[-1][1][0]].encode())
        tokens = self._backend.model.tokenize(self._words.written(region[begins:place]))
        last = tokens[-1].id if tokens else None
        fits = last is not None and last < len(self._texts) and region[:place].endswith(self._texts[last] or b"\0")
        return last if fits else None

    def _tree(self, pieces: Sequence[CoveringTree]) -> CoveringTree:
        whole = CoveringTree.joined(pieces)
        # A piece adds to the first byte after it, where there is one.
        fork_F3, *others = (one[one[:, 0] < len(whole.token)] for one in (whole.fork, whole.reads, whole.leaves))
        reads_R3, leaves_X2 = (one[np.lexsort((one[:, 1], one[:, 0]))] for one in others)
        return CoveringTree(whole.token, fork_F3, reads_R3, leaves_X2, read=np.zeros(len(fork_F3), bool))


def _piece(ids: Sequence[int], texts: Sequence[bytes | None], nodes: Nodes, walk_3W: Numbers) -> CoveringTree:
    """A region with its tokens, as a part of a tree: numbers of positions, tokens and forks are its own."""
    sizes = np.array([len(one or b"") for one in texts])
    starts, length = sizes.cumsum() - sizes, int(sizes.sum())
    place_K, parent_K, token_K = (np.array(one, np.int64) for one in (nodes.place, nodes.parent, nodes.token))
    # The row's own tokens are borders of the tree up to the first that is not canonical.
    number_K, node, own = np.full(len(place_K), -1, np.int64), 0, 1
    number_K[0] = 0
    for token in ids[:-1]:
        if (following := nodes.after.get((node, token))) is None:
            break
        node = following
        number_K[node], own = own, own + 1
    end = nodes.after.get((node, ids[-1]), -1) if own == len(ids) else -1  # where the next region begins
    forks = ((number_K < 0) & (np.arange(len(place_K)) != end)).nonzero()[0]
    forks = forks[place_K[forks].argsort(kind="stable")]
    number_K[forks] = len(ids) + np.arange(len(forks))
    fork_F3 = np.stack([place_K[forks], number_K[parent_K[forks]], token_K[forks]], 1)
    place_B = np.concatenate([place_K[number_K >= 0], starts[own:]])
    number_B = np.concatenate([number_K[number_K >= 0], np.arange(own, len(ids))])
    # Walks are sorted by where they begin. Tokens beside the row's that end with the region add to the byte after it.
    walk_3W = np.append(walk_3W, [[length], [length], [ROOT]], 1)
    first_B, stop_B = (walk_3W[0].searchsorted(place_B, side) for side in ("left", "right"))
    counts_B = stop_B - first_B
    walk_R = _ranges(first_B, counts_B)
    reads_R3 = np.stack([walk_3W[1, walk_R], np.repeat(number_B, counts_B), walk_3W[2, walk_R]], 1).astype(np.int64)
    last_L = np.arange(length + 1)
    np.maximum.at(last_L, walk_3W[0], walk_3W[1])
    last_K = last_L[place_K]
    for number in place_K.argsort(kind="stable")[:0:-1]:  # a node adds to no less than those that follow from it
        last_K[parent_K[number]] = max(last_K[parent_K[number]], last_K[number])
    spans_F = last_K[forks] - place_K[forks] + 1
    leaves_X2 = np.stack([_ranges(place_K[forks], spans_F), np.repeat(np.arange(len(forks)), spans_F)], 1)
    found = np.repeat(np.arange(len(ids)), sizes), fork_F3, reads_R3, leaves_X2
    return CoveringTree(*(one.astype(np.int32) for one in found), read=np.zeros(len(forks), bool))


def _ranges(starts: Numbers, counts: Numbers) -> Numbers:
    """So many numbers from each start on."""
    return np.arange(counts.sum()) + np.repeat(starts - counts.cumsum() + counts, counts)


def _agree_again(ids: Sequence[int], texts: Sequence[bytes | None], nodes: Nodes, length: int) -> int:
    """The number of a region's token from which its own tokens have the canonical borders again, after one that is not
    canonical; 0 where all are, or none follows.
    """
    places = [0, *accumulate(len(one or b"") for one in texts)]
    odd = node = 0
    while odd < len(ids) and (following := nodes.after.get((node, ids[odd]))) is not None:
        odd, node = odd + 1, following
    last = nodes.place.index(length) if length in nodes.place else 0  # before those of what may follow
    canonical = set[int]()
    while last:
        canonical.add(nodes.place[last])
        last = nodes.parent[last]
    after = (at for at in range(odd + 1, len(ids)) if places[at] in canonical and places[at] >= places[odd] + _CONTEXT)
    return next(after, 0)


def valid_text(spelled: bytes) -> tuple[str, int]:
    """The text at the beginning of bytes up to the first that are no UTF-8, and how many bytes that are."""
    try:
        return spelled.decode(), len(spelled)
    except UnicodeDecodeError as error:
        return spelled[: error.start].decode(), error.start
