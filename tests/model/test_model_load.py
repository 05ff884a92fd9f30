"""load_model: errors name the fault and the file; rearranged weights; quantisation at load."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from tiny_tokenizer import train_tokenizer
from verbatim.base.errors import ModelError, ParameterError
from verbatim.convert.export_model import model_metadata, model_tensors
from verbatim.engine.loading.load_check import check_load
from verbatim.files.gguf_write import write_gguf
from verbatim.files.safetensors import read_directory
from verbatim.formats.conversion import dequantise, quantise
from verbatim.formats.tensor import Tensor
from verbatim.model.architecture import spec_from_config
from verbatim.model.families import gguf_architecture
from verbatim.model.layout import is_quantisable, layout
from verbatim.model.loading.load import check_model, load_model
from verbatim.model.loading.names import gguf_source, hf_source
from verbatim.testing.tiny_models import FAMILIES, TINY_CONFIGS, tiny_model

State = dict[str, np.ndarray]


def llama_directory(
    path: Path, change: Callable[[dict[str, Any], State], None] | None = None
) -> Path:
    """A tiny llama as a safetensors directory, modified by `change`."""
    config = dict(TINY_CONFIGS["llama"])
    model = tiny_model("llama")
    state = {
        hf_source("llama", "model.", name, 0).names[0]: t.to_f32()
        for name, t in model.weights.items()
    }
    if change is not None:
        change(config, state)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(state, path / "model.safetensors")
    return path


def rename(old: str, new: str) -> Callable[[dict[str, Any], State], None]:
    return lambda config, state: state.update({new: state.pop(old)})


def put(**changes: Any) -> Callable[[dict[str, Any], State], None]:
    return lambda config, state: config.update(changes)


def test_a_safetensors_directory_loads_with_its_exact_weights(tmp_path: Path) -> None:
    model = load_model(llama_directory(tmp_path / "m"))
    tiny = tiny_model("llama")
    assert model.spec == tiny.spec
    assert all(
        np.array_equal(model.weights[n].to_f32(), t.to_f32()) for n, t in tiny.weights.items()
    )
    assert model.weights.digest


K0 = "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(model_type="mamba"), "model_type 'mamba' is unknown"),
        (put(model_type=None), "model_type is missing"),
        (put(model_type=7), "model_type is 7"),
        (put(hidden_size="32"), "hidden_size is '32'"),
        (put(hidden_size=-4), "hidden_size is -4"),
        (put(num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
        (put(num_hidden_layers=5000), "num_hidden_layers is 5000"),
        (put(num_key_value_heads=3), "4 query heads cannot share 3"),
        (put(hidden_act="relu6"), "hidden_act is 'relu6'"),
        (put(rms_norm_eps=float("inf")), "rms_norm_eps is inf"),
        (put(rope_scaling={"type": "magic"}), "rope scaling 'magic' is unknown"),
        (put(rope_scaling=[1, 2]), "rope_scaling is"),
        (
            put(quantization_config={"quant_method": "awq"}),
            "quantization_config: awq: bits is None",
        ),
        (put(tie_word_embeddings=1), "tie_word_embeddings is 1"),
        (put(vocab_size=261), r"embed_tokens.weight has shape \(260, 32\), \(261, 32\) is needed"),
        (
            put(num_hidden_layers=4),
            r"tensor model.layers.3.input_layernorm.weight is missing \(and 8 more\)",
        ),
        (
            put(num_hidden_layers=2),
            r"tensor model.layers.2.input_layernorm.weight is not known for llama \(and 8 more\)",
        ),
        (rename(K0, "model.layers.0.self_attn.kk_proj.weight"), f"tensor {K0} is missing"),
        (rename("model.embed_tokens.weight", "emb"), "no embedding weight"),
        (
            lambda c, s: s.update({K0: s[K0].T.copy()}),
            r"shape \(32, 16\), \(16, 32\) is needed for layers.0.attn.k",
        ),
        (
            lambda c, s: s.update({K0: s[K0].astype(np.int32)}),
            f"tensor {K0} has the unsupported type",
        ),
        (
            lambda c, s: s.update(extra=np.zeros(3, np.float32)),
            "tensor extra is not known for llama",
        ),
        (lambda c, s: s.pop("lm_head.weight"), "tensor lm_head.weight is missing"),
    ],
)
def test_a_faulty_directory_raises_an_error_that_names_the_fault(
    change: Any, message: str, tmp_path: Path
) -> None:
    directory = llama_directory(tmp_path / "m", change)
    with pytest.raises(ModelError, match=message) as error:
        load_model(directory)
    assert str(directory) in str(error.value)
    if not re.search("shape|awq", message):  # these need the tensors
        with pytest.raises(ModelError, match=message):
            check_model(directory)


def test_buffers_and_a_copy_of_a_tied_head_are_ignored(tmp_path: Path) -> None:
    def change(config: dict[str, Any], state: State) -> None:
        config["tie_word_embeddings"] = True
        state["lm_head.weight"] = state["model.embed_tokens.weight"].copy()
        state["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    model = load_model(llama_directory(tmp_path / "m", change))
    assert model.spec.tied
    assert "head" not in model.weights
    assert check_model(tmp_path / "m") == model.spec
    assert model.warnings == ()


def test_a_bias_of_zeros_that_the_config_does_not_state_has_no_effect(tmp_path: Path) -> None:
    """AutoGPTQ stores one beside every quantised matrix; vLLM and transformers leave them out."""
    name = "model.layers.0.mlp.down_proj.bias"

    def change(value: float) -> Callable[[dict[str, Any], State], None]:
        def add(config: dict[str, Any], state: State) -> None:
            state[name] = np.zeros(config["hidden_size"], np.float32)
            state[name][3] = value

        return add

    made = llama_directory(tmp_path / "m", change(0))
    assert load_model(made).weights.keys() == tiny_model("llama").weights.keys()
    check_model(made)
    llama_directory(made, change(1e-3))
    with pytest.raises(ModelError, match=f"tensor {name} is not known"):
        load_model(made)


def test_a_separate_head_takes_precedence_over_a_tied_config(tmp_path: Path) -> None:
    """transformers does not tie two different matrices either, and warns."""
    model = load_model(llama_directory(tmp_path / "m", put(tie_word_embeddings=True)))
    assert not model.spec.tied
    assert np.array_equal(
        model.weights["head"].to_f32(), tiny_model("llama").weights["head"].to_f32()
    )
    (warning,) = model.warnings
    assert "tie_word_embeddings" in warning
    assert "lm_head.weight" in warning


def test_gpt2_attention_masks_in_the_file_are_ignored(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    state: State = {}
    for name, tensor in model.weights.items():
        # names in the published file lack the prefix "transformer."
        source = hf_source("gpt2", "", name, 0)
        if source.part in ("", "q"):
            values = tensor.to_f32()
            if source.part:
                bias = name.endswith(".bias")
                stem = name.removesuffix(".bias").removesuffix("q")
                values = np.concatenate(
                    [model.weights[stem + p + (".bias" if bias else "")].to_f32() for p in "qkv"]
                )
            state[source.names[0]] = np.ascontiguousarray(values.T) if source.transpose else values
    state["h.0.attn.bias"] = np.tril(np.ones((1, 1, 8, 8), bool))
    state["h.0.attn.masked_bias"] = np.array(-1e4, np.float32)
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIGS["gpt2"]))
    save_file(state, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path)
    assert all(
        np.array_equal(loaded.weights[n].to_f32(), t.to_f32()) for n, t in model.weights.items()
    )


@pytest.mark.parametrize("path", ["nowhere", "nowhere.gguf", "model.safetensors"])
def test_a_path_without_a_model_raises_an_error(path: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError, match=path):
        load_model(tmp_path / path)


# ------------------------------------------------------------------------------------------- GGUF


def llama_gguf(
    path: Path, changes: dict[str, Any], drop: str = "", add: dict[str, np.ndarray] | None = None
) -> Path:
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 3,
        "llama.context_length": 512,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 48,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
    }
    metadata = {k: v for k, v in (metadata | changes).items() if v is not None}
    tensors = []
    for name, tensor in tiny_model("llama").weights.items():
        file_name = gguf_source("llama", name).names[0]
        if file_name != drop:
            tensors.append(Tensor(file_name, "f32", tensor.shape, tensor.data))
    for name, values in (add or {}).items():
        tensors.append(Tensor(name, "f32", values.shape, quantise("f32", values)))
    write_gguf(path, metadata, tensors)
    return path


@pytest.mark.parametrize("value", ["2", 2.0, True, [2, "x"], {"a": 2}, [None]], ids=repr)
def test_a_stop_token_that_is_no_id_is_an_error_that_names_its_file(
    value: Any, tmp_path: Path
) -> None:
    made = llama_directory(tmp_path / "m", put(eos_token_id=value))
    with pytest.raises(ModelError, match="eos_token_id is "):
        load_model(made)
    llama_directory(made, put(eos_token_id=[2, -1]))
    assert load_model(made).eos_ids == (2,)
    assert not load_model(made).warnings
    llama_directory(made, put(eos_token_id=[2, 260]))
    (warning,) = load_model(made).warnings
    assert "the stop token 260 is outside the vocabulary of 260 tokens" in warning
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id is "):
        load_model(made)


def test_a_quantised_directory_passes_the_check_before_its_load(tmp_path: Path) -> None:
    quantised = put(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    made = llama_directory(tmp_path / "m", quantised)
    train_tokenizer(made)
    load_model(made)
    check_load(made, {})
    llama_directory(made, put(hidden_act="none of these"))
    with pytest.raises(ModelError, match="hidden_act"):
        check_load(made, {})


def test_a_gguf_file_loads_with_its_stop_tokens_and_context(tmp_path: Path) -> None:
    model = load_model(llama_gguf(tmp_path / "m.gguf", {}))
    assert model.eos_ids == (2, 5)
    assert model.spec.context == 512
    assert not model.spec.tied


@pytest.mark.parametrize(
    ("changes", "drop", "message"),
    [
        ({"general.architecture": "mamba"}, "", "architecture 'mamba' is unknown"),
        ({"general.architecture": None}, "", "general.architecture is missing"),
        ({"llama.block_count": None}, "", "llama.block_count is missing"),
        ({"llama.block_count": "3"}, "", "llama.block_count is '3'"),
        ({"llama.block_count": 100000}, "", "llama.block_count is 100000"),
        ({"llama.attention.head_count": 0}, "", "llama.attention.head_count is 0"),
        ({"llama.attention.head_count_kv": [2, 2, 2]}, "", "llama.attention.head_count_kv is"),
        ({"llama.attention.value_length": 16}, "", "values must be as long as keys"),
        ({"llama.embedding_length": 64}, "", "is needed"),
        ({"llama.rope.scaling.type": "magic"}, "", "rope scaling 'magic' is unknown"),
        ({"llama.rope.dimension_count": 64}, "", "rotary dimension 64 is larger than a head"),
        ({"llama.expert_count": 2, "llama.expert_used_count": 3}, "", "3 of 2 experts"),
        ({}, "token_embd.weight", "token_embd.weight is missing"),
        ({}, "blk.1.ffn_up.weight", "blk.1.ffn_up.weight is missing"),
    ],
)
def test_a_faulty_gguf_file_raises_an_error_that_names_the_fault(
    changes: dict[str, Any], drop: str, message: str, tmp_path: Path
) -> None:
    path = llama_gguf(tmp_path / "m.gguf", changes, drop)
    with pytest.raises(ModelError, match=message) as error:
        load_model(path)
    assert str(path) in str(error.value)


def test_an_unknown_gguf_tensor_is_an_error(tmp_path: Path) -> None:
    path = llama_gguf(tmp_path / "m.gguf", {}, add={"blk.0.attn_sinks": np.zeros(4, np.float32)})
    with pytest.raises(ModelError, match=r"blk\.0\.attn_sinks is not known for llama"):
        load_model(path)


# ------------------------------------------------------------------------------ context and quant


def test_the_context_can_be_reduced_but_not_extended(tmp_path: Path) -> None:
    directory = llama_directory(tmp_path / "m")
    assert load_model(directory, context=100).spec.context == 100
    with pytest.raises(ParameterError, match="513 is more than this model's 512") as error:
        load_model(directory, context=513)
    assert error.value.param == "context"


def test_dynamic_rope_extends_the_context_by_its_factor(tmp_path: Path) -> None:
    directory = llama_directory(
        tmp_path / "m", put(rope_scaling={"type": "dynamic", "factor": 2.0})
    )
    assert load_model(directory).spec.context == 512
    long, default = load_model(directory, context=1024).spec, load_model(directory).spec
    assert long.layers[0].rope.inv_freq[1] < default.layers[0].rope.inv_freq[1]  # type: ignore[union-attr]
    with pytest.raises(ParameterError):
        load_model(directory, context=1025)


def test_yarn_extends_the_context_to_its_factor_times_the_original_length(tmp_path: Path) -> None:
    """As Qwen's model cards add it: max_position_embeddings stays as it was."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    directory = llama_directory(tmp_path / "m", put(rope_scaling=yarn))
    header = {"type": "yarn", "factor": 4.0, "original_context_length": 256}
    keys = {f"llama.rope.scaling.{name}": value for name, value in header.items()}
    for path in (directory, llama_gguf(tmp_path / "m.gguf", keys)):
        assert load_model(path).spec.context == 512
        assert load_model(path, context=1024).spec.context == 1024
        with pytest.raises(ParameterError, match="1025 is more than this model's 1024"):
            load_model(path, context=1025)


