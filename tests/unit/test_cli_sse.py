"""The stream parser: it finds the same events however the bytes are cut."""

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from promptmill.cli.sse import parse

EVENTS = [{"id": "1-0", "text": "a\u2028b"}, {"id": "1-256", "text": "日本語 and a line\nbreak"}]
RAW = b": ping\n\n" + b"".join(
    f"id: {event['id']}\nevent: token\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".encode() for event in EVENTS
)


@given(st.lists(st.integers(0, len(RAW)), max_size=12))
def test_any_cut_gives_the_same_events(cuts: list[int]):
    edges = sorted({0, *cuts, len(RAW)})
    chunks = [RAW[start:end] for start, end in pairwise(edges)]
    assert list(parse(chunks)) == EVENTS


def test_lines_may_end_by_crlf():
    assert list(parse([RAW.replace(b"\n", b"\r\n")])) == EVENTS


def test_an_event_that_was_cut_off_is_dropped():
    assert list(parse([RAW[:-1]])) == EVENTS[:1]


def test_data_of_several_lines_is_joined():
    assert list(parse([b'data: {"a":\ndata: 1}\n\n'])) == [{"a": 1}]
