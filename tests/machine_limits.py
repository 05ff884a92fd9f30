"""Figures of a real machine and of the default model, for tests of the roofline arithmetic."""

from __future__ import annotations

from verbatim.observe.roofline import CostCard, MachineLimits

# 37.9 GB/s, 638 GOP/s, 98 MB per token
LIMITS = MachineLimits(37.9e9, threads=2, method="native", int8_ops=638e9)
CARD = CostCard(
    weight_bytes=98_000_000,
    kv_token_bytes=23_040,
    ops_token=270_000_000,
    ops_position=69_120,
    prompt_ops_token=212_000_000,
)
