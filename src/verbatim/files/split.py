"""Split GGUF models, as llama.cpp's gguf-split writes them: any part in, the whole model out.

The parts are in one folder, named NAME-00001-of-00003.gguf and so on. Every part has three keys:
split.no (index from 0), split.count (number of parts) and split.tensors.count (tensors in all
parts). The first part holds the model's metadata and may have no tensors; the others hold only
these keys and tensors.

Parts do not identify their model. The reader checks file names against keys, keys against the
first part, the number of tensors, and that no tensor occurs twice. It cannot detect a part of
another quantisation of the same model that is split at the same tensors.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from verbatim.base.errors import ModelError
from verbatim.files.gguf_file import GGUFFile

MAX_PARTS = 1024  # all stay mapped; the largest published models have about a hundred parts
KEYS = ("split.no", "split.count", "split.tensors.count")
PART_KEYS = (*KEYS, "general.alignment")  # keys of a part, not of the model
_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
_REMEDY = "get all parts again, from one source"


# ---------------------------------------------------------------------------------------- names


def parts_of(name: str) -> list[str]:
    """File names of all parts, in order, if `name` is the name of a part; else [].

    m-00002-of-00003.gguf -> m-00001-of-00003.gguf, m-00002-of-00003.gguf, m-00003-of-00003.gguf"""
    found = _NAME.fullmatch(name)
    count = int(found["count"]) if found else 0
    if found is None or not (2 <= count <= MAX_PARTS and 1 <= int(found["number"]) <= count):
        return []
    return [f"{found['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def group_parts(names: Iterable[str]) -> dict[str, list[str]]:
    """One entry per model: first part -> all parts (present or not); any other file -> itself."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        parts = parts_of(name) or [name]
        found[parts[0]] = parts
    return found


def with_siblings(path: Path) -> list[Path]:
    """All files of the model at `path`, by name: all parts, or the one file."""
    return [path.with_name(name) for name in parts_of(path.name)] or [path]


# --------------------------------------------------------------------------------------- header


@dataclass(frozen=True, slots=True)
class SplitInfo:
    """The split.* keys of a part."""

    number: int  # from 0
    count: int
    tensors: int  # in all parts


def split_info(metadata: Mapping[str, object], file: Path) -> SplitInfo | None:
    """The split.* keys of a file; None for a complete model.

    A file merged by gguf-split has a split.count of 0."""
    if "split.count" not in metadata:
        return None
    values = [metadata.get(key) for key in KEYS]
    if type(values[1]) is int and values[1] in (0, 1):
        return None
    for key, value in zip(KEYS, values, strict=True):
        if type(value) is not int or value < 0:
            wrong = f"is {value!r:.80}, which is not a valid number"
            fault = "is missing" if value is None else wrong
            raise ModelError(
                f"one part of a split model, but its {key} {fault}; get this part again",
                file=str(file),
            )
    info = SplitInfo(*values)  # type: ignore[arg-type]  # the loop checked that they are integers
    if info.count > MAX_PARTS:
        raise ModelError(
            f"split.count is {info.count}; models of up to {MAX_PARTS} parts are supported",
            file=str(file),
        )
    if info.number >= info.count:
        raise ModelError(
            f"split.no is {info.number}, beyond the {info.count} parts of split.count; {_REMEDY}",
            file=str(file),
        )
    return info


# ----------------------------------------------------------------------------------------- join


def join(named: GGUFFile, info: SplitInfo, read: Callable[[Path], GGUFFile]) -> GGUFFile:
    """The whole model. `named`: the part that the user named; `read` reads one part.

    The result has the first part's path and metadata, without the split.* keys, so that it can be
    written as one file. Its digest covers all parts."""
    paths = _paths(named.path, info)
    first = named if info.number == 0 else read(paths[0])
    whole = _checked_info(first, paths, 0)
    tensors = dict(first.tensors)
    file_of_tensor = dict.fromkeys(tensors, paths[0].name)
    digest = hashlib.sha256(first.digest.encode())
    for number in range(1, len(paths)):
        part = named if info.number == number else read(paths[number])
        _check_part(part, paths, number, first, whole)
        for name in part.tensors:
            if name in tensors:
                raise ModelError(
                    f"tensor {name!r:.200} is in {file_of_tensor[name]} too; {_REMEDY}",
                    file=str(part.path),
                )
        tensors |= part.tensors
        file_of_tensor |= dict.fromkeys(part.tensors, part.path.name)
        digest.update(part.digest.encode())
    if len(tensors) != whole.tensors:
        raise ModelError(
            f"the {whole.count} parts hold {len(tensors)} tensors, and split.tensors.count says "
            f"{whole.tensors}; {_REMEDY}",
            file=str(first.path),
        )
    metadata = {key: value for key, value in first.metadata.items() if key not in KEYS}
    types = {key: kind for key, kind in first.types.items() if key not in KEYS}
    return replace(
        first, metadata=metadata, types=types, tensors=tensors, digest=digest.hexdigest()
    )


def _paths(named: Path, info: SplitInfo) -> list[Path]:
    """Paths of all parts. They must exist, and match the header of the part that was named."""
    part = f"part {info.number + 1} of {info.count}"
    names = parts_of(named.name)
    if len(names) != info.count or names[info.number] != named.name:
        wanted = f"NAME-{info.number + 1:05d}-of-{info.count:05d}.gguf"
        raise ModelError(
            f"by its keys split.no and split.count this is {part} of a split model, by its name "
            f"it is not; parts are found by their names, so call it {wanted}, beside the others",
            file=str(named),
        )
    paths = [named.with_name(name) for name in names]
    absent = [number for number, path in enumerate(paths) if not os.path.exists(path)]
    if absent:
        more = f" (and {len(absent) - 1} more)" if absent[1:] else ""
        raise ModelError(
            f"part {absent[0] + 1} of {info.count} is missing{more}; put all parts into one "
            "folder, under their original names",
            file=str(paths[absent[0]]),
        )
    return paths


def _checked_info(part: GGUFFile, paths: list[Path], number: int) -> SplitInfo:
    """The split.* keys of a part; they must match its file name."""
    info = split_info(part.metadata, part.path)
    if info is None:
        raise ModelError(
            f"its name says part {number + 1} of {len(paths)}, but it has no split.count: "
            f"it is not a part of this model; {_REMEDY}",
            file=str(part.path),
        )
    for key, value, expected in (
        ("split.no", info.number, number),
        ("split.count", info.count, len(paths)),
    ):
        if value != expected:
            raise ModelError(
                f"{key} is {value}, and by its name (part {number + 1} of {len(paths)}) it should "
                f"be {expected}: another part, or one of another model, under a wrong name; "
                f"{_REMEDY}",
                file=str(part.path),
            )
    return info


def _check_part(
    part: GGUFFile, paths: list[Path], number: int, first: GGUFFile, whole: SplitInfo
) -> None:
    """Check a later part against the first one."""
    info = _checked_info(part, paths, number)
    if info.tensors != whole.tensors:
        raise ModelError(
            f"split.tensors.count is {info.tensors}, and in {first.path.name} {whole.tensors}: "
            f"a part of another model; {_REMEDY}",
            file=str(part.path),
        )
    for key, value in part.metadata.items():
        if key not in PART_KEYS and (key not in first.metadata or first.metadata[key] != value):
            raise ModelError(
                f"its metadata {key!r:.200} is not that of {first.path.name}: "
                f"a part of another model; {_REMEDY}",
                file=str(part.path),
            )
