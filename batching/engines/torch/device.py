"""Which device, number type, threads and memory a runner takes on this machine."""

import os
from pathlib import Path

import torch

from batching.options import EngineOptions
from promptmill.core.errors import ConfigError

CPU_ROWS = 32
CUDA_ROWS = 128
_CUDA_MEMORY_SHARE = 0.9
_CUDA_HEADROOM_BYTES = 1 << 30  # activations of a step, the CUDA context, allocator slack
_NATIVE_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}


def choose_device(options: EngineOptions) -> torch.device:
    """Raises ConfigError when CUDA is asked for and absent."""
    available = torch.cuda.is_available()
    if options.device == "cuda" and not available:
        raise ConfigError("the engine's device is cuda, but torch finds no CUDA GPU here; set the device to cpu or auto")
    return torch.device("cuda" if available and options.device != "cpu" else "cpu")


def choose_dtype(options: EngineOptions, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 only where the device computes in it: elsewhere it is 3 to 5 times slower than float32."""
    if options.dtype == "auto":
        native = device.type == "cuda" or bool(_NATIVE_BF16_FLAGS & cpu_flags())
        return torch.bfloat16 if native else torch.float32
    return torch.bfloat16 if options.dtype == "bfloat16" else torch.float32


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Instruction sets of the first CPU; empty where the system does not say."""
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def choose_threads(options: EngineOptions) -> int:
    """The setting, else the cores that this process may run on."""
    if options.threads:
        return options.threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_rows(options: EngineOptions, device: torch.device) -> int:
    return options.rows or (CUDA_ROWS if device.type == "cuda" else CPU_ROWS)


def kv_budget(options: EngineOptions, device: torch.device, weight_bytes: int) -> int:
    """Bytes that all rows' keys and values may take together. Raises ConfigError when none are left."""
    if options.kv_cache_bytes:
        return options.kv_cache_bytes
    if device.type == "cpu":
        return memory_limit() // 4
    total = torch.cuda.get_device_properties(device).total_memory
    budget = int(_CUDA_MEMORY_SHARE * total) - weight_bytes - _CUDA_HEADROOM_BYTES
    if budget <= 0:
        raise ConfigError(f"the model takes {weight_bytes >> 20} MiB and leaves no room for a KV cache on a GPU of {total >> 20} MiB")
    return budget


def memory_limit(cgroup: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Bytes of memory that this process can use: the machine's, or less in a container."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(physical, int(cgroup.read_text(encoding="ascii")))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return physical
