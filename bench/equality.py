"""Is a greedy answer the same bit for bit, whatever runs beside it?

    python -m bench.equality [--dtype float32|bfloat16] [--requests 64] [--most 192] [--model NAME] [--json]

Runs the workload mixed64 one request at a time, and then in batches of 8, 32 and 64 rows, with prompts in
chunks of 37, 64 and 256 tokens, on 1 and 2 threads, and with requests paused at random that lose their
KV cache and compute it again; says how many requests have the same token ids as alone.
"""

import argparse
import json
import random
from typing import Any

from batching.engine import BatchingEngine
from bench.engines import Measured, gen_request, machine, make_engine, model_folder, note, serve
from bench.workloads import mixed64
from promptmill.core.engine import GenRequest

WAYS: tuple[dict[str, Any], ...] = (
    {"rows": 8, "prefill_tokens": 64},
    {"rows": 32, "prefill_tokens": 37, "prefix_cache": False},
    {"rows": 32, "prefill_tokens": 256, "threads": 1},
    {"rows": 64, "prefill_tokens": 256},
)


def with_pauses(engine: BatchingEngine, requests: list[GenRequest], share: float) -> tuple[Measured, int]:
    """Serve all; after a ``share`` of the steps one running request is made to compute its KV cache again."""
    rng, found, pauses = random.Random(3), Measured(), 0
    for request in requests:
        engine.submit(request)
    going: dict[tuple[str, int], float] = {}
    while len(found.outputs) < len(requests):
        for event in engine.step():
            note(found, going, event, 0.0)
        alive = sorted({name for name, _ in going} - found.outputs.keys())
        if alive and rng.random() < share:
            name = rng.choice(alive)
            engine.pause(name, "recompute")
            for event in engine.step():
                note(found, going, event, 0.0)
            engine.resume(name)
            pauses += 1
    return found, pauses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--most", type=int, default=192, help="tokens of an answer")
    parser.add_argument("--model", default="")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    folder = model_folder(args.model)
    requests = [
        gen_request(f"r{n}", request, folder, max_tokens=min(args.most, request.max_tokens))
        for n, request in enumerate(mixed64()[: args.requests])
    ]

    engine = make_engine(folder, dtype=args.dtype, rows=1, threads=2)
    alone: dict[str, tuple[int, ...]] = {}
    for request in requests:
        alone |= serve(engine, [(0.0, request)]).outputs
    result: dict[str, Any] = {"machine": machine(), "dtype": args.dtype, "requests": len(requests), "most": args.most}
    result["batch_invariant"] = engine.caps.batch_invariant
    del engine

    def tell(way: str, outputs: dict[str, tuple[int, ...]]) -> None:
        result[way] = sum(outputs[name] == alone[name] for name in alone)
        if not args.json:
            print(f"{way}: {result[way]} of {len(alone)} equal to their lone run", flush=True)

    for options in WAYS:
        engine = make_engine(folder, dtype=args.dtype, **{"threads": 2, **options})
        tell(
            " ".join(f"{name}={value}" for name, value in options.items()), serve(engine, [(0.0, request) for request in requests]).outputs
        )
        del engine
    engine = make_engine(folder, dtype=args.dtype, rows=32, threads=2, prefix_cache=False)
    found, pauses = with_pauses(engine, requests, 0.3)
    tell(f"{pauses} recomputed pauses", found.outputs)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
