"""Messages between the two processes: every one comes back equal, and nothing else is accepted."""

from __future__ import annotations

import asyncio
from dataclasses import FrozenInstanceError, fields, is_dataclass
from types import SimpleNamespace
from typing import Any, get_args

import msgpack
import pytest

from verbatim.base.errors import NOT_FINITE, OUT_OF_MEMORY
from verbatim.base.params import SamplingParams
from verbatim.base.records import Finish, Timings, Usage
from verbatim.engine.calls.async_engine import AsyncEngine
from verbatim.server.api.common.to_params import check_finish
from verbatim.server.problem import Problem
from verbatim.server.process import messages, wire
from verbatim.server.process.engine_session import EngineSession
from verbatim.server.process.message_codec import (
    WireError,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from verbatim.server.process.messages import (
    Abort,
    Accepted,
    Close,
    Deltas,
    Detokenize,
    Detokenized,
    Failed,
    FromEngine,
    Generate,
    Generated,
    Heartbeat,
    Inspect,
    Inspected,
    Loading,
    ModelFacts,
    Ready,
    Refused,
    Start,
    ToEngine,
    Tokenize,
    Tokenized,
    TopLogprob,
    WireChoice,
    WireDelta,
    WireFinish,
    WireLogprob,
)
from verbatim.server.process.results import wire_finish
from verbatim.testing.fakes import fake_parts

FINISH = WireFinish("stop", "\n\n", stop_string=True)
LOGPROBS = [
    WireLogprob(7, None, b"\xff", None),
    WireLogprob(8, -0.5, b"a", [TopLogprob(9, -1.5, b"b")]),
]
EXPLAIN = [{"token": 8, "top": [], "row": None, "mask": None}]
FACTS = ModelFacts(
    "m", "d", "vb-1", 64, 260, 8, True, True, False, "hermes", frozenset((256, 257)), False, 1
)
TO_ENGINE: list[ToEngine] = [
    Start("m", None, True, {"kv_blocks": 8, "suffix_tenants": ["a"]}, "", "m", 0.5),
    Generate("r", "t", {"seed": 2**63 - 1, "logit_bias": {5: -1.0}}, True, "text"),
    Generate("r", "t", {}, False, [1, 2, 3], num_ctx=5, open_end=True, embedding=True),
    Generate(
        "r", "t", {}, False, "q", embedding=True, document="d", prompt_name="p", truncate=True
    ),
    Generate("r", "t", {}, False, messages=[{"role": "user", "content": "hi"}], template={}),
    Tokenize("r", "t", "text", add_special=False, parse_special=True),
    Detokenize("r", "t", [1, 2]),
    Inspect("r", "t", "step", {"row": b"\x00", "prompt": [1], "rest": True}),
    Abort("r"),
    Close(),
]
FROM_ENGINE: list[FromEngine] = [
    Loading(),
    Ready(FACTS),
    Failed("no such file"),
    Heartbeat({"running": 1, "rate": 0.5}, "# HELP"),
    Heartbeat({}),
    Accepted("r", "prompt"),
    Deltas(
        [
            WireDelta("r", 0, "a", [8], None, [], [], "so", 1),
            WireDelta("s", 1, "", [], FINISH, LOGPROBS, EXPLAIN, ""),
        ]
    ),
    Generated(
        "r",
        [WireChoice(0, "a", [8], FINISH, LOGPROBS[1:], EXPLAIN, None, 0, "so")],
        Usage(1, 2, 3, 4, 5, 6),
        Timings(0.5, 1.0, 2, 1, -0.5),
        2**63 - 1,
        "vb-1",
        ["temperature: high"],
        LOGPROBS,
        {"sha256": "x"},
        [0.5, 1.0],
    ),
    Tokenized("r", [1, 2], [b"\x80", b"b"], []),
    Detokenized("r", "text", []),
    Inspected("r", {"bytes": b"\xff", "lengths": [1]}),
    Refused("r", "invalid_parameter", "top_p: 2 is above 1", "top_p", None),
]


def raw(message: Any) -> list[Any]:
    values: list[Any] = msgpack.unpackb(encode(message), strict_map_key=False)
    return values


def test_the_examples_are_complete() -> None:
    assert {type(m) for m in TO_ENGINE} == set(get_args(ToEngine))
    assert {type(m) for m in FROM_ENGINE} == set(get_args(FromEngine))


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda m: type(m).__name__)
def test_a_message_to_the_engine_comes_back_equal(message: ToEngine) -> None:
    assert decode_to_engine(encode(message)) == message
    with pytest.raises(WireError, match="no such message here"):
        decode_from_engine(encode(message))


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda m: type(m).__name__)
def test_a_message_from_the_engine_comes_back_equal(message: FromEngine) -> None:
    assert decode_from_engine(encode(message)) == message
    with pytest.raises(WireError, match="no such message here"):
        decode_to_engine(encode(message))


