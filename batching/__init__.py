"""Batching: windows, scheduling, the engine loop and text; pure Python. Tensors live in ``engines/torch``."""
