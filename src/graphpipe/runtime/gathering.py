"""What every rank holds or did, brought together on all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from graphpipe.runtime.meeting import broadcast_text
from graphpipe.runtime.process_group import rank
from graphpipe.runtime.transport import Transport
from graphpipe.trace import Span, SpanKind, Trace, TraceSource

_SPAN_KINDS = tuple(SpanKind)


def gather_tensors(mine: Mapping[str, Tensor], *, keeps: bool) -> dict[str, Tensor]:
    """Return the tensors of all ranks by name; each is given by the lowest rank that has it. All ranks must call this.

    Names, shapes and types travel as text.

    Args:
        mine: This rank's tensors.
        keeps: Whether this rank keeps what it gets.
    """
    header = json.dumps({n: [list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in mine.items()})
    found: dict[str, Tensor] = {}
    seen: set[str] = set()
    for source in range(dist.get_world_size()):
        layout = json.loads(broadcast_text(header, source))
        for name, (shape, dtype) in layout.items():
            if name in seen:
                continue
            seen.add(name)
            if source == rank():
                tensor = mine[name].cpu().contiguous().clone()
            else:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(tensor, src=source)
            if keeps:
                found[name] = tensor
    return found


def gather_trace(spans: Sequence[Span], peak_bytes: int, transport: Transport) -> Trace:
    """Return the trace of all ranks, which begins at 0. All ranks must call this.

    Args:
        spans: What this rank did.
        peak_bytes: The peak of its memory.
        transport: Sums over all ranks.
    """
    rows = torch.tensor(
        [[_SPAN_KINDS.index(s.kind), s.start_s, s.stop_s, s.stage, s.micro_batch] for s in spans],
        dtype=torch.float64,
    ).reshape(-1, 5)
    tables = []
    for source in range(dist.get_world_size()):
        size = torch.tensor([len(rows)])
        dist.broadcast(size, src=source)
        table = rows if source == rank() else torch.empty((int(size), 5), dtype=torch.float64)
        dist.broadcast(table, src=source)
        tables.append(table)
    start_s = min((float(table[:, 1].min()) for table in tables if len(table)), default=0.0)
    gathered = [
        Span(device, _SPAN_KINDS[int(kind)], start - start_s, stop - start_s, int(stage), int(m))
        for device, table in enumerate(tables)
        for kind, start, stop, stage, m in table.tolist()
    ]
    peaks = torch.zeros(len(tables), dtype=torch.int64)
    peaks[rank()] = peak_bytes
    transport.all_reduce(range(len(peaks)), peaks)
    return Trace(TraceSource.MEASURED, len(tables), tuple(gathered), tuple(peaks.tolist()))
