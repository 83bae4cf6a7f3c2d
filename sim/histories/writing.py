"""A history as the text of a file: what a machine found, for ``cpkv gate`` to replay."""

from __future__ import annotations

import msgspec
import yaml

from sim.histories.history import History

_COLUMNS = 110


def history_file(history: History) -> str:
    """The YAML of a history; what has its default is left out, and a step is a line where it fits.

    >>> from sim.histories.history import Step, Submit
    >>> steps = [Step(submit=Submit("a", 9)), Step(forward=["a"])]
    >>> print(history_file(History("Nine tokens", "An example.", ["V1"], 2, 4, 3, steps)), end="")
    title: Nine tokens
    why: An example.
    laws: [V1]
    world_size: 2
    page_size: 4
    pages_per_lane: 3
    history:
    - {submit: {request: a, tokens: 9}}
    - {forward: [a]}
    """
    # Where it was read is no key of a file.
    plain = msgspec.to_builtins(msgspec.structs.replace(history, file=""))
    head = {key: value for key, value in plain.items() if key != "history"}
    text = _dump(head) if head else ""
    return f"{text}history:\n" + "".join(f"- {_dump(step, flow=True)}" for step in plain["history"])


def _dump(value: object, *, flow: bool | None = None) -> str:
    return yaml.safe_dump(value, sort_keys=False, default_flow_style=flow, width=_COLUMNS, allow_unicode=True)
