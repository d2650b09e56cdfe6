"""GraphPipe's planner: graph pipeline parallelism over the shape of the graph."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from graphpipe.graph.series_parallel import decompose, knots_of
from graphpipe.planner.backtrack import Piece
from graphpipe.planner.base import PlanningProblem
from graphpipe.planner.bounds import lower_bound, nothing_fits
from graphpipe.planner.candidates import (
    SIMULATED_PLANS,
    Candidate,
    Simulated,
    best_simulated,
    variants,
    with_sizes_of_stages,
)
from graphpipe.planner.costs import RecomputePolicy, Setting
from graphpipe.planner.draft import Draft, draft
from graphpipe.planner.improve import Budget, changed
from graphpipe.planner.layout import lay_out, line
from graphpipe.planner.notes import plan_notes
from graphpipe.planner.operators import OperatorTable
from graphpipe.planner.piper import DownsetSearch, few_downsets
from graphpipe.planner.search import DOUBT, PRECISION, SLACKS, Search, TargetSearch, make_setting
from graphpipe.planner.sketch import Sketcher
from graphpipe.stage import Recompute
from graphpipe.strategy import Strategy

# A graph with at most so many downsets is small.
FEW_DOWNSETS = 128
# What may be spent on changes of the best plan.
CHANGE_BUDGET = 12_000
# Where none of its changes is better, the next best plans are changed, up to so many.
CHANGED_PLANS = 4
# Schedules are played through until they have had so many tasks, but at least one.
PLAYED_TASKS = 16_000


class Objective(StrEnum):
    """What a plan is judged by."""

    ITERATION_TIME = "iteration-time"
    """Seconds a mini-batch of the simulated schedule."""
    BOTTLENECK = "bottleneck"
    """Seconds a sample of the busiest device, as in the GraphPipe paper. It is blind to fill and drain."""


@dataclass(frozen=True, kw_only=True)
class GraphPipePlanner:
    """Plans stages that form a graph.

    For each micro-batch size and two layouts of the graph, its own shape and all operators in line, the least target
    of seconds a micro-batch is searched that the devices can keep, and plans near it are collected. The best guesses
    are simulated, and the best simulation is returned.

    Attributes:
        objective: What a plan is judged by.
        recompute: Where activations may be dropped and computed again.
        k: Passes in a round of the kFkB schedule.
        per_stage_micro_batches: Whether stages get micro-batch sizes of their own, by improving the best plan. They
            are tried within the same budget as other changes, so a plan may also come out a little worse.
        time_limit_s: Seconds after which the best plan so far is returned; a first plan is looked for in any case.
    """

    objective: Objective = Objective.ITERATION_TIME
    recompute: RecomputePolicy = RecomputePolicy.IF_NEEDED
    k: int = 1
    per_stage_micro_batches: bool = False
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"a round has at least one pass, got k = {self.k}")
        if self.time_limit_s is not None and self.time_limit_s < 0:
            raise ValueError(f"a time limit is at least 0 s, got {self.time_limit_s}")
        if self.per_stage_micro_batches and self.objective is Objective.BOTTLENECK:
            raise ValueError(
                "micro-batch sizes of stages make no difference to the bottleneck; use the iteration time as objective"
            )

    @property
    def name(self) -> str:
        """What tables call the planner."""
        return "graphpipe"

    def plan(self, problem: PlanningProblem, *, progress: Callable[[str], None] | None = None) -> Strategy:
        """Return the best strategy that the planner finds.

        Args:
            problem: What to plan for.
            progress: Called now and then with a line for people.

        Raises:
            PlanningError: Nothing fits; the message names what does not, and what would.
        """
        return _Planning(self, problem, progress or (lambda _: None)).strategy()


class _Planning:
    """One call of the planner."""

    def __init__(self, planner: GraphPipePlanner, problem: PlanningProblem, progress: Callable[[str], None]) -> None:
        self.planner = planner
        self.problem = problem
        self.progress = progress
        self.started_s, self.started_cpu_s = time.perf_counter(), time.process_time()
        self.table = OperatorTable(problem)
        self.shape = decompose(problem.graph)
        self.layout = lay_out(problem.graph, self.shape, self.table)
        self.bound = lower_bound(self.table)
        self.layouts = tuple(dict.fromkeys((self.layout, line(range(len(problem.graph.operators))))))
        # In a small graph any difference of two downsets may be a stage, as Piper has it.
        self.downsets = few_downsets(self.table, FEW_DOWNSETS)
        self.candidates: list[Candidate] = []
        self.known: set[Draft] = set()
        self.known_pieces: set[tuple[int, tuple[Piece, ...]]] = set()
        self.by_size: dict[int, float] = {}
        self.ruled_out: list[int] = []
        self.settings: list[Setting] = []
        self.num_transitions = 0
        # Seconds that the busiest device works on a mini-batch, at least, in the plans that were found.
        self.least_load_s = math.inf
        self.sketcher = Sketcher(problem, planner.k)

    def strategy(self) -> Strategy:
        for recompute in _attempts(self.planner.recompute):
            self._search(recompute)
            ranked = self._ranked()
            searched_s = time.process_time() - self.started_cpu_s
            # The first that fits has the best bottleneck; the best time takes a comparison.
            count = SIMULATED_PLANS if self._is_by_time else 1
            best = best_simulated(self.problem, ranked, self.planner.name, self.planner.k, num_plans=count)
            if best is not None:
                return self._finished(best, searched_s)
            self._forget()
        raise nothing_fits(self.table, self.layouts, _attempts(self.planner.recompute)[-1])

    def _forget(self) -> None:
        """Start again: nothing that was found fits into memory."""
        self.candidates, self.known, self.by_size, self.ruled_out = [], set(), {}, []
        self.known_pieces = set()
        self.least_load_s = math.inf
        self.num_transitions += sum(setting.tally.transitions for setting in self.settings)
        self.settings = []

    @property
    def _is_by_time(self) -> bool:
        return self.planner.objective is Objective.ITERATION_TIME

    def value(self, plan: Candidate) -> float:
        """Return what is minimised, by the guess."""
        return plan.predicted.iteration_s if self._is_by_time else plan.predicted.bottleneck_s

    def _is_late(self) -> bool:
        limit_s = self.planner.time_limit_s
        return limit_s is not None and time.perf_counter() - self.started_s > limit_s

    def _search(self, recompute: Sequence[Recompute]) -> None:
        # A good plan in the beginning lets the search pass over others; medium sizes are the likeliest.
        batch = self.problem.mini_batch_size
        for size in sorted(self.problem.micro_batch_sizes, key=lambda size: (abs(math.log(batch / size / 16)), size)):
            is_worth = False
            for search in self._searches(size, recompute):
                if self.candidates and self._is_late():
                    return
                is_worth |= self._search_size(size, search)
            if is_worth and size in self.by_size:
                self.progress(f"micro-batches of {size}: {self.by_size[size]:.4g} s an iteration")
            elif not is_worth and size in self.by_size:
                self.ruled_out.append(size)
                self.progress(f"micro-batches of {size}: slower than another size whatever the stages")

    def _searches(self, size: int, recompute: Sequence[Recompute]) -> Iterator[TargetSearch]:
        """Yield the searches of one micro-batch size."""
        for chain in self.layouts:
            yield Search(make_setting(self.table, chain, size, recompute, self.planner.k), chain)
        if self.downsets is not None:
            setting = make_setting(self.table, self.layouts[-1], size, recompute, self.planner.k)
            yield DownsetSearch(setting, self.downsets)

    def _search_size(self, size: int, search: TargetSearch) -> bool:
        """Collect the plans of one search; return whether any may be the best."""
        setting = search.setting
        count = setting.num_micro_batches
        # Divided into stages on the same devices, a single stage may sum its gradients while it goes on.
        hopeless = SLACKS[-1] if self._is_by_time else 1.0
        for found in search.single_stages():
            if found.slowest_s * count <= self._best_value() * hopeless:
                self._collect(size, found.pieces)
        # A device that works on every micro-batch for the target takes that long at least.
        best_s = search.slowest_s() * count
        if self.candidates:
            best_s = min(best_s, self._best_value() * (1 + self._doubt))
        best_s = best_s if self._is_by_time else min(best_s, self.least_load_s)
        is_first, self.settings = not self.settings, [*self.settings, setting]
        low_s = self.bound.work_s / count
        if is_first:
            target_s = search.least_target_s(low_s, best_s / count)
        else:
            # After the first search, most cannot do better.
            target_s = search.better_target_s(low_s, best_s / count * (1 - PRECISION))
        if target_s is None:
            return False
        self.least_load_s = min(self.least_load_s, target_s * count)
        slacks = SLACKS if self._is_by_time else SLACKS[:1]
        for found in search.near(target_s, lambda target_s: self._is_worth(target_s * count), slacks):
            self._collect(size, found.pieces)
        return True

    def _is_worth(self, load_s: float) -> bool:
        if self.candidates and self._is_late():
            return False
        return load_s <= self._best_value() * (1 + self._doubt)

    @property
    def _doubt(self) -> float:
        """How far off the value of a plan may be: a guess of the time leaves out waiting, the bottleneck is known."""
        return DOUBT if self._is_by_time else 0.0

    def _best_value(self) -> float:
        """Return the best guess so far of what is minimised; infinite before there is one."""
        return min(map(self.value, self.candidates), default=math.inf)

    def _collect(self, size: int, pieces: tuple[Piece, ...]) -> None:
        if (size, pieces) in self.known_pieces:
            return
        self.known_pieces.add((size, pieces))
        found = draft(self.problem, pieces, size)
        for plan in (found, self.sketcher.splitter.components(found)):
            if plan in self.known:
                continue
            self.known.add(plan)
            for each in variants(self.sketcher, plan, size):
                self._keep(each)

    def _keep(self, plan: Candidate) -> None:
        size = plan.micro_batch_size
        self.candidates.append(plan)
        self.by_size[size] = min(self.by_size.get(size, float("inf")), plan.predicted.iteration_s)

    def _ranked(self) -> list[Candidate]:
        """Return all plans, best first: those that were played through by what that showed, then by their guesses."""
        if not self._is_by_time:
            return sorted(self.candidates, key=lambda plan: (self.value(plan), plan.predicted.iteration_s))
        played = _Played(self.value)
        played.add(self.candidates)
        budget = Budget(CHANGE_BUDGET)
        tried: set[Draft] = set()
        while budget.left > 0 and played.tasks_left > 0 and not self._is_late():
            # From the best plan that was not changed yet: the best of all may be a dead end.
            start = next((plan for plan in played.ranked[:CHANGED_PLANS] if plan.plan not in tried), None)
            if start is None:
                break
            tried.add(start.plan)
            changes = changed(self.sketcher, start)
            if self.planner.per_stage_micro_batches:
                changes = itertools.chain(with_sizes_of_stages(self.sketcher, start), changes)
            affordable = []
            for each in changes:
                if each.plan not in self.known:
                    self.known.add(each.plan)
                    affordable.append(each)
                if not budget.spend(each):
                    break
            played.add(affordable)
        known = {id(plan) for plan in played.ranked}
        return [*played.ranked, *(plan for plan in sorted(self.candidates, key=self.value) if id(plan) not in known)]

    def _finished(self, best: Simulated, searched_s: float) -> Strategy:
        best_size = best.candidate.micro_batch_size
        by_size = {size: s for size, s in self.by_size.items() if size not in self.ruled_out or size == best_size}
        notes = plan_notes(self.problem, best.strategy, best.estimate, self.bound, by_size, knots_of(self.shape))
        notes["micro_batch_sizes_ruled_out"] = sorted(self.ruled_out)
        notes["search_s"] = searched_s
        notes["simulation_s"] = time.process_time() - self.started_cpu_s - searched_s
        notes["candidates"] = len(self.candidates)
        notes["transitions"] = self.num_transitions + sum(setting.tally.transitions for setting in self.settings)
        return replace(best.strategy, notes=notes)


class _Played:
    """Plans whose schedules were played through."""

    def __init__(self, value: Callable[[Candidate], float]) -> None:
        self.value = value
        self.ranked: list[Candidate] = []
        self.tasks_left = PLAYED_TASKS

    @property
    def best(self) -> Candidate | None:
        """The best plan so far."""
        return self.ranked[0] if self.ranked else None

    def add(self, plans: Iterable[Candidate]) -> None:
        """Play plans through, best guess first, while there is time and the guess is below the best plan's time.

        A guess leaves out some of the waiting, so it is rarely above what playing shows. Schedules are played without
        limits: what samples in flight are needed for that is found out for the best plan in the end.
        """
        for plan in sorted(plans, key=self.value):
            if self.best is not None:
                if self.tasks_left < 0:
                    break
                if not self.best.sketch.is_too_large:
                    if self.value(plan) > self.best.sketch.played_s:
                        break
                    if plan.sketch.is_too_large:
                        continue
            self.tasks_left -= plan.sketch.played_tasks
            self.ranked.append(plan)
            self.ranked.sort(key=lambda each: (each.sketch.is_too_large, each.sketch.played_s))


def _attempts(policy: RecomputePolicy) -> tuple[tuple[Recompute, ...], ...]:
    """Return what stages may keep of their forward pass, for one search after the other until something fits."""
    keep, either = (Recompute.NONE,), (Recompute.NONE, Recompute.ALL)
    match policy:
        case RecomputePolicy.NEVER:
            return (keep,)
        case RecomputePolicy.IF_NEEDED:
            return (keep, either)
        case RecomputePolicy.AUTO:
            return (either,)
