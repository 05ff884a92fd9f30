"""Diffusion models against PyTorch: transformers' layers under a block-causal mask, and the loop of
SDAR's published generate.py written again. Tokens are equal; the logits of the step that decided a
token are within 1e-4."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verbatim import LLM, EngineConfig, SamplingParams
from verbatim.backend import open_backend
from verbatim.engine.loaded_model import LoadedModel
from verbatim.model.loading.load import load_model
from verbatim.testing.fakes import ByteTokenizer

pytestmark = pytest.mark.torch
MASK, PROMPT = 259, [256, *b"Once upon a time there was"]
TOKENS = 13
Logits = Callable[[list[int]], Any]  # tokens -> [positions, vocab] under the model's mask


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random qwen3 as SDAR's files have it, and the PyTorch model."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=3, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.3, tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("sdar")
    model.save_pretrained(path)
    written = json.loads((path / "config.json").read_text())
    written |= {
        "model_type": "sdar",
        "architectures": ["SDARForCausalLM"],
        "block_size": 4,
        "mask_token_id": MASK,
    }
    (path / "config.json").write_text(json.dumps(written))
    return path, model


def block_logits(model: Any, block: int) -> Logits:
    def run(tokens: list[int]) -> Any:
        import torch

        at = torch.arange(len(tokens))
        hidden = at[None, :] >= (at[:, None] // block + 1) * block
        mask = torch.zeros(len(tokens), len(tokens)).masked_fill(hidden, float("-inf"))
        with torch.no_grad():
            out = model(input_ids=torch.tensor([tokens]), attention_mask=mask[None, None])
        return out.logits[0].double().numpy()

    return run


def plain_loop(logits: Logits, params: SamplingParams, block: int, steps: int) -> dict[int, Any]:
    """Greedy generate.py: position -> (token, logits of the step that decided it)."""
    tokens, out = list(PROMPT), dict[int, Any]()
    while len(tokens) < len(PROMPT) + TOKENS:
        end = (len(tokens) // block + 1) * block
        masked = list(range(len(tokens), end))
        tokens += [MASK] * len(masked)
        for step in range(block):
            if not masked:
                break
            rows = logits(tokens)
            rows[:, MASK] = -np.inf
            drawn, sure, entropy = {}, {}, {}
            for at in masked:
                p = np.exp(rows[at] - rows[at].max())
                p /= p.sum()
                drawn[at], sure[at] = int(p.argmax()), float(p.max())
                entropy[at] = float(-(p * np.log(p.clip(1e-12))).sum())
            count = block // steps + (step < block % steps)
            best = sorted(masked, key=lambda at: -sure[at])
            if params.remasking == "sequential":
                chosen = masked[:count]
            elif params.remasking == "entropy_bounded":
                order = sorted(masked, key=lambda at: entropy[at])
                sums = np.cumsum([entropy[at] for at in order])
                chosen = order[: max(1, int(np.searchsorted(sums, params.entropy_threshold)))]
            else:
                chosen = best[:count]
                high = [at for at in masked if sure[at] > (params.confidence_threshold or 2)]
                if params.remasking == "low_confidence_dynamic" and len(high) >= count:
                    chosen = high
            for at in chosen:
                tokens[at], out[at] = drawn[at], (drawn[at], rows[at])
                masked.remove(at)
    return out


CASES = [
    ("sequential", 4, 4, {}),
    ("sequential", 8, 3, {}),
    ("low_confidence_static", 4, 2, {}),
    ("low_confidence_static", 5, 5, {}),
    ("low_confidence_dynamic", 8, 8, {"confidence_threshold": 0.6}),
    ("entropy_bounded", 8, None, {"entropy_threshold": 2.0}),
]


@pytest.mark.parametrize(("remasking", "block", "steps", "more"), CASES)
def test_sdar_equals_transformers_under_the_block_causal_mask(
    remasking: str, block: int, steps: int | None, more: dict[str, Any], checkpoint: Any
) -> None:
    path, torch_model = checkpoint
    params = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, remasking=remasking, block_length=block,
        denoising_steps=steps, explain=1, receipt=True, logprobs=0, **more,
    )  # fmt: skip
    expected = plain_loop(block_logits(torch_model, block), params, block, steps or block)
    config = EngineConfig(backend="reference")
    loaded = LoadedModel(open_backend(load_model(path), config), ByteTokenizer(), (), digest="x")
    with LLM.from_loaded(loaded, check=True) as llm:
        choice = llm.generate(PROMPT, params).choices[0]
    assert [expected[len(PROMPT) + i][0] for i in range(TOKENS)] == list(choice.token_ids)
    for record, logprob in zip(choice.explain, choice.logprobs, strict=True):
        row = np.frombuffer(base64.b64decode(record["row"]), "<f4").astype(float)
        wanted = expected[record["position"]][1]
        seen = np.isfinite(wanted)  # the loop never draws the mask
        assert np.abs(row[seen] - wanted[seen]).max() < 1e-4
        whole = np.log(np.exp(row - row.max()).sum())
        assert logprob.logprob == pytest.approx(row[logprob.token] - row.max() - whole, abs=1e-6)
