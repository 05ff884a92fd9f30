"""Diffusion models against PyTorch: transformers' layers under a block-causal or a full mask, and
the loop of the published generate.py written again. Tokens are equal; the logits of the step that
decided a token are within 1e-4."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drive import exported

from convert import to_gguf
from verbatim import LLM, EngineConfig, SamplingParams
from verbatim.backend import open_backend
from verbatim.base.errors import ModelError
from verbatim.engine.loaded_model import LoadedModel
from verbatim.model.loading.load import load_model
from verbatim.testing.fakes import ByteTokenizer

pytestmark = pytest.mark.torch
MASK, PROMPT = 259, [256, *b"Once upon a time there was"]
TOKENS = 13
# tokens, start of the block in progress -> [positions, vocab] under the model's mask
Logits = Callable[[list[int], int], Any]


SIZES: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.3, "tie_word_embeddings": False, "attn_implementation": "eager",
}  # fmt: skip
# family -> transformers' class with its layers, changes of the sizes, keys of its config.json
BODIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sdar": ("Qwen3", {"head_dim": 16}, {"block_size": 4}),
    "Dream": ("Qwen2", {}, {}),
    "llada": ("Llama", {"num_key_value_heads": 4}, {}),
    "llada2_moe": (
        "Glm4Moe",
        {
            "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
            "topk_group": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "use_qk_norm": True, "routed_scaling_factor": 2.5,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5
            },
        },
        {"num_experts": 8, "num_shared_experts": 1},
    ),
    "nemotron_labs_diffusion": (
        "Ministral3",
        {"head_dim": 16, "sliding_window": None, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
            "original_max_position_embeddings": 16, "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.2,
        }},
        {"block_size": 8, "dlm_paradigm": "sbd_block_diff"},
    ),
}  # fmt: skip
NEMOTRON = {
    "model.embed_tokens": "encoder.embed_tokens", "model.norm": "encoder.norm",
    "lm_head": "diffusion_head", "model.layers": "encoder.layers",
}  # fmt: skip
LLADA2 = {
    "model.embed_tokens": "model.word_embeddings", "q_norm": "query_layernorm",
    "k_norm": "key_layernorm", "o_proj": "dense", "self_attn.": "attention.",
    "e_score_correction_bias": "expert_bias",
}  # fmt: skip
# LLaDA's names of tensors and keys, by llama's
LLADA = {
    "model.embed_tokens": "model.transformer.wte", "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out", "model.layers": "model.transformer.blocks",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm", "self_attn.": "",
    "o_proj": "attn_out", "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}  # fmt: skip
LLADA_KEYS = {
    "d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "mlp_hidden_size": "intermediate_size",
    "embedding_size": "vocab_size", "vocab_size": "vocab_size", "rope_theta": "rope_theta",
    "max_sequence_length": "max_position_embeddings", "rms_norm_eps": "rms_norm_eps",
    "activation_type": "hidden_act", "weight_tying": "tie_word_embeddings",
}  # fmt: skip


AT_ZERO = ("sdar", "llada2_moe")  # blocks begin at position 0
GGUF = {"dream": True, "llada": False}  # architecture -> diffusion.shift_logits


@pytest.fixture(scope="module", params=BODIES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Any]:
    """A random checkpoint under the names of the family's files, and the PyTorch model."""
    import torch
    import transformers

    kind, sizes, keys = BODIES[request.param]
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**SIZES | sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    if kind == "Qwen2":  # transformers starts biases at zero
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(weight, std=0.3)
    if kind == "Glm4Moe":  # it starts the bias of the choice at zero, and the norms at one
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            if "correction_bias" in name or "_norm" in name:
                torch.nn.init.uniform_(weight, 0.1, 0.7)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    if (arch := request.param.lower()) in GGUF:
        masks = {"tokenizer.ggml.mask_token_id": MASK, f"{arch}.attention.causal": False}
        for shift in (True, False):
            extra = {"diffusion.shift_logits": shift, **masks}
            to_gguf(path, path.parent / f"{arch}-{shift}.gguf", arch, extra=extra)
    written = json.loads((path / "config.json").read_text())
    written |= {"model_type": request.param, "mask_token_id": MASK, **keys}
    if request.param == "llada":
        rename(path / "model.safetensors", LLADA)
        written["rope_theta"] = 10000.0
        own = {name: written[of] for name, of in LLADA_KEYS.items()}
        own |= {"model_type": "llada", "mask_token_id": MASK, "block_type": "llama", "rope": True}
        written = own | {"layer_norm_type": "rms", "include_bias": False, "alibi": False}
    if kind == "Glm4Moe":
        rename(path / "model.safetensors", LLADA2)
        fuse(path / "model.safetensors")
        for name in ("n_shared_experts", "num_nextn_predict_layers"):
            written.pop(name, None)
    if kind == "Ministral3":
        rename(path / "model.safetensors", NEMOTRON)
    (path / "config.json").write_text(json.dumps(written))
    return request.param, path, model


