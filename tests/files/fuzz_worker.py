"""Fuzzer: read mutated model files with a memory limit. Child process of test_hostile_files.py.

    python fuzz_worker.py KIND FIRST COUNT DIRECTORY
    KIND: gguf | split | safetensors | directory | whole

Case i is a function of i alone, so a failure can be repeated with FIRST = i, COUNT = 1. Prints one
line of JSON: files read, files rejected with a ModelError, and the cases that ended in any other
way or took more than MAX_CPU seconds.

Memory limit: the address space after the imports, plus the file, plus 64 MiB. A MemoryError is a
failed case.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import re
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf_splitting import split_gguf

from verbatim.base.errors import ModelError
from verbatim.files.gguf import read_gguf
from verbatim.files.gguf_file import GGUFFile
from verbatim.files.gguf_write import write_gguf
from verbatim.files.safetensors import read_directory, read_safetensors
from verbatim.formats.conversion import nbytes
from verbatim.formats.registry import BLOCKS
from verbatim.formats.tensor import Tensor

ALLOWANCE = 64 << 20  # bytes
MAX_CPU = 60  # seconds of CPU time per case, to detect endless loops; chosen, not measured
EXTREMES = [*range(4), *range(7, 10), 12, 13, *range(31, 34), 255, 256, 65535, 65536]
EXTREMES += [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**48, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
EXTREMES += [2**64 - 8, 2**64 - 32, 2**64 // 18, 2**64 // 32, 2**59 + 1]
LITERALS = ["null", "true", "-1", "0", "1", "1e999", "-0.0", "NaN", "18446744073709551615"]
LITERALS += ["18446744073709551616", "9" * 5000, '""', '"F32"', '"F16"', '"I64"', '"F4"']
LITERALS += [
    '"../x.safetensors"',
    '"/etc/passwd"',
    '"\\ud800"',
    '"a\\u0000b"',
    '"model.safetensors"',
]
LITERALS += ["[]", "{}", "[0,0]", "[0,8]", "[1,1,1,1,1,1,1,1,1]", "[[[[]]]]", "[" * 3000]
LITERALS += ['{"a":' * 3000, "[0,9223372036854775807]"]


# -------------------------------------------------------------------------------------- mutations


def mutate_bytes(base: bytes, rng: random.Random, head: int) -> bytes:
    """Apply one to four changes, mostly in the first `head` bytes: any bytes are valid data."""
    raw = bytearray(base)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not raw:
            break
        at = rng.randrange(min(head, len(raw)) if rng.random() < 0.95 else len(raw))
        kind = rng.randrange(8)
        if kind == 0:
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            raw[at] = rng.randrange(256)
        elif kind == 2:
            del raw[at if rng.random() < 0.5 else rng.randrange(len(raw)) :]
        elif kind in (3, 4):
            value = (
                rng.choice(EXTREMES) if rng.random() < 0.8 else len(raw) + rng.randrange(-40, 41)
            )
            width = rng.choice((4, 8))
            raw[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == 5:
            source = rng.randrange(len(raw))
            raw[at : at + 40] = raw[source : source + rng.randrange(1, 60)]
        elif kind == 6:
            del raw[at : at + rng.choice((1, 4, 8, 12, 100))]
        else:
            raw[at:at] = rng.randbytes(rng.choice((1, 4, 8, 32)))
    return bytes(raw)


def mutate_json(text: str, rng: random.Random) -> bytes:
    """Half of the time change a value of the parsed document, else replace or move JSON tokens."""
    if rng.random() < 0.5:
        return mutate_document(json.loads(text), rng)
    tokens = re.findall(r'"[^"]*"|-?[0-9.]+|true|false|null|[\[\]{}:,]|\s+', text)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(tokens))
        kind = rng.randrange(4)
        if kind == 0:
            tokens[at] = rng.choice(LITERALS)
        elif kind == 1:
            tokens[at] = tokens[rng.randrange(len(tokens))]
        elif kind == 2:
            del tokens[at : at + rng.randrange(1, 6)]
        else:
            tokens[at:at] = tokens[at : at + rng.randrange(1, 12)]
    return "".join(tokens).encode(errors="surrogatepass")


def mutate_document(document: dict[str, Any], rng: random.Random) -> bytes:
    """Replace, shift, delete or copy one to three values somewhere in the tree."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places: list[tuple[Any, Any]] = []
        stack: list[Any] = [document]
        while stack:
            node = stack.pop()
            keys = list(node) if isinstance(node, dict) else range(len(node))
            places += [(node, key) for key in keys]
            stack += [node[key] for key in keys if isinstance(node[key], (dict, list))]
        if not places:
            break
        node, key = rng.choice(places)
        kind = rng.randrange(6)
        if isinstance(node[key], int) and kind < 3:
            node[key] += rng.choice((-8, -2, -1, 1, 2, 8, node[key], 2**31, 2**62, 2**63, 2**64))
        elif kind < 4:
            node[key] = f"@@{rng.randrange(len(LITERALS))}@@"
        elif kind == 4:
            del node[key]
        else:
            node[key] = copy.deepcopy(rng.choice(places)[0])
    text = json.dumps(document)
    return re.sub('"@@([0-9]+)@@"', lambda found: LITERALS[int(found[1])], text).encode(
        errors="surrogatepass"
    )


