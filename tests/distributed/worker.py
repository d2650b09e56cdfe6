"""One rank of a case: ``python -m tests.distributed.worker CASE FOLDER TRANSPORT,... ARGUMENT...`` under torchrun.

A case is a function of `tests.distributed.cases`, or of another module of this package as ``module.function``. It runs
once over each transport.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from graphpipe.runtime.process_transports import TransportKind
from tests.distributed import parity


def main() -> None:
    name, folder, kinds, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    module, _, function = f"cases.{name}".rpartition(".")
    module = module.removeprefix("cases.")
    run = getattr(importlib.import_module(f"tests.distributed.{module}"), function)
    results = []
    for kind in kinds.split(","):
        parity.kind = TransportKind(kind)
        results.append(run(*arguments))
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
