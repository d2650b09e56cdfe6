"""What the sequential planners share: stages that run strictly one after the other.

PipeDream and Piper plan for pipelines in which each stage follows the one before it, whether or not it needs anything
from it. Such a plan is a stage graph in the order of a chain: it is scheduled, judged and run so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from graphpipe.errors import PlanningError
from graphpipe.estimate import Estimate, check_memory, estimate
from graphpipe.planner.backtrack import Piece
from graphpipe.planner.base import PlanningProblem
from graphpipe.planner.bounds import lower_bound
from graphpipe.planner.draft import Draft, draft_in_sequence, stage_graph
from graphpipe.planner.notes import plan_notes
from graphpipe.planner.operators import OperatorTable
from graphpipe.planner.search import COARSE_PRECISION, DOUBT, TargetSearch
from graphpipe.planner.sketch import Sketch, Sketcher
from graphpipe.schedule import ModelCosts, Schedule, kfkb
from graphpipe.stage import StageGraph, StageOrder
from graphpipe.strategy import Strategy

# Plans that are played through in the end, best guess first.
PLAYED_PLANS = 12


@dataclass(frozen=True, eq=False)
class _Plan:
    sketch: Sketch
    micro_batch_size: int

    @property
    def guess_s(self) -> float:
        return self.sketch.predicted.iteration_s


@dataclass
class SequentialPlanning:
    """Collects plans of a sequential planner, and returns the best one.

    Attributes:
        problem: The problem.
        planner: The planner's name.
        plans: What was collected.
    """

    problem: PlanningProblem
    planner: str
    started_s: float = field(default_factory=time.perf_counter)
    plans: list[_Plan] = field(default_factory=list)
    known: set[Draft] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.sketcher = Sketcher(self.problem, order=StageOrder.CHAIN)

    @property
    def best_guess_s(self) -> float:
        """The best guess so far of the seconds of an iteration."""
        return min((plan.guess_s for plan in self.plans), default=float("inf"))

    def collect(self, pieces: Iterable[Piece], micro_batch_size: int) -> None:
        """Add a plan: its stages in sequence."""
        plan = draft_in_sequence(self.problem, pieces, micro_batch_size)
        if plan in self.known:
            return
        self.known.add(plan)
        self.plans.append(_Plan(self.sketcher.sketch(plan), micro_batch_size))

    def search(self, search: TargetSearch, work_s: float, progress: Callable[[str], None] | None) -> None:
        """Add the plans of one micro-batch size.

        Args:
            search: The search.
            work_s: Seconds of an iteration that no plan can beat.
            progress: Called with a line for people.
        """
        setting = search.setting
        size, count = setting.micro_batch_size, setting.num_micro_batches
        for pieces in search.single_stages():
            self.collect(pieces, size)
        highest_s = min(self.best_guess_s / count, search.slowest_s())
        target_s = search.least_target_s(work_s / count, highest_s, COARSE_PRECISION)
        if target_s is not None:
            for found in search.near(target_s, lambda target_s: target_s * count <= self.best_guess_s * (1 + DOUBT)):
                self.collect(found.pieces, size)
        if progress is not None:
            progress(f"{self.planner}, micro-batches of {size}: {self.best_guess_s:.4g} s an iteration at best so far")

    def strategy(self, table: OperatorTable) -> Strategy | None:
        """Return the best plan that fits into memory, by playing its chain through, or None where none fits."""
        guessed = sorted(self.plans, key=lambda plan: plan.guess_s)
        played = sorted(guessed[:PLAYED_PLANS], key=lambda plan: plan.sketch.played_s)
        searched_s = time.perf_counter() - self.started_s
        best: tuple[Strategy, Estimate] | None = None
        for plan in (*played, *guessed[PLAYED_PLANS:]):
            stages = stage_graph(self.problem, plan.sketch.plan, plan.sketch.devices)
            chained = replace(stages, order=StageOrder.CHAIN)
            strategy = self._strategy(chained, kfkb(chained, ModelCosts(self.problem.cost_model, chained)))
            found = estimate(strategy)
            try:
                check_memory(strategy, found)
            except PlanningError:
                continue
            best = (strategy, found)
            break
        if best is None:
            return None
        strategy, found = best
        by_size: dict[int, float] = {}
        for plan in self.plans:
            by_size[plan.micro_batch_size] = min(by_size.get(plan.micro_batch_size, float("inf")), plan.guess_s)
        notes = plan_notes(self.problem, strategy, found, lower_bound(table), by_size)
        notes["search_s"] = searched_s
        notes["simulation_s"] = time.perf_counter() - self.started_s - searched_s
        return replace(strategy, notes=notes)

    def _strategy(self, stages: StageGraph, schedule: Schedule) -> Strategy:
        problem = self.problem
        return Strategy(stages, schedule, problem.profile, problem.cluster, problem.optimizer, self.planner)
