"""Standard workloads: the same requests for promptmill and for every peer it is compared with.

Each workload is a list of `Request`s made from a fixed seed with the standard library alone, so that any
benchmark client, in any environment, issues exactly the same work. Prompts are token ids drawn uniformly
from [100, 49000), valid for every vocabulary of at least 49 000 entries (SmolLM2 has 49 152).

    python -m bench.workloads            # one line per workload: requests, prompt tokens, output tokens
    python -m bench.workloads mixed64    # the workload as JSON lines: prompt_ids, max_tokens, at, priority
"""

import json
import random
import sys
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Request:
    prompt_ids: list[int]
    max_tokens: int  # exactly this many tokens: run with ignore_eos and temperature 0
    at: float = 0.0  # arrival, seconds after the start (0 = all at once)
    priority: str = "standard"


def _ids(r: random.Random, low: int, high: int) -> list[int]:
    return [r.randint(100, 49000) for _ in range(r.randint(low, high))]


def _log_uniform(r: random.Random, low: int, high: int) -> int:
    return int(low * (high / low) ** r.random())


def mixed64() -> list[Request]:
    """Throughput: 64 requests at once, ragged prompts (32..256) and outputs (16..192)."""
    r = random.Random(7)
    out = []
    for _ in range(64):
        n = r.randint(32, 256)
        m = _log_uniform(r, 16, 192)
        out.append(Request([r.randint(100, 49000) for _ in range(n)], m))
    return out


def single8() -> list[Request]:
    """Latency: the first 8 requests of mixed64, to be issued one after the other."""
    return mixed64()[:8]


def shared_prefix() -> list[Request]:
    """Prefix reuse: 48 requests over 3 system prompts of 192 tokens, 16 fresh tokens each, 24 out."""
    r = random.Random(11)
    heads = [[r.randint(100, 49000) for _ in range(192)] for _ in range(3)]
    return [Request(heads[i % 3] + _ids(r, 16, 16), 24) for i in range(48)]


def interference() -> list[Request]:
    """Interactive beside bulk: 120 bulk requests at once (64 in, 128 out); from second 5 on, 40 interactive
    requests (48 in, 16 out) with exponential gaps of 1 s on average. Compare the interactive time to first
    token with a run of the interactive requests alone."""
    r = random.Random(13)
    out = [Request(_ids(r, 64, 64), 128, 0.0, "bulk") for _ in range(120)]
    at = 5.0
    for _ in range(40):
        out.append(Request(_ids(r, 48, 48), 16, round(at, 3), "interactive"))
        at += r.expovariate(1.0)
    return out


def queue2000() -> list[Request]:
    """The queue alone: 2 000 tiny requests at once, for an engine that answers at once (no model)."""
    r = random.Random(17)
    return [Request(_ids(r, 8, 8), 8) for _ in range(2000)]


WORKLOADS = {f.__name__: f for f in (mixed64, single8, shared_prefix, interference, queue2000)}

if __name__ == "__main__":
    if len(sys.argv) > 1:
        for request in WORKLOADS[sys.argv[1]]():
            print(json.dumps(asdict(request)))
    else:
        for name, make in WORKLOADS.items():
            w = make()
            print(name, len(w), sum(len(x.prompt_ids) for x in w), sum(x.max_tokens for x in w))
