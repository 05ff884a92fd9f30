"""The routes of the Lens: its page, and the questions that no other route answers."""

from __future__ import annotations

from verbatim.lens import PAGE
from verbatim.server.api.common.route import ApiProtocol, Query, queued
from verbatim.server.api.lens import lens_api, lens_fields
from verbatim.server.api.page_routes import page_routes

_AFTER = Query("only steps with a higher number; missing: all that are kept", "[0-9]{1,15}")

PROTOCOL = ApiProtocol(
    (
        queued("/lens/api/info", lens_api.info, method="GET"),
        queued("/lens/api/vocab", lens_api.vocab, method="GET"),
        queued("/lens/api/engine", lens_api.engine, method="GET", queries={"after": _AFTER}),
        queued("/lens/api/step", lens_api.step, lens_fields.LensStep),
        queued("/lens/api/replay", lens_api.replay, lens_fields.LensReplay),
        *page_routes(PAGE),
    ),
    is_open=PAGE.has,
)
