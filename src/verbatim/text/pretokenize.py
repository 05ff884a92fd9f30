"""Pre-tokenizers of byte-level BPE. In: the name in `tokenizer.ggml.pre`. Out: a normalizer and a
pre-tokenizer.

A GGUF file holds vocabulary and merges, but only the name of its pre-tokenizer. The rules here are
those of the corresponding `tokenizer.json` files: a list of steps applied in order. The matches of
a step, and the text between them, become separate pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from verbatim.base.errors import ModelError

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# The cased letters of DeepSeek's tokenizer: first and last code point of each range, in
# hexadecimal.
_CASED = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f "
    "386 388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd "
    "1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 "
    "1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 "
    "1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 "
    "2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 "
    "2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 "
    "a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 "
    "104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
_DEEPSEEK_PUNCTUATION = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Steps that the library implements without a pattern. BYTES_GPT2 splits by the GPT-2 pattern and
# maps bytes to the byte-level alphabet, so later patterns see that alphabet; without it, the
# mapping is the last step.
DIGIT, DIGITS, PUNCTUATION, BYTES_GPT2 = "DIGIT", "DIGITS", "PUNCTUATION", "BYTES_GPT2"


@dataclass(frozen=True, slots=True)
class SplitRules:
    """steps        applied in order
    nfc          normalize the text to NFC first
    whole_words  a piece that is in the vocabulary becomes that token without merging
    bos          prompts start with BOS if the file does not say"""

    steps: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    bos: bool = False


def _cased_letters() -> str:
    runs = [run.split("-") for run in _CASED.split()]
    return "[" + "".join("-".join(chr(int(end, 16)) for end in run) for run in runs) + "]"


_GPT2 = SplitRules((BYTES_GPT2,))
_NEOX = SplitRules((BYTES_GPT2,), nfc=True)
_STARCODER = SplitRules((DIGIT, BYTES_GPT2))
_LLAMA3 = SplitRules((LLAMA3,), whole_words=True, bos=True)
_QWEN2 = SplitRules((QWEN2,), nfc=True)
_DEEPSEEK3 = SplitRules(
    (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3_WORDS)
)
_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?{_cased_letters()}+", _DEEPSEEK_PUNCTUATION, r"\s+$", _CJK, DIGIT)

SPLIT_RULES: dict[str, SplitRules] = {
    "default": SplitRules((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "phi-2": _GPT2,
    "a.x-4.0": _GPT2,
    "exaone4": _GPT2,
    "gigachat": _GPT2,
    "granite-docling": _GPT2,
    "mellum": _GPT2,
    "mpt": _NEOX,
    "olmo": _NEOX,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "lfm2": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": SplitRules((LLAMA3,)),
    "smaug-bpe": SplitRules((LLAMA3,)),
    "chatglm-bpe": SplitRules((LLAMA3,)),
    "glm4": SplitRules((LLAMA3,)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "f2llmv2": _QWEN2,
    "kormo": _QWEN2,
    "qwen35": SplitRules((QWEN35,), nfc=True),
    "stablelm2": SplitRules((QWEN2,)),
    "hunyuan": SplitRules((QWEN2,)),
    "megrez": SplitRules((QWEN2,)),
    "seed-coder": SplitRules((SEED,)),
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "refact": _STARCODER,
    "codeshell": _STARCODER,
    "exaone": _STARCODER,
    "minerva-7b": _STARCODER,
    "command-r": SplitRules((DIGIT, BYTES_GPT2), nfc=True),
    "falcon": SplitRules((PUNCTUATION, BYTES_GPT2, DIGITS, "[0-9][0-9][0-9]")),
    "deepseek-llm": SplitRules(_DEEPSEEK_LLM),
    "deepseek-coder": SplitRules((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, DIGIT)),
    "deepseek-v3": _DEEPSEEK3,
    "hunyuan-dense": _DEEPSEEK3,
    "tekken": SplitRules((TEKKEN,), whole_words=True, bos=True),
    "gpt-4o": SplitRules((GPT4O,)),
    "llama4": SplitRules((GPT4O,)),
    "kanana2": SplitRules((GPT4O,)),
}


def split_rules_of(name: str) -> SplitRules:
    try:
        return SPLIT_RULES[name]
    except KeyError:
        known = ", ".join(sorted(SPLIT_RULES))
        raise ModelError(
            f"tokenizer.ggml.pre is {name[:60]!r}, which is not known here; known names: {known}"
        ) from None


def normalizer_of(cut: SplitRules) -> object:
    return normalizers.NFC() if cut.nfc else None


def pre_tokenizer_of(cut: SplitRules) -> object:
    steps = [_step(step) for step in cut.steps]
    if BYTES_GPT2 not in cut.steps:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def _step(step: str) -> object:
    if step == BYTES_GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if step in (DIGIT, DIGITS):
        return pre_tokenizers.Digits(individual_digits=step == DIGIT)
    if step == PUNCTUATION:
        return pre_tokenizers.Punctuation(behavior="contiguous")
    return pre_tokenizers.Split(Regex(step), behavior="isolated")
