"""What the KV cache saves: the same completions with and without it.

    python examples/cache_cost.py                       a tiny random model, in a few seconds
    python examples/cache_cost.py --model smollm2       the default model

Without a KV cache every step computes the whole sequence again: n tokens cost 1 + 2 + … + n, about
n²/2. With it each token is computed once. The table counts the tokens that the backend computed,
which is exact, and the seconds, which depend on this machine.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from verbatim import LLM, SamplingParams
from verbatim.backend import open_backend
from verbatim.base.config import EngineConfig
from verbatim.base.records import StepPlan, StepResult
from verbatim.engine.loaded_model import LoadedModel
from verbatim.testing.fakes import ByteTokenizer
from verbatim.testing.tiny_models import tiny_model

PROMPT = "The cache"


class Counted:
    """A backend that also counts the tokens it computes."""

    def __init__(self, backend: Any) -> None:
        self._backend, self.tokens = backend, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def execute(self, plan: StepPlan) -> StepResult:
        self.tokens += plan.rows
        result: StepResult = self._backend.execute(plan)
        return result


def open_llm(model: str | None, use_cache: bool) -> LLM:
    options: dict[str, Any] = {"use_cache": use_cache, "prefix_cache": False, "speculate": "off"}
    if model is not None:
        llm = LLM(model, **options)
    else:
        loaded = tiny_model("llama", hidden_size=64, intermediate_size=128, num_hidden_layers=4)
        loaded = LoadedModel(
            open_backend(loaded, EngineConfig(**options)),
            ByteTokenizer(),
            (),
            digest=loaded.weights.digest,
        )
        llm = LLM.from_loaded(loaded, **options)
    llm.core.backend = Counted(llm.core.backend)
    return llm


def measure(llm: LLM, count: int) -> tuple[tuple[int, ...], int, float]:
    """The completion's tokens, the number of tokens computed for it, and the seconds."""
    llm.core.backend.tokens = 0
    start = time.perf_counter()
    done = llm.generate(PROMPT, SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))
    return done.token_ids, llm.core.backend.tokens, time.perf_counter() - start


def main(arguments: list[str] | None = None) -> list[tuple[int, int, int]]:
    """Print the table; return (answer length, tokens computed with the cache, without)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a path or a catalog name; missing: a tiny random model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 32, 64, 128])
    options = parser.parse_args(arguments)
    rows = []
    print(f"{'answer':>8} {'computed with':>14} {'without':>9} {'seconds with':>13} {'without':>9}")
    with open_llm(options.model, True) as cached, open_llm(options.model, False) as plain:
        for count in options.lengths:
            answer, computed, seconds = measure(cached, count)
            same, all_again, longer = measure(plain, count)
            assert answer == same, "the cache changes the cost, never the output"
            print(f"{count:8} {computed:14} {all_again:9} {seconds:13.3f} {longer:9.3f}")
            rows.append((count, computed, all_again))
    return rows


if __name__ == "__main__":
    main()
