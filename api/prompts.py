"""The two forms of a prompt: token ids, and the messages of a chat. Checked by hand, so that an error names its place."""

from typing import Any

from api.tokenizing import ServedModel, too_long
from promptmill.core.errors import BadRequest, Unsupported

ROLES = ("system", "developer", "user", "assistant")


def prompt_ids(prompt: Any, model: ServedModel) -> tuple[int, ...]:
    if not isinstance(prompt, list):
        raise BadRequest("prompt must be a text or a list of token ids", param="prompt")
    if not prompt:
        raise BadRequest("prompt must not be an empty list", param="prompt")
    if isinstance(prompt[0], str | list):
        raise Unsupported("a job takes one prompt; send one job for each", param="prompt")
    if len(prompt) >= model.card.context_length:
        raise too_long(model.card.context_length, str(len(prompt)), "prompt")
    for at, token in enumerate(prompt):
        if type(token) is not int:
            raise BadRequest("a token id must be an integer", param=f"prompt[{at}]")
        if not 0 <= token < model.card.vocab_size:
            raise BadRequest(f"a token id must be in 0..{model.card.vocab_size - 1}", param=f"prompt[{at}]")
    return tuple(prompt)


def chat_messages(messages: Any) -> list[tuple[str, str]]:
    if not isinstance(messages, list):
        raise BadRequest("messages must be a list", param="messages")
    if not messages:
        raise BadRequest("messages must not be empty", param="messages")
    return [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _message(message: Any, path: str) -> tuple[str, str]:
    """Other keys of a message are ignored; calls of tools are refused."""
    if not isinstance(message, dict):
        raise BadRequest("a message must be an object with role and content", param=path)
    role = message.get("role")
    if role in ("tool", "function"):
        raise Unsupported("tools are not supported by this version", param=f"{path}.role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"a role must be one of {', '.join(ROLES)}", param=f"{path}.role")
    for calls in ("tool_calls", "function_call"):
        if message.get(calls):
            raise Unsupported("tools are not supported by this version", param=f"{path}.{calls}")
    content = message.get("content")
    if content is None and role == "assistant":
        return role, ""
    return "system" if role == "developer" else role, _content(content, f"{path}.content")


def _content(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise BadRequest("content must be a text or a list of text parts", param=path)
    texts: list[str] = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise BadRequest("a content part must be an object with type and text", param=f"{path}[{at}]")
        if kind != "text":
            raise Unsupported("only text parts are supported by this version", param=f"{path}[{at}].type")
        if not isinstance(part.get("text"), str):
            raise BadRequest("a text part must have a text", param=f"{path}[{at}].text")
        texts.append(part["text"])
    return "".join(texts)
