"""The routes of the chat page, which uses the routes of the other protocols like any client."""

from __future__ import annotations

from verbatim.chat import PAGE
from verbatim.server.api.common.page_routes import page_routes
from verbatim.server.api.common.route import ApiProtocol

PROTOCOL = ApiProtocol(page_routes(PAGE), is_open=PAGE.has)
