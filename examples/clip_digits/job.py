"""The training job: Hugging Face's `CLIPModel`, unmodified, on handwritten digits with captions.

`graphpipe plan --model job:clip_digits --mini-batch-size 96` works in this folder.
"""

from __future__ import annotations

from itertools import islice

import torch
from data import TEMPLATES, WORDS, Digits, Tokenizer
from torch.nn import functional
from transformers import CLIPConfig, CLIPModel

import graphpipe as gp

MINI_BATCH_SIZE = 96
NUM_STEPS = 400
MICRO_BATCH_SIZES = (24, 48)
LEARNING_RATE = 1e-3
WIDTH = 64
NUM_LAYERS = 3


def build_model(tokenizer: Tokenizer) -> CLIPModel:
    """Return a small CLIP with random parameters, the same ones on every process."""
    torch.manual_seed(0)
    tower = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "projection_dim": WIDTH,
    }
    text = {
        **tower,
        "vocab_size": tokenizer.size,
        "max_position_embeddings": tokenizer.length,
        "pad_token_id": tokenizer.PAD,
        "bos_token_id": tokenizer.START,
        "eos_token_id": tokenizer.END,
    }
    vision = {**tower, "image_size": 8, "patch_size": 2, "num_channels": 1}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH)).train()


def clip_digits() -> gp.Job:
    """Return the job for the command line."""
    digits = Digits()
    return gp.Job(
        model=build_model(digits.tokenizer),
        example_batch=next(digits.batches(MINI_BATCH_SIZE)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
        batches=lambda: islice(digits.batches(MINI_BATCH_SIZE), NUM_STEPS),
    )


@torch.no_grad()
def zero_shot_accuracy(model: CLIPModel, digits: Digits) -> float:
    """Return the share of held-out images whose nearest class is right, each class the mean of its captions."""
    captions = [template.format(word) for word in WORDS for template in TEMPLATES]
    tokens = digits.tokenizer(captions)
    was_training = model.training
    model.eval()
    text = model.text_projection(model.text_model(**tokens).pooler_output)
    classes = functional.normalize(text, dim=1).view(len(WORDS), len(TEMPLATES), -1).mean(1)
    images = model.visual_projection(model.vision_model(pixel_values=digits.held_out_pixels).pooler_output)
    guess = (functional.normalize(images, dim=1) @ classes.T).argmax(1)
    model.train(was_training)
    return float((guess == digits.held_out_targets).float().mean())
