"""The pages: /, /docs and /openapi.json. Everything comes from this server, nothing from another host."""

from pathlib import Path

from flask import Blueprint, Flask, Response, jsonify, send_from_directory
from swagger_ui_bundle import swagger_ui_path

from api.openapi import document

STATIC = Path(__file__).parent / "static"
SWAGGER_FILES = ("swagger-ui.css", "swagger-ui-bundle.js")
# Swagger UI sets styles inline and draws its icons from data: URLs.
POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'"

blueprint = Blueprint("pages", __name__)


def install(app: Flask) -> None:
    app.register_blueprint(blueprint)
    app.after_request(_protect)


@blueprint.get("/")
def index() -> Response:
    return send_from_directory(STATIC, "index.html")


@blueprint.get("/static/<path:name>")
def static_file(name: str) -> Response:
    return send_from_directory(STATIC, name)


@blueprint.get("/docs")
def docs() -> Response:
    return send_from_directory(STATIC, "docs.html")


@blueprint.get(f"/docs/<any({', '.join(map(repr, SWAGGER_FILES))}):name>")
def swagger(name: str) -> Response:
    return send_from_directory(Path(str(swagger_ui_path)), name, max_age=86400)


@blueprint.get("/openapi.json")
def openapi() -> Response:
    return jsonify(document())


def _protect(response: Response) -> Response:
    response.headers["X-Content-Type-Options"] = "nosniff"
    if response.mimetype == "text/html":
        response.headers["Content-Security-Policy"] = POLICY
    return response
