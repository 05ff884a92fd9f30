"""All number formats by name, collected from the modules of this folder that have FORMATS."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from verbatim import formats
from verbatim.formats.format import Format

_USERS = ("registry", "conversion", "requantise", "tensor")  # they import this module


def _collect() -> dict[str, Format]:
    names = (m.name for m in pkgutil.iter_modules(formats.__path__) if m.name not in _USERS)
    modules = [import_module(f"verbatim.formats.{name}") for name in names]
    found = [form for module in modules for form in getattr(module, "FORMATS", ())]
    assert len(found) == len({form.name for form in found}), "two formats have one name"
    return {form.name: form for form in sorted(found, key=_order)}


def _order(form: Format) -> tuple[bool, int, str]:
    """By the number in GGUF, then those of memory only."""
    return form.number is None, form.number or 0, form.name


FORMATS = _collect()
# type -> (values per block, bytes per block): of the types that GGUF files hold, and of all
BLOCKS = {f.name: (f.values, f.size) for f in FORMATS.values() if f.number is not None}
SIZES = {f.name: (f.values, f.size) for f in FORMATS.values()}
# types that `quantise` writes
WRITABLE = tuple(f.name for f in FORMATS.values() if f.pack is not None)
