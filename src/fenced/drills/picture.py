"""Small helpers for SVG, and the colours that both pictures share, for light and dark mode.

`--good` is for what was refused, and `--bad` for what was lost; nothing else has these two colours.
"""

from __future__ import annotations

from html import escape
from typing import Any

STYLE = """
svg.drill { --card:#ffffff; --edge:#d5dae1; --ink:#1c2530; --soft:#66717f; --faint:#e9edf2;
  --a:#9a6700; --b:#0b7285; --authority:#7048a8; --database:#1f5fbf; --bad:#c92a2a; --good:#2b7a3d;
  --h0:#9a6700; --h1:#0b7285; --h2:#7048a8; --h3:#1f5fbf; --h4:#b5541c; --h5:#a8326e; --h6:#5f6b7a; --h7:#14213d;
  font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 13px; }
@media (prefers-color-scheme: dark) { svg.drill { --card:#161b22; --edge:#30363d; --ink:#e6edf3;
  --soft:#9aa5b1; --faint:#242b34; --a:#e3b341; --b:#56c7d8; --authority:#bf9df2; --database:#79b2ff;
  --bad:#ff7b72; --good:#63c77a; --h0:#e3b341; --h1:#56c7d8; --h2:#bf9df2; --h3:#79b2ff; --h4:#f0965a;
  --h5:#f086bd; --h6:#a3adb8; --h7:#d3e0f2; } }
svg.drill text { fill: var(--ink); }
svg.drill text.soft { fill: var(--soft); font-size: 12px; }
svg.drill text.strong { font-weight: 600; }
svg.drill text.halo { paint-order: stroke; stroke: var(--card); stroke-width: 5px; stroke-linejoin: round; }
svg.drill .card { fill: var(--card); stroke: var(--edge); }
""".strip()


def tag(name: str, content: str = "", /, **attributes: Any) -> str:
    """One element; `_` in a name stands for `-`, and a name may end in `_` to avoid a keyword."""
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_plain(value))}"' for key, value in attributes.items()
    )
    return f"<{name}{pairs}>{content}</{name}>" if content else f"<{name}{pairs}/>"


def _plain(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def text(x: float, y: float, words: str, **attributes: Any) -> str:
    return tag("text", escape(words), **{"x": x, "y": y, **attributes})


def line(x1: float, y1: float, x2: float, y2: float, **attributes: Any) -> str:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)


def cross(x: float, y: float, size: float = 6.0) -> str:
    """The mark of a refusal."""
    both = 2 * size
    path = f"M{x - size:.1f},{y - size:.1f} l{both:g},{both:g} m0,{-both:g} l{-both:g},{both:g}"
    return tag("path", d=path, fill="none", stroke="var(--good)", stroke_width=3.0, stroke_linecap="round")


def svg(width: float, height: float, title: str, parts: list[str]) -> str:
    """A whole picture on its own background, so that it can be read on any page."""
    card = tag("rect", class_="card", x=0.5, y=0.5, width=width - 1, height=height - 1, rx=10)
    body = "\n".join([f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", card, *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="drill" role="img" '
        f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">\n{body}\n</svg>\n'
    )
