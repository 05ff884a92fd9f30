"""Encoders from GGUF, with tensor names and keys of the gguf package, against safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tiny_encoders import HEADS, HIDDEN, LAYERS, MLP, POSITIONS, write_encoder
from verbatim import LLM
from verbatim.base.errors import ModelError, UnsupportedError
from verbatim.diagnose.doctor.file_checks import check_files
from verbatim.diagnose.doctor.model_files import read_files
from verbatim.diagnose.doctor.weight_checks import check_weights

ARCHITECTURES = {"bert": gguf.MODEL_ARCH.BERT, "nomic_bert": gguf.MODEL_ARCH.NOMIC_BERT}
TEXTS = ["the cat sat on the mat.", "Why is the SKY blue, zebra?", "café [SEP]"]


def write_gguf(directory: Path, kind: str, target: Path, pooling: Any = None, **keys: int) -> Path:
    """The tiny encoder of a directory as llama.cpp's converter writes it."""
    from safetensors.numpy import load_file

    arch = ARCHITECTURES[kind]
    out = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[arch])
    out.add_context_length(POSITIONS)
    out.add_embedding_length(HIDDEN)
    out.add_feed_forward_length(MLP)
    out.add_block_count(LAYERS)
    out.add_head_count(HEADS)
    out.add_layer_norm_eps(1e-12)
    out.add_causal_attention(False)
    if pooling is not None:
        out.add_pooling_type(pooling)
    if kind == "nomic_bert":
        out.add_rope_freq_base(1000.0)
    for key, value in keys.items():
        out.add_uint32(f"{gguf.MODEL_ARCH_NAMES[arch]}.{key}", value)
    vocab = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    tokens, types = [], []
    for text in sorted(vocab, key=vocab.__getitem__):
        control = text.startswith("[")
        tokens.append(
            text if control else text.removeprefix("##") if text[:2] == "##" else f"▁{text}"
        )
        types.append(gguf.TokenType.CONTROL if control else gguf.TokenType.NORMAL)
    out.add_tokenizer_model("bert")
    out.add_token_list(tokens)
    out.add_token_types(types)
    out.add_token_type_count(2)
    out.add_bos_token_id(vocab["[CLS]"])
    out.add_sep_token_id(vocab["[SEP]"])
    out.add_unk_token_id(vocab["[UNK]"])
    names = gguf.get_tensor_name_map(arch, LAYERS)
    for name, values in load_file(directory / "model.safetensors").items():
        if name.startswith("pooler."):
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found, name
        out.add_tensor(found, values)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return target


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_gguf_has_the_bits_of_safetensors(kind: str, tmp_path: Path) -> None:
    directory = write_encoder(tmp_path / "m", kind, pooling="cls", normalise=False)
    file = write_gguf(directory, kind, tmp_path / "m.gguf", gguf.PoolingType.CLS)
    with LLM(directory) as left, LLM(file) as right:
        assert right.parts.embedding.pooling == "cls"
        assert right.context == POSITIONS
        for text in TEXTS:
            assert right.encode(text) == left.encode(text)
            assert right.decode(right.encode(text)) == left.decode(left.encode(text))
        np.testing.assert_array_equal(right.embed(TEXTS), left.embed(TEXTS))


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_doctor_calls_a_gguf_encoder_sound(kind: str, tmp_path: Path) -> None:
    directory = write_encoder(tmp_path / "m", kind)
    files = read_files(write_gguf(directory, kind, tmp_path / "m.gguf", gguf.PoolingType.CLS))
    assert files.encoder
    found = [*check_files(files), *check_weights(files)]
    assert [f for f in found if f.state != "good"] == []
    assert [f.text for f in found if f.check == "pooling"] == ["the files state cls"]


def test_what_a_gguf_encoder_refuses(tmp_path: Path) -> None:
    directory = write_encoder(tmp_path / "m", "bert")
    bare = write_gguf(directory, "bert", tmp_path / "bare.gguf")
    with LLM(bare) as llm, pytest.raises(UnsupportedError, match="does not state"):
        llm.embed("sky")
    rank = write_gguf(directory, "bert", tmp_path / "rank.gguf", gguf.PoolingType.RANK)
    with pytest.raises(ModelError, match="cross-encoders are read from safetensors only"):
        LLM(rank)
    new = write_gguf(directory, "bert", tmp_path / "new.gguf", gguf.PoolingType.MEAN, new_key=3)
    with pytest.raises(ModelError, match=r"bert\.new_key is 3"):
        LLM(new)
