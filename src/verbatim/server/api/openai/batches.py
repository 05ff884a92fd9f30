"""/v1/files and /v1/batches: the files of requests and answers, and the batches that the runner
finds in the store (storage/batch_runner.py).

A file is kept as its lines, so that a batch reads and writes one at a time.
"""

from __future__ import annotations

import asyncio
import email
import io
import time
from collections.abc import AsyncIterator

from starlette.responses import Response, StreamingResponse

from verbatim.base.json_io import JsonObject
from verbatim.server.api.common.request_context import FORM, Json, RequestContext, new_id
from verbatim.server.api.common.validate import check
from verbatim.server.api.openai.openai_fields import BatchCreate, FileUpload
from verbatim.server.api.openai.stored import page
from verbatim.server.problem import Problem, invalid
from verbatim.server.storage.answer_store import KEEP_SECONDS, WINDOW_SECONDS, Store, file_item

FORM_BYTES, FORM_PARTS = 64 * 1024, 16  # of an upload: the bytes besides the file; all parts
MAX_LINES = 50_000  # of a file, as of OpenAI's
# The oldest finished batch of a tenant that has as many batches as it may have.
MAKE_ROOM = """DELETE FROM items WHERE rowid = (SELECT min(rowid) FROM items WHERE tenant = ?
    AND kind = 'batch' AND expires IS NOT NULL) AND
    (SELECT count(*) FROM items WHERE tenant = ? AND kind = 'batch') >= ?"""


def files_store(call: RequestContext) -> Store:
    """The store, if it is on disk."""
    if call.state.store.folder is None:
        why = "files and batches are kept on disk only; start the server with --state-dir DIR"
        raise Problem("invalid_request", why)
    return call.state.store


def parse_form(content_type: str, raw: bytes) -> tuple[JsonObject, bytes]:
    """The fields of a multipart form and the bytes of its part `file`, whose field is the file's
    name. A name like a[b] is a member of an object."""
    boundary = email.message_from_string(f"content-type: {content_type}").get_param("boundary")
    parts = (b"\r\n" + raw).split(b"\r\n--" + str(boundary).encode(), FORM_PARTS)
    if not boundary or parts[0] or len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise Problem("invalid_request", f"the body is not complete {FORM}")
    form: JsonObject = {}
    content = b""
    for part in parts[1:-1]:
        head, _, data = part.partition(b"\r\n\r\n")
        fields = email.message_from_string(head.decode(errors="replace").lstrip())
        name = str(fields.get_param("name", "", "content-disposition"))
        if name == "file":
            content = data
        text = data.decode(errors="replace") if name != "file" else fields.get_filename() or ""
        outer, bracket, inner = name.partition("[")
        if bracket and isinstance(form.setdefault(outer, {}), dict):
            form[outer][inner.removesuffix("]")] = int(text) if text.isdecimal() else text
        elif name in form:
            raise invalid(name[:64], "is given twice")
        else:
            form[name] = text
    return form, content


async def upload(call: RequestContext) -> Response:
    store, limits = files_store(call), call.state.limits
    raw = await call.read_raw(FORM, limits.max_file_bytes + FORM_BYTES)
    kind = call.request.headers["content-type"]
    form, content = await asyncio.to_thread(parse_form, kind, raw)
    made = check(call.route, form)[1]
    assert isinstance(made, FileUpload)
    if not made.file:
        raise invalid("file", "has no name; send a file, with curl: -F file=@FILE")
    if len(content) > limits.max_file_bytes:
        raise Problem("body_too_large", f"file: is larger than {limits.max_file_bytes} bytes")
    if content.count(b"\n") > MAX_LINES:
        raise invalid("file", f"has more than {MAX_LINES} lines; divide it")
    seconds = made.expires_after.seconds if made.expires_after else KEEP_SECONDS
    item = file_item(new_id("file-"), len(content), int(time.time()), seconds, made.file, "batch")
    name, expires = item["object"]["id"], item["object"]["expires_at"]
    lines = await asyncio.to_thread(lambda: list(enumerate(io.BytesIO(content), 1)))
    rows = (("INSERT INTO lines VALUES (?, ?, ?)", name, n, line) for n, line in lines)
    most = limits.max_files
    if not await store.put(call.tenant, "file", name, item, *rows, expires=expires, limit=most):
        why = f"this key has {limits.max_files} files (--max-files); delete one first"
        raise invalid("file", why)
    return Json(item["object"])


