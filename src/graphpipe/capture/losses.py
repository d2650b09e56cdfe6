"""Losses that a mini-batch shares over its micro-batches, and the targets that they leave out.

``cross_entropy`` with ``reduction="mean"`` divides by the number of targets that are not `ignore_index`. As long as
each sample has the same number of those, the loss of a mini-batch is the mean of the micro-batches' losses; otherwise
it is not, and training would silently optimise something else.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from graphpipe.capture.nodes import argument_of, operator_name, value_of
from graphpipe.errors import BatchError

_CLASSIFICATION = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
_PLAIN = frozenset({
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "kl_div", "soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss", "cosine_embedding_loss",
    "hinge_embedding_loss", "margin_ranking_loss", "triplet_margin_loss", "poisson_nll_loss", *_CLASSIFICATION,
})  # fmt: skip
_MEAN_REDUCTION = 1
# Enough to try a loss with.
FEW_CLASSES = 16


def is_plain_loss(node: fx.Node) -> bool:
    """Return whether an operator is a loss whose value for a batch can be a sum or mean over samples.

    Class weights make the divisor depend on the targets, so a weighted classification loss is none.
    """
    if operator_name(node) not in _PLAIN:
        return False
    return not (operator_name(node) in _CLASSIFICATION and isinstance(argument_of(node, "weight"), fx.Node))


def ignores_targets(node: fx.Node) -> bool:
    """Return whether an operator is a mean classification loss, which leaves out some targets."""
    if operator_name(node) not in _CLASSIFICATION or argument_of(node, "reduction") != _MEAN_REDUCTION:
        return False
    target = value_of(argument_of(node, "target"))
    return isinstance(target, Tensor) and not target.is_floating_point()


def counted_targets(node: fx.Node, target: Tensor, num_samples: int) -> int:
    """Return how many targets of each sample count in a mean classification loss."""
    return int((target != argument_of(node, "ignore_index")).sum()) // num_samples


def is_classification(node: fx.Node) -> bool:
    """Return whether an operator is a loss of scores by class that treats all classes alike."""
    return operator_name(node) in _CLASSIFICATION and is_plain_loss(node)


def among_few_classes(target: Tensor, ignore_index: int) -> Tensor:
    """Return targets below `FEW_CLASSES`, as many of them ignored."""
    few = target % (FEW_CLASSES - 1)
    few = torch.where(few == ignore_index, torch.full_like(few, FEW_CLASSES - 1), few)
    return torch.where(target == ignore_index, target, few)


def check_targets(target: Tensor, ignore_index: int, expected: int) -> Tensor:
    """Return the targets of a mean classification loss if `expected` of them count.

    Raises:
        BatchError: Another number of targets counts.
    """
    count = int((target != ignore_index).sum())
    if count != expected:
        raise BatchError(
            f"{count} of {target.numel()} targets of a micro-batch differ from ignore_index={ignore_index}, and "
            f"{expected} should, as in the example batch: the mean loss of a mini-batch is not the mean over its "
            "micro-batches. Capture the model with an example batch whose samples have different numbers of ignored "
            "targets, and the loss will be computed over the whole mini-batch; or use reduction='sum' and divide by a "
            "constant"
        )
    return target
