"""What the sequential planners share: stages that run strictly one after the other.

PipeDream and Piper plan for pipelines in which each stage follows the one before it, whether or not it needs anything
from it. Such a plan is a stage graph in the order of a chain: it is scheduled, judged and run so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from graphpipe.planner.backtrack import Piece
from graphpipe.planner.base import PlanningProblem
from graphpipe.planner.bounds import lower_bound
from graphpipe.planner.candidates import Candidate, best_simulated
from graphpipe.planner.draft import Draft, draft_in_sequence
from graphpipe.planner.notes import plan_notes
from graphpipe.planner.operators import OperatorTable
from graphpipe.planner.search import DOUBT, TargetSearch
from graphpipe.planner.sketch import Sketcher
from graphpipe.stage import StageOrder
from graphpipe.strategy import Strategy

# Plans that are played through in the end, best guess first.
PLAYED_PLANS = 12


@dataclass
class SequentialPlanning:
    """Collects plans of a sequential planner, and returns the best one.

    Attributes:
        problem: The problem.
        planner: The planner's name.
        plans: What was collected.
        known: Their stages.
        transitions: Ways to go on that the searches weighed.
    """

    problem: PlanningProblem
    planner: str
    started_s: float = field(default_factory=time.process_time)
    plans: list[Candidate] = field(default_factory=list)
    known: set[Draft] = field(default_factory=set)
    transitions: int = 0

    def __post_init__(self) -> None:
        self.sketcher = Sketcher(self.problem, order=StageOrder.CHAIN)

    @property
    def best_guess_s(self) -> float:
        """The best guess so far of the seconds of an iteration."""
        return min((plan.predicted.iteration_s for plan in self.plans), default=float("inf"))

    def collect(self, pieces: Iterable[Piece], micro_batch_size: int) -> None:
        """Add a plan: its stages in sequence."""
        plan = draft_in_sequence(self.problem, pieces, micro_batch_size)
        if plan in self.known:
            return
        self.known.add(plan)
        self.plans.append(Candidate(self.sketcher.sketch(plan), micro_batch_size))

    def search(self, search: TargetSearch, work_s: float, progress: Callable[[str], None] | None) -> None:
        """Add the plans of one micro-batch size.

        Args:
            search: The search.
            work_s: Seconds of an iteration that no plan can beat.
            progress: Called with a line for people.
        """
        setting = search.setting
        size, count = setting.micro_batch_size, setting.num_micro_batches
        for single in search.single_stages():
            self.collect(single.pieces, size)

        def is_worth(target_s: float) -> bool:
            return target_s * count <= self.best_guess_s * (1 + DOUBT)

        highest_s = min(self.best_guess_s / count, search.slowest_s())
        target_s = search.least_target_s(work_s / count, highest_s)
        if target_s is not None:
            for found in search.near(target_s, is_worth):
                self.collect(found.pieces, size)
        self.transitions += setting.tally.transitions
        if progress is not None:
            progress(f"{self.planner}, micro-batches of {size}: {self.best_guess_s:.4g} s an iteration at best so far")

    def strategy(self, table: OperatorTable) -> Strategy | None:
        """Return the best plan that fits into memory, by playing its chain through, or None where none fits."""
        guessed = sorted(self.plans, key=lambda plan: plan.predicted.iteration_s)
        played = sorted(guessed[:PLAYED_PLANS], key=lambda plan: plan.sketch.played_s)
        searched_s = time.process_time() - self.started_s
        ranked = (*played, *guessed[PLAYED_PLANS:])
        best = best_simulated(self.problem, ranked, self.planner, 1, StageOrder.CHAIN)
        if best is None:
            return None
        strategy, found = best.strategy, best.estimate
        sizes = sorted({plan.micro_batch_size for plan in guessed})
        by_size = {
            size: next(plan for plan in guessed if plan.micro_batch_size == size).sketch.played_s for size in sizes
        }
        by_size[best.candidate.micro_batch_size] = found.iteration_s
        notes = plan_notes(self.problem, strategy, found, lower_bound(table), by_size)
        notes["transitions"] = self.transitions
        notes["search_s"] = searched_s
        notes["simulation_s"] = time.process_time() - self.started_s - searched_s
        return replace(strategy, notes=notes)
