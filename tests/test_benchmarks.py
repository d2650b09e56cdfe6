"""The benchmarks' own parts: problems at the paper's size, figures, files and the command."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from benchmarks import case_study, emulated, paper_models, plots, runtime, scale, search, stage_counts
from benchmarks.__main__ import NAMES
from benchmarks.common import Figure, Report, at_least, at_most, print_report, write_report
from benchmarks.problems import OPTIMIZER, PLANNERS, planned, samples_per_s, summit_problem
from graphpipe.cost import DEVICE_KINDS
from graphpipe.estimate import estimate
from graphpipe.graph import ComputationGraph
from graphpipe.graph.series_parallel import decompose, knots_of
from graphpipe.planner.piper import enumerate_downsets
from graphpipe.program import lower
from graphpipe.schedule import kfkb
from graphpipe.stage import StageGraph
from tests.planner.models import towers
from tests.planner.oracle import check_strategy
from tests.stage_graphs import make_stages
from tests.strategies import computation_graphs, series_parallel_edges

LINEAR_FLOPS = 2 * 4096 * 4096
REPOSITORY = Path(__file__).parent.parent


def test_every_name_is_a_script_with_a_claim() -> None:
    for name in NAMES:
        script = importlib.import_module(f"benchmarks.{name.replace('-', '_')}")
        assert script.CLAIM
        assert callable(script.run)


def test_candle_uno_has_the_paper_s_operators_and_costs() -> None:
    graph = paper_models.candle_uno(3)
    # Three branches of four layers, a concatenation, four layers on top and the regression.
    linear = [o for o in graph.operators if o.forward_flops == LINEAR_FLOPS]
    assert len(linear) == 3 * 4 + 3
    (joined,) = [o for o in graph.operators if o.forward_flops == 3 * LINEAR_FLOPS]
    assert joined.parameter_bytes == 4 * (3 * 4096 * 4096 + 4096)
    first, *others = [o for o in linear if o.name.startswith("branches.0.")]
    assert first.backward_flops == LINEAR_FLOPS  # No gradient of the model's input.
    assert all(o.backward_flops == 2 * LINEAR_FLOPS for o in others)


def test_dlrm_tables_are_a_million_rows_and_are_looked_up() -> None:
    graph = paper_models.dlrm(2)
    tables = [o for o in graph.operators if o.parameter_bytes == 4 * 64 * 1_000_000]
    assert len(tables) == 2
    assert all(o.forward_flops == 0 for o in tables)
    problem = summit_problem(graph, 4, 64)
    at = graph.index[tables[0].name]
    # The table is never read as a whole, only its gradient is written so.
    whole_s = tables[0].parameter_bytes / DEVICE_KINDS["V100-16GB"].bandwidth_bytes_per_s
    assert problem.profile.at(64).forward_s[at] < whole_s < problem.profile.at(64).backward_s[at]


def test_a_problem_knows_the_costs_at_every_size_that_a_replica_meets() -> None:
    problem = summit_problem(paper_models.candle_uno(3), 5, 48)
    assert problem.micro_batch_sizes == (1, 2, 4, 8, 16, 48)
    assert problem.optimizer == OPTIMIZER
    for size in problem.micro_batch_sizes:
        for replicas in range(1, 6):
            assert not problem.profile.is_interpolated(-(-size // replicas))


def test_planners_are_judged_by_one_yardstick() -> None:
    problem = summit_problem(paper_models.candle_uno(3), 4, 256, (32, 64))
    plans = {planner.name: planned(planner, problem) for planner in PLANNERS}
    rates = {name: samples_per_s(plan) for name, plan in plans.items() if plan is not None}
    assert rates["graphpipe"] >= max(rates.values()) > 0
    for name, plan in plans.items():
        if plan is not None:
            check_strategy(plan, estimate(plan))
            assert 256 / rates[name] == pytest.approx(plan.notes["iteration_s"])


@pytest.mark.slow
def test_the_case_study_has_the_paper_s_depths_and_gains() -> None:
    figures = {figure.name: figure.value for figure in case_study.run().figures}
    assert figures["case-study/graph_depth"] == 4 + 1
    assert figures["case-study/chain_depth"] == 8 + 1
    assert figures["case-study/graph_over_chain"] >= figures["case-study/graph_over_chain_at_its_size"] > 1


def test_a_figure_holds_on_the_right_side_of_its_goal() -> None:
    assert at_least("a", 2, "ratio", goal=2).holds
    assert not at_least("a", 1.9, "ratio", goal=2).holds
    assert at_most("a", 2, "s", goal=2).holds
    assert not at_most("a", 2.1, "s", goal=2).holds


def test_a_report_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = (at_most("x/search_s", 3.0, "s", goal=2.0, paper=9.0), Figure(name="y", value=1.5, unit="ratio"))
    report = Report(claim="It is fast.", figures=figures, remarks=("it is not",))
    print_report("x", report)
    printed = capsys.readouterr().out
    assert "claim: It is fast." in printed
    assert "goal 2: missed  paper or theory 9" in printed
    assert printed.endswith("- it is not\n")
    write_report(report, tmp_path / "x.json")
    data = json.loads((tmp_path / "x.json").read_text())
    assert data["figures"][0] == {
        "name": "x/search_s", "value": 3.0, "unit": "s", "goal": 2.0, "paper": 9.0, "holds": False
    }  # fmt: skip
    assert data["environment"]["cores"] >= 1


@pytest.mark.parametrize("arguments", ["nothing", "all --json x", "search --out x", "plot --out x", "plot"])
def test_the_command_refuses_what_it_cannot_do(arguments: str) -> None:
    command = [sys.executable, "-m", "benchmarks", *arguments.split()]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "error: " in done.stderr


def test_operators_in_line_have_no_branches() -> None:
    graph = paper_models.candle_uno(3)
    line = search.in_line(graph)
    assert line.operators == graph.operators
    assert set(graph.values) < set(line.values)
    assert all(u + 1 in after for u, after in enumerate(line.successors[:-1]))
    # Nothing is sent for it.
    assert sum(value.num_bytes(8) for value in line.values) == sum(value.num_bytes(8) for value in graph.values)


def test_scale_s_graphs_have_equal_branches_of_the_wanted_size() -> None:
    graph = scale.branched(4, 103)
    assert len(graph.operators) == 4 * 25 + 1
    assert len(graph.predecessors[-1]) == 4
    assert sum(not before for before in graph.predecessors) == 4


def test_simulated_events_are_counted() -> None:
    seconds, few = scale.simulated_events(4, 8)
    _, many = scale.simulated_events(4, 16)
    assert seconds > 0
    # Every micro-batch makes as many, and each device adds a sum of gradients or a step of the optimizer.
    assert many - few == scale.simulated_events(4, 24)[1] - many
    assert few < many < 2 * few


def test_the_least_bytes_count_a_value_once_a_device() -> None:
    # Two stages on one device read the value of a third, four bytes for each of 6 samples: it is sent to each of them.
    stages = make_stages([(0, 1), (0, 2)], mini_batch_size=6, sizes=(2, 3, 6), devices=[(0,), (1,), (1,)])
    one_value = replace(stages.graph.values[0], consumers=("o1", "o2"))
    graph = replace(stages.graph, values=(one_value,))
    program = lower(StageGraph(graph, stages.stages, 6), kfkb(stages))
    assert sum(m.num_bytes for m in program.messages) == 2 * (24 + 24)
    assert runtime.least_bytes(program.stages) == 24 + 24
    # A reader beside the producer needs no message, and replicas of the producer send a half each.
    beside = StageGraph(graph, (*stages.stages[:2], replace(stages.stages[2], devices=(0,))), 6)
    halves = StageGraph(graph, (replace(stages.stages[0], devices=(0, 2)), *stages.stages[1:]), 6)
    assert runtime.least_bytes(beside) == runtime.least_bytes(halves) == 24 + 24


def test_the_runtime_s_figures_are_quotients_of_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"graph": 2.0, "chain": 3.0, "torch": 4.0}
    measured = {"simulated": {"graph": 1.0, "chain": 2.0, "torch": 2.0}, "wall": seconds, "timeline_s": 0.3}
    measured |= {"busy": {"chain": 5.0, "torch": 4.0}}
    monkeypatch.setattr(runtime, "measure", lambda *_: measured)
    ratios = [at_least(f"towers/{count}-micro-batches/graph_over_torch_1f1b", 1.3, "ratio", 1.0) for count in (2, 4)]
    monkeypatch.setattr(runtime.towers, "run", lambda: Report(claim="", figures=tuple(ratios)))
    monkeypatch.setattr(runtime, "PLANNED", ())
    found = {figure.name.removeprefix("runtime/"): figure for figure in runtime.run().figures}
    assert len(found) == len(runtime.run().figures)
    assert found["emulated/4-processes/8-micro-batches/graph_over_simulated"].value == 2.0
    assert not found["emulated/4-processes/8-micro-batches/graph_over_simulated"].holds
    assert found["emulated/16-processes/32-micro-batches/graph_over_simulated"].goal is None
    assert found["emulated/8-processes/16-micro-batches/torch_1f1b_over_simulated"].value == 2.0
    assert (
        found["emulated/8-processes/16-micro-batches/graph_over_torch_1f1b"].value
        == found["emulated/8-processes/16-micro-batches/graph_over_torch_1f1b"].paper
    )
    assert [found[f"real/{count}-micro-batches/graph_over_torch_1f1b"].holds for count in (2, 4)] == [False, True]
    assert found["overhead/wall_over_torch_1f1b"].holds
    assert not found["overhead/cpu_over_torch_1f1b"].holds
    assert found["overhead/own_wall_s"].value == 3.0 / 32
    assert found["timeline/share_of_a_step"].value == pytest.approx(0.1)


def test_emulated_branches_meet_in_the_last_stage() -> None:
    assert emulated.branches_of(4) == ((), (0,), (), (1, 2))
    assert emulated.branches_of(5) == ((), (0,), (), (2,), (1, 3))
    assert emulated.branches_of(2) == ((), (0,))
    assert emulated.chain_of(3) == ((), (0,), (1,))


def test_pictures_are_drawn_from_the_files(tmp_path: Path) -> None:
    figures = [
        at_least(f"mmt/{devices}/graphpipe_over_pipedream", 1 + devices / 100, "ratio", 1.0, paper=1.25)
        for devices in (4, 8)
    ]
    figures.append(Figure(name="mmt/4/piper_finishes", value=0, unit="0 or 1"))
    write_report(Report(claim="It gains.", figures=tuple(figures)), tmp_path / "throughput.json")
    searches = (at_most("mmt4/32/search_s", 0.1, "s", 0.15), Figure(name="mmt4/32/sweep_s", value=1.0, unit="s"))
    write_report(Report(claim="It is fast.", figures=searches), tmp_path / "search.json")
    first = {path.name: path.read_text() for path in plots.draw_all(tmp_path)}
    assert set(first) == {"throughput.svg", "search.svg"}
    assert "mmt over_pipedream" in first["throughput.svg"]
    assert "sweep_s" in first["search.svg"]
    assert {path.name: path.read_text() for path in plots.draw_all(tmp_path)} == first


def test_a_picture_shows_the_figures_of_its_pattern() -> None:
    data = [asdict(Figure(name=name, value=1, unit="ratio")) for name in ("a/4/graphpipe_over_piper", "a/4/else", "b")]
    (series,) = plots.points(plots.PLOTS["throughput"], data).items()
    assert series == ("a over_piper", [("4", data[0])])


def test_every_benchmark_has_a_picture() -> None:
    assert set(plots.PLOTS) == set(NAMES)


@given(computation_graphs(series_parallel_edges(7)))
@settings(max_examples=50, deadline=None)
def test_pairs_of_downsets_equal_those_that_are_listed(graph: ComputationGraph) -> None:
    sets = enumerate_downsets(graph, 1000)
    listed = sum(a != b and a & b == a for a in sets for b in sets)
    try:
        assert stage_counts.piper_stages(graph) == listed
    except ValueError:
        assert knots_of(decompose(graph))


def test_stages_of_two_equal_towers_by_hand() -> None:
    problem = towers(2, 3, num_devices=2)
    # Seven operators in line.
    assert stage_counts.pipedream_stages(problem.graph) == 7 * 8 // 2
    # A block and a loss: 3 runs; one tower for both: 6 runs; the loss with the tail of a tower of 3: 3. Both towers are
    # the only group, and it is a run.
    assert stage_counts.graphpipe_stages(problem) == 3 + 6 + 3
    # Downsets: 4 × 4 choices of operators, and everything.
    assert stage_counts.piper_stages(problem.graph) == 10 * 10 - 16 + 16
