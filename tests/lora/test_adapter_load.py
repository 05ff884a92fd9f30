"""Reading adapters: every key followed, checked or refused by name; shapes, ranks and targets
checked; PEFT and GGUF files of the same matrices give the same adapter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import adapted, modules, open_llm, write_peft
from safetensors.numpy import load_file, save_file

from verbatim.base.config import EngineConfig
from verbatim.base.errors import ModelError, ParameterError
from verbatim.base.params import SamplingParams
from verbatim.files.gguf_write import write_gguf
from verbatim.formats.tensor import Tensor
from verbatim.lora.adapter_file import read_adapter
from verbatim.lora.adapter_load import load_adapter, refused_modules, with_adapters
from verbatim.model.adapter import is_adapted
from verbatim.model.layout import layout
from verbatim.model.loading.load import load_model
from verbatim.testing.tiny_models import FAMILIES, tiny_model

SPEC = tiny_model("llama").spec
SMALL = ["q_proj", "down_proj"]


# Every key of PEFT 0.21's LoraConfig with a value that must be refused.
REFUSED: list[tuple[str, Any]] = [
    ("use_dora", True),
    ("bias", "all"),
    ("modules_to_save", ["lm_head"]),
    ("fan_in_fan_out", True),
    ("init_lora_weights", "pissa"),
    ("init_lora_weights", "olora"),
    ("trainable_token_indices", [1, 2]),
    ("target_parameters", ["mlp.experts.gate_up_proj"]),
    ("layer_replication", [[0, 2]]),
    ("lora_bias", True),
    ("alora_invocation_tokens", [1]),
    ("use_qalora", True),
    ("use_bdlora", True),
    ("megatron_config", {"x": 1}),
    ("loftq_config", {"loftq_bits": 4}),
    ("corda_config", {"x": 1}),
    ("lora_ga_config", {"x": 1}),
    ("ensure_weight_tying", True),
    ("velora_config", {"x": 1}),
    ("monteclora_config", {"x": 1}),
    ("arrow_config", {"x": 1}),
    ("kasa_config", {"x": 1}),
    ("a_key_of_2030", 7),
    ("task_type", "SEQ_CLS"),
    ("peft_type", "IA3"),
    ("r", 0),
    ("r", "4"),
    ("lora_alpha", None),
    ("use_rslora", "yes"),
    ("target_modules", None),
    ("target_modules", ["q_proj"]),  # down_proj has weights
    ("target_modules", ["q_proj", "down_proj", "v_proj"]),  # v_proj has none
    ("target_modules", r".*\.(q_proj"),
    ("target_modules", r".*q_proj"),
    ("exclude_modules", ["down_proj"]),
    ("layers_to_transform", [0, 1]),
    ("layers_to_transform", "012"),
    ("layers_to_transform", True),
    ("layers_to_transform", [0, 1.5]),
    ("layers_pattern", "layers"),  # PEFT refuses it without layers_to_transform
    ("layers_pattern", {"x": 1}),
    ("lora_alpha", 10**400),
    ("lora_alpha", 1e300),
    ("lora_alpha", -1e8),
    ("lora_alpha", True),
    ("target_modules", "(a+)+$"),
    ("rank_pattern", {"(.*.*.*.*.*.*.*.*.*.*.*.*)+x": 4, "q_proj": 3}),
    ("rank_pattern", {"q_proj": 3}),
    ("rank_pattern", {"q_proj": "3"}),
    ("rank_pattern", {"(": 3}),
    ("alpha_pattern", [1]),
]


@pytest.mark.parametrize(("key", "value"), REFUSED, ids=str)
def test_a_key_that_is_not_followed_is_refused_by_name(
    key: str, value: Any, tmp_path: Path
) -> None:
    folder = write_peft(tmp_path / "a", SPEC, targets=SMALL)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ModelError, match=key):
        load_adapter("a", str(folder), SPEC)


def test_keys_without_effect_and_patterns_are_accepted(tmp_path: Path) -> None:
    folder = write_peft(
        tmp_path / "a",
        SPEC,
        targets=SMALL,
        ranks={"q_proj": 2},
        rank_pattern={"q_proj": 2},
        alpha_pattern={r"layers\.0\.self_attn\.q_proj": 6},
        use_rslora=True,
        lora_dropout=0.1,
        inference_mode=True,
        base_model_name_or_path="org/model",
        use_dora=False,
        modules_to_save=None,
        a_key_of_2030=None,
        layers_to_transform=[0, 1, 2],
    )
    found = load_adapter("a", str(folder), SPEC)
    scales = {name: part.scale for name, part in found.parts.items()}
    assert scales["layers.0.attn.q"] == pytest.approx(6 / np.sqrt(2))
    assert scales["layers.1.attn.q"] == pytest.approx(8 / np.sqrt(2))
    assert scales["layers.1.mlp.down"] == pytest.approx(8 / 2)
    assert found.rank == 4
    assert len(found.parts) == 6


def edit(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


STEM = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop(f"{STEM}.lora_A.weight"), "q_proj has no lora_A"),
        (lambda t: t.update({f"{STEM}.lora_A.weight": np.zeros((4, 31), "f")}), "another model"),
        (lambda t: t.update({f"{STEM}.lora_B.weight": np.zeros((33, 4), "f")}), "another model"),
        (lambda t: t.update({f"{STEM}.lora_B.weight": np.zeros((32, 5), "f")}), "rank, in"),
        (
            lambda t: t.update({f"{STEM}.lora_B.weight": np.full((32, 4), np.nan, "f")}),
            "not a finite",
        ),
        (lambda t: t.update({f"{STEM}.lora_A.default.weight": t[STEM_A]}), "the same matrix"),
        (lambda t: t.update({STEM_A[17:]: t[STEM_A]}), "the same matrix"),
        (lambda t: t.update({f"{STEM}.lora_magnitude_vector": np.zeros(4, "f")}), "DoRA"),
        (lambda t: t.update({f"{STEM}.lora_A.weight": np.zeros((4, 32), "i4")}), "type I32"),
        (lambda t: t.update({"base_model.model.lm_head.weight": np.zeros((4, 4), "f")}), "lm_head"),
        (
            lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": t[STEM_A]}),
            "embed_tokens has no lora_B",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_tensor_is_refused_by_name(
    change: Callable[[dict[str, np.ndarray]], None], match: str, tmp_path: Path
) -> None:
    folder = write_peft(tmp_path / "a", SPEC, targets=SMALL)
    edit(folder, change)
    with pytest.raises(ModelError, match=match):
        load_adapter("a", str(folder), SPEC)


STEM_A = f"{STEM}.lora_A.weight"


LOST = "model.layers.1.mlp.down_proj"


def lose(tensors: dict[str, np.ndarray]) -> None:
    for side in "AB":
        del tensors[f"base_model.model.{LOST}.lora_{side}.weight"]


@pytest.mark.parametrize(
    "targets", [SMALL, r".*\.(q|down)_proj", "all-linear"], ids=["list", "pattern", "all"]
)
def test_a_target_without_matrices_in_one_layer_is_an_error(
    targets: list[str] | str, tmp_path: Path
) -> None:
    """PEFT warns of missing keys and leaves the module as initialised, where B is zero."""
    whole = tiny_model("llama").spec
    folder = write_peft(tmp_path / "a", whole, targets=None if targets == "all-linear" else SMALL)
    edit(folder, lose)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": targets}))
    with pytest.raises(ModelError, match=f"layer 1 has no matrices of {LOST}"):
        load_adapter("a", str(folder), SPEC)


@pytest.mark.parametrize(
    "keys",
    [
        {"exclude_modules": ["layers.1.mlp.down_proj"]},
        {"exclude_modules": r".*layers\.1\.mlp.*"},
        {"target_modules": ["q_proj", "layers.0.mlp.down_proj", "layers.2.mlp.down_proj"]},
        {"target_modules": r".*\.q_proj|.*\.[02]\.mlp\.down_proj"},
        {
            "target_modules": [*SMALL, "model.layers.1.self_attn.q_proj"],
            "layers_to_transform": [0, 2],
        },
        {
            "target_modules": [*SMALL, "model.layers.1.self_attn.q_proj"],
            "layers_to_transform": [0, 2],
            "layers_pattern": "layers",
        },
    ],
    ids=str,
)
def test_a_target_that_the_config_leaves_out_may_have_no_matrices(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    """Each config names exactly the modules that PEFT itself would adapt."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    folder = write_peft(tmp_path / "a", SPEC, targets=SMALL)
    edit(folder, lose)
    config = json.loads((folder / "adapter_config.json").read_text()) | keys
    (folder / "adapter_config.json").write_text(json.dumps(config))
    oracle = (
        LoraConfig(**keys) if "target_modules" in keys else LoraConfig(target_modules=SMALL, **keys)
    )
    adapter = load_adapter("a", str(folder), SPEC)
    wanted = [
        m
        for m in modules(SPEC)
        if check_target_module_exists(oracle, m) is True
        or (isinstance(check_target_module_exists(oracle, m), re.Match))
    ]
    assert len(wanted) == len(adapter.parts) == 5


