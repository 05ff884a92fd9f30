"""Why each token was drawn. In: records (Choice.explain, one dict per token). Out: tables,
what-ifs.

sampling/record.py writes a record in the very run that draws the token. It is plain, JSON-ready:

    position, token      index in the sequence, drawn id
    vocab, best          ids in the row; the id with the largest logit
    logit, logprob       of the token in the model's own distribution (before any setting)
    rank, margin         1 is the best; its logit minus the best other logit (negative: not best)
    final_prob           its probability after all stages (null at temperature 0)
    entropy              of the model's own distribution, in nats
    temperature, key     as drawn; the 64-bit noise key in hexadecimal
    score                the winning score: d + noise (temperature 0: the processed logit)
    runner_up, lead      the id with the second best score, and the difference
    stages               in order, each {name, removed, left, removed_top}: number of ids removed,
                         and which of the top
    top                  the N best by logit, each {id, logit, logprob, processed (after bias and
                         penalties; null: banned), removed_by (a stage or null), final_prob, noise,
                         score (null: removed)}
    row, mask, prompt_len, withheld    inputs of a what-if: the raw float32 row and the grammar's
                         mask in base64

`row` is kept only with receipt=True and one choice, for the first 64 tokens, because it takes
four bytes per vocabulary id; a server sends it only with explain_rows. Under beam search there
is no noise: `score`, `lead` and `runner_up` are missing.

what_if() draws the recorded steps again under other settings, without the model. Each step keeps
its recorded history: it answers "what would have been drawn here", not "how would the output
have continued". Invariant: it never estimates. An insufficient record is an error, and the
recorded token must come out again under the recorded settings first.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verbatim.base.errors import ParameterError, RequestError
from verbatim.base.json_io import JsonMapping, JsonObject
from verbatim.base.params import FIELDS, FILTERS, SamplingParams
from verbatim.base.records import BROKEN, NOTHING, Drawn, DrawSpec

Text = Callable[[int], str | bytes]  # a token as text, or as bytes if it may be invalid UTF-8

# Parameters that decide how a token is drawn. The others decide when a completion ends, or what is
# reported.
# fmt: off
CHANGEABLE = (
    "logit_bias", "allowed_token_ids", "banned_token_ids", "min_tokens", "repetition_penalty",
    "frequency_penalty", "presence_penalty", "penalty_range", "dry_multiplier", "dry_base",
    "dry_allowed_length", "dry_range", "dry_breakers", "no_repeat_ngram", "temperature", *FILTERS,
    "xtc_threshold", "seed",
)
# fmt: on


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One recorded step, drawn again. `record` is the new record, to compare stage by stage."""

    position: int
    before: int
    after: int
    record: JsonObject

    @property
    def changed(self) -> bool:
        return self.before != self.after


def _check_changes(params: SamplingParams, changes: Mapping[str, object]) -> None:
    for name in changes:
        if name not in FIELDS:
            raise ParameterError(name, "no such parameter")
        if name not in CHANGEABLE:
            raise ParameterError(
                name, "cannot be changed by a what-if: it does not decide how a token is sampled"
            )
    if params.num_beams > 1:
        raise ParameterError(
            "num_beams", "a what-if needs sampled tokens, and beam search samples none"
        )
    if params.dry_multiplier and "dry_breakers" in changes:
        raise ParameterError(
            "dry_breakers", "cannot be changed by a what-if where the record was made with DRY on"
        )


def what_if(
    records: Sequence[JsonMapping],
    params: SamplingParams,
    changes: JsonMapping,
    *,
    prompt_ids: Sequence[int] | None = None,
    breakers: tuple[tuple[int, ...], ...] | None = None,
) -> list[WhatIf]:
    """Draw recorded steps again under `params` (those of the recorded request) with `changes`.

    `prompt_ids` is needed if a penalty reads the history, `breakers`
    (sampling.dry_breakers.breakers_of) if DRY is on."""
    _check_changes(params, changes)
    then = params.with_(**changes)
    past = _past(records, prompt_ids, needed=params.needs_history or then.needs_history)
    if breakers is None and (params.dry_multiplier or then.dry_multiplier):
        raise ParameterError(
            "dry_breakers", "a what-if with DRY needs `breakers`, the breaker strings as token ids"
        )
    out = []
    for record, history in zip(records, past, strict=True):
        again = _draw(record, params, history, breakers or (), key=int(record["key"], 16))
        if again.token != record["token"]:
            raise RequestError(
                f"sampling the record at position {record['position']} again gives token "
                f"{again.token} instead of {record['token']}: these are not the settings that it "
                "was recorded with"
            )
        if params.min_tokens <= record["position"] - record["prompt_len"] < then.min_tokens:
            raise ParameterError(
                "min_tokens",
                f"the record at position {record['position']} has no end-of-sequence tokens; "
                f"record it with min_tokens={then.min_tokens}",
            )
        key = int(record["key"], 16) if "seed" not in changes else _key(then)
        drawn = _draw(record, then, history, breakers or (), key=key)
        assert drawn.explain is not None
        out.append(WhatIf(record["position"], record["token"], drawn.token, drawn.explain))
    return out


