"""llama.cpp's server over its native HTTP API, on a GGUF file of the same weights (gguf_export.py)."""

import os
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from bench.peers import Missing
from bench.workloads import Request
from promptmill.core.clock import SYSTEM_CLOCK
from promptmill.supervisor.services import free_port

_START_S = 120.0
_ROW_TOKENS = 512  # of context for each slot: the workloads need at most 448


class LlamaServer:
    name = "llama-server"

    def __init__(self, gguf: Path | None, rows: int, binary: str):
        if not binary:
            raise Missing("no llama-server: give --llama-server or BENCH_LLAMA_SERVER")
        if gguf is None or not gguf.is_file():
            raise Missing("no GGUF file of the model: give --gguf (bench.peers.gguf_export writes one)")
        port, threads = free_port(), str(len(os.sched_getaffinity(0)))
        command = [
            binary,
            "-m",
            str(gguf),
            "--port",
            str(port),
            "-np",
            str(rows),
            "-c",
            str(rows * _ROW_TOKENS),
            "-t",
            threads,
            "-tb",
            threads,
        ]
        try:
            self._process = subprocess.Popen([*command, "--no-webui"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except OSError as error:
            raise Missing(f"{binary} does not run: {error.strerror}") from error
        limits = httpx.Limits(max_connections=rows, max_keepalive_connections=rows)
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600.0, limits=limits)
        self._wait()

    def run(self, requests: Sequence[Request], rows: int) -> float:
        began = SYSTEM_CLOCK.monotonic()
        with ThreadPoolExecutor(rows) as threads:
            counts = list(threads.map(self._complete, requests))
        seconds = SYSTEM_CLOCK.monotonic() - began
        if counts != [request.max_tokens for request in requests]:
            raise Missing("llama-server ended requests early")
        return seconds

    def _complete(self, request: Request) -> int:
        body = {
            "prompt": list(request.prompt_ids),
            "n_predict": request.max_tokens,
            "ignore_eos": True,
            "cache_prompt": False,
            "temperature": 0.0,
            "top_k": 1,
            "stream": False,
        }
        answer = self._http.post("/completion", json=body)
        answer.raise_for_status()
        return int(answer.json()["tokens_predicted"])

    def _wait(self) -> None:
        ends = SYSTEM_CLOCK.monotonic() + _START_S
        while SYSTEM_CLOCK.monotonic() < ends:
            if self._process.poll() is not None:
                raise Missing(f"llama-server ended with status {self._process.returncode}")
            try:
                if self._http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise Missing("llama-server does not become ready")

    def close(self) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait()