def test_targets_that_the_model_has_not_are_refused(tmp_path: Path) -> None:
    def move(old: str, new: str) -> Callable[[dict[str, np.ndarray]], None]:
        def change(tensors: dict[str, np.ndarray]) -> None:
            for name in list(tensors):
                tensors[name.replace(old, new)] = tensors.pop(name)

        return change

    for number, (old, new) in enumerate(
        [(".layers.2.", ".layers.7."), ("self_attn.q_proj", "self_attn.w_proj")]
    ):
        folder = write_peft(tmp_path / str(number), SPEC, target_modules=["q_proj"])
        edit(folder, move(old, new))
        config = json.loads((folder / "adapter_config.json").read_text())
        config["target_modules"] = ["q_proj" if number == 0 else "w_proj"]
        (folder / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=r"no linear layer.*q_proj"):
            load_adapter("a", str(folder), SPEC)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_refused_module_is_refused_by_name(family: str, tmp_path: Path) -> None:
    """And every other matrix of the model can have an adapter. The table of docs/adapters.md is
    made from refused_modules."""
    spec = tiny_model(family).spec
    refused = refused_modules(spec)
    zeros = np.zeros((1, 1), np.float32)
    for module, kind in {kind: (name, kind) for name, kind in refused.items()}.values():
        last = module.rsplit(".", 1)[-1]
        folder = write_peft(tmp_path / kind, spec, targets=[last], r=1)
        stem = f"base_model.model.{module}"
        pair = {f"{stem}.lora_A.weight": zeros, f"{stem}.lora_B.weight": zeros}
        save_file(pair, folder / "adapter_model.safetensors")
        with pytest.raises(ModelError, match=f"{re.escape(module)} is no linear layer"):
            load_adapter("a", str(folder), spec)
    folder = write_peft(
        tmp_path / "whole", spec, targets=[m.rsplit(".", 1)[-1] for m in modules(spec)]
    )
    assert set(load_adapter("a", str(folder), spec).parts) == {
        name for name in layout(spec) if is_adapted(name)
    }


