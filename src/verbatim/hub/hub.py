"""Download models from the Hugging Face hub.

In: a repository, and optionally a revision and a file. Out: a path in the hub's own cache.

huggingface_hub does the downloads, so they are resumable and cached, and honour HF_HUB_OFFLINE,
HF_ENDPOINT and HF_TOKEN. Only weights in formats that run no code are downloaded, and the JSON and
tokenizer files beside them. All parts of a split GGUF file are downloaded from one revision.

The first request lists the files of the repository, with a short timeout. If the hub cannot be
reached, a complete copy in the cache is used, with a notice that names its revision and the error.
`offline` sends no request.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verbatim.base.errors import ModelError
from verbatim.files.split import group_parts, parts_of

LIST_TIMEOUT = 10.0  # seconds to wait for the list of files before the cache is used
CHECK_NAME = "check the name and the network"

# Files of a repository that are downloaded: weights in formats that run no code, configs,
# tokenizers, and the settings of sentence-transformers.
PATTERNS = (
    *("*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja"),
    *("modules.json", "*_Pooling/config.json", "config_sentence_transformers.json"),
    *("sentence_bert_config.json", "vocab.json", "merges.txt", "tokenizer.model"),
)
IGNORED = ("consolidated*", "*/*.safetensors")  # second copies of the weights; of subfolders
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class HubRef:
    """A model on the hub. No revision: the newest. No file: safetensors, or the only GGUF file, or
    the one of the quantisation `quant` (Q4_K_M). Both: the file, or that one if the hub lists no
    such file, because it was replaced by a newer one."""

    repo: str
    revision: str | None = None
    file: str | None = None
    quant: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        file = self.file or self.quant
        return f"{self.repo}{revision}{f':{file}' if file else ''}"


def hub_model(
    ref: HubRef,
    *,
    offline: bool = False,
    fetch: bool = False,
    listed: Callable[[], None] = lambda: None,
) -> tuple[Path, str]:
    """(path, a notice for the user or "").

    `fetch`: fail if the hub cannot be reached, instead of using the cache. `listed` is called when
    the hub has listed the files, before the download."""
    hub = _library()
    if offline or hub.constants.HF_HUB_OFFLINE:
        path, missing = _find_in_cache(hub, ref)
        if missing:
            raise ModelError(
                f"could not get {ref} from the hub (offline): "
                f"{missing}; fetch it once with `verbatim pull {ref}`"
            )
        return path, ""
    try:
        names = _list(hub, ref)
    except Exception as error:  # from huggingface_hub, its HTTP client or the operating system
        if fetch or not _unreachable(error):
            raise _hub_error(ref, error, CHECK_NAME) from error
        return _fall_back_to_cache(hub, ref, error)
    listed()
    try:
        return _download(hub, ref, names), ""
    except ModelError:
        raise
    except Exception as error:
        raise _hub_error(
            ref, error, "check the network and retry; finished downloads are kept"
        ) from error


def check_on_hub(ref: HubRef) -> None:
    """Raise a ModelError if the hub does not list the model, or cannot be reached."""
    hub = _library()
    try:
        names = _list(hub, ref)
    except Exception as error:  # as in hub_model
        raise _hub_error(ref, error, CHECK_NAME) from error
    _file_of(ref, names)


def _list(hub: Any, ref: HubRef) -> list[str]:
    """The names of the files in the repository."""
    info = hub.HfApi().model_info(ref.repo, revision=ref.revision, timeout=LIST_TIMEOUT)
    return [file.rfilename for file in info.siblings]


def _library() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants  # `import huggingface_hub` does not load it
    except ImportError:
        raise ModelError(
            "models of the hub (org/name) need the extra 'hub':"
            " pip install '.[hub]' in the checkout"
        ) from None
    return huggingface_hub


def _file_of(ref: HubRef, names: list[str]) -> str | None:
    """The GGUF file that `ref` means; None for safetensors."""
    if ref.quant is not None and ref.file not in names:
        return _gguf_of(ref.repo, names, ref.quant)
    plain = any(name.endswith(".safetensors") and "/" not in name for name in names)
    return ref.file if ref.file or plain else _only_gguf(ref.repo, names)


def _download(hub: Any, ref: HubRef, names: list[str]) -> Path:
    file = _file_of(ref, names)
    if file is None:
        return _snapshot(hub, ref, local=False)
    parts = parts_of(file)
    if not set(parts) & set(names):  # not split; a missing file is the hub's error
        return _file(hub, ref, file, local=False)
    if absent := [part for part in parts if part not in names]:
        raise ModelError(
            f"{ref.repo} does not hold all {len(parts)} parts of {file}: "
            f"{_describe_missing(absent)}; choose another file"
        )
    folder = _snapshot(hub, ref, local=False, parts=parts)
    if missing := _describe_missing(_absent(folder, parts)):
        raise ModelError(
            f"could not get all of {ref} from the hub: {missing}; "
            "retry; finished downloads are kept"
        )
    return folder / file


def _file(hub: Any, ref: HubRef, name: str, *, local: bool) -> Path:
    options = {"revision": ref.revision, "local_files_only": local}
    return Path(hub.hf_hub_download(ref.repo, name, **options))


def _snapshot(hub: Any, ref: HubRef, *, local: bool, parts: list[str] | None = None) -> Path:
    """The folder of one revision with the files in PATTERNS, or with the parts of a split file.

    One call downloads all parts, so that they belong to one revision."""
    patterns = {"allow_patterns": list(PATTERNS), "ignore_patterns": list(IGNORED)}
    if parts is not None:
        patterns = {"allow_patterns": [glob.escape(part) for part in parts], "ignore_patterns": []}
    return Path(
        hub.snapshot_download(ref.repo, revision=ref.revision, local_files_only=local, **patterns)
    )


def _gguf_models(names: list[str]) -> list[str]:
    """The GGUF files of models, without the projectors of vision models (mmproj)."""
    models = (name for name in names if not name.rsplit("/", 1)[-1].startswith("mmproj"))
    return list(group_parts(name for name in models if name.endswith(".gguf")))


def _gguf_of(repo: str, names: list[str], quant: str) -> str:
    """The GGUF file of a quantisation: its name ends in it, before the suffix and part numbers, or
    its folder is named after it."""
    files = _gguf_models(names)
    name = re.escape(quant)
    wanted = re.compile(rf"(?:^|[-._/]){name}(?:-\d+-of-\d+)?\.gguf$|(?:^|/){name}/", re.IGNORECASE)
    found = [name for name in files if wanted.search(name)]
    if len(found) == 1:
        return found[0]
    if not files:
        raise ModelError(f"{repo} holds no GGUF files; leave out :{quant}")
    shown = ", ".join(f"{repo}:{name}" for name in (found or files)[:20])
    which = f"{len(found)} files" if found else "no file"
    raise ModelError(f"{repo} holds {which} of the quantisation {quant}; choose one: {shown}")


def _only_gguf(repo: str, names: list[str]) -> str:
    files = _gguf_models(names)
    if len(files) == 1:
        return files[0]
    if files:
        raise ModelError(
            f"{repo} holds {len(files)} GGUF files; choose one: "
            f"{', '.join(f'{repo}:{name}' for name in files[:20])}"
        )
    raise ModelError(
        f"{repo} holds neither safetensors nor GGUF files; other formats are not supported"
    )


# ----------------------------------------------------------------------------- without a network


def _fall_back_to_cache(hub: object, ref: HubRef, error: Exception) -> tuple[Path, str]:
    """(path in the cache, notice), or an error with both reasons."""
    path, missing = _find_in_cache(hub, ref)
    if missing:
        raise _hub_error(ref, error, f"{missing}; check the network") from error
    parts = path.parts
    revision = parts[parts.index("snapshots") + 1] if "snapshots" in parts else "unknown"
    notice = (
        f"the hub cannot be reached ({_reason(error)}): taking {ref} from the cache, "
        f"revision {revision}, which may not be the newest"
    )
    return path, notice


def _find_in_cache(hub: Any, ref: HubRef) -> tuple[Path, str]:
    """(path, "") if the cache holds the complete model, else (any path, what is missing)."""
    if ref.file and ref.quant:
        path, missing = _find_in_cache(hub, replace(ref, quant=None))
        return _find_in_cache(hub, replace(ref, file=None)) if missing else (path, "")
    try:
        if ref.file is not None and not parts_of(ref.file):
            return _file(hub, ref, ref.file, local=True), ""
        path = _snapshot(hub, ref, local=True)
    except Exception:  # huggingface_hub has several error types for this
        return Path(), "it is not in the cache"
    file = ref.file
    if file is None:
        files = [f.relative_to(path).as_posix() for f in path.rglob("*.gguf")]
        if ref.quant is not None:
            try:
                file = _gguf_of(ref.repo, files, ref.quant)
            except ModelError:
                return path, f"no file of the quantisation {ref.quant} is in the cache"
    if file is None:
        if any(path.glob("*.safetensors")) or not files:
            return path, _incomplete(_missing_in_snapshot(path))
        file = _only_gguf(ref.repo, files)
    return path / file, _incomplete(_describe_missing(_absent(path, parts_of(file) or [file])))


def _incomplete(missing: str) -> str:
    return missing and f"the copy in the cache is incomplete: {missing}"


def _absent(folder: Path, files: list[str]) -> list[str]:
    # Files of a snapshot are links, which may be broken.
    return [file for file in files if not (folder / file).exists()]


def _describe_missing(absent: list[str]) -> str:
    more = f" (and {len(absent) - 1} more)" if absent[1:] else ""
    return f"{absent[0]} is missing{more}" if absent else ""


def _missing_in_snapshot(folder: Path) -> str:
    """What a safetensors snapshot lacks, or "".

    huggingface_hub also returns snapshots whose download was interrupted."""
    have = {file.name for file in folder.iterdir() if file.exists()}
    need = {"config.json"}
    for name in have:
        if part := re.fullmatch(r"(.*-)(\d{5})-of-(\d{5})\.safetensors", name):
            numbers = range(1, int(part[3]) + 1)
            need |= {f"{part[1]}{i:05d}-of-{part[3]}.safetensors" for i in numbers}
    if "model.safetensors.index.json" in have:
        try:
            index = json.loads((folder / "model.safetensors.index.json").read_bytes())
            need |= set(index["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return "its model.safetensors.index.json cannot be read"
    absent = sorted(need - have)
    weights = (name for name in have if name.endswith(".safetensors"))
    if all(name.startswith("consolidated") for name in weights):
        absent.append("a file of weights")
    if not have & set(_TOKENIZERS):
        absent.append("a tokenizer")
    return _describe_missing(absent)


def _unreachable(error: BaseException) -> bool:
    """Whether the hub could not be reached, or a server on the way failed (status 500 or more).

    False for a repository that does not exist or denies access. Listing the files does not use the
    disk, so an OSError in the chain of causes is a network error. The library's HTTP client has its
    own errors for a connection that is cut off, and a login page instead of the hub is no JSON."""
    link: BaseException | None = error
    while link is not None:
        if (response := getattr(link, "response", None)) is not None:
            return int(getattr(response, "status_code", 0)) >= 500
        names = {kind.__name__ for kind in type(link).__mro__}  # the client depends on the version
        if names & {"OSError", "TransportError", "JSONDecodeError"}:
            return True
        link = link.__cause__ or link.__context__
    return False


def _hub_error(ref: HubRef, error: Exception, remedy: str) -> ModelError:
    return ModelError(f"could not get {ref} from the hub: {_reason(error)}; {remedy}")


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    why = f": {lines[0][:300].rstrip('.')}" if lines else ""
    return f"{type(error).__name__}{why}"
