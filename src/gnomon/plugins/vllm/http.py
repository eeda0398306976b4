"""A limit on the size of requests, as ASGI middleware for vLLM's server, which has none of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .settings import Settings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

__all__ = ["BodyLimit"]


class BodyLimit:
    """Answers 413 to a body above the limit: at once where its length is announced, else where it is passed.

    Args:
        app: the server.
        limit: bytes; the environment's by default.
    """

    def __init__(self, app: Any, limit: int | None = None) -> None:
        self.app = app
        self.limit = Settings.from_environment().max_body_bytes if limit is None else limit

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > self.limit:
            await self._refuse(send)
            return
        seen, started = 0, False

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.limit:
                raise _TooLongError
            return message

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, counted, noted)
        except _TooLongError:
            if not started:
                await self._refuse(send)

    async def _refuse(self, send: Send) -> None:
        text = (
            f'{{"error": {{"message": "The body is larger than {self.limit} bytes.", "code": 413}}}}'.encode()
        )
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": text})


class _TooLongError(Exception):
    pass
