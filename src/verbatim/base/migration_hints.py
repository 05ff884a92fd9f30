"""Names that users of vLLM, transformers and llama.cpp try, and the answer to each.

In: a name that this package does not have. Out: a sentence with the name that it has. An unknown
name is an error in any case; here it only gets a better message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Never

PARAMETERS = {
    "max_new_tokens": "write max_tokens",
    "max_length": "write max_tokens, which does not count the prompt",
    "max_completion_tokens": "write max_tokens",
    "num_predict": "write max_tokens",
    "n_predict": "write max_tokens",
    "do_sample": "temperature=0 takes the most likely token; any other temperature samples",
    "repeat_penalty": "write repetition_penalty",
    "no_repeat_ngram_size": "write no_repeat_ngram",
    "typical": "write typical_p",
    "stop_strings": "write stop",
    "eos_token_id": "write stop_token_ids",
    "bad_words_ids": "write banned_token_ids",
    "skip_special_tokens": "write skip_special",
    "include_stop_str_in_output": "write include_stop",
    "guided_json": "write json_schema",
    "guided_regex": "write regex",
    "guided_choice": "write choice",
    "guided_grammar": "write grammar",
    "guided_decoding": "write json_schema, regex, grammar or choice",
    "structured_outputs": "write json_schema, regex, grammar or choice",
    "response_format": "write json_schema",
    "num_samples": "write n",
    "random_state": "write seed",
    "temp": "write temperature",
    "use_beam_search": "write num_beams=4",
    "bad_words": "write banned_token_ids, or logit_bias",
    "logits_processors": "there are no processors of your own; docs/extend/sampler.md adds a"
    " sampler, and logit_bias, json_schema, regex and grammar restrict the tokens",
    "logits_processor": "there are no processors of your own; docs/extend/sampler.md adds a"
    " sampler, and logit_bias, json_schema, regex and grammar restrict the tokens",
    "detokenize": "leave it out: a Completion has both text and token_ids",
    "truncate_prompt_tokens": "leave it out: a prompt is never cut; cut the list of llm.encode()",
    "num_ctx": "it belongs to the engine: LLM(model, context=...)",
    "mirostat": "this sampler does not exist here; min_p, typical_p and top_n_sigma do",
    "samplers": "the order of the samplers is fixed; each has a parameter of its own",
    "lora_request": "write adapter='NAME', a name of LLM(..., adapters={'NAME': PATH})",
    "lora": "write adapter='NAME', a name of LLM(..., adapters={'NAME': PATH})",
}
OPTIONS = {
    "model_path": "write model, or give it as the first argument",
    "model_name": "write model, or give it as the first argument",
    "pretrained_model_name_or_path": "write model, or give it as the first argument",
    "max_model_len": "write context",
    "max_seq_len": "write context",
    "n_ctx": "write context",
    "ctx_size": "write context",
    "n_threads": "write threads",
    "num_threads": "write threads",
    "device": "write backend ('auto', 'cpu', 'cuda' or 'reference')",
    "device_map": "write backend ('auto', 'cpu', 'cuda' or 'reference')",
    "n_gpu_layers": "write backend='cuda'; a model runs on one device as a whole",
    "dtype": "weights keep their own type; quant quantises them while loading",
    "torch_dtype": "weights keep their own type; quant quantises them while loading",
    "quantization": "leave it out: a checkpoint states its own (AWQ, GPTQ, FP8, MXFP4);"
    " quant='q8_0' or 'q4_0' quantises float weights while loading",
    "load_in_8bit": "write quant='q8_0'",
    "load_in_4bit": "write quant='q4_0'",
    "gpu_memory_utilization": "write kv_memory, the bytes of the KV cache ('8G')",
    "kv_cache_dtype": "write kv_type ('f16', 'q8' or 'fp8')",
    "type_k": "write kv_type ('f16', 'q8' or 'fp8'); keys and values have one type",
    "type_v": "write kv_type ('f16', 'q8' or 'fp8'); keys and values have one type",
    "max_num_seqs": "write max_running",
    "max_num_batched_tokens": "write step_tokens",
    "enable_prefix_caching": "write prefix_cache",
    "speculative_config": "write speculate",
    "enable_lora": "write adapters={'NAME': PATH}; it needs no switch",
    "lora_modules": "write adapters={'NAME': PATH}",
    "lora_path": "write adapters={'NAME': PATH}",
    "max_lora_rank": "leave it out: each adapter has its own rank",
    "max_loras": "leave it out: every loaded adapter may be in a batch",
    "seed": "it belongs to a request: SamplingParams(seed=...)",
    "temperature": "it belongs to a request: SamplingParams(temperature=...)",
    "trust_remote_code": "leave it out: nothing in a model file is ever executed",
    "tokenizer": "leave it out: it comes with the model",
    "enforce_eager": "leave it out: graphs change no result",
    "tensor_parallel_size": "a model runs on one device",
    "swap_space": "leave it out: a preempted sequence is computed again, not swapped",
    "cpu_offload_gb": "a model runs on one device as a whole",
    "download_dir": "set the variable VERBATIM_CACHE",
    "load_format": "leave it out: the files say it (safetensors or GGUF)",
    "hf_token": "set the variable HF_TOKEN",
    "token": "set the variable HF_TOKEN",
    "num_ctx": "write context",
    "verbose": "leave it out: warnings go to the logger 'verbatim'",
}
METHODS = {
    "apply_chat_template": "use chat(messages), or encode_chat(messages) for the token ids",
    "get_tokenizer": "use the property tokenizer, or encode() and decode()",
    "create_chat_completion": "use chat(messages)",
    "create_completion": "use generate(prompt)",
    "beam_search": "use generate(prompt, SamplingParams(num_beams=4))",
    "from_pretrained": "write LLM(model)",
    "to": "write LLM(model, backend='cuda')",
    "get_default_sampling_params": "write SamplingParams()",
    "classify": "there are no classifiers; rerank() scores documents, choice=[...] picks a label",
    "encode_batch": "use encode(text) for each",
    "get_metrics": "use stats()",
    "abort": "use aclose() of the stream, or cancel the task",
}
COMPLETION = {
    "outputs": "one prompt gives one Completion: use .text, or .choices for several answers",
    "generated_text": "use .text",
    "output_text": "use .text",
    "message": "use .text",
    "content": "use .text",
    "prompt_token_ids": "use .prompt_ids",
}


TOKENIZER = {
    "apply_chat_template": "use chat(messages) of the LLM, or its encode_chat(messages)",
    "batch_decode": "use decode(ids) for each",
    "eos_token_id": "use eos_ids",
    "bos_token_id": "use bos_id",
    "convert_ids_to_tokens": "use token_text(id)",
}


def attribute(owner: object, name: str, table: Mapping[str, str]) -> AttributeError:
    """The error for an unknown attribute.

    >>> attribute([], "text", {"text": "use str()"}).args[0]
    "'list' object has no attribute 'text'; use str()"
    """
    said = f"{type(owner).__name__!r} object has no attribute {name!r}"
    return AttributeError(f"{said}; {table[name]}" if name in table else said)


class AnsweringType(type):
    """Metaclass that answers other libraries' names on the class: LLM.from_pretrained(...)."""

    if not TYPE_CHECKING:  # a type checker reports unknown names itself

        def __getattr__(cls, name: str) -> Never:
            said = f"type object {cls.__name__!r} has no attribute {name!r}"
            raise AttributeError(f"{said}; {METHODS[name]}" if name in METHODS else said)


