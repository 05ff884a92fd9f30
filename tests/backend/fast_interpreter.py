"""Makes Triton's interpreter faster, with the same results. Import this before a kernel runs, and
only in a process that interprets.

With small tensors nearly all of its time is bookkeeping, which is the same for every operation:

- Before every kernel launch and every call of a device function (tl.sum and tl.max included) it
  replaces some hundred attributes of triton.language. Here they stay for the whole process.
- It computes every integer operation a second time in int64 for an overflow check, and then drops
  the check, because the option `debug` is off. Here the second computation is off too.
- It makes the shape of every tensor and the table of NumPy's types anew. Here they are cached.

A Triton without these internals keeps its own way, which is slower and equal.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def speed_up() -> None:
    for change in (_patch_once, _without_overflow_checks, _cache_types, _cache_shapes):
        try:
            change()
        except AttributeError:  # another version of Triton
            continue


def _patch_once() -> None:
    patch = interpreter._patch_lang

    @functools.cache
    def patched(fn: Any) -> SimpleNamespace:
        patch(fn)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patched


def _without_overflow_checks() -> None:
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _cache_types() -> None:
    find, found = interpreter._get_np_dtype, {}

    def numpy_type(type: Any) -> Any:
        if type.name not in found:  # the name contains the shape and the type of the elements
            found[type.name] = find(type)
        return found[type.name]

    interpreter._get_np_dtype = numpy_type


def _cache_shapes() -> None:
    """One shape and one number of elements for all blocks of equal size; nothing changes them."""
    block_type, tensor = tl.core.block_type, tl.core.tensor
    make_block, of_block, of_tensor = block_type.__init__, {}, {}

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        if key not in of_block:
            make_block(self, element_ty, shape)
            of_block[key] = (self.shape, self.numel, f"<{self.shape}, ")
            assert self.name == f"{of_block[key][2]}{element_ty}>"
        self.element_ty = element_ty
        self.shape, self.numel, name = of_block[key]
        self.name = f"{name}{element_ty}>"

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in of_tensor:
            make_tensor(self, handle, type)
            of_tensor[key] = (self.shape, self.numel)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensor[key]

    make_tensor = tensor.__init__
    block_type.__init__, tensor.__init__ = block_init, tensor_init
