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


_DEEPSEEK3 = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3_WORDS)
_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?{_cased_letters()}+", _DEEPSEEK_PUNCTUATION, r"\s+$", _CJK, DIGIT)
# Rules, and the names in tokenizer.ggml.pre that stand for them
_RULES = (
    (SplitRules((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")), "default"),
    (SplitRules((BYTES_GPT2,)), "gpt-2 gpt2 phi-2 a.x-4.0 exaone4 gigachat granite-docling mellum"),
    (SplitRules((BYTES_GPT2,), nfc=True), "mpt olmo"),
    (
        SplitRules((LLAMA3,), whole_words=True, bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 lfm2 midm-2.0 pixtral",
    ),
    (SplitRules((LLAMA3,)), "dbrx smaug-bpe chatglm-bpe glm4"),
    (SplitRules((QWEN2,), nfc=True), "qwen2 deepseek-r1-qwen f2llmv2 kormo"),
    (SplitRules((QWEN35,), nfc=True), "qwen35"),
    (SplitRules((QWEN2,)), "stablelm2 hunyuan megrez"),
    (SplitRules((SEED,)), "seed-coder"),
    (SplitRules((DIGIT, BYTES_GPT2)), "smollm starcoder refact codeshell exaone minerva-7b"),
    (SplitRules((DIGIT, BYTES_GPT2), nfc=True), "command-r"),
    (SplitRules((PUNCTUATION, BYTES_GPT2, DIGITS, "[0-9][0-9][0-9]")), "falcon"),
    (SplitRules(_DEEPSEEK_LLM), "deepseek-llm"),
    (SplitRules((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, DIGIT)), "deepseek-coder"),
    (SplitRules(_DEEPSEEK3), "deepseek-v3 hunyuan-dense"),
    (SplitRules((TEKKEN,), whole_words=True, bos=True), "tekken"),
    (SplitRules((GPT4O,)), "gpt-4o llama4 kanana2"),
)
SPLIT_RULES = {name: rules for rules, names in _RULES for name in names.split()}


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
