"""The model families, one file each. Listing the folder finds them.

A module of this folder declares a FAMILY, and a WRAPPER if the language model is also part of a
multi-modal model. What families share is in common/.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from verbatim.model.families.common.class_defaults import with_defaults
from verbatim.model.families.common.family import Family, Gguf, Wrapper
from verbatim.model.families.common.tensors import LLAMA_NAMES, Names
from verbatim.model.keys import Table

_MODULES = [
    import_module(f"{__name__}.{module.name}")
    for module in iter_modules(__path__)
    if not module.ispkg
]
# model_type -> family, and multi-modal models, of which only the language model is used
FAMILIES: dict[str, Family] = {m.FAMILY.model_type: m.FAMILY for m in _MODULES}
WRAPPERS: dict[str, Wrapper] = {
    m.WRAPPER.model_type: m.WRAPPER for m in _MODULES if hasattr(m, "WRAPPER")
}
# general.architecture -> the family whose file declares it
ARCHITECTURES: dict[str, tuple[Gguf, Family]] = {
    family.gguf.architecture: (family.gguf, family) for family in FAMILIES.values() if family.gguf
}
# The key tables of config.json, with the defaults of transformers' classes.
_TABLES: dict[str, Table] = {
    **{name: family.keys for name, family in FAMILIES.items()},
    **{name: wrapper.keys for name, wrapper in WRAPPERS.items()},
}
CONFIG_KEYS: dict[str, Table] = {
    name: with_defaults(FAMILIES[name].body or name if name in FAMILIES else name, keys)
    for name, keys in sorted(_TABLES.items())
}
GGUF_KEYS: dict[str, Table] = {name: gguf.keys for name, (gguf, _) in ARCHITECTURES.items()}
# ModelSpec.family -> a family of that name; all of one name have the same tensor names
_BY_NAME: dict[str, Family] = {family.name: family for family in FAMILIES.values()}


def named(name: str) -> Family | None:
    """A family whose ModelSpec.family is `name`."""
    return _BY_NAME.get(name)


def config_names(name: str) -> Names:
    """Tensor names of safetensors files of the family."""
    return _BY_NAME[name].names if name in _BY_NAME else LLAMA_NAMES


def gguf_architecture(name: str) -> str:
    """GGUF's name of a family; the name itself where it is one of an architecture."""
    return _BY_NAME[name].gguf_architecture if name in _BY_NAME else name


def gguf_names(name: str) -> Names:
    """Tensor names of GGUF files of the architecture, or of the family."""
    return ARCHITECTURES[gguf_architecture(name)][0].names
