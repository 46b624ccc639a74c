"""A prepared model: a folder that the model store has made, and the card that describes it.

<models_dir>/<name>/
    promptmill.json      the card
    tokenizer.json       Hugging Face ``tokenizers`` format
    chat_template.jinja  absent when the model has none
    config.json, generation_config.json, model*.safetensors
<models_dir>/default     the name of the model served by default
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from promptmill.core.errors import ConfigError

CARD = "promptmill.json"
DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What others than the engine need to know of a model.

    ``revision``: sha256 over the weights' source and the tokenizer, first 16 hex digits; a part of
    every result's cache key. ``eos_token_ids``: the ids that end a text. ``bos_token``/``eos_token``:
    strings for the chat template. ``source``: where it was pulled from.
    """

    name: str
    revision: str
    source: str
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    bos_token: str | None
    eos_token: str | None
    created: int

    def save(self, folder: Path) -> None:
        (folder / CARD).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "ModelCard":
        """Raises ConfigError when the folder holds no prepared model."""
        try:
            data = json.loads((folder / CARD).read_text(encoding="utf-8"))
            return cls(**{**data, "eos_token_ids": tuple(data["eos_token_ids"])})
        except FileNotFoundError:
            hint = f"promptmill models list shows what is there, promptmill models pull {DEFAULT_MODEL} brings the default"
            raise ConfigError(f"no model at {folder}; {hint}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{folder / CARD} is damaged ({error}); pull the model again") from error


def chosen_models(models_dir: Path, names: str) -> list[Path]:
    """Folders of the models to serve: those of ``names`` (comma separated), else the default one."""
    if not names:
        pointer = models_dir / "default"
        names = pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else DEFAULT_MODEL
    return [models_dir / name.strip() for name in names.split(",") if name.strip()]
