from __future__ import annotations

from graphpipe.estimate import estimate
from graphpipe.report.facts import device_facts, most_in_flight, stage_facts, summary
from graphpipe.schedule import in_flight_limits
from graphpipe.strategy import Strategy
from tests.report.samples import chain, measured_like, multi_modal, two_towers


def test_samples_in_flight_stay_within_the_limits_of_the_schedule(strategy: Strategy) -> None:
    found = most_in_flight(strategy)
    limits = in_flight_limits(strategy.stages)
    for x, stage in enumerate(strategy.stages.stages):
        assert stage.micro_batch_size <= found[x] <= limits[x]


def test_samples_in_flight_fall_along_a_chain() -> None:
    # 1F1B over four stages, two samples at a time: a stage holds what all after it hold, and its own.
    assert most_in_flight(chain(4)) == (8, 6, 4, 2)


def test_busy_and_idle_are_shares_of_the_iteration(strategy: Strategy) -> None:
    found = estimate(strategy)
    for device in device_facts(strategy, found):
        assert 0 <= device.busy_share <= 1
        assert (
            device.busy_share * found.iteration_s == found.trace.busy_s(device.device)
            or abs(device.busy_share * found.iteration_s - found.trace.busy_s(device.device)) < 1e-9
        )


def test_a_replicated_stage_is_timed_at_the_samples_of_one_replica() -> None:
    facts = stage_facts(multi_modal())
    # Stages 0 and 9 are alike; 0 has two replicas. All recompute, so backward is three forwards.
    assert abs(facts[0].forward_s - facts[9].forward_s / 2) < 1e-12
    assert abs(facts[0].backward_s - 3 * facts[0].forward_s) < 1e-12


def test_the_summary_sets_the_measured_iteration_beside_the_predicted_one() -> None:
    strategy = two_towers()
    found = estimate(strategy)
    assert "measured iteration" not in dict(summary(strategy, found))
    measured = measured_like(found.trace)
    lines = dict(summary(strategy, found, measured))
    assert lines["measured / predicted"] == f"{measured.makespan_s / found.iteration_s:.2f} ×"
    assert lines["stages"] == "3, at most 2 in sequence"
    assert dict(summary(chain(4), estimate(chain(4))))["stages"] == "4 in sequence"
