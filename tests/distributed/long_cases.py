"""Jobs of many steps."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from pathlib import Path
from typing import Any

import torch

from graphpipe.runtime.pipeline import Pipeline
from graphpipe.schedule import UniformCosts, kfkb
from graphpipe.stage import Stage, StageGraph
from tests.distributed import parity
from tests.distributed.random_cases import Captured
from tests.graph_models import GraphModel, OperatorShape, make_batch
from tests.stage_graphs import make_strategy

NUM_STEPS, WARM_UP = 2000, 1000


class _HeapFacts(ctypes.Structure):
    """What ``mallinfo2`` of the C library returns, over all of its arenas."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def heap_bytes() -> int:
    """Return the bytes that the C library has given out and not got back; 0 where it does not tell."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0
    ask.restype = _HeapFacts
    facts = ask()
    return int(facts.uordblks) + int(facts.hblkhd)


def two_thousand_steps() -> dict[str, Any]:
    """Train two stages, the first with a tied parameter on both devices; return what the process held by and by."""
    # torch remembers its last 2,000 collectives, a kilobyte each: with fewer that ends before the measurement begins.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "50"
    model = GraphModel([OperatorShape((), matrix="tied"), OperatorShape((0,), matrix="tied")])
    stages = tuple(Stage(operators=(f"op{i}",), micro_batch_size=2, devices=(i,)) for i in range(2))
    graph = StageGraph(model.graph, stages, 4)
    strategy = make_strategy(graph, schedule=kfkb(graph, UniformCosts(1.0, 2.0)))
    pipeline = Pipeline(
        Captured(model), strategy, optimizer=lambda pairs: torch.optim.Adam(pairs, lr=1e-3), transport=parity.kind
    )
    batch = make_batch(4)
    resident, objects, heap = [], [], []
    for step in range(NUM_STEPS + 1):
        pipeline.step(batch)
        if step in (WARM_UP, NUM_STEPS):
            gc.collect()
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
            objects.append(len(gc.get_objects()))
            heap.append(heap_bytes())
    return {"resident_bytes": resident, "objects": objects, "heap_bytes": heap}
