"""Block hashes of a request's prompt, as the engine of a replica will compute them.

In: a Generate message. Out: a Route. The gateway encodes the prompt with the model's tokenizer and
chat template and hashes it with the key that all replicas share. A prompt that cannot be encoded
here has no hashes: the router then goes by load, and the replica's error is the client's answer.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from verbatim.base.config import BLOCK_SIZE
from verbatim.base.params import SamplingParams
from verbatim.scale.routes.routing import DECODE_TOKENS, HASH_BYTES, MAX_HASHES, Route
from verbatim.schedule.prefix import PrefixChain, prefix_salt
from verbatim.server.process.messages import Generate, Work

log = logging.getLogger("verbatim.scale")
SHORT = 2048  # characters that are encoded on the event loop: below 1 ms, less than a thread costs


class PromptHashes:
    def __init__(self, tokenizer: Any, template: Any, key: bytes, decode_cost: float = 1.0) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._chain = PrefixChain(BLOCK_SIZE, key)
        self._decode_cost = decode_cost

    async def route(self, message: Work) -> Route:
        if not isinstance(message, Generate):
            return Route(output=0)
        if isinstance(message.prompt, str) and len(message.prompt) <= SHORT:
            return self.route_of(message)
        return await asyncio.to_thread(self.route_of, message)

    def route_of(self, message: Generate) -> Route:
        output = _output(message)
        try:
            ids = self._encode(message)
            params = SamplingParams.from_mapping(message.params)
        except Exception as error:
            # Every such error is the client's and has its answer from the replica.
            log.debug("a prompt is routed by load: %s", error)
            return Route(output=output)
        if params.adapter:  # its digest, which the hashes need, is known to the replicas only
            return Route((), len(ids), output, BLOCK_SIZE, self._decode_cost)
        root = self._chain.root(prefix_salt(message.tenant, params.cache_salt))
        hashes: list[bytes] = []
        # The engine never takes the last token from the cache (paged_cache.reuse_prefix).
        blocks = min(max(len(ids) - 1, 0) // BLOCK_SIZE, MAX_HASHES)
        self._chain.extend(hashes, root, ids, blocks)
        short = tuple(h[:HASH_BYTES] for h in hashes)
        return Route(short, len(ids), output, BLOCK_SIZE, self._decode_cost)

    def _encode(self, message: Generate) -> list[int]:
        if isinstance(message.prompt, list):
            return message.prompt
        if message.prompt is not None:
            ids: list[int] = self._tokenizer.encode_prompt(
                message.prompt, special=message.parse_special
            )
            return ids
        from verbatim.text.templates.chat_template import encode_chat

        assert message.messages is not None
        if self._template is None:
            raise ValueError("this model has no chat template")
        more = {**(message.template or {}), "warnings": []}  # the engine reports them
        return list(encode_chat(self._tokenizer, self._template, message.messages, **more))


def _output(message: Generate) -> int:
    tokens = message.params.get("max_tokens")
    width = message.params.get("best_of") or message.params.get("n") or 1
    if not isinstance(tokens, int) or not isinstance(width, int):
        return DECODE_TOKENS
    return min(tokens, DECODE_TOKENS) * width
