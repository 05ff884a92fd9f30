"""The draft policy counted in steps, without a clock: what it gains at a given cost of a row.

    python bench/draft_policy.py record FILE [--model smollm2] [--tokens 96]
    python bench/draft_policy.py replay FILE [--seeds 3]

`record` decodes the prompts of bench/prompts.py plainly and stores their tokens and, per position,
the drafts of the draft head. Drafts never change a token, so `replay` can walk along these tokens
with the policy of the package: it counts steps, drafted and accepted tokens, and prices each step
by a cost curve. The machine's load changes nothing. Of each pair of prompts, the first is for
tuning and the second is reported. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prompts import CHAT, COPY

from verbatim import LLM, SamplingParams
from verbatim.speculate import draft_policy, head
from verbatim.speculate.draft_policy import Speculator
from verbatim.speculate.proposer import Draft, SeqView
from verbatim.speculate.suffix import SuffixProposer

GREEDY = SamplingParams(temperature=0)
# Relative time of a step by its rows; 1 is a step of one row.
CARDS: dict[str, Callable[[int], float]] = {
    "0.15 per row": lambda rows: 1 + 0.15 * (rows - 1),
    "0.45 per row": lambda rows: 1 + 0.45 * (rows - 1),
    "0.01 per row": lambda rows: 1 + 0.01 * (rows - 1),
    "tiles of 8": lambda rows: 1 + 0.04 * (rows - 1) + 0.56 * (rows > 8),
}
HEAD_COST = 0.012  # of a one-row step, per token that the head drafts
LOOKUP_COST = 0.004  # of a one-row step, per sequence that the policy looks at
NOISE = 0.03  # standard deviation of log(measured step time)


class RecordedHead:
    """The draft head, from a recording."""

    name, states_probs, token_cost = "head", True, HEAD_COST

    def __init__(self) -> None:
        self.items: dict[int, dict[str, Any]] = {}  # by sequence id
        self.made = 0

    def propose(self, views: Sequence[SeqView], limit: int, floor: float = 0.0) -> dict[int, Draft]:
        out = {}
        for view in views:
            drafts = self.items[view.seq_id]["head"]
            tokens, probs = drafts.get(str(len(view.tokens)), ((), ()))
            most = min(limit, view.max_drafts)
            count = sum(1 for prob in probs[:most] if prob >= floor)  # probs only fall
            self.made += max(count, 1)
            if count:
                out[view.seq_id] = Draft(tuple(tokens[:count]), "head", 0, tuple(probs[:count]))
        return out

    def finish(self, view: SeqView) -> None: ...

    def close(self) -> None: ...


def record(path: Path, model: str, tokens: int) -> None:
    head.MIN_OUTPUT_TOKENS = 0
    found: dict[int, dict[int, Any]] = {}
    texts: dict[int, Sequence[int]] = {}

    def drafts(self: Speculator, views: Sequence[SeqView], running: int | None = None) -> Any:
        """Store the head's drafts and submit none."""
        proposer = next(p for p in self.proposers if p.name == "head")
        made = proposer.propose(views, head.MAX_DEPTH, 0.0)
        for view in views:
            texts[view.seq_id] = view.tokens
            if view.seq_id in made:
                draft = made[view.seq_id]
                found.setdefault(view.seq_id, {})[len(view.tokens)] = (draft.tokens, draft.probs)
        return {}

    draft_policy.Speculator.drafts = drafts  # type: ignore[method-assign]
    draft_policy.Speculator.should_draft = lambda self, running: True  # type: ignore[method-assign]
    items = []
    with LLM(model, context=2048) as llm:
        for kind, prompts in (("copy", COPY), ("chat", CHAT)):
            chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
            for done in llm.chat(chats, GREEDY.with_(max_tokens=tokens)):
                text = (*done.prompt_ids, *done.token_ids)
                seq = next(i for i, t in texts.items() if text[: len(t)] == tuple(t)[: len(text)])
                items.append(
                    {
                        "kind": kind,
                        "prompt": done.prompt_ids,
                        "output": done.token_ids,
                        "head": found.get(seq, {}),
                        "ends": llm.tokenizer.eos_ids,
                    }
                )
                del texts[seq]
    path.write_text(json.dumps(items))


