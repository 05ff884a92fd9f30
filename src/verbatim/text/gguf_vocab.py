"""Tokenizer of a GGUF file. In: the file's metadata. Out: a Vocabulary. The file is untrusted:
every key is checked before use.

tokenizer.ggml.model   gpt2: byte-level BPE with merges;  llama: SentencePiece with scores;
                       gemma4: BPE over characters with merges;  bert: WordPiece
tokenizer.ggml.tokens, .token_type, .merges, .scores, .pre, .add_bos_token, .add_space_prefix,
               .…_token_id
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Encoder

from verbatim.base.errors import ModelError
from verbatim.text.gguf_tokenizer_keys import K, TokenizerKeys
from verbatim.text.pretokenize import normalizer_of, pre_tokenizer_of, split_rules_of
from verbatim.text.spm import piece_bytes
from verbatim.text.vocabulary import END_OF_TURN, SPACE, Vocabulary, byte_level_bytes, end_of_turn

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
MAX_TOKENS = 4_000_000  # the largest vocabularies in use have some 260,000
MAX_TOKEN_LENGTH = 4096  # characters
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_PADDING = re.compile(r"\u2581?\[PAD([0-9]+)\]")  # an id that the embedding has and no token
# Gemma 4's control tokens that llama.cpp's converter marks as user-defined, to see them as text.
GEMMA4_MARKERS = frozenset(
    (
        *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
        *("<|tool_response>", "<tool_response|>", '<|"|>'),
    )
)


def read_vocabulary(metadata: Mapping[str, object], *, file: str | None = None) -> Vocabulary:
    reader = _VocabReader(metadata, file)
    try:
        return reader.read()
    except ModelError:
        raise
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a Rust panic in tokenizers is no Exception
        raise reader.wrong(f"the tokenizer cannot be built: {str(error)[:200]}") from error


class _VocabReader(TokenizerKeys):
    def __init__(self, metadata: Mapping[str, object], file: str | None) -> None:
        super().__init__(metadata, file)
        self.merged: frozenset[str] = frozenset()
        self.padding: frozenset[int] = frozenset()  # ids without a token

    def read(self) -> Vocabulary:
        model = self.value("model", str)
        if model is None:
            raise self.wrong("tokenizer.ggml.model is missing: the file has no tokenizer")
        self.tokens = self._tokens()
        # Ollama writes the model llama into files of Gemma 4, whose scores rank no merges.
        gemma4 = model == "gemma4" or (
            model == "llama"
            and self.meta.get("general.architecture") == "gemma4"
            and K + "merges" in self.meta
        )
        self.types = self._types(GEMMA4_MARKERS if gemma4 else frozenset())
        self._drop_padding()
        self.ids = {text: i for i, text in enumerate(self.tokens) if i not in self.padding}
        if len(self.ids) + len(self.padding) != len(self.tokens):
            rest = [(i, t) for i, t in enumerate(self.tokens) if i not in self.padding]
            again, text = next((i, t) for i, t in rest if self.ids[t] != i)
            raise self.wrong(
                f"token {text!r} is in the vocabulary twice (ids {again} and {self.ids[text]})"
            )
        read = {
            "gemma4": self._merged_characters,
            "gpt2": self._byte_level,
            "llama": self._sentencepiece,
            "bert": self._wordpiece,
        }.get("gemma4" if gemma4 else model)
        if read is None:
            raise self.wrong(
                f"tokenizer.ggml.model is {model!r}; known here: gpt2 (byte-level BPE), llama "
                "(SentencePiece), gemma4 (BPE over characters) and bert (WordPiece)"
            )
        return read()

    # ------------------------------------------------------------------------ tokenizer models

    def _byte_level(self) -> Vocabulary:
        merges = [self._merge(m) for m in self.array("merges", str)]
        if not merges and len(self.tokens) > 512:
            raise self.wrong(
                "tokenizer.ggml.merges is missing or empty, "
                "and byte-level BPE cannot work without merges"
            )
        name = self.value("pre", str)
        try:
            rules = split_rules_of("default" if name is None else name)
        except ModelError as error:
            raise self.wrong(error.message) from None
        model = models.BPE(vocab=self.ids, merges=merges, ignore_merges=rules.whole_words)
        return self._finish(
            model,
            normalizer_of(rules),
            pre_tokenizer_of(rules),
            add_bos=rules.bos,
            space_prefix=False,
        )

    def _sentencepiece(self) -> Vocabulary:
        from verbatim.text.spm import merges_from_scores

        scores = self.array("scores", float)
        if len(scores) != len(self.tokens):
            raise self.wrong(
                f"tokenizer.ggml.scores has {len(scores)} entries for {len(self.tokens)} tokens"
            )
        if any(s != s for s in scores):
            raise self.wrong("tokenizer.ggml.scores has a value that is not a number")
        self.merged = self._merged_spaces(scores)
        merges = merges_from_scores([*self._of(NORMAL), *self.merged], self.ids, scores)
        return self._with_byte_fallback(merges, prefix=self.flag("add_space_prefix", True))

    def _merged_characters(self) -> Vocabulary:
        """Gemma 4's tokenizer.json as llama.cpp's converter writes it: its own merges, and scores
        without a meaning."""
        merges = [self._merge(m) for m in self.array("merges", str)]
        if not merges:
            raise self.wrong("tokenizer.ggml.merges is missing or empty")
        made = {left + right for left, right in merges}
        self.merged = frozenset(t for t in self._of(USER_DEFINED) if SPACE in t and t in made)
        return self._with_byte_fallback(merges, prefix=self.flag("add_space_prefix", False))

    def _with_byte_fallback(self, merges: list[tuple[str, str]], *, prefix: bool) -> Vocabulary:
        """BPE over characters, with U+2581 for a space and byte tokens for unknown characters.
        `prefix`: a text starts with a space."""
        unknown = self.types.index(UNKNOWN) if UNKNOWN in self.types else self.token_id("unknown")
        # Gemma's tokenizer.json has "\t" in the place of <0x09>: a character falls back to its
        # bytes where the vocabulary has all of them.
        fallback = any(f"<0x{b:02X}>" in self.ids for b in range(256))
        model = models.BPE(
            vocab=self.ids,
            merges=merges,
            byte_fallback=fallback,
            fuse_unk=True,
            unk_token=None if unknown is None else self.tokens[unknown] or None,
        )
        steps: list[object] = [normalizers.Prepend(SPACE)] if prefix else []
        steps.append(normalizers.Replace(" ", SPACE))
        byte_ids = frozenset(self._of(BYTE))
        return self._finish(
            model,
            normalizers.Sequence(steps),
            None,
            add_bos=True,
            space_prefix=prefix,
            to_bytes=lambda text: piece_bytes(text, text in byte_ids),
        )

    def _merged_spaces(self, scores: Sequence[float]) -> frozenset[str]:
        """User-defined tokens with U+2581 that merges produce from spaces.

        Their scores differ. In files made from a SentencePiece model all have the same score, and
        the tokens match the text after spaces are replaced, longest first. Gemma's tokenizer.json
        merges spaces like letters, and matches such a token only where the text has U+2581."""
        found = [text for text in self._of(USER_DEFINED) if SPACE in text]
        differ = len(found) > 1 and len({scores[self.ids[text]] for text in found}) == len(found)
        return frozenset(found if differ else ())

    def _wordpiece(self) -> Vocabulary:
        """BERT's vocabulary as llama.cpp writes it: U+2581 before a token that starts a word, no
        mark before one that continues it. GGUF has no key for a cased vocabulary; llama.cpp
        always lowers the case."""
        vocab = {
            text
            if kind in (CONTROL, UNKNOWN)
            else text[1:]
            if text.startswith(SPACE)
            else f"##{text}": i
            for i, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if i not in self.padding
        }
        unknown = self.token_id("unknown")
        first = self.token_id("bos")
        last = self.token_id("seperator")  # the key is spelled so
        last = self.token_id("eos") if last is None else last
        if len(vocab) != len(self.ids) or None in (unknown, first, last) or unknown in self.padding:
            raise self.wrong(
                "a bert tokenizer needs distinct tokens, and bos_token_id, seperator_token_id and "
                "unknown_token_id"
            )
        assert unknown is not None
        made = self._finish(
            models.WordPiece(vocab, unk_token=self.tokens[unknown], max_input_chars_per_word=100),
            normalizers.BertNormalizer(lowercase=True),
            pre_tokenizers.BertPreTokenizer(),
            add_bos=True,
            space_prefix=True,
            to_bytes=lambda text: piece_bytes(text, False),
        )
        assert first is not None
        assert last is not None
        return replace(made, prefix=(first,), suffix=(last,))

    def _finish(
        self,
        model: Any,
        normalizer: object,
        pre_tokenizer: Any,
        *,
        add_bos: bool,
        space_prefix: bool,
        to_bytes: Any = None,
    ) -> Vocabulary:
        control = {t: self.ids[t] for t in self._of(CONTROL, UNKNOWN) if t}
        added = {i: self._rule(t, special=True) for t, i in control.items()}
        defined = {self.ids[t]: self._rule(t, special=False) for t in self._of(USER_DEFINED) if t}
        bos, eos = self._edge_id("bos", 1), self._edge_id("eos", 2)
        return Vocabulary(
            tokens=self.tokens,
            plain=_encoder(model, normalizer, pre_tokenizer, list(defined.values()), []),
            special=_encoder(
                model, normalizer, pre_tokenizer, list(defined.values()), list(added.values())
            ),
            to_bytes=to_bytes or byte_level_bytes,
            control=control,
            added={**added, **defined},
            bos_id=bos,
            eos_id=eos,
            unk_id=self.token_id("unknown"),
            pad_id=self.token_id("padding"),
            eos_ids=self._eos_ids(eos, control),
            prefix=(bos,) if bos is not None and self.flag("add_bos_token", add_bos) else (),
            suffix=(eos,) if eos is not None and self.flag("add_eos_token", False) else (),
            byte_level=to_bytes is None,
            space_prefix=space_prefix,
        )

    def _edge_id(self, name: str, default: int) -> int | None:
        """The bos or eos id. A SentencePiece file without the key has llama.cpp's default, where
        that is a control token."""
        found = self.token_id(name)
        missing = found is None and K + f"{name}_token_id" not in self.meta
        model = self.meta.get(K + "model")
        if missing and model == "llama" and default < len(self.types):
            found = default if self.types[default] == CONTROL else None
        # bert adds its separator at the end, whatever the keys say
        if found is None and model != "bert" and self.meta.get(K + f"add_{name}_token") is True:
            raise self.wrong(
                f"tokenizer.ggml.add_{name}_token is true, and {name}_token_id names no token"
            )
        return found

    def _rule(self, text: str, *, special: bool) -> AddedToken:
        # Phi-3's turn markers consume the white space after them. GGUF has no key for that;
        # architecture and vocabulary imply it.
        named = self.meta.get("general.architecture"), self.meta.get(K + "model")
        phi3 = named == ("phi3", "llama")
        rstrip = phi3 and special and text not in ("<unk>", "<s>", "<|endoftext|>")
        # A user-defined SentencePiece token with U+2581 must match after spaces are normalized,
        # unless merges produce it.
        normalized = not special and SPACE in text and text not in self.merged
        return AddedToken(text, special=special, normalized=normalized, rstrip=rstrip)

    def _eos_ids(self, eos: int | None, control: Mapping[str, int]) -> tuple[int, ...]:
        """Ids that end a completion: the declared end of sequence, of turn and of message, and the
        well-known end-of-turn control tokens (files often declare only one of them)."""
        ids = [eos, self.token_id("eot"), self.token_id("eom"), *end_of_turn(control)]
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    # ------------------------------------------------------------------------ checked metadata

    def _of(self, *kinds: int) -> list[str]:
        """The tokens of these types, by id."""
        return [t for t, kind in zip(self.tokens, self.types, strict=True) if kind in kinds]

    def _tokens(self) -> list[str]:
        tokens = self.array("tokens", str)
        if not tokens:
            raise self.wrong("tokenizer.ggml.tokens is missing or empty")
        if len(tokens) > MAX_TOKENS:
            raise self.wrong(
                f"tokenizer.ggml.tokens has {len(tokens)} entries; at most {MAX_TOKENS} are read"
            )
        if max(map(len, tokens)) > MAX_TOKEN_LENGTH:
            raise self.wrong(
                f"a token is {max(map(len, tokens))} characters long; "
                f"at most {MAX_TOKEN_LENGTH} are read"
            )
        return tokens

    def _types(self, controls: frozenset[str]) -> list[int]:
        """The type of each token. `controls`: control tokens, whatever type the file gives them."""
        types = self.array("token_type", int)
        if not types:
            types = [BYTE if _BYTE.fullmatch(t) else NORMAL for t in self.tokens]
        if len(types) != len(self.tokens):
            raise self.wrong(
                f"tokenizer.ggml.token_type has {len(types)} entries for {len(self.tokens)} tokens"
            )
        bad = next((t for t in set(types) if not 0 <= t <= BYTE), None)
        if bad is not None:
            raise self.wrong(f"tokenizer.ggml.token_type has the value {bad}; known are 1 to 6")
        # Some files mark these as ordinary tokens; then user text could contain an end of turn.
        return [
            CONTROL if t in END_OF_TURN or t in controls else kind
            for t, kind in zip(self.tokens, types, strict=True)
        ]

    def _drop_padding(self) -> None:
        """Converters name the ids behind the vocabulary [PADn], type UNUSED (those of early 2024
        USER_DEFINED, with n the id). They are no tokens: they have no text and match none."""
        self.padding = frozenset(
            i
            for i, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (UNUSED, USER_DEFINED)
            and (found := _PADDING.fullmatch(text))
            and (kind == UNUSED or found[1] == str(i))
        )
        for i in self.padding:
            self.tokens[i], self.types[i] = "", UNUSED

    def _merge(self, merge: str) -> tuple[str, str]:
        left, space, right = merge.partition(" ")
        if not space or not left or not right or " " in right:
            raise self.wrong(
                f"tokenizer.ggml.merges has {merge[:40]!r}, "
                "which is not two tokens with one space between"
            )
        return left, right


def _encoder(
    model: Any,
    normalizer: Any,
    pre_tokenizer: Any,
    defined: list[AddedToken],
    control: list[AddedToken],
) -> Any:
    """An encoder over `model`, which is shared, not copied."""
    encoder = Encoder(model)
    if normalizer is not None:
        encoder.normalizer = normalizer
    if pre_tokenizer is not None:
        encoder.pre_tokenizer = pre_tokenizer
    if defined:
        encoder.add_tokens(defined)
    if control:
        encoder.add_special_tokens(control)
    return encoder
