"""`verbatim plan MODEL`: memory, roofline bounds and cost of a model on a device, from its config
alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from verbatim.base.errors import ModelError, ParameterError
from verbatim.cli.lib.command_class import answered, argument, as_command, flag
from verbatim.cli.lib.options import JSON, model_or_default
from verbatim.cli.lib.tables import console, section
from verbatim.cli.lib.terminal import note, write_json

if TYPE_CHECKING:
    from pathlib import Path

    from verbatim.diagnose.capacity import Bound, Plan
    from verbatim.diagnose.devices import Device


@as_command(answered("--gpu", answer="write --device NAME, such as --device h100"))
def command(
    model: str | None = argument("[MODEL]"),
    device: str = flag(
        "h200, h100, a100, a10, l4, 4090, or GB/s,TFLOPS[,GB]; this: the GPU of this machine if"
        " the cuda backend can use it, else its CPU",
        default="this",
        metavar="NAME",
    ),
    context: int | None = flag("tokens of prompt and output together [4096]"),
    output: int | None = flag("how many of these are output [256]"),
    batch: int = flag("sequences at once", default=1),
    quant: str | None = flag(
        "type of the weights; packed: the blocks of quantised safetensors [as the config or file"
        " says]",
        metavar="TYPE",
    ),
    kv_type: str = flag("type of the KV cache", default="f16", metavar="TYPE"),
    tp: int = flag("devices that share each matrix", default=1),
    price: float | None = flag("price of one device for one hour"),
    as_json: bool = JSON,
) -> int:
    """What MODEL needs, and how fast any engine could run it: memory, roofline bounds, cost.

    MODEL is a config.json, a directory with one, a .gguf file, a model in the cache, or a parameter
    count such as 7B. No weight is read. All times are lower bounds, from the bytes that must be
    read and the operations that must be done; on this machine they are estimated, because its
    limits are measured. On a GPU the bytes are those of the cuda backend, which also has an
    unpacked copy of quantised weights where memory allows it.
    """
    from verbatim.diagnose.capacity import make_plan
    from verbatim.diagnose.footprint import read_footprint

    if price is not None and not 0 < price < 1e9:
        raise ParameterError("price", f"{price:g} is not a price above 0 and below 1e9")
    name = model_or_default(model)
    footprint = read_footprint(name, quant=quant, kv_type=kv_type, resolve=_local)
    if context is None:
        context = min(4096, footprint.context or 4096)
    if output is None:
        output = min(256, max(1, context // 2))
    on = _device(device, quiet=as_json)
    if on.cuda and on.memory is not None:
        footprint = footprint.on_gpu(on.memory * tp)
    plan = make_plan(footprint, on, context=context, output=output, batch=batch, tp=tp, price=price)
    if as_json:
        write_json(plan_json(plan))
    else:
        _print(plan)
    return 1 if plan.fits is False else 0


def _local(model: str) -> Path:
    """The path of a model in the cache. `plan` never downloads weights."""
    from verbatim.hub.catalog import resolve

    try:
        return resolve(model, offline=True)
    except ModelError as error:
        if "verbatim pull" not in error.message:
            raise
        why = f"{model} is not in the cache, and plan needs a config.json or a local file"
        raise ModelError(f"{why}; fetch it once with `verbatim pull {model}`") from None


def _device(name: str, *, quiet: bool) -> Device:
    from verbatim.diagnose.devices import THIS, parse_device

    if name.lower() != THIS:
        return parse_device(name)
    from verbatim.diagnose.this_device import this_device
    from verbatim.hub.catalog import cache_dir

    return this_device(cache_dir(), note=lambda text: None if quiet else note(text))


# --------------------------------------------------------------------------------------- printing


def _print(plan: Plan) -> None:
    f, d, out = plan.footprint, plan.device, console()
    peak = "peak unknown" if d.ops is None else f"{_number(d.ops / 1e12)} T{d.unit}"
    size = "" if d.memory is None else f", {_number(d.memory / 1e9)} GB"
    ridge = "" if d.ridge is None else f"; ridge at {_number(d.ridge)} operations per byte"
    many = f"{d.count} × " if d.count > 1 else ""
    together = " together" if d.count > 1 else ""
    limits = f"{_number(d.read_bytes / 1e9)} GB/s, {peak}{size}{together}{ridge}"
    device = f"{many}{d.name} ({d.kind})"
    head = [("model", f.name), ("", f.shape), ("device", device), ("", limits)]
    section(out, "", head, wide=1)
    section(out, "Memory", _memory_rows(plan), right=(1,), wide=2)
    header = ("", "estimated" if d.estimated else "at least", "limit", "read", "compute", "op/byte")
    section(out, "Time", _time_rows(plan), right=(1, 3, 4, 5), header=header)
    section(out, "Derived", _derived_rows(plan), right=(1,), wide=2)


def _fits_row(plan: Plan, needed: float, memory: float) -> tuple[str, str, str]:
    from verbatim.diagnose.capacity import USABLE

    of = f"of {_bytes(memory * USABLE)}, {USABLE:.0%} of {_bytes(memory)}"
    fits = "fits" if plan.fits else "DOES NOT FIT"
    return fits, _bytes(needed), f"{of}; the rest is for activations"


def _memory_rows(plan: Plan) -> list[tuple[str, str, str]]:
    from verbatim.backend.cpu.repack import MEMORY
    from verbatim.backend.protocol import SMALL_MODEL, activation_type

    f, d = plan.footprint, plan.device
    stored = f"{_count(f.params)} parameters in {f.stored}"
    if f.kept:
        stored += f", {f.kept} on the GPU"
    elif f.stored in MEMORY:
        stored += f", {MEMORY[f.stored]:g} bytes each when unpacked"
    rows = [("weights", _bytes(f.weight_bytes), stored)]
    if (share := plan.ranks) is not None:
        whole = "attention whole on every rank"
        heads = f"query heads {' + '.join(map(str, share.heads))}" if share.heads else whole
        rows.append(("on a rank", _bytes(share.weight_bytes), f"of {d.count} at most; {heads}"))
        received = "that a rank receives per token of a step"
        rows.append(("gathered", _bytes(share.gathered_bytes), received))
    if not d.cuda:
        why = "below" if f.params < SMALL_MODEL else "from"
        name = activation_type("auto", f.params)
        rows.append(("activations", name, f"on a CPU, for models {why} 1 billion parameters"))
    if not f.attention:
        rows.append(("KV cache", "-", "unknown: a parameter count has no heads"))
        if plan.fits is False and d.memory is not None:
            rows.append(_fits_row(plan, f.weight_bytes, d.memory))
        return rows
    windows = {a.window for a in f.attention if a.window is not None}
    shapes = Counter((a.kv_heads, a.head_dim) for a in f.attention if a.kv_bytes)
    counts = [(count, *shape) for shape, count in shapes.items()]
    what = " + ".join(f"2 × {n} layers × {heads} key heads × {dim}" for n, heads, dim in counts)
    what += f" in {f.kv_type}"
    what += f"; windows of {', '.join(map(str, sorted(windows)))}" if windows else ""
    rows.append(("KV cache of a token", _bytes(f.kv_bytes(1)), what))
    if f.state_bytes:
        rows.append(("recurrent states", _bytes(f.state_bytes), "of a sequence, two cache blocks"))
    sequences = f"{plan.batch} sequence{'s' if plan.batch > 1 else ''}"
    held = plan.kv_sequence * plan.batch  # states included
    rows.append(("KV cache", _bytes(held), f"{sequences} of {plan.context:,} tokens"))
    if plan.fits is not None and d.memory is not None:
        rows.append(_fits_row(plan, f.weight_bytes + held, d.memory))
        room = f"sequences of {plan.context:,} tokens ({plan.room_tokens:,.0f} tokens of KV)"
        rows.append(("room", f"{plan.room_sequences:,}", room))
    return rows


def _time_rows(plan: Plan) -> list[tuple[str, ...]]:
    step = f"decode step of {plan.batch}" if plan.batch > 1 else "decode step"
    if plan.denoising is not None:
        length = plan.footprint.denoised
        what = f"block of {length}" if length else f"prompt and canvas of {plan.context:,}"
        return [_bound_row(f"denoising step, {what}", plan.denoising)]
    rows = [_bound_row(f"first token, prompt {plan.prompt:,}", plan.prefill)]
    if plan.footprint.attention:
        rows.append(_bound_row(f"{step} at context 0", plan.decode_empty))
        rows.append(_bound_row(f"{step} at {plan.context:,}", plan.decode))
    else:
        rows.append(_bound_row(step, plan.decode))
    return rows


def _bound_row(name: str, bound: Bound) -> tuple[str, ...]:
    compute = "-" if bound.ops_seconds is None else _time(bound.ops_seconds)
    times = _time(bound.seconds), bound.limit, _time(bound.read_seconds), compute
    return name, *times, _number(bound.intensity)


def _derived_rows(plan: Plan) -> list[tuple[str, str, str]]:
    if plan.denoising is not None:
        one = plan.batch / plan.denoising.seconds
        return [("one token a step", _number(one), "output tokens per second; more per step: more")]
    rate = plan.batch / plan.decode.seconds
    each = f", {_number(rate / plan.batch)} per sequence" if plan.batch > 1 else ""
    sure = not plan.device.estimated
    most = "at most" if sure else "estimated"
    rows = [(most, _number(rate), f"output tokens per second at the whole context{each}")]
    if plan.device.ops is not None:
        empty, full = plan.compute_bound_empty, plan.compute_bound
        never = f"never at {plan.context:,}: reading the KV cache outgrows the work"
        later = never if full is None else f"{full:,} at {plan.context:,}"
        least = "never" if empty is None else f"{empty:,}"
        rows.append(("compute-bound from", least, f"sequences at context 0; {later}"))
    of = f"of the time of {plan.prompt:,} prompt and {plan.output:,} output tokens"
    rows.append(("decode takes", f"{plan.decode_share:.0%}", of))
    if plan.input_price is not None and plan.output_price is not None:
        least = f"per million, {'at least' if sure else 'estimated'}"
        rows.append(("input tokens cost", f"{plan.input_price:,.4f}", least))
        rows.append(("output tokens cost", f"{plan.output_price:,.4f}", least))
    return rows


def _number(value: float) -> str:
    """Three significant digits: 0.98, 12.3, 4,800."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _bytes(size: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{_number(size / factor)} {unit}"
    return f"{size:.0f} B"


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor or unit == "µs":
            return f"{_number(seconds / factor)} {unit}"
    raise AssertionError


def _count(params: int) -> str:
    return f"{params / 1e9:.2f} B" if params >= 1e9 else f"{params / 1e6:.1f} M"


def plan_json(plan: Plan) -> dict[str, object]:
    """The Plan as plain data, with the properties that people read."""
    out = asdict(plan)
    for name in ("attention", "parts", "spec"):
        out["footprint"].pop(name)
    layers = len(plan.footprint.attention)
    out["footprint"] |= {"layers": layers, "kv_token_bytes": plan.footprint.kv_bytes(1)}
    for name in ("prefill", "decode_empty", "decode"):
        bound: Bound = getattr(plan, name)
        out[name] |= {"limit": bound.limit, "intensity": bound.intensity}
    out["device"]["ridge"] = plan.device.ridge
    out["prompt"] = plan.prompt
    out["output_tokens_per_second"] = plan.batch / plan.decode.seconds
    return out
