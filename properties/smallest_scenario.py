"""The smallest file of a scenario, and what tests make it expect."""

from __future__ import annotations

SMALLEST = """\
title: Five tokens
why: The smallest file there is.
laws: [S1]
world_size: 2
page_size: 4
steps:
  - extend:
      - {request: a, tokens: 5}
"""


def expecting(number: str, **settings: str) -> str:
    lines = "".join(f"{key}: {value}\n" for key, value in settings.items())
    return f"{SMALLEST}    expect: {{{number}}}\n{lines}"
