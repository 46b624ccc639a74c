"""One error tree. A class states its HTTP status, its code and whether a retry can help.

Messages are public: they never hold a prompt, a secret or a traceback.
"""

from http import HTTPStatus


class PromptmillError(Exception):
    """Base of every error that a caller may see.

    Attributes: ``status`` (HTTP), ``code`` (stable word for programs), ``type`` (OpenAI's error
    type), ``retryable``, ``param`` (path of the field at fault or None), ``retry_after`` (seconds).
    """

    status = HTTPStatus.INTERNAL_SERVER_ERROR
    code = "internal_error"
    type = "server_error"
    retryable = False

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, retry_after: int | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code
        self.retry_after = retry_after

    def to_json(self) -> dict[str, object]:
        """The common shape of every 4xx and 5xx body."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(PromptmillError):
    """The request is wrong; sending it again cannot help."""

    status = HTTPStatus.BAD_REQUEST
    code = "invalid_request"
    type = "invalid_request_error"


class Unsupported(BadRequest):
    """A field with a meaning that this server does not implement yet."""

    code = "unsupported_parameter"


class ContextLengthExceeded(BadRequest):
    code = "context_length_exceeded"


class BadCursor(BadRequest):
    """An event id that is malformed or lies beyond the end of the job's log."""

    code = "bad_cursor"


class Rejected(BadRequest):
    """An engine refuses a request before its loop has seen it."""

    code = "rejected_by_engine"


class Forbidden(PromptmillError):
    status = HTTPStatus.FORBIDDEN
    code = "forbidden"
    type = "permission_error"


class NotFound(PromptmillError):
    status = HTTPStatus.NOT_FOUND
    code = "not_found"
    type = "not_found_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(PromptmillError):
    status = HTTPStatus.METHOD_NOT_ALLOWED
    code = "method_not_allowed"
    type = "invalid_request_error"


class Conflict(PromptmillError):
    status = HTTPStatus.CONFLICT
    code = "conflict"
    type = "conflict_error"


class AlreadyFinished(Conflict):
    """A transition was asked of a job that is terminal; terminal is final."""

    code = "already_finished"


class PayloadTooLarge(PromptmillError):
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    code = "payload_too_large"
    type = "invalid_request_error"


class UnsupportedMediaType(PromptmillError):
    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    code = "unsupported_media_type"
    type = "invalid_request_error"


class IdempotencyMismatch(PromptmillError):
    """An idempotency key came back with another body."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY
    code = "idempotency_key_reused"
    type = "invalid_request_error"


class Unavailable(PromptmillError):
    """SQL or Redis cannot be reached now. Never charged to a job."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "unavailable"
    retryable = True

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, retry_after: int | None = 5):
        super().__init__(message, param=param, code=code, retry_after=retry_after)


class Overloaded(Unavailable):
    code = "overloaded"


class ConfigError(PromptmillError):
    """A bad setting or a machine that lacks something; the process stops with this one line."""

    code = "bad_configuration"
