"""The numbers of the GGUF format that its reader and its writer share: types of tensors and of
metadata values."""

from __future__ import annotations

from verbatim.formats.registry import FORMATS

DEFAULT_ALIGNMENT = 32  # bytes
MAX_DIMS = 4
MAX_NESTING = 4  # arrays inside arrays

# Tensor types by number. OTHER_TYPES are not supported; their names are for the error text.
TYPES = {form.number: name for name, form in FORMATS.items() if form.number is not None}
OTHER_TYPES = {9: "q8_1", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64", 40: "nvfp4"}

# Metadata value types by number: struct code of the scalar types.
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
_NAMES = "u8 i8 u16 i16 u32 i32 f32 bool str array u64 i64 f64"
KINDS = {number: name for number, name in enumerate(_NAMES.split()) if number != ARRAY}
