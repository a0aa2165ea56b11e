"""Host and Origin checks of a local server: refuses requests that pages of other sites cause.

Any page that is open in a browser can have the browser send requests to 127.0.0.1. What it cannot
forge are two headers:

    Host      the name or number in the address. A page that rebinds its own name to 127.0.0.1 (DNS
              rebinding) sends that name. So a name has to be the server's; a number passes, since
              only names are resolved. The port is free: a forwarded port differs from the server's.
    Origin    the site whose page sends the request, wherever its answer could be read or it could
              change anything: POST, other origins, WebSockets. It has to be that of the address,
              scheme aside (a proxy may speak TLS), or one that is allowed. "null", of a sandboxed
              page or a file, is neither.

A request with no Host, with several, or with one that is not an address is refused, so is one with
several Origins, and WebSocket handshakes follow the same rules. Programs outside a browser send no
Origin; a key or a token admits them, and each server checks its own in ``response``.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import suppress
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

_HOST = re.compile(r"(?:\[(?P<number>[0-9a-fA-F:.]+)\]|(?P<name>[^][:@/?#\s]+))(?::\d*)?")
_POLICY_VIOLATION = 1008  # of RFC 6455; before the handshake ends it becomes a 403


class Guard(ABC):
    """An ASGI application that passes on to ``app`` what ``response`` does not answer."""

    def __init__(
        self, app: ASGIApp, names: Collection[str] | None, origins: Collection[str] = ()
    ) -> None:
        """``names`` are the server's; None accepts any Host, for a server that requires a key."""
        self.app, self.origins = app, origins
        self.names = None if names is None else {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, one handshake or the lifespan of the server."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        response = self.response(scope, headers, self.foreign(headers))
        if response is None:
            with suppress(ClientDisconnect):
                await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            await response(scope, receive, send)

    @abstractmethod
    def response(self, scope: Scope, headers: Headers, foreign: str | None) -> Response | None:
        """The answer in place of the application's; None admits the request.

        ``foreign`` is the header, "host" or "origin", by which it is not the server's own.
        """

    def foreign(self, headers: Headers) -> str | None:
        """ "host" or "origin" if that header is not the server's own; None if both are."""
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if self.names is not None and not (len(hosts) == 1 and self._is_own(hosts[0])):
            return "host"
        own = {f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts if host}
        return None if len(origins) <= 1 and {*origins} <= own.union(self.origins) else "origin"

    def _is_own(self, host: str) -> bool:
        address = _HOST.fullmatch(host)
        if address is None or self.names is None:
            return False
        name = address["name"] or address["number"]
        if name.lower() in self.names:
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True
