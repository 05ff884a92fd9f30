"""CudaDraftLayer: a draft layer (multi-token prediction, or an EAGLE-3 head) on its target's GPU.

In: steps whose tokens come with states on the device. Out: keys and values in the layer's own
cache (`execute`), and chains of drafts (`chains`). Embedding and head are the target's tensors,
unless the file has others. Bits are not fixed: a draft changes no output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verbatim.backend.cuda.backend import CudaBackend
from verbatim.backend.cuda.chains import ChainGraphs, Wait, states_width
from verbatim.backend.cuda.device_weights import load
from verbatim.backend.cuda.ops import Rows
from verbatim.backend.cuda.runtime.device_step import DeviceStep
from verbatim.backend.cuda.runtime.step_inputs import to_device
from verbatim.backend.gpu_weights import block_mode
from verbatim.backend.step_rows import make_batch
from verbatim.base.errors import DeviceMemoryError
from verbatim.base.params import SamplingParams
from verbatim.base.records import DrawSpec, SeqResult, SeqStep, StepPlan, StepResult
from verbatim.model.decoder import forward
from verbatim.model.loading.load import Model


class CudaDraftLayer(CudaBackend):
    def __init__(self, model: Model, target: CudaBackend) -> None:
        shared = {n for n, tensor in target.shared.items() if model.weights.get(n) is tensor}
        own = {name: tensor for name, tensor in model.weights.items() if name not in shared}
        weights = load(own, model.spec, target.device, block_mode(own, target.available_memory()))
        both = weights | {name: target.weights[name] for name in shared if name in target.weights}
        super().__init__(model, target.config, weights=both)
        ids = both.get("eagle.ids")
        self._chain_graphs = ChainGraphs(
            self.spec, self.compute_states, None if ids is None else ids.int(), self.device
        )

    @property
    def chains(self) -> CudaDraftLayer:
        return self

    def start(self, steps: Sequence[SeqStep], count: int) -> Wait:
        self._chain_graphs.padding = self.padding_blocks
        try:
            return self._chain_graphs.start(steps, count)
        except torch.OutOfMemoryError:
            raise self.out_of_memory() from None

    def _execute(self, plan: StepPlan) -> StepResult:
        """Compute positions without drafts."""
        states = torch.stack([row for step in plan.sequences for row in step.states])
        batch = make_batch(plan, len(self.spec.groups))
        self.compute_states(to_device(batch, self.spec, self.device), states)
        return StepResult(plan.step, tuple(SeqResult(step.seq_id) for step in plan.sequences))

    def compute_states(
        self, step: DeviceStep, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The states of the next drafts, and logits of the tokens that the layer drafts."""
        ops, eagle = self.ops(step, ()), self.spec.eagle
        if eagle is None:
            return forward(self.spec, ops, ops.draft_input(states))
        found: list[torch.Tensor] = []

        def keep(x: Rows, layer: int) -> None:
            if layer == len(self.spec.layers):
                found.append(ops.flushed(x))

        x, h = ops.eagle_input(states, eagle)
        _, logits = forward(self.spec, ops, x, h, keep)
        return found[0], logits

    def compile_chains(self) -> bool:
        draw, (padding,) = DrawSpec(SamplingParams(temperature=0), 0, 1), self.padding_blocks
        rows = torch.zeros((4, states_width(self.spec)), device=self.device).unbind(0)
        for counts in ((1,), (4,), (2, 2, 2, 2)):
            steps = [SeqStep(0, (0,) * n, 0, ((padding,),), 1, draw) for n in counts]
            self.start([step._replace(states=rows[: len(step.tokens)]) for step in steps], 2)()
        return True

    def out_of_memory(self) -> DeviceMemoryError:
        self._chain_graphs.drop()
        return super().out_of_memory()
