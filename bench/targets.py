"""Does the engine hold a target for the inter-token latency, and what does that cost?

    python -m bench.targets [--model NAME] [--targets 100,200,400] [--requests 40] [--json]

Three loads (all at once, and Poisson arrivals at two rates) for each target, beside engines of fixed 1, 8 and 32
rows without a target. For each: p99 of the inter-token latency over the target, and the throughput over that of
the best fixed size whose p99 also stays within 1.2 x the target.
"""

import argparse
import json
import random
from typing import Any

from bench.engines import Measured, gen_request, machine, make_engine, model_folder, serve
from bench.workloads import mixed64
from promptmill.core.engine import GenRequest

FIXED = (1, 8, 32)
WITHIN = 1.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--targets", default="100,200,400", help="milliseconds")
    parser.add_argument("--rates", default="0,1,3", help="requests per second; 0 = all at once")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--most", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    folder = model_folder(args.model)
    targets = [float(target) / 1000 for target in args.targets.split(",")]
    rows: list[dict[str, Any]] = []
    for rate in map(float, args.rates.split(",")):
        load = arrivals(folder, rate, args.requests, args.most)
        fixed = {size: serve(make_engine(folder, rows=size), load) for size in FIXED}
        for size, run in fixed.items():
            rows.append(line(rate, f"fixed {size}", None, run, None))
            show(rows[-1], args.json)
        for target in targets:
            meets = [run.tok_s for run in fixed.values() if run.gap_quantile(0.99) <= WITHIN * target]
            run = serve(make_engine(folder, rows=32, target_itl_s=target), load)
            rows.append(line(rate, "target", target, run, max(meets, default=None)))
            show(rows[-1], args.json)
    print(json.dumps({"machine": machine(), "requests": args.requests, "runs": rows}))


def arrivals(folder: Any, rate: float, count: int, most: int) -> list[tuple[float, GenRequest]]:
    """The first requests of mixed64, their outputs cut to ``most`` tokens."""
    rng, at, load = random.Random(19), 0.0, []
    for n, request in enumerate(mixed64()[:count]):
        load.append((at, gen_request(f"r{n}", request, folder, max_tokens=min(most, request.max_tokens))))
        at += rng.expovariate(rate) if rate else 0.0
    return load


def line(rate: float, what: str, target: float | None, run: Measured, best: float | None) -> dict[str, Any]:
    p99 = run.gap_quantile(0.99)
    return {
        "rate": rate,
        "engine": what,
        "target_ms": target and round(target * 1000),
        "tok_s": round(run.tok_s, 1),
        "p50_ms": round(run.gap_quantile(0.5) * 1000, 1),
        "p99_ms": round(p99 * 1000, 1),
        "p99_by_target": target and round(p99 / target, 2),
        "tok_s_by_best_fixed": best and round(run.tok_s / best, 2),
    }


def show(row: dict[str, Any], quiet: bool) -> None:
    if not quiet:
        print("  ".join(f"{name}={value}" for name, value in row.items() if value is not None), flush=True)


if __name__ == "__main__":
    main()
