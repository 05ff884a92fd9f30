"""SentencePiece vocabularies as byte-pair merges. In: pieces with scores. Out: merges in order, for the `tokenizers` library.

SentencePiece joins, again and again, the two neighbours whose union is the piece with the best score. That is byte-pair
merging if every way to build a piece from two others is a merge, ranked by the piece's score.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from verbatim.base.errors import ModelError
from verbatim.text.vocabulary import SPACE

MAX_WORK = (
    500_000_000  # characters in all splits of all pieces; a real vocabulary has about 20 million
)


def merges_from_scores(
    pieces: Iterable[str], ids: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every split of every piece into two pieces, best score first.

    SentencePiece breaks ties by position, leftmost first, which a merge list cannot say. Where one piece has several splits, the
    one with the longer left part comes first: it begins further left. The merge lists published for such models do the same.
    Control, unknown and byte tokens are not in `pieces`, so no merge can produce one from typed text.
    """
    known = frozenset(pieces)
    work = sum(len(piece) ** 2 for piece in known)
    if work > MAX_WORK:
        raise ModelError(
            f"the vocabulary's pieces are too long to work with ({work} characters in all their splits)"
        )
    merges: list[tuple[str, str]] = []
    best_first = sorted(known, key=lambda piece: (-scores[ids[piece]], ids[piece]))
    for _, same in groupby(best_first, key=lambda piece: scores[ids[piece]]):
        splits = [
            (left, right)
            for piece in same
            for cut in range(len(piece) - 1, 0, -1)
            if (left := piece[:cut]) in known and (right := piece[cut:]) in known
        ]
        if len(splits) > 1:  # pieces of equal score: longer left parts first, among all of them
            splits.sort(key=lambda split: (-len(split[0]), -len(split[1])))
        merges += splits
    return merges


def piece_bytes(text: str, is_byte: bool) -> bytes:
    """<0x0A> is a byte; in everything else U+2581 is a space."""
    if is_byte:
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            return text.encode("utf-8", errors="replace")
    return text.replace(SPACE, " ").encode("utf-8", errors="replace")
