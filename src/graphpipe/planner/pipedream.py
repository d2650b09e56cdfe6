"""PipeDream's planner: operators in line, cut into stages that run one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphpipe.planner.base import PlanningProblem
from graphpipe.planner.bounds import lower_bound, nothing_fits
from graphpipe.planner.layout import line
from graphpipe.planner.operators import OperatorTable
from graphpipe.planner.search import Search, make_setting
from graphpipe.planner.sequential import SequentialPlanning
from graphpipe.stage import Recompute
from graphpipe.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class PipeDreamPlanner:
    """Cuts the operators, in the graph's order, into a chain of stages with replicas, under synchronous 1F1B.

    It is GraphPipe's search on a graph without branches, with the same costs, and its plans are chosen by the same
    guesses and simulations; see `graphpipe.planner.sequential` for how they are scheduled.

    Source:
        Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019, and Memory-Efficient
        Pipeline-Parallel DNN Training, ICML 2021. We leave them in that replicas share each micro-batch instead of
        taking whole ones in turn, that in-flight samples are counted with the stage itself, and that the bottleneck is
        found by bisection.
    """

    @property
    def name(self) -> str:
        """What tables call the planner."""
        return "pipedream"

    def plan(self, problem: PlanningProblem, *, progress: Callable[[str], None] | None = None) -> Strategy:
        """Return the best strategy that the planner finds.

        Args:
            problem: What to plan for.
            progress: Called now and then with a line for people.

        Raises:
            PlanningError: Nothing fits; the message names what does not, and what would.
        """
        table = OperatorTable(problem)
        chain = line(range(len(problem.graph.operators)))
        planning = SequentialPlanning(problem, self.name)
        for size in problem.micro_batch_sizes:
            setting = make_setting(table, chain, size, (Recompute.NONE,), 1)
            planning.search(Search(setting, chain), lower_bound(table).work_s, progress)
        strategy = planning.strategy(table)
        if strategy is None:
            raise nothing_fits(table, (chain,), (Recompute.NONE,))
        return strategy
