"""Laws X1, T6: settings that cannot work together are refused at start-up."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from properties.proofs import proves
from refmodel.config import Backend, Role, ServingConfig
from refmodel.errors import InvalidInput
from refmodel.layout.split import Split
from refmodel.serving.host_layouts import CopyEngine, HostLayout

WORKING_PAIRS = {
    ("layer_first", "kernel"),
    ("page_first", "kernel"),
    ("layer_first", "direct"),
    ("page_first_direct", "direct"),
}


def any_settings() -> st.SearchStrategy[dict[str, Any]]:
    """Good and bad values of every setting, mostly good, so that one is often the only bad one."""
    sizes = st.sampled_from([8, 1, 64, 64, 64, 0])
    return st.fixed_dictionaries(
        {},
        optional={
            "world_size": st.sampled_from([1, 2, 8, 8, 0, -1]),
            "page_size": sizes,
            "shared_kv": st.booleans(),
            "split": st.sampled_from(Split),
            "role": st.sampled_from([Role.PREFILL, Role.PREFILL, Role.DECODE]),
            "decode_page_size": st.none() | sizes,
            "backend": st.sampled_from(Backend),
            "host_layout": st.sampled_from(HostLayout),
            "copy_engine": st.sampled_from(CopyEngine),
            "batch_flag": st.booleans(),
            "chunk_size": st.none() | st.sampled_from([0, 63, 64, 100, 8192]),
        },
    )


def broken_rules(chosen: dict[str, Any]) -> set[str]:
    """The settings that are wrong, rule by rule as the law lists them."""
    given_ = {"world_size": 1, "page_size": 64, "decode_page_size": None, "chunk_size": None} | chosen
    shared = chosen.get("shared_kv", False)
    pair = (
        chosen.get("host_layout", HostLayout.LAYER_FIRST).value,
        chosen.get("copy_engine", CopyEngine.KERNEL).value,
    )
    peer, chunk = given_["decode_page_size"], given_["chunk_size"]
    rules = {
        "world_size": given_["world_size"] < 1,
        "page_size": given_["page_size"] < 1,
        "decode_page_size": peer is not None and (peer < 1 or peer != given_["page_size"]),
        "chunk_size": chunk is not None and chunk < given_["page_size"],
        "batch_flag": chosen.get("batch_flag", False) and not shared,
        "split": shared and chosen.get("split") is Split.ROUND_ROBIN,
        "role": shared and chosen.get("role") is Role.DECODE,
        "backend": shared and chosen.get("backend") is Backend.NIXL,
        "host layout": pair not in WORKING_PAIRS,
    }
    return {setting for setting, broken in rules.items() if broken}


def started(**chosen: Any) -> ServingConfig | InvalidInput:
    """The settings, or the error that they are refused with."""
    try:
        return ServingConfig(**chosen)
    except InvalidInput as error:
        return error


def named_setting(error: InvalidInput) -> str:
    """``split`` of "setting split with shared_kv on"."""
    return error.what.removeprefix("setting ").partition(" with ")[0]


@proves("X1", "T6")
@settings(max_examples=300)
@given(any_settings())
def test_settings_are_refused_exactly_if_a_rule_is_broken_and_the_message_names_it(
    chosen: dict[str, Any],
) -> None:
    broken, config = broken_rules(chosen), started(**chosen)
    if isinstance(config, InvalidInput):
        setting = named_setting(config)
        assert setting in broken
        value = chosen.get(setting.replace(" ", "_"))
        assert not isinstance(value, Enum) or config.received == value.value
    else:
        assert not broken
        assert {
            name: getattr(config, name) for name in chosen
        } == chosen  # nothing is changed to suit another


def test_shared_kv_is_off_unless_asked_for() -> None:
    assert not ServingConfig().shared_kv
    assert not ServingConfig(world_size=8).batch_flag


@proves("T6")
@given(st.sampled_from([1, 2, 8]), st.sampled_from(Backend), st.booleans())
def test_a_backend_that_slices_by_order_goes_without_shared_kv_only(
    world_size: int, backend: Backend, shared_kv: bool
) -> None:
    config = started(world_size=world_size, backend=backend, shared_kv=shared_kv)
    if shared_kv and backend is Backend.NIXL:
        assert isinstance(config, InvalidInput)
        assert (config.expected, config.received) == ("mooncake", "nixl")
    else:
        assert isinstance(config, ServingConfig)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"world_size": 0}, "setting world_size: expected an integer >= 1, got 0"),
        ({"page_size": True}, "setting page_size: expected an integer >= 1, got True"),
        ({"decode_page_size": 16}, "setting decode_page_size: expected page_size, 64, got 16"),
        ({"chunk_size": 63}, "setting chunk_size: expected an integer >= 64, got 63"),
        ({"batch_flag": True}, "setting batch_flag with shared_kv off: expected off, got on"),
        (
            {"shared_kv": True, "split": Split.ROUND_ROBIN},
            "setting split with shared_kv on: expected token_balanced or page_aligned, got round_robin",
        ),
        (
            {"shared_kv": True, "role": Role.DECODE},
            "setting role with shared_kv on: expected prefill, got decode",
        ),
        (
            {"host_layout": HostLayout.PAGE_FIRST_DIRECT},
            "host layout: expected layer_first or page_first with copy engine kernel, got page_first_direct",
        ),
    ],
)
def test_the_message_names_setting_value_and_what_is_allowed(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        ServingConfig(**chosen)
