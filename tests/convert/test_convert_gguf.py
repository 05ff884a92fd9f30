"""`verbatim convert`: the written file loads as the same model, weights and tokenizer, or the
conversion fails with an error that names the obstacle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verbatim.base.errors import ModelError
from verbatim.cli.main import main
from verbatim.convert.export_model import check_round_trip, model_metadata, model_tensors
from verbatim.convert.export_tokenizer import tokenizer_metadata
from verbatim.convert.tensor_types import type_for
from verbatim.files.gguf import read_gguf
from verbatim.files.gguf_write import write_gguf
from verbatim.model.loading.load import Model, load_model
from verbatim.testing.tiny_models import FAMILIES, tiny_model
from verbatim.text.gguf_vocab import UNUSED, USER_DEFINED
from verbatim.text.templates.template_files import template_from_directory, template_from_gguf
from verbatim.text.tokenizer import Tokenizer, from_directory, from_gguf

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LLAMA3["original_max_position_embeddings"] = 64
SCALINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 128,
        }
    },
}


def export(model: Model, path: Path) -> Model:
    metadata, extra = model_metadata(model, "tiny")
    tensors = {t.name: t for t in (*extra, *model_tensors(model))}
    check_round_trip(model, metadata, tensors)
    write_gguf(path, metadata, tensors.values())
    return load_model(path)


def same_weights(a: Model, b: Model) -> None:
    assert set(a.weights) == set(b.weights)
    for name, tensor in a.weights.items():
        x, y = tensor.to_f32(), b.weights[name].to_f32()
        shifted = "norm" in name and not name.endswith("delta.norm")
        offset = a.spec.norm_offset - b.spec.norm_offset if shifted else 0.0
        # a router norm is a file's values times a root; the tiny models' values are no such product
        error = 1.2e-7 if name.endswith("router_norm") else 0.0
        np.testing.assert_allclose(x + np.float32(offset), y, rtol=error, atol=0, err_msg=name)


# GGUF orders the value heads of their delta nets otherwise: test_export.py compares their logits.
REORDERED = ("qwen35", "qwen35moe")


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in REORDERED])
def test_every_family_survives_the_round_trip(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, **({"norm_topk_prob": True} if family == "qwen3moe" else {}))
    same_weights(model, export(model, tmp_path / "x.gguf"))


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scalings_survive(name: str, tmp_path: Path) -> None:
    model = tiny_model("llama", **SCALINGS[name])
    again = export(model, tmp_path / "x.gguf")
    for a, b in zip(model.spec.layers, again.spec.layers, strict=True):
        assert a.rope is not None
        assert b.rope is not None
        np.testing.assert_allclose(a.rope.inv_freq, b.rope.inv_freq, rtol=1e-6)
        assert a.rope.attention_factor == pytest.approx(b.rope.attention_factor, rel=1e-6)


def test_a_model_that_gguf_cannot_express_is_rejected(tmp_path: Path) -> None:
    dynamic = tiny_model(
        "llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    )
    with pytest.raises(ModelError, match="dynamic"):
        export(dynamic, tmp_path / "x.gguf")
    scale = tiny_model("gemma2", query_pre_attn_scalar=100)
    with pytest.raises(ModelError, match="attention_scale"):
        export(scale, tmp_path / "x.gguf")
    routing = tiny_model("qwen3moe", norm_topk_prob=False)
    with pytest.raises(ModelError, match="experts_renormalised"):
        export(routing, tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------------- tokenizers


def byte_level(directory: Path, pattern: str | None = None, vocab: int = 300) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    words = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is None:
        words.pre_tokenizer = level
    else:
        words.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated"), level]
        )
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(
        ["the cat sat on the mat, the dog didn't. 12345 it's the 1999s"] * 4, trainer
    )
    words.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "bos_token": None})
    )


def test_a_byte_level_tokenizer_gets_its_pre_tokenizer_name(tmp_path: Path) -> None:
    byte_level(tmp_path)
    original = from_directory(tmp_path)
    meta = tokenizer_metadata(tmp_path, original, 310, "llama")
    assert meta["tokenizer.ggml.pre"] in ("gpt-2", "gpt2")
    again = from_gguf(meta)
    assert again.vocab_size == 310  # padded to the rows of the embedding
    for text in ("the dog's 77 cats\n\n didn't", "<|end|> typed", "naïve 日本"):
        assert again.encode(text) == original.encode(text)
        assert again.encode(text, special=True) == original.encode(text, special=True)
    for i in range(original.vocab_size):
        assert again.token_bytes(i) == original.token_bytes(i)


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "gemma4"])
def test_ids_behind_the_vocabulary_have_no_text(tmp_path: Path, kind: str) -> None:
    """As in transformers, where the id is no token, and in llama.cpp, which prints no UNUSED
    token. The name is that of llama.cpp's converter, and typed it is text."""
    if kind == "byte_level":
        byte_level(tmp_path, vocab=290)
    else:
        sentencepiece(tmp_path, gemma=kind == "gemma4")
    original = from_directory(tmp_path)
    size = original.vocab_size
    meta = tokenizer_metadata(
        tmp_path, original, size + 3, "gemma4" if kind == "gemma4" else "llama"
    )
    assert meta["tokenizer.ggml.tokens"][size:] == [f"[PAD{size + i}]" for i in range(3)]
    assert meta["tokenizer.ggml.token_type"][size:] == [UNUSED] * 3
    again = from_gguf(meta)
    assert again.vocab_size == size + 3
    for i in range(size, size + 3):
        assert again.token_bytes(i) == b""
        assert again.decode([i], skip_special=False) == ""
        assert again.find(f"[PAD{i}]") is None
        typed = f"a [PAD{i}] b"
        for special in (False, True):
            ids = again.encode(typed, special=special)
            assert ids == original.encode(typed, special=special)
            assert not set(ids) & set(range(size, size + 3))
            assert again.decode(ids) == original.decode(ids)
        assert again.decode([*again.encode("the"), i, *again.encode("the")]) == again.decode(
            [*again.encode("the"), *again.encode("the")]
        )


