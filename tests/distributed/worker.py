"""One rank of a case: ``python -m tests.distributed.worker CASE FOLDER ARGUMENT...`` under torchrun.

A case is a function of `tests.distributed.cases`, or of another module of this package as ``module.function``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    name, folder, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    module, _, function = f"cases.{name}".rpartition(".")
    module = module.removeprefix("cases.")
    result = getattr(importlib.import_module(f"tests.distributed.{module}"), function)(*arguments)
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
