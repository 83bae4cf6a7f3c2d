"""Options of pytest for ``pytest --pyargs properties.kernels --cpkv-kernels TARGET``.

pytest finds this by an entry point, in every environment that has this package: options and nothing else.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cpkv", "kernels against the contract of cpkv")
    group.addoption(
        "--cpkv-kernels",
        metavar="TARGET",
        help="kernels.py, kernels.py:function, a module, or an entry point of the group cpkv.kernels",
    )
    group.addoption("--cpkv-known", metavar="FILE", help="YAML of failures that are known: op, law, reason")
    group.addoption("--cpkv-device", default="", metavar="DEVICE", help="cpu or cuda")
    group.addoption("--cpkv-world", default="", metavar="WORLD", help="where collectives run, such as nccl:2")
    group.addoption("--cpkv-examples", type=int, metavar="N", help="cases to draw for each operation")
    group.addoption("--cpkv-seed", type=int, default=0, metavar="N", help="other seeds draw other cases")
