"""Patterns of a config: what Python's re finds, in bounded time; the config groups of
compressed-tensors as the library chooses them."""

from __future__ import annotations

import operator
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verbatim.base.errors import ModelError
from verbatim.base.name_patterns import NamePatterns
from verbatim.formats.packed.packed_config import ConfigGroups

LINEAR: dict[str, Any] = {"targets": ["Linear"], "weights": {"group_size": 32}}
HOSTILE = ("re:(a+)+$", "re:.*.*.*.*.*.*.*.*.*.*.*.*x", "re:((a?b?){1000}(a|b)*){1000}x")


@pytest.mark.parametrize("pattern", HOSTILE)
def test_a_pattern_that_backtracks_for_ever_cannot_hang_the_load(pattern: str) -> None:
    """Python's re needs 2^60 steps for the first one; the suite's time limit is the judge."""
    groups = ConfigGroups({"config_groups": {"a": {"targets": [pattern]}, "b": LINEAR}})
    assert groups.weights("a" * 60 + "!") == LINEAR["weights"]


def test_the_operations_of_all_patterns_of_a_file_are_limited() -> None:
    patterns = NamePatterns(operations=1000)
    with pytest.raises(ModelError, match=r"'\(a\|b\)\*' takes too long"):
        all(patterns.match("(a|b)*", f"{'ab' * 20}{i}") for i in range(1000))


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("(?:(?=(?:(?=(?:(?=.*!)a?.)*).)*).)*x", "ab" * 500),
        ("(?:(?=(?:(?=(?:(?=.*!)a?.)*).)*).)*x", "model.layers.10.self_attn.q_proj" * 3 + "!"),
        (f"(?:{'(?=a)' * 80}a)*x", "a" * 1000),
    ],
)
def test_a_hostile_pattern_is_refused_after_few_operations(pattern: str, name: str) -> None:
    """The first one took 4 million operations, 30 µs each: two minutes."""
    patterns = NamePatterns()
    with pytest.raises(ModelError, match="takes too long"):
        patterns.match(pattern, name)
    assert patterns._spent < 110_000


def test_a_large_model_has_enough_operations_for_patterns_that_look_ahead() -> None:
    patterns = NamePatterns()
    for i in range(2_000):
        name = f"model.layers.{i}.mlp.experts.127.down_proj"
        assert patterns.fullmatch("(?:(?!visual|vision|lm_head).)*", name)


def test_looking_ahead_counts_for_every_position() -> None:
    assert NamePatterns().match("(?:(?=)(?=).)*", "a" * 100)
    with pytest.raises(ModelError, match="takes too long"):
        NamePatterns(operations=300).match("(?:(?=)(?=).)*$", "a" * 100 + "!")
    with pytest.raises(ModelError, match="takes too long"):
        NamePatterns(operations=500).match(".*(?=)(?=)(?=)(?=)(?=)(?=)", "a" * 100)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "not a regular expression"),
        ("a" * 501, "more than 500 characters"),
        (r"(a)\1", "GROUPREF is not supported"),
        ("a*+", "POSSESSIVE_REPEAT is not supported"),
        ("(?>a)", "ATOMIC_GROUP is not supported"),
        ("(?m)a", "flags i, s and x only"),
        ("(" * 240 + "a" + ")" * 240, ""),
    ],
)
def test_a_pattern_that_needs_backtracking_is_refused_by_name(pattern: str, why: str) -> None:
    if not why:
        assert NamePatterns().match(pattern, "a")
        return
    with pytest.raises(ModelError, match=why):
        NamePatterns().match(pattern, "a")
    with pytest.raises(ModelError, match="more than 1000 characters"):
        NamePatterns().match("a", "a" * 1001)


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
    for _ in range(200):
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


def _has_one_width(pattern: str) -> bool:
    try:
        return bool(re.compile(f"(?<={pattern})"))
    except re.error:
        return False


def _pattern_texts() -> st.SearchStrategy[str]:
    atoms = st.sampled_from(
        [
            "a",
            "b",
            ".",
            r"\d",
            r"\.",
            "[ab]",
            "[^a]",
            r"\w",
            "[a-c0-9]",
            r"\b",
            r"\B",
            "^",
            "$",
            r"\D",
        ]
    )
    repeats = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "{,2}"])
    return st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.builds(operator.add, inner, inner),
            st.builds("(?:{}){}".format, inner, repeats),
            st.builds("({}|{})".format, inner, inner),
            st.builds("(?={})".format, inner),
            st.builds("(?!{})".format, inner),
            st.builds("(?<={})".format, inner.filter(_has_one_width)),
            st.builds("(?i:{})".format, inner),
        ),
        max_leaves=6,
    )


@settings(max_examples=150, deadline=None)
@given(_pattern_texts(), st.text("abA.0", max_size=8))
def test_patterns_match_as_in_python(pattern: str, name: str) -> None:
    patterns = NamePatterns()
    assert patterns.match(pattern, name) is (re.match(pattern, name) is not None)
    assert patterns.fullmatch(pattern, name) is (re.fullmatch(pattern, name) is not None)


@pytest.mark.parametrize("pattern", [r"\b", r"\B", r"\B.*", r"(?!\B)", r"(?<=\B)a?", "(?!a)"])
def test_an_empty_name(pattern: str) -> None:
    """Whether \\B matches there depends on the version of Python."""
    assert NamePatterns().match(pattern, "") is (re.match(pattern, "") is not None)
