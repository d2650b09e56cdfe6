"""A script that captures big models, makes the parameters of one stage, and tells its peaks of memory."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import torch
from torch import Tensor, nn

from graphpipe import FromSeed
from graphpipe.capture import capture
from graphpipe.runtime.initialise import fill_own

# Address space: a failure is to be an error, and no burden to the machine.
MOST_BYTES = 8 * 2**30


class Wide(nn.Module):
    """Layers of 17 GB, and scores of 2 GB for a batch of two."""

    WIDTH, CLASSES, LENGTH = 65536, 131072, 2048

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(self.CLASSES, self.WIDTH)
        self.norm = nn.LayerNorm(self.WIDTH)
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(self.WIDTH, self.WIDTH))
        self.second = nn.Linear(self.WIDTH, self.WIDTH)
        self.head = nn.Linear(self.WIDTH, self.CLASSES)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens)
        x = x + self.second(nn.functional.gelu(self.first(self.norm(x)))).to(torch.float32)
        heads = x.unflatten(-1, (64, -1)).transpose(1, 2)
        heads = torch.cat([-heads[..., 512:], heads[..., :512]], -1)
        x = nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(x.shape)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    @classmethod
    def batch(cls) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(cls.CLASSES, (2, cls.LENGTH))
        return tokens, tokens


def peak_bytes() -> int:
    """Return the most memory that this process has held since it began, or since `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """Let the peak be what the process holds now."""
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    """Print by how many bytes each peak exceeds what was held before."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    torch.manual_seed(0)
    small = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0))
    capture(small, torch.randn(2, 4), loss_fn=lambda y, _: y.mean())  # what torch loads at the first capture
    with torch.device("meta"):
        wide = Wide()
        deep = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(8)))
    forget_peak()
    before = peak_bytes()
    captured = capture(wide, Wide.batch())
    found = {"capture": peak_bytes() - before, "parameters": sum(4 * p.numel() for p in wide.parameters())}
    assert len(captured.graph.operators) > 4
    stages = capture(deep, torch.randn(4, 4096), loss_fn=lambda y, _: y.mean())
    forget_peak()
    before = peak_bytes()
    own = dict(stages.stage_module([o.name for o in stages.graph.operators if o.name in ("3", "4")]).named_parameters())
    stages.adopt(fill_own(deep, own, FromSeed(0)))
    found["stage"] = peak_bytes() - before
    found["own"] = sum(4 * p.numel() for p in own.values())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
