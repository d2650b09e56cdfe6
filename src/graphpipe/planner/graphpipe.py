"""GraphPipe's planner: graph pipeline parallelism over the shape of the graph."""

from __future__ import annotations

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
    Candidate,
    Simulated,
    best_simulated,
    simulated,
    variants,
    with_sizes_of_stages,
)
from graphpipe.planner.costs import RecomputePolicy, Setting
from graphpipe.planner.draft import Draft, draft
from graphpipe.planner.exhaustive import Weighing, by_bottleneck, by_time
from graphpipe.planner.improve import Budget, changed
from graphpipe.planner.layout import lay_out, line
from graphpipe.planner.notes import plan_notes
from graphpipe.planner.operators import OperatorTable
from graphpipe.planner.piper import DownsetSearch, few_downsets
from graphpipe.planner.search import DOUBT, NEAR, PRECISION, SLACKS, Search, TargetSearch, make_setting
from graphpipe.planner.sketch import Sketcher
from graphpipe.stage import Recompute
from graphpipe.strategy import Strategy

# A graph with at most so many downsets is small.
FEW_DOWNSETS = 128
# What may be spent on changes of the best plan.
CHANGE_BUDGET = 9_000
# Where none of its changes is better, the next best plans are changed, up to so many.
CHANGED_PLANS = 4
# Schedules are played through until they have had so many tasks, but at least one.
PLAYED_TASKS = 16_000

# A plan's simulation may be faster than playing it by this share: every replica of a stage was taken for the busiest.
PLAYED_DOUBT = 0.02


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
        per_stage_micro_batches: Whether stages may get micro-batch sizes of their own, where that improves the plan.
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
        self.simulation_s = 0.0
        self.table = OperatorTable(problem)
        self.shape = decompose(problem.graph)
        self.layout = lay_out(problem.graph, self.shape, self.table)
        self.bound = lower_bound(self.table)
        self.layouts = tuple(dict.fromkeys((self.layout, line(range(len(problem.graph.operators))))))
        # In a small graph any difference of two downsets may be a stage, as Piper has it.
        self.downsets = few_downsets(self.table, FEW_DOWNSETS)
        self.sketcher = Sketcher(problem, planner.k)
        self.num_transitions = 0
        self.num_weighed = 0

    def strategy(self) -> Strategy:
        attempts = _attempts(self.planner.recompute)
        for recompute in attempts:
            best, sizes = self._by_time(recompute) if self.is_by_time else self._by_bottleneck(recompute)
            self.num_transitions += sum(size.num_transitions for size in sizes)
            best, is_best = self._weighed(best, recompute)
            if best is not None:
                return self._finished(best, sizes, is_best=is_best)
        raise nothing_fits(self.table, self.layouts, attempts[-1], self.planner.k)

    def _weighed(self, best: Simulated | None, recompute: Sequence[Recompute]) -> tuple[Simulated | None, bool]:
        """Return the best of all plans where they are few, else the best so far, and whether no plan is better."""
        if self.downsets is None or (best is not None and self.is_late()):
            return best, False
        judge = by_time(self.problem) if self.is_by_time else by_bottleneck(self.sketcher)
        weighing = Weighing(self.sketcher, self.planner.name, recompute, judge, self.is_late)
        best, is_best = weighing.best(best)
        self.num_weighed += weighing.num_simulations
        return best, is_best and not self.planner.per_stage_micro_batches

    @property
    def is_by_time(self) -> bool:
        return self.planner.objective is Objective.ITERATION_TIME

    def is_late(self) -> bool:
        limit_s = self.planner.time_limit_s
        return limit_s is not None and time.perf_counter() - self.started_s > limit_s

    def searches(self, size: int, recompute: Sequence[Recompute]) -> Iterator[TargetSearch]:
        """Yield the searches of one micro-batch size."""
        for chain in self.layouts:
            yield Search(make_setting(self.table, chain, size, recompute, self.planner.k), chain)
        if self.downsets is not None:
            setting = make_setting(self.table, self.layouts[-1], size, recompute, self.planner.k)
            yield DownsetSearch(setting, self.downsets)

    def _by_time(self, recompute: Sequence[Recompute]) -> tuple[Simulated | None, list[_Size]]:
        """Return the best plan by simulation: every size is planned for as if it were the only one."""
        sizes: list[_Size] = []
        best_s = math.inf
        for number in self._in_likely_order():
            if any(size.candidates for size in sizes) and self.is_late():
                break
            size = _Size(self, number, recompute)
            size.search(best_s * (1 + DOUBT))
            size.play()
            sizes.append(size)
            best_s = min([best_s, *(plan.sketch.played_s for plan in size.played[:1] if not plan.sketch.is_too_large)])
            self._tell(size)
        return self._timed(lambda: self._best_of(sizes)), sizes

    def _best_of(self, sizes: Sequence[_Size]) -> Simulated | None:
        """Return the best plan of all sizes by simulation."""
        best: Simulated | None = None
        for size in sorted((size for size in sizes if size.candidates), key=lambda size: _by_playing(size.played[0])):
            if best is None or size.played[0].sketch.played_s < best.estimate.iteration_s * (1 + PLAYED_DOUBT):
                found = best_simulated(self.problem, size.ranked(), self.planner.name, self.planner.k)
                if found is not None and (best is None or found.estimate.iteration_s < best.estimate.iteration_s):
                    best = found
        return best

    def _by_bottleneck(self, recompute: Sequence[Recompute]) -> tuple[Simulated | None, list[_Size]]:
        """Return the first plan that fits, by what its busiest stage takes."""
        sizes: list[_Size] = []
        for number in self._in_likely_order():
            if sizes and any(size.candidates for size in sizes) and self.is_late():
                break
            size = _Size(self, number, recompute)
            size.search(min((each.least_load_s for each in sizes), default=math.inf))
            sizes.append(size)
            self._tell(size)
        plans = [plan for size in sizes for plan in size.candidates]
        plans.sort(key=lambda plan: (plan.predicted.bottleneck_s, plan.predicted.iteration_s))
        tried = (simulated(self.problem, plan, self.planner.name, self.planner.k) for plan in plans)
        return self._timed(lambda: next((found for found in tried if found is not None), None)), sizes

    def _in_likely_order(self) -> list[int]:
        # A good plan in the beginning lets the search pass over others; medium sizes are the likeliest.
        batch = self.problem.mini_batch_size
        return sorted(self.problem.micro_batch_sizes, key=lambda size: (abs(math.log(batch / size / 16)), size))

    def _timed(self, simulate: Callable[[], Simulated | None]) -> Simulated | None:
        """Simulate, and remember how long it took."""
        started_s = time.process_time()
        found = simulate()
        self.simulation_s = time.process_time() - started_s
        return found

    def _tell(self, size: _Size) -> None:
        if size.iteration_s is None:
            self.progress(f"micro-batches of {size.number}: slower than another size whatever the stages")
        else:
            self.progress(f"micro-batches of {size.number}: {size.iteration_s:.4g} s an iteration")

    def _finished(self, best: Simulated, sizes: Sequence[_Size], *, is_best: bool) -> Strategy:
        by_size = {size.number: size.iteration_s for size in sizes if size.iteration_s is not None}
        by_size[best.candidate.micro_batch_size] = best.estimate.iteration_s
        knots = knots_of(self.shape)
        notes = plan_notes(
            self.problem, best.strategy, best.estimate, self.bound, by_size, knots, is_best=is_best or None
        )
        notes["micro_batch_sizes_ruled_out"] = sorted({size.number for size in sizes} - set(by_size))
        notes["search_s"] = time.process_time() - self.started_cpu_s - self.simulation_s
        notes["simulation_s"] = self.simulation_s
        notes["candidates"] = sum(len(size.candidates) for size in sizes) + self.num_weighed
        notes["transitions"] = self.num_transitions
        return replace(best.strategy, notes=notes)