def _key(params: SamplingParams) -> int:
    from verbatim.sampling.draw import noise_key

    if params.seed is None:
        raise ParameterError("seed", "a what-if needs a number")
    return noise_key(params.seed, 0)


def _draw(
    record: JsonMapping,
    params: SamplingParams,
    history: tuple[int, ...],
    breakers: tuple[tuple[int, ...], ...],
    *,
    key: int,
) -> Drawn:
    """Draw one step with the sampler itself, the same code as the first time."""
    from verbatim.sampling.pipeline import Row, sample_rows

    row, mask = _inputs(record, params)
    shown = params.with_(explain=max(1, len(record["top"])), receipt=True)
    spec = DrawSpec(
        *(shown, key, record["prompt_len"]),
        withheld=tuple(record["withheld"]),
        breakers=breakers,
        step=record.get("denoising_step", -1),
    )
    drawn = sample_rows(row[None, :], [Row(spec, record["position"], history, mask)])[0]
    if drawn.token == BROKEN:
        raise RequestError(
            f"the logits at position {record['position']} are not finite numbers; the record is "
            "damaged"
        )
    if drawn.token == NOTHING:
        raise RequestError(
            f"at position {record['position']} these settings leave no token to sample"
        )
    return drawn


def _inputs(record: JsonMapping, params: SamplingParams) -> tuple[np.ndarray, bytes | None]:
    if record.get("row") is None:
        raise RequestError(
            f"the record at position {record['position']} does not hold its whole row of logits, "
            "so a what-if could be wrong; record it with explain and receipt=True, over HTTP also "
            "explain_rows (the first 64 tokens of a single answer keep their row)"
        )
    try:
        data = base64.b64decode(record["row"], validate=True)
    except ValueError:
        data = b""
    if len(data) != 4 * record["vocab"]:
        raise RequestError(
            f"the record at position {record['position']} is damaged: {len(data)} bytes for "
            f"{record['vocab']} logits"
        )
    row = np.frombuffer(data, "<f4")
    if params.structured and record["mask"] is None:
        raise RequestError(
            "the record holds no grammar mask, and these settings ask for a structure"
        )
    mask = None if record["mask"] is None else base64.b64decode(record["mask"])
    return row.astype(np.float32), mask


def _past(
    records: Sequence[JsonMapping], prompt_ids: Sequence[int] | None, *, needed: bool
) -> list[tuple[int, ...]]:
    """The tokens before each record. Needed only if a penalty reads them; then no record may be
    missing."""
    if not needed:
        return [()] * len(records)
    if any("denoising_step" in record for record in records):
        raise RequestError(
            "a penalty depends on the tokens so far, and a block of a diffusion model has them in "
            "another order: no what-if with a penalty"
        )
    if prompt_ids is None:
        raise RequestError(
            "a penalty depends on the tokens so far: give prompt_ids, and all records from the "
            "first token on"
        )
    known = list(prompt_ids)
    out = []
    for record in records:
        if record["position"] != len(known):
            raise RequestError(
                f"the record at position {record['position']} should be at {len(known)}: one is "
                "missing before it"
            )
        out.append(tuple(known))
        known.append(record["token"])
    return out


# --- tables

MIN_BAR, MAX_BAR = 5, 24  # columns of a bar

# What the words and columns mean.
LEGEND = (
    "p: the model's own probability of the token; rank 1 is its best; entropy: how undecided it is",
    "stage: how many tokens each sampler stage removed and left; temperature only scales",
    "among the listed: removed tokens that the table below lists; final p: p after all stages",
    "score: scaled logit relative to the best, plus the seed's noise; the largest is sampled",
    "lead: the distance of its score to the next",
    "*: the sampled token; processed: the logit after bias and penalties",
)


def headline(record: JsonMapping, text: Text, *, screen: int = 0) -> str:
    """One token in one line, or in two where the line is longer than `screen` columns.

    position 12  ' Paris' (7042)  p 81.2 %, rank 1, entropy 0.92 nats, lead 0.40 over ' the'
    """
    token = record["token"]
    chance, entropy = percent(math.exp(record["logprob"])), record["entropy"]
    parts = [f"p {chance}", f"rank {record['rank']}", f"entropy {entropy:.2f} nats"]
    if record.get("lead") is not None:
        parts.append(f"lead {record['lead']:.2f} over {_shown(text, record['runner_up'])}")
    head = f"position {record['position']}  {_shown(text, token)} ({token})"
    facts = ", ".join(parts)
    return f"{head}\n  {facts}" if 0 < screen < len(head) + 2 + len(facts) else f"{head}  {facts}"