def sentencepiece(directory: Path, *, gemma: bool = False) -> None:
    """A BPE tokenizer with byte fallback and spaces as symbols, as in Llama 2's and Mistral's
    tokenizer.json. `gemma`: a tab in the place of <0x09>, and runs of spaces that are merged and
    also added tokens."""
    from tokenizers import Tokenizer, models, normalizers, trainers

    words = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    words.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=120,
        special_tokens=["<unk>", "<s>", "</s>", *(("<|channel>", "<turn|>") if gemma else ())],
        show_progress=False,
    )
    words.train_from_iterator(
        ["the cat sat on the mat", "a dog sat there with the cat"] * 3, trainer
    )
    data = json.loads(words.to_str())
    vocab = data["model"]["vocab"]
    for b in range(256):
        vocab["\t" if gemma and b == 9 else f"<0x{b:02X}>"] = len(vocab)
    for length in (2, 3) if gemma else ():
        run = "\u2581" * length
        vocab[run] = len(vocab)
        data["model"]["merges"].append([run[1:], "\u2581"])
        data["added_tokens"].append(
            {**data["added_tokens"][0], "id": vocab[run], "content": run, "special": False}
        )
    data["model"]["byte_fallback"] = True
    data["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    (directory / "tokenizer.json").write_text(json.dumps(data))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("gemma", [False, True], ids=["llama2", "gemma"])
def test_a_sentencepiece_tokenizer_gets_scores(tmp_path: Path, gemma: bool) -> None:
    sentencepiece(tmp_path, gemma=gemma)
    original = from_directory(tmp_path)
    meta = tokenizer_metadata(tmp_path, original, original.vocab_size, "llama")
    assert meta["tokenizer.ggml.model"] == "llama"
    again = from_gguf(meta)
    same_ids(again, original)


def same_ids(again: Tokenizer, original: Tokenizer) -> None:
    texts = (
        *("the cat sat", "there  is é and 日本", "<s> typed", "a\tcat", "a ▁▁ b", "a    cat ▁▁▁▁"),
        "<|channel>the cat<turn|>",
    )
    for text in texts:
        assert again.encode(text) == original.encode(text), text
        assert again.encode(text, special=True) == original.encode(text, special=True), text
        assert again.encode_prompt(text) == original.encode_prompt(text), text


def test_gemma4_gets_merges_as_llama_cpp_writes_them(tmp_path: Path) -> None:
    """Its markers are user-defined in the file, and control tokens again when it is read."""
    sentencepiece(tmp_path, gemma=True)
    original = from_directory(tmp_path)
    meta = tokenizer_metadata(tmp_path, original, original.vocab_size, "gemma4")
    assert meta["tokenizer.ggml.model"] == "gemma4"
    assert "tokenizer.ggml.scores" not in meta
    channel = meta["tokenizer.ggml.tokens"].index("<|channel>")
    assert meta["tokenizer.ggml.token_type"][channel] == USER_DEFINED
    again = from_gguf(meta)
    same_ids(again, original)
    assert again.is_control(channel)
    assert original.is_control(channel)
    assert meta["tokenizer.ggml.tokens"].index("<turn|>") in again.eos_ids
    # llama.cpp's converter gives every token one score, Ollama's its id, and the model llama.
    count = len(meta["tokenizer.ggml.tokens"])
    same_ids(from_gguf({**meta, "tokenizer.ggml.scores": [-1000.0] * count}), original)
    ollama = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [*map(float, range(count))]}
    same_ids(from_gguf({**meta, **ollama}), original)
    del meta["tokenizer.ggml.merges"]
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.merges is missing"):
        from_gguf(meta)


