"""A strategy as tables for the terminal: what each stage holds and costs, and how full and busy each device is."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from graphpipe.estimate import Estimate, format_bytes
from graphpipe.report.facts import DeviceFacts, device_facts, stage_facts, summary
from graphpipe.report.labels import devices_label, ranges
from graphpipe.report.notes import note_lines
from graphpipe.report.svg import shorten
from graphpipe.report.units import format_seconds, format_share
from graphpipe.stage import Recompute
from graphpipe.strategy import Strategy

LEAST_WIDTH = 60
_MOST_ROWS = 32
_BETWEEN = 2


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of a table.

    Attributes:
        header: At most two lines.
        cells: A text a row.
        importance: Where a table is too wide, what has the least goes; what has 9 stays.
        least: The width to which it may be shortened; 0 for its full width.
        is_text: Not a number, so aligned left.
    """

    header: str
    cells: tuple[str, ...]
    importance: int = 9
    least: int = 0
    is_text: bool = False

    @property
    def width(self) -> int:
        full = max(len(line) for text in (self.header, *self.cells) for line in text.split("\n"))
        return min(full, self.least) if self.least else full


@dataclass(frozen=True, slots=True)
class _Shortened:
    """Text in one line that gives way in the middle."""

    text: str
    least: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(shorten(self.text, options.max_width), no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(self.least, len(self.text)), len(self.text))


def plan_table(strategy: Strategy, estimate: Estimate, *, width: int = 120) -> Table:
    """Return the table of stages.

    Replicas and recomputation are shown where some stage has them. Where `width` columns are not enough, names are
    shortened, then the least important columns left out.
    """
    facts = stage_facts(strategy)
    stages = strategy.stages
    idle = [[estimate.idle_share(d) for d in stage.devices] for stage in stages.stages]
    columns = [
        _Column("#", tuple(str(f.stage) for f in facts)),
        _Column("holds", tuple(f.label for f in facts), least=16, is_text=True),
        _Column("ops", tuple(str(f.num_operators) for f in facts), 4),
        _Column("devices", tuple(f.devices for f in facts), least=9, is_text=True),
        _Column("micro-\nbatch", tuple(f"{f.micro_batch_size} × {f.num_micro_batches}" for f in facts)),
        _Column("param.", tuple(format_bytes(f.parameter_bytes) for f in facts), 6),
        _Column("in\nflight", tuple(str(f.num_in_flight) for f in facts), 7),
        _Column("forward", tuple(format_seconds(f.forward_s) for f in facts)),
        _Column(
            "backward",
            tuple(
                format_seconds(f.backward_s) if has else "–" for f, has in zip(facts, stages.has_backward, strict=True)
            ),
        ),
        _Column("idle", tuple(format_share(sum(shares) / len(shares)) for shares in idle), 5),
    ]
    if any(f.num_replicas > 1 for f in facts):
        columns.insert(4, _Column("repl.", tuple(str(f.num_replicas) for f in facts), 3))
    if any(f.recompute is not Recompute.NONE for f in facts):
        columns.insert(-1, _Column("recom-\npute", tuple(f.recompute.value for f in facts), 8, is_text=True))
    return _table(columns, width)


def device_table(strategy: Strategy, estimate: Estimate, *, width: int = 120) -> Table:
    """Return the table of devices: time and memory.

    Neighbours that hold the same stages and have the same numbers share a row. Of very many rows, the fullest are
    shown.
    """
    rows = _device_rows(strategy, estimate)
    if len(rows) > _MOST_ROWS:
        rows.sort(key=lambda row: (-row[1].peak_bytes / row[1].available_bytes, row[1].device))
        rows = rows[:_MOST_ROWS]
    return _table(
        [
            _Column("device", tuple(devices_label(strategy.cluster, ds) for ds, _ in rows), least=9, is_text=True),
            _Column("stages", tuple(ranges(f.stages) or "–" for _, f in rows), least=8, is_text=True),
            *(
                _Column(header, tuple(_numbers(f)[i] for _, f in rows), importance)
                for i, (header, importance) in enumerate(_DEVICE_COLUMNS, start=1)
            ),
        ],
        width,
    )


def _device_rows(strategy: Strategy, estimate: Estimate) -> list[tuple[list[int], DeviceFacts]]:
    rows: list[tuple[list[int], DeviceFacts]] = []
    for device in device_facts(strategy, estimate):
        if rows and _numbers(rows[-1][1]) == _numbers(device):
            rows[-1][0].append(device.device)
        else:
            rows.append(([device.device], device))
    return rows


_DEVICE_COLUMNS = (
    ("busy", 9),
    ("idle", 3),
    ("peak\nmemory", 9),
    ("avail-\nable", 8),
    ("share", 7),
    ("param.", 5),
    ("grad.", 4),
    ("optim.", 4),
    ("activ.", 6),
)


def _numbers(facts: DeviceFacts) -> tuple[str, ...]:
    """Return what a row of the table of devices shows after the stages, and the stages, to tell whether rows differ."""
    parts = facts.memory
    return (
        str(facts.stages),
        format_share(facts.busy_share),
        format_share(facts.idle_share),
        format_bytes(facts.peak_bytes),
        format_bytes(facts.available_bytes),
        format_share(facts.peak_bytes / facts.available_bytes),
        *map(format_bytes, (parts.parameters, parts.gradients, parts.optimizer, parts.activations)),
    )


def _table(columns: Sequence[_Column], width: int) -> Table:
    shown = list(columns)
    while sum(column.width + _BETWEEN for column in shown) - _BETWEEN > width:
        least = min(shown, key=lambda column: column.importance)
        if least.importance == 9:
            break
        shown.remove(least)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in shown:
        table.add_column(column.header, justify="left" if column.is_text else "right", no_wrap=not column.least)
    for cells in zip(*(column.cells for column in shown), strict=True):
        # As text, not as markup: a name may hold square brackets.
        table.add_row(
            *(
                _Shortened(cell, column.least) if column.least else Text(cell)
                for cell, column in zip(cells, shown, strict=True)
            )
        )
    return table


def plan_text(strategy: Strategy, estimate: Estimate, *, width: int = 120) -> str:
    """Return a strategy in words and tables, for a terminal of `width` columns.

    Raises:
        ValueError: `width` is less than 60.
    """
    if width < LEAST_WIDTH:
        raise ValueError(f"the tables of a strategy need at least {LEAST_WIDTH} columns, got {width}")
    screen = io.StringIO()
    console = Console(file=screen, width=width, color_system=None, force_terminal=False, highlight=False, emoji=False)
    console.print(Text(strategy.graph.name))
    console.print(_pairs(summary(strategy, estimate)))
    console.print()
    console.print(plan_table(strategy, estimate, width=width))
    console.print()
    console.print(device_table(strategy, estimate, width=width))
    if len(_device_rows(strategy, estimate)) > _MOST_ROWS:
        console.print(f"The fullest of {len(strategy.cluster)} devices are shown.")
    notes = note_lines(strategy.notes)
    if notes:
        console.print()
        console.print("notes")
        console.print(_pairs(notes))
    return "\n".join(line.rstrip() for line in screen.getvalue().splitlines())


def _pairs(pairs: tuple[tuple[str, str], ...]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in pairs:
        grid.add_row(Text(f"  {name}"), Text(text))
    return grid
