"""The proposers that come with a loaded model: each is a mode of its own, and part of mode "auto".

In: a LoadedModel. Out: proposers by mode, and why the modes without one are rejected. A further
kind of draft layer or model is added here; those that read tokens alone need no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from verbatim.base.config import EngineConfig
from verbatim.speculate.assistant_proposer import AssistantProposer
from verbatim.speculate.block_proposer import BlockProposer
from verbatim.speculate.draft_model import DraftProposer
from verbatim.speculate.layer_proposer import LayerProposer
from verbatim.speculate.proposer import Proposer
from verbatim.speculate.self_draft import SelfProposer

if TYPE_CHECKING:
    from verbatim.backend.protocol import Backend
    from verbatim.engine.loaded_model import LoadedModel
    from verbatim.schedule.scheduler import Scheduler


class BorrowedBlocks:
    """KV blocks of the scheduler's one pool, for the length of a drafting pass."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, (self._pool,) = scheduler, scheduler.cache.pools

    def table(self, seq_id: int) -> Sequence[int]:
        return self._scheduler.sequences[seq_id].blocks[0]

    def borrow(self, count: int) -> list[int]:
        # free blocks only: no cached prefix is evicted for a draft
        if count > len(self._pool.free):
            return []
        return [self._pool.allocate() for _ in range(count)]

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._pool.release(block)


def open_proposers(
    loaded: LoadedModel, config: EngineConfig, scheduler: Scheduler
) -> tuple[dict[str, Proposer], dict[str, str]]:
    """Proposers by mode, cheapest first, and mode -> why it is rejected."""
    found: dict[str, Proposer] = {}
    missing = {
        "head": "'head' needs an engine that was opened with a draft head (speculate=head:PATH)",
        "mtp": "'mtp' needs a model whose file has a draft layer, and an engine that was opened "
        "with speculate=mtp or auto",
        "self": "'self' needs a model that also fills blocks of masks, such as"
        " Nemotron-Labs-Diffusion",
        "draft": "'draft' needs an engine that was opened with a draft model "
        "(speculate=draft:MODEL)",
    }
    if (layer := loaded.layer) is not None:
        mode = "mtp" if layer.spec.draft_layer else "head"
        blocks = draft_blocks(layer, loaded, config, scheduler)
        if layer.spec.assistant is not None:
            found[mode] = AssistantProposer(layer, lambda i: scheduler.sequences[i].blocks)
        elif layer.spec.dflash is not None:
            found[mode] = BlockProposer(layer, blocks, layer.spec.dflash)
        else:
            found[mode] = LayerProposer(mode, layer, blocks)
    diffusion = loaded.backend.spec.diffusion
    if diffusion is not None and diffusion.causal and config.use_cache:
        own = BorrowedBlocks(scheduler)
        found["self"] = SelfProposer(loaded.backend, own, diffusion.mask, diffusion.block)
    if (draft := loaded.draft) is not None:
        found["draft"] = DraftProposer(draft, draft_blocks(draft, loaded, config, scheduler))
    return found, missing


def cache_share(loaded: LoadedModel) -> float:
    """The target's share of the KV-cache memory. The cache of a draft model or layer holds as many
    tokens."""
    target = sum(loaded.backend.block_bytes())
    drafts = sum(sum(b.block_bytes()) for b in (loaded.draft, loaded.layer) if b is not None)
    return target / (target + drafts) if drafts else 1.0


def draft_blocks(
    draft: Backend, loaded: LoadedModel, config: EngineConfig, scheduler: Scheduler
) -> int:
    """Blocks of a draft cache: as many as the target's on average over its pools, so that all fit
    the memory that cache_share() splits; at most what max_running can use."""
    sizes = loaded.backend.block_bytes()
    target_blocks = sum(
        pool.total * size for pool, size in zip(scheduler.cache.pools, sizes, strict=True)
    ) // sum(sizes)
    usable = config.max_running * -(-draft.spec.context // draft.block_size)
    return max(1, min(target_blocks, usable))
