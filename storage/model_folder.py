"""What makes a folder a model: which files are taken over, and the card computed from them."""

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from promptmill.core.errors import ConfigError
from promptmill.core.models import CARD, ModelCard

WEIGHTS = "model*.safetensors"  # not consolidated.safetensors, the same weights in another layout
INDEX = "model.safetensors.index.json"
SMALL = ("*.json", "*.jinja", "LICENSE*")
TEMPLATE = "chat_template.jinja"


def wanted(name: str) -> bool:
    """Whether a file of a model's repository is taken over: no code, no pickles, no other formats."""
    path = Path(name)
    return len(path.parts) == 1 and name != CARD and any(path.match(pattern) for pattern in (WEIGHTS, *SMALL))


def adopt(source: Path, folder: Path) -> None:
    """Take a model's files from ``source``: weights by hard link where the disk can, the rest copied."""
    for path in sorted(source.iterdir()):
        if not wanted(path.name) or not path.is_file():
            continue
        target = folder / path.name
        if path.match(WEIGHTS):
            _link_or_copy(path.resolve(), target)  # a Hugging Face cache holds symbolic links
        else:
            shutil.copyfile(path, target)


def _link_or_copy(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:  # another disk, or one without hard links
        shutil.copyfile(path, target)


def describe(folder: Path, name: str, source: str, created: int) -> ModelCard:
    """The card of a folder. Writes ``chat_template.jinja`` if the template lies in a JSON file.

    Raises ConfigError with the reason when the folder cannot be served.
    """
    for needed in ("config.json", "tokenizer.json"):
        if not (folder / needed).is_file():
            raise ConfigError(f"{source} cannot be served: it has no {needed}")
    weights = _weights(folder, source)
    config = _json(folder / "config.json", source)
    config = {**config, **config.get("text_config", {})}  # models of several kinds of input nest it
    generation = _json(folder / "generation_config.json", source)
    special = {**_json(folder / "special_tokens_map.json", source), **_json(folder / "tokenizer_config.json", source)}
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"{source} cannot be served: its tokenizer.json is damaged ({error})") from error
    _write_template(folder, special, source)

    bos_token, eos_token = _text(special.get("bos_token")), _text(special.get("eos_token"))
    bos_ids, eos_ids = _ids(generation, config, "bos_token_id"), _ids(generation, config, "eos_token_id")
    if bos_token is not None and (own := tokenizer.token_to_id(bos_token)) is not None:
        bos_ids.insert(0, own)
    if eos_token is not None and (own := tokenizer.token_to_id(eos_token)) is not None:
        eos_ids.append(own)
    if not eos_ids:
        raise ConfigError(f"{source} cannot be served: it names no end-of-sequence token")
    card = ModelCard(
        name=name,
        revision="",
        source=source,
        context_length=_number(config, "max_position_embeddings", source),
        vocab_size=_number(config, "vocab_size", source),
        eos_token_ids=tuple(sorted(set(eos_ids))),
        bos_token_id=bos_ids[0] if bos_ids else None,
        bos_token=bos_token or (tokenizer.id_to_token(bos_ids[0]) if bos_ids else None),
        eos_token=eos_token or tokenizer.id_to_token(eos_ids[0]),
        created=created,
    )
    files = [*weights, folder / "config.json", folder / "tokenizer.json", folder / TEMPLATE]
    return _with_revision(card, files)


def _with_revision(card: ModelCard, files: list[Path]) -> ModelCard:
    """sha256 over the hashes of ``files`` and the ids that end a text: whatever changes a result."""
    digest = hashlib.sha256(json.dumps(card.eos_token_ids).encode())
    for path in files:
        if path.is_file():
            with path.open("rb") as file:
                digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return replace(card, revision=digest.hexdigest()[:16])


def _weights(folder: Path, source: str) -> list[Path]:
    """All weight files. An index may only name files that lie in the folder."""
    found = sorted(folder.glob(WEIGHTS))
    if not found:
        raise ConfigError(f"{source} cannot be served: it has no {WEIGHTS}")
    shards = set(_json(folder / INDEX, source).get("weight_map", {}).values())
    missing = shards - {path.name for path in found}
    if missing:
        raise ConfigError(f"{source} cannot be served: weight file {min(missing)} is missing")
    return found


def _json(path: Path, source: str) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise ConfigError(f"{source} cannot be served: its {path.name} is damaged ({error})") from error
    return data


def _write_template(folder: Path, tokenizer_config: dict[str, Any], source: str) -> None:
    """A template in tokenizer_config.json is a text, or a list of named ones."""
    if (folder / TEMPLATE).is_file():
        return
    template = tokenizer_config.get("chat_template") or _json(folder / "chat_template.json", source).get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if isinstance(template, str):
        (folder / TEMPLATE).write_text(template, encoding="utf-8")


def _ids(generation: dict[str, Any], config: dict[str, Any], key: str) -> list[int]:
    """Both files may name one id or several; generation_config.json comes first."""
    ids: list[int] = []
    for value in (generation.get(key), config.get(key)):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return ids


def _text(token: object) -> str | None:
    """A special token in JSON: a text, an object with ``content``, or null."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _number(config: dict[str, Any], key: str, source: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{source} cannot be served: its config.json has no {key}")
    return value
