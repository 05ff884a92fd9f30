"""`bench --speculate`: simulating a proposer on a known output counts the same drafts as a real
run."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cli_result import Call
from verbatim.bench.speculation import LENGTHS, _between, walk
from verbatim.speculate.ngram import NgramProposer
from verbatim.speculate.proposer import Draft
from verbatim.speculate.suffix import SuffixProposer


class Oracle:
    """Drafts the known output, with a wrong token at every `error`-th position."""

    name, token_cost = "oracle", 0.0

    def __init__(self, text: list[int], error: int) -> None:
        self.text, self.error = text, error

    def propose(self, views: Any, limit: int) -> dict[int, Draft]:
        at = len(views[0].tokens)
        guess = [
            t + 1 if (at + i) % self.error == 0 else t
            for i, t in enumerate(self.text[at : at + limit])
        ]
        return {0: Draft(tuple(guess), self.name, 1)} if guess else {}


def test_a_perfect_draft_gains_k_plus_one_tokens() -> None:
    text = list(range(100))
    done = walk(Oracle(text, 10**9), text[:20], text[20:], 4)  # type: ignore[arg-type]
    assert done.passes == 16  # 80 tokens, five per pass
    assert done.accepted == 64
    assert done.tokens_a_pass == 5.0


def test_without_drafts_a_pass_gains_one_token() -> None:
    text = list(range(50))
    done = walk(Oracle(text, 10**9), text[:20], text[20:], 0)  # type: ignore[arg-type]
    assert (done.passes, done.drafted, done.tokens_a_pass) == (30, 0, 1.0)


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=60),
    st.integers(1, 20),
    st.integers(0, 8),
    st.integers(2, 9),
)
def test_every_pass_gains_its_accepted_drafts_plus_one(
    text: list[int], cut: int, limit: int, error: int
) -> None:
    cut = min(cut, len(text) - 1)
    for proposer in (NgramProposer(), SuffixProposer(), Oracle(text, error)):
        done = walk(proposer, text[:cut], text[cut:], limit)  # type: ignore[arg-type]
        assert done.tokens == len(text) - cut == done.accepted + done.passes
        assert 0 <= done.accepted <= done.drafted == sum(done.rows)
        assert max(done.rows) <= limit


def test_costs_are_interpolated_between_measured_lengths() -> None:
    costs = [float(k) for k in LENGTHS]
    assert [_between(costs, k) for k in (0, 1, 5, 10, 16, 40)] == [0.0, 1.0, 5.0, 10.0, 16.0, 16.0]


def test_the_curve_on_a_tiny_model(verbatim: Call, tmp_path: Path) -> None:
    plot = tmp_path / "s.svg"
    result = verbatim("bench", "--speculate", "--quick", "--repeats", "1", "--plot", str(plot))
    assert result.code == 0, result.err
    data = json.loads(result.out.splitlines()[-1])
    assert [row["drafts"] for row in data["pass_seconds"]] == list(LENGTHS)
    for rows in data["tasks"].values():
        assert rows[0]["tokens_a_pass"] == 1.0
        assert all(row["seconds_a_token"] > 0 for row in rows)
    ElementTree.fromstring(plot.read_text())
    for flag, value in (
        ("--against", "llama.cpp"),
        ("--batches", "1,4"),
        ("--contexts", "32"),
        ("--prefills", "32"),
    ):
        result = verbatim("bench", "--speculate", "ngram", flag, value)
        assert result.code == 2
        assert f"leave out {flag}" in result.err
