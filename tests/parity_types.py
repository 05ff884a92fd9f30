"""The families and weight types that the tests of the backends compare.

The tests take their parameters from here, and docs/model-parity.md is generated from it: a cell of
the parity table that says "passes" is a test.
"""

from __future__ import annotations

from verbatim.formats.registry import BLOCKS
from verbatim.model.architecture import spec_from_config
from verbatim.testing.tiny_models import FAMILIES, TINY_CONFIGS

# Families that are tested in every combination; the others share their matrix products.
FIRST_FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "mixtral"),
    "qwen3moe",
)
RECURRENT_FAMILIES = tuple(f for f, c in TINY_CONFIGS.items() if spec_from_config(c).recurrent)
NEWER_FAMILIES = tuple(f for f in FAMILIES if f not in (*FIRST_FAMILIES, *RECURRENT_FAMILIES))

FLOATS = ("f32", "f16", "bf16")
# Every tiny model has rows that divide into blocks of these types.
PLAIN = (*FLOATS, "q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
# Types with blocks of 256 weights that `quantise` writes: a dense model and a mixture.
WIDE_QUANTISED = {"q4_k": ("llama", "qwen3moe"), "q6_k": ("llama", "qwen3moe")}
# All others: random blocks in a wide llama. The matrix products are the same for every family.
WIDE = tuple(sorted(set(BLOCKS) - {*PLAIN, *WIDE_QUANTISED}))
# Families that together launch every kernel of the cuda backend, for Triton's interpreter.
INTERPRETED = (
    *("llama", "gpt2", "gemma2", "gemma3", "qwen3moe", "granite", "olmo2", "hunyuan-dense"),
    *("ministral3", "cohere2", "arcee", "glm4_moe", "gpt_oss", "lfm2", "qwen35", "gemma4"),
    *("gemma4moe", "gemma", "glm", "olmoe", "qwen2moe", "ernie4_5_moe", "qwen3vl"),
)


def interpreted_type(family: str) -> str:
    """The weight type of a family under Triton's interpreter."""
    return "q8_0" if family in ("llama", "gemma2", "qwen3moe") else "f32"


# Quantised safetensors that are read -> the test that compares them with their own dequantiser, all
# in tests/formats/test_packed_checkpoint.py. They become floats or blocks while they are loaded.
PACKED_FORMATS = {
    "AWQ": "test_awq_equals_autoawq",
    "GPTQ (with and without desc_act)": "test_gptq_equals_auto_round",
    "block FP8": "test_block_fp8_equals_transformers",
    "MXFP4": "test_mxfp4_equals_transformers",
    "compressed-tensors (float, int, packed)": "test_compressed_tensors_equal_their_library",
    "compressed-tensors, block FP8": "test_block_fp8_of_compressed_tensors_equals_its_library",
}
# `quantization_config` of safetensors that are refused -> what the error names.
REFUSED_FORMATS: tuple[tuple[dict[str, object], str], ...] = (
    ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
    ({"quant_method": "modelopt"}, "modelopt"),
    ({}, "quant_method is missing"),
    ({"quant_method": None}, "quant_method is null"),
    ({"quant_method": "gptq", "bits": 3}, "bits is 3"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
    ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, "kv_cache"),
    ({"quant_method": "compressed-tensors", "transform_config": {"R1": {}}}, "transform_config"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:lm_head": {}}}, "dynamic"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt"),
)
