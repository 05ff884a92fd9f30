"""What EngineCore is built from: a LoadedModel and a config come in; cache plan, scheduler
and prompt cache go out. Runs once per engine, before the first request."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from verbatim.base.config import GPU_STEP_TOKENS, STEP_TOKENS, EngineConfig
from verbatim.base.defaults import resolve
from verbatim.base.errors import DeviceMemoryError, ParameterError
from verbatim.base.params import SamplingParams
from verbatim.base.units import size_text
from verbatim.engine.loaded_model import LoadedModel
from verbatim.engine.loading.disk_cache import DiskCache
from verbatim.engine.step.own_proposers import cache_share
from verbatim.files.mapped_file import content_digest
from verbatim.observe.roofline import cost_card
from verbatim.schedule.scheduler import Scheduler
from verbatim.schedule.sizing import CachePlan, plan_cache
from verbatim.schedule.token_cost import TokenCost

log = logging.getLogger("verbatim.engine")


def with_step_tokens(loaded: LoadedModel, config: EngineConfig) -> EngineConfig:
    """The config with the backend's default of step_tokens, if it has none. On a GPU a step's
    activations take at most a quarter of the memory that the weights leave."""
    if config.step_tokens is not None:
        return config
    backend, step_tokens = loaded.backend, STEP_TOKENS
    if backend.info.name == "cuda":
        from verbatim.backend.gpu_weights import activation_bytes

        free, step_tokens = backend.available_memory() or 0, GPU_STEP_TOKENS
        while step_tokens > STEP_TOKENS and step_tokens * activation_bytes(backend.spec) > free / 4:
            step_tokens //= 2
    return replace(config, step_tokens=step_tokens)


def size_cache(loaded: LoadedModel, config: EngineConfig) -> CachePlan:
    """The context length and the number of KV blocks that fit in memory."""
    backend = loaded.backend
    return plan_cache(
        backend.spec.groups,
        backend.block_bytes(),
        block_size=backend.block_size,
        context=_context(loaded, config),
        fixed=config.context is not None,
        config=config,
        available=backend.available_memory(),
        share=cache_share(loaded),
        on_gpu=backend.info.name == "cuda",
    )


def compile_ahead(loaded: LoadedModel, config: EngineConfig) -> None:
    """Compile the GPU kernels of the model, and of what drafts for it, before the first request."""
    opened = [b for b in (loaded.backend, loaded.draft) if b is not None]
    backends = [b for b in opened if b.info.name == "cuda"]
    if loaded.layer is not None and loaded.backend in backends:
        backends.append(loaded.layer)
    if config.ranks > 1:  # a rank compiles what its first steps need
        return
    if not config.warm_up or not backends or loaded.task != "generate":
        return
    from verbatim.backend.cuda.kernel_compile import compile_all

    stated = resolve(SamplingParams(), loaded.defaults, config.defaults)
    log.info("compiling GPU kernels; Triton keeps them on disk, so the next start is faster")
    began, tokens = time.perf_counter(), config.step_tokens or GPU_STEP_TOKENS
    try:
        for backend in backends:
            compile_all(backend, [stated], config.max_running, tokens)
    except DeviceMemoryError as error:
        log.warning("not all GPU kernels are compiled: %s", error.message)
    log.info("the GPU kernels are ready after %.1f s", time.perf_counter() - began)


def open_disk_cache(loaded: LoadedModel, config: EngineConfig) -> DiskCache | None:
    if config.cache_dir is None:
        return None
    if loaded.task != "generate":
        raise ParameterError("cache_dir", "an encoder has no KV cache; leave it out")
    backend = loaded.backend
    if config.cache_dir_size < 2 * max(backend.block_bytes()):
        raise ParameterError(
            "cache_dir_size",
            f"{size_text(config.cache_dir_size)} is less than two blocks of"
            f" {size_text(max(backend.block_bytes()))}; give more",
        )
    # The bytes of a block depend on more than the tokens do: on the instruction set, for example.
    layout = (backend.info.detail, backend.block_size, backend.block_bytes())
    # A fingerprint covers samples of the weights, and stored blocks are used by later engines.
    identity = f"{loaded.fingerprint()} {layout} {content_digest(loaded.weight_files)}"
    return DiskCache(config.cache_dir, identity, backend, config.cache_dir_size)


def make_scheduler(
    loaded: LoadedModel, config: EngineConfig, cache_plan: CachePlan, store: DiskCache | None
) -> Scheduler:
    backend, spec = loaded.backend, loaded.backend.spec
    assert config.step_tokens is not None, "EngineCore has set it"
    card = cost_card(backend.spec, backend.info)
    return Scheduler(
        backend.spec.groups,
        cache_plan.blocks,
        block_size=backend.block_size,
        step_tokens=config.step_tokens,
        max_running=config.max_running,
        prefix_cache=config.prefix_cache,
        use_cache=config.use_cache and not (spec.diffusion is not None and spec.diffusion.full),
        prefix_key=None if store is None else store.key,
        store=store,
        cost=TokenCost(card.prompt_ops_token, card.ops_position // backend.spec.attention_layers),
        overlap=backend.launcher is not None,
    )


def _context(loaded: LoadedModel, config: EngineConfig) -> int:
    limit = loaded.context or loaded.backend.spec.context
    if config.context is not None and config.context > limit:
        raise ParameterError(
            "context",
            f"{config.context} is more than this model's {limit} positions; ask for at most that",
        )
    return config.context or limit
