"""SentencePiece vocabularies as BPE merges. In: pieces with scores. Out: ranked merges, for the
`tokenizers` library.

SentencePiece repeatedly joins the two neighbours whose union is the piece with the best score. That
equals BPE when every split of a piece into two pieces is a merge, ranked by the piece's score.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from verbatim.base.errors import ModelError
from verbatim.text.vocabulary import SPACE

# Characters in all splits of all pieces: 25 times those of a real vocabulary.
MAX_WORK = 500_000_000


def merges_from_scores(
    pieces: Iterable[str], ids: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every split of every piece into two pieces, best score first.

    SentencePiece breaks ties by position, leftmost first, which a merge list cannot express. Of
    several splits of one piece, the one with the longer left part comes first, as in the published
    merge lists of such models. Control, unknown and byte tokens are not in `pieces`, so no merge
    can produce one from typed text.
    """
    known = frozenset(pieces)
    work = sum(len(piece) ** 2 for piece in known)
    if work > MAX_WORK:
        raise ModelError(
            "the vocabulary's pieces are too long to work with "
            f"({work} characters in all their splits)"
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
        if len(splits) > 1:  # among all pieces of equal score, longer left parts first
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