def stage_columns(record: JsonMapping, text: Text) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(names, rows) of what each stage removed. Disabled stages are not listed. The last column has
    the removed tokens that top_columns shows; it is left out where no stage removed one."""
    rows = [
        (
            s["name"],
            "-" if s["name"] == "temperature" else str(s["removed"]),  # it only scales
            str(s["left"]),
            " ".join(_shown(text, i) for i in s["removed_top"]),
        )
        for s in record["stages"]
    ]
    names = ("stage", "removed", "left", "among the listed")
    shown = 4 if any(row[3] for row in rows) else 3
    return names[:shown], [row[:shown] for row in rows]


def top_columns(record: JsonMapping, text: Text) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(names, rows) of the best tokens by logit, from logit to score. The drawn token is marked
    with *. A column that says nothing here is left out: all empty, or `processed` equal to
    `logit`."""
    top = record["top"]
    cells = {
        "": ["*" if c["id"] == record["token"] else "" for c in top],
        "token": [_shown(text, c["id"]) for c in top],
        "id": [str(c["id"]) for c in top],
        "logit": [_number(c["logit"]) for c in top],
        "p": [percent(math.exp(c["logprob"])) for c in top],
        "processed": [_number(c["processed"]) for c in top],
        "final p": ["-" if (p := c["final_prob"]) is None else percent(p) for c in top],
        "noise": [_number(c["noise"]) for c in top],
        "score": [_number(c["score"]) for c in top],
        "removed by": [c["removed_by"] or "" for c in top],
    }
    if cells["processed"] == cells["logit"]:
        del cells["processed"]
    kept = {name: values for name, values in cells.items() if set(values) - {"", "-"}}
    return tuple(kept), list(zip(*kept.values(), strict=True))


def render(record: JsonMapping, text: Text, *, screen: int = 0) -> str:
    """Everything about one token, as plain lines. `screen`: columns of the terminal, whose rest
    shows each candidate's probability as a bar; 0: no bars, and lines of any length."""
    lines: list[str] = []
    if record["stages"]:
        lines += columns(*stage_columns(record, text), (0, 3)).splitlines()
    names, rows = top_columns(record, text)
    left = [i for i, name in enumerate(names) if name in ("", "token", "removed by")]
    table = columns(names, rows, left).splitlines()
    used = max(map(len, table)) + 4  # the indent, and two columns before the bar
    if screen - used >= MIN_BAR:
        width = min(screen - used, MAX_BAR)
        for i, candidate in enumerate(record["top"], 1):
            drawn = bar(math.exp(candidate["logprob"]), width)
            table[i] = f"{table[i]:{used - 4}}  {drawn}".rstrip()
    lines += table
    return headline(record, text, screen=screen) + "\n" + "\n".join("  " + line for line in lines)


def bar(share: float, width: int) -> str:
    """A bar of at most `width` columns, in eighths of a column.

    >>> bar(0.5, 4), bar(1.0, 2), bar(0.0, 4)
    ('██', '██', '')
    """
    full, rest = divmod(round(8 * width * min(max(share, 0.0), 1.0)), 8)
    return "█" * full + ("▏▎▍▌▋▊▉"[rest - 1] if rest else "")


def render_what_if(results: Sequence[WhatIf], text: Text) -> str:
    """One line per step, with the new token where it differs."""
    rows = []
    for r in results:
        p, stages = r.record["final_prob"], r.record["stages"]
        now = _shown(text, r.after) if r.changed else "same"
        left = str(stages[-1]["left"] if stages else r.record["vocab"])
        final = percent(p) if p is not None else "-"
        rows.append((str(r.position), _shown(text, r.before), now, final, left))
    changed = [r for r in results if r.changed]
    table = columns(("position", "recorded", "now", "final p", "ids left"), rows, left=(1, 2))
    lines = [table, f"{len(changed)} of {len(results)} tokens would differ"]
    if changed and changed[0] is not results[-1]:
        lines.append(
            f"steps after position {changed[0].position} are conditional on the recorded text "
            "before them"
        )
    return "\n".join(lines)


def columns(names: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> str:
    """Aligned columns: right-aligned, except those in `left`."""
    widths = [max(len(row[i]) for row in (names, *rows)) for i in range(len(names))]
    lines = []
    for row in (names, *rows):
        pairs = enumerate(zip(row, widths, strict=True))
        cells = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in pairs]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _shown(text: Text, token: int) -> str:
    return quoted(text(token))


def quoted(token: str | bytes) -> str:
    """A token for a line of text: quoted and escaped; bytes that are not valid UTF-8 as \\x..

    >>> print(quoted(" Paris".encode()), quoted(b"\\xf0\\x9f"))
    ' Paris' '\\xf0\\x9f'
    """
    if isinstance(token, bytes):
        try:
            return repr(token.decode("utf-8"))
        except UnicodeDecodeError:
            return repr(token)[1:]
    return repr(token)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def percent(p: float) -> str:
    return f"{100 * p:.2f} %" if p >= 0.0001 else f"{100 * p:.1e} %"
