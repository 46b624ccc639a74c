"""Every 4xx and 5xx of every route leaves here, in one shape, whoever raised it."""

from http import HTTPStatus

from flask import Flask, Response, g, json, request
from werkzeug.exceptions import HTTPException
from werkzeug.routing import WebsocketMismatch

from promptmill.core import errors
from promptmill.core.logs import get_logger

log = get_logger(__name__)

LONGEST_RETRY_S = 60
_BY_STATUS: dict[int, type[errors.PromptmillError]] = {
    HTTPStatus.FORBIDDEN: errors.Forbidden,
    HTTPStatus.NOT_FOUND: errors.NotFound,
    HTTPStatus.METHOD_NOT_ALLOWED: errors.MethodNotAllowed,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: errors.PayloadTooLarge,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: errors.UnsupportedMediaType,
}


def install(app: Flask) -> None:
    app.register_error_handler(errors.PromptmillError, answer)
    app.register_error_handler(HTTPException, _http)
    app.register_error_handler(Exception, _unforeseen)


def answer(error: errors.PromptmillError, **beside: object) -> Response:
    """The error as a response; ``beside`` are further members of the body, next to ``error``."""
    response = Response(json.dumps({**error.to_json(), **beside}), status=int(error.status), content_type="application/json")
    if error.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        response.headers["Retry-After"] = str(min(LONGEST_RETRY_S, max(1, error.retry_after or 1)))
    return response


def _http(error: HTTPException) -> Response:
    """What Flask itself refuses. Redirects of the router keep their own form."""
    if error.code is None or error.code < HTTPStatus.BAD_REQUEST:
        redirect = error.get_response(request.environ)
        assert isinstance(redirect, Response)
        return redirect
    response = answer(_as_ours(error, error.code))
    response.status_code = error.code
    for name, value in error.get_headers(request.environ):
        if name.lower() in ("allow", "retry-after"):
            response.headers[name] = value
    return response


def _as_ours(error: HTTPException, code: int) -> errors.PromptmillError:
    if isinstance(error, WebsocketMismatch):
        return errors.BadRequest("this address is a WebSocket; for plain HTTP use the events link of the job")
    if code == HTTPStatus.NOT_FOUND:
        return errors.NotFound(f"no route {request.method} {request.path[:200]}", code="unknown_route")
    if code == HTTPStatus.METHOD_NOT_ALLOWED:
        return errors.MethodNotAllowed(f"{request.method} is not allowed here")
    kind = _BY_STATUS.get(code) or (errors.BadRequest if code < HTTPStatus.INTERNAL_SERVER_ERROR else errors.PromptmillError)
    if kind is errors.PayloadTooLarge:
        return errors.PayloadTooLarge("the body is larger than this server takes")
    return kind(error.name.lower())


def _unforeseen(error: Exception) -> Response:
    """A fault of ours: the log gets the traceback, the client an id to name."""
    log.error("request failed", route=request.path, request_id=g.get("request_id"), exc_info=error)
    return answer(errors.PromptmillError("the server failed; name the x-request-id when you report it"))
