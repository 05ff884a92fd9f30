"""Model directories with a planted fault, for the tests of `verbatim doctor`: a tiny model that
ends its answers, and the default model as safetensors. Copies are hard links, so a fault replaces
the file that it changes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tiny_tokenizer import TEMPLATE, train_tokenizer
from verbatim.diagnose.doctor.kv_cost import TEXT
from verbatim.diagnose.doctor.text_checks import TEXTS
from verbatim.text.tokenizer import from_directory

NORMS, REST, EMBED = "norms.safetensors", "rest.safetensors", "embed.safetensors"
ANSWER = 24  # tokens of every greedy answer of the tiny model
WIDTH = 320  # its vocabulary and its hidden size


def replace_json(path: Path, changes: dict[str, Any]) -> None:
    """Change keys of a JSON file; None removes a key."""
    before = json.loads(path.read_text()) if path.exists() else {}
    after = {k: v for k, v in {**before, **changes}.items() if v is not None}
    path.unlink(missing_ok=True)
    path.write_text(json.dumps(after))


def replace_tensors(directory: Path, shard: str, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = dict(load_file(directory / shard))
    change(tensors)
    (directory / shard).unlink()
    _save(directory, shard, tensors)


def _save(directory: Path, shard: str, tensors: dict[str, np.ndarray]) -> None:
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, directory / shard)
    index = directory / "model.safetensors.index.json"
    known = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    kept = {name: file for name, file in known.items() if file != shard}
    index.unlink(missing_ok=True)
    index.write_text(json.dumps({"weight_map": kept | dict.fromkeys(tensors, shard)}))


def copy_of(directory: Path, target: Path) -> Path:
    return Path(shutil.copytree(directory, target, copy_function=os.link))


# --------------------------------------------------------------------------------- sound models


def chain_head(chain: list[int], strength: float) -> np.ndarray:
    """An output head for one-hot hidden states: after chain[i] the most likely token is
    chain[i + 1]. With all other weights 0 the model is this chain."""
    head = np.zeros((WIDTH, WIDTH), np.float32)
    for now, after in zip(chain, [*chain[1:], chain[0]], strict=True):
        head[after, now] = strength
    return head


def answer_chain() -> list[int]:
    """All tokens in one cycle; the end of turn (0) comes ANSWER tokens after <|assistant|> (2)."""
    middle = [i for i in range(WIDTH) if i not in (0, 2)]
    return [2, *middle[: ANSWER - 1], 0, *middle[ANSWER - 1 :]]


def text_followers(path: Path) -> np.ndarray:
    """[token, token before]: how often the one follows the other in the texts that doctor reads."""
    words, counts = from_directory(path), np.full((WIDTH, WIDTH), 1e-3)
    for text in (*TEXTS.values(), TEXT):
        ids = words.encode(text)
        np.add.at(counts, (ids[1:], ids[:-1]), 1)
    return counts / counts.sum(axis=0)


def text_head(chain: list[int], follows: np.ndarray) -> np.ndarray:
    """chain_head() with probability 0.6, and the texts with 0.4: greedy answers follow the chain,
    and the model predicts plain text as a table of token pairs does."""
    share = chain_head(chain, 0.6) + 0.4 * follows
    # The norm makes a one-hot state sqrt(320) = 17.9 long.
    return (np.log(share) / np.sqrt(WIDTH)).astype(np.float32)


def tiny_directory(path: Path) -> Path:
    """A llama whose greedy answers have ANSWER different tokens and then end, and which predicts
    the texts of doctor better than token frequencies do."""
    path.mkdir()
    train_tokenizer(path, WIDTH)
    follows = text_followers(path)
    replace_json(path / "tokenizer_config.json", {"pad_token": "<|system|>"})
    config = {
        "model_type": "llama",
        "vocab_size": WIDTH,
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    replace_json(path / "config.json", config)
    replace_json(path / "generation_config.json", {"eos_token_id": [0]})
    layer, one = "model.layers.0.", np.ones(WIDTH, np.float32)
    shapes = {"q_proj": WIDTH, "k_proj": WIDTH // 2, "v_proj": WIDTH // 2, "o_proj": WIDTH}
    rest = {
        f"{layer}self_attn.{name}.weight": np.zeros((rows, WIDTH), np.float32)
        for name, rows in shapes.items()
    }
    for name in ("gate_proj", "up_proj"):
        rest[f"{layer}mlp.{name}.weight"] = np.zeros((32, WIDTH), np.float32)
    rest[f"{layer}mlp.down_proj.weight"] = np.zeros((WIDTH, 32), np.float32)
    norms = {f"{layer}{n}.weight": one for n in ("input_layernorm", "post_attention_layernorm")}
    _save(path, NORMS, norms | {"model.norm.weight": one})
    _save(path, REST, rest)
    embed = {"model.embed_tokens.weight": np.eye(WIDTH, dtype=np.float32)}
    _save(path, EMBED, embed | {"lm_head.weight": text_head(answer_chain(), follows)})
    return path


def default_directory(gguf: Path, path: Path) -> Path:
    """The default model as a safetensors directory in float16, with its own tokenizer."""
    from verbatim.files.gguf import read_gguf
    from verbatim.model.loading.load import load_model
    from verbatim.model.loading.names import hf_source
    from verbatim.text.tokenizer import from_gguf

    path.mkdir()
    model, meta = load_model(gguf), read_gguf(gguf).metadata
    words = from_gguf(meta)
    words._vocab.special.save(str(path / "tokenizer.json"))
    config = {
        "eos_token": "<|im_end|>",
        "bos_token": "<|im_start|>",
        "pad_token": "<|endoftext|>",
        "chat_template": meta["tokenizer.chat_template"],
    }
    replace_json(path / "tokenizer_config.json", config)
    config = {
        "model_type": "llama",
        "vocab_size": model.spec.vocab,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "torch_dtype": "float16",
    }
    replace_json(path / "config.json", config)
    replace_json(path / "generation_config.json", {"eos_token_id": 2})
    shards: dict[str, dict[str, np.ndarray]] = {NORMS: {}, REST: {}, EMBED: {}}
    for name, tensor in model.weights.items():
        shard = NORMS if "norm" in name else EMBED if name == "embed" else REST
        found = hf_source("llama", "model.", name, 0).names[0]
        shards[shard][found] = tensor.to_f32().astype(np.float16)
    for shard, tensors in shards.items():
        _save(path, shard, tensors)
    return path


# -------------------------------------------------------------------------------------- faults

Fault = Callable[[Path], None]


def _end(path: Path) -> int:
    return int(json.loads((path / "config.json").read_text())["eos_token_id"])


def _eos(token: int | None, text: str | None = None) -> Fault:
    def plant(path: Path) -> None:
        replace_json(path / "config.json", {"eos_token_id": token})
        replace_json(path / "generation_config.json", {"eos_token_id": token})
        replace_json(path / "tokenizer_config.json", {"eos_token": text})

    return plant


def _json(file: str, **changes: Any) -> Fault:
    return lambda path: replace_json(path / file, changes)


def _no_template(path: Path) -> None:
    replace_json(path / "tokenizer_config.json", {"chat_template": None})


def _other_template(path: Path) -> None:
    (path / "chat_template.jinja").write_text(TEMPLATE.replace("<|end|>", "<|end|>\n"))


def _other_turn(path: Path) -> None:
    """The template ends a turn with the first control token that is no end of sequence."""
    words = json.loads((path / "tokenizer_config.json").read_text())
    other = "<|system|>" if words["eos_token"] == "<|end|>" else "<file_sep>"
    changed = words["chat_template"].replace(words["eos_token"], other)
    replace_json(path / "tokenizer_config.json", {"chat_template": changed})


def _pad_is_eos(path: Path) -> None:
    words = json.loads((path / "tokenizer_config.json").read_text())
    replace_json(path / "tokenizer_config.json", {"pad_token": words["eos_token"]})


def _own_head(path: Path) -> None:
    replace_json(path / "config.json", {"tie_word_embeddings": True})

    def change(tensors: dict[str, Any]) -> None:
        embed = tensors["model.embed_tokens.weight"]
        tensors.setdefault("lm_head.weight", embed + embed.dtype.type(0.01))

    replace_tensors(path, EMBED, change)


def _nan(path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].copy()
        tensors["model.norm.weight"][3] = np.nan

    replace_tensors(path, NORMS, change)


def _never_ends(path: Path) -> None:
    """The head's row of the end of turn was never trained."""
    end = _end(path)

    def change(tensors: dict[str, Any]) -> None:
        name = "lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"
        rows = tensors[name].copy()
        rows[end] = rows.min() if name == "lm_head.weight" else 0
        tensors[name] = rows

    replace_tensors(path, EMBED, change)


