"""Patterns of a config: what Python's re finds, in bounded time; the config groups of
compressed-tensors as the library chooses them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from verbatim.base.errors import ModelError
from verbatim.base.name_patterns import NamePatterns
from verbatim.formats.packed.packed_config import ConfigGroups

LINEAR: dict[str, Any] = {"targets": ["Linear"], "weights": {"group_size": 32}}
HOSTILE = ("re:(a+)+$", "re:.*.*.*.*.*.*.*.*.*.*.*.*x", "re:((a?b?){1000}(a|b)*){1000}x")


@pytest.mark.parametrize("pattern", HOSTILE)
def test_a_pattern_that_backtracks_for_ever_is_refused(pattern: str) -> None:
    """Python's re needs 2^60 steps for the first one; the suite's time limit is the judge."""
    groups = ConfigGroups({"config_groups": {"a": {"targets": [pattern]}, "b": LINEAR}})
    with pytest.raises(ModelError, match="takes too long"):
        groups.weights("a" * 60 + "!")


def test_a_refused_pattern_stays_refused() -> None:
    patterns = NamePatterns()
    for _ in range(2):
        with pytest.raises(ModelError, match="takes too long"):
            patterns.match("(a+)+$", "a" * 60 + "!")


def test_a_plain_pattern_starts_no_child() -> None:
    patterns = NamePatterns()
    assert patterns.ends("self_attn.q_proj", "model.layers.3.self_attn.q_proj")
    assert not patterns.ends("attn.q_proj", "model.layers.3.self_attn.q_proj")
    assert patterns._child is None
    assert patterns.ends("q_proj|k_proj", "model.layers.3.self_attn.q_proj")
    assert patterns._child is not None


@pytest.mark.parametrize(
    ("pattern", "name", "why"),
    [
        ("(", "a", "not a regular expression"),
        ("a" * 501, "a", "more than 500 characters"),
        ("a", "a" * 1001, "more than 1000 characters"),
    ],
)
def test_a_wrong_pattern_or_name_is_refused(pattern: str, name: str, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        NamePatterns().match(pattern, name)


MODULES = [
    *(f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 9, 10) for p in "qkvo"),
    *(f"model.layers.1.mlp.experts.{i}.{p}_proj" for i in (0, 12) for p in ("gate", "up", "down")),
    *("lm_head", "model.embed_tokens", "model.visual.blocks.3.attn.qkv", "model.layers.10.mlp.q"),
]
PUBLISHED = [
    *("re:.*self_attn.*", r"re:.*self_attn\.(q|k|v|o)_proj$", "re:.*lm_head", "re:visual.*"),
    *(r"re:.*mlp\.experts\.\d+\.(gate|up)_proj.*", r"re:model\.layers\.[0-9]\..*down_proj$"),
    *(
        "re:^(?!.*(visual|lm_head)).*$",
        "re:.*[qk]_proj",
        "re:(?i).*Q_PROJ",
        "re:.*layers.1[0-9]?.*",
    ),
    *("model.layers.9.self_attn.q_proj", "q_proj", "lm_head", "Linear", "re:.*layers\\.(?!10).*"),
]


def test_the_group_of_a_module_is_the_one_of_the_library() -> None:
    """Names before patterns before classes, as compressed-tensors' own match_targets."""
    from compressed_tensors.utils.match import match_targets
    from torch import nn

    random = np.random.default_rng(5)
    module: nn.Module = nn.Linear(1, 1)
    for _ in range(40):
        chosen = [str(t) for t in random.permutation(PUBLISHED)[: random.integers(2, 7)]]
        config = {
            str(i): {"targets": [target], "weights": {"group_size": i + 1}}
            for i, target in enumerate(chosen)
        }
        groups = ConfigGroups({"config_groups": config})
        for name in MODULES:
            kind = nn.Embedding(1, 1) if name.endswith("embed_tokens") else module
            if matched := match_targets(name, kind, chosen):
                assert groups.weights(name)["group_size"] == chosen.index(matched[0]) + 1, name


@pytest.mark.parametrize("pattern", ["a.b", r"\w+\.\d", "(?i:A)|b", "(?!a).*", r"(a)\1", ""])
@pytest.mark.parametrize("name", ["", "a", "a.b", "aa", "b.1", "axb"])
def test_patterns_match_as_in_python(pattern: str, name: str) -> None:
    patterns = NamePatterns()
    assert patterns.match(pattern, name) is (re.match(pattern, name) is not None)
    assert patterns.fullmatch(pattern, name) is (re.fullmatch(pattern, name) is not None)
    assert patterns.ends(pattern, name) is bool(re.fullmatch(rf"(.*\.)?({pattern})", name))
