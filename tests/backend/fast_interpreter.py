"""Makes Triton's interpreter faster, with the same results. Import this before a kernel runs, and
only in a process that interprets.

With small tensors nearly all of its time is bookkeeping, which is the same for every operation:

- Before every kernel launch and every call of a device function (tl.sum and tl.max included) it
  replaces some hundred attributes of triton.language. Here they stay for the whole process.
- It computes every integer operation a second time in int64 for an overflow check, and then drops
  the check, because the option `debug` is off. Here the second computation is off too.
- It makes the shape of every tensor and the table of NumPy's types anew. Here they are cached.
- It compares types and shapes element by element before every operation. Here equal shapes and
  equal scalar types are found by identity, and only unequal ones are compared and broadcast.

A Triton without these internals keeps its own way, which is slower and equal.

The interpreter truncates to bfloat16 and multiplies the bits of bfloat16 operands as integers; here
it rounds to nearest even, as a GPU does, and multiplies values.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def speed_up() -> None:
    changes = (
        _patch_once,
        _without_overflow_checks,
        _cache_types,
        _cache_shapes,
        _call_builtins_directly,
        _compare_types_by_identity,
        _skip_equal_operands,
        _cache_constants,
        _bfloat16,
    )
    for change in changes:
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
        if type(shape) is tl.tuple:  # the shape of another block
            key = tuple(shape.values)
        else:
            key = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        if key not in of_block:
            make_block(self, element_ty, shape)
            of_block[key] = (self.shape, self.numel, f"<{self.shape}, ")
            assert self.name == f"{of_block[key][2]}{element_ty}>"
        self.element_ty = element_ty
        self.shape, self.numel, name = of_block[key]
        self.name = f"{name}{element_ty}>"

    def with_element_ty(self: Any, element_ty: Any) -> Any:
        if self.element_ty is element_ty:
            return self
        return block_type(element_ty, self.shape)

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        key = id(type.shape) if type.is_block() else 0
        if key not in of_tensor:
            make_tensor(self, handle, type)
            of_tensor[key] = (self.shape, self.numel, type)  # the type keeps the id in use
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel, _ = of_tensor[key]

    make_tensor = tensor.__init__
    block_type.with_element_ty = with_element_ty
    block_type.__init__, tensor.__init__ = block_init, tensor_init


def _call_builtins_directly() -> None:
    """Pass the interpreter to a builtin function without two wrappers that copy its keywords."""
    semantic = interpreter.interpreter_semantic

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        scope.set_attr(obj, name, call)

    assert callable(interpreter._patch_attr)
    interpreter._patch_attr = patch_attr


def _compare_types_by_identity() -> None:
    core, compare, unwrap = tl.core, tl.core.dtype.__eq__, tl.core._unwrap_if_constexpr

    def equal(self: Any, other: Any) -> bool:
        return self is other or compare(self, other)

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is core.tensor or kind is int:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    core.dtype.__eq__ = equal
    core._unwrap_if_constexpr = unwrapped


def _skip_equal_operands() -> None:
    """Two operands of one type and one shape are used as they are."""
    semantic, tensor = interpreter.TritonSemantic, tl.core.tensor
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    find, found, made, int32 = semantic.computation_type_impl, {}, {}, tl.int32

    def computation_type(self: Any, *key: Any) -> Any:
        name = tuple([getattr(part, "name", part) for part in key])
        if name not in found:
            found[name] = find(self, *key)
        return found[name]

    def operands(
        self: Any,
        left: Any,
        right: Any,
        left_pointer: bool = False,
        right_pointer: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if type(left) is tensor:
            kind = left.dtype
            if type(right) is tensor:
                plain = not kind.is_ptr() and not (div_or_mod and kind.is_floating())
                if plain and kind is right.dtype:  # a quotient of floats has a type of its own
                    return self.broadcast_impl_value(left, right)
            elif type(right) is int and kind is int32 and -(2**31) <= right < 2**31:
                return self.broadcast_impl_value(left, self.scalar_constant(right, int32))
        return check(self, left, right, left_pointer, right_pointer, arithmetic_check, div_or_mod)

    def broadcast_pair(self: Any, left: Any, right: Any) -> Any:
        a, b = left.type, right.type
        if not a.is_block() and not b.is_block():
            return left, right
        if not b.is_block():
            return left, splat(self, right, a)
        if not a.is_block():
            return splat(self, left, b), right
        if a.shape is b.shape:  # of _cache_shapes
            return left, right
        if len(a.shape.values) != len(b.shape.values):
            return broadcast(self, left, right)
        key = (*a.shape.values, *b.shape.values)
        if key not in made:
            pair = broadcast(self, left, right)
            made[key] = pair[0].type.shape
            return pair
        return widened(self, left, made[key]), widened(self, right, made[key])

    def splat(self: Any, value: Any, block: Any) -> Any:
        type = block.with_element_ty(value.type)
        return tensor(self.builder.create_splat(type, value.handle), type)

    def widened(self: Any, value: Any, shape: Any) -> Any:
        if value.type.shape is shape:
            return value
        handle = self.builder.create_broadcast(value.handle, shape.values)
        return tensor(handle, tl.core.block_type(value.type.element_ty, shape))

    semantic.computation_type_impl = computation_type
    semantic.binary_op_type_checking_impl = operands
    semantic.broadcast_impl_value = broadcast_pair


def _cache_constants() -> None:
    """One tensor for all uses of a number in the kernels; nothing writes to it."""
    semantic = interpreter.TritonSemantic
    make = semantic.scalar_constant

    @functools.lru_cache(maxsize=4096, typed=True)
    def cached(self: Any, value: Any, name: str, dtype: Any) -> Any:
        constant = make(self, value, dtype)
        constant.handle.data.flags.writeable = False
        return constant

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        if value == 0 or dtype is None:  # 0.0 and -0.0 are equal
            return make(self, value, dtype)
        return cached(self, value, dtype.name, dtype)

    semantic.scalar_constant = scalar_constant


def _bfloat16() -> None:
    """bfloat16 is a uint16 array here, the upper half of a float32."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, dot = builder.cast_impl, builder.create_dot

    def widened(data: Any) -> Any:
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        kinds = (src.dtype.scalar, dst_type.scalar)
        if kinds == (tl.bfloat16, tl.float32):
            return handle(widened(src.data), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(src.data).view(np.uint32)
            rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            return handle((rounded >> np.uint32(16)).astype(np.uint16), tl.bfloat16)
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (handle(widened(part.data), tl.float32) for part in (a, b))
        return dot(self, a, b, *rest)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot
