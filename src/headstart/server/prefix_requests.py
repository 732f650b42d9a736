"""Pinned prefixes of a server: requests from headstart.toml and POST /v1/prefixes, tokenized and sent to the engine.

The engine owns the registry (core/cache/pinned_prefixes.py) and is called by name (engine_calls.py). This module holds
texts, tenants, and the entries that were rejected before the engine saw them: they are listed with the reason.
"""

import asyncio
from collections.abc import Callable, Iterable

from headstart.config.options import PrefixEntry
from headstart.core.errors import InvalidRequestError, RequestFailedError
from headstart.engine.engine_client import EngineClient
from headstart.http.http_errors import HttpError
from headstart.openai.bounds import RequestBounds
from headstart.openai.prefix_tokens import PrefixRequest, encode_prefix, parse_prefix
from headstart.openai.responses import Json
from headstart.openai.tokenizer.tokenizer import Tokenizer

POLL_SECONDS = 0.05
WARMING, FAILED, MALFORMED = "warming", "failed", "malformed"


class ServerPrefixes:
    """All prefixes of one server, computed or not. `domain_of` returns a tenant's isolation domain, or raises."""

    def __init__(self, engine: EngineClient, domain_of: Callable[[str], bytes]) -> None:
        self._engine = engine
        self._domain_of = domain_of
        self._rejected: list[Json] = []  # not sent to the engine, or refused by it

    async def add_configured(self, entries: Iterable[PrefixEntry], tokenizer: Tokenizer, bounds: RequestBounds) -> None:
        """Send the entries of headstart.toml to the engine; an invalid entry is listed with its reason instead."""
        for entry in entries:
            try:
                if entry.error is not None:
                    raise InvalidRequestError(entry.error)
                values = {"name": entry.name, "tenant": entry.tenant, "text": entry.text, "messages": entry.messages}
                body = parse_prefix(values, bounds)
                await self._submit(body, tokenizer, bounds)
            except (InvalidRequestError, RequestFailedError) as error:
                state = FAILED if isinstance(error, RequestFailedError) else MALFORMED
                rejected = {"name": entry.name, "tenant": entry.tenant, "state": state, "error": str(error)}
                self._rejected.append({**rejected, **dict.fromkeys(_COUNTS, 0), "last_used": None})

    async def add(self, body: PrefixRequest, tokenizer: Tokenizer, bounds: RequestBounds) -> Json:
        """Pin a prefix and return its entry, computed if `body.wait`.

        Raises InvalidRequestError, EngineDeadError, and HttpError if it cannot be computed; then it is removed again.
        """
        found = await self._submit(body, tokenizer, bounds)
        self._rejected = [entry for entry in self._rejected if entry["name"] != body.name]
        while body.wait and found["state"] == WARMING:
            await asyncio.sleep(POLL_SECONDS)
            listed = {entry["name"]: entry for entry in await self.list_prefixes()}
            if body.name not in listed:
                raise HttpError(409, f"prefix {body.name!r} was removed while it was computed", code="prefix_removed")
            found = listed[body.name]
        if found["state"] == FAILED:
            await self.remove(body.name)
            message = f"prefix {body.name!r} could not be computed: {found['error']}"
            raise HttpError(500, message, code="request_failed", headers={"x-should-retry": "false"})
        return found

    async def remove(self, name: str) -> bool:
        """Unpin a prefix; return False if there is none of that name. Raises InvalidRequestError, EngineDeadError."""
        kept = [entry for entry in self._rejected if entry["name"] != name]
        was_rejected, self._rejected = len(kept) < len(self._rejected), kept
        return await self._engine.call("remove_prefix", name) or was_rejected

    async def list_prefixes(self) -> list[Json]:
        """Return every prefix, the rejected ones last. Raises EngineDeadError."""
        return [*await self._engine.call("list_prefixes"), *self._rejected]

    async def _submit(self, body: PrefixRequest, tokenizer: Tokenizer, bounds: RequestBounds) -> Json:
        domain = self._domain_of(body.tenant) if body.tenant else b""
        token_ids = await asyncio.to_thread(encode_prefix, body, tokenizer, bounds)
        argument = {"name": body.name, "tenant": body.tenant, "domain": domain, "token_ids": token_ids.tobytes()}
        return await self._engine.call("add_prefix", argument)


_COUNTS = ("tokens", "blocks", "hits", "tokens_saved")
