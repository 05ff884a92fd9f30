"""The routes of a web page: its index, and the files beside it. They need no API key, because they
hold no data of the server."""

from __future__ import annotations

from starlette.responses import Response

from verbatim.base.page_files import POLICY, PageFiles
from verbatim.server.api.common.request_context import RequestContext
from verbatim.server.api.common.route import ApiRoute
from verbatim.server.problem import Problem

PAGE_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # a new version of the package is seen at once
}


def page_routes(page: PageFiles) -> tuple[ApiRoute, ApiRoute]:
    async def send(call: RequestContext) -> Response:
        found = page.asset(call.request.path_params.get("id", "index.html"))
        if found is None:
            raise Problem("not_found", "the page has no such file")
        return Response(found[0], media_type=found[1], headers=PAGE_HEADERS)

    return (
        ApiRoute(page.at, send, method="GET", any_query=True),
        ApiRoute(page.below + "{id:path}", send, method="GET"),
    )
