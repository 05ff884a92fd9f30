"""What users of Ollama, llama.cpp, vLLM and transformers type: aliases that work, and answers that
name the right flag.

Tables only. options.Command adds the flags to every command that has the flag of ours; main.py
resolves the commands.
"""

from __future__ import annotations

# our flag -> names of other programs with the same meaning
FLAG_ALIASES: dict[str, tuple[str, ...]] = {
    "--model": ("-hf", "--hf-repo", "--model-path"),
    "--temperature": ("--temp",),
    "--max-tokens": ("-n", "--predict", "--n-predict", "--num-predict", "--max-new-tokens"),
    "--repetition-penalty": ("--repeat-penalty",),
    "--context": ("-c", "--ctx-size", "--max-model-len", "--num-ctx", "--context-length"),
    "--threads": ("-t", "--num-thread"),
    "--kv-type": ("--kv-cache-dtype",),
    "--max-running": ("--max-num-seqs", "-np", "--parallel"),
    "--step-tokens": ("--max-num-batched-tokens", "-b", "--batch-size"),
    "--system": ("-sys", "--system-prompt"),
    "--served-model-name": ("-a", "--alias"),
    "--file": ("-f", "--prompt-file"),
    "--adapter": ("--lora", "--lora-modules"),
    "--requantise": ("--requantize", "--allow-requantize"),
    "--tls-cert": ("--ssl-certfile", "--ssl-cert-file"),
    "--tls-key": ("--ssl-keyfile", "--ssl-key-file"),
}