def count_fields(base: bytes, where: list[int], rng: random.Random) -> bytes:
    """Put extreme values into fields that hold a count, length, dimension, type or offset."""
    raw = bytearray(base)
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.choice(where)
        old = int.from_bytes(raw[at : at + 8], "little")
        value = (
            rng.choice(
                [
                    *EXTREMES,
                    old + 1,
                    old - 1,
                    old * 2,
                    old ^ 32,
                    len(raw),
                    len(raw) - at,
                    (len(raw) - at) // 8,
                ]
            )
            % 2**64
        )
        width = rng.choice((4, 8))
        raw[at : at + width] = struct.pack("<Q", value)[:width]
    return bytes(raw)


# ----------------------------------------------------------------------------------- valid inputs


def small_gguf(file: Path, rng: random.Random) -> None:
    """A valid file with every value type, nested arrays and every tensor type."""
    metadata = {
        "general.architecture": "llama",
        "general.alignment": rng.choice((8, 32, 64)),
        "llama.block_count": 2,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.tokens": ["<s>", "</s>", "Ġthe", "é", "\U0001f600"],
        "tokenizer.ggml.scores": [0.0, -1.0, -2.5, 0.5, 3.0],
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1],
        "tokenizer.ggml.add_bos_token": True,
        "flags": [True, False],
        "nested": [[1, 2], [3], [[4], [5]][0]],
        "tokenizer.chat_template": "{{ messages }}",
    }
    tensors = []
    for kind in rng.sample(list(BLOCKS), 5):
        shape = (rng.randrange(1, 4), BLOCKS[kind][0] * rng.randrange(1, 3))
        tensors.append(
            Tensor(
                f"blk.{kind}.weight",
                kind,
                shape,
                np.frombuffer(rng.randbytes(nbytes(kind, shape)), dtype=np.uint8),
            )
        )
    write_gguf(file, metadata, tensors)


