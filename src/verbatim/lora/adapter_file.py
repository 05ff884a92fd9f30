"""Read LoRA adapters: a PEFT directory or a GGUF adapter file in; low-rank pairs by module out.

A pair is two matrices A [rank, in] and B [out, rank] and a scale: the adapted product is
x · Wᵀ + scale · (x · Aᵀ) · Bᵀ. Names are those of the file; lora/adapter_load.py maps them to the
weights of a model and checks the shapes.

Invariant: every key of the adapter's config is followed, checked or refused by name. A key that
this version does not know is refused unless its value is off (null, false or empty).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.files.gguf import read_gguf
from verbatim.files.safetensors import FLOATS, read_json, read_safetensors
from verbatim.formats.registry import BLOCKS
from verbatim.formats.tensor import Tensor
from verbatim.lora.peft_targets import PeftTargets, is_number
from verbatim.model.adapter import LowRank

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# Keys that change nothing once the matrices are trained and stored.
_NO_EFFECT = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "megatron_core", "eva_config", "qalora_group_size"),
    *("runtime_config",),
}
_FOLLOWED = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("fan_in_fan_out", "init_lora_weights", "bias"),
}
# Keys of features that are not supported -> what the feature is. They must be off.
_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules in the adapter",
    "trainable_token_indices": "trained embedding rows",
    "target_parameters": "adapters of parameters, such as stacked experts",
    "layer_replication": "replicated layers",
    "lora_bias": "a bias of B",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "megatron_config": "Megatron's parallel layers",
    "loftq_config": "LoftQ, which changes the base weights",
    "corda_config": "CorDA, which changes the base weights",
    "lora_ga_config": "LoRA-GA, which changes the base weights",
    "ensure_weight_tying": "tied adapters of embedding and head",
}
# Initialisations that leave the base weights as they are; pissa, olora and others change them.
_PLAIN_INIT: tuple[object, ...] = (True, False, "gaussian", "eva", "orthogonal")
_TASKS = (None, "CAUSAL_LM")

_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(.+)\.lora_"
    r"(?:([AB])(?:\.default)?\.weight|embedding_([AB])(?:\.default)?)"
)
_COPY = re.compile(r"(?:base_model\.model\.)?(?!.+\.lora_)(.+?)(?:\.base_layer)?\.weight")
_GGUF_TENSOR = re.compile(r"(.+)\.lora_([ab])")
MAX_SCALE = 1e6  # largest factor of a low-rank product; those in use are below 100
_GGUF_KEYS = ("adapter.type", "adapter.lora.alpha")


@dataclass(frozen=True, slots=True, eq=False)
class AdapterFile:
    """The pairs of a file by the file's own names: PEFT's module names ("model.layers.0.
    self_attn.q_proj") or GGUF's tensor names ("blk.0.attn_q.weight")."""

    path: Path
    kind: str  # peft or gguf
    pairs: dict[str, LowRank]
    architecture: str = ""  # GGUF: general.architecture
    fan_in_fan_out: bool = False  # PEFT: the base layer stores [in, out], as gpt2's do
    targets: Callable[[str], bool] | None = None  # PEFT: whether the config targets a module
    # PEFT: module -> the base model's weight (save_embedding_layers), for which the pairs were made
    copies: dict[str, Tensor] = field(default_factory=dict)


def read_adapter(path: str | Path) -> AdapterFile:
    """Read a PEFT directory or a GGUF adapter file; any violation is a ModelError."""
    path = Path(path).expanduser()
    if path.is_dir():
        return _read_peft(path)
    if not path.exists():
        raise ModelError("no such adapter: no file and no directory has this name", file=str(path))
    if path.suffix == ".gguf":
        return _read_gguf(path)
    if path.suffix == ".safetensors":
        raise ModelError(f"give the directory that holds this file and {CONFIG}", file=str(path))
    raise ModelError(
        f"is not an adapter: a PEFT directory ({CONFIG}, {WEIGHTS}) or a .gguf file is needed",
        file=str(path),
    )


# -------------------------------------------------------------------------------------------- PEFT


def _read_peft(path: Path) -> AdapterFile:
    file = str(path / CONFIG)
    if not (path / CONFIG).exists():
        raise ModelError(f"is not an adapter: {CONFIG} is missing", file=str(path))
    config = read_json(path / CONFIG)
    _check_config(config, file)
    if not (path / WEIGHTS).exists():
        pickled = any(path.glob("adapter_model.bin"))
        raise ModelError(
            "has pickle weights only; they run code when read and are refused: save the adapter "
            f"as {WEIGHTS}"
            if pickled
            else f"{WEIGHTS} is missing",
            file=str(path),
        )
    tensors, others = read_safetensors(path / WEIGHTS)
    if others:
        name, tensor = next(iter(others.items()))
        raise ModelError(
            f"tensor {name} has the unsupported type {tensor.dtype}", file=str(path / WEIGHTS)
        )
    copies: dict[str, Tensor] = {}
    for name in [name for name in tensors if _COPY.fullmatch(name)]:
        module = _COPY.sub(r"\1", name)
        if module in copies:
            raise ModelError(
                f"{copies[module].name} and {name} are the same matrix", file=str(path / WEIGHTS)
            )
        copies[module] = tensors.pop(name)
    sides = _sides(tensors, _TENSOR.fullmatch, str(path / WEIGHTS))
    targets = PeftTargets(config, file)
    targets.check_file(sides, WEIGHTS)
    pairs: dict[str, LowRank] = {}
    for module, (a, b) in sides.items():
        if ".lora_embedding_" in a.name:  # [rank, tokens] and [width, rank], of [tokens, width]
            a, b = _transposed(b), _transposed(a)
        rank, alpha = targets.rank(module), targets.alpha(module)
        stored = _rank(module, a, b, str(path / WEIGHTS))
        if stored != rank:
            raise ModelError(
                f"{module} has rank {stored} in {WEIGHTS}; r and rank_pattern say {rank}", file=file
            )
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        pairs[module] = LowRank(a, b, _checked_scale(scale, "lora_alpha", module, file))
    fan_in_fan_out = bool(config.get("fan_in_fan_out"))
    return AdapterFile(path, "peft", pairs, "", fan_in_fan_out, targets.has, copies)


def _transposed(tensor: Tensor) -> Tensor:
    if tensor.type not in FLOATS.values() or len(tensor.shape) != 2:
        return tensor  # _rank refuses it
    size = tensor.row_bytes // tensor.shape[1]  # bytes of a number
    turned = np.ascontiguousarray(tensor.data.view(f"u{size}").reshape(tensor.shape).T)
    data = turned.reshape(-1).view(np.uint8)
    return Tensor(tensor.name, tensor.type, tensor.shape[::-1], data)


def _check_config(config: dict[str, object], file: str) -> None:
    def refuse(key: str, why: str) -> None:
        raise ModelError(f"{key} is {config[key]!r:.60}: {why}", file=file)

    if config.get("peft_type") != "LORA":
        raise ModelError(
            f"peft_type is {config.get('peft_type')!r:.40}; only LORA is supported", file=file
        )
    for key, value in config.items():
        if key in _REFUSED and value:
            refuse(key, f"{_REFUSED[key]} is not supported; merge the adapter with PEFT")
        elif key not in _FOLLOWED | _NO_EFFECT | set(_REFUSED) and value:
            refuse(key, "this key is not known, so the adapter could mean something else")
    if config.get("task_type") not in _TASKS:
        refuse("task_type", "only CAUSAL_LM is supported")
    if config.get("bias", "none") != "none":
        refuse("bias", "trained biases are not supported; only 'none' is")
    init = config.get("init_lora_weights", True)
    if not any(init is plain or (isinstance(init, str) and init == plain) for plain in _PLAIN_INIT):
        refuse("init_lora_weights", "it changes the base weights; convert it to plain LoRA (PEFT)")
    for key, lowest in (("r", 1), ("lora_alpha", None)):
        value = config.get(key)
        if not is_number(value) or (lowest and (type(value) is not int or value < lowest)):
            raise ModelError(f"{key} is {value!r:.40}, not a number of at least 1", file=file)
    for key in ("use_rslora", "fan_in_fan_out"):
        if not isinstance(config.get(key, False), (bool, type(None))):
            refuse(key, "true or false is needed")


# -------------------------------------------------------------------------------------------- GGUF


def _read_gguf(path: Path) -> AdapterFile:
    source = read_gguf(path)
    meta, file = source.metadata, str(path)
    if meta.get("general.type") != "adapter":
        raise ModelError(
            f"general.type is {meta.get('general.type')!r:.40}, and an adapter's is 'adapter'",
            file=file,
        )
    if meta.get("adapter.type") != "lora":
        raise ModelError(
            f"adapter.type is {meta.get('adapter.type')!r:.40}; only lora is supported", file=file
        )
    for key, value in meta.items():
        if not key.startswith("general.") and key not in _GGUF_KEYS and value:
            raise ModelError(f"the key {key} is not supported in an adapter", file=file)
    alpha = meta.get("adapter.lora.alpha", 0.0)
    if not is_number(alpha):
        raise ModelError(f"adapter.lora.alpha is {alpha!r:.40}, not a number", file=file)
    pairs: dict[str, LowRank] = {}
    for name, (a, b) in _sides(source.tensors, _GGUF_TENSOR.fullmatch, file).items():
        rank = _rank(name, a, b, file)
        # llama.cpp: an alpha of 0 means a scale of 1
        scale = float(alpha) / rank if alpha else 1.0
        pairs[name] = LowRank(a, b, _checked_scale(scale, "adapter.lora.alpha", name, file))
    architecture = str(meta.get("general.architecture", ""))
    return AdapterFile(path, "gguf", pairs, architecture)


# ------------------------------------------------------------------------------------------ both


def _checked_scale(scale: float, key: str, module: str, file: str) -> float:
    """A larger scale makes logits infinite, which is an error of the engine, not of a request."""
    if abs(scale) > MAX_SCALE:
        raise ModelError(
            f"{key} scales {module} by {scale:g}; more than {MAX_SCALE:g} is no trained adapter",
            file=file,
        )
    return scale


def _sides(
    tensors: Mapping[str, Tensor], parse: Callable[[str], re.Match[str] | None], file: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each module. Any other tensor is refused by name."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = parse(name)
        if match is None:
            raise ModelError(
                f"tensor {name} is not a LoRA matrix of a linear layer (lora_A, lora_B); "
                f"{_why(name)}",
                file=file,
            )
        if tensor.type not in BLOCKS:
            raise ModelError(f"tensor {name} has the unsupported type {tensor.type}", file=file)
        pair, side = found.setdefault(match[1], {}), match[match.lastindex or 0].lower()
        if side in pair:
            raise ModelError(f"{pair[side].name} and {name} are the same matrix", file=file)
        pair[side] = tensor
    if not found:
        raise ModelError("holds no LoRA matrices", file=file)
    for module, pair in found.items():
        for side in ("a", "b"):
            if side not in pair:
                raise ModelError(f"{module} has no lora_{side.upper()}", file=file)
    return {module: (pair["a"], pair["b"]) for module, pair in sorted(found.items())}


def _why(name: str) -> str:
    if "magnitude" in name:
        return "DoRA is not supported"
    return "whole modules, biases and other tensors are not supported"


def _rank(module: str, a: Tensor, b: Tensor, file: str) -> int:
    """The rank that both matrices share."""
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        raise ModelError(
            f"{module}: A is {a.shape} and B is {b.shape}; [rank, in] and [out, rank] are needed",
            file=file,
        )
    return a.shape[0]
