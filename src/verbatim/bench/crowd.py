"""nano-vllm's benchmark: 256 requests at once, prompts and outputs of 100 to 1,024 random tokens.

In: an LLM. Out: the requests, the seconds that they take, and the least that they can take.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verbatim.base.params import SamplingParams
from verbatim.engine.step.failed_step import raise_error

if TYPE_CHECKING:
    from verbatim.engine.calls.llm import LLM
    from verbatim.observe.roofline import CostCard, MachineLimits

SHORTEST, LONGEST = 100, 1024  # tokens of a prompt and of an output


@dataclass(frozen=True, slots=True)
class Crowd:
    prompts: list[list[int]]
    lengths: list[int]  # tokens to generate per prompt

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def least_seconds(self, limits: MachineLimits, card: CostCard) -> float:
        """Each drawn token reads the keys and values of its context, and each step the weights;
        there are at least as many steps as the longest output has tokens."""
        pairs = [(len(p), n) for p, n in zip(self.prompts, self.lengths, strict=True)]
        attended = sum(n * prompt + n * (n - 1) // 2 for prompt, n in pairs)
        read = attended * card.kv_token_bytes + max(self.lengths) * card.read_bytes()
        seconds = read / limits.read_bytes
        if limits.int8_ops is None:
            return seconds
        in_prompts = sum(prompt for prompt, _ in pairs)
        ops = in_prompts * card.prompt_ops_token + self.tokens * card.ops_token
        ops += (attended + sum(p * p // 2 for p, _ in pairs)) * card.ops_position
        return max(seconds, ops / limits.int8_ops)


def make_crowd(llm: LLM, count: int, seed: int = 0) -> Crowd:
    """`count` requests that fit the context; another seed has other prompts of other lengths, and
    the same output lengths."""
    longest = min(LONGEST, (llm.context - 1) // 2)
    shortest = min(SHORTEST, longest)
    tokenizer, r = llm.tokenizer, random.Random(seed)
    ids = [i for i in range(tokenizer.vocab_size) if not tokenizer.is_control(i)]
    prompts = [r.choices(ids, k=r.randint(shortest, longest)) for _ in range(count)]
    r = random.Random(-1)
    return Crowd(prompts, [r.randint(shortest, longest) for _ in range(count)])


def run_crowd(llm: LLM, crowd: Crowd) -> float:
    """Seconds until all requests are done, at temperature 0.6."""
    params = [
        SamplingParams(temperature=0.6, seed=i, max_tokens=n, ignore_eos=True)
        for i, n in enumerate(crowd.lengths)
    ]
    began = time.perf_counter()
    done = llm.generate(crowd.prompts, params)
    seconds = time.perf_counter() - began
    raise_error(done)
    return seconds
