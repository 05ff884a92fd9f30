"""What a `quantization_config` says: which keys are read, and which scale belongs to which weight.

Every key is read, has no effect on the weights, or is refused; a warning names an unknown one. The
place of a scale follows from the sizes that the config states, and not from a division of the
weight's size by the number of scales: 576 columns in groups of 128 have five scales, and the last
group has 64 columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from verbatim.base.errors import ModelError
from verbatim.base.json_io import JsonMapping
from verbatim.base.name_patterns import NamePatterns

# quant_method -> keys that packed_checkpoint.py reads, or that do not concern the stored weights
# (how they were made, which modules have none, how another program computes with them)
_COMMON = "quant_method modules_to_not_convert dequantize"
_KEYS = {
    "fp8": "weight_block_size activation_scheme fmt scale_fmt ignored_layers",
    "compressed-tensors": "config_groups format ignore kv_cache_scheme quantization_status version "
    "sparsity_config transform_config global_compression_ratio run_compressed",
    "awq": "bits w_bit group_size q_group_size zero_point version backend do_fuse modules_to_fuse "
    "fuse_max_seq_len exllama_config format",
    "gptq": "bits group_size desc_act sym checkpoint_format format dynamic lm_head damp_percent "
    "damp_auto_increment static_groups true_sequential model_name_or_path model_file_base_name "
    "model_seqlen meta pack_dtype dataset tokenizer block_name_to_quantize batch_size backend "
    "module_name_preceding_first_block pad_token_id use_exllama max_input_length exllama_config "
    "cache_block_outputs modules_in_block_to_quantize use_cuda_fp16 quantizer is_marlin_format "
    "act_group_aware",
    "mxfp4": "",
}
# key -> the values that have no effect; another one would change the weights, and is refused
_REFUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    "fp8": {"fmt": ("e4m3", "float8_e4m3fn")},
    "compressed-tensors": {"transform_config": (), "kv_cache_scheme": ()},
    "gptq": {
        "dynamic": (),
        "checkpoint_format": ("gptq", "gptq_v2"),
        "format": ("gptq", "gptq_v2"),
        "pack_dtype": ("int32",),
        "is_marlin_format": (),
    },
    "awq": {"version": ("gemm",), "format": ("gemm",)},
}
_FLAG = (True, False)
_FORMATS = (
    *("dense", "naive-quantized", "float-quantized", "int-quantized", "pack-quantized"),
    "mixed-precision",
)
# key -> its values, with None where the format's library accepts null; other ones are faults, also
# where the tensors alone decide
_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "fp8": {"activation_scheme": ("dynamic", "static")},
    "compressed-tensors": {"format": _FORMATS},
    "gptq": {"desc_act": (*_FLAG, None), "sym": (*_FLAG, None)},
    "awq": {"zero_point": (*_FLAG, None)},
}
_GROUP_KEYS = {"targets", "weights", "input_activations", "output_activations", "format"}
# compressed-tensors' QuantizationArgs: what is read, or how the weights were made
_WEIGHT_KEYS = {
    *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic"),
    *("actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
}
_GROUP_VALUES = {"format": (*_FORMATS, None)}
_WEIGHT_VALUES = {
    "num_bits": tuple(range(1, 17)),
    "type": ("int", "float"),
    "strategy": ("tensor", "channel", "group", "block", None),
    "symmetric": _FLAG,
    "actorder": ("weight", "static", "group", "dynamic", True, False, None),
}


def check_keys(method: str, config: Mapping[str, object]) -> list[str]:
    """Warnings; a ModelError for a key whose value is not supported."""
    for key, fine in _REFUSED.get(method, {}).items():
        value = config.get(key)
        if value and value not in fine and str(value).lower() not in fine:
            only = f"; supported: {', '.join(map(str, fine))}" if fine else ""
            raise ModelError(f"{key} is {value!r:.60}, which is not supported{only}")
    if method == "awq" and config.get("backend") == "llm-awq":
        raise ModelError("backend is 'llm-awq', which packs the weights in another order")
    check_values(config, _VALUES.get(method, {}))
    known = {*_COMMON.split(), *_KEYS[method].split()}
    unknown = [key for key in config if key not in known]
    if method == "compressed-tensors":
        unknown += _unknown_in_groups(mapping(config, "config_groups", nullable=False))
    if unknown:
        return [f"quantization_config has keys that are ignored: {', '.join(unknown)}"]
    return []


def _unknown_in_groups(groups: Mapping[str, object]) -> list[str]:
    found: list[str] = []
    for name in groups:
        group = mapping(groups, name)
        weights = mapping(group, "weights")
        found += [f"{name}.{key}" for key in group if key not in _GROUP_KEYS]
        found += [f"{name}.weights.{key}" for key in weights if key not in _WEIGHT_KEYS]
    return found


def check_values(config: Mapping[str, object], values: Mapping[str, tuple[object, ...]]) -> None:
    """Raise a ModelError for a key with none of its values. A missing one is fine."""
    for key, known in values.items():
        value = config.get(key)
        if key not in config or any(value == one and type(value) is type(one) for one in known):
            continue
        names = ", ".join(str(one).lower() if type(one) is bool else str(one) for one in known)
        raise ModelError(f"{key} is {value!r:.60}; supported: {names}")


class ConfigGroups:
    """The config groups of compressed-tensors: which weights belong to which module."""

    def __init__(self, config: Mapping[str, object]) -> None:
        found = mapping(config, "config_groups")
        groups = [mapping(found, name, nullable=False) for name in found]
        self._groups = [group for group in groups if group]
        self._patterns = NamePatterns()
        self._by_target: dict[str, JsonMapping] = {}  # a later group replaces an earlier one
        for group in self._groups:
            check_values(group, _GROUP_VALUES)
            check_values(mapping(group, "weights"), _WEIGHT_VALUES)
            targets = group.get("targets", [])
            if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
                raise ModelError(f"targets is {targets!r:.60}, not a list of names")
            self._by_target |= dict.fromkeys(targets, group)
        # The library's order: names, then patterns, each in the order of their text.
        self._targets = sorted(self._by_target, key=lambda target: ("re:" in target, target))

    def weights(self, module: str) -> Mapping[str, object]:
        """The `weights` of the group for the module: the one that names it, or else its class. A
        name of another prefix (language_model.) counts where the library finds no group."""
        if len(self._groups) < 2:
            return mapping(self._groups[0], "weights") if self._groups else {}
        for target in self._targets:
            if self._names(target, module):
                return mapping(self._by_target[target], "weights")
        kind = "Embedding" if module.endswith("embed_tokens") else "Linear"
        ends = (target for target in self._targets if module.endswith(f".{target}"))
        for target in (kind, "Module", *ends):
            if target in self._by_target:
                return mapping(self._by_target[target], "weights")
        return mapping(self._groups[0], "weights")

    def _names(self, target: str, module: str) -> bool:
        if not target.startswith("re:"):
            return module == target
        try:
            return self._patterns.match(target[3:], module)
        except ModelError as error:
            raise ModelError(f"targets: {error}") from None


def mapping(config: Mapping[str, object], key: str, *, nullable: bool = True) -> JsonMapping:
    """The object under a key; empty if there is none, or null where the library accepts it."""
    value = config.get(key, {})
    if value is None and nullable:
        return {}
    if not isinstance(value, Mapping):
        raise ModelError(f"{key} is {value!r:.60}, not an object")
    return value


def block_sizes(config: JsonMapping, key: str) -> list[int] | None:
    """Rows and columns of a block; None if the key is missing."""
    value = config.get(key)
    if value is None:
        return None
    whole = isinstance(value, list) and all(type(n) is int and n > 0 for n in value)
    if not whole or len(value) != 2:
        raise ModelError(f"{key} is {value!r:.60}, not two sizes")
    return list(value)


def group_index(size: int, groups: int, group_size: object) -> np.ndarray:
    """The group of each of `size` inputs. `group_size`: the config's; 0 if it has none."""
    if type(group_size) is not int:
        raise ModelError(f"group_size is {group_size!r:.60}, not a whole number")
    if group_size <= 0:  # all groups have the same size
        if not groups or size % groups:
            raise ModelError(f"{size} inputs have {groups} scales, and no group_size is stated")
        group_size = size // groups
    if -(-size // group_size) != groups:
        raise ModelError(f"{size} inputs in groups of {group_size} cannot have {groups} scales")
    return np.arange(size) // group_size


def scale_groups(
    scale: np.ndarray, shape: tuple[int, ...], block: list[int] | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """A scale per tensor, per row or per block as [rows or 1, groups], and the group of each column
    (None: there is one)."""
    if scale.size == 1:
        return scale.reshape(1, 1), None
    if block is not None and scale.ndim == 2:
        counts = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
        if scale.shape == counts:
            rows = np.repeat(scale, block[0], axis=0)[: shape[0]]
            return rows, np.arange(shape[1]) // block[1]
    if scale.shape in ((shape[0],), (shape[0], 1)):
        return scale.reshape(-1, 1), None
    blocks = f" in blocks of {block[0]} × {block[1]}" if block is not None else ""
    raise ModelError(f"scales {scale.shape} do not fit a weight {shape}{blocks}")
