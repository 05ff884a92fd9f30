"""Models of the Hugging Face hub: a repository, a revision and perhaps a file in, a path in the hub's own cache out.

Through huggingface_hub, so resumable and cached, and HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN are honoured. Only weights that run no code
are fetched, and the texts beside them. A split GGUF file is one file: whichever part is asked for, all are fetched, out of one revision.

One short question comes first: which files are there? If nobody answers it, the model is taken out of the cache, where that holds all of
it, and a notice says so: the revision, and why. So a train without a network costs a second, not a program. (`offline` does not ask.)
"""

from __future__ import annotations

import glob
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbatim.base.errors import ModelError
from verbatim.weights.split import grouped, parts_of

PATIENCE = 10.0  # seconds for the first answer

# what of a hub repository is fetched: weights that run no code, and the texts beside them
PATTERNS = (
    "*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
IGNORED = ("consolidated*", "*/*")  # a second copy of the weights in some repositories; folders
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for. No revision: the newest; no file: the safetensors, or the only GGUF file."""

    repo: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        return (
            self.repo
            + (f"@{self.revision}" if self.revision else "")
            + (f":{self.file}" if self.file else "")
        )


def hub_model(wanted: Wanted, *, offline: bool = False, fetch: bool = False) -> tuple[Path, str]:
    """(path, a notice for the user or ""). `fetch`: the cache will not do where the hub cannot be reached."""
    hub = _library()
    if offline or hub.constants.HF_HUB_OFFLINE:
        path, missing = _in_cache(hub, wanted)
        if missing:
            how = f"(offline: only the cache was searched): {missing}"
            raise ModelError(
                f"could not get {wanted} from the hub {how}; fetch it once with `verbatim pull {wanted}`"
            )
        return path, ""
    try:
        files = (
            hub.HfApi().model_info(wanted.repo, revision=wanted.revision, timeout=PATIENCE).siblings
        )
    except (
        Exception
    ) as error:  # the library raises errors of its own, of requests or httpx, and of the system
        if fetch or not _unreachable(error):
            raise _not_got(wanted, error, "check the name and the network") from error
        return _instead(hub, wanted, error)
    try:
        return _take(hub, wanted, [f.rfilename for f in files]), ""
    except ModelError:
        raise
    except Exception as error:
        raise _not_got(
            wanted, error, "check the network; what has arrived is kept, so ask again"
        ) from error


def _library() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants  # a lazy package: its submodules must be asked for
    except ImportError:
        raise ModelError(
            "models of the hub (org/name) need the extra 'hub': pip install '.[hub]' in the checkout"
        ) from None
    return huggingface_hub


def _take(hub: Any, wanted: Wanted, names: list[str]) -> Path:
    file = wanted.file
    if file is None and not any(
        name.endswith(".safetensors") and "/" not in name for name in names
    ):
        file = _only_gguf(wanted.repo, names)
    if file is None:
        return _snapshot(hub, wanted, local=False)
    parts = parts_of(file)
    if not set(parts) & set(names):  # one file; or none, which the hub itself will say
        return Path(
            hub.hf_hub_download(wanted.repo, file, revision=wanted.revision, local_files_only=False)
        )
    if lost := [part for part in parts if part not in names]:
        raise ModelError(
            f"{wanted.repo} does not hold all {len(parts)} parts of {file}: {_missing(lost)}; choose another file"
        )
    folder = _snapshot(hub, wanted, local=False, parts=parts)
    if missing := _missing(_not_in(folder, parts)):
        raise ModelError(
            f"could not get all of {wanted} from the hub: {missing}; what has arrived is kept, so ask again"
        )
    return folder / file


def _snapshot(hub: Any, wanted: Wanted, *, local: bool, parts: list[str] | None = None) -> Path:
    """The folder of one revision, with what of it we read; or with the parts of one split file, which must all be of the same revision."""
    patterns = {"allow_patterns": list(PATTERNS), "ignore_patterns": list(IGNORED)}
    if parts is not None:
        patterns = {"allow_patterns": [glob.escape(part) for part in parts], "ignore_patterns": []}
    return Path(
        hub.snapshot_download(
            wanted.repo, revision=wanted.revision, local_files_only=local, **patterns
        )
    )


def _only_gguf(repo: str, names: list[str]) -> str:
    files = list(grouped(name for name in names if name.endswith(".gguf")))
    if len(files) == 1:
        return files[0]
    if files:
        raise ModelError(
            f"{repo} holds {len(files)} GGUF files; choose one: {', '.join(f'{repo}:{name}' for name in files[:20])}"
        )
    raise ModelError(
        f"{repo} holds neither safetensors nor GGUF files; other kinds of weights are not read"
    )


# ----------------------------------------------------------------------------------------------------- without a network


def _instead(hub: Any, wanted: Wanted, error: Exception) -> tuple[Path, str]:
    """The cache's copy and what to say about it; or one error with both reasons."""
    path, missing = _in_cache(hub, wanted)
    if missing:
        raise _not_got(wanted, error, f"and in the cache {missing}; check the network") from error
    revision = (
        path.parts[path.parts.index("snapshots") + 1] if "snapshots" in path.parts else "unknown"
    )
    why = f"the hub cannot be reached ({_reason(error)})"
    return (
        path,
        f"{why}: taking {wanted} from the cache, revision {revision}, which may not be the newest",
    )


def _in_cache(hub: Any, wanted: Wanted) -> tuple[Path, str]:
    """(path, "") where the cache holds all that was asked for, else what is missing."""
    try:
        if wanted.file is not None and not parts_of(wanted.file):
            return Path(
                hub.hf_hub_download(
                    wanted.repo, wanted.file, revision=wanted.revision, local_files_only=True
                )
            ), ""
        path = _snapshot(hub, wanted, local=True)
    except Exception:  # whatever the library calls it
        return Path(), "it is not there"
    file = wanted.file
    if file is None:
        files = [f.relative_to(path).as_posix() for f in path.rglob("*.gguf")]
        if any(path.glob("*.safetensors")) or not files:
            return path, _lacks(path)
        file = _only_gguf(wanted.repo, files)
    return path / file, _missing(_not_in(path, parts_of(file) or [file]))


def _not_in(folder: Path, files: list[str]) -> list[str]:
    return [
        file for file in files if not (folder / file).exists()
    ]  # files are links, which may dangle


def _missing(lost: list[str]) -> str:
    return (
        f"{lost[0]} is missing" + (f" (and {len(lost) - 1} more)" if lost[1:] else "")
        if lost
        else ""
    )


def _lacks(folder: Path) -> str:
    """What a snapshot of safetensors needs and has not: the library hands out one whose fetching was interrupted, too."""
    have = {
        file.name for file in folder.iterdir() if file.exists()
    }  # files are links, which may dangle
    need = {"config.json"}
    for name in have:
        if part := re.fullmatch(r"(.*-)(\d{5})-of-(\d{5})\.safetensors", name):
            need |= {
                f"{part[1]}{i:05d}-of-{part[3]}.safetensors" for i in range(1, int(part[3]) + 1)
            }
    if "model.safetensors.index.json" in have:
        try:
            need |= set(
                json.loads((folder / "model.safetensors.index.json").read_bytes())[
                    "weight_map"
                ].values()
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return "its model.safetensors.index.json cannot be read"
    lost = sorted(need - have)
    if not any(
        name.endswith(".safetensors") and not name.startswith("consolidated") for name in have
    ):
        lost.append("a file of weights")
    if not have & set(_TOKENIZERS):
        lost.append("a tokenizer")
    return _missing(lost)


def _unreachable(error: BaseException) -> bool:
    """Nobody answered, or only somebody on the way (a status of 500 or more): not a repository that does not exist or is closed to us.
    Asking for the list of files touches no disk, so a fault of the system behind the library's own is one of the network."""
    link: BaseException | None = error
    while link is not None:
        if (answer := getattr(link, "response", None)) is not None:
            return int(getattr(answer, "status_code", 0)) >= 500
        if isinstance(link, OSError):
            return True
        link = link.__cause__ or link.__context__
    return False


def _not_got(wanted: Wanted, error: Exception, remedy: str) -> ModelError:
    return ModelError(f"could not get {wanted} from the hub: {_reason(error)}; {remedy}")


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (
        f"{type(error).__name__}: {lines[0][:300].rstrip('.')}" if lines else type(error).__name__
    )