def test_an_attn_factor_of_yarn_has_no_effect_as_in_transformers(tmp_path: Path) -> None:
    """DeepSeek-R1-0528-Qwen3-8B has one."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    with_it = llama_directory(tmp_path / "a", put(rope_scaling={**yarn, "attn_factor": 0.87}))
    without = llama_directory(tmp_path / "b", put(rope_scaling=yarn))
    models = [load_model(directory) for directory in (with_it, without)]
    assert models[0].spec.layers[0].rope == models[1].spec.layers[0].rope
    assert "rope_scaling.attn_factor has no effect with rope_type yarn; ignored" in str(
        models[0].warnings
    )
    assert models[1].warnings == ()


@pytest.mark.parametrize("quant", ["q8_0", "q4_0"])
def test_quant_quantises_matrices_at_load(quant: str, tmp_path: Path) -> None:
    """Only rows of a multiple of 32 values: norms, and mlp.down with rows of 48, stay f32."""
    directory = llama_directory(tmp_path / "m")
    plain, small = load_model(directory).weights, load_model(directory, quant=quant).weights
    for name, tensor in plain.items():
        blocks = is_quantisable(name) and tensor.shape[-1] % 32 == 0
        assert small[name].type == (quant if blocks else "f32")
        if blocks:
            expected = dequantise(quant, quantise(quant, tensor.to_f32()), tensor.shape)
            assert np.array_equal(small[name].to_f32(), expected)
    assert {small["embed"].type, small["layers.0.attn.q"].type, small["head"].type} == {quant}
    assert small["layers.0.mlp.down"].type == "f32"


def pack(config: dict[str, Any], state: State) -> None:
    """Pack the attention's matrices as compressed-tensors does, with one scale per 32 columns."""
    random = np.random.default_rng(5)
    for name in [name for name in state if "self_attn" in name]:
        rows, columns = state.pop(name).shape
        words = random.integers(0, 2**32, (rows, columns // 8), dtype=np.uint32)
        scale = random.random((rows, columns // 32), np.float32) * np.float32(0.02)
        module = name.removesuffix(".weight")
        state[f"{module}.weight_packed"] = words.view(np.int32)
        state[f"{module}.weight_scale"] = scale.astype(np.float16)
        state[f"{module}.weight_shape"] = np.array([rows, columns], np.int64)
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
    }


def test_quant_packed_keeps_the_integers_of_a_quantised_checkpoint(tmp_path: Path) -> None:
    directory = llama_directory(tmp_path / "m", pack)
    floats, blocks = load_model(directory), load_model(directory, quant="packed")
    assert floats.weights.digest != blocks.weights.digest, "other bits, another fingerprint"
    for name, tensor in blocks.weights.items():
        before = floats.weights[name]
        assert tensor.type == ("q4_0" if ".attn." in name else "f32")
        assert before.type == ("f16" if ".attn." in name else "f32")
        rounded = tensor.to_f32().astype(np.float16 if ".attn." in name else np.float32)
        np.testing.assert_array_equal(rounded, before.to_f32())


def test_quant_packed_is_refused_where_nothing_is_packed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no quantization_config"):
        load_model(llama_directory(tmp_path / "m"), quant="packed")
    path = tmp_path / "m.gguf"
    write_gguf(path, *_quantised_gguf())
    with pytest.raises(ParameterError, match="a GGUF file keeps its blocks"):
        load_model(path, quant="packed")


def test_quant_quantises_experts_but_not_the_router() -> None:
    weights = tiny_model("qwen3moe", type="q8_0").weights
    assert weights["layers.0.moe.gate"].type == "q8_0"
    assert weights["layers.0.moe.router"].type == "f32"


def test_quant_rejects_unknown_types_and_quantised_files(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="q3_x"):
        load_model(tmp_path, quant="q3_x")
    path = tmp_path / "m.gguf"
    write_gguf(path, *_quantised_gguf())
    with pytest.raises(ParameterError, match="quantised already") as error:
        load_model(path, quant="q4_0")
    assert error.value.param == "quant"


def _quantised_gguf() -> tuple[dict[str, Any], list[Tensor]]:
    model = tiny_model("qwen2", type="q8_0")
    metadata = {
        "general.architecture": "qwen2",
        "qwen2.block_count": 3,
        "qwen2.context_length": 512,
        "qwen2.embedding_length": 32,
        "qwen2.feed_forward_length": 48,
        "qwen2.attention.head_count": 4,
        "qwen2.attention.head_count_kv": 2,
        "qwen2.attention.layer_norm_rms_epsilon": 1e-5,
    }
    return metadata, [
        Tensor(gguf_source("qwen2", n).names[0], t.type, t.shape, t.data)
        for n, t in model.weights.items()
    ]


def test_interleaved_rows_of_quantised_blocks_are_reordered(tmp_path: Path) -> None:
    """GGUF's llama stores rows 0, d/2, 1, d/2 + 1, … of each head. Row r of q holds the value r."""
    q = np.repeat(np.arange(32, dtype=np.float32)[:, None], 32, axis=1)
    order = [head * 8 + j + half * 4 for head in range(4) for j in range(4) for half in range(2)]
    path = tmp_path / "m.gguf"
    metadata, tensors = _quantised_gguf()
    metadata = {
        k.replace("qwen2", "llama"): "llama" if v == "qwen2" else v for k, v in metadata.items()
    }
    tensors = [
        t for t in tensors if not t.name.endswith("bias") and t.name != "blk.1.attn_q.weight"
    ]
    write_gguf(
        path,
        metadata,
        [*tensors, Tensor("blk.1.attn_q.weight", "q8_0", (32, 32), quantise("q8_0", q[order]))],
    )
    loaded = load_model(path).weights["layers.1.attn.q"]
    assert loaded.type == "q8_0"
    assert np.allclose(loaded.to_f32()[:, 0], np.arange(32), atol=0.2)


@pytest.mark.parametrize("rows", [24, 23])
def test_fused_experts_of_a_gguf_file_are_split(rows: int, tmp_path: Path) -> None:
    """ffn_gate_up_exps holds, expert by expert, the rows of gate and then those of up."""
    model = tiny_model("qwen3moe", norm_topk_prob=True)
    path = tmp_path / "m.gguf"
    metadata, _ = model_metadata(model, "m")
    tensors = {t.name: t for t in model_tensors(model)}
    for i in range(3):
        gate, up = (
            tensors.pop(f"blk.{i}.ffn_{part}_exps.weight").to_f32() for part in ("gate", "up")
        )
        fused = np.concatenate([gate, up[:, :rows]], axis=1)
        name = f"blk.{i}.ffn_gate_up_exps.weight"
        tensors[name] = Tensor(name, "f32", fused.shape, quantise("f32", fused))
    write_gguf(path, metadata, list(tensors.values()))
    if rows == 23:
        with pytest.raises(ModelError, match="48 rows per expert are needed"):
            load_model(path)
        return
    loaded = load_model(path)
    for name, tensor in model.weights.items():
        assert np.array_equal(tensor.to_f32(), loaded.weights[name].to_f32()), name


# ----------------------------------------------------------------------------------------- layout


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_maps_to_its_own_tensor_in_both_formats(family: str) -> None:
    """No two internal names may map to the same rows of the same tensor."""
    spec = tiny_model(family).spec
    experts = max(layer.experts for layer in spec.layers)
    two = {"two_norms": spec.parallel and not spec.shared_norm}
    hf = [hf_source(spec.family, "model.", name, experts, **two) for name in layout(spec)]
    assert len({(s.names, s.part) for s in hf}) == len(hf)
    gguf = [gguf_source(spec.family, name, **two) for name in layout(spec)]
    assert len({(s.names, s.part) for s in gguf}) == len(gguf)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gguf_names_are_those_of_llama_cpp(family: str) -> None:
    """In the constants of the gguf package, for the architecture that `convert` writes."""
    spec = tiny_model(family).spec
    architecture = gguf_architecture(spec.family)
    known = {name: kind for kind, name in gguf.constants.MODEL_ARCH_NAMES.items()}[architecture]
    stems = {gguf.constants.TENSOR_NAMES[t] for t in gguf.constants.MODEL_TENSORS[known]}
    two = {"two_norms": spec.parallel and not spec.shared_norm}
    for name in layout(spec):
        fused = {"fused_experts": spec.experts_beside}
        (file_name,) = gguf_source(architecture, name, **two, **fused).names
        stem = re.sub(r"^blk\.\d+\.", "blk.{bid}.", file_name)
        assert {stem, stem.rpartition(".")[0]} & stems, name


def test_cache_groups_list_full_attention_first() -> None:
    groups = tiny_model("gemma3").spec.groups
    assert [(g.window, g.layers) for g in groups] == [(None, (5,)), (12, (0, 1, 2, 3, 4))]


def test_quantising_needs_a_few_megabytes_of_extra_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak is the quantised model plus a few MiB; one float32 matrix would be 16 MB."""
    sizes = {
        "vocab_size": 16000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
    }
    config = TINY_CONFIGS["llama"] | sizes
    random = np.random.default_rng(0)
    state = {
        hf_source("llama", "model.", name, 0).names[0]: random.standard_normal(shape).astype(
            np.float16
        )
        for name, shape in layout(spec_from_config(config)).items()
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(state, tmp_path / "model.safetensors")

    def read_and_reset_peak(path: Path, **options: Any) -> Any:
        source = read_directory(path, **options)  # has its own bound, tested with the reader
        tracemalloc.reset_peak()
        return source

    monkeypatch.setattr("verbatim.model.loading.load.read_directory", read_and_reset_peak)
    tracemalloc.start()
    try:
        model = load_model(tmp_path, quant="q8_0")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    in_memory = sum(t.data.nbytes for t in model.weights.values() if t.type == "q8_0")
    assert in_memory > 8_000_000
    assert peak < in_memory + 6_000_000
