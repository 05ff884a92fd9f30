"""Types as schemas: Pydantic models, dataclasses, TypedDicts, enums; answers parsed into them."""

from __future__ import annotations

import dataclasses
import enum
import json
import pickle
import typing
from typing import Any

import jsonschema
import pydantic
import pytest
import typing_extensions

from verbatim import LLM, Choice, Completion, Finish, RequestError, SamplingParams, UnsupportedError
from verbatim.base.schema_types import schema_of
from verbatim.testing.fakes import server_parts

SHORT = SamplingParams(max_tokens=5, seed=1, ignore_eos=True)


@pytest.fixture
def llm() -> Any:
    with LLM.from_loaded(server_parts("pipeline"), kv_blocks=64) as llm:
        yield llm


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


class Place(pydantic.BaseModel):
    name: str


class Visit(typing.TypedDict):
    mood: Mood
    days: list[int]
    place: typing.NotRequired[Place]


class Chain(typing_extensions.TypedDict):
    value: typing.Literal["a", 1]
    next: typing.Optional["Chain"]  # noqa: UP037, UP045


@dataclasses.dataclass
class Options:
    flags: set[str]
    sizes: dict[str, float]
    pair: tuple[int, bool]
    note: str | None = None


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Place, {"name": "x"}, {"name": 1}),
        (Visit, {"mood": "good", "days": [1]}, {"mood": "x", "days": [1]}),
        (Visit, {"mood": "bad", "days": [], "place": {"name": "x"}}, {"mood": "bad"}),
        (Chain, {"value": 1, "next": {"value": "a", "next": None}}, {"value": 2, "next": None}),
        (Options, {"flags": ["a"], "sizes": {"b": 0.5}, "pair": [1, True]},
         {"flags": ["a", "a"], "sizes": {}, "pair": [1, True]}),
        (list[Place], [{"name": "x"}], [1]),
        (int | None, None, "x"),
        (dict[Mood, int], {"good": 1}, {"x": 1}),
        (typing.Annotated[str, pydantic.Field(min_length=1)], "x", 1),
    ],
)  # fmt: skip
def test_a_type_is_a_schema(kind: Any, good: Any, bad: Any) -> None:
    schema = json.loads(str(SamplingParams(json_schema=kind).json_schema))
    jsonschema.validate(good, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(bad, schema)


@pytest.mark.parametrize(
    ("kind", "document", "value"),
    [
        (Place, {"name": "x"}, Place(name="x")),
        (Visit, {"mood": "good", "days": [1], "place": {"name": "x"}},
         {"mood": Mood.GOOD, "days": [1], "place": Place(name="x")}),
        (Chain, {"value": 1, "next": {"value": "a", "next": None}},
         {"value": 1, "next": {"value": "a", "next": None}}),
        (Options, {"flags": ["a"], "sizes": {"b": 1}, "pair": [1, True]},
         Options({"a"}, {"b": 1.0}, (1, True))),
        (list[Place], [{"name": "x"}], [Place(name="x")]),
        (int | Place | None, {"name": "x"}, Place(name="x")),
        (int | None, None, None),
        (dict[Mood, int], {"good": 1}, {Mood.GOOD: 1}),
        ({"type": "object"}, {"a": [1]}, {"a": [1]}),
    ],
)  # fmt: skip
def test_an_answer_is_parsed_into_the_type_of_its_schema(
    kind: Any, document: Any, value: Any
) -> None:
    params = SamplingParams(json_schema=kind).with_(seed=1).with_origins({})
    text = json.dumps(document)
    answer = Choice(0, text, (), Finish("stop"), json_schema=params.json_schema)  # type: ignore[arg-type]
    assert answer.parsed == value
    assert type(answer.parsed) is type(value)
    assert pickle.loads(pickle.dumps(answer)).parsed == document  # the type may not be importable


def test_a_cut_answer_is_not_parsed(llm: LLM) -> None:
    done = llm.generate("x", SamplingParams(json_schema=Visit, max_tokens=2, seed=3))
    with pytest.raises(RequestError, match=r"not a whole JSON document \(it ended by 'length'\)"):
        _ = done.parsed
    assert llm.generate("x", SHORT).parsed is None


def test_a_type_without_a_schema_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"complex.*has no JSON schema here"):
        schema_of(complex)
    with pytest.raises(UnsupportedError, match="keys of a JSON object are strings"):
        schema_of(dict[int, int])


def test_a_model_as_schema_gives_its_documents(llm: LLM) -> None:
    params = SamplingParams(json_schema=dict[Mood, bool], max_tokens=200, seed=3)
    done: Completion = llm.generate("x", params)
    assert set(json.loads(done.text)) <= {"good", "bad"}
    assert done.parsed == {Mood(key): value for key, value in json.loads(done.text).items()}
