"""A mixture of experts without the host: choose experts, sort rows by expert, add the results.

In: scores of experts per row, and matmul results per line. Out: tensors on the device whose sizes
depend on the number of rows only, so that a CUDA graph can replay the launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from verbatim.backend.cuda.kernels import jit_experts
from verbatim.backend.cuda.kernels.launch import launch
from verbatim.model.spec import ModelSpec

CHOOSE_ROWS = 4  # per program
SORT_BLOCK = 1024
ADD_BLOCK = 1024


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTiles:
    """The rows of a step sorted by expert into tiles of `height` lines."""

    rows: torch.Tensor  # [lines]: source row, -1 for padding
    lines: torch.Tensor  # [lines]: its own number, -1 for padding
    experts: torch.Tensor  # [tiles]: -1 for those that no expert needs
    place: torch.Tensor  # [rows, used]: line of each row and rank
    height: int


def choose(
    scores: torch.Tensor,
    spec: ModelSpec,
    choice_bias: torch.Tensor | None,
    scales: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row, best first, and their shares [rows, used].

    scores: [rows, experts], of a softmax before the division."""
    rows, count = scores.shape
    used = spec.experts_used
    chosen = torch.empty((rows, used), dtype=torch.int32, device=scores.device)
    shares = torch.empty((rows, used), dtype=torch.float32, device=scores.device)
    launch(
        jit_experts.choose_experts,
        (triton.cdiv(rows, CHOOSE_ROWS), 1, 1),
        (
            scores, scores if choice_bias is None else choice_bias,
            scores if scales is None else scales, chosen, shares, rows, float(spec.experts_scale),
        ),
        (
            count, used, triton.next_power_of_2(count), triton.next_power_of_2(used), CHOOSE_ROWS,
            spec.router == "softmax", choice_bias is not None, spec.experts_renormalised,
            scales is not None, spec.expert_groups, spec.expert_groups_used,
        ),
    )  # fmt: skip
    return chosen, shares


def sort(chosen: torch.Tensor, count: int) -> ExpertTiles:
    """Sort the rows by expert, of `count` experts."""
    (rows, used), device = chosen.shape, chosen.device
    picks = rows * used
    height = tile_height(picks, count)
    # every expert but one may have a tile with one line
    tiles = (picks + (height - 1) * min(picks, count)) // height
    sources, lines = torch.empty((2, tiles * height), dtype=torch.int32, device=device)
    experts = torch.empty(tiles, dtype=torch.int32, device=device)
    place = torch.empty((rows, used), dtype=torch.int32, device=device)
    launch(
        jit_experts.sort_by_expert,
        (count, 1, 1),
        (chosen, sources, lines, experts, place, picks, tiles),
        (count, used, triton.next_power_of_2(count + 1), height, SORT_BLOCK),
    )
    return ExpertTiles(sources, lines, experts, place, height)


def tile_height(picks: int, count: int) -> int:
    """Lines per tile: so that most tiles are full. It does not change bits."""
    lines = picks / count
    return 16 if lines < 48 else 64 if lines < 128 else 128


def add(results: torch.Tensor, tiles: ExpertTiles, shares: torch.Tensor) -> torch.Tensor:
    """[rows, width]: the results of each row's experts times their shares, in order of rank."""
    (rows, used), width = shares.shape, results.shape[1]
    out = torch.empty((rows, width), dtype=torch.float32, device=results.device)
    launch(
        jit_experts.add_experts,
        (rows, triton.cdiv(width, ADD_BLOCK), 1),
        (results, tiles.place, shares, out, width),
        (used, ADD_BLOCK),
    )
    return out
