"""What each rank does in a case about kinds of models and batches: one job of three ranks for all of them."""

from __future__ import annotations

from typing import Any

from graphpipe.runtime.compilation import Compilation
from graphpipe.runtime.process_transports import TransportKind
from tests.distributed import parity
from tests.distributed.cases import Fork, batch_of, mean_square
from tests.distributed.parity import compare


def compiled() -> dict[str, Any]:
    """Three stages with unequal micro-batches, the first with two replicas, are compiled."""
    parts = [("a b", 3, (0, 1)), ("c", 4, (2,)), ("", 5, (2,))]
    batches = [batch_of(10, seed=s) for s in range(2)]
    return compare(Fork(), parts, batches, 10, loss_fn=mean_square, compilation=Compilation(backend="aot_eager"))


def features() -> dict[str, Any]:
    """Run every case; the slow one, which messages have no part in, over one transport."""
    return {"compiled": compiled()} if parity.kind is TransportKind.ORDERED else {}
