"""A quick guess of a plan's iteration time, to tell which plans are worth playing through.

A stage starts when the first samples have come down to it, works through the mini-batch, waits for its first backward
pass if its in-flight limit leaves it nothing to do meanwhile, waits again if the round trip of what is in flight takes
longer than the work, and is followed by the last backward passes of the stages before it. The guess is the longest such
time over all stages and over all groups of stages that share devices. For balanced chains under 1F1B it is exact:
``(M + d - 1)`` times a stage's share, with twice the transfers of ``d - 1`` hops in ``d`` micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphpipe.schedule.play import TimedStages


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan is guessed to take.

    Attributes:
        iteration_s: Seconds a mini-batch.
        bottleneck_s: Seconds that the busiest device, or its outgoing link, works on a mini-batch, with its reduction
            of gradients.
        load_s: The same without the reduction.
    """

    iteration_s: float
    bottleneck_s: float
    load_s: float


def predict(timed: TimedStages, limits: Sequence[int]) -> Prediction:
    """Return a guess of the iteration time of stages under kFkB, and the load of the busiest device.

    Args:
        timed: The stages.
        limits: ``[stages]`` samples in flight.
    """
    counts, sizes, reduce_s = timed.counts, timed.sizes, timed.reduce_s
    indices = range(len(sizes))
    forward_s = timed.pass_s[0]
    backward_s = [each if timed.has_backward[x] else 0.0 for x, each in enumerate(timed.pass_s[1])]
    start_s, finish_s, back_s, link_s = ([0.0 for _ in indices] for _ in range(4))
    for edge in timed.edges:
        x, y = edge.source, edge.target
        # How many passes of the stage before it a pass of the stage after it waits for.
        passes = min(counts[x], -(-sizes[y] // sizes[x]))
        start_s[y] = max(start_s[y], start_s[x] + passes * forward_s[x] + edge.sent_s + edge.latency_s)
        if edge.returns:
            # What is left to do in the stages before, once this one has ended its last backward pass.
            left_s = edge.returned_s + edge.latency_s + passes * backward_s[x] + max(finish_s[x], reduce_s[x])
            finish_s[y] = max(finish_s[y], left_s)
        link_s[x] += counts[x] * edge.sent_s
        link_s[y] += counts[y] * edge.returned_s
    for edge in reversed(timed.edges):
        x, y = edge.source, edge.target
        if edge.returns:
            # From the end of a forward pass until its gradient is there.
            trip_s = forward_s[y] + backward_s[y] + back_s[y]
            hops_s = edge.sent_s + edge.returned_s + 2 * edge.latency_s
            passes = min(counts[x], -(-sizes[y] // sizes[x])) - 1
            back_s[x] = max(back_s[x], passes * forward_s[x] + trip_s + hops_s)
    longest = busiest = most_loaded = 0.0
    for held in timed.groups:
        load = link = 0.0
        for x in held:
            own = counts[x] * (forward_s[x] + backward_s[x])
            load += own
            link += link_s[x]
            rounds = max(1, min(limits[x] // sizes[x], counts[x]))
            waits = max(0.0, back_s[x] - (rounds - 1) * forward_s[x])
            # No more than the limit come back from a round trip.
            trips = counts[x] / rounds * (forward_s[x] + back_s[x] + backward_s[x])
            longest = max(longest, start_s[x] + max(own + waits, trips) + max(finish_s[x], reduce_s[x]))
        first, last = min(start_s[x] for x in held), min(finish_s[x] for x in held)
        longest = max(longest, first + max(load, link) + max(last, *(reduce_s[x] for x in held)))
        busiest = max(busiest, max(load, link) + sum(reduce_s[x] for x in held))
        most_loaded = max(most_loaded, load, link)
    return Prediction(longest, busiest, most_loaded)
