"""Engines by name. Nothing of an engine that is not chosen is imported."""

from pathlib import Path

from tokenizers import Tokenizer

from batching.engine import BatchingEngine
from batching.options import EngineOptions
from batching.request import ServedModel
from batching.runner import Runner
from promptmill.core.errors import ConfigError
from promptmill.core.models import ModelCard


def create_engine(options: EngineOptions) -> BatchingEngine:
    """The engine of ``options``; its weights are loaded by ``start``.

    Raises ConfigError when a model's folder is missing or damaged.
    """
    if not options.models:
        raise ConfigError("no model to serve")
    if options.kind == "instant":
        served = [load_served(folder) for folder in options.models]
        models = {model.card.name: model for model in served}
        return BatchingEngine(lambda: _instant(models, options), models, options)
    folder = options.models[0]
    model = load_served(folder)
    return BatchingEngine(lambda: _torch(folder, model.card, options), {model.card.name: model}, options)


def load_served(folder: Path) -> ServedModel:
    """The card and the tokenizer of a prepared model. Raises ConfigError."""
    card = ModelCard.load(folder)
    path = folder / "tokenizer.json"
    try:
        return ServedModel(card, Tokenizer.from_file(str(path)))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigError(f"{path} cannot be read ({error}); pull the model again") from None


def _instant(models: dict[str, ServedModel], options: EngineOptions) -> Runner:
    from batching.engines.instant import InstantRunner

    return InstantRunner(models, options)


def _torch(folder: Path, card: ModelCard, options: EngineOptions) -> Runner:
    from batching.engines.torch.runner import load_runner

    return load_runner(folder, card, options)