def test_a_unigram_tokenizer_is_rejected(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)).save(
        str(tmp_path / "tokenizer.json")
    )
    other = tmp_path / "other"
    other.mkdir()
    byte_level(other)
    with pytest.raises(ModelError, match="Unigram"):
        tokenizer_metadata(tmp_path, from_directory(other), 300, "llama")


def test_an_unknown_pre_tokenizer_is_rejected(tmp_path: Path) -> None:
    byte_level(tmp_path, pattern="[aeiou]")
    with pytest.raises(ModelError, match="pre-tokenizer"):
        tokenizer_metadata(tmp_path, from_directory(tmp_path), 300, "llama")


@pytest.mark.parametrize("rule", ["", "lstrip", "rstrip", "single_word"])
def test_added_tokens_with_a_rule_for_their_surroundings_are_rejected(
    rule: str, tmp_path: Path
) -> None:
    byte_level(tmp_path)
    path = tmp_path / "tokenizer.json"
    data = json.loads(path.read_text())
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    added = {"id": 300, "content": "<|u|>", **flags}
    data["added_tokens"].append({**added, **({rule: True} if rule else {})})
    path.write_text(json.dumps(data))
    if not rule:
        assert tokenizer_metadata(tmp_path, from_directory(tmp_path), 301, "llama")
        return
    with pytest.raises(ModelError, match="GGUF cannot express its tokenizer"):
        tokenizer_metadata(tmp_path, from_directory(tmp_path), 301, "llama")


