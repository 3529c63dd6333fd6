"""CUDA C++ kernels, the same names and signatures as in `reference/`; built for Hopper, from `topk_cuda/`.

Part of a compiled variant only: `AVAILABLE` says whether this is one. Importing touches neither CUDA nor, elsewhere,
anything but the folder. A compiled variant whose library doesn't load fails to import, and says why.
"""

from pathlib import Path

AVAILABLE = any(Path(__file__).parents[1].glob("*.abi3.so"))
if AVAILABLE:
    from .index import index_topk
    from .topk import gvr_topk, select_blocks, topk_threshold

    __all__ = ["AVAILABLE", "gvr_topk", "index_topk", "select_blocks", "topk_threshold"]
