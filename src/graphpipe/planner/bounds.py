"""What no plan can beat, and why nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphpipe.cost import MemoryParts
from graphpipe.errors import PlanningError
from graphpipe.estimate import WORKSPACE_MARGIN, describe_memory, format_bytes
from graphpipe.graph.dag import longest_path
from graphpipe.planner.base import PlanningProblem
from graphpipe.planner.layout import Chain
from graphpipe.planner.operators import OperatorTable
from graphpipe.planner.search import Search, make_setting
from graphpipe.planner.tables import NEVER
from graphpipe.stage import Recompute


@dataclass(frozen=True)
class LowerBound:
    """Seconds that no plan can beat.

    Attributes:
        work_s: All work at its best size, spread evenly over all devices, without a transfer or an idle moment.
        path_s: The first sample's way through the graph and back; an operator that mixes samples takes all of them.
    """

    work_s: float
    path_s: float

    @property
    def seconds(self) -> float:
        """The larger one."""
        return max(self.work_s, self.path_s)


def lower_bound(table: OperatorTable) -> LowerBound:
    """Return the lower bound of an iteration."""
    problem = table.problem
    work_s = float(table.work.sum()) * problem.mini_batch_size / table.num_devices
    return LowerBound(work_s, longest_path(problem.graph.successors, table.least_pass_s.tolist()))


def nothing_fits(
    table: OperatorTable, chains: Sequence[Chain], recompute: Sequence[Recompute], k: int = 1
) -> PlanningError:
    """Return the error that says what does not fit, and what would.

    Args:
        table: The operators.
        chains: The layouts of the graph that were searched.
        recompute: What stages may keep of their forward pass.
        k: Passes in a round.
    """
    problem = table.problem
    needs = [(_alone(problem, u), u) for u in range(len(problem.graph.operators))]
    available = min(device.memory_bytes for device in problem.cluster.devices)
    too_large = [(parts.total * (1 + WORKSPACE_MARGIN), u, parts) for parts, u in needs]
    too_large = sorted(each for each in too_large if each[0] > available)
    way_out = _what_would_fit(table, chains, recompute, k)
    if too_large:
        needed, u, parts = too_large[0]
        operator = problem.graph.operators[u]
        where = f" ({operator.module})" if operator.module else ""
        others = f"; {len(too_large) - 1} more operators are too large" if len(too_large) > 1 else ""
        return PlanningError(
            f"operator {operator.name!r}{where} alone needs {format_bytes(needed)} of the {format_bytes(available)} of "
            f"a device: {describe_memory(parts)}{others}. {way_out}"
        )
    everything = problem.cost_model.state_memory(range(len(problem.graph.operators)))
    return PlanningError(
        f"{len(problem.cluster)} devices of {format_bytes(available)} cannot hold {problem.graph.name!r}: before "
        f"activations it needs {format_bytes(everything.total)} ({describe_memory(everything)}). {way_out}"
    )


def _alone(problem: PlanningProblem, operator: int) -> MemoryParts:
    """Return what an operator needs as a stage of its own with one sample at a time."""
    o = problem.graph.operators[operator]
    size = problem.mini_batch_size if o.is_batch_wise else 1
    received = sum(value.num_bytes(size) for value in problem.graph.values if o.name in value.consumers)
    activations = problem.cost_model.saved_bytes([operator], size) + received
    return problem.cost_model.state_memory([operator]) + MemoryParts(activations=activations)


def _what_would_fit(table: OperatorTable, chains: Sequence[Chain], recompute: Sequence[Recompute], k: int) -> str:
    available = min(device.memory_bytes for device in table.problem.cluster.devices)
    ways = []
    enough = _least_memory(table, chains, recompute, k, available)
    if enough is not None:
        ways.append(f"{table.num_devices} devices of {format_bytes(enough)}")
    devices = _fewest_devices(table, chains, recompute, k)
    if table.num_devices < devices < NEVER:
        ways.append(f"{devices} devices of {format_bytes(available)}")
    if not ways:
        return "Use devices with more memory, a smaller mini-batch, or an optimizer with less state"
    return f"What would fit: {', or '.join(ways)}; an optimizer with less state needs less"


def _fewest_devices(table: OperatorTable, chains: Sequence[Chain], recompute: Sequence[Recompute], k: int) -> int:
    """Return how many devices of this memory are enough; `NEVER` or more where no number is."""
    size = min(table.problem.micro_batch_sizes)
    searches = (Search(make_setting(table, chain, size, recompute, k), chain) for chain in chains)
    return min(search.fewest_devices(float("inf")) for search in searches)


def _least_memory(
    table: OperatorTable, chains: Sequence[Chain], recompute: Sequence[Recompute], k: int, available: int
) -> int | None:
    """Return how much memory on as many devices is enough, up to a hundredth, or None where no amount seems to be."""

    def fits(memory_bytes: int) -> bool:
        cluster = table.problem.cluster
        devices = tuple(replace(device, memory_bytes=memory_bytes) for device in cluster.devices)
        problem = replace(table.problem, cluster=replace(cluster, devices=devices))
        return _fewest_devices(OperatorTable(problem), chains, recompute, k) <= len(cluster)

    low, high = available, available * 2
    while not fits(high):
        low, high = high, high * 2
        if high > available * 2**24:
            return None
    while high - low > high / 100:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high
