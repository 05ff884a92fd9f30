"""The default model against the gguf package, and against transformers with the weights that the
gguf package reads.

Verbatim generates tokens greedily. transformers computes prompt and completion in one prefill, and
each token must be its argmax. By induction, its own greedy completion is the same. Beam search
against transformers uses the same weights.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verbatim.backend.reference import ReferenceBackend
from verbatim.base.params import SamplingParams
from verbatim.base.records import DrawSpec, SeqStep, StepPlan
from verbatim.engine.calls.llm import LLM
from verbatim.files.gguf import read_gguf
from verbatim.model.loading.load import load_model
from verbatim.text.tokenizer import from_gguf

pytestmark = [pytest.mark.torch, pytest.mark.model, pytest.mark.slow]

PROMPTS = [
    *("The capital of France is", "Once upon a time, in a small village by the sea,"),
    *("def fibonacci(n):\n", "Water boils at"),
    *("<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n", "1, 2, 3, 4,"),
    *("Dear Sir or Madam,\n", "The three laws of thermodynamics are"),
    *("Q: What is the largest planet?\nA:", "In 1969, the first humans"),
]
ALL = pytest.param(len(PROMPTS), 64, marks=pytest.mark.soak)  # prompts, tokens of a completion
TEXT = (
    "A lighthouse keeper writes in the log every evening. The wind, the height of the waves, the "
    "ships that passed, and whether the lamp burned all night. Nobody reads the log, he thinks; "
    "but one winter a young woman came from the university, asked for the books of forty years, "
    "and sat in the kitchen with them for a week. She wanted to know how often it had rained in "
    "March. When she left, she said that his numbers were better than those of the weather "
    "service, because he had never once written down a guess."
)


@pytest.fixture(scope="module")
def ours(default_model: Path) -> Any:
    model = load_model(default_model)
    backend = ReferenceBackend(model)
    backend.allocate((len(PROMPTS) * 8,))
    tokenizer = from_gguf(model.source.metadata)
    yield backend, tokenizer
    backend.close()


@pytest.fixture(scope="module")
def reader(default_model: Path) -> Any:
    """The file as the gguf package reads it, which takes it seconds."""
    import gguf

    return gguf.GGUFReader(default_model)


def test_the_default_model_is_read_as_the_gguf_package_reads_it(
    default_model: Path, reader: Any
) -> None:
    file = read_gguf(default_model)
    assert file.metadata["general.architecture"] == "llama"
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49_152
    assert len(file.tensors) == 272
    assert file.tensors["token_embd.weight"].shape == (49_152, 576)
    for theirs in reader.tensors:
        ours = file.tensors[theirs.name]
        assert ours.type == theirs.tensor_type.name.lower()
        assert ours.data.ctypes.data % 32 == 0
        np.testing.assert_array_equal(ours.data, theirs.data.reshape(-1).view(np.uint8))
    for name in (
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.token_type",
        "tokenizer.chat_template",
    ):
        ours, theirs = file.metadata[name], reader.fields[name]
        if isinstance(ours, str):
            assert ours == theirs.contents()
        else:  # contents() takes seconds for all 49,152
            assert len(ours) == len(theirs.data)
            assert list(ours[::31]) == theirs.contents(slice(None, None, 31))


@pytest.fixture(scope="module")
def theirs(reader: Any) -> Any:
    """transformers' Llama with the weights of the file, dequantised by the gguf package."""
    import gguf
    import torch
    import transformers

    meta = {
        key: reader.fields[f"llama.{key}"].contents()
        for key in ("embedding_length", "block_count", "context_length")
    }
    heads, kv = (
        int(reader.fields[f"llama.attention.{k}"].contents())
        for k in ("head_count", "head_count_kv")
    )
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=meta["embedding_length"],
        num_hidden_layers=meta["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=reader.fields["llama.feed_forward_length"].contents(),
        max_position_embeddings=meta["context_length"],
        rms_norm_eps=reader.fields["llama.attention.layer_norm_rms_epsilon"].contents(),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": reader.fields["llama.rope.freq_base"].contents(),
        },
        tie_word_embeddings=True,
    )
    state = {}
    for t in reader.tensors:
        values = gguf.quants.dequantize(t.data, t.tensor_type)
        if re.search(r"attn_[qk]\.", t.name):
            count = heads if "attn_q" in t.name else kv
            half = values.shape[0] // count // 2
            values = values.reshape(count, half, 2, -1).swapaxes(1, 2).reshape(values.shape)
        state[_hf_name(t.name)] = torch.from_numpy(np.array(values, np.float32, order="C"))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    assert not [name for name, p in model.named_parameters() if p.is_meta]
    return model.eval()


