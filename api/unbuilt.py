"""Fields that clients send and this version does not implement.

A field with a meaning is refused, unless its value is the neutral one, which asks for nothing: a
result that silently lacks what was asked for is worse than an error. Fields without a meaning here
are ignored.
"""

from collections.abc import Mapping
from typing import Any

from api.schemas import JobRequest
from promptmill.core.errors import Unsupported
from promptmill.core.logs import get_logger

log = get_logger(__name__)

NOTHING: tuple[Any, ...] = ()
NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # name -> values that ask for nothing (null always does)
    # OpenAI
    "suffix": ("",),
    "stream": (False,),  # tokens are read from the job's events
    "stream_options": NOTHING,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": NOTHING,
    "prediction": NOTHING,
    "web_search_options": NOTHING,
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    # vLLM and its relatives
    "typical_p": (1,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "bad_words": ([],),
    "allowed_token_ids": NOTHING,
    "return_tokens_as_token_ids": (False,),
    "truncate_prompt_tokens": NOTHING,
    "add_special_tokens": NOTHING,
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": NOTHING,
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "logits_processors": ([],),
    "grammar": NOTHING,
    # promptmill's own, of later parts
    "webhook": NOTHING,
    "deadline": NOTHING,
    "ttl": NOTHING,
    "cancel_on_disconnect": (False,),
    "batch_id": NOTHING,
}
PREFIXES = ("guided_",)  # vLLM's older names of structured outputs; four are built
HARMLESS = frozenset({"user", "store", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"})
MAX_NAMES = 1000  # unknown names remembered, so that each is logged once


def refuse_unbuilt(body: Mapping[str, Any]) -> None:
    """Raises Unsupported for the first field that asks for what is not built."""
    for name, value in body.items():
        known = name in NEUTRAL or (name.startswith(PREFIXES) and name not in JobRequest.model_fields)
        if known and value is not None and not any(_same(value, neutral) for neutral in NEUTRAL.get(name, NOTHING)):
            shown = name[:100]  # a prefix may have any tail
            raise Unsupported(f"{shown} is not supported by this version{_hint(name)}", param=shown)


def _hint(name: str) -> str:
    if name == "stream":
        return "; read the tokens from the job's events link"
    neutral = NEUTRAL.get(name, NOTHING)
    return f", other than {' or '.join(map(str, neutral))}" if neutral else ""


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and of one kind: true is not 1, but 1.0 is."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


class UnknownFields:
    """Logs each unknown name once per process. Bounded: names come from clients."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, names: set[str]) -> None:
        for name in sorted({name[:100] for name in names} - self._seen):
            if len(self._seen) < MAX_NAMES:
                self._seen.add(name)
                log.info("ignoring an unknown field", field=name)