def _loops(path: Path) -> None:
    """The tiny model: a chain of two tokens. The default: attention sees nothing, so that the next
    token depends on the last one only."""

    def chain(tensors: dict[str, Any]) -> None:
        rest = [i for i in range(WIDTH) if i not in (2, 100, 101)]
        head = chain_head([100, 101], 2.0)
        head[100, [2, *rest]] = 2.0
        tensors["lm_head.weight"] = head

    def blind(tensors: dict[str, Any]) -> None:
        for name in tensors:
            if "input_layernorm" in name:
                tensors[name] = np.zeros_like(tensors[name])

    tiny = (path / EMBED).stat().st_size < 10_000_000
    replace_tensors(path, EMBED if tiny else NORMS, chain if tiny else blind)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
# Fault -> (the check that must find it, how it is planted). The last two show in live checks only.
FAULTS: dict[str, tuple[str, Fault]] = {
    "eos missing": ("eos", _eos(None)),
    "eos wrong": ("eos", _eos(100)),
    "eos is not the end of turn": ("end of turn", _other_turn),
    "pad equal to eos": ("pad", _pad_is_eos),
    "template missing": ("template", _no_template),
    "template differs": ("template", _other_template),
    "special token outside the vocabulary": (
        "special tokens",
        _json("config.json", bos_token_id=60_000),
    ),
    "generation config against defaults": (
        "generation",
        _json("generation_config.json", do_sample=False, temperature=0.2),
    ),
    "context mismatch": ("context", _json("config.json", rope_scaling=YARN)),
    "two rope records": (
        "rope keys",
        _json(
            "config.json",
            rope_scaling={"rope_type": "linear", "factor": 2.0},
            rope_parameters={"rope_type": "linear", "factor": 4.0},
        ),
    ),
    "tied with its own head": ("tied head", _own_head),
    "nan weights": ("weights", _nan),
    "turn never ends": ("turn ends", _never_ends),
    "loops": ("loops", _loops),
}
LIVE = ("turn never ends", "loops")
