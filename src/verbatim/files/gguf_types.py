"""The numbers of the GGUF format that its reader and its writer share: types of tensors and of
metadata values."""

from __future__ import annotations

from verbatim.formats.registry import FORMATS

DEFAULT_ALIGNMENT = 32  # bytes
MAX_DIMS = 4
MAX_NESTING = 4  # arrays inside arrays

# Tensor types by number. OTHER_TYPES are not supported; their names are for the error text.
TYPES = {form.number: name for name, form in FORMATS.items() if form.number is not None}
OTHER_TYPES: dict[int, str] = {
    9: "q8_1",
    24: "i8",
    25: "i16",
    26: "i32",
    27: "i64",
    28: "f64",
    40: "nvfp4",
}

# Metadata value types by number: struct code of the scalar types.
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS: dict[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
KINDS: dict[int, str] = {
    0: "u8",
    1: "i8",
    2: "u16",
    3: "i16",
    4: "u32",
    5: "i32",
    6: "f32",
    7: "bool",
    8: "str",
}
KINDS |= {10: "u64", 11: "i64", 12: "f64"}
