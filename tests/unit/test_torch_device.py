"""What a runner takes on a machine."""

import os

import pytest
import torch

from batching.engines.torch.device import choose_device, choose_dtype, choose_rows, choose_threads, cpu_flags, kv_budget, memory_limit
from batching.options import EngineOptions
from promptmill.core.errors import ConfigError

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def options(**changes):
    return EngineOptions("torch", (), **changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused_with_one_line():
    with pytest.raises(ConfigError, match="finds no CUDA GPU"):
        choose_device(options(device="cuda"))
    assert choose_device(options()) == CPU


def test_a_named_dtype_is_taken_and_a_gpu_computes_in_bfloat16():
    assert choose_dtype(options(dtype="float32"), CUDA) is torch.float32
    assert choose_dtype(options(dtype="bfloat16"), CPU) is torch.bfloat16
    assert choose_dtype(options(), CUDA) is torch.bfloat16


def test_auto_on_cpu_follows_the_instruction_set():
    native = bool({"avx512_bf16", "amx_bf16"} & cpu_flags())
    assert choose_dtype(options(), CPU) is (torch.bfloat16 if native else torch.float32)


def test_flags_are_read_word_by_word(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 amx_tile\nprocessor\t: 1\nflags\t\t: other\n")
    assert cpu_flags(info) == {"fpu", "avx512f", "avx512_bf16", "amx_tile"}
    assert cpu_flags(tmp_path / "absent") == set()


def test_rows_and_threads_follow_the_settings_or_the_machine():
    assert (choose_rows(options(), CPU), choose_rows(options(), CUDA), choose_rows(options(rows=5), CUDA)) == (32, 128, 5)
    assert choose_threads(options(threads=3)) == 3
    assert choose_threads(options()) == len(os.sched_getaffinity(0))


def test_the_budget_on_cpu_is_a_quarter_of_the_memory_that_may_be_used(tmp_path):
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = tmp_path / "memory.max"
    limit.write_text("1048576\n")
    assert memory_limit(limit) == 1048576
    limit.write_text("max\n")
    assert memory_limit(limit) == physical
    assert kv_budget(options(), CPU, weight_bytes=0) == memory_limit() // 4
    assert kv_budget(options(kv_cache_bytes=777), CPU, weight_bytes=0) == 777
