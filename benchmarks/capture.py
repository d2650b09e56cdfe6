"""How long models take to be captured and planned for, and in how much memory: ``python -m benchmarks capture``.

Each model is taken by a process of its own, so that its peak of memory is its own. Figures are CPU seconds, imports
left out, so that other work on the machine hardly shows.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import Figure, Report, at_most

CLAIM = (
    "Ours: ten billion parameters are captured and planned in under a minute and 2 GB, models of the usual sizes are "
    "captured in under 30 s, and again by another process in under 3 s."
)
MINI_BATCH = 64


def mmt_ten_billion() -> tuple[Any, Any]:
    """A multi-modal Transformer of 9.7 billion parameters without memory."""
    import torch

    from graphpipe.models import MMT, MMTConfig

    config = MMTConfig(
        num_branches=4,
        num_layers=12,
        sequence_length=256,
        hidden_size=4096,
        num_heads=32,
        feed_forward_size=16384,
        num_classes=1000,
    )
    with torch.device("meta"):
        model = MMT(config)
    return model, config.example_batch(2)


def llama_ten_billion() -> tuple[Any, Any]:
    """A Llama of 10 billion parameters without memory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=30,
        num_attention_heads=40,
        num_key_value_heads=40,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tokens = torch.randint(32000, (2, 128))
    return model, {"input_ids": tokens, "labels": tokens}


def mmt_paper() -> tuple[Any, Any]:
    """The multi-modal Transformer of the paper, 400 million parameters."""
    from graphpipe.models import MMT, MMTConfig

    config = MMTConfig.paper()
    return MMT(config), config.example_batch(2)


def clip_base() -> tuple[Any, Any]:
    """CLIP ViT-B/32 with random parameters, 150 million."""
    import torch
    from transformers import CLIPConfig, CLIPModel

    batch = {
        "input_ids": torch.randint(1, 40000, (2, 77)),
        "pixel_values": torch.randn(2, 3, 224, 224),
        "return_loss": True,
    }
    return CLIPModel(CLIPConfig()), batch


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "mmt-10b": mmt_ten_billion,
    "llama-10b": llama_ten_billion,
    "mmt-paper": mmt_paper,
    "clip-base": clip_base,
}
BIG = ("mmt-10b", "llama-10b")


def run() -> Report:
    """Capture each model and plan for it."""
    figures: list[Figure] = []
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            found = measured(name, folder)
            if name not in BIG:
                found["again_cpu_s"] = measured(name, folder)["capture_cpu_s"]
        seconds = found["capture_cpu_s"] + found["plan_cpu_s"]
        figures.append(Figure(name=f"{name} parameters", value=found["parameters"] / 1e9, unit="billion"))
        figures.append(Figure(name=f"{name} operators", value=found["operators"], unit="operators"))
        if name in BIG:
            figures.append(at_most(f"{name} captured and planned, CPU", seconds, "s", 60))
            figures.append(at_most(f"{name} peak memory", found["peak_bytes"] / 1e9, "GB", 2))
        else:
            figures.append(at_most(f"{name} captured, CPU", found["capture_cpu_s"], "s", 30))
            figures.append(at_most(f"{name} captured again, CPU", found["again_cpu_s"], "s", 3))
    return Report(
        claim=CLAIM,
        figures=tuple(figures),
        remarks=(
            "Big models are on the meta device; the plan is for 16 A100-80GB, costs computed from their peak rates.",
            "Peak memory is that of the process, with Python and torch.",
        ),
    )


def measured(name: str, cache_folder: str) -> dict[str, float]:
    """Capture one model, and plan for it if it is big, in a process of its own.

    Args:
        name: Of the model.
        cache_folder: Where captures are kept from one process to the next.

    Raises:
        RuntimeError: The process failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.capture", name],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GRAPHPIPE_CACHE": cache_folder},
    )
    if done.returncode:
        raise RuntimeError(f"capturing {name} failed: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(name: str) -> dict[str, float]:
    """Capture one model, and plan for it if it is big."""
    import torch

    from graphpipe import api
    from graphpipe.capture import capture
    from graphpipe.cluster import Cluster

    torch.manual_seed(0)
    model, batch = MODELS[name]()
    start_s = time.process_time()
    captured = capture(model, batch)
    captured_s = time.process_time()
    if name in BIG:
        cluster = Cluster.uniform(16, memory_bytes=80 * 10**9, kind="A100-80GB", devices_per_node=8)
        api.plan(captured, batch, mini_batch_size=MINI_BATCH, cluster=cluster)
    return {
        "capture_cpu_s": captured_s - start_s,
        "plan_cpu_s": time.process_time() - captured_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "parameters": sum(p.numel() for p in model.parameters()),
        "operators": len(captured.graph.operators),
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
