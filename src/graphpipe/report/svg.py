"""What the pictures are written with: elements, escaped text, and text that fits its box.

Classes of a picture, coloured by `graphpipe.report.palette.css`: ``s3`` solid and ``t3`` tint of hue 3, ``o3`` its
outline, ``ns3`` and ``nt3`` text on them; ``track`` what is empty, ``muted`` less important text, ``edge``, ``head``,
``rule`` lines, ``reduce``, ``optimizer``, ``m-parameters`` and its like for parts of the memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from graphpipe.report.palette import NUM_TEXTURES, StagePaint, css

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NARROW = frozenset("iIjl.,:;'|!()[]{}`ft/\\-· ")
_WIDE = frozenset("mwMW@%…—")


def text_of(text: str) -> str:
    """Return text escaped for XML and HTML, in elements and in attributes, without characters that XML forbids."""
    return escape(_NOT_XML.sub("\ufffd", text), quote=True)


def number(value: float) -> str:
    """Return a coordinate: two digits after the point at most."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def element(tag: str, content: str = "", **attributes: str | float) -> str:
    """Return one element. ``class_`` is written ``class``, other underscores become hyphens; `content` is markup."""
    parts = [tag]
    for name, value in attributes.items():
        shown = text_of(value) if isinstance(value, str) else number(value)
        parts.append(f'{name.rstrip("_").replace("_", "-")}="{shown}"')
    head = " ".join(parts)
    return f"<{head}>{content}</{tag}>" if content else f"<{head}/>"


def rect(x: float, y: float, width: float, height: float, class_: str, *, radius: float = 0, title: str = "") -> str:
    """Return a rectangle with an optional tooltip."""
    rounded = {"rx": radius} if radius else {}
    content = title_of(title) if title else ""
    return element("rect", content, x=x, y=y, width=width, height=height, class_=class_, **rounded)


def label(x: float, y: float, text: str, class_: str = "", size: float = 12) -> str:
    """Return a line of text whose baseline starts at (x, y), or ends or is centred there by its class."""
    named: dict[str, str | float] = {"class_": class_} if class_ else {}
    return element("text", text_of(text), x=x, y=y, font_size=size, **named)


def title_of(text: str) -> str:
    """Return a tooltip, which a screen reader reads too."""
    return element("title", text_of(text))


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    """Return a straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def text_width(text: str, size: float, *, mono: bool = False) -> float:
    """Return a width in pixels that the text will hardly exceed in any common font.

    The shares of an em are those of DejaVu Sans and its monospaced sister, the widest of the fonts that are asked for.
    """
    return size * sum(_em(character, mono=mono) for character in text)


def _em(character: str, *, mono: bool) -> float:
    if ord(character) > 0x2E7F:
        return 1.1
    if mono:
        return 0.603
    if character in _NARROW:
        return 0.4
    if character in _WIDE:
        return 1.0
    return 0.72 if character.isupper() else 0.64


def shorten(text: str, at_most: int) -> str:
    """Return text of at most so many characters: the middle gives way to an ellipsis."""
    if len(text) <= at_most:
        return text
    if at_most < 2:
        return "…"[:at_most]
    tail = at_most // 2
    return f"{text[: at_most - 1 - tail]}…{text[len(text) - tail :]}"


def fit(text: str, width: float, size: float, *, mono: bool = False) -> str:
    """Return the text, shortened in the middle until it is at most `width` pixels wide."""
    kept = len(text)
    shown = text
    while kept and text_width(shown, size, mono=mono) > width:
        kept -= 1
        shown = shorten(text, kept)
    return shown


def textures(prefix: str, paints: Iterable[StagePaint]) -> str:
    """Return the definitions of the textures that some stages need; their ids start with `prefix`."""
    weave = {
        1: '<path d="M-2 2l4-4M0 8l8-8M6 10l4-4" class="weave" stroke-width="1.6"/>',
        2: '<circle cx="2" cy="2" r="1.2" class="weave-dot"/><circle cx="6" cy="6" r="1.2" class="weave-dot"/>',
        3: '<path d="M0 2h8M0 6h8" class="weave" stroke-width="1.2"/>',
    }
    assert len(weave) == NUM_TEXTURES - 1
    return "".join(
        f'<pattern id="{prefix}{k}" width="8" height="8" patternUnits="userSpaceOnUse">{weave[k]}</pattern>'
        for k in sorted({paint.texture for paint in paints} - {0})
    )


def document(
    width: float,
    height: float,
    body: Iterable[str],
    *,
    title: str,
    description: str = "",
    definitions: str = "",
    paints: tuple[StagePaint, ...] = (),
) -> str:
    """Return a whole picture that stands alone and also fits into a page.

    Args:
        width: In pixels; a page may scale it down.
        height: In pixels.
        body: Its elements.
        title: Read out by screen readers.
        description: More for them.
        definitions: Textures and arrow heads.
        paints: The stages in it, whose colours it defines.
    """
    inside = title_of(title)
    if description:
        inside += element("desc", text_of(description))
    inside += f"<style>{css(paints)}</style>"
    if definitions:
        inside += f"<defs>{definitions}</defs>"
    inside += rect(0, 0, width, height, "bg")
    return element(
        "svg",
        inside + "".join(body),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=width,
        height=height,
        class_="gp",
        role="img",
        aria_label=title,
    )
