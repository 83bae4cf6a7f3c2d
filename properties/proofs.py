"""Which property proves which law."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import properties
from refmodel.laws import law

F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Proof:
    """A property and the laws it proves."""

    name: str  # "test_split.test_segments_partition_the_extent"
    laws: tuple[str, ...]
    test: Any  # the function; under Hypothesis it has more to it than being callable


def proves(*law_ids: str) -> Callable[[F], F]:
    """Say which laws a property proves; outermost decorator. An unknown law is an error at import."""
    for law_id in law_ids:
        law(law_id)

    def name_laws(test: F) -> F:
        vars(test)["proves"] = law_ids
        return test

    return name_laws


def all_proofs() -> Iterator[Proof]:
    """Every property of this package that names laws, in the order of modules and lines."""
    for module in pkgutil.iter_modules(properties.__path__):
        if not module.name.startswith("test_") and module.name != "exhaustive":
            continue
        for name, test in vars(importlib.import_module(f"properties.{module.name}")).items():
            if callable(test) and (laws := getattr(test, "proves", None)):
                yield Proof(f"{module.name}.{name}", laws, test)