def _hf_name(name: str) -> str:
    parts = {
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "attn_norm": "input_layernorm",
    }
    name = (
        name.replace("token_embd", "model.embed_tokens")
        .replace("output_norm", "model.norm")
        .replace("blk.", "model.layers.")
    )
    for old, new in parts.items():
        name = name.replace(old, new)
    return re.sub(
        r"attn_([qkv])\.", r"self_attn.\1_proj.", re.sub(r"ffn_(\w+)\.", r"mlp.\1_proj.", name)
    )


def greedy(backend: ReferenceBackend, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Decode `count` tokens of all prompts in one batch. Sequence i has blocks 8i .. 8i + 7."""
    sequences = [list(p) for p in prompts]
    done = [0] * len(sequences)
    specs = [DrawSpec(SamplingParams(temperature=0.0), 0, len(p)) for p in prompts]
    for number in range(count):
        steps = [
            SeqStep(
                i,
                tuple(t[done[i] :]),
                done[i],
                (tuple(range(8 * i, 8 * i + 8)),),
                draws=1,
                draw=specs[i],
            )
            for i, t in enumerate(sequences)
        ]
        for i, result in enumerate(backend.execute(StepPlan(number, tuple(steps))).sequences):
            done[i] = len(sequences[i])
            sequences[i].append(result.drawn[0].token)
    return sequences


@pytest.mark.parametrize(("count", "tokens"), [(2, 5), ALL])
def test_greedy_completions_equal_those_of_transformers(
    ours: Any, theirs: Any, count: int, tokens: int
) -> None:
    import torch

    backend, tokenizer = ours
    prompts = [tokenizer.encode_prompt(p, special=True) for p in PROMPTS[:count]]
    for prompt, text in zip(prompts, greedy(backend, prompts, tokens), strict=True):
        with torch.no_grad():
            best = theirs(torch.tensor([text[:-1]]), use_cache=False).logits[0].argmax(-1).tolist()
        assert text[len(prompt) :] == best[len(prompt) - 1 :], tokenizer.decode(text)


def test_logprobs_and_perplexity_equal_those_of_transformers(ours: Any, theirs: Any) -> None:
    import torch

    backend, tokenizer = ours
    ids = tokenizer.encode_prompt(TEXT)
    assert len(ids) > 100
    blocks = tuple(range(len(PROMPTS) * 8))
    step = SeqStep(99, tuple(ids[:-1]), 0, (blocks,), targets=tuple(ids[1:]))
    scored = backend.execute(StepPlan(0, (step,))).sequences[0].scored
    with torch.no_grad():
        logits = theirs(torch.tensor([ids[:-1]]), use_cache=False).logits[0].double()
    expected = torch.log_softmax(logits, -1)[
        torch.arange(len(ids) - 1), torch.tensor(ids[1:])
    ].numpy()
    got = np.array([s.logprob for s in scored])
    assert np.abs(got - expected).max() < 1e-3
    assert abs(np.exp(-got.mean()) / np.exp(-expected.mean()) - 1) < 1e-3


@pytest.mark.soak  # test_sampling_beam.py compares beams of small models
@pytest.mark.parametrize("count", [len(PROMPTS)])
def test_beams_equal_those_of_transformers(default_model: Path, theirs: Any, count: int) -> None:
    import torch

    params = SamplingParams(num_beams=3, num_return_sequences=3, max_tokens=6)
    with LLM(default_model, backend="reference", context=64, kv_blocks=200) as llm:
        done = llm.generate(PROMPTS[:count], params)
        llm.check()
        ends = list(llm.loaded.eos_ids)
    for each in done:
        ids = torch.tensor([each.prompt_ids])
        want = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=ends[0],
            return_dict_in_generate=True,
            output_scores=True,
        )
        for choice, tokens, score in zip(
            each.choices, want.sequences.tolist(), want.sequences_scores.tolist(), strict=True
        ):
            assert list(choice.token_ids) == tokens[len(each.prompt_ids) :][: len(choice.token_ids)]
            assert choice.score == pytest.approx(score, abs=1e-4)
