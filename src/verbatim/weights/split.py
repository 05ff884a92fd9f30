"""A model in several GGUF files, as llama.cpp's gguf-split writes them and as large models lie on the hub: any part in, the whole model out.

The parts lie in one folder and are named NAME-00001-of-00003.gguf and so on. Three keys in every part say the same again: split.no (which one,
from 0), split.count (of how many) and split.tensors.count (tensors in all parts together). The first part has the model's metadata and perhaps
no tensor; the others have the keys above and tensors.

Nothing in a part names its model. So all that can be compared is: name against keys, keys against the first part's, tensors against their
number, and no tensor twice. What differs in none of these (the same part of another quantisation, cut at the same tensors) is not told apart here.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verbatim.base.errors import ModelError
from verbatim.weights.gguf_file import GGUFFile

MAX_PARTS = 1024  # each stays mapped; the largest models of today have about a hundred
KEYS = ("split.no", "split.count", "split.tensors.count")
OWN = (*KEYS, "general.alignment")  # what a part says of itself and not of the model
_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
_AGAIN = "get all parts again, from one place"


# --------------------------------------------------------------------------------------------------------------- names


def parts_of(name: str) -> list[str]:
    """The names of all parts, in order, where `name` is one of them; none where it is not a part's name.

    m-00002-of-00003.gguf -> m-00001-of-00003.gguf, m-00002-of-00003.gguf, m-00003-of-00003.gguf"""
    found = _NAME.fullmatch(name)
    if (
        found is None
        or not 2 <= (count := int(found["count"])) <= MAX_PARTS
        or not 1 <= int(found["number"]) <= count
    ):
        return []
    return [f"{found['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """One entry a model: the parts that belong together (there or not) under the first one's name, any other file under its own."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        parts = parts_of(name) or [name]
        found[parts[0]] = parts
    return found


def with_siblings(path: Path) -> list[Path]:
    """The files that make up the model at `path`, by their names: all parts, or the one file."""
    return [path.with_name(name) for name in parts_of(path.name)] or [path]


# -------------------------------------------------------------------------------------------------------------- header


@dataclass(frozen=True, slots=True)
class Place:
    """What a part's header says of it."""

    number: int  # from 0
    count: int
    tensors: int  # in all parts together


def place_of(metadata: Mapping[str, Any], file: Path) -> Place | None:
    """None for a file that is a whole model; after a merge, gguf-split leaves a split.count of 0 in it."""
    if "split.count" not in metadata:
        return None
    values = [metadata.get(key) for key in KEYS]
    if type(values[1]) is int and values[1] in (0, 1):
        return None
    for key, value in zip(KEYS, values, strict=True):
        if type(value) is not int or value < 0:
            said = "is missing" if value is None else f"is {value!r:.80}, which is no such number"
            raise ModelError(
                f"one part of a split model, but its {key} {said}; get this part again",
                file=str(file),
            )
    place = Place(*values)  # type: ignore[arg-type]  # integers, by the loop
    if place.count > MAX_PARTS:
        raise ModelError(
            f"split.count is {place.count}; models of up to {MAX_PARTS} parts are read",
            file=str(file),
        )
    if place.number >= place.count:
        raise ModelError(
            f"split.no is {place.number}, beyond the {place.count} parts of split.count; {_AGAIN}",
            file=str(file),
        )
    return place


# ---------------------------------------------------------------------------------------------------------------- join


def join(named: GGUFFile, place: Place, read: Callable[[Path], GGUFFile]) -> GGUFFile:
    """The whole model, of which `named` is the part that the user named. `read` reads one part.

    It has the first part's path and metadata, less the keys of splitting: it is one model now, and may be written as one file. Its digest
    names all parts."""
    paths = _paths(named.path, place)
    first = named if place.number == 0 else read(paths[0])
    whole = _agreed(first, paths, 0)
    tensors = dict(first.tensors)
    holder = dict.fromkeys(tensors, paths[0].name)
    digest = hashlib.sha256(first.digest.encode())
    for number in range(1, len(paths)):
        part = named if place.number == number else read(paths[number])
        _check(part, paths, number, first, whole)
        for name in part.tensors:
            if name in tensors:
                raise ModelError(
                    f"tensor {name!r:.200} is in {holder[name]} too; {_AGAIN}", file=str(part.path)
                )
        tensors |= part.tensors
        holder |= dict.fromkeys(part.tensors, part.path.name)
        digest.update(part.digest.encode())
    if len(tensors) != whole.tensors:
        says = f"the {whole.count} parts hold {len(tensors)} tensors, and split.tensors.count says {whole.tensors}"
        raise ModelError(f"{says}; {_AGAIN}", file=str(first.path))
    metadata = {key: value for key, value in first.metadata.items() if key not in KEYS}
    types = {key: kind for key, kind in first.types.items() if key not in KEYS}
    return replace(
        first, metadata=metadata, types=types, tensors=tensors, digest=digest.hexdigest()
    )


def _paths(named: Path, place: Place) -> list[Path]:
    """Where the parts lie: all there, and under names that agree with the header of the one that was named."""
    part = f"part {place.number + 1} of {place.count}"
    names = parts_of(named.name)
    if len(names) != place.count or names[place.number] != named.name:
        wanted = f"NAME-{place.number + 1:05d}-of-{place.count:05d}.gguf"
        raise ModelError(
            f"by its keys split.no and split.count this is {part} of a split model, by its name it is not; the parts are found by "
            f"their names, so call it {wanted}, beside the others",
            file=str(named),
        )
    paths = [named.with_name(name) for name in names]
    lost = [number for number, path in enumerate(paths) if not os.path.exists(path)]
    if lost:
        more = f" (and {len(lost) - 1} more)" if lost[1:] else ""
        raise ModelError(
            f"part {lost[0] + 1} of {place.count} is missing{more}; put all parts into one folder, under the names they came with",
            file=str(paths[lost[0]]),
        )
    return paths


def _agreed(part: GGUFFile, paths: list[Path], number: int) -> Place:
    """The header's word, which must be the name's."""
    place = place_of(part.metadata, part.path)
    if place is None:
        raise ModelError(
            f"its name says part {number + 1} of {len(paths)}, but it has no split.count: it is no part of this model; {_AGAIN}",
            file=str(part.path),
        )
    for key, value, expected in (
        ("split.no", place.number, number),
        ("split.count", place.count, len(paths)),
    ):
        if value != expected:
            raise ModelError(
                f"{key} is {value}, and by its name (part {number + 1} of {len(paths)}) it should be {expected}: another part, or one "
                f"of another model, under a wrong name; {_AGAIN}",
                file=str(part.path),
            )
    return place


def _check(part: GGUFFile, paths: list[Path], number: int, first: GGUFFile, whole: Place) -> None:
    """What a later part says must be what the first one says."""
    place = _agreed(part, paths, number)
    if place.tensors != whole.tensors:
        raise ModelError(
            f"split.tensors.count is {place.tensors}, and in {first.path.name} {whole.tensors}: a part of another model; {_AGAIN}",
            file=str(part.path),
        )
    for key, value in part.metadata.items():
        if key not in OWN and (key not in first.metadata or first.metadata[key] != value):
            raise ModelError(
                f"its metadata {key!r:.200} is not that of {first.path.name}: a part of another model; {_AGAIN}",
                file=str(part.path),
            )
