"""SentencePiece vocabularies as byte-pair merges. In: pieces with scores. Out: merges in order, for the `tokenizers` library.

SentencePiece joins, again and again, the two neighbours whose union is the piece with the best score. That is byte-pair
merging if every way to build a piece from two others is a merge, ranked by the piece's score.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

SPACE = "\u2581"


def merges_from_scores(pieces: Iterable[str], ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every split of every piece into two pieces, best score first.

    SentencePiece breaks ties by position, leftmost first, which a merge list cannot say. Where one piece has several splits, the
    one with the longer left part comes first: it begins further left. The merge lists published for such models do the same.
    Control, unknown and byte tokens are not in `pieces`, so no merge can produce one from typed text.
    """
    known = {piece: ids[piece] for piece in pieces}
    found: list[tuple[float, int, int, int, str, str]] = []
    for piece, at in known.items():
        for cut in range(1, len(piece)):
            left = piece[:cut]
            if left in known and piece[cut:] in known:
                found.append((-scores[at], -cut, cut - len(piece), at, left, piece[cut:]))
    found.sort()
    return [(left, right) for *_, left, right in found]


def piece_bytes(text: str, is_byte: bool) -> bytes:
    """<0x0A> is a byte; in everything else U+2581 is a space."""
    if is_byte:
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            return text.encode("utf-8", errors="replace")
    return text.replace(SPACE, " ").encode("utf-8", errors="replace")