def rename(file: Path, names: dict[str, str]) -> None:
    from safetensors.torch import load_file, save_file

    renamed = {}
    for name, tensor in load_file(file).items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    save_file(renamed, file)


def fuse(file: Path) -> None:
    """The matrices of q, k and v as one."""
    import torch
    from safetensors.torch import load_file, save_file

    state = load_file(file)
    for name in [name for name in state if name.endswith("q_proj.weight")]:
        parts = [state.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        state[name.replace("q_proj", "query_key_value")] = torch.cat(parts)
    save_file(state, file)


def masked_logits(model: Any, family: str, block: int) -> Logits:
    """Attention inside blocks (SDAR), of everything (LLaDA, Dream), or causal up to the block in
    progress, which sees itself (Nemotron)."""

    def run(tokens: list[int], start: int) -> Any:
        import torch

        at = torch.arange(len(tokens))[:, None]
        end = torch.full_like(at, len(tokens))
        if family in AT_ZERO:
            end = (at // block + 1) * block
        elif family.startswith("nemotron"):
            end = torch.where(at < start, at + 1, end)
        hidden = end <= at.T
        mask = torch.zeros(len(tokens), len(tokens)).masked_fill(hidden, float("-inf"))
        with torch.no_grad():
            out = model(input_ids=torch.tensor([tokens]), attention_mask=mask[None, None])
        return out.logits[0].double().numpy()

    return run


def plain_loop(
    logits: Logits, family: str, params: SamplingParams, block: int, steps: int
) -> dict[int, Any]:
    """Greedy decoding: position -> (token, logits of the step that decided it). Blocks of SDAR are
    anchored at position 0. Of a model with full attention the whole canvas is masked from the
    start. Dream draws a position from the row before it."""
    full, shift = family in ("llada", "Dream"), int(family == "Dream")
    anchor = 0 if family in AT_ZERO else len(PROMPT)
    tokens, out = list(PROMPT), dict[int, Any]()
    limit = len(PROMPT) + TOKENS
    tokens += [MASK] * TOKENS if full else []
    known = len(PROMPT)
    while known < limit:
        end = anchor + ((known - anchor) // block + 1) * block
        if full:
            end = min(end, limit)
        tokens += [MASK] * (end - len(tokens))
        masked = list(range(known, end))
        for step in range(block):
            if not masked:
                break
            rows = logits(tokens, anchor + (known - anchor) // block * block)
            rows[:, MASK] = -np.inf
            drawn, sure, entropy = {}, {}, {}
            for at in masked:
                row = rows[at - shift]
                p = np.exp(row - row.max())
                p /= p.sum()
                drawn[at], sure[at] = int(p.argmax()), float(p.max())
                entropy[at] = float(-(p * np.log(p.clip(1e-12))).sum())
            for at in chosen_of(
                params, masked, sure, entropy, block // steps + (step < block % steps)
            ):
                tokens[at], out[at] = drawn[at], (drawn[at], rows[at - shift])
                masked.remove(at)
        known = end
    return out


def chosen_of(
    params: SamplingParams,
    masked: list[int],
    sure: dict[int, float],
    entropy: dict[int, float],
    count: int,
) -> list[int]:
    if params.remasking == "sequential":
        return masked[:count]
    if params.remasking == "entropy_bounded":
        order = sorted(masked, key=lambda at: entropy[at])
        sums = np.cumsum([entropy[at] for at in order])
        return order[: max(1, int(np.searchsorted(sums, params.entropy_threshold or 0)))]
    high = [at for at in masked if sure[at] > (params.confidence_threshold or 2)]
    if params.remasking == "low_confidence_dynamic" and len(high) >= count:
        return high
    return sorted(masked, key=lambda at: -sure[at])[:count]


CASES = [
    ("sequential", 4, 4, {}),
    ("sequential", 8, 3, {}),
    ("low_confidence_static", 4, 2, {}),
    ("low_confidence_static", 5, 5, {}),
    ("low_confidence_dynamic", 8, 8, {"confidence_threshold": 0.6}),
    ("entropy_bounded", 8, None, {"entropy_threshold": 2.0}),
]


@pytest.mark.parametrize(("remasking", "block", "steps", "more"), CASES)
def test_tokens_and_logits_are_those_of_pytorch(
    remasking: str, block: int, steps: int | None, more: dict[str, Any], checkpoint: Any
) -> None:
    family, path, torch_model = checkpoint
    params = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, remasking=remasking, block_length=block,
        denoising_steps=steps, explain=1, receipt=True, logprobs=0, **more,
    )  # fmt: skip
    logits = masked_logits(torch_model, family, block)
    expected = plain_loop(logits, family, params, block, steps or block)
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


@pytest.mark.parametrize("written_by", ["llama.cpp", "verbatim"])
def test_gguf_files_have_the_tokens_of_pytorch(
    written_by: str, checkpoint: Any, tmp_path: Path
) -> None:
    """Written as llama.cpp's converter does, and by `verbatim convert`."""
    family, path, torch_model = checkpoint
    arch = family.lower()
    if arch not in GGUF:
        return
    file, wrong = (path.parent / f"{arch}-{v}.gguf" for v in (GGUF[arch], not GGUF[arch]))
    if written_by == "verbatim":
        file = exported(load_model(path), tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"diffusion\.shift_logits"):
        load_model(wrong)
    params = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, remasking="low_confidence_static",
        block_length=4, denoising_steps=2,
    )  # fmt: skip
    expected = plain_loop(masked_logits(torch_model, family, 4), family, params, 4, 2)
    model = load_model(file)
    config = EngineConfig(backend="reference")
    loaded = LoadedModel(open_backend(model, config), ByteTokenizer(), (), digest="x")
    with LLM.from_loaded(loaded) as llm:
        found = list(llm.generate(PROMPT, params).token_ids)
    assert found == [expected[len(PROMPT) + i][0] for i in range(TOKENS)]


def test_a_model_with_both_modes_decodes_from_left_to_right_by_default(checkpoint: Any) -> None:
    family, path, torch_model = checkpoint
    if not family.startswith("nemotron"):
        return
    tokens, logits = list(PROMPT), masked_logits(torch_model, family, 0)
    for _ in range(TOKENS):
        tokens.append(int(logits(tokens, len(tokens))[-1].argmax()))
    config = EngineConfig(backend="reference")
    loaded = LoadedModel(open_backend(load_model(path), config), ByteTokenizer(), (), digest="x")
    with LLM.from_loaded(loaded, check=True) as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        assert list(llm.generate(PROMPT, params).token_ids) == tokens[len(PROMPT) :]