async def list_files(call: RequestContext) -> Response:
    found = [item["object"] for item in await files_store(call).of(call.tenant, "file")]
    wanted = call.query.get("purpose")
    rows = [row for row in found if wanted in (None, row["purpose"])]
    return page(rows, call, limit=10_000, order="desc")


async def _file(call: RequestContext) -> JsonObject:
    item = await files_store(call).get(call.tenant, "file", call.request.path_params["id"])
    found: JsonObject = item["object"]
    return found


async def get_file(call: RequestContext) -> Response:
    return Json(await _file(call))


async def content(call: RequestContext) -> Response:
    file = await _file(call)

    async def pieces() -> AsyncIterator[bytes]:
        async for lines in call.state.store.lines(file["id"]):
            yield b"".join(line for _, line in lines)

    headers = {"content-length": str(file["bytes"])}
    return StreamingResponse(pieces(), media_type="application/octet-stream", headers=headers)


async def delete_file(call: RequestContext) -> Response:
    file, store = await _file(call), call.state.store
    for _, batch in await store.unfinished(call.tenant):
        if batch["input_file_id"] == file["id"]:
            raise invalid("id", f"the batch {batch['id']} still reads this file; cancel it first")
    await store.delete(call.tenant, "file", file["id"])
    return Json({"id": file["id"], "object": "file", "deleted": True})


async def create(call: RequestContext) -> Response:
    store, limit = files_store(call), call.state.limits.max_batches
    body = await call.body(BatchCreate)
    try:
        file = await store.get(call.tenant, "file", body.input_file_id)
    except Problem as problem:
        raise invalid("input_file_id", problem.message) from None
    if file["object"]["purpose"] != "batch":
        raise invalid("input_file_id", "is an output of a batch; upload a file of requests")
    now, name = int(time.time()), new_id("batch_")
    batch: JsonObject = {
        "id": name,
        "object": "batch",
        "endpoint": body.endpoint,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "status": "validating",
        "created_at": now,
        "expires_at": now + WINDOW_SECONDS,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": body.metadata,
    }
    after = body.output_expires_after
    item = {
        "object": batch,
        "outputs": [new_id("file-"), new_id("file-")],  # of status 200, and of the rest
        "keep": after.seconds if after else KEEP_SECONDS,
    }
    await store.execute((MAKE_ROOM, call.tenant, call.tenant, limit))
    if not await store.put(call.tenant, "batch", name, item, limit=limit):
        why = f"this key has {limit} unfinished batches (--max-batches); wait for one"
        raise invalid("input_file_id", why)
    store.changed.set()
    return Json(batch)


async def _with_counts(call: RequestContext, item: JsonObject) -> JsonObject:
    """The batch as clients get it; the counts of a running one are those of its lines."""
    batch: JsonObject = item["object"]
    counts = batch["request_counts"]
    if not counts["completed"] and not counts["failed"]:
        sizes = await call.state.store.sizes(*item["outputs"])
        counts["completed"], counts["failed"] = (lines for lines, _ in sizes)
    return batch


async def _item(call: RequestContext) -> JsonObject:
    return await files_store(call).get(call.tenant, "batch", call.request.path_params["id"])


async def get_batch(call: RequestContext) -> Response:
    return Json(await _with_counts(call, await _item(call)))


async def list_batches(call: RequestContext) -> Response:
    items = await files_store(call).of(call.tenant, "batch")
    return page([await _with_counts(call, item) for item in items], call, order="desc")


async def cancel(call: RequestContext) -> Response:
    batch, store = (await _item(call))["object"], call.state.store
    fields = {"status": "cancelling", "cancelling_at": int(time.time())}
    if not await store.change_batch(batch["id"], ("validating", "in_progress"), **fields):
        status = (await _item(call))["object"]["status"]
        if status != "cancelling":  # a client's second attempt
            raise invalid("id", f"the batch is {status} and cannot be cancelled")
    store.changed.set()
    return await get_batch(call)
