"""What a reduction over the replicas of a stage costs."""

from __future__ import annotations

from graphpipe.cluster import Link


def ring_all_reduce_s(num_bytes: float, num_replicas: int, link: Link) -> float:
    """Return the time to all-reduce the gradients of a stage over a ring of its replicas.

    Each of the ``r`` replicas passes ``2 (r - 1)`` messages of ``1 / r`` of the buffer to its neighbour, so::

        seconds = 2 (r - 1) (latency + bytes / (r * bandwidth))

    Nothing overlaps with the backward pass; that is the caller's concern.

    Args:
        num_bytes: The gradient bytes that one replica holds.
        num_replicas: The data-parallel replicas ``r`` of the stage.
        link: The slowest link of the ring.

    Returns:
        Seconds; zero for a single replica, or where there is nothing to reduce.

    Raises:
        ValueError: `num_replicas` is less than 1.

    Source:
        Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005: reduce-scatter, then all-gather, without arithmetic.
    """
    if num_replicas < 1:
        raise ValueError(f"a stage has at least one replica, got {num_replicas}")
    if num_replicas == 1 or num_bytes == 0:
        return 0.0
    return 2 * (num_replicas - 1) * (link.latency_s + num_bytes / (num_replicas * link.bandwidth_bytes_per_s))
