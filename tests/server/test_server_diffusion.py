"""A diffusion model behind the server: its parameters are fields of every protocol, and what it
cannot do is refused by the name of the request's field."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from verbatim.server import app
from verbatim.server.process.supervisor import Supervisor
from verbatim.server.server_state import State
from verbatim.server.settings import Settings

CHAT: dict[str, Any] = {
    "model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "seed": 3,
    "remasking": "random", "block_length": 8, "denoising_steps": 4,
}  # fmt: skip
PLAIN = {"model": "m", "prompt": "abc", "max_tokens": 4}
REFUSED = [
    ("/v1/completions", {**PLAIN, "echo": True, "logprobs": 1}, "prompt_logprobs"),
    ("/v1/completions", {**PLAIN, "remasking": "no such"}, "remasking"),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}},
     "response_format"),
    ("/v1/embeddings", {"model": "m", "input": "x"}, "input"),
]  # fmt: skip


async def ask(*posts: tuple[str, dict[str, Any]]) -> list[httpx.Response]:
    settings = Settings(test_engine="pipeline,diffusion=4", served_names=("m",))
    supervisor = Supervisor(settings)
    supervisor.start()
    await supervisor.ready.wait()
    transport = httpx.ASGITransport(app.make_app(State(settings, supervisor)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        found = await asyncio.gather(
            *[client.post(p, json=body, timeout=None) for p, body in posts]
        )
    await supervisor.close()
    return list(found)


def test_diffusion_over_http() -> None:
    chat = "/v1/chat/completions"
    posts = [
        (chat, CHAT),
        (chat, CHAT),
        (chat, {**CHAT, "seed": 4}),
        (chat, {**CHAT, "stream": True}),
    ]
    one, same, other, stream, *refused = asyncio.run(ask(*posts, *[r[:2] for r in REFUSED]))
    texts = [r.json()["choices"][0]["message"]["content"] for r in (one, same, other)]
    assert texts[0] == texts[1] != texts[2]
    assert stream.status_code == 200
    for response, (_, _, name) in zip(refused, REFUSED, strict=True):
        assert response.status_code == 400
        assert response.json()["error"]["param"] == name
