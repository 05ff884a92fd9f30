"""Collect the weights of a model: the tensors of a file in, every weight of the layout out.

The file's names and row orders become those of the decoder. A missing, extra or misshapen tensor is
an error that names the config keys behind it. With `quant`, float matrices are quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from verbatim.base.errors import ModelError, ParameterError
from verbatim.formats.packed.packed_weight import without_checkpoint_blocks
from verbatim.formats.registry import BLOCKS, SIZES
from verbatim.formats.requantise import requantise
from verbatim.formats.tensor import Tensor
from verbatim.model.layout import HF_KEY_NAMES, deciding_keys, is_quantisable, layout
from verbatim.model.loading.names import Source
from verbatim.model.loading.recurrent_rows import rearranged
from verbatim.model.spec import ModelSpec

PACKED = "packed"

_FLOATS = ("f32", "f16", "bf16")


class WeightCollector:
    """Maps the tensors of a file to the weights of the spec; rejects missing and extra tensors."""

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, Tensor],
        file: str,
        quant: str | None,
        key_names: dict[str, str],  # the file's names of the keys that decide shapes
        others: Mapping[str, str] | None = None,  # tensors of unsupported types: name -> type
        cut: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,  # a rank's rows
    ) -> None:
        self.spec, self.tensors, self.file, self.quant = spec, tensors, file, quant
        self.key_names, self.cut = key_names, cut
        self.others = others or {}

    def collect(
        self,
        find: Callable[[str], Source],
        is_ignorable: Callable[[str], bool],
        given: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> dict[str, Tensor]:
        """Every weight of the spec. `given`: weights that are loaded already."""
        sources = self.check_names(find, is_ignorable)
        return {
            name: given[name]
            if name in given
            else self.cut(name, self._weight(name, sources[name], shape))
            for name, shape in layout(self.spec).items()
        }

    def check_names(
        self, find: Callable[[str], Source], is_ignorable: Callable[[str], bool]
    ) -> dict[str, Source]:
        """The source of every weight. A missing or extra tensor is an error."""
        sources = {name: find(name) for name in layout(self.spec)}
        wanted = {file_name for source in sources.values() for file_name in source.names}
        if wrong := sorted(n for n in self.others if n in wanted or not is_ignorable(n)):
            raise ModelError(
                f"tensor {wrong[0]} has the unsupported type {self.others[wrong[0]]}",
                file=self.file,
            )
        if missing := sorted(wanted - set(self.tensors)):
            weight = next(name for name, source in sources.items() if missing[0] in source.names)
            keys = deciding_keys(weight, self.key_names)
            mixers = self.key_names["mixers"]
            if self.spec.conv_kernel and mixers not in keys:  # the layer may be of the other type
                keys += f", {mixers}"
            raise ModelError(
                f"tensor {missing[0]} is missing{_and_more(missing)}; it is expected by {keys}",
                file=self.file,
            )
        extra = sorted(n for n in self.tensors if n not in wanted and not is_ignorable(n))
        if extra := [name for name in extra if not self._is_zero_bias(name, wanted)]:
            keys = ", ".join(
                self.key_names[key]
                for key in ("layers", "experts", "attention_bias", "mlp_bias", "mixtures")
            )
            raise ModelError(
                f"tensor {extra[0]} is not known for {self.spec.family}{_and_more(extra)}; "
                f"the family and {keys} decide which tensors are expected",
                file=self.file,
            )
        return sources

    def _is_zero_bias(self, name: str, wanted: Collection[str]) -> bool:
        """Whether the tensor is a bias of a known matrix and has no effect. AutoGPTQ stores one for
        every quantised matrix."""
        matrix = f"{name.removesuffix('.bias')}.weight"
        return name.endswith(".bias") and matrix in wanted and not self.tensors[name].data.any()

    def _weight(self, name: str, source: Source, shape: tuple[int, ...]) -> Tensor:
        parts = [self._part(file_name, source) for file_name in source.names]
        stacked = len(parts) > 1 or (len(shape) == 3 and len(parts[0].shape) == 2)
        for part in parts:
            expected = shape[1:] if stacked else shape
            if part.shape != expected:
                raise ModelError(
                    f"tensor {part.name} has shape {part.shape}, {expected} is needed for {name}, "
                    f"by {deciding_keys(name, self.key_names)}",
                    file=self.file,
                )
        parts = [self._quantised(name, part) for part in parts]
        if stacked and len({part.type for part in parts}) > 1:
            parts = [without_checkpoint_blocks(part) for part in parts]
        if stacked and len({part.type for part in parts}) > 1:
            raise ModelError(f"the experts of {name} have different types", file=self.file)
        data = np.concatenate([part.data for part in parts]) if stacked else parts[0].data
        return Tensor(name, parts[0].type, shape, data)

    def _part(self, file_name: str, source: Source) -> Tensor:
        tensor = self.tensors[file_name]
        if tensor.type not in SIZES:
            raise ModelError(
                f"tensor {file_name} has type {tensor.type}, which is not supported", file=self.file
            )
        tensor = rearranged(tensor, source, self.spec, self.file)
        if source.interleaved:
            return tensor
        if source.transpose:
            tensor = self._transposed(without_checkpoint_blocks(tensor))
        if source.alternating:
            tensor = self._every_other_row(tensor, source.part)
        elif source.halves:
            tensor = self._half_rows(tensor, source.part)
        elif source.part and source.grouped:
            tensor = self._grouped_rows(tensor, source.part)
        elif source.part:
            tensor = self._rows(tensor, source.part)
        return self._unpermuted(tensor, source.permuted)

    def _transposed(self, tensor: Tensor) -> Tensor:
        """Swap the last two dimensions; blocks of mxfp4 lie along the inputs already."""
        if tensor.type == "mxfp4":
            return tensor
        if tensor.type not in _FLOATS or len(tensor.shape) not in (2, 3):
            raise ModelError(
                f"tensor {tensor.name} ({tensor.type}, {tensor.shape}) cannot be transposed",
                file=self.file,
            )
        matrix = tensor.data.view(np.uint32 if tensor.type == "f32" else np.uint16).reshape(
            tensor.shape
        )
        turned = np.ascontiguousarray(matrix.swapaxes(-1, -2))
        return Tensor(tensor.name, tensor.type, turned.shape, turned.reshape(-1).view(np.uint8))

    def _every_other_row(self, tensor: Tensor, part: str) -> Tensor:
        """gate (the even rows) or up (the odd rows) of the stacked experts of gpt_oss."""
        experts, rows = tensor.shape[0], tensor.shape[1] if len(tensor.shape) > 1 else 0
        if not rows or rows % 2:
            raise ModelError(
                f"tensor {tensor.name} has shape {tensor.shape}: an even number of rows is needed",
                file=self.file,
            )
        pairs = tensor.data.reshape(experts, rows // 2, 2, -1)
        data = np.ascontiguousarray(pairs[:, :, 0 if part == "gate" else 1]).reshape(-1)
        return Tensor(tensor.name, tensor.type, (experts, rows // 2, *tensor.shape[2:]), data)

    def _half_rows(self, tensor: Tensor, part: str) -> Tensor:
        """gate (the first half of each expert's rows) or up (the second) of a stack of experts."""
        inner = self.spec.expert_mlp
        if len(tensor.shape) != 3 or tensor.shape[1] != 2 * inner:
            raise ModelError(
                f"tensor {tensor.name} has shape {tensor.shape}: {2 * inner} rows per expert are "
                f"needed, by {self.key_names['expert_mlp']}",
                file=self.file,
            )
        halves = tensor.data.reshape(tensor.shape[0], 2, -1)
        data = np.ascontiguousarray(halves[:, 0 if part == "gate" else 1]).reshape(-1)
        return Tensor(tensor.name, tensor.type, (tensor.shape[0], inner, tensor.shape[2]), data)

    def _grouped_rows(self, tensor: Tensor, part: str) -> Tensor:
        """The rows of q, k or v of a matrix that holds, for each KV head, the rows of its query
        heads, then of its key, then of its value (falcon; gpt_neox with one query head each)."""
        spec, dim = self.spec, self.spec.head_dim
        share = spec.heads // spec.kv_heads
        self._check_rows(tensor, part, spec.kv_heads * (share + 2) * dim)
        groups = tensor.data.reshape(spec.kv_heads, share + 2, -1)
        first, last = {"q": (0, share), "k": (share, share + 1), "v": (share + 1, share + 2)}[part]
        data = np.ascontiguousarray(groups[:, first:last]).reshape(-1)
        rows = spec.kv_heads * (last - first) * dim
        return Tensor(tensor.name, tensor.type, (rows, *tensor.shape[1:]), data)

    def _check_rows(self, tensor: Tensor, part: str, needed: int) -> None:
        if tensor.shape[0] != needed:
            keys = deciding_keys(
                "layers.0.attn.q" if part in "qkv" else "layers.0.mlp.up", self.key_names
            )
            raise ModelError(
                f"tensor {tensor.name} has {tensor.shape[0]} rows, {needed} are needed, "
                f"by {keys}, {self.key_names['kv_heads']}",
                file=self.file,
            )

    def _rows(self, tensor: Tensor, part: str) -> Tensor:
        """The rows of q, k, v, gate or up of a fused matrix."""
        q, kv, mlp = (
            self.spec.heads * self.spec.head_dim,
            self.spec.kv_heads * self.spec.head_dim,
            self.spec.mlp,
        )
        first, last = {
            "q": (0, q),
            "k": (q, q + kv),
            "v": (q + kv, q + 2 * kv),
            "gate": (0, mlp),
            "up": (mlp, 2 * mlp),
        }[part]
        whole = q + 2 * kv if part in ("q", "k", "v") else 2 * mlp
        self._check_rows(tensor, part, whole)
        row = tensor.data.nbytes // whole
        return Tensor(
            tensor.name,
            tensor.type,
            (last - first, *tensor.shape[1:]),
            tensor.data[first * row : last * row],
        )

    def _unpermuted(self, tensor: Tensor, permuted: bool) -> Tensor:
        """Undo the row order of files that store each rotated pair (j, j + d/2) side by side: rows
        0, d/2, 1, d/2 + 1, … of the rotated part of each head.

        The result has the first and the second half of that part."""
        dim, head = next((a.rope.dim for a in self.spec.layers if a.rope), 0), self.spec.head_dim
        if not permuted or dim < 2 or tensor.shape[0] % head:
            return tensor  # the shape check reports a wrong row count
        heads = tensor.data.reshape(tensor.shape[0] // head, head, -1)
        halves = heads[:, :dim].reshape(len(heads), dim // 2, 2, -1).swapaxes(1, 2)
        data = np.concatenate([halves.reshape(len(heads), dim, -1), heads[:, dim:]], axis=1)
        return Tensor(tensor.name, tensor.type, tensor.shape, data.reshape(-1))

    def _quantised(self, name: str, tensor: Tensor) -> Tensor:
        if self.quant is None or self.quant == PACKED or not is_quantisable(name):
            return tensor
        if tensor.type == "mxfp4":
            return tensor  # the experts of gpt-oss stay in their 4 bits; its other weights are bf16
        if tensor.type not in _FLOATS:
            raise ParameterError(
                "quant",
                f"{self.file} is quantised already ({tensor.name} is {tensor.type}); "
                "leave quant out",
            )
        if tensor.shape[-1] % BLOCKS[self.quant][0]:
            return tensor  # a row must be a multiple of 32 values to be quantised
        return requantise(tensor, self.quant)


def file_rows(spec: ModelSpec, tensor: Tensor, source: Source, file: str) -> Tensor:
    """The rows of a matrix that belong to one weight, in the decoder's order. The matrix is B of an
    adapter, whose rows are in the file's order of the weight's rows."""
    collector = WeightCollector(spec, {tensor.name: tensor}, file, None, HF_KEY_NAMES)
    return collector._part(tensor.name, replace(source, transpose=False))


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
