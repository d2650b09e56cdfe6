from __future__ import annotations

from itertools import combinations

import pytest

from graphpipe.report.palette import DARK, LIGHT, Scheme, contrast, stage_paints, tones
from tests.report.samples import chain, two_towers

NUM_HUES = 24


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_is_readable_on_everything_that_it_stands_on(scheme: Scheme) -> None:
    for hue in range(NUM_HUES):
        tone = tones(hue, scheme)
        assert contrast(tone.solid, tone.on_solid) >= 4.5
        assert contrast(tone.tint, tone.on_tint) >= 4.5
    assert contrast(scheme.ink, scheme.canvas) >= 7
    assert contrast(scheme.muted, scheme.canvas) >= 4.5


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_no_two_hues_look_the_same(scheme: Scheme) -> None:
    solids = [tones(hue, scheme).solid for hue in range(NUM_HUES)]
    for a, b in combinations(solids, 2):
        assert sum(abs(int(a[i : i + 2], 16) - int(b[i : i + 2], 16)) for i in (1, 3, 5)) > 25, (a, b)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


def test_stages_on_one_device_share_a_hue_and_differ_in_texture() -> None:
    vision, text, loss = stage_paints(two_towers().stages)  # The loss is on the device of the vision tower.
    assert vision.hue == loss.hue != text.hue
    assert vision.texture != loss.texture
    assert len({paint.hue for paint in stage_paints(chain(NUM_HUES).stages)}) == NUM_HUES
