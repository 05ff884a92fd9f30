"""`verbatim plan`: what fits on a device, and how fast any engine could be there (roofline).

In: a Footprint, a Device, the traffic (context, output, batch) and a price. Out: a Plan. Every time
is a lower bound: it counts bytes that must be read and operations that must be done, and neither
communication nor launches nor sampling. Worked numbers: 140 GB of weights (70B in half precision)
at 3,350 GB/s take 41.8 ms, so no engine decodes one sequence faster than 24 tokens per second.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from verbatim.base.errors import ParameterError
from verbatim.diagnose.devices import Device
from verbatim.diagnose.footprint import WEIGHT_TYPES, Footprint
from verbatim.model.row_split import Split
from verbatim.model.spec import ModelSpec

USABLE = 0.9  # share of the memory for weights and KV cache; the rest is for activations
MAX_BATCH = 1 << 20  # sequences; a larger batch counts as "never compute-bound"


@dataclass(frozen=True, slots=True)
class Bound:
    """The least time of one piece of work, and which limit sets it."""

    seconds: float
    read_seconds: float
    ops_seconds: float | None  # None: the device's peak is unknown
    ops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.ops / self.bytes

    @property
    def limit(self) -> str:
        return "compute" if (self.ops_seconds or 0.0) > self.read_seconds else "memory"


@dataclass(frozen=True, slots=True)
class RankShare:
    """What a rank of a tensor-parallel group has (model/row_split.py)."""

    weight_bytes: float  # those of the rank with the most
    heads: tuple[int, ...] | None  # query heads of each rank; None: attention is whole on each
    gathered_bytes: int  # that a rank receives for each row of a step


@dataclass(frozen=True, slots=True)
class Plan:
    footprint: Footprint
    device: Device
    context: int  # tokens of prompt and output
    output: int
    batch: int
    kv_sequence: float  # bytes of KV cache of one sequence at the whole context
    fits: bool | None  # None: the memory size is unknown
    room_tokens: float | None  # tokens of KV cache beside the weights
    room_sequences: int | None
    prefill: Bound  # one prompt's
    decode_empty: Bound  # one step of the batch at context 0
    decode: Bound  # one step of the batch at the whole context
    compute_bound_empty: int | None  # batch from which decode is compute-bound; None: never
    compute_bound: int | None
    decode_share: float  # fraction of the time of one batch of requests
    input_price: float | None  # per million tokens, in the currency of the price
    output_price: float | None
    ranks: RankShare | None  # None: one device, or a parameter count
    denoising: Bound | None = None  # one step of a diffusion model at the whole context

    @property
    def prompt(self) -> int:
        return self.context - self.output


def make_plan(
    footprint: Footprint,
    device: Device,
    *,
    context: int = 4096,
    output: int = 256,
    batch: int = 1,
    tp: int = 1,
    price: float | None = None,
) -> Plan:
    """The Plan of a model on a device. `tp`: devices that share every matrix.
    `price`: per device and hour."""
    _check(footprint, context, output, batch, tp)
    device = device.times(tp) if tp > 1 else device
    # A rank holds whole key heads: with more ranks than heads, several hold copies of one.
    copies = 1.0 if footprint.spec is None else Split(footprint.spec, tp).kv_copies
    kv = footprint.kv_bytes(context) * copies + footprint.state_bytes
    fits, room = _room(footprint, device, kv * batch, copies, context)
    prompt = context - output
    prefill = _prefill(footprint, device, prompt)
    middle = prompt + output / 2
    typical = _decode(footprint, device, middle, batch, copies)
    decoding = output * typical.seconds
    per_second = None if price is None else price * tp / 3600
    return Plan(
        footprint,
        device,
        context,
        output,
        batch,
        kv,
        fits,
        room,
        None if room is None or not kv else int(room // context),
        prefill,
        _decode(footprint, device, 0, batch, copies),
        _decode(footprint, device, context, batch, copies),
        _compute_bound(footprint, device, 0, copies),
        _compute_bound(footprint, device, context, copies),
        decoding / (decoding + batch * prefill.seconds),
        None if per_second is None else per_second * prefill.seconds / prompt * 1e6,
        None if per_second is None else per_second * typical.seconds / batch * 1e6,
        None if tp == 1 or footprint.spec is None else _rank_share(footprint, footprint.spec, tp),
        _denoise(footprint, device, context, output, batch),
    )


def _rank_share(f: Footprint, spec: ModelSpec, tp: int) -> RankShare:
    """The shares of the file's weights; a GPU's own copies are in proportion."""
    split = Split(spec, tp)
    sizes = {n: prod(part.shape) * WEIGHT_TYPES[part.type] for n, part in f.parts.items()}
    ranks = [sum(size * split.share(n, rank) for n, size in sizes.items()) for rank in range(tp)]
    most = max(ranks) / sum(sizes.values()) * f.weight_bytes
    return RankShare(most, split.heads, split.gathered * 4 * (tp - 1) // tp)


def _check(footprint: Footprint, context: int, output: int, batch: int, tp: int) -> None:
    for name, value in (("context", context), ("output", output), ("batch", batch), ("tp", tp)):
        if value < 1:
            raise ParameterError(name, f"{value} is below 1")
    if output >= context:
        raise ParameterError(
            "output", f"{output} leaves no prompt in a context of {context}; lower it"
        )
    if footprint.context and context > footprint.context:
        raise ParameterError(
            "context",
            f"{context} is more than this model's {footprint.context} positions; lower it",
        )


def _room(
    f: Footprint, device: Device, kv: float, copies: float, context: int
) -> tuple[bool | None, float | None]:
    if device.memory is None:
        return None, None
    left = device.memory * USABLE - f.weight_bytes
    per_sequence = f.kv_bytes(context) * copies + f.state_bytes
    room = max(0.0, left) / per_sequence * context if per_sequence else None
    return kv <= left, room


def _bound(device: Device, ops: float, size: float) -> Bound:
    read = size / device.read_bytes
    compute = None if device.ops is None else ops / device.ops
    return Bound(max(read, compute or 0.0), read, compute, ops, size)


def _prefill(f: Footprint, device: Device, tokens: int) -> Bound:
    """The bound of one prefill. The LM head runs for the last token only."""
    ops = tokens * f.prompt_ops_token + f.prompt_attention_ops(tokens)
    ops += f.ops_token - f.prompt_ops_token
    return _bound(device, ops, f.read_bytes(tokens) + f.kv_bytes(tokens))


def _denoise(f: Footprint, device: Device, context: int, output: int, batch: int) -> Bound | None:
    """The bound of one denoising step of the batch: every position of the block, or of prompt and
    canvas, sees the whole context; the LM head runs for the block, or for the canvas."""
    if f.denoised is None:
        return None
    rows, drawn = (f.denoised, f.denoised) if f.denoised else (context, output)
    ops = rows * (f.prompt_ops_token + f.attention_ops(context))
    ops += drawn * (f.ops_token - f.prompt_ops_token)
    size = f.read_bytes(batch * rows) + batch * f.kv_bytes(context)
    return _bound(device, batch * ops, size)


def _decode(f: Footprint, device: Device, context: float, batch: int, copies: float) -> Bound:
    ops = batch * (f.ops_token + f.attention_ops(context))
    return _bound(device, ops, f.read_bytes(batch) + batch * f.kv_bytes(context) * copies)


def _compute_bound(f: Footprint, device: Device, context: float, copies: float) -> int | None:
    """The smallest batch whose decode step takes longer to compute than to read: doubling, then
    bisection. None: reading the KV cache grows as fast as the work, at any batch."""

    def compute(batch: int) -> bool:
        return _decode(f, device, context, batch, copies).limit == "compute"

    high = 1
    while not compute(high):
        high *= 2
        if high > MAX_BATCH:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if compute(middle) else (middle, high)
    return high
