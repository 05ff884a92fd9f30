"""CudaBackend: StepPlan -> StepResult on a GPU. PyTorch for memory, Triton for kernels, a CUDA graph for steps that only write.

The integers of a step that is replayed go to the device in one copy. Plain draws are made on the device where they can be proven (screen.py); all
others here on the host, by the same sampler as the cpu backend's: every parameter means the same. Where the device draws, it begins the next
step before it is asked (ahead.py). Without a GPU it opens only under TRITON_INTERPRET=1, Triton's interpreter, which is for tests.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton

from verbatim.backend.cuda import kernels
from verbatim.backend.cuda.device import device, kernel_ran
from verbatim.backend.cuda.gpu_sampler import Screen
from verbatim.backend.cuda.kernels import Runs
from verbatim.backend.cuda.ops import CudaOps, Step, angles_of, load
from verbatim.backend.cuda.overlap import Ahead, Begun, goes_on
from verbatim.backend.protocol import BackendInfo
from verbatim.backend.step_rows import Batch, collect, make_batch, only_draws, share_out
from verbatim.base.config import BLOCK_SIZE, EngineConfig
from verbatim.base.errors import BackendError, ParameterError
from verbatim.base.records import Drawn, SeqResult, SeqStep, StepPlan, StepResult
from verbatim.model.decoder import forward
from verbatim.model.load import Model
from verbatim.sampling.pipeline import Row, rows_of, sample_rows

NUMERICS_VERSION = "cuda-1"
TOGETHER = 64  # rows whose logits come to the host, and are drawn from, at once
SCRATCH = (
    512 << 20
)  # bytes beside the weights: attention's buffer is 256 MiB; graphs, a small KV cache
LARGEST_GRAPH = 256  # rows of a step that is replayed; larger ones are launched kernel by kernel


class CudaBackend:
    """`weights`: tensors that are on the device already, in the form of ops.load (bench/cuda.py makes shapes that no file has)."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        *,
        weights: dict[str, torch.Tensor] | None = None,
    ) -> None:
        config = config or EngineConfig(backend="cuda")
        if config.kv_type != "f16":
            raise ParameterError(
                "kv_type", f"{config.kv_type!r} is not offered by the cuda backend; it keeps f16"
            )
        self.spec, self.block_size, self.config = model.spec, BLOCK_SIZE, config
        self.device = device()
        self._weights = load(model.weights, model.spec, self.device) if weights is None else weights
        self._angles = angles_of(model.spec, model.spec.context, self.device)
        self._caches: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
        self._idle: tuple[
            int, ...
        ] = ()  # of each group a block that nobody owns, for the rows that fill a graph up
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._sampler = _sampler(config)
        self._host: torch.Tensor | None = None  # where logits arrive; pinned
        self.screen = Screen(model.spec.vocab, self.device)
        self._ahead = Ahead()
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        mixture = any(
            layer.experts for layer in model.spec.layers
        )  # its rows are sorted on the host, in every layer
        self._replays = self.device.type == "cuda" and not mixture
        self.overlap = not mixture

    @property
    def info(self) -> BackendInfo:
        read = sum(
            w.nbytes for name, w in self._weights.items() if name != "embed" or self.spec.tied
        )
        kv = sum(self.block_bytes()) // BLOCK_SIZE
        if self.device.type == "cuda":
            name, (major, minor) = (
                torch.cuda.get_device_name(self.device),
                torch.cuda.get_device_capability(self.device),
            )
            arch = f"sm{major}{minor}"
        else:
            name, arch = "Triton's interpreter", "interpreted"
        return BackendInfo(
            "cuda", name, 1, f"{NUMERICS_VERSION}, {arch}, triton {triton.__version__}", read, kv
        )

    def available_memory(self) -> int:
        return (
            int(torch.cuda.mem_get_info(self.device)[0]) if self.device.type == "cuda" else 1 << 30
        )

    def block_bytes(self) -> tuple[int, ...]:
        return tuple(
            len(g.layers) * self.block_size * self.spec.kv_values * 2 for g in self.spec.groups
        )

    def allocate(self, blocks: tuple[int, ...]) -> None:
        assert not self._caches, "allocate is called once"
        self._idle = blocks
        self._caches = tuple(
            (self._cache(len(group.layers), n + 1), self._cache(len(group.layers), n + 1))
            for group, n in zip(self.spec.groups, blocks, strict=True)
        )

    def _cache(self, layers: int, blocks: int) -> torch.Tensor:
        shape = (layers, blocks, self.spec.kv_heads, self.block_size, self.spec.head_dim)
        return torch.zeros(shape, dtype=torch.float16, device=self.device)

    # ------------------------------------------------------------------------------------------------------------ a step

    def execute(self, plan: StepPlan) -> StepResult:
        for group, source, target in plan.copies:
            for cache in self._caches[group]:
                cache[:, target] = cache[:, source]
        if not self.overlap:
            return self._step(plan)
        begun, rows = self._ahead.take(plan)
        steady = (
            self._ahead.steady(plan, len(rows), self.screen.knows)
            and len(plan.sequences) <= LARGEST_GRAPH
        )
        if steady and not rows:
            begun, rows = (
                self._begin(plan.sequences),
                {step.seq_id: row for row, step in enumerate(plan.sequences)},
            )
        if begun is None or not rows:
            return self._step(plan)
        return self._answered(
            plan, begun, rows, goes_on=steady and len(rows) == len(plan.sequences)
        )

    def _step(self, plan: StepPlan) -> StepResult:
        """A step from beginning to end."""
        if not plan.rows:
            return collect(
                plan,
                np.zeros((0, self.spec.hidden), np.float32),
                np.zeros((0, self.spec.vocab), np.float32),
            )
        hidden, logits = self._forward(plan)
        if only_draws(plan):
            return share_out(
                plan, self._draw(logits, [row for s in plan.sequences for row in rows_of(s)])
            )
        if not any(s.hidden for s in plan.sequences):
            hidden = hidden[:0]
        return collect(plan, hidden.cpu().numpy(), logits.cpu().numpy(), self._sampler)

    def _forward(
        self, plan: StepPlan, tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Final states and logits, as far as they are needed. `tokens` are those of all rows, if only the device knows them."""
        wanted = all(
            len(s.targets) + s.draws >= len(s.tokens) for s in plan.sequences
        )  # the logits of all rows
        if self._replays and wanted and plan.rows <= LARGEST_GRAPH:
            return self._replay(plan.sequences, plan.rows, tokens)
        step = self._laid_out(make_batch(plan, len(self._caches)))
        if tokens is not None:
            step.tokens.copy_(tokens)
        hidden, logits = forward(self.spec, self._ops(step))
        return hidden, logits

    # ------------------------------------------------------------------------------------------------------ a step ahead

    def _begin(self, steps: tuple[SeqStep, ...], tokens: torch.Tensor | None = None) -> Begun:
        """Nothing here waits for the device."""
        _, logits = self._forward(StepPlan(0, steps), tokens)
        specs = [step.draw for step in steps if step.draw is not None]
        assert len(specs) == len(steps), "every row is drawn from"
        answer = self.screen.begin(logits, specs, [step.start + 1 for step in steps])
        return Begun(steps, [step.tokens[0] for step in steps], answer)

    def _begin_behind(
        self, plan: StepPlan, rows: dict[int, int], drawn: torch.Tensor
    ) -> tuple[list[int], Begun] | None:
        """The step behind a plan that was begun, and the rows that it goes on with: `drawn` are their ids, of which the host may know none yet."""
        going = [
            step
            for asked in plan.sequences
            if (step := goes_on(asked, self.spec.context)) is not None
        ]
        if not going:
            return None
        at = [rows[step.seq_id] for step in going]
        if at != list(range(len(drawn))):
            drawn = drawn[
                torch.tensor(at, pin_memory=self.device.type == "cuda").to(
                    self.device, non_blocking=True
                )
            ]
        return at, self._begin(tuple(going), drawn.clamp_min(0))

    def _answered(
        self, plan: StepPlan, begun: Begun, rows: dict[int, int], *, goes_on: bool
    ) -> StepResult:
        """A plan of which these rows were begun. If it goes on, the next step is begun before they are waited for. What the screen left open is computed
        again: its logits may be gone."""
        behind = self._begin_behind(plan, rows, begun.answer.there) if goes_on else None
        found = begun.answer.wait()
        if behind is not None:
            at, ahead = behind
            self._ahead.begun = ahead._replace(inputs=[found[row] for row in at])
        drawn = {seq_id: found[row] for seq_id, row in rows.items() if found[row] >= 0}
        self.screen.rows += len(drawn)
        rest = tuple([step for step in plan.sequences if step.seq_id not in drawn])
        others = (
            {done.seq_id: done for done in self._step(plan._replace(sequences=rest)).sequences}
            if rest
            else {}
        )
        done = [
            others.get(s.seq_id) or SeqResult(s.seq_id, (Drawn(drawn[s.seq_id], 0.0),))
            for s in plan.sequences
        ]
        return StepResult(plan.step, tuple(done))

    # ------------------------------------------------------------------------------------------------------------- draws

    def _draw(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[Drawn]:
        """Of most rows only the id comes back; those that the screen leaves open come whole, and the sampler draws from them."""
        found = self.screen(logits, rows)
        drawn = [Drawn(token, 0.0) for token in found]
        left = [i for i, token in enumerate(found) if token < 0]
        if left:
            theirs = (
                logits if len(left) == len(rows) else logits[torch.tensor(left, device=self.device)]
            )
            for i, one in zip(left, self._draw_here(theirs, [rows[i] for i in left]), strict=True):
                drawn[i] = one
        return drawn

    def _draw_here(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[Drawn]:
        if self._host is None or len(self._host) < len(rows):
            room = 1 << max(0, len(rows) - 1).bit_length()
            self._host = torch.empty(
                (room, self.spec.vocab), dtype=torch.float32, pin_memory=self.device.type == "cuda"
            )
        here, arrived = self._host[: len(rows)], []
        for some in range(
            0, len(rows), TOGETHER
        ):  # the first are drawn while the next are still on their way
            here[some : some + TOGETHER].copy_(logits[some : some + TOGETHER], non_blocking=True)
            arrived.append(self._mark())
        drawn: list[Drawn] = []
        for some, event in zip(range(0, len(rows), TOGETHER), arrived, strict=True):
            if event is not None:
                event.synchronize()
            drawn += self._sampler(
                here[some : some + TOGETHER].numpy(), rows[some : some + TOGETHER]
            )
        return drawn

    def _mark(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _ops(self, step: Step) -> CudaOps:
        return CudaOps(self.spec, self._weights, self._caches, self._angles, step)

    def _laid_out(self, batch: Batch) -> Step:
        """The step's integers on the device."""
        most = kernels.rows_in_a_run(self.spec.heads, self.spec.kv_heads)
        first_row, count, owner = [], [], []
        for s, (first, last) in enumerate(
            zip(batch.first[:-1].tolist(), batch.first[1:].tolist(), strict=True)
        ):
            for row in range(first, last, most):
                first_row.append(row)
                count.append(min(most, last - row))
                owner.append(s)
        rows = np.array(first_row, np.int32)
        sent = self._send(
            [batch.tokens, batch.positions, rows, np.array(count, np.int32), batch.positions[rows]]
        )
        tokens, positions, first, counts, begins = sent
        tables = self._send([table[owner] for table in batch.tables])
        whole = len(batch.outputs) == batch.rows
        return Step(
            tokens,
            positions,
            tuple(self._send([self._slots(batch, table) for table in batch.tables])),
            tuple(Runs(table, first, counts, begins, most) for table in tables),
            None if whole else self._send([batch.outputs])[0],
            None if len(batch.logits) == len(batch.outputs) else self._send([batch.logits])[0],
            kernels.spans_of(int(batch.positions.max()) + 1),
        )

    def _slots(self, batch: Batch, table: np.ndarray) -> np.ndarray:
        owner = np.repeat(np.arange(len(batch.first) - 1), np.diff(batch.first))
        blocks = table[owner, batch.positions // self.block_size]
        assert blocks.min() >= 0, "a token's own block is in the table"
        return np.asarray(blocks * self.block_size + batch.positions % self.block_size, np.int32)

    def _send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Several arrays of int32 in one copy."""
        flat = torch.from_numpy(
            np.concatenate([np.ascontiguousarray(a, np.int32).reshape(-1) for a in arrays])
        )
        pieces = flat.to(self.device).split([a.size for a in arrays])
        return [piece.view(a.shape) for piece, a in zip(pieces, arrays, strict=True)]

    # -------------------------------------------------------------------------------------------------------- replaying

    def _replay(
        self, sequences: Sequence[SeqStep], rows: int, tokens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A step in which every row's logits are wanted: its kernels are recorded once for each size, rounded up."""
        room = 1 << (rows - 1).bit_length()
        spans = 1 << (kernels.spans_of(max(s.end for s in sequences)) - 1).bit_length()
        graph = self._graphs.get((room, spans))
        if graph is None:
            graph = self._graphs[room, spans] = Graph(self, room, spans)
        hidden, logits = graph.run(sequences, tokens)
        return hidden[:rows], logits[:rows]

    def close(self) -> None:
        self._ahead.begun = (
            None  # if it still runs: PyTorch gives its memory to nobody before it is done
        )
        self._graphs.clear()
        self._caches = ()
        self._weights.clear()


class Sheet:
    """The integers of a step in which every row is a run of its own: written on the host, sent in one copy. Rows that are not used write into the
    scratch block. Tables stay from step to step; a row's is written anew where its tuple of blocks is another object than last time."""

    def __init__(self, rows: int, spans: int, idle: tuple[int, ...], device: torch.device) -> None:
        self.rows, self.width, self.idle = rows, spans * kernels.SPAN // BLOCK_SIZE, idle
        groups = len(idle)
        sizes = [rows, rows, *[rows] * groups, *[rows * self.width] * groups]
        self._host = torch.zeros(sum(sizes), dtype=torch.int32)
        self._sent = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._tokens, self._positions, *parts = (part.numpy() for part in self._host.split(sizes))
        self._slots, self._tables = (
            parts[:groups],
            [table.reshape(rows, self.width) for table in parts[groups:]],
        )
        self._held: list[list[tuple[int, ...]]] = [[()] * rows for _ in idle]
        tokens, positions, *rest = self._sent.split(sizes)
        row = torch.arange(rows, dtype=torch.int32, device=device)
        one = torch.ones_like(row)
        runs = tuple(
            Runs(table.view(rows, self.width), row, one, positions, 1) for table in rest[groups:]
        )
        self.step = Step(tokens, positions, tuple(rest[:groups]), runs, None, None, spans)

    def fill(self, sequences: Sequence[SeqStep], drawn: torch.Tensor | None = None) -> None:
        """`drawn`: the tokens, if only the device knows them."""
        tokens = [token for s in sequences for token in s.tokens]
        n = len(tokens)
        self._tokens[:n], self._tokens[n:] = tokens, 0
        self._positions[:n], self._positions[n:] = (
            [p for s in sequences for p in range(s.start, s.end)],
            0,
        )
        block, place = self._positions[:n] // BLOCK_SIZE, self._positions[:n] % BLOCK_SIZE
        for group, (table, held, slots, idle) in enumerate(
            zip(self._tables, self._held, self._slots, self.idle, strict=True)
        ):
            for row, blocks in enumerate([s.blocks[group] for s in sequences for _ in s.tokens]):
                if held[row] is not blocks:
                    table[row, : len(blocks)] = blocks[: self.width]
                    held[row] = blocks
            table[n:, 0] = idle
            held[n:] = [()] * (self.rows - n)
            slots[:n], slots[n:] = (
                table[np.arange(n), block] * BLOCK_SIZE + place,
                idle * BLOCK_SIZE,
            )
            assert slots.min() >= 0, "a token's own block is in the table"
        # The step before may not have been sent yet. PyTorch keeps pinned memory until what was copied from it has arrived.
        sent = torch.empty(len(self._host), dtype=torch.int32, pin_memory=self._sent.is_cuda)
        sent.numpy()[:] = (
            self._host.numpy()
        )  # PyTorch would wake a thread for each core to copy this
        self._sent.copy_(sent, non_blocking=True)
        if drawn is not None:
            self.step.tokens[:n].copy_(drawn)


class Graph:
    """One recorded step of a fixed number of rows."""

    def __init__(self, backend: CudaBackend, rows: int, spans: int) -> None:
        self.sheet = Sheet(
            rows, spans, backend._idle, backend.device
        )  # the graph reads its tensors
        self.sheet.fill(())
        torch.cuda.synchronize()  # the sheet is there, and no other step runs
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles what is not compiled yet
                forward(backend.spec, backend._ops(self.sheet.step))
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            self.graph, pool=backend.pool
        ):  # one pool for all: only one of them runs at a time
            self.out = forward(backend.spec, backend._ops(self.sheet.step))

    def run(
        self, sequences: Sequence[SeqStep], tokens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.sheet.fill(sequences, tokens)
        self.graph.replay()
        hidden, logits = self.out
        return hidden, logits


def open_checked(model: Model, config: EngineConfig) -> CudaBackend:
    """Open a model on a GPU that runs a test kernel and has room for the weights.

    Otherwise a BackendError says why not, and no GPU memory stays allocated."""
    kernel_ran()
    on, needed = device(), weight_bytes(model) + SCRATCH
    free = int(torch.cuda.mem_get_info(on)[0]) if on.type == "cuda" else needed
    if needed <= free:
        with contextlib.suppress(
            torch.OutOfMemoryError
        ):  # another process may have allocated since
            return CudaBackend(model, config)
        torch.cuda.empty_cache()
    raise BackendError(
        f"the model needs {needed / 1e9:.1f} GB of GPU memory and {free / 1e9:.1f} GB are free"
    )


def weight_bytes(model: Model) -> int:
    """Of the weights in half precision, as ops.load stores them (all but the norms, which are small)."""
    return 2 * sum(int(np.prod(tensor.shape)) for tensor in model.weights.values())


def _sampler(config: EngineConfig) -> Any:
    """The native sampler where it is built, the specification itself elsewhere."""
    try:
        from verbatim.backend.cpu.backend import native, physical_cores
        from verbatim.backend.cpu.sampler import NativeSampler
    except ImportError:
        return sample_rows
    given = Given(
        native.RowSampler(os.environ.get("VERBATIM_ISA", ""), config.threads or physical_cores())
    )
    sampler = NativeSampler(native, given)

    def draw(logits: np.ndarray, rows: Sequence[Row]) -> list[Drawn]:
        given.rows = np.ascontiguousarray(logits)
        return sampler.draw(rows)

    return draw


class Given:
    """What NativeSampler asks of an engine, over logits that came from elsewhere."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.rows = np.zeros((0, 0), np.float32)

    def logits(self) -> np.ndarray:
        return self.rows

    def sample(self, asked: list[Any]) -> Any:
        return self._sampler.draw(self.rows, asked)
