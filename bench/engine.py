"""The engine beside others: the same token ids, the same lengths, one run, in turns.

    python -m bench.engine mixed64|single8|shared_prefix [--rows 1,16,32,64] [--shape 30m,135m,360m,1b]
                           [--peers generate,hf-cb,vllm,llama-server] [--dtype auto] [--repeats 3] [--sampled] [--json]

Every system is loaded once for each number of rows and warmed by a short run; then all take turns, in the other
order each time, and the median counts. ``ratio_<peer>`` is our tokens per second by theirs. single8 is served one
request at a time. shared_prefix also runs our engine without its prefix cache; ``--sampled`` also with temperature
0.7, top_p 0.9 and seeds. A peer that cannot be had here is named as missing. How to install them:
docs/benchmarks.md. The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.engines import gen_request, machine, make_engine, model_folder, serve
from bench.peers import Missing, System
from bench.shapes import SHAPES, random_model
from bench.workloads import WORKLOADS, Request

PEERS = ("generate", "hf-cb", "vllm", "llama-server")
SAMPLED = {"temperature": 0.7, "top_p": 0.9}
WARM_UP = 8  # requests, cut to
WARM_TOKENS = 4


class Ours:
    """Our engine, stepped in this process. ``sampling``: instead of greedy; each request with a seed of its own."""

    def __init__(self, name: str, folder: Path, rows: int, sampling: dict[str, Any], **options: Any):
        self.name = name
        self._folder, self._sampling, self._options = folder, sampling, {"rows": rows, **options}
        self._engine = make_engine(folder, **self._options)
        self._runs = 0

    def run(self, requests: Sequence[Request], rows: int) -> float:
        """A fresh tenant each time, so that no run finds the KV of an earlier one."""
        self._runs += 1
        seconds = 0.0
        for batch in [[request] for request in requests] if rows == 1 else [requests]:
            load = []
            for number, request in enumerate(batch):
                sampling = {**self._sampling, "seed": number} if self._sampling else {}
                load.append((0.0, gen_request(f"r{number}", request, self._folder, tenant=f"run {self._runs}", **sampling)))
            found = serve(self._engine, load)
            assert found.tokens == sum(request.max_tokens for request in batch)
            seconds += found.seconds
        return seconds

    def close(self) -> None:
        del self._engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=("mixed64", "single8", "shared_prefix"))
    parser.add_argument("--rows", default="32")
    parser.add_argument("--shape", default="", help=f"random weights of the shapes {','.join(SHAPES)}; default: the served model")
    parser.add_argument("--peers", default="")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--vllm-python", default=os.environ.get("BENCH_VLLM_PYTHON", ""))
    parser.add_argument("--llama-server", default=os.environ.get("BENCH_LLAMA_SERVER", ""))
    parser.add_argument("--gguf", type=Path, default=os.environ.get("BENCH_GGUF") or None)
    parser.add_argument("--json", action="store_true", help="nothing but the last line")
    args = parser.parse_args()
    peers = [peer for peer in args.peers.split(",") if peer]
    if unknown := set(peers) - set(PEERS):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}")
    rows_of = [1] if args.workload == "single8" else [int(rows) for rows in args.rows.split(",")]
    results = []
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        for shape in args.shape.split(","):
            folder = random_model(shape, Path(scratch) / shape) if shape else model_folder()
            for rows in rows_of:
                results.append(measure(args, peers, folder, shape or folder.name, rows))
                if not args.json:
                    print(results[-1], flush=True)
    print(json.dumps({"machine": machine(), "workload": args.workload, "runs": results}))


def measure(args: argparse.Namespace, peers: Sequence[str], folder: Path, shape: str, rows: int) -> dict[str, Any]:
    """All systems with ``rows`` rows, in turns."""
    requests, missing, systems = WORKLOADS[args.workload](), {}, list[System]()
    dtype = peer_dtype(folder, args.dtype)
    made: dict[str, Callable[[], System]] = {"ours": lambda: Ours("ours", folder, rows, {}, dtype=args.dtype)}
    if args.workload == "shared_prefix":
        made["no_prefix_cache"] = lambda: Ours("no_prefix_cache", folder, rows, {}, dtype=args.dtype, prefix_cache=False)
    if args.sampled:
        made["sampled"] = lambda: Ours("sampled", folder, rows, SAMPLED, dtype=args.dtype)
    made |= {peer: lambda peer=peer: start(peer, args, folder, dtype, rows) for peer in peers}  # type: ignore[misc]
    times: dict[str, list[float]] = {}
    try:
        for name, make in made.items():
            try:
                systems.append(make())
                systems[-1].run([Request(r.prompt_ids, min(r.max_tokens, WARM_TOKENS)) for r in requests[:WARM_UP]], rows)
                times[name] = []
            except Missing as error:
                missing[name] = str(error)
        for turn in range(args.repeats):
            ready = [system for system in systems if system.name in times]
            for system in ready if turn % 2 == 0 else ready[::-1]:
                times[system.name].append(system.run(requests, rows))
    finally:
        for system in systems:
            system.close()
    tokens = sum(request.max_tokens for request in requests)
    tok_s = {name: round(tokens / statistics.median(seconds), 1) for name, seconds in times.items()}
    ratios = {f"ratio_{name}": round(tok_s["ours"] / value, 2) for name, value in tok_s.items() if name != "ours"}
    return {"shape": shape, "rows": rows, "dtype": dtype, "tok_s": tok_s, **ratios, "seconds": times, "missing": missing}


def peer_dtype(folder: Path, dtype: str) -> str:
    """What ``auto`` means here, so that all run in one number format."""
    import batching.engines.torch.device as device
    from batching.options import EngineOptions

    options = EngineOptions("torch", (folder,), dtype=dtype)
    return str(device.choose_dtype(options, device.choose_device(options))).removeprefix("torch.")


def start(peer: str, args: argparse.Namespace, folder: Path, dtype: str, rows: int) -> System:
    """Raises Missing."""
    from bench.peers.llama_server import LlamaServer
    from bench.peers.transformers import ContinuousBatching, Generate
    from bench.peers.vllm import VLLM

    if peer == "generate":
        return Generate(folder, dtype)
    if peer == "hf-cb":
        return ContinuousBatching(folder, dtype)
    if peer == "vllm":
        return VLLM(folder, dtype, rows, args.vllm_python)
    return LlamaServer(args.gguf, rows, args.llama_server)


if __name__ == "__main__":
    main()
