"""The routes of the chat page, which uses the routes of the other protocols like any client."""

from __future__ import annotations

from verbatim.chat import PAGE
from verbatim.server.api.common.route import ApiProtocol
from verbatim.server.api.page_routes import page_routes

PROTOCOL = ApiProtocol(page_routes(PAGE), is_open=PAGE.has)
