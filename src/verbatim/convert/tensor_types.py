"""The type to write each tensor of a GGUF file as."""

from __future__ import annotations

from verbatim.formats.registry import FORMATS

# Types that are written, by value of general.file_type as llama.cpp numbers them.
FILE_TYPES = {name: f.file_type for name, f in FORMATS.items() if f.file_type is not None}
# llama.cpp's names of mixtures -> the type that most of their matrices have.
MIXTURES = {mixture: name for name, f in FILE_TYPES.items() for mixture in f.mixtures}
FLOATS = ("f32", "f16", "bf16")
# Ends of the names of small matrices that decide much: routers and gates.
UNQUANTISED = ("ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_alpha", "ssm_beta", "ssm_ba")
KERNELS = ("shortconv.conv", "ssm_conv1d")  # llama.cpp's convolution takes float32 only


def type_for(
    name: str, type: str, shape: tuple[int, ...], quant: str | None, head: str | None
) -> str:
    """The type to write a tensor as. Matrices become `quant`; routers and position embeddings
    keep their type; convolutions and 1-D tensors (norms, biases, rope tables) become f32."""
    stem = name.removesuffix(".weight")
    if len(shape) < 2 or stem.endswith(KERNELS):
        return "f32" if type in ("f16", "bf16") else type
    if stem == "position_embd" or stem.endswith(UNQUANTISED) or quant is None:
        return head or type if stem in ("token_embd", "output") else type
    chosen = quant
    if stem in ("token_embd", "output"):
        chosen = head or (
            quant if FORMATS[quant].size / FORMATS[quant].values >= 34 / 32 else "q8_0"
        )
    if shape[-1] % FORMATS[chosen].values:
        chosen = FILE_TYPES[chosen].small or type
    return chosen if shape[-1] % FORMATS[chosen].values == 0 else type


def reason(name: str, shape: tuple[int, ...], quant: str) -> str:
    """Why type_for gives this matrix another type than `quant`."""
    stem = name.removesuffix(".weight")
    if stem.endswith(KERNELS):
        return "kernels of convolutions, one float per channel and tap"
    if stem == "position_embd" or stem.endswith(UNQUANTISED):
        return "routers, gates and position embeddings keep their type"
    if shape[-1] % FORMATS[quant].values:
        return f"a row length that the block size of {quant} does not divide"
    return "embedding and head"
