"""One rank of a case: ``python -m tests.distributed.worker CASE FOLDER`` under torchrun."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed import cases


def main() -> None:
    name, folder = sys.argv[1:]
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    result = getattr(cases, name)()
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