class Run:
    """One batch of recorded sequences on its way through the policy."""

    def __init__(self, card: Callable[[int], float], seed: int) -> None:
        self.card, self.random = card, random.Random(seed)
        self.head = RecordedHead()
        self.policy = Speculator([SuffixProposer(), self.head])
        self.steps = self.drafted = self.accepted = self._ids = 0

    def batch(self, items: Sequence[dict[str, Any]]) -> list[float]:
        """The time at which each sequence ends, in one-row steps."""
        clock, ends, live = 0.0, {}, {}
        for item in items:
            self._ids += 1
            self.head.items[self._ids] = item
            live[self._ids] = [item, [*item["prompt"], item["output"][0]], 0, 0]
        while live:
            views = [self._view(seq_id, *state) for seq_id, state in live.items()]
            made, looks = self.head.made, self.policy.should_draft(len(views))
            out = self.policy.drafts(views) if looks else {}
            rows = len(views) + sum(map(len, out.values()))
            seconds = self.card(rows)
            self.policy.cost.learn(rows, seconds * math.exp(self.random.gauss(0, NOISE)))
            clock += seconds + HEAD_COST * (self.head.made - made)
            clock += LOOKUP_COST * len(views) * looks
            self.steps += 1
            for seq_id in list(live):
                if self._advance(live[seq_id], out.get(seq_id, ())):
                    self.policy.finish(self._view(seq_id, *live.pop(seq_id)))
                    ends[seq_id] = clock
        return [ends[seq_id] for seq_id in sorted(ends)]

    @staticmethod
    def _view(seq_id: int, item: Any, tokens: list[int], drafted: int, accepted: int) -> SeqView:
        start = len(item["prompt"])
        room = len(item["output"]) + start - len(tokens) - 1
        counts = {"drafted": drafted, "accepted": accepted}
        return SeqView(seq_id, tokens, start, GREEDY, 0, room, end_ids=item["ends"], **counts)

    def _advance(self, state: list[Any], drafts: Sequence[int]) -> bool:
        """Append the accepted drafts and the token after them. True: the sequence has ended."""
        item, tokens = state[:2]
        rest = item["output"][len(tokens) - len(item["prompt"]) :]
        won = head.matching_prefix(drafts[: len(rest)], rest)
        tokens += rest[: won + 1]
        state[2], state[3] = state[2] + len(drafts), state[3] + won
        self.drafted, self.accepted = self.drafted + len(drafts), self.accepted + won
        return won + 1 >= len(rest)


def plain_times(items: Sequence[dict[str, Any]], card: Callable[[int], float]) -> list[float]:
    lengths = [len(item["output"]) - 1 for item in items]
    return [
        sum(card(sum(other > step for other in lengths)) for step in range(length))
        for length in lengths
    ]


def replay(path: Path, seeds: int) -> dict[str, Any]:
    items = [item for item in json.loads(path.read_text()) if len(item["output"]) > 4]
    result: dict[str, Any] = {}
    for card_name, card in CARDS.items():
        for kind in ("copy", "chat"):
            chosen = [item for item in items if item["kind"] == kind][1::2]
            for size in (1, 4, 16):
                groups = [chosen[at : at + size] for at in range(0, len(chosen), size)]
                plain = [time for group in groups for time in plain_times(group, card)]
                runs = [Run(card, seed) for seed in range(seeds)]
                ratios = []
                for run in runs:
                    times = [time for group in groups for time in run.batch(group)]
                    ratios += [slow / fast for slow, fast in zip(plain, times, strict=True)]
                row = {
                    "speed": statistics.geometric_mean(ratios),
                    "worst": min(ratios),
                    "steps": statistics.mean(run.steps for run in runs),
                    "drafted": statistics.mean(run.drafted for run in runs),
                    "accepted": statistics.mean(run.accepted for run in runs),
                }
                result[f"{card_name}, {kind}, {size} at once"] = row
                print(
                    f"{card_name}, {kind}, {size} at once: {row['speed']:.3f}x (worst "
                    f"{row['worst']:.3f}), {row['steps']:.0f} steps, {row['accepted']:.0f} of "
                    f"{row['drafted']:.0f} drafts",
                    flush=True,
                )
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("record", "replay"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    if args.what == "record":
        record(args.file, args.model, args.tokens)
    else:
        print(json.dumps(replay(args.file, args.seeds)))


if __name__ == "__main__":
    main()
