"""A job that is killed, stopped and broken again and again ends with the bits of an undisturbed one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed import soak
from tests.distributed.forked import JobServer

pytestmark = pytest.mark.distributed
LIMIT_S = 10.0


@pytest.fixture(scope="module")
def server() -> Iterator[JobServer]:
    server = JobServer()
    yield server
    server.close()


def check(server: JobServer, folder: Path, num_incidents: int, steps: int, seed: int) -> None:
    generator = random.Random(seed)
    incidents = [soak.draw(generator) for _ in range(num_incidents)]
    undisturbed = soak.run(server, folder / "undisturbed", steps, [])
    disturbed = soak.run(server, folder / "disturbed", steps, incidents)
    print(f"seed {seed}: {disturbed.num_incidents} incidents, the slowest end took {disturbed.slowest_end_s:.1f} s")
    for message in disturbed.messages:
        print(message[:160])
    assert disturbed.num_incidents == num_incidents
    assert disturbed.slowest_end_s < LIMIT_S
    for incident, message in zip(incidents, disturbed.messages, strict=True):
        how = {"exception": "failed at", "kill": "died at", "stop": "has been stopped"}[incident.how]
        assert message.startswith(f"error: rank {incident.rank} {how}"), (incident, message)
    assert disturbed.finals == undisturbed.finals
    assert disturbed.finals[0]["steps"] == steps


@pytest.mark.timeout(300)
def test_some_incidents(server: JobServer, tmp_path: Path) -> None:
    check(server, tmp_path, num_incidents=8, steps=40, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_sixty_incidents(server: JobServer, tmp_path: Path) -> None:
    check(server, tmp_path, num_incidents=60, steps=360, seed=random.SystemRandom().randrange(10**6))
