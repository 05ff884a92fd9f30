"""Tiny encoders with random weights: safetensors directories with the tensor names of published
checkpoints, a WordPiece or a Unigram tokenizer, and the files of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, HEADS, LAYERS, MLP, POSITIONS = 32, 4, 2, 48, 48
WORDS = "the cat sat on a mat and dog did not mind at all paris is capital of france sky blue why"
LETTERS = "abcdefghijklmnopqrstuvwxyz.,!?'"
KINDS = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "nomic_bert": "Nomic"}


def write_encoder(
    directory: Path,
    kind: str = "bert",
    *,
    pooling: str = "mean",
    normalise: bool = True,
    scores: bool = False,
    prompts: dict[str, str] | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    **config: Any,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    vocab = (write_wordpiece if kind in ("bert", "nomic_bert") else write_unigram)(directory)
    name = f"{KINDS[kind]}{'ForSequenceClassification' if scores else 'Model'}"
    values: dict[str, Any] = {
        "model_type": kind,
        "architectures": [name],
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": MLP,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 1 if "roberta" in kind else 2,
        "pad_token_id": 1 if "roberta" in kind else 0,
    }
    if scores:
        values |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    _json(directory / "config.json", values | config)
    write_weights(directory, kind, vocab, scores, seed)
    if not scores:
        write_modules(directory, pooling, normalise, prompts, max_tokens)
    return directory


def write_modules(
    directory: Path,
    pooling: str,
    normalise: bool,
    prompts: dict[str, str] | None = None,
    max_tokens: int | None = None,
) -> None:
    names = ["Transformer", "Pooling", *(["Normalize"] if normalise else [])]
    rows = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{name}" if i else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for i, name in enumerate(names)
    ]
    (directory / "modules.json").write_text(json.dumps(rows))
    flag = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}[pooling]
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    (directory / "1_Pooling").mkdir(exist_ok=True)
    _json(
        directory / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": HIDDEN,
            **{f"pooling_mode_{mode}": mode == flag for mode in modes},
        },
    )
    _json(directory / "config_sentence_transformers.json", {"prompts": prompts or {}})
    if max_tokens:
        _json(directory / "sentence_bert_config.json", {"max_seq_length": max_tokens})


def write_weights(directory: Path, kind: str, vocab: int, scores: bool, seed: int) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    h = HIDDEN
    made: dict[str, np.ndarray] = {}

    def linear(name: str, out: int, inner: int, bias: bool = True) -> None:
        made[f"{name}.weight"] = rng.normal(0, inner**-0.5, (out, inner)).astype(np.float32)
        if bias:
            made[f"{name}.bias"] = rng.normal(0, 0.1, out).astype(np.float32)

    def norm(name: str) -> None:
        made[f"{name}.weight"] = rng.uniform(0.5, 1.5, h).astype(np.float32)
        made[f"{name}.bias"] = rng.normal(0, 0.1, h).astype(np.float32)

    root = "" if not scores else "bert." if kind == "bert" else "roberta."
    linear(f"{root}embeddings.word_embeddings", vocab, h, bias=False)
    types = 1 if "roberta" in kind else 2
    linear(f"{root}embeddings.token_type_embeddings", types, h, bias=False)
    if kind == "nomic_bert":
        norm("emb_ln")
    else:
        linear(f"{root}embeddings.position_embeddings", POSITIONS, h, bias=False)
        norm(f"{root}embeddings.LayerNorm")
    for i in range(LAYERS):
        if kind == "nomic_bert":
            layer = f"encoder.layers.{i}"
            linear(f"{layer}.attn.Wqkv", 3 * h, h, bias=False)
            linear(f"{layer}.attn.out_proj", h, h, bias=False)
            linear(f"{layer}.mlp.fc11", MLP, h, bias=False)
            linear(f"{layer}.mlp.fc12", MLP, h, bias=False)
            linear(f"{layer}.mlp.fc2", h, MLP, bias=False)
            norm(f"{layer}.norm1")
            norm(f"{layer}.norm2")
            continue
        layer = f"{root}encoder.layer.{i}"
        for part in ("query", "key", "value"):
            linear(f"{layer}.attention.self.{part}", h, h)
        linear(f"{layer}.attention.output.dense", h, h)
        norm(f"{layer}.attention.output.LayerNorm")
        linear(f"{layer}.intermediate.dense", MLP, h)
        linear(f"{layer}.output.dense", h, MLP)
        norm(f"{layer}.output.LayerNorm")
    if kind == "bert":
        linear(f"{root}pooler.dense", h, h)
    if scores and kind == "bert":
        linear("classifier", 1, h)
    elif scores:
        linear("classifier.dense", h, h)
        linear("classifier.out_proj", 1, h)
    save_file(made, directory / "model.safetensors", {"format": "pt"})


# -------------------------------------------------------------------------------------- tokenizers


def write_wordpiece(directory: Path) -> int:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*dict.fromkeys([*WORDS.split(), *LETTERS])]
    tokens = [*special, *words, *(f"##{c}" for c in LETTERS if c.isalpha())]
    vocab = {token: i for i, token in enumerate(tokens)}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return _save(made, directory, special, ("pad", "unk", "cls", "sep", "mask"))


def write_unigram(directory: Path) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    special = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [*dict.fromkeys([*(f"▁{w}" for w in WORDS.split()), "▁", *LETTERS])]
    vocab = [(t, 0.0) for t in special] + [(p, -1.0 - i / 10) for i, p in enumerate(pieces)]
    made = Tokenizer(models.Unigram(vocab, unk_id=3))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return _save(made, directory, special, ("cls", "pad", "sep", "unk"))


def _save(made: Any, directory: Path, special: list[str], names: tuple[str, ...]) -> int:
    made.add_special_tokens(special)
    made.save(str(directory / "tokenizer.json"))
    named = {f"{name}_token": token for name, token in zip(names, special, strict=True)}
    _json(directory / "tokenizer_config.json", named)
    return int(made.get_vocab_size())


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
