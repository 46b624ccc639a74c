"""promptmill: a queue-backed job system for LLM inference."""

__version__ = "0.1.0"
