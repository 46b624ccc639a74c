"""The api over in-memory twins, and a model small enough to build in a test."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flask import Flask
from flask.testing import FlaskClient
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from api.app import create_app
from api.services import Services
from api.tokenizing import GrammarCheck, ServedModel
from promptmill.core.clock import Clock
from promptmill.core.jobs import QueueName
from promptmill.core.metrics import Metrics
from promptmill.core.models import ModelCard
from promptmill.core.settings import Settings
from storage.memory import MemoryFanOut, MemoryJobQueue, MemoryJobStore, MemoryResultCache, MemoryTokenStream, MemoryWorkerDirectory
from tests.support.clock import FakeClock

TINY = "tiny-instruct"
CONTEXT = 64
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_model_folder(folder: Path, *, name: str = TINY, template: str | None = CHATML, bos: bool = True, eos: bool = True) -> Path:
    """One token per byte, and three special ones."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = [tokenizer.token_to_id(token) for token in SPECIAL]
    ModelCard(
        name=name,
        revision="0123456789abcdef",
        source="test",
        context_length=CONTEXT,
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_ids=(ids[2], ids[0]) if eos else (),
        bos_token_id=ids[1] if bos else None,
        bos_token=SPECIAL[1] if bos else None,
        eos_token=SPECIAL[2] if eos else None,
        created=1_800_000_000,
    ).save(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def refused(api: "Twins", body: Any, param: str | None, code: str | None = None, status: int = 400) -> dict[str, Any]:
    """The error; checks that it names the field and that no job was made."""
    answer = api.submit(body)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json["error"]
    assert error["param"] == param, error
    if code:
        assert error["code"] == code
    assert api.store.page().jobs == (), "a refused request left a job"
    return error


def stored(api: "Twins", body: Any) -> Any:
    """The job that was made of an accepted request."""
    answer = api.submit(body)
    assert answer.status_code == 202, answer.text
    return api.store.get(answer.json["id"])


@dataclass
class Twins:
    """The api's services in memory, each at hand, and a client."""

    services: Services
    store: MemoryJobStore
    queue: MemoryJobQueue
    stream: MemoryTokenStream
    cache: MemoryResultCache
    workers: MemoryWorkerDirectory
    fed: list[QueueName]
    app: Flask
    client: FlaskClient

    def submit(self, body: Any = None, **options: Any) -> Any:
        return self.client.post("/v1/jobs", json={"prompt": "hi"} if body is None else body, **options)

    def post_raw(self, data: bytes, content_type: str = "application/json", **options: Any) -> Any:
        return self.client.post("/v1/jobs", data=data, content_type=content_type, **options)


def make_twins(
    folder: Path,
    *,
    clock: Clock | None = None,
    names: tuple[str, ...] = (TINY,),
    store_type: type[MemoryJobStore] = MemoryJobStore,
    fanout_type: type[MemoryFanOut] = MemoryFanOut,
    grammars: GrammarCheck | None = None,
    **settings: Any,
) -> Twins:
    """``store_type``, ``fanout_type``: twins with a fault or an ear. ``grammars``: None = they are refused."""
    clock = clock or FakeClock()
    make = None if grammars is None else lambda _tokenizer, _card: grammars
    served = {name: ServedModel.load(make_model_folder(folder / name, name=name), clock, make) for name in names}
    stream = MemoryTokenStream(clock=clock)
    fanout = fanout_type(stream)
    fanout.start()
    store, queue, fed = store_type(clock=clock), MemoryJobQueue(), []
    services = Services(
        settings=Settings(data_dir=folder, _env_file=None, **settings),
        store=store,
        queue=queue,
        feeder=fed.append,
        stream=stream,
        fanout=fanout,
        cache=MemoryResultCache(clock=clock),
        workers=MemoryWorkerDirectory(clock=clock),
        models=served,
        metrics=Metrics(),
        clock=clock,
    )
    app = create_app(services)
    return Twins(services, store, queue, stream, services.cache, services.workers, fed, app, app.test_client())  # type: ignore[arg-type]


def parse_events(body: bytes) -> list[dict[str, Any]]:
    """Server-sent events of a finished body; the framing is checked on the way."""
    assert b"\r" not in body
    found = []
    for block in body.decode("ascii").split("\n\n"):
        if not block or block.startswith(":"):
            continue
        id_line, data_line = block.split("\n")
        event = json.loads(data_line.removeprefix("data: "))
        assert id_line == f"id: {event['id']}"
        found.append(event)
    return found
