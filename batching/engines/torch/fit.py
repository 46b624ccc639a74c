"""Whether packed steps give a model's own logits: the check at load, so that no family is served wrongly.

What a step relies on holds for most decoders: tokens meet in attention alone, and that is causal and goes
through the function that it is given. A few families look alike and are built otherwise (attention that is
a difference of two, say); so each model shows it on a short text.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from batching.engines.torch.attention import NAME, PassCache, ShapeProbe, Span, Step, attending
from batching.engines.torch.kv import KVShape, TorchKV
from promptmill.core.errors import ConfigError

_LENGTH = 23
_CHUNK = 14  # of the text, alone; the rest of it goes beside another row, which has its beginning
_BESIDE = 9
# Of the mean difference, in standard deviations of the logits. In bfloat16 two ways to one result differ by a few percent.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def replace_attention(model: Any, cache_argument: str) -> None:
    """Make ``model`` attend by the step it is run in. Raises ConfigError if it cannot, or then computes other logits."""
    kind, config = type(model).__name__, model.config.get_text_config()
    text = torch.arange(_LENGTH) * 7919 % config.vocab_size  # a prime
    try:
        with torch.inference_mode():
            model.set_attn_implementation("eager")  # others may leave a softcap out, as transformers 5.17's sdpa does
            own = model(input_ids=text[None].to(model.device), use_cache=False).logits[0]
            model.set_attn_implementation(NAME)
            if config._attn_implementation != NAME:
                raise ConfigError(f"{kind} has an attention of its own that cannot be replaced; this model cannot be served")
            packed = _packed(model, cache_argument, text)
    except ConfigError:
        raise
    except Exception as error:  # whatever the code of a family raises
        raise ConfigError(f"{kind} cannot run a step of several texts: {error}") from error
    own = torch.cat([own, own[:_BESIDE]])
    # Weights may make some logits no numbers. That is no matter of the family: a row with such fails when it is served.
    sound = own.isfinite().all(-1)
    own, packed = own[sound].float(), packed[sound].float()
    if len(own) and not (packed - own).abs().mean() <= _TOLERANCE[model.dtype] * own.std():
        raise ConfigError(f"{kind} gives other logits in a step of several texts; this model cannot be served")


def kv_shape(model: Any, cache_argument: str) -> KVShape:
    """What the layers hand to their attention, seen in a dry pass over two tokens. Raises ConfigError if they differ."""
    probe = ShapeProbe()
    two = torch.zeros(2, dtype=torch.long)
    run_packed(model, cache_argument, probe, two, torch.arange(2), two[1:])
    shapes = set(probe.layers.values())
    if len(shapes) != 1 or sorted(probe.layers) != list(range(len(probe.layers))):
        raise ConfigError(f"{type(model).__name__} has layers of different shapes, which cannot be served")
    heads, key_dim, value_dim = shapes.pop()
    return KVShape(len(probe.layers), heads, key_dim, value_dim, model.dtype)


def run_packed(model: Any, cache_argument: str, step: Step, ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
    """One forward pass over packed tokens: the logits [len(keep), vocabulary] at the places ``keep``."""
    ids, positions, keep = (numbers.to(model.device) for numbers in (ids, positions, keep))
    with attending(step):
        output = model(
            input_ids=ids[None], position_ids=positions[None], logits_to_keep=keep, use_cache=False, **{cache_argument: PassCache()}
        )
    logits: Tensor = output.logits[0]
    return logits


def _packed(model: Any, cache_argument: str, text: Tensor) -> Tensor:
    """The logits of the text and of its beginning, one after the other, by two steps."""
    pool = TorchKV(kv_shape(model, cache_argument), 2, model.device)

    def run(spans: Sequence[Span], ids: Tensor) -> Tensor:
        positions = torch.cat([torch.arange(span.past, span.past + span.count) for span in spans])
        return run_packed(model, cache_argument, pool.step(spans), ids, positions, torch.arange(len(ids)))

    begun = run([Span((1,), 0, _CHUNK)], text[:_CHUNK])
    rest = run([Span((1,), _CHUNK, _LENGTH - _CHUNK), Span((0,), 0, _BESIDE)], torch.cat([text[_CHUNK:], text[:_BESIDE]]))
    return torch.cat([begun, rest])
