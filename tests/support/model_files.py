"""A model's files, as small as they can be, and a web server for a folder of them."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

VOCABULARY = {"<unk>": 0, "<s>": 1, "</s>": 2, "<|im_end|>": 3, "hello": 4}
TEMPLATE = "{{ messages[0]['content'] }}"


def write_model(folder: Path, **changes: dict[str, Any] | None) -> Path:
    """``changes``: further fields by file, such as ``config={"eos_token_id": [2, 3]}``; None leaves the file out."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, Any]] = {
        "config": {"vocab_size": 5, "max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 1},
        "generation_config": {"eos_token_id": [2]},
        "tokenizer_config": {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}, "chat_template": TEMPLATE},
    }
    for name, data in files.items():
        change = changes.get(name, {})
        if change is not None:
            merged = {key: value for key, value in {**data, **change}.items() if value is not None}
            (folder / f"{name}.json").write_text(json.dumps(merged))
    Tokenizer(WordLevel(VOCABULARY, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    save_file({"weight": numpy.arange(8, dtype=numpy.float32)}, folder / "model.safetensors")
    return folder


def convert(gguf: Path, folder: Path) -> None:
    """Stands in for the engine's converter: the "GGUF" decides the weights."""
    write_model(folder)
    save_file({"weight": numpy.frombuffer(gguf.read_bytes(), dtype=numpy.uint8)}, folder / "model.safetensors")


@contextmanager
def web_server(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The URL of ``folder``, and the paths asked for."""
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
