"""vLLM in an environment of its own, through its offline engine."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers import Missing
from bench.workloads import Request


class VLLM:
    name = "vllm"

    def __init__(self, folder: Path, dtype: str, rows: int, python: str):
        if not python:
            raise Missing("no python with vllm: give --vllm-python or BENCH_VLLM_PYTHON")
        driver = Path(__file__).with_name("vllm_driver.py")
        try:
            self._process = subprocess.Popen(
                [python, str(driver), str(folder), dtype, str(rows)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError as error:
            raise Missing(f"{python} does not run: {error.strerror}") from error
        self.version = self._answer().get("ready", "")

    def run(self, requests: Sequence[Request], rows: int) -> float:
        order = {"prompts": [list(r.prompt_ids) for r in requests], "lengths": [r.max_tokens for r in requests], "together": rows > 1}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if answer["tokens"] != sum(request.max_tokens for request in requests):
            raise Missing("vllm ended requests early")
        return float(answer["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Missing(f"vllm ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