class _Size:
    """Plans of one micro-batch size.

    Attributes:
        number: Samples.
        candidates: The plans that were found.
        played: The best of them and changes of these, best first.
        least_load_s: Seconds that the busiest device works on a mini-batch, at least, in these plans.
        iteration_s: Seconds of an iteration of the best plan, by playing it through or, where the bottleneck is the
            objective, by its guess; None where the size was ruled out.
    """

    def __init__(self, planning: _Planning, number: int, recompute: Sequence[Recompute]) -> None:
        self.planning = planning
        self.number = number
        self.recompute = recompute
        self.candidates: list[Candidate] = []
        self.played: list[Candidate] = []
        self.least_load_s = math.inf
        self.iteration_s: float | None = None
        self._settings: list[Setting] = []
        # The best guess so far of what is minimised.
        self._best_value = math.inf
        self._known: set[Draft] = set()
        self._known_pieces: set[tuple[Piece, ...]] = set()

    @property
    def num_transitions(self) -> int:
        """Ways to go on that the searches weighed."""
        return sum(setting.tally.transitions for setting in self._settings)

    def search(self, limit_s: float) -> None:
        """Collect the plans of this size.

        Args:
            limit_s: Plans whose busiest device works longer on a mini-batch are of no interest.
        """
        searches = list(self.planning.searches(self.number, self.recompute))
        self._settings = [search.setting for search in searches]
        if math.isfinite(limit_s) and self.planning.is_by_time:
            # Most sizes end here.
            target_s = limit_s / searches[0].setting.num_micro_batches
            if all(search.fewest_devices(target_s) > self.planning.table.num_devices for search in searches):
                return
            limit_s = math.inf
        if math.isinf(limit_s) and not self.planning.is_by_time and len(self.planning.layouts) > 1:
            limit_s = self._rough_limit_s(searches[1])
        for search in searches:
            if self.candidates and self.planning.is_late():
                break
            self._collect(search, limit_s)
        self.iteration_s = min((plan.predicted.iteration_s for plan in self.candidates), default=None)

    def _rough_limit_s(self, in_line: TargetSearch) -> float:
        """Return about what the busiest device works on a mini-batch with all operators in line, at least.

        The tables of a line are quick, those of blocks are not: where the line is faster, they need one look.
        """
        count = in_line.setting.num_micro_batches
        target_s = in_line.least_target_s(self.planning.bound.work_s / count, in_line.slowest_s(), NEAR)
        return math.inf if target_s is None else target_s * count * (1 + 2 * PRECISION)

    def _collect(self, search: TargetSearch, limit_s: float) -> None:
        """Add the plans of one search."""
        planning = self.planning
        count = search.setting.num_micro_batches
        # Divided into stages on the same devices, a single stage may sum its gradients while it goes on.
        hopeless = SLACKS[-1] if planning.is_by_time else 1.0
        for found in search.single_stages():
            if found.slowest_s * count <= min(self._best_value, limit_s) * hopeless:
                self._add(found.pieces)
        # A device that works on every micro-batch for the target takes that long at least.
        best_s = min(search.slowest_s() * count, self._best_value * (1 + self._doubt), limit_s)
        best_s = best_s if planning.is_by_time else min(best_s, self.least_load_s)
        low_s = planning.bound.work_s / count
        if math.isinf(self.least_load_s) and math.isinf(limit_s):
            target_s = search.least_target_s(low_s, best_s / count)
        else:
            # After the first search, most cannot do better.
            target_s = search.better_target_s(low_s, best_s / count * (1 - PRECISION))
        if target_s is None:
            return
        self.least_load_s = min(self.least_load_s, target_s * count)
        slacks = SLACKS if planning.is_by_time else SLACKS[:1]
        for found in search.near(target_s, lambda target_s: self._is_worth(target_s * count), slacks):
            self._add(found.pieces)

    def value(self, plan: Candidate) -> float:
        """Return what is minimised, by the guess."""
        return plan.predicted.iteration_s if self.planning.is_by_time else plan.predicted.bottleneck_s

    def _is_worth(self, load_s: float) -> bool:
        if self.candidates and self.planning.is_late():
            return False
        return load_s <= self._best_value * (1 + self._doubt)

    @property
    def _doubt(self) -> float:
        """How far off the value of a plan may be: a guess of the time leaves out waiting, the bottleneck is known."""
        return DOUBT if self.planning.is_by_time else 0.0

    def _add(self, pieces: tuple[Piece, ...]) -> None:
        if pieces in self._known_pieces:
            return
        self._known_pieces.add(pieces)
        found = draft(self.planning.problem, pieces, self.number)
        for plan in (found, self.planning.sketcher.splitter.components(found)):
            if plan not in self._known:
                self._known.add(plan)
                plans = list(variants(self.planning.sketcher, plan, self.number))
                self.candidates += plans
                self._best_value = min(self._best_value, *map(self.value, plans))

    def play(self) -> None:
        """Play the best plans and changes of them through."""
        self.played = self._played(changed)
        if self.planning.planner.per_stage_micro_batches:
            # Apart, so that the plans are no worse than without.
            both = (with_sizes_of_stages, changed)
            self.played += self._played(lambda sketcher, plan: (each for way in both for each in way(sketcher, plan)))
            self.played.sort(key=_by_playing)
        self.iteration_s = min((plan.sketch.played_s for plan in self.played), default=None)

    def ranked(self) -> Iterator[Candidate]:
        """Yield all plans: those that were played, best first, then those that were not, by their guesses."""
        yield from self.played
        known = {id(plan) for plan in self.played}
        yield from (plan for plan in sorted(self.candidates, key=self.value) if id(plan) not in known)

    def _played(self, changes: Callable[[Sketcher, Candidate], Iterable[Candidate]]) -> list[Candidate]:
        """Return the best plans and what some changes make of them."""
        played = _Played(self.value)
        played.add(self.candidates)
        budget = Budget(CHANGE_BUDGET)
        tried: set[Draft] = set()
        known = set(self._known)
        while budget.left > 0 and played.tasks_left > 0 and not self.planning.is_late():
            # From the best plan that was not changed yet: the best of all may be a dead end. Those that take as long to
            # the last digits are the same but for the names of branches.
            differ = {f"{plan.sketch.played_s:.9g}": plan for plan in reversed(played.ranked)}
            best = list(differ.values())[::-1][:CHANGED_PLANS]
            start = next((plan for plan in best if plan.plan not in tried), None)
            if start is None:
                break
            tried.add(start.plan)
            affordable = []
            for each in changes(self.planning.sketcher, start):
                if each.plan not in known:
                    known.add(each.plan)
                    affordable.append(each)
                if not budget.spend(each):
                    break
            played.add(affordable)
        return played.ranked


def _by_playing(plan: Candidate) -> tuple[bool, float]:
    return plan.sketch.is_too_large, plan.sketch.played_s


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
            self.ranked.sort(key=_by_playing)


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
