"""The colours of all pictures: one hue a group of devices, in light and in dark, for all kinds of colour vision.

Stages on the same devices share a hue; the second and third of them carry a texture on top. A forward pass has the tint
of its hue, a backward pass the hue itself. Numbers and names are always written out too: colour is never the only
carrier of a fact.

Source:
    Okabe and Ito, Color Universal Design, 2008, without black and with a wine red from Paul Tol's muted scheme, 2021.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphpipe.schedule import device_groups
from graphpipe.stage import StageGraph

_HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#e8dc3f", "#882255")
_NUM_SHADES = 3
NUM_TEXTURES = 4
"""No texture, and three that differ."""

MEMORY_COLOURS = {
    "parameters": ("#40506b", "#8296b8"),
    "gradients": ("#7889a5", "#5f7191"),
    "optimizer": ("#b4bfd0", "#414f68"),
    "activations": ("#7a5fc4", "#a58ef0"),
    "margin": ("#d9cdf2", "#544a70"),
}
"""What a part of the memory looks like in light and in dark. None of them is a device's."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """The neutral colours of one appearance.

    Attributes:
        canvas: Behind everything.
        track: What is empty in a chart: idle time, free memory.
        ink: Text and lines.
        muted: Less important text.
        line: Borders and grid lines.
    """

    canvas: str
    track: str
    ink: str
    muted: str
    line: str


LIGHT = Scheme(canvas="#ffffff", track="#eef0f3", ink="#1a1f26", muted="#566070", line="#c9cfd8")
DARK = Scheme(canvas="#14181e", track="#232931", ink="#e8ebef", muted="#a0a9b6", line="#3d4652")


@dataclass(frozen=True, slots=True)
class Tones:
    """One hue in one appearance.

    Attributes:
        solid: Backward passes, and the badge of a stage.
        on_solid: Text on `solid`.
        tint: Forward passes, and the box of a stage.
        on_tint: Text on `tint`.
        outline: The border of what is tinted.
    """

    solid: str
    on_solid: str
    tint: str
    on_tint: str
    outline: str


@dataclass(frozen=True, slots=True)
class StagePaint:
    """How a stage is painted.

    Attributes:
        hue: Shared by the stages on its devices.
        texture: 0 for the first stage on its devices, else what tells it from the others.
    """

    hue: int
    texture: int


def stage_paints(stages: StageGraph) -> tuple[StagePaint, ...]:
    """Return how each stage is painted, the same way in every picture."""
    found = {
        x: StagePaint(g % (len(_HUES) * _NUM_SHADES), k % NUM_TEXTURES)
        for g, (_, held) in enumerate(device_groups(stages))
        for k, x in enumerate(held)
    }
    return tuple(found[x] for x in range(len(stages.stages)))


def tones(hue: int, scheme: Scheme) -> Tones:
    """Return the colours of a hue. After the last hue the first returns in a darker, then in a lighter shade."""
    base = _HUES[hue % len(_HUES)]
    shade = hue // len(_HUES) % _NUM_SHADES
    if shade:
        base = mix(base, "#000000" if shade == 1 else "#ffffff", 0.4)
    if scheme is DARK:
        solid = mix(base, "#ffffff", 0.18)
        tint = mix(base, scheme.canvas, 0.62)
    else:
        solid = base
        tint = mix(base, scheme.canvas, 0.68)
    return Tones(solid, _on(solid), tint, _on(tint), mix(solid, scheme.ink, 0.25))


def mix(colour: str, other: str, share: float) -> str:
    """Return `colour` with `share` of `other` in it."""
    pairs = zip(_channels(colour), _channels(other), strict=True)
    return "#" + "".join(f"{round(255 * (a + (b - a) * share)):02x}" for a, b in pairs)


def contrast(colour: str, other: str) -> float:
    """Return the contrast ratio of two colours, from 1 to 21; text needs 4.5 (WCAG 2.1, 1.4.3)."""
    lighter, darker = sorted((_luminance(colour), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _on(colour: str) -> str:
    return max(("#11151a", "#ffffff"), key=lambda ink: contrast(colour, ink))


def _channels(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


def _luminance(colour: str) -> float:
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in _channels(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def css(paints: tuple[StagePaint, ...]) -> str:
    """Return the style sheet of a picture with these stages; classes are documented in `graphpipe.report.svg`."""
    hues = sorted({paint.hue for paint in paints})
    return (
        "svg.gp{font-family:system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;"
        "color-scheme:light dark}"
        "svg.gp .mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
        "svg.gp .strong{font-weight:600}svg.gp .mid{text-anchor:middle}svg.gp .end{text-anchor:end}"
        "svg.gp .edge{fill:none;stroke-width:1.5}svg.gp .local{stroke-dasharray:5 4}svg.gp .thin{stroke-width:1}"
        "svg.gp .halo{paint-order:stroke;stroke-width:4px;stroke-linejoin:round}"
        "svg.gp text,svg.gp .texture{pointer-events:none}"
        f"{_scheme_css(LIGHT, hues)}@media(prefers-color-scheme:dark){{{_scheme_css(DARK, hues)}}}"
    )


def _scheme_css(scheme: Scheme, hues: list[int]) -> str:
    appearance = 1 if scheme is DARK else 0
    rules = [
        f"svg.gp .bg{{fill:{scheme.canvas}}}svg.gp .track{{fill:{scheme.track}}}",
        f"svg.gp text{{fill:{scheme.ink}}}svg.gp text.muted{{fill:{scheme.muted}}}",
        f"svg.gp .edge{{stroke:{scheme.muted}}}svg.gp .head,svg.gp .ink{{fill:{scheme.muted}}}",
        f"svg.gp .rule{{stroke:{scheme.line}}}svg.gp .halo{{stroke:{scheme.canvas}}}",
        f"svg.gp .limit{{stroke:{scheme.ink}}}svg.gp .mark{{fill:{scheme.ink};stroke:{scheme.canvas}}}",
        f"svg.gp .reduce{{fill:{mix(scheme.muted, scheme.canvas, 0.35)}}}svg.gp .optimizer{{fill:{scheme.ink}}}",
        f"svg.gp text.on-reduce{{fill:{_on(mix(scheme.muted, scheme.canvas, 0.35))}}}",
        f"svg.gp text.on-optimizer{{fill:{scheme.canvas}}}",
        # A texture lies on solids and on tints: strokes of the canvas colour show on both.
        f"svg.gp .weave{{stroke:{scheme.canvas};fill:none}}svg.gp .weave-dot{{fill:{scheme.canvas}}}",
    ]
    rules += [f"svg.gp .m-{part}{{fill:{pair[appearance]}}}" for part, pair in MEMORY_COLOURS.items()]
    for hue in hues:
        tone = tones(hue, scheme)
        rules.append(
            f"svg.gp .s{hue}{{fill:{tone.solid}}}svg.gp .t{hue}{{fill:{tone.tint}}}"
            f"svg.gp .o{hue}{{stroke:{tone.outline}}}"
            f"svg.gp text.ns{hue}{{fill:{tone.on_solid}}}svg.gp text.nt{hue}{{fill:{tone.on_tint}}}"
        )
    return "".join(rules)
