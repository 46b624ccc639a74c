"""Kernels in C for the CPU: attention over the block pool, norms, gates, greedy picks.

They are built once on the machine that runs them, kept in a folder, and called through ctypes. Where
there is no compiler, or a kernel disagrees with torch, nothing of this is used.
"""

from batching.engines.torch.native.library import Native
from batching.engines.torch.native.loading import load_native

__all__ = ["Native", "load_native"]