@pytest.mark.parametrize("message", [*TO_ENGINE, *FROM_ENGINE], ids=lambda m: type(m).__name__)
def test_a_message_is_frozen(message: Any) -> None:
    assert is_dataclass(message)
    for field in fields(message):
        with pytest.raises(FrozenInstanceError):
            setattr(message, field.name, None)


@pytest.mark.parametrize("message", [*TO_ENGINE, *FROM_ENGINE], ids=lambda m: type(m).__name__)
def test_a_wrong_type_or_number_of_fields_is_rejected(message: Any) -> None:
    """Every field in turn holds a value of a type that no field has (a msgpack extension)."""
    decode = decode_to_engine if type(message) in get_args(ToEngine) else decode_from_engine
    row = raw(message)
    for wrong in ([*row, None], row[:-1] if len(row) > 1 else [*row, 0]):
        with pytest.raises(WireError, match="fields; received"):
            decode(msgpack.packb(wrong))
    for at, field in enumerate(fields(message), 1):
        with pytest.raises(WireError, match=rf"{type(message).__name__}\.{field.name} cannot be"):
            decode(msgpack.packb([*row[:at], msgpack.ExtType(5, b"x"), *row[at + 1 :]]))


WRONG: list[tuple[list[Any], str]] = [
    (["Deltas", [["r", 0, "a", ["8"], None, [], [], "", 0]]], "a list of .*int.* holds a str"),
    (["Deltas", [["r", 0, "a", [8], None, [3], [], "", 0]]], "holds a int"),
    (["Deltas", [["r", "0", "a", [8], None, [], [], "", 0]]], "WireDelta.choice cannot be a str"),
    (["Deltas", [["r", 0, "a", [8], [], [], [], "", 0]]], "WireFinish has 5 fields; received 0"),
    (
        ["Deltas", [["r", 0, "", [8], None, [[8, 0.0, b"", [[9, 0.5]]]], [], "", 0]]],
        "TopLogprob has 3 fields",
    ),
    (["Deltas", [{}]], "holds a dict"),
    (["Accepted", "r", True, 3], "Accepted.text cannot be a bool"),
    (["Ready", []], "ModelFacts has [0-9]+ fields; received 0"),
    (["Failed", b"bytes"], "Failed.message cannot be a bytes"),
    (["Nothing", 1], "no such message here: 'Nothing'"),
]


@pytest.mark.parametrize(("row", "why"), WRONG)
def test_an_ill_typed_message_is_rejected(row: list[Any], why: str) -> None:
    for _ in range(2):  # twice: types that passed are cached, types that failed are not
        with pytest.raises(WireError, match=why):
            decode_from_engine(msgpack.packb(row))


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x92\x01", b"\x90", b"\x80", b"\x93\x01\x02\x03", b"\x91\xa1\xff"]
)
def test_bytes_that_are_no_message_are_rejected(body: bytes) -> None:
    with pytest.raises(WireError):
        decode_from_engine(body)


def test_an_object_is_never_sent() -> None:
    with pytest.raises(TypeError, match="Problem is not a record of a message"):
        encode(Heartbeat({"x": Problem("internal_error", "no")}))
    assert not hasattr(messages, "pickle")