def test_prompts_that_end_with_two_tokens_are_rejected_by_name(tmp_path: Path) -> None:
    """As those of Command R+."""
    byte_level(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    end = data["added_tokens"][0]["id"]
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<|end|>", "type_id": 0}},
            {"SpecialToken": {"id": "<|end|>", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [end], "tokens": ["<|end|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ModelError, match=r"prompts end with <\|end\|><\|end\|>, and GGUF"):
        tokenizer_metadata(tmp_path, from_directory(tmp_path), 300, "llama")


# ------------------------------------------------------------------------------- the whole command


def test_a_tokenizer_of_the_size_of_llama_3_is_exported(tmp_path: Path) -> None:
    """Its tokenizer.json has 550,000 values, more than any other JSON file of a model may have."""
    byte_level(tmp_path)
    original = from_directory(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    data["truncation"] = [0] * 800_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert tokenizer_metadata(tmp_path, original, 300, "llama")["tokenizer.ggml.pre"] == "gpt-2"


def call(*words: str) -> int:
    from verbatim.cli.main import main

    with pytest.raises(SystemExit) as ended:
        main(["convert", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def save_directory(model: Model, directory: Path) -> None:
    """A llama-family model as a safetensors directory with a tokenizer."""
    from safetensors.numpy import save_file

    from verbatim.model.loading.names import hf_source

    directory.mkdir(exist_ok=True)
    byte_level(directory, vocab=260)
    arrays = {
        hf_source("llama", "model.", name, 0).names[0]: np.array(t.to_f32())
        for name, t in model.weights.items()
    }
    save_file(arrays, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(getattr(model.source, "config", {})))


def test_a_directory_becomes_a_quantised_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("llama", vocab_size=264, hidden_size=64, intermediate_size=256)
    save_directory(model, tmp_path / "dir")
    (tmp_path / "dir" / "generation_config.json").write_text(
        '{"temperature": 0.5, "top_k": 12, "typical_p": 0.9}'
    )
    target = tmp_path / "out.gguf"
    assert call(str(tmp_path / "dir"), str(target), "--quant", "q4_0") == 0
    file = read_gguf(target)
    assert file.metadata["general.sampling.temp"] == 0.5
    assert file.metadata["general.sampling.top_k"] == 12
    types = {name: t.type for name, t in file.tensors.items()}
    assert types["token_embd.weight"] == types["output.weight"] == "q8_0"
    assert types["blk.0.attn_q.weight"] == types["blk.2.ffn_down.weight"] == "q4_0"
    assert types["blk.0.attn_norm.weight"] == "f32"
    assert file.metadata["general.file_type"] == 2
    assert from_gguf(file.metadata).encode("the cat") == from_directory(tmp_path / "dir").encode(
        "the cat"
    )
    loaded = load_model(target)
    for name in ("layers.0.attn.q", "layers.1.mlp.up", "embed"):
        x, y = model.weights[name].to_f32(), loaded.weights[name].to_f32()
        assert float(np.abs(x - y).max()) < 0.15 * float(np.abs(x).max()), name
    result = capsys.readouterr()
    assert result.out == ""
    assert "q8_0" in result.err
    assert "generation_config.json: typical_p has no key in GGUF" in result.err

    assert call(str(tmp_path / "dir"), str(target), "--quant", "q8_0") == 2  # exists
    assert call(str(target), str(target), "--force") == 2  # itself
    again = tmp_path / "again.gguf"
    assert call(str(target), str(again)) == 0  # without --quant: the same bytes in every tensor
    for name, tensor in read_gguf(again).tensors.items():
        assert tensor.type == types[name]
        np.testing.assert_array_equal(tensor.data, file.tensors[name].data)
    assert {k: v for k, v in read_gguf(again).metadata.items() if not hasattr(v, "shape")} == {
        k: v for k, v in file.metadata.items() if not hasattr(v, "shape")
    }


def test_matrices_of_another_type_are_reported_with_their_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Convolutions and gates of delta nets stay float, and embedding and head become q8_0."""
    source, target = str(tmp_path / "tiny.gguf"), str(tmp_path / "out.gguf")
    export(tiny_model("qwen35", hidden_size=64, intermediate_size=96), Path(source))
    for quant in ("q8_0", "q4_0"):
        assert call(source, target, "--quant", quant, "--force") == 0
        text = capsys.readouterr().err
        assert "3 matrices are written as f32: kernels of convolutions, one float" in text
        assert "6 matrices are written as f32: routers, gates and position embeddings" in text
        assert ("written as q8_0: embedding and head" in text) == (quant == "q4_0")


def test_the_pooling_of_an_embedding_model_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen3-Embedding pools the last token; llama.cpp's converter writes the same key."""
    from gguf import PoolingType
    from gguf.constants import Keys

    folder, target = tmp_path / "dir", tmp_path / "out.gguf"
    save_directory(tiny_model("llama", vocab_size=270), folder)
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    prompts = {"prompts": {"query": "Query: "}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    assert call(str(folder), str(target)) == 0
    key = Keys.LLM.POOLING_TYPE.format(arch="llama")
    assert read_gguf(target).metadata[key] == PoolingType.LAST
    assert load_model(target).embedding.pooling == load_model(folder).embedding.pooling == "last"
    text = capsys.readouterr().err
    assert "normalisation and prompts of modules.json have no key in GGUF" in text


def test_every_chat_template_is_kept(tmp_path: Path) -> None:
    """Command R has one for tools and one for documents; gguf-py writes them under these names."""
    from gguf.constants import Keys

    folder, target = tmp_path / "dir", tmp_path / "out.gguf"
    save_directory(tiny_model("llama", vocab_size=270), folder)
    sources = {name: f"{name}: {{{{ messages[0].content }}}}" for name in ("tool_use", "rag")}
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "additional_chat_templates").mkdir()
    for name, source in sources.items():
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(source)
    assert call(str(folder), str(target)) == 0
    metadata = read_gguf(target).metadata
    found, original = template_from_gguf(metadata), template_from_directory(folder)
    assert found is not None
    assert original is not None
    assert found.sources == original.sources == {"default": original.source, **sources}
    assert metadata[Keys.Tokenizer.CHAT_TEMPLATES] == ["rag", "tool_use"]
    for name, source in sources.items():
        assert metadata[Keys.Tokenizer.CHAT_TEMPLATE_N.format(name=name)] == source


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_stop_tokens_of_generation_config_are_kept(tmp_path: Path, count: int) -> None:
    """GLM-4 stops at <|user|> and <|observation|>, which its tokenizer does not declare."""
    from tokenizers import Tokenizer

    folder, target = tmp_path / "dir", tmp_path / "out.gguf"
    save_directory(tiny_model("llama", vocab_size=270), folder)
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.add_special_tokens([f"<|stop{i}|>" for i in range(count)])
    words.save(str(folder / "tokenizer.json"))
    stops = [words.token_to_id(f"<|stop{i}|>") for i in range(count)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    assert call(str(folder), str(target)) == 0
    found = load_model(target)
    assert set(found.eos_ids) >= {0, *stops}
    metadata = found.source.metadata  # type: ignore[union-attr]
    assert metadata["tokenizer.ggml.eot_token_id"] == stops[0]  # llama.cpp reads no list
    assert metadata.get("tokenizer.ggml.eom_token_id") == (stops[1] if count > 1 else None)


@pytest.mark.parametrize(
    ("name", "shape", "quant", "head", "wanted"),
    [
        ("blk.0.ffn_up.weight", (8, 256), "q4_k", None, "q4_k"),
        ("blk.0.ffn_up.weight", (8, 576), "q4_k", None, "q5_0"),
        ("blk.0.ffn_up.weight", (8, 100), "q4_k", None, "f16"),
        ("blk.0.ffn_up.weight", (8, 100), "q8_0", None, "f16"),
        ("token_embd.weight", (8, 64), "q4_0", None, "q8_0"),
        ("token_embd.weight", (8, 64), "q4_0", "q4_0", "q4_0"),
        ("token_embd.weight", (8, 64), "f32", None, "f32"),
        ("token_embd.weight", (8, 64), None, None, "f16"),
        ("blk.0.ffn_gate_inp.weight", (8, 64), "q4_0", None, "f16"),
        ("position_embd.weight", (8, 64), "q4_0", None, "f16"),
        ("blk.0.ssm_alpha.weight", (8, 64), "q4_0", None, "f16"),
        ("blk.0.shortconv.conv.weight", (8, 64), "q4_0", None, "f32"),
        ("blk.0.ssm_conv1d.weight", (8, 4), None, None, "f32"),
        ("blk.0.attn_norm.weight", (64,), "q4_0", None, "f32"),
    ],
)
def test_tensor_types_for_quantisation(
    name: str, shape: tuple[int, ...], quant: str | None, head: str | None, wanted: str
) -> None:
    assert type_for(name, "f16", shape, quant, head) == wanted


def _convert_until(tiny: Path, target: Path, limit: int = 0) -> subprocess.Popen[bytes]:
    """`verbatim convert` as a process: with a limit on file sizes, or paused in the middle of
    writing."""
    code = (
        "import resource, sys\nfrom verbatim.cli.main import main\n"
        "from verbatim.files import gguf_write\n"
    )
    if limit:
        code += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
    else:
        code += (
            "gguf_write._pad = lambda out, alignment: (print('writing', flush=True), "
            "sys.stdin.read())\n"
        )
    code += "main(['convert', *sys.argv[1:]])"
    words = [sys.executable, "-c", code, str(tiny), str(target)]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe)


def test_a_full_disk_during_conversion_is_a_system_error(tiny: Path, tmp_path: Path) -> None:
    process = _convert_until(tiny, tmp_path / "q.gguf", limit=4096)
    _, err = process.communicate()
    assert process.returncode == 1, err
    assert b"q.gguf: cannot be written: File too large" in err
    assert list(tmp_path.iterdir()) == []


def test_temporary_files_of_a_killed_conversion_are_removed_by_the_next(
    tiny: Path, tmp_path: Path
) -> None:
    """No other file is removed: not that of a live process, nor a similar name, nor another
    target's."""
    target, other = tmp_path / "q.gguf", tmp_path / "q.gguf.gguf"
    kept = [tmp_path / ".q.gguf.mine.part", tmp_path / ".q.gguf"]
    for file in kept:
        file.write_text("x")
    alive, killed, elsewhere = (_convert_until(tiny, t) for t in (target, target, other))
    try:
        for process in (alive, killed, elsewhere):
            assert process.stdout is not None
            assert process.stdout.readline() == b"writing\n"
        for process in (killed, elsewhere):
            process.kill()
            process.communicate()
        assert len(list(tmp_path.glob(".*.part"))) == 4
        with pytest.raises(SystemExit) as ended:
            main(["convert", str(tiny), str(target)])
        assert ended.value.code == 0
        left = sorted(p.name for p in tmp_path.glob(".*.part"))
        assert sum(f".q.gguf.{alive.pid}." in name for name in left) == 1
        assert sum(f".q.gguf.{killed.pid}." in name for name in left) == 0
        assert sum(f".q.gguf.gguf.{elsewhere.pid}." in name for name in left) == 1
        assert all(file.exists() for file in kept)
    finally:
        alive.kill()
        alive.communicate()


def test_names_of_llama_cpp_and_quantised_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=256)
    metadata, extra = model_metadata(model, "tiny")
    source, small, again = (tmp_path / f"{name}.gguf" for name in ("f32", "q4", "q8"))
    write_gguf(source, metadata, [*extra, *model_tensors(model)])

    def call(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["convert", *words])
        assert isinstance(ended.value.code, int)
        return ended.value.code, capsys.readouterr().err

    code, told = call(str(source), str(small), "--quant", "Q4_K_M")
    assert code == 0
    assert "every matrix is written as q4_k" in told
    assert read_gguf(small).tensors["blk.0.ffn_up.weight"].type == "q4_k"
    code, told = call(str(small), str(again), "--quant", "q8_0")
    assert (code, "quantised already" in told, again.exists()) == (2, True, False)
    assert call(str(small), str(again), "--quant", "q8_0", "--requantize")[0] == 0
    code, told = call(str(source), str(again), "--quant", "iq4_xs", "--force")
    assert (code, "is not one of f32" in told) == (2, True)
