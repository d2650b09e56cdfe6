"""Rows that are put into the places of a mask, as image features are into a sentence.

``masked_scatter`` takes the rows one after another, whichever sample they come from. As long as every micro-batch has
as many places as rows, its rows are its own; otherwise they would be those of other samples.
"""

from __future__ import annotations

from torch import Tensor

from graphpipe.errors import BatchError


def has_place_for_each(mask: Tensor, count: int) -> bool:
    """Return whether each sample of a mask has so many places.

    Args:
        mask: ``[samples, ...]``, in the shape of what is filled.
        count: The numbers that a sample brings.
    """
    return bool((mask.flatten(1).sum(1) == count).all())


def check_places(mask: Tensor, target: Tensor, source: Tensor) -> Tensor:
    """Return a mask if it has as many places as there are numbers to put there.

    Raises:
        BatchError: It has another number.
    """
    count = int(mask.expand_as(target).sum())
    if count != source.numel():
        raise BatchError(
            f"a micro-batch has {source.numel()} numbers for {count} places of a mask, so samples differ in how many "
            "they need. Capture the model with an example batch whose samples differ in that too, and the whole "
            "mini-batch will be filled at once; or give every sample as many places as it has rows"
        )
    return mask
