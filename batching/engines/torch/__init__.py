"""The torch engine: everything that knows tensors. Imported only when weights are to be loaded.

Before torch loads: libgomp's threads spin at the end of each parallel loop. Spinning for ever
costs dearly as soon as anything else runs on the cores (measured with two busy processes beside 2
threads: 8 to 30 x slower steps); not spinning doubles the time of small products. About 10 000
turns, some tens of microseconds, give nearly the best of both (docs/decisions/0002).
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
