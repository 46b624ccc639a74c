"""Who may talk to this server from a browser: checks of Host and Origin, and the id of a request.

Without them any web page could post to a server on the reader's own machine (cross-site requests,
DNS rebinding): the browser sends the page's Origin, and the name it looked up as Host.
"""

import re
from urllib.parse import urlsplit

from flask import Flask, Response, g, request

from api.services import services
from promptmill.core.errors import Forbidden
from promptmill.core.ids import new_id
from promptmill.core.settings import Settings

ANY_ADDRESS = ("0.0.0.0", "::")  # bound to every address: the names are not known here
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SANE_ID = re.compile(r"[\x21-\x7e]{1,128}", re.ASCII)
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


def install(app: Flask) -> None:
    app.before_request(_name_request)
    app.before_request(_check)
    app.after_request(_show_request_id)


def _name_request() -> None:
    sent = request.headers.get("x-request-id", "")
    g.request_id = sent if _SANE_ID.fullmatch(sent) else new_id("req", services().clock)


def _show_request_id(response: Response) -> Response:
    response.headers["x-request-id"] = g.get("request_id", "")
    return response


def _check() -> None:
    settings = services().settings
    host = request.environ.get("HTTP_HOST")
    if host is not None and not host_allowed(host, settings):
        raise Forbidden("this Host is not in the allow list (setting allowed_hosts)", code="host_not_allowed")
    origin = request.headers.get("Origin")
    changes = request.method not in _SAFE_METHODS or request.environ.get("HTTP_UPGRADE", "").lower() == "websocket"
    if changes and origin is not None and not origin_allowed(origin, host, settings):
        raise Forbidden("this Origin is not in the allow list (setting allowed_origins)", code="origin_not_allowed")


def host_allowed(host: str, settings: Settings) -> bool:
    """Whether the Host header names this server. The port does not matter: rebinding is about names."""
    if settings.host in ANY_ADDRESS and not settings.allowed_hosts:
        return True
    name = _name_of(f"//{host}")
    return name in (settings.host.lower(), *LOOPBACK, *(_name_of(f"//{allowed}") for allowed in settings.allowed_hosts))


def origin_allowed(origin: str, host: str | None, settings: Settings) -> bool:
    """Own origin = same host and port; the scheme may differ behind a proxy that ends TLS."""
    if any(origin.lower() == allowed.rstrip("/").lower() for allowed in settings.allowed_origins):
        return True
    return host is not None and origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def _name_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
