"""The field tables of Ollama's, llama.cpp's and the Lens's routes (see field_table.py)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field as P

from verbatim.base.param_checks import MOST
from verbatim.base.params import FIELDS
from verbatim.server.api.common import schemas
from verbatim.server.api.common.field_rules import (
    ADD_PROMPT,
    CACHE_PROMPT,
    CONTINUE,
    INT64,
    KWARGS,
    LENGTH,
    MODEL,
    NUMBER,
    PARSE,
    REPORT,
    STREAM,
    TRUE_FALSE,
    TRUNCATE,
    Rule,
    extensions,
    sampling,
)
from verbatim.server.api.ollama import ollama_schemas
from verbatim.server.api.openai.openai_fields import CHAT

OLLAMA_OPTIONS = (
    "sampling options by Ollama's names. Machine options (num_gpu, num_thread, use_mmap, ...) are "
    "accepted without effect, because no token depends on the machine here, and the answer has a "
    "warning for each. repeat_last_n: the penalties look back this many tokens; 0: they are off; "
    "missing or -1: all tokens. num_ctx: maximum number of "
    "prompt and output tokens together, up to the server's context; a prompt that does not fit, "
    "alone or with num_predict, is refused, and nothing is truncated. seed: -1 or missing: the "
    "server chooses; any other negative seed is taken modulo 2**63"
)
KEEP_ALIVE = Rule(
    "ignored",
    "a model stays loaded until the server ends or needs its memory (--model-idle-seconds); only "
    "0 without a prompt unloads one of several models",
    ollama_schemas.KeepAlive,
)
_OLLAMA: dict[str, Rule] = {
    "model": MODEL,
    "stream": Rule("honoured", "stream the output as lines of JSON (default true)", TRUE_FALSE),
    "format": Rule(
        "honoured",
        '"json" or a JSON schema (enforced while sampling)',
        Literal["json", ""] | dict[str, Any],
    ),
    "options": Rule("honoured", OLLAMA_OPTIONS, ollama_schemas.OllamaOptions),
    "keep_alive": KEEP_ALIVE,
    "think": Rule(
        "honoured",
        "true or a level switches thinking on, false off, where the chat template has the switch",
        TRUE_FALSE | Literal["low", "medium", "high"],
    ),
    "logprobs": Rule("refused", "use /v1/chat/completions", only=(False,)),
    "top_logprobs": Rule("refused", "use /v1/chat/completions", only=(0,)),
    "truncate": Rule(
        "ignored",
        "a prompt is never truncated; one that does not fit is refused",
        TRUE_FALSE,
        only=(False,),
    ),
    "shift": Rule("refused", "the server never truncates a prompt", only=(False,)),
    "_debug_render_only": Rule("refused", "use /tokenize", only=(False,)),
    "report_params": REPORT,
}
OLLAMA_CHAT: dict[str, Rule] = {
    **_OLLAMA,
    "messages": Rule(
        "honoured",
        "roles system, user, assistant, tool; a last message of the assistant is continued; "
        "thinking that the model's template does not read is refused; a tool_name that it does not "
        "read has no effect and gets a warning",
        list[ollama_schemas.OllamaMessage],
        required=True,
    ),
    "tools": Rule("honoured", "functions the model may call", list[schemas.Tool]),
}
OLLAMA_GENERATE: dict[str, Rule] = {
    **_OLLAMA,
    "prompt": Rule(
        "honoured", "the user's text; empty: an empty response with done_reason load", schemas.Text
    ),
    "system": Rule("honoured", "a system message", schemas.Text),
    "raw": Rule(
        "honoured", "true: use the prompt unchanged, without the chat template", TRUE_FALSE
    ),
    "parse_special": Rule("honoured", f"with raw: {PARSE.help}", TRUE_FALSE),
    "suffix": Rule("refused", "infilling needs a model trained for it", only=("",)),
    "template": Rule("refused", "the server accepts no template from a request", only=("",)),
    "images": Rule("refused", "only text input is supported", only=([],)),
    "context": Rule(
        "refused", "deprecated by Ollama; send the conversation to /api/chat", only=([],)
    ),
    "width": Rule("refused", "only text output is supported"),
    "height": Rule("refused", "only text output is supported"),
    "steps": Rule("refused", "only text output is supported"),
}
_OLLAMA_EMBED: dict[str, Rule] = {
    "model": MODEL,
    "options": Rule(
        "honoured",
        "machine options have no effect, and the answer has a warning for each; an embedding is "
        "not sampled, so all other options are refused",
        ollama_schemas.OllamaEmbedOptions,
    ),
    "keep_alive": KEEP_ALIVE,
}
OLLAMA_EMBED: dict[str, Rule] = {
    **_OLLAMA_EMBED,
    "input": Rule(
        "honoured",
        "a text or a list of texts",
        schemas.Text | Annotated[list[schemas.Text], P(min_length=1)],
        required=True,
    ),
    "dimensions": Rule(
        "honoured", "keep this many leading dimensions and normalise to length 1", LENGTH
    ),
    "truncate": TRUNCATE,
}
OLLAMA_EMBEDDINGS: dict[str, Rule] = {
    **_OLLAMA_EMBED,
    "prompt": Rule("honoured", "a text", schemas.Text, required=True),
}
OLLAMA_SHOW: dict[str, Rule] = {
    "model": Rule("honoured", "a name from the start-up table", schemas.Label, required=True),
    "verbose": Rule(
        "refused", "the vocabulary is not sent; /tokenize and /detokenize read it", only=(False,)
    ),
}
OLLAMA_PULL: dict[str, Rule] = {
    "model": Rule(
        "honoured",
        "a served model: success at once; any other name is refused, with the command that fetches "
        "a model",
        schemas.Label,
        required=True,
    ),
    "stream": Rule("honoured", "lines of JSON (default true), or one object", TRUE_FALSE),
    "insecure": Rule("refused", "no model is fetched on request", only=(False,)),
}

LAST_N = Annotated[int, P(strict=True, ge=-1, le=MOST)]
# llama.cpp's name -> ours, where the value is passed on unchanged
_LLAMA_PARAMS = {
    **{
        name: name
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "typical_p",
            "top_n_sigma",
            "xtc_probability",
            "xtc_threshold",
            "presence_penalty",
            "frequency_penalty",
            "dry_multiplier",
            "dry_base",
            "dry_allowed_length",
            "ignore_eos",
            "json_schema",
            "grammar",
        )
    },
    "repeat_penalty": "repetition_penalty",
    "dry_sequence_breakers": "dry_breakers",
}
LLAMA_COMPLETION: dict[str, Rule] = {
    "model": Rule("honoured", "missing: the served model", schemas.Label),
    "prompt": Rule(
        "honoured",
        "a string in the model's own format, or token ids",
        schemas.Text | schemas.PromptIds,
        required=True,
    ),
    "n_predict": Rule(
        "honoured",
        "maximum number of output tokens; missing or -1: up to the context length",
        Annotated[int, P(strict=True, ge=-1, le=MOST)],
    ),
    "stream": STREAM,
    "stop": Rule("honoured", FIELDS["stop"].help, list[schemas.Text]),
    "seed": Rule(
        "honoured",
        "makes sampling repeatable; -1 or missing: the server chooses; the response reports the "
        "seed used",
        INT64,
    ),
    "n_probs": Rule(
        "honoured",
        "report each token's log-probability and this many alternatives",
        schemas.type_of("logprobs"),
    ),
    "logit_bias": Rule(
        "honoured",
        "pairs of a token id and a number added to its logit; false: the token is never sampled",
        list[schemas.BiasPair],
    ),
    "top_k": extensions()["top_k"],
    **{theirs: sampling(ours) for theirs, ours in _LLAMA_PARAMS.items()},
    "repeat_last_n": Rule(
        "honoured",
        "the penalties look back this many tokens; 0: they are off; missing or -1: all tokens",
        LAST_N,
    ),
    "dry_penalty_last_n": Rule(
        "honoured", "DRY looks back this many tokens; 0: it is off; missing or -1: all", LAST_N
    ),
    "parse_special": Rule(
        "honoured",
        "false: the text of a control token (<|im_start|>) in the prompt stays plain text; "
        "missing: it becomes that token, as in llama.cpp",
        TRUE_FALSE,
    ),
    "return_tokens": Rule("honoured", "the token ids of the output (not streamed)", TRUE_FALSE),
    "cache_prompt": CACHE_PROMPT,
    "id_slot": Rule("ignored", "the scheduler has no slots to choose from", INT64, only=(-1,)),
    "n_keep": Rule("ignored", "the server never truncates a prompt", INT64),
    "samplers": Rule("refused", "the order of the samplers is fixed (docs/sampling.md)"),
    "mirostat": Rule(
        "refused",
        "this sampler does not exist here; min_p, typical_p and top_n_sigma do",
        only=(0,),
    ),
    "mirostat_tau": Rule("ignored", "there is no mirostat", NUMBER),
    "mirostat_eta": Rule("ignored", "there is no mirostat", NUMBER),
    "dynatemp_range": Rule("refused", "the temperature is fixed", only=(0, 0.0)),
    "dynatemp_exponent": Rule("ignored", "there is no dynatemp_range", NUMBER),
    "min_keep": Rule("refused", "the filters keep at least one token", only=(0, 1)),
    "post_sampling_probs": Rule("refused", "use logprobs_mode on /v1/completions", only=(False,)),
    "timings_per_token": Rule("refused", "the last event has the timings", only=(False,)),
    "response_fields": Rule("refused", "a response has all its fields", only=([],)),
    "t_max_predict_ms": Rule("refused", "the time limit is the server's", only=(0, -1)),
    "n_indent": Rule("refused", "use a regex or a grammar", only=(0,)),
    "lora": Rule(
        "refused", "use the adapter's name as model; serve --adapter loads it", only=([],)
    ),
    "report_params": REPORT,
}
LLAMA_EMBEDDING: dict[str, Rule] = {
    "model": Rule("honoured", "missing: the served model", schemas.Label),
    "content": Rule(
        "honoured",
        "a string, a list of strings, token ids, or a list of lists of them",
        schemas.Prompt,
        required=True,
    ),
    "embd_normalize": Rule(
        "honoured", "2: scale the vector to length 1 (default); -1: as it is", Literal[-1, 2]
    ),
    "truncate": TRUNCATE,
}
LLAMA_TEMPLATE: dict[str, Rule] = {
    "model": Rule("honoured", "missing: the served model", schemas.Label),
    "messages": CHAT["messages"],
    "tools": CHAT["tools"],
    "add_generation_prompt": ADD_PROMPT,
    "continue_final_message": CONTINUE,
    "chat_template_kwargs": KWARGS,
}

LENS_STEP: dict[str, Rule] = {
    "prompt": Rule("honoured", "the prompt as token ids", schemas.PromptIds, required=True),
    "output": Rule("honoured", "the output before the step, as token ids", list[schemas.TokenId]),
    "params": Rule(
        "honoured",
        "sampling parameters by name, as in a receipt; max_tokens has no effect on a step",
        dict[str, Any],
    ),
    "choice": Rule(
        "honoured",
        "index of the choice, for its noise (default 0)",
        Annotated[int, P(strict=True, ge=0, le=1023)],
    ),
    "rest": Rule(
        "honoured",
        "also return every logit after bias, masks and penalties (base64, row_type f4 or f8); at "
        "most 4 such requests at once",
        TRUE_FALSE,
    ),
}
LENS_REPLAY: dict[str, Rule] = {
    "receipt": Rule("honoured", "a receipt of this server", dict[str, Any], required=True),
    "explain": Rule(
        "honoured", "also explain each token with this many candidates", schemas.type_of("explain")
    ),
}
