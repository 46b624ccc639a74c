"""The check on a GPU: tests, decoding beside transformers and beside what the memory allows, utilisation.

    python -m bench.device                                                    # on a machine with an NVIDIA GPU
    python -m bench.device --device cpu --shape tiny --rows 1,2 --seconds 2   # the same paths on any machine

Needs no network and no model file (docs/gpu.md). Each part runs in a process of its own with a limit of its own, so
that neither a crash nor a hang of one costs the others. --out gets results.jsonl (a line per figure, written as it is
found), summary.json and device.log (what the parts wrote to standard error). The exit status is 1 if a part failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import batching.engines.torch  # noqa: F401 (sets how libgomp waits, before a part loads torch)
from bench.device_report import Line, sentence, summarise, table
from promptmill.core.clock import SYSTEM_CLOCK

ROOT = Path(__file__).parents[1]
BUDGET_S = 470.0  # for everything; a machine that is lent for eight minutes needs some to hand the results over
LEAST_S = 10.0  # a part that would get less is not started
TAIL_LINES = 20  # of the log, shown when a part fails
USE_ROWS = 32  # kept full for the second figure of utilisation, or all rows where there are fewer
SETTLE_S = 1.0  # before utilisation counts: the driver's figure looks back so far

Emit = Callable[[Line], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """``seconds``: of decoding at each number of rows. ``out``: the folder for results."""

    device: str
    shapes: tuple[str, ...]
    rows: tuple[int, ...]
    seconds: float
    out: Path


@dataclass(frozen=True, slots=True)
class Part:
    """``limit_s``: after so long it is stopped and has failed."""

    kind: str
    shape: str
    limit_s: float

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.shape}" if self.shape else self.kind


def parts_of(plan: Plan) -> list[Part]:
    """In the order of what is worth most, should the time run out. The tests marked cuda need CUDA."""
    parts = [Part("tests", "", 130)] if plan.device == "cuda" else []
    parts.append(Part("copy", "", 60))
    timed = (len(plan.rows) + 1) * plan.seconds
    for kind, spare_s in (("promptmill", 60), ("use", 50), ("generate", 50), ("continuous_batching", 60)):
        parts += [Part(kind, shape, spare_s + timed) for shape in plan.shapes]
    return parts


def measure(part: Part, plan: Plan, emit: Emit) -> None:
    """Run a part in this process. Raises whatever makes it fail."""
    if part.kind == "tests":
        return _tests(plan, emit)

    import torch  # the process that only starts parts has no use for it

    from bench import device_models as models

    device = torch.device(plan.device)
    if part.kind == "copy":
        from bench.device_decode import copy_bandwidth

        emit({"kind": "machine", **_machine(device)})
        return emit({"kind": "copy", "bytes_s": copy_bandwidth(device)})
    model = models.random_model(part.shape, device)
    if part.kind == "use":
        return _use(model, part.shape, plan, emit)
    weight = models.weigh(model)
    emit({"kind": "model", "shape": part.shape, "weight_bytes": weight.weights, "kv_token_bytes": weight.kv_token})
    return _decode(model, part, plan, emit)


def _decode(model: Any, part: Part, plan: Plan, emit: Emit) -> None:
    """All numbers of rows are tried; the first failure is raised behind the last."""
    from bench.device_decode import SYSTEMS

    decode = SYSTEMS[part.kind](model, part.shape, plan.rows, plan.seconds)
    failed: Exception | None = None
    for rows in plan.rows:
        try:
            found = decode(rows)
            if not found.tokens or found.seconds <= 0:
                raise RuntimeError(f"{rows} rows never decoded all at once")
        except Exception as error:
            traceback.print_exc()
            failed = failed or error
            continue
        tok_s = found.tokens / found.seconds
        line = {"kind": "decode", "system": part.kind, "shape": part.shape, "rows": rows, "tok_s": round(tok_s, 1)}
        emit({**line, "step_ms": round(1000 * rows / tok_s, 3), "context": round(found.context, 1), "seconds": round(found.seconds, 3)})
    if failed is not None:
        raise failed


def _use(model: Any, shape: str, plan: Plan, emit: Emit) -> None:
    import torch

    from bench.device_models import make_engine
    from bench.device_use import Load, find_sampler, mean_since

    many = min(USE_ROWS, max(plan.rows))
    engine = make_engine(model, shape, many)
    for rows in sorted({1, many}):
        sampler = find_sampler(f"GPU-{torch.cuda.get_device_properties(0).uuid}") if plan.device == "cuda" else None
        load = Load(engine, shape, model.config.vocab_size, rows)
        load.run(min(SETTLE_S, plan.seconds / 4))
        if sampler is None:
            since, (ended, tokens) = SYSTEM_CLOCK.monotonic(), load.run(plan.seconds)
        else:
            with sampler.running():
                load.run(SETTLE_S)
                since, (ended, tokens) = SYSTEM_CLOCK.monotonic(), load.run(plan.seconds)
        load.stop()
        percent, samples = mean_since(sampler.samples if sampler else [], since)
        line = {"kind": "use", "shape": shape, "rows": rows, "percent": None if percent is None else round(percent, 1)}
        emit({**line, "samples": samples, "sampler": sampler and sampler.name, "ended": ended, "tok_s": round(tokens / plan.seconds, 1)})
        if plan.device == "cuda" and percent is None:
            raise RuntimeError("nothing here tells the GPU's utilisation: neither NVML nor nvidia-smi gave a sample")


def _machine(device: Any) -> Line:
    import torch
    import transformers

    names = {"torch": torch.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0]}
    if device.type == "cuda":
        return {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda, **names}
    return {"gpu": None, "cores": os.cpu_count(), **names}


def _tests(plan: Plan, emit: Emit) -> None:
    """Those marked cuda, without the fixtures of servers, which need what no GPU machine has. Warnings of other
    releases of torch are no errors here. Raises RuntimeError unless all pass."""
    report = plan.out / "tests.xml"
    report.unlink(missing_ok=True)
    flags = ["-m", "cuda", "--noconftest", "-p", "batching.engines.torch", "-p", "no:cacheprovider", "-W", "default", "-q"]
    command = [sys.executable, "-m", "pytest", *flags, f"--junitxml={report}", *cuda_tests()]
    status = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    line = read_junit(report) if report.is_file() else {"passed": 0, "failed": [], "skipped": 0}
    emit({"kind": "tests", **line})
    if status or not line["passed"]:
        raise RuntimeError(f"pytest ended with {status}, {line['passed']} tests passed and {len(line['failed'])} failed")


def cuda_tests() -> list[str]:
    """The files that hold any."""
    files = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(path.relative_to(ROOT)) for path in files if "mark.cuda" in path.read_text(encoding="utf-8"))


def read_junit(path: Path) -> Line:
    """``failed``: name and first line of the reason."""
    passed, skipped, failed = 0, 0, []
    for case in ElementTree.parse(path).iter("testcase"):
        wrong = next((child for child in case if child.tag in ("failure", "error")), None)
        if wrong is not None:
            failed.append({"test": case.get("name"), "reason": (wrong.get("message") or "").partition("\n")[0][:300]})
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "skipped": skipped}


def run_all(plan: Plan, parts: Sequence[Part], budget_s: float = BUDGET_S) -> Line:
    """Every part in a process of its own, one after the other; the summary, which also lies in ``plan.out``."""
    plan.out.mkdir(parents=True, exist_ok=True)
    lines_file = plan.out / "results.jsonl"
    lines_file.write_text("", encoding="utf-8")
    end = SYSTEM_CLOCK.monotonic() + budget_s
    with (plan.out / "device.log").open("wb") as log:
        for part in parts:
            print(f"--- {part.name}", flush=True)
            ended = run_one(part, plan, end - SYSTEM_CLOCK.monotonic(), log)
            append(lines_file, ended)
            print(sentence(ended), flush=True)
            summary = summarise(read_lines(lines_file))  # now and not at the end, which may not come
            (plan.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summarise(read_lines(lines_file))


def run_one(part: Part, plan: Plan, left_s: float, log: Any) -> Line:
    """How it ended. ``left_s``: of the time for everything. ``log``: takes standard error; its end is shown on failure."""
    began, limit = SYSTEM_CLOCK.monotonic(), min(part.limit_s, left_s)
    if left_s < LEAST_S:
        return {"kind": "part", "name": part.name, "ok": False, "reason": "no time was left", "seconds": 0.0}
    log.write(f"=== {part.name}\n".encode())
    log.flush()
    start = log.tell()
    child = subprocess.Popen([sys.executable, "-m", "bench.device", *_arguments(part, plan)], cwd=ROOT, stderr=log, process_group=0)
    try:
        status = child.wait(limit)
        reason = "" if status == 0 else f"its process ended with {status}"
    except subprocess.TimeoutExpired:
        reason = f"it was stopped at its limit of {limit:.0f} s"
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)  # with whatever it has started
            child.wait()
    if reason:
        log.flush()
        written = Path(log.name).read_bytes()[start:].decode(errors="replace").splitlines()
        print("\n".join(written[-TAIL_LINES:]), flush=True)
    return {"kind": "part", "name": part.name, "ok": not reason, "reason": reason, "seconds": round(SYSTEM_CLOCK.monotonic() - began, 1)}


def _arguments(part: Part, plan: Plan) -> list[str]:
    rows = ",".join(map(str, plan.rows))
    given = ["--part", part.kind, "--device", plan.device, "--rows", rows, "--seconds", str(plan.seconds), "--out", str(plan.out)]
    return [*given, "--shape", part.shape] if part.shape else given


def append(path: Path, line: Line) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_lines(path: Path) -> list[Line]:
    """Whole lines only: a part that was killed may have left half of one."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            print(f"half a line in {path}: {text[:80]}", file=sys.stderr)
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shape", default="8b,135m", help="tiny, 135m, 8b; several with commas")
    parser.add_argument("--rows", default="1,8,32,128")
    parser.add_argument("--seconds", type=float, default=3.0, help="of decoding at each number of rows")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for everything")
    parser.add_argument("--only", default="", help="names of parts, as tests,promptmill-8b; default: all")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "device-out"))
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)  # run this one here
    args = parser.parse_args(arguments)
    shapes = tuple(args.shape.split(","))
    plan = Plan(args.device, shapes, tuple(map(int, args.rows.split(","))), args.seconds, args.out.resolve())
    if args.part:

        def emit(line: Line) -> None:
            append(plan.out / "results.jsonl", line)
            print(sentence(line), flush=True)

        measure(Part(args.part, "" if args.part in ("tests", "copy") else shapes[0], 0), plan, emit)
        return 0
    only = set(filter(None, args.only.split(",")))
    parts = [part for part in parts_of(plan) if not only or part.name in only]
    if unknown := only - {part.name for part in parts}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in parts_of(plan))}")
    summary = run_all(plan, parts, args.budget)
    print(table(summary))
    failed = [part["name"] for part in summary["parts"] if not part["ok"]]
    print(f"all of it is in {plan.out}; " + (f"FAILED: {', '.join(failed)}" if failed else "every part is ok"))
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
