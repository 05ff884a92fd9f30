"""CudaRank: one rank of a tensor-parallel group on a GPU.

A CudaBackend with a part of the model, whose operations gather between the kernels. Rank 0 samples;
the others only compute. The host takes part in every gather, so there are no CUDA graphs.
"""

from __future__ import annotations

import torch

from verbatim.backend.cuda.backend import CudaBackend
from verbatim.backend.cuda.ops import CudaOps
from verbatim.backend.cuda.rank_exchange import RankExchange
from verbatim.backend.cuda.runtime.device_step import DeviceStep
from verbatim.backend.cuda.runtime.step_graphs import StepGraphs
from verbatim.backend.ranks import Ranks
from verbatim.base.config import EngineConfig
from verbatim.base.errors import ParameterError
from verbatim.base.records import StepPlan, StepResult
from verbatim.model.decoder import forward
from verbatim.model.loading.load import Model


class CudaRank(CudaBackend):
    def __init__(self, part: Model, config: EngineConfig, ranks: Ranks) -> None:
        if part.adapters:
            raise ParameterError(
                "adapters", "do not run on several ranks of a GPU yet; leave one of the two out"
            )
        if torch.cuda.is_available():  # with fewer cards than ranks, several share a card
            torch.cuda.set_device(ranks.rank % torch.cuda.device_count())
        super().__init__(part, config)
        self._ranks, self._exchange = ranks, RankExchange(ranks)
        self._graphs = StepGraphs(part.spec, self.device, graphs=False)

    def _execute(self, plan: StepPlan) -> StepResult:
        self._ranks.start(plan)
        if self._ranks.rank == 0:
            return super()._execute(plan)
        for copy in plan.copies:
            self._memory.copy(*copy)
        if plan.rows:
            self._forward(plan)
        return StepResult(plan.step, ())

    def compute(self, step: DeviceStep) -> tuple[torch.Tensor, torch.Tensor]:
        memory, angles, exchange = self._memory.caches, self._angles, self._exchange
        ops = CudaOps(self.spec, self.weights, memory, angles, step, self._adapters, exchange)
        hidden, logits = forward(self.spec, ops)
        return hidden, logits
