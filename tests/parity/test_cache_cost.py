"""examples/cache_cost.py: n tokens computed with a KV cache, about n²/2 without."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from verbatim.testing.fakes import ByteTokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "cache_cost.py"


def test_the_example_counts_computed_tokens_with_and_without_a_kv_cache() -> None:
    spec = importlib.util.spec_from_file_location("cache_cost", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    prompt = len(ByteTokenizer().encode_prompt(module.PROMPT))
    for count, with_cache, without in module.main(["--lengths", "8", "24"]):
        assert with_cache == prompt + count - 1  # the last token is sampled, but not computed
        assert without == sum(prompt + i for i in range(count))