def whole_gguf(file: Path) -> int:
    """A one-layer llama with a byte-level vocabulary. Returns the length of the header."""
    from verbatim.text.vocabulary import BYTE_ALPHABET

    tokens = ["<|im_start|>", "<|im_end|>", *BYTE_ALPHABET, "he", "Ġw"]
    numbers = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 32,
        "vocab_size": len(tokens),
    }
    numbers |= {"attention.head_count": 2, "attention.head_count_kv": 1, "rope.dimension_count": 16}
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        **{f"llama.{name}": value for name, value in numbers.items()},
    }
    metadata |= {"llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 10000.0}
    metadata |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.eos_token_id": 1,
    }
    metadata |= {"tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    metadata |= {"tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2)}
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["h e", "Ġ w"]}
    shapes = {
        "token_embd": (len(tokens), 32),
        "output_norm": (32,),
        "blk.0.attn_norm": (32,),
        "blk.0.ffn_norm": (32,),
    }
    shapes |= {
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
    }
    shapes |= {"blk.0.ffn_gate": (32, 32), "blk.0.ffn_up": (32, 32), "blk.0.ffn_down": (32, 32)}
    tensors = []
    for name, shape in shapes.items():
        kind = "q8_0" if len(shape) > 1 else "f32"
        tensors.append(
            Tensor(f"{name}.weight", kind, shape, np.zeros(nbytes(kind, shape), dtype=np.uint8))
        )
    write_gguf(file, metadata, tensors)
    return file.stat().st_size - sum(-(-t.data.size // 32) * 32 for t in tensors)


def number_fields(raw: bytes, end: int = 1400) -> list[int]:
    """Offsets that seem to hold a small u32 or u64: counts, lengths, dimensions, offsets."""
    return [
        at
        for at in range(4, min(len(raw) - 8, end))
        if raw[at] and raw[at + 1 : at + 4] == b"\0\0\0"
    ]


def small_safetensors(rng: random.Random) -> tuple[str, bytes]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for index, (dtype, size) in enumerate(
        (("F32", 4), ("BF16", 2), ("F16", 2), ("I64", 8), ("BOOL", 1))
    ):
        shape = [rng.randrange(1, 4), rng.randrange(1, 4)]
        end = position + shape[0] * shape[1] * size
        header[f"model.layers.{index}.weight"] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [position, end],
        }
        position = end
    return json.dumps(header), rng.randbytes(position)


CONFIG = (
    '{"architectures":["LlamaForCausalLM"],"hidden_size":16,'
    '"rope_scaling":{"factor":8.0,"rope_type":"llama3"},"eos_token_id":[1,2]}'
)
INDEX = (
    '{"metadata":{"total_size":8},"weight_map":{"model.layers.0.weight":"model.safetensors",'
    '"model.layers.1.weight":"model.safetensors"}}'
)


# ------------------------------------------------------------------------------------------ cases


def put(file: Path, raw: bytes) -> None:
    """Write a new file: some file systems sync to disk when a file is truncated and rewritten."""
    file.unlink(missing_ok=True)
    file.write_bytes(raw)


def gguf_case(index: int, directory: Path) -> Callable[[], object]:
    rng = random.Random(index)
    file = directory / "case.gguf"
    base_file = directory / f"base{index % 50}.gguf"
    if not base_file.exists():
        small_gguf(base_file, random.Random(index % 50))
    base = base_file.read_bytes()
    put(
        file,
        mutate_bytes(base, rng, 1400)
        if index % 2
        else count_fields(base, number_fields(base), rng),
    )

    def read() -> object:
        found = read_gguf(file)
        return [tensor.to_f32().shape for tensor in found.tensors.values()]

    return read


def split_case(index: int, directory: Path) -> Callable[[], object]:
    """Three parts, one of them mutated; read by a random part."""
    rng = random.Random(index)
    files = [directory / f"case-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    bases = [directory / f"base{index % 20}" / file.name for file in files]
    if not bases[0].exists():
        small_gguf(directory / "base.gguf", random.Random(index % 20))
        split_gguf(directory / "base.gguf", bases[0].parent, "case", (1, 2, 2))
    chosen = rng.randrange(3)
    for number, (file, base) in enumerate(zip(files, bases, strict=True)):
        raw = base.read_bytes()
        if number == chosen:
            raw = (
                mutate_bytes(raw, rng, 1400 if number == 0 else 250)
                if index % 2
                else count_fields(raw, number_fields(raw), rng)
            )
        put(file, raw)
    return lambda: [
        tensor.to_f32().shape for tensor in read_gguf(files[rng.randrange(3)]).tensors.values()
    ]


def safetensors_file(index: int) -> bytes:
    rng = random.Random(index)
    text, data = small_safetensors(rng)
    header = text.encode()
    if index % 4:
        header = mutate_json(text, rng)
        return struct.pack("<Q", len(header)) + header + data
    return mutate_bytes(struct.pack("<Q", len(header)) + header + data, rng, 8 + len(header))


def safetensors_case(index: int, directory: Path) -> Callable[[], object]:
    file = directory / "case.safetensors"
    put(file, safetensors_file(index))
    return lambda: [tensor.to_f32().shape for tensor in read_safetensors(file)[0].values()]


def directory_case(index: int, directory: Path) -> Callable[[], object]:
    """A model directory with a mutated config, generation config or index."""
    rng = random.Random(index)
    text, data = small_safetensors(rng)
    header = text.encode()
    put(directory / "model.safetensors", struct.pack("<Q", len(header)) + header + data)
    which = ("config.json", "generation_config.json", "model.safetensors.index.json")
    for name, content in zip(which, (CONFIG, CONFIG, INDEX), strict=True):
        put(directory / name, content.encode())
    target = which[index % 3]
    content = INDEX if index % 3 == 2 else CONFIG
    put(
        directory / target,
        mutate_json(content, rng)
        if rng.random() < 0.7
        else mutate_bytes(content.encode(), rng, 10**6),
    )
    return lambda: read_directory(directory)


def whole_case(index: int, directory: Path) -> Callable[[], object]:
    """A whole model through load_model, tokenizer and chat template."""
    from verbatim.model.loading.load import load_model
    from verbatim.text.templates.template_files import template_from_gguf
    from verbatim.text.tokenizer import from_gguf

    rng = random.Random(index)
    base_file, file = directory / "base.gguf", directory / "case.gguf"
    if not base_file.exists():
        (directory / "head").write_text(str(whole_gguf(base_file)))
    base, head = base_file.read_bytes(), int((directory / "head").read_text())
    # Most of the header is the vocabulary; mutate the fields before and after it.
    fields = [at for at in number_fields(base, head) if at < 1000 or at > head - 900]
    put(file, mutate_bytes(base, rng, head) if index % 3 == 0 else count_fields(base, fields, rng))

    def read() -> object:
        model = load_model(file)
        assert isinstance(model.source, GGUFFile)
        tokenizer = from_gguf(model.source.metadata)
        template_from_gguf(model.source.metadata)
        return tokenizer.encode("he was"), [
            model.weights[name].to_f32().shape for name in model.weights
        ]

    return read


CASES = {
    "gguf": gguf_case,
    "split": split_case,
    "safetensors": safetensors_case,
    "directory": directory_case,
    "whole": whole_case,
}


def limit_memory(file_bytes: int, kind: str) -> None:
    if kind == "whole":
        file_bytes += 256 << 20  # address space of the threads of the tokenizers library
    if sys.platform != "linux":
        return
    import resource

    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(
        resource.RLIMIT_AS,
        (now + file_bytes + ALLOWANCE, resource.getrlimit(resource.RLIMIT_AS)[1]),
    )


def main(kind: str, first: int, count: int, directory: Path) -> None:
    warnings.simplefilter("error")
    read = refused = 0
    wrong: list[str] = []
    with contextlib.suppress(ModelError):
        CASES[kind](first, directory)()  # imports and valid inputs are created before the limit
    limit_memory(1 << 16, kind)
    for index in range(first, first + count):
        case = CASES[kind](index, directory)
        started = time.process_time()
        try:
            case()
            read += 1
        except ModelError as error:
            refused += 1
            if len(str(error)) > 2000:
                wrong.append(f"case {index}: an error text of {len(str(error))} characters")
        except BaseException:
            wrong.append(f"case {index}: {traceback.format_exc()[-1500:]}")
        if (spent := time.process_time() - started) > MAX_CPU:
            wrong.append(f"case {index}: {spent:.1f} s of CPU")
    print(json.dumps({"read": read, "refused": refused, "wrong": wrong[:5], "count": len(wrong)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
