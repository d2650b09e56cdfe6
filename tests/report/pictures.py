"""Reads pictures back."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass

SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Box:
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right - 1e-6
            and other.left < self.right - 1e-6
            and self.top < other.bottom - 1e-6
            and other.top < self.bottom - 1e-6
        )

    def holds(self, other: Box, slack: float = 0.01) -> bool:
        return (
            self.left - slack <= other.left
            and other.right <= self.right + slack
            and self.top - slack <= other.top
            and other.bottom <= self.bottom + slack
        )


def parse(picture: str) -> ET.Element:
    return ET.fromstring(picture)


def box_of(rect: ET.Element) -> Box:
    x, y, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
    return Box(x, y, x + width, y + height)


def with_class(root: ET.Element, tag: str, name: str) -> list[ET.Element]:
    return [e for e in root.iter(f"{SVG}{tag}") if name in e.attrib.get("class", "").split()]


def canvas(root: ET.Element) -> Box:
    return Box(0, 0, float(root.attrib["width"]), float(root.attrib["height"]))


def texts(root: ET.Element) -> list[str]:
    return [e.text or "" for e in root.iter(f"{SVG}text")]


def titles(root: ET.Element) -> list[str]:
    return [e.text or "" for e in root.iter(f"{SVG}title")]