def argument(call: str, name: str, hint: str | None = None) -> TypeError:
    """The error for an unknown argument of a call.

    >>> argument("generate", "max_new_tokens").args[0]
    "generate() has no argument 'max_new_tokens'; give it in params: SamplingParams(max_tokens=...)"
    """
    if hint is None:
        hint = {
            "sampling_params": "write params",
            "use_tqdm": "write progress",
            "prompt": "write prompts, or give it as the first argument",
            "messages": "use chat(messages)",
            "stream": "use chat_stream(messages, params)"
            if call.startswith("chat")
            else "use stream(prompt, params)",
            "input_ids": "a list of token ids is a prompt: give it as the first argument",
            "prompt_token_ids": "a list of token ids is a prompt: give it as the first argument",
            "chat_template_kwargs": "write its entries as arguments: chat(messages, params,"
            " enable_thinking=False)",
        }.get(name)
    if hint is None and (other := PARAMETERS.get(name, "")).startswith("write "):
        named = other.removeprefix("write ").split(",")[0].split(" ")[0]
        value = "" if "=" in named else "=..."
        hint = f"give it in params: SamplingParams({named}{value})"
    if hint is None:
        hint = PARAMETERS.get(name, "sampling parameters go into params: SamplingParams(...)")
    return TypeError(f"{call}() has no argument {name!r}; {hint}")
