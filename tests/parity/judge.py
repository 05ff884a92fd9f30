"""The outcome of loading a mutated config with verbatim.

transformers builds a model from the mutated config and saves its weights. Verbatim loads them with
the mutated config.json, and both compute the logits (an encoder: the hidden states) of the same
twelve tokens.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import randomise
from drive import Driver
from mutations import BASE, ENCODERS, KIND, WRAPPERS, Mutation

from verbatim.base.errors import ModelError, ParameterError
from verbatim.encoder.encoder import encode
from verbatim.encoder.encoder_load import load_encoder, read_encoder_config
from verbatim.model.architecture import read_config
from verbatim.model.loading.load import load_model

TOLERANCE = 1e-4
TOKENS = np.random.default_rng(7).integers(3, 96, 12).tolist()


@dataclass(frozen=True)
class Outcome:
    """`kind`: equal, different, refused (verbatim's error names a changed key) or unnamed (it does
    not). If transformers itself fails: both (verbatim fails too) or alone (verbatim loads it)."""

    kind: str
    detail: str = ""


def judge(mutation: Mutation, directory: Path) -> Outcome:
    """Load the mutated config with both and compare the logits."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    text = json.dumps(mutation.config)
    try:
        config, logits = (
            _with_original_weights if mutation.original_weights else _with_new_weights
        )(mutation, directory)
    except Exception as error:  # any error of transformers: there are no logits to compare with
        return Outcome(_both_or_alone(mutation), f"{type(error).__name__}: {str(error)[:200]}")
    (directory / "config.json").write_text(text)
    try:
        ours = _ours(mutation, directory, config)
    except (ModelError, ParameterError) as error:
        text = str(error).replace(str(directory), "")
        named = [key for key in mutation.keys if names_key(text, key)]
        return Outcome("refused" if named else "unnamed", text)
    if np.isnan(logits).any():
        return Outcome("alone", "NaN")
    worst = float(np.abs(ours - logits).max()) if ours.shape == logits.shape else float("inf")
    return Outcome("equal" if worst < TOLERANCE else "different", f"{worst:.2e}")


def _ours(mutation: Mutation, directory: Path, config: Any) -> np.ndarray:
    if mutation.family not in ENCODERS:
        return Driver(load_model(directory, context=_context(config))).feed(TOKENS)
    model = load_encoder(directory)
    if len(TOKENS) > model.spec.context:
        raise ModelError("max_position_embeddings is too small for the tokens", file="")
    tokens = np.array(TOKENS)
    return encode(model.spec, model.weights, tokens, np.zeros_like(tokens))


def names_key(text: str, key: str) -> bool:
    """Whether the text has the key as a whole word: `type` is not in `rope_type`."""
    return re.search(rf"(?<!\w){re.escape(key)}(?!\w)", text) is not None


def _both_or_alone(mutation: Mutation) -> str:
    try:
        if mutation.family in ENCODERS:
            read_encoder_config(mutation.config, "config.json")
        else:
            read_config(mutation.config)
    except ModelError:
        return "both"
    return "alone"


def _class(family: str) -> Any:
    import transformers

    kind = KIND[family]
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind.removesuffix('Text')}ForCausalLM"
    if family in ENCODERS:
        name = f"{kind}Model"
    elif family in WRAPPERS:
        name = f"{kind}ForConditionalGeneration"
    return getattr(transformers, name)


def _with_new_weights(mutation: Mutation, directory: Path) -> tuple[Any, np.ndarray]:
    """Build new weights for the mutated config."""
    import transformers

    config = getattr(transformers, f"{KIND[mutation.family]}Config").from_dict(
        json.loads(json.dumps(mutation.config))
    )
    config._attn_implementation = "eager"
    model = _randomised(_class(mutation.family)(config), mutation.number)
    logits = _logits(model)
    model.save_pretrained(directory)
    return config, logits


def _with_original_weights(mutation: Mutation, directory: Path) -> tuple[Any, np.ndarray]:
    """Use weights of the original config, with a separate head, under the mutated config."""
    import transformers

    base = {**BASE[mutation.family], "tie_word_embeddings": False}
    config = getattr(transformers, f"{KIND[mutation.family]}Config").from_dict(base)
    _randomised(_class(mutation.family)(config), mutation.number).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(mutation.config))
    model = (
        _class(mutation.family)
        .from_pretrained(directory, attn_implementation="eager")
        .float()
        .eval()
    )
    return model.config, _logits(model)


def _randomised(model: Any, seed: int) -> Any:
    import torch

    torch.manual_seed(seed)
    model = model.float().eval()
    with torch.no_grad():
        for parameter, values in model.named_parameters():
            randomise(parameter, values)
    return model


def _logits(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        if not hasattr(model, "lm_head"):
            states: np.ndarray = model(torch.tensor([TOKENS])).last_hidden_state[0].numpy()
            return states
        logits: np.ndarray = model(torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    return logits


def _context(config: Any) -> int | None:
    """The length that transformers uses for longrope and dynamic, as the engine's context."""
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    records = [r for r in (rope, *rope.values()) if isinstance(r, dict) and "rope_type" in r]
    for record in records:
        original = record.get("original_max_position_embeddings", 0)
        if (
            record["rope_type"] == "longrope"
            and len(TOKENS) <= original < config.max_position_embeddings
        ):
            return int(original)
        if record["rope_type"] == "dynamic" and config.max_position_embeddings < len(TOKENS):
            return len(TOKENS)
    return None
