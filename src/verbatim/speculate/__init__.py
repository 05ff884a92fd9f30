"""Speculative decoding: draft tokens, verified by the target model in one step.

Drafts change latency, never the output.
"""
