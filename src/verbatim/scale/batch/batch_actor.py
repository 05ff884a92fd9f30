"""Generate: a callable class for ray.data.Dataset.map_batches, with an engine in each actor.

A batch of rows comes in as columns; the same rows go out, in order, with an answer in new columns.
A row that fails has a message in the error column and no text; it never ends the job. Actors may
die: Ray Data runs their batches again, and a row has the same answer then.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from verbatim.base.errors import ParameterError, VerbatimError
from verbatim.base.json_io import JsonMapping, JsonObject
from verbatim.scale.start_error import did_not_start
from verbatim.server.batch_requests import BatchEngine, Line
from verbatim.server.settings import Limits, Settings


class BatchActor:
    """An engine that answers lists of requests, on an event loop in a thread of its own. Several
    threads may call answer() at once: their requests share the engine's batch."""

    def __init__(self, settings: Settings, concurrency: int) -> None:
        os.environ.setdefault("VERBATIM_LOG", "WARNING")
        self._concurrency = concurrency
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._thread.start()
        self._engine: BatchEngine = self._call(self._open(settings))

    @staticmethod
    async def _open(settings: Settings) -> BatchEngine:
        engine = BatchEngine(settings)
        await engine.start()
        return engine

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def answer(self, lines: Sequence[Line]) -> list[Line]:
        """One answer per request, in their order. The custom_ids are unique in `lines`."""
        answers: dict[str, Line] = {}

        def write(answer: Line) -> None:
            answers[answer["custom_id"]] = answer

        self._call(self._engine.answer(list(lines), self._concurrency, write))
        return [answers[line["custom_id"]] for line in lines]

    def close(self) -> None:
        self._call(self._engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def batch_settings(
    model: str,
    concurrency: int,
    engine: Mapping[str, object],
    *,
    test_engine: str = "",
    revision: str | None = None,
    offline: bool = False,
) -> Settings:
    # Two batches are in an actor at once; no limit of a public server applies.
    limits = Limits(max_queue=2 * concurrency, request_seconds=86_400.0)
    made = Settings(model=model, engine=dict(engine), revision=revision, offline=offline)
    return replace(made, limits=limits, store_items=0, test_engine=test_engine)


class Generate:
    """Answers the rows of a dataset.

        ds.map_batches(
            verbatim.scale.Generate,
            fn_constructor_kwargs={"model": "smollm2", "params": {"max_tokens": 64}},
            batch_size=64, compute=ray.data.ActorPoolStrategy(size=2), num_cpus=4,
        )

    column: the column with the prompts: texts, or conversations (lists of messages)
    params: fields of the OpenAI API for every request (max_tokens, temperature, seed, ...)
    engine: the settings of LLM (context, threads, ...). Give threads the actor's num_cpus.

    New columns: text, finish_reason, prompt_tokens, output_tokens and error (null: none).
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        column: str = "prompt",
        params: Mapping[str, object] | None = None,
        concurrency: int = 64,
        test_engine: str = "",
        **engine: Any,
    ) -> None:
        self._column = column
        self._params = _checked(params or {})
        settings = batch_settings(model, concurrency, engine, test_engine=test_engine)
        self._actor = BatchActor(settings, concurrency)

    def __call__(self, batch: JsonObject) -> JsonObject:
        if self._column not in batch:
            why = f"the dataset has no column {self._column!r}: {', '.join(batch)}"
            raise ParameterError("column", why)
        lines = [self._request(i, row) for i, row in enumerate(batch[self._column])]
        answers = [answer["response"] for answer in self._actor.answer(lines)]
        rows = [_columns(answer["status_code"], answer["body"]) for answer in answers]
        return {**batch, **{name: [row[name] for row in rows] for name in COLUMNS}}

    def _request(self, index: int, prompt: object) -> Line:
        plain = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # NumPy, from Ray Data
        body: JsonObject = dict(self._params)
        if isinstance(plain, str):
            url, body["prompt"] = "/v1/completions", plain
        else:
            url, body["messages"] = "/v1/chat/completions", plain
        return {"custom_id": str(index), "method": "POST", "url": url, "body": body}

    def close(self) -> None:
        self._actor.close()


# Parameters whose effect is in no column.
_NOT_SHOWN = ("tools", "functions", "logprobs", "top_logprobs", "prompt_logprobs")


def _checked(params: Mapping[str, object]) -> JsonObject:
    for name, value in params.items():
        if name in ("prompt", "messages"):
            raise ParameterError("params", f"{name} comes from the column of prompts; leave it out")
        shown = value in (None, 1) if name == "n" else name not in _NOT_SHOWN
        if not shown and value is not None and value is not False:
            raise ParameterError(
                "params",
                f"{name} is {value!r:.40}, and a row has one text and no column for more; use "
                "verbatim batch, whose answers are complete",
            )
    return dict(params)


COLUMNS = ("text", "finish_reason", "prompt_tokens", "output_tokens", "error")


def _columns(status: int, body: JsonMapping) -> JsonObject:
    if status != 200:
        return dict.fromkeys(COLUMNS) | {"error": str(body["error"]["message"])}
    choice, usage = body["choices"][0], body["usage"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    counts = usage["prompt_tokens"], usage["completion_tokens"]
    return dict(zip(COLUMNS, (text, choice["finish_reason"], *counts, None), strict=True))


class AnswerRequests:
    """The actor of `verbatim batch --ray`: JSON requests in, JSON answers out."""

    def __init__(self, settings: Settings, concurrency: int, on_gpu: bool) -> None:
        if not on_gpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        try:
            self._actor = BatchActor(settings, concurrency)
        except VerbatimError as error:
            raise did_not_start(str(error)) from None

    def __call__(self, batch: JsonObject) -> JsonObject:
        answers = self._actor.answer([json.loads(text) for text in batch["request"]])
        return {"answer": [json.dumps(answer, ensure_ascii=False) for answer in answers]}
