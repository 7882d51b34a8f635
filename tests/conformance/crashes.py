"""A server whose process ends within a round."""

from __future__ import annotations

from collections.abc import Callable

from common.wire.messages import Request
from common.wire.payload import Payload


class CrashError(Exception):
    """The server's process ends."""


def crash_in(place: tuple[int, str]) -> Callable[[Request, Payload], Payload]:
    """Ends the run when a client has answered at a round's exchange: devices have kept their state, the server not."""

    def edit(request: Request, payload: Payload) -> Payload:
        if request.train and (request.round, request.exchange) == place:
            raise CrashError
        return payload

    return edit
