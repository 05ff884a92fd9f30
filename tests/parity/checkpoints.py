"""Tiny random checkpoints of every supported family, rope scaling and attention shape.

The cases are in data/parity_checkpoints.json, one per line: the fields of Case, `absent` (keys that
the config lacks) and a note. transformers creates them; its logits are the expected values of the
parity tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parity_case import ABSENT, VOCAB, Case
from registry_cases import derived_cases

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _case(note: str = "", absent: tuple[str, ...] = (), **fields: Any) -> Case:
    return Case(
        **{**fields, "changes": {**fields.get("changes", {}), **dict.fromkeys(absent, ABSENT)}}
    )


_FILE = Path(__file__).parents[1] / "data" / "parity_checkpoints.json"
_LISTED = [_case(**row) for row in json.loads(_FILE.read_text("utf-8"))]
CASES = _LISTED + derived_cases(case.name for case in _LISTED)


def config_of(case: Case) -> Any:
    import transformers

    if case.kind == "GPT2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": VOCAB}
        return transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, **case.changes)
    values = {k: v for k, v in {**_BASE, **case.changes}.items() if v is not ABSENT}
    if text := case.changes.get("text_config"):
        values = {**case.changes, "text_config": {**_BASE, **text}}
    return getattr(transformers, f"{case.kind}Config")(**values)


def class_of(case: Case) -> str:
    if case.kind == "GPT2":
        return "GPT2LMHeadModel"
    if "text_config" in case.changes:
        return f"{case.kind}ForConditionalGeneration"
    return f"{case.kind.removesuffix('Text')}ForCausalLM"


def build(case: Case, directory: Path) -> Any:
    """Build the transformers model (float32, eager attention) and save it to `directory`."""
    import torch
    import transformers

    torch.manual_seed(sum(case.name.encode()) + 10_000 * case.seed)
    config = config_of(case)
    config._attn_implementation = "eager"
    model = getattr(transformers, class_of(case))(config).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            randomise(name, p)
        for name, p in model.named_buffers():
            if name.endswith(
                ("e_score_correction_bias", "expert_bias", "layer_scalar")
            ):  # of a router, and trained
                randomise(name, p)
    model.save_pretrained(directory)
    return model


def randomise(name: str, p: Any) -> None:
    """Draw larger weights than the library's initialisers.

    Those give near-uniform attention and flat logits, which would hide errors."""
    import torch

    if "sinks" in name:
        p.copy_(torch.randn_like(p))
    elif name.endswith("A_log"):
        # The library's states forget at once: a wrong state would be hidden, and outputs near zero
        # amplify rounding, so that the library's two forms differ by 1e-3.
        p.copy_(-1.0 + 0.5 * torch.randn_like(p))
    elif p.ndim == 1:
        p.add_(0.1 * torch.randn_like(p))
    elif "embed" in name or "wte" in name or "wpe" in name:
        p.copy_(0.7 * torch.randn_like(p))
    else:
        sharp = (
            2.0
            if any(
                part in name
                for part in (
                    *("q_proj", "k_proj", "qkv", "c_attn", "query_key_value", "router"),
                    *("mlp.gate.", "feed_forward.gate."),
                )
            )
            else 1.0
        )
        p.copy_(torch.randn_like(p) * sharp / p.shape[-1] ** 0.5)
