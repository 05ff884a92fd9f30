"""Shapes of real models with random weights, opened on the GPU, for cuda.py and its neighbours.

    llm = open_shape("qwen3-0.6b")

No file is read: the weights are made on the device in the layout of device_weights.load.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from verbatim import LLM
from verbatim.backend.cuda.backend import CudaBackend
from verbatim.backend.cuda.device_weights import join_layer, unpack_blocks
from verbatim.backend.cuda.kernel_compile import compile_kernels
from verbatim.backend.cuda.kernels import quant
from verbatim.backend.cuda.kernels.block_readers import E2M1_BIAS, E4M3_BIAS, HALVES
from verbatim.backend.gpu_weights import BLOCK_FORMATS, TILE, BlockMode, is_matrix, packing
from verbatim.base.config import EngineConfig
from verbatim.engine.loaded_model import LoadedModel
from verbatim.files.safetensors import SafetensorsDir
from verbatim.formats.tensor import Weights
from verbatim.model.architecture import spec_from_config
from verbatim.model.layout import is_expert, layout
from verbatim.model.loading.load import Model
from verbatim.testing.fakes import ByteTokenizer

_COMMON = {"rms_norm_eps": 1e-6, "max_position_embeddings": 16384}
_4B = {
    **_COMMON, "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9216,
    "num_hidden_layers": 32, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        **_COMMON, "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3,
        "rope_theta": 100000.0, "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        **_COMMON, "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "rope_theta": 1e6, "tie_word_embeddings": True,
    },
    "llama-8b": {
        **_COMMON, "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0,
    },
    "qwen3-30b-a3b": {
        **_COMMON, "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_theta": 1e6,
    },
    # 4B, thrice: dense, three of four layers delta nets, five of six layers windowed
    "qwen3-4b": {
        **_4B, "model_type": "qwen3", "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 256,
    },
    "qwen3.5-4b": {
        **_4B, "model_type": "qwen3_5_text", "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    },
    "gemma3-4b": {
        **_4B, "model_type": "gemma3_text", "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 1024,
        "sliding_window_pattern": 6, "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": 1e4,
    },
    # the experts are mxfp4, as published
    "gpt-oss-20b": {
        **_COMMON, "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True,
        "rope_theta": 150000.0, "tie_word_embeddings": False,
    },
}  # fmt: skip
EXPERT_TYPES = {"gpt-oss-20b": "mxfp4"}

# types that random_blocks can make
TYPES = [t for t, form in BLOCK_FORMATS.items() if form.offset != "add" and t != "q6_k"]


class FakeTokenizer(ByteTokenizer):
    """Ids of a vocabulary of any size; the text does not matter here."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    @property
    def vocab_size(self) -> int:
        return self._count

    def token_bytes(self, token: int) -> bytes:
        return b"x"


def random_blocks(
    shape: tuple[int, ...], type: str, make: torch.Generator, device: torch.device
) -> quant.BlockWeight:
    """Random codes of a format, with one scale for all groups and zero points near 0."""
    (*experts, n, k), form = shape, BLOCK_FORMATS[type]
    pack, wide = packing(k)
    count = math.prod(experts) * -(-n // TILE) * TILE * wide
    size, groups = (count * form.bits // 8,), (count // form.group,)
    codes = torch.randint(0, 256, size, generator=make, device=device, dtype=torch.uint8)
    spread = 4.6 if form.bits == 4 else 74.0  # standard deviation of the codes
    dtype = torch.float32 if form.group == 128 else HALVES[form.result]
    if form.code == "e4m3":
        codes &= 0b10111111  # below 2; the kernel's values are smaller by 2 ** 8
        spread, dtype = 0.6 / E4M3_BIAS, torch.float32
    elif form.code == "e2m1":
        spread = 2.9 / 2**E2M1_BIAS
    scales = torch.full(groups, 1 / (spread * k**0.5), device=device).to(dtype)
    zeros = None
    if form.offset == "zero":
        zeros = torch.randint(-1, 2, groups, generator=make, device=device)
        zeros = zeros.to(torch.float32 if form.group == 128 else torch.float16)
    return quant.BlockWeight(shape, wide, codes, scales, zeros, form, pack)


def weights_of(
    spec: Any,
    device: torch.device,
    type: str | None = None,
    blocks: BlockMode = "both",
    expert_type: str | None = None,
) -> dict[str, Any]:
    """Random weights, created on the device in the layout of device_weights.load: bfloat16, or
    blocks of a quantised type."""
    make = torch.Generator(device=device).manual_seed(0)
    found: dict[str, Any] = {}
    for name, shape in layout(spec).items():
        expert = is_expert(name) and is_matrix(name)
        blocks_type = expert_type if expert and expert_type else type
        if len(shape) == 1:
            # the rate of a decay is negative
            found[name] = torch.full(shape, -0.1 if name.endswith("decay") else 1.0, device=device)
        elif blocks_type is not None and is_matrix(name):
            found[name] = random_blocks(tuple(shape), blocks_type, make, device)
        else:
            values = torch.randn(shape, generator=make, device=device) / shape[-1] ** 0.5
            half = is_matrix(name) or name.endswith(("delta.b", "delta.a"))
            values = values * (0.5 if name == "embed" else 1.0)
            found[name] = values.to(torch.bfloat16) if half else values
    for i in range(len(spec.layers)):
        join_layer(found, spec, i)
    unpack_blocks(found, blocks)
    return found


def open_shape(
    name: str, type: str | None = None, blocks: BlockMode = "both", **options: Any
) -> LLM:
    spec = spec_from_config(SHAPES[name], context=None, file=name)
    source = SafetensorsDir(Path(name), SHAPES[name], {}, {}, name)
    model = Model(spec, Weights({}, name, name), source, (), {})
    config = EngineConfig(backend="cuda", **options)
    weights = weights_of(spec, torch.device("cuda"), type, blocks, EXPERT_TYPES.get(name))
    backend = CudaBackend(model, config, weights=weights)
    loaded = LoadedModel(backend, FakeTokenizer(spec.vocab), (), name=name, digest=name)
    llm = LLM.from_loaded(loaded, **{"backend": "cuda", **options})
    compile_kernels(backend)
    return llm
