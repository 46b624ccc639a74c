"""The Flask application. It holds no state: all of it is in the services."""

from flask import Blueprint, Flask, request
from flask.json.provider import DefaultJSONProvider
from flask.typing import ResponseReturnValue

from api import errors, guard, health, jobs, metrics, models, pages, streams
from api.services import Services
from api.submit import Submitter
from promptmill.core.errors import NotFound

LATER = ("/v1/ws", "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize", "/tokenizer_info")
LATER_TREES = ("/v1/files", "/v1/batches")
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def create_app(services: Services) -> Flask:
    app = Flask("api", static_folder=None)
    assert isinstance(app.json, DefaultJSONProvider)
    app.json.sort_keys = False
    services.attach(app)
    errors.install(app)
    guard.install(app)
    app.register_blueprint(jobs.blueprint(Submitter(services)))
    app.register_blueprint(models.blueprint)
    app.register_blueprint(health.blueprint)
    app.register_blueprint(_later())
    streams.install(app)
    metrics.install(app, metrics.QueueDepths(services.store, services.clock))
    pages.install(app)
    return app


def _later() -> Blueprint:
    """Routes of later parts: a clear word instead of a bare "not found"."""
    routes = Blueprint("later", __name__)

    def absent(**_: str) -> ResponseReturnValue:
        raise NotFound(f"{request.path[:200]} is not available in this version; submit jobs to /v1/jobs", code="route_not_available")

    for path in LATER:
        routes.add_url_rule(path, endpoint=path.strip("/").replace("/", "_"), view_func=absent, methods=METHODS)
    for path in LATER_TREES:
        name = path.rsplit("/", 1)[1]
        routes.add_url_rule(path, endpoint=name, view_func=absent, methods=METHODS)
        routes.add_url_rule(f"{path}/<path:rest>", endpoint=f"{name}_rest", view_func=absent, methods=METHODS)
    return routes
