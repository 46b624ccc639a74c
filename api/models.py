"""The models that this server takes jobs for."""

from typing import Any

from flask import Blueprint, Response, jsonify

from api.services import services
from api.shape import list_json
from api.tokenizing import ServedModel
from promptmill.core.errors import ModelNotFound

blueprint = Blueprint("models", __name__)


@blueprint.get("/v1/models")
def list_models() -> Response:
    return jsonify(list_json([_model_json(model) for model in services().models.values()], has_more=False))


@blueprint.get("/v1/models/<path:model_id>")
def get_model(model_id: str) -> Response:
    """Names may hold a slash, which clients send escaped."""
    model = services().models.get(model_id)
    if model is None:
        raise ModelNotFound("no such model is served here", param="model")
    return jsonify(_model_json(model))


def _model_json(model: ServedModel) -> dict[str, Any]:
    card = model.card
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "promptmill",
        "revision": card.revision,
        "context_length": card.context_length,
    }