def test_a_frame_is_read_whole_or_not_at_all() -> None:
    async def main() -> None:
        frame = wire.pack(Abort("r"))
        for cut in range(len(frame) + 1):
            reader = asyncio.StreamReader()
            reader.feed_data(frame[:cut])
            reader.feed_eof()
            read = await wire.read(reader, decode_to_engine)
            assert read == (Abort("r") if cut == len(frame) else None)
        reader = asyncio.StreamReader()
        reader.feed_data(b"\xff" * 8)
        with pytest.raises(WireError, match="above the limit"):
            await wire.read(reader, decode_to_engine)

    asyncio.run(main())


async def test_an_answer_above_the_limit_of_a_frame_is_refused_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The HTTP process would kill the engine, and all other requests with it."""
    sent: list[bytes] = []
    writer: Any = SimpleNamespace(is_closing=lambda: False, write=sent.append)
    engine = AsyncEngine.from_loaded(fake_parts(pipeline=True))
    session = EngineSession(engine, wire.Outbox(writer), Start("m", None, True, {}, "", "m", 1.0))
    monkeypatch.setattr(wire, "MAX_FRAME", 20_000)
    params = {"ignore_eos": True, "temperature": 0.0, "logprobs": 20, "explain": 20}
    tasks = []
    try:
        for name, length in (("large", 16), ("small", 4)):
            asked = {**params, "max_tokens": length}
            session.submit(Generate(name, "t", asked, False, "hello"))
            tasks.append(session._open[name].task)
        for task in tasks:
            assert task is not None
            await task
    finally:
        await asyncio.to_thread(engine.close)
    await asyncio.sleep(0)  # the outbox writes at the end of the loop's iteration
    found = [decode_from_engine(body) for body in wire.split(b"".join(sent))]
    ends = {m.request_id: m for m in found if isinstance(m, (Generated, Refused))}
    assert isinstance(ends["small"], Generated)
    assert isinstance(refused := ends["large"], Refused)
    assert refused.problem().status == 400
    assert "log-probabilities and explanations" in refused.message
    assert "lower max_tokens, n, logprobs" in refused.message


def test_refused_keeps_every_field_of_its_problem() -> None:
    problem = Problem("overloaded", "the queue is full", "n", 1.5)
    back = Refused.of("r", problem).problem()
    assert vars(back) == vars(problem)


def test_a_lack_of_device_memory_or_a_broken_model_is_no_fault_of_the_client() -> None:
    params = SamplingParams(banned_token_ids=(1,))
    masked = wire_finish(Finish("error", "no token is left"), params, stopped_by_token=False)
    full = wire_finish(Finish("error", f"{OUT_OF_MEMORY}a step"), params, stopped_by_token=False)
    broken = wire_finish(Finish("error", f"{NOT_FINITE} at"), params, stopped_by_token=False)
    codes = {"invalid_parameter": masked, "unavailable": full, "not_finite": broken}
    for (code, finish), status in zip(codes.items(), (400, 503, 500), strict=True):
        with pytest.raises(Problem) as caught:
            check_finish(finish, {})
        assert (caught.value.code, caught.value.status) == (code, status)


def test_wire_finish_records_whether_a_stop_string_matched() -> None:
    params = SamplingParams(stop=["</s>", "json_schema"], json_schema=True)
    assert wire_finish(Finish("stop", "</s>"), params, stopped_by_token=False).stop_string
    assert not wire_finish(Finish("stop", "</s>"), params, stopped_by_token=True).stop_string
    assert not wire_finish(
        Finish("stop", "json_schema"), params, stopped_by_token=False
    ).stop_string
    assert wire_finish(Finish("length", "max_tokens"), params, False) == WireFinish(
        "length", "max_tokens"
    )


def test_an_error_names_the_parameters_at_fault() -> None:
    params = SamplingParams(banned_token_ids=[1], min_tokens=2)
    assert wire_finish(Finish("error", "regex: no match"), params, False).fields == ["regex"]
    found = wire_finish(Finish("error", "nothing is left to draw"), params, False).fields
    assert found == ["banned_token_ids", "min_tokens"]
