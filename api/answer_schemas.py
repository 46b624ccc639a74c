"""The shapes of a job's result: OpenAI's completion and chat completion, with vLLM's prompt_logprobs."""

from typing import Literal

from pydantic import BaseModel, Field


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str


class TopLogprob(BaseModel):
    token: str
    logprob: float = Field(description="At least -9999.0")
    bytes: list[int] | None


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ContentLogprob]
    refusal: None


class TextLogprobs(BaseModel):
    """Four lists of one length. With echo the prompt's tokens come first, the very first one with nulls."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(BaseModel):
    logprob: float
    decoded_token: str


PromptScores = list[dict[str, PromptToken] | None]


class AnswerChoice(BaseModel):
    index: int
    text: str | None = Field(None, description="Of a prompt")
    message: AnswerMessage | None = Field(None, description="Of messages")
    finish_reason: Literal["stop", "length", "cancelled"]
    logprobs: ChatLogprobs | TextLogprobs | None
    prompt_logprobs: PromptScores | None = Field(None, description="Of a prompt, in its first choice, if asked for; by token id")


class Answer(BaseModel):
    """Shaped as OpenAI's completion or chat completion."""

    id: str
    object: Literal["text_completion", "chat.completion"]
    created: int
    model: str
    choices: list[AnswerChoice]
    usage: Usage
    prompt_logprobs: PromptScores | None = Field(None, description="Of messages, if asked for; by token id")
