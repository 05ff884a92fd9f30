"""Sampling: logits in, tokens out. pipeline.py defines the order of the samplers."""