def test_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such adapter"):
        read_adapter(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"adapter_config\.json is missing"):
        read_adapter(tmp_path / "empty")
    folder = write_peft(tmp_path / "a", SPEC)
    with pytest.raises(ModelError, match="is a LoRA adapter, not a model"):
        load_model(folder)
    with pytest.raises(ModelError, match="give the directory"):
        read_adapter(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"adapter_model.safetensors is missing"):
        read_adapter(folder)
    (folder / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="pickle"):
        read_adapter(folder)
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(ModelError, match="is not an adapter"):
        read_adapter(tmp_path / "x.txt")


# -------------------------------------------------------------------------------------------- GGUF


def interleaved(b: np.ndarray, heads: int) -> np.ndarray:
    """B as llama.cpp writes it for llama: rows j and j + d/2 of each head side by side."""
    rows, rank = b.shape
    halves = b.reshape(heads, 2, rows // heads // 2, rank)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, rank)


def write_gguf_adapter(folder: Path, file: Path, **keys: Any) -> Path:
    """The GGUF file that llama.cpp would make of a PEFT directory for llama."""
    config = json.loads((folder / "adapter_config.json").read_text())
    names = {
        **{f"self_attn.{p}_proj": f"attn_{p}" for p in "qkv"},
        "self_attn.o_proj": "attn_output",
        **{f"mlp.{p}_proj": f"ffn_{p}" for p in ("gate", "up", "down")},
    }
    tensors = []
    for name, values in load_file(folder / "adapter_model.safetensors").items():
        _, layer, rest = name.removeprefix("base_model.model.model.").split(".", 2)
        module, side = rest.removesuffix(".weight").rsplit(".", 1)
        if side == "lora_B" and module in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = SPEC.heads if "q_proj" in module else SPEC.kv_heads
            values = interleaved(values, heads)
        data = np.ascontiguousarray(values, np.float32)
        gguf = f"blk.{layer}.{names[module]}.weight.{side.lower()}"
        tensors.append(Tensor(gguf, "f32", data.shape, data.reshape(-1).view(np.uint8)))
    metadata = {
        "general.architecture": "llama",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(config["lora_alpha"]),
        **keys,
    }
    write_gguf(file, {k: v for k, v in metadata.items() if v is not None}, tensors)
    return file


def test_gguf_and_peft_files_give_the_same_adapter(tmp_path: Path) -> None:
    folder = write_peft(tmp_path / "a", SPEC)
    file = write_gguf_adapter(folder, tmp_path / "a.gguf")
    peft, gguf = (load_adapter("a", str(path), SPEC) for path in (folder, file))
    assert peft.digest == gguf.digest
    model = adapted(tiny_model("llama"), {"p": folder, "g": file})
    with open_llm(model) as llm:
        params = SamplingParams(adapter="p", max_tokens=8, seed=1)
        one, other = llm.generate(["abc", "abc"], [params, params.with_(adapter="g")])
        assert one.token_ids == other.token_ids != llm.generate("abc", params.with_(adapter=""))
    scale = load_adapter(
        "a", str(write_gguf_adapter(folder, file, **{"adapter.lora.alpha": 0.0})), SPEC
    )
    assert {part.scale for part in scale.parts.values()} == {1.0}


def test_an_unknown_module_of_a_gguf_file_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    folder = write_peft(tmp_path / "a", SPEC, targets=["q_proj"])
    file = write_gguf_adapter(folder, tmp_path / "a.gguf")
    file.write_bytes(file.read_bytes().replace(b".attn_q.", b".attn_z."))
    known = "attn_k, attn_output, attn_q, attn_v, ffn_down, ffn_gate, ffn_up"
    with pytest.raises(ModelError, match=f"attn_z.weight is no linear.* those are {known} of each"):
        load_adapter("a", str(file), SPEC)


def test_a_gguf_file_that_lacks_matrices_in_one_layer_is_a_warning(tmp_path: Path) -> None:
    """It has no list of targets, so it may have been made so."""
    folder = write_peft(tmp_path / "a", SPEC, targets=SMALL)
    whole = adapter_warnings(write_gguf_adapter(folder, tmp_path / "a.gguf"))
    assert whole == ()
    edit(folder, lose)
    (line,) = adapter_warnings(write_gguf_adapter(folder, tmp_path / "b.gguf"))
    assert line.startswith("adapter x: no matrices of layers.1.mlp.down, which other layers have")


def adapter_warnings(path: Path) -> tuple[str, ...]:
    return with_adapters(tiny_model("llama"), [f"x={path}"]).warnings


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"general.type": "model"}, "general.type is 'model'"),
        ({"adapter.type": "control_vector"}, "adapter.type"),
        ({"general.architecture": "qwen2"}, "the model is llama"),
        ({"adapter.lora.alpha": "x"}, "adapter.lora.alpha"),
        ({"adapter.alora.invocation_tokens": [1, 2]}, "adapter.alora.invocation_tokens"),
    ],
)
def test_a_gguf_key_that_is_not_followed_is_refused(
    keys: dict[str, Any], match: str, tmp_path: Path
) -> None:
    folder = write_peft(tmp_path / "a", SPEC, targets=SMALL)
    with pytest.raises(ModelError, match=match):
        load_adapter("a", str(write_gguf_adapter(folder, tmp_path / "a.gguf", **keys)), SPEC)


def test_the_setting_takes_a_mapping_and_checks_names() -> None:
    assert EngineConfig(adapters={"a": "x", "b": "y"}).adapters == ("a=x", "b=y")  # type: ignore[arg-type]
    assert EngineConfig(adapters=["a=x"]).adapters == ("a=x",)  # type: ignore[arg-type]
    for wrong in (["a=x", "a=y"], ["=x"], ["a="], ["a b=x"], "a=x", [1]):
        with pytest.raises(ParameterError, match="adapters"):
            EngineConfig(adapters=wrong)  # type: ignore[arg-type]
