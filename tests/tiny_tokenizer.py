"""A chat template and a trained byte-level tokenizer for the tiny model of the CLI tests."""

from __future__ import annotations

import json
from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if "
    "add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(directory: Path, vocab: int = 320) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(
        ["the cat sat on the mat, and the dog didn't mind at all"] * 4, trainer
    )
    words.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "bos_token": None, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