# flags without a counterpart -> what to type instead
FLAG_ANSWERS: dict[tuple[str, ...], str] = {
    ("-ngl", "--n-gpu-layers", "--gpu-layers", "--num-gpu"): (
        "a model runs whole on one backend; use --backend cuda or --backend cpu"
    ),
    ("-dev", "--device", "--gpu", "--gpus"): "use --backend cuda or --backend cpu",
    ("--outtype",): "--quant TYPE sets the type of the weight matrices",
    ("--outfile",): "the file is an argument: verbatim convert SOURCE TARGET",
    ("-p", "--prompt"): "the prompt is an argument: verbatim run PROMPT",
    ("-i", "--interactive", "-cnv", "--conversation"): "use verbatim chat",
    ("--api-key",): (
        "keys come from --api-key-file FILE or the variable VERBATIM_API_KEY, "
        "so that no list of processes shows them"
    ),
    ("-tp", "--tensor-parallel-size", "--pipeline-parallel-size", "--tensor-split"): (
        "a model runs on one GPU at most; leave it out"
    ),
    ("--gpu-memory-utilization",): "--kv-memory SIZE sets the memory of the KV cache",
    ("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"): (
        "keys and values have one type: --kv-type f16, q8 or fp8"
    ),
    ("--dtype",): (
        "weights keep the type of their file; --quant q8_0 or q4_0 quantises float weights"
    ),
    ("--format",): 'use --json-schema \'{"type": "object"}\', or --json-schema @FILE',
    ("--keepalive", "--keep-alive"): "the model stays loaded until the command ends; leave it out",
    ("-fa", "--flash-attn"): "each backend has one attention kernel; leave it out",
    ("--mlock", "--no-mmap"): "files are mapped into memory; leave it out",
    ("--enable-lora", "--max-lora-rank", "--max-loras", "--max-cpu-loras"): (
        "--adapter NAME=PATH loads a LoRA adapter of any rank, and may be repeated"
    ),
    ("--lora-scaled", "--lora-base"): (
        "--adapter NAME=PATH loads a LoRA adapter with the scale that its file states"
    ),
    ("--trust-remote-code",): "nothing in a model file is ever executed; leave it out",
    ("--stream", "--no-stream"): "text is streamed, and --json prints one object; leave it out",
    ("-s",): "write --seed N",
    ("--samplers", "--sampler-seq", "--sampling-seq"): (
        "the order of the samplers is fixed; each has a flag of its own (--top-k, --min-p, …)"
    ),
    ("--mirostat", "--mirostat-lr", "--mirostat-ent", "--tfs"): (
        "this sampler does not exist here; --min-p, --typical-p and --top-n-sigma do"
    ),
    ("--quantization",): (
        "a checkpoint states its own; --quant q8_0 or q4_0 quantises float weights, packed "
        "computes 4-bit checkpoints in blocks"
    ),
    ("--do-sample", "--greedy"): (
        "--temperature above 0 samples; --temperature 0, or --defaults greedy, does not"
    ),
    ("--hidethinking",): "--quiet and pipes do not show the thought; --no-think switches it off",
    ("-rea", "--reasoning"): "--think switches the thought on, --no-think off",
    ("--reasoning-budget",): ("--thinking-budget N limits the thought; --no-think switches it off"),
    ("-no-cnv", "--no-conversation", "-st", "--single-turn"): (
        "run answers one prompt; --raw leaves the chat template out"
    ),
    ("-ub", "--ubatch-size"): "--step-tokens N limits the tokens of a step",
    ("-tb", "--threads-batch"): "--threads N is for prefill and decode",
    ("-cb", "--cont-batching", "--enable-chunked-prefill"): (
        "batching is continuous and prefill is chunked, always; leave it out"
    ),
    ("-md", "--model-draft", "--speculative-model", "--speculative-config"): (
        "--speculate draft:MODEL drafts with a second model; drafting is on by default"
    ),
    ("--enable-prefix-caching", "--no-enable-prefix-caching"): (
        "the prefix cache is on; --no-prefix-cache switches it off"
    ),
    ("--jinja", "--chat-template", "--chat-template-file"): (
        "the model's own chat template is used; --raw leaves it out"
    ),
    ("--tool-call-parser", "--enable-auto-tool-choice", "--reasoning-parser"): (
        "the server parses the model's own format; leave it out"
    ),
    ("--embedding", "--embeddings", "--rerank", "--reranking", "--task", "--runner"): (
        "a model serves all that it can; --pooling NAME sets a pooling that it does not state"
    ),
    ("--metrics",): "the server always has /metrics; leave it out",
    ("--generation-config",): "--defaults model, protocol or greedy sets the sampling defaults",
    ("--enforce-eager", "--swap-space", "--cpu-offload-gb", "--block-size"): (
        "there is nothing to set; leave it out"
    ),
    ("--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale"): (
        "the model states its RoPE; leave it out"
    ),
    ("--disable-log-requests", "--no-enable-log-requests"): (
        "the log has one line per request; without --log-prompts it has no prompt"
    ),
    ("--allowed-origins",): "--cors-origin ORIGIN allows one, and may be repeated",
    ("-dp", "--data-parallel-size"): "--ray --replicas N serves N engines",
    ("--color", "--nowordwrap", "--simple-io"): (
        "colours and wrapping are for terminals only; NO_COLOR=1 switches colours off"
    ),
}

# commands of other programs -> ours
COMMAND_ALIASES: dict[str, tuple[str, ...]] = {
    "generate": ("run",),
    "list": ("models",),
    "ls": ("models",),
    "rm": ("models", "rm"),
    "show": ("models", "show"),
    "download": ("pull",),
    "server": ("serve",),
    "quantize": ("convert",),
    "quantise": ("convert",),
    "perplexity": ("score",),
    "run-batch": ("batch",),
}
COMMAND_ANSWERS: dict[str, str] = {
    "ps": "no model stays loaded after a command; a server shows its own at /api/ps, and "
    "`verbatim models` lists the downloaded ones",
    "stop": "no model stays loaded after a command; Ctrl-C (SIGTERM) stops a server",
    "create": "there are no Modelfiles; pass --system and the sampling flags to run or chat",
    "cp": "a model is a file; copy it, and give its path with -m",
    "push": "models are not uploaded; `verbatim convert` writes a file that you can share",
    "info": "use `verbatim show MODEL` for a model, `verbatim doctor` for this machine",
    "tokenize": "a server has POST /tokenize, and the library LLM(model).encode(text)",
    "detokenize": "a server has POST /detokenize, and the library LLM(model).decode(ids)",
    "update": "use git pull in the checkout; make run then installs it",
}
