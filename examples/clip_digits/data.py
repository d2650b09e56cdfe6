"""Handwritten digits with captions in words: scikit-learn's 1,797 real images of 8 x 8 pixels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = (
    "a photo of the digit {}",
    "the number {} written by hand",
    "a handwritten {}",
    "somebody wrote a {}",
    "this is the figure {}",
    "an image that shows {}",
)
NUM_HELD_OUT = 297


class Tokenizer:
    """One token a word, from the captions themselves.

    The end token is not 2: CLIP's text model in transformers treats `eos_token_id=2` as a special case.
    """

    PAD, START, END = 0, 1, 3

    def __init__(self) -> None:
        captions = [template.format(word) for template in TEMPLATES for word in WORDS]
        words = sorted({w for caption in captions for w in caption.split()})
        self.ids = {word: 4 + i for i, word in enumerate(words)}
        self.size = 4 + len(words)
        self.length = 2 + max(len(caption.split()) for caption in captions)

    def __call__(self, captions: list[str]) -> dict[str, Tensor]:
        """Return `input_ids` and `attention_mask`, both ``[captions, length]`` int64."""
        ids = torch.full((len(captions), self.length), self.PAD)
        for row, caption in enumerate(captions):
            tokens = [self.START, *(self.ids[word] for word in caption.split()), self.END]
            ids[row, : len(tokens)] = torch.tensor(tokens)
        return {"input_ids": ids, "attention_mask": (ids != self.PAD).long()}


class Digits:
    """The images and their digits, split into training and held-out ones."""

    def __init__(self) -> None:
        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        pixels = torch.tensor(digits.images[order], dtype=torch.float32).unsqueeze(1) / 8 - 1
        targets = torch.tensor(digits.target[order])
        self.pixels, self.held_out_pixels = pixels[NUM_HELD_OUT:], pixels[:NUM_HELD_OUT]
        self.targets, self.held_out_targets = targets[NUM_HELD_OUT:], targets[:NUM_HELD_OUT]
        self.tokenizer = Tokenizer()

    def batch(self, rows: Tensor, generator: torch.Generator) -> dict[str, Any]:
        """Return what CLIP's forward takes for some training images, each with a caption drawn at random."""
        drawn = torch.randint(len(TEMPLATES), (len(rows),), generator=generator).tolist()
        captions = [
            TEMPLATES[t].format(WORDS[digit]) for t, digit in zip(drawn, self.targets[rows].tolist(), strict=True)
        ]
        return {**self.tokenizer(captions), "pixel_values": self.pixels[rows], "return_loss": True}

    def batches(self, mini_batch_size: int, seed: int = 0) -> Iterator[dict[str, Any]]:
        """Yield batches without end, the same ones for the same seed; an epoch's incomplete last one is left out."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self.targets), generator=generator)
            for rows in order.split(mini_batch_size):
                if len(rows) == mini_batch_size:
                    yield self.batch(rows, generator)
