"""Check every request before the app sees it: host, origin, session, path and size; set the security headers.

Gradio's own checks remain; this one comes first, and lets through only what the pages and clients of this app need.
So routes that a later Gradio adds, or leaves open before the login, are not reachable.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response

from .accounts import SESSION_S, Accounts
from .login_page import render_login
from .options import is_loopback

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Below the app's own pages: what Gradio's frontend and gradio_client ask for.
_ADDRESSES = re.compile(
    r"""/(config|theme\.css|favicon\.ico|manifest\.json|robots\.txt|(assets|static|svelte)/.+
    |gradio_api/(info|openapi\.json|app_id|heartbeat/\w+|startup-events|queue/(join|data)|reset|cancel|upload
        |upload_progress|(call|run|api)/[\w/-]+|file=/.+))/?""",
    re.VERBOSE,
)
_MAX_LOGIN_BYTES = 4096
_MAX_BODY_BYTES = 16 * 2**20  # of a request that is no upload
_MAX_WAITING_LOGINS = 8
_WRONG_LOGIN_S = 1.0
_LOGIN_S = 10.0

_HEADERS = {
    # Nothing is loaded from, sent to or framed by another host. Gradio's page has inline scripts and styles, and makes
    # functions from text.
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "media-src 'self' data: blob:; connect-src 'self' data: blob:; worker-src 'self' blob:; object-src 'none'; "
    "base-uri 'self'; form-action 'self'; frame-src 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with `no-referrer` a form of ours comes with the Origin null
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}


class Guard:
    """An ASGI app that forwards to another only the requests that are allowed.

    Args:
        accounts: who may log in, or the token; None lets in everybody who reaches the server. Without accounts of users
            the server listens on loopback only, and answers only to names of this machine.
        pages: the addresses of the app's pages, such as `/new`.
        port: of the server; sessions of two servers of one host have different cookies.
        login_s: how long a login may take to send its few bytes.
    """

    def __init__(
        self, app: App, accounts: Accounts | None, pages: frozenset[str], port: int, login_s: float = _LOGIN_S
    ) -> None:
        self._app = app
        self._accounts = accounts
        self._is_local = accounts is None or accounts.is_token
        self._pages = pages
        self._cookie = f"lorashard_{port}"
        self._num_waiting = 0
        self._login_s = login_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or forward it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # the app has no websockets
            await send({"type": "websocket.close", "code": 1008})
            return
        request = Request(scope, receive)
        refusal = await self._find_refusal(request)

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                for name in [name for name in headers if name.startswith("access-control-")]:
                    del headers[name]  # Gradio's: it lets any origin read where the host is not this machine's
            await send(message)

        if refusal is not None:
            await refusal(scope, receive, send_with_headers)
        else:
            await self._app(scope, _limit(receive, request), send_with_headers)

    async def _find_refusal(self, request: Request) -> Response | None:
        """Return the response to a request that is not forwarded; None if it is."""
        path = request.scope["path"]  # which the app goes by; `request.url` is put together with the Host header
        if self._is_local and not _names_this_machine(request.headers.get("host", "")):
            # A page of another site whose name was made to point to this machine (DNS rebinding).
            return PlainTextResponse("lorashard: open it as 127.0.0.1 or localhost\n", 403)
        if not _comes_from_here(request, is_page=path in self._pages):
            return PlainTextResponse("lorashard: refused, since another site's page asked for it\n", 403)
        if self._accounts is not None:
            if path in ("/login", "/login/"):
                return await self._log_in(request, self._accounts)
            session = request.cookies.get(self._cookie, "")
            if path == "/logout":
                self._accounts.close_session(session)
                response = RedirectResponse("login", 303)
                response.delete_cookie(self._cookie)
                return response
            if path in self._pages and self._accounts.is_token and "token" in request.query_params:
                return self._open_by_token(request, self._accounts)
            is_let_in = self._accounts.has_session(session) or self._accounts.knows_token(_read_token(request.headers))
            if path != "/favicon.ico" and not is_let_in:
                if path in self._pages and _wants_page(request):
                    asked = path[1:] + (f"?{request.url.query}" if request.url.query else "")
                    return RedirectResponse("login" + (f"?next={quote(asked)}" if asked else ""), 303)
                hint = ": send the header Authorization: Bearer TOKEN" if self._accounts.is_token else ""
                return JSONResponse({"detail": f"Not authenticated{hint}"}, 401)
        if path not in self._pages and _ADDRESSES.fullmatch(path) is None:
            return PlainTextResponse("lorashard: there is no such page\n", 404)
        if path != "/gradio_api/upload" and _read_length(request.headers) > _MAX_BODY_BYTES:
            return PlainTextResponse("lorashard: the request is too large\n", 413)
        return None

    def _open_by_token(self, request: Request, accounts: Accounts) -> Response:
        """Open a session for whoever comes with the token, and go on to the page without it, as the history shall be.

        A wrong token changes nothing: the page then asks for the right one.
        """
        rest = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
        target = request.scope["path"][1:] + (f"?{urlencode(rest, quote_via=quote)}" if rest else "")
        response = RedirectResponse(target or "./", 303)
        session = accounts.open_by_token(request.query_params["token"])
        if session is not None:
            self._set_cookie(response, session)
        return response

    def _set_cookie(self, response: Response, session: str) -> None:
        response.set_cookie(self._cookie, session, max_age=SESSION_S, httponly=True, samesite="lax")

    async def _log_in(self, request: Request, accounts: Accounts) -> Response:
        target = _read_target(request.query_params.get("next", ""))
        if request.method != "POST":
            return HTMLResponse(render_login(target, is_token=accounts.is_token))
        if _read_length(request.headers) > _MAX_LOGIN_BYTES:
            return JSONResponse({"detail": "Too much"}, 413)
        if self._num_waiting >= _MAX_WAITING_LOGINS:
            return JSONResponse({"detail": "Too many attempts"}, 429)
        self._num_waiting += 1  # from here on: requests whose bodies come later all at once are guesses too
        try:
            return await asyncio.wait_for(self._try_login(request, accounts, target), self._login_s)
        except TimeoutError:
            return JSONResponse({"detail": "Too slow"}, 408)
        finally:
            self._num_waiting -= 1

    async def _try_login(self, request: Request, accounts: Accounts, target: str) -> Response:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > _MAX_LOGIN_BYTES:
                return JSONResponse({"detail": "Too much"}, 413)
        form = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
        user, password = (form.get(name, [""])[0] for name in ("username", "password"))
        session = accounts.open_session(user.strip(), password)
        is_page = _wants_page(request)
        if session is None:
            await asyncio.sleep(_WRONG_LOGIN_S)  # slows down guessing
            if is_page:
                return HTMLResponse(render_login(target, user, is_wrong=True, is_token=accounts.is_token))
            return JSONResponse({"detail": "Wrong token" if accounts.is_token else "Wrong user or password"}, 401)
        response = RedirectResponse(target or "./", 303) if is_page else JSONResponse({"success": True})
        self._set_cookie(response, session)
        return response


def _names_this_machine(host: str) -> bool:
    """Return whether a Host header names this machine, at any port: a tunnel may use another."""
    return is_loopback(urlsplit(f"//{host}").hostname or "")


def _comes_from_here(request: Request, is_page: bool) -> bool:
    """Return whether a page of this server sent the request, or no page: a client, a typed address, a link."""
    origin = request.headers.get("origin")
    if origin is not None:
        return urlsplit(origin).netloc.lower() == request.headers.get("host", "").lower()
    if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        is_link = request.method == "GET" and request.headers.get("sec-fetch-dest") == "document"
        return is_link and is_page
    return True


def _read_token(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _wants_page(request: Request) -> bool:
    return "text/html" in request.headers.get("accept", "")


def _read_target(target: str) -> str:
    """Return the page to open after the login, if it is one of this server; empty otherwise."""
    return target if re.fullmatch(r"\w+(\?[^\s\\]*)?", target) else ""


def _read_length(headers: Headers) -> int:
    length = headers.get("content-length", "0")
    return int(length) if length.isascii() and length.isdigit() else 0


def _limit(receive: Receive, request: Request) -> Receive:
    """Return a `receive` that disconnects once a body is larger than any of this app."""
    if request.scope["path"] == "/gradio_api/upload":  # Gradio counts these itself
        return receive
    num_bytes = 0

    async def receive_limited() -> MutableMapping[str, Any]:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        return {"type": "http.disconnect"} if num_bytes > _MAX_BODY_BYTES else message

    return receive_limited
