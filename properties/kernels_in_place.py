"""Scenarios run with kernels in the place of the reference, and where a wrong one shows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from properties.kernels import references
from properties.kernels.adversaries import ADVERSARIES
from sim.cases.library import AnyScenario, find_scenarios
from sim.gate.histories import REFUSAL
from sim.gate.runs import Outcome, run_scenario
from sim.gate.setting import Setting
from sim.kernels.loading import Named, named
from sim.world import World

Worlds = Callable[[int], World]

# Of each operation wrong kernels, where they show, and as which law. What is in bytes shows as V1.
WRONG = [
    ("zigzag_split", "cut_by_tokens", "radix/a-conversation", "V1"),
    ("rerange", "prefix_forgotten", "worked/prefix-70-tokens-300", "V1"),
    ("logical_to_physical", "logical_slots_of_its_own", "radix/whole-prompt-by-pages", "V1"),
    ("owner_mask", "owned_token_by_token", "worked/prefix-70-tokens-300", "V1"),
    ("tail_mask", "tail_of_the_last_request", "incidents/draft-01-sliced-before-the-shift", "V1"),
    ("current_reuse_remap", "pages_follow_each_other", "attention/page-aligned-w2", "A5"),
    ("transfer_pairs", "in_order_of_the_list", "transfer/lost-message-named", "T3"),
    ("validate_page_groups", "lengths_only", "incidents/host-01-shifted-page-group", REFUSAL),
    ("local_embedding", "padding_in_front", "draft/old-plan-of-an-equal-batch", "D1"),
    ("materialize", "table_of_the_first_request", "incidents/draft-01-sliced-before-the-shift", "V1"),
    ("mla_write", "unowned_rows_not_skipped", "placement/scrambled-w2", "V1"),
    ("mla_write", "minus_one_is_the_last_slot", "incidents/split-02-last-token-lost", "O3"),
    ("mla_read", "read_in_order_of_slots", "model/no-view-fp8", "A5"),
    ("index_write", "scale_behind_each_key", "incidents/fmt-03-one-scale-for-the-tensor", "V1"),
    ("index_read", "one_scale_a_page", "model/no-view-fp8", "A2"),
    ("quantize_index", "scale_turned_over", "model/no-view-fp8", "A2"),
    ("quantize_mla", "rope_before_the_scales", "model/no-view-fp8", "A5"),
    ("page_copy", "sorted_on_one_side", "incidents/host-05-suffix-from-storage", "V1"),
    ("mqa_logits", "own_key_left_out", "attention/page-aligned-w2", "A2"),
    ("sparse_mla", "rope_in_the_value", "incidents/topk-01-ties", "A5"),
    ("sparse_mla", "rope_in_the_value", "model/no-view-fp8", "A5"),
    ("lse_merge", "plain_mean", "incidents/attn-03-no-keys-lse-plus-infinity", "A5"),
    ("topk_transform_paged", "page_table_of_request_0", "attention/rotation-w3", "A2"),
    ("topk_transform_ragged", "offset_forgotten", "model/f32-ragged", "A2"),
    ("topk_merge", "first_part_alone", "model/no-view-fp8", "A2"),
    ("gather_rerange", "prefix_forgotten", "worked/prefix-70-tokens-300", "V1"),
    ("gather_materialize", "pages_in_rank_order", "placement/scrambled-w2", "V1"),
    ("gather_materialize", "skips_without_pages", "worked/tokens-100", "V6"),
]


@cache
def scenario(name: str) -> AnyScenario:
    (found,) = find_scenarios(name)
    return found


def outcome(name: str, kernels: Named | None = None, world: Worlds = World.lockstep) -> Outcome:
    found = scenario(name)
    return run_scenario(found, world(found.world_size), Setting(kernels=kernels))


plain = cache(outcome)


def right(op: str) -> Named:
    """The reference of one operation as a target."""
    return named(f"{references.__name__}:{op}")


def wrong(op: str, name: str) -> Named:
    (adversary,) = (one for one in ADVERSARIES if (one.op, one.name) == (op, name))
    return named(f"{adversary.function.__module__}:{name}", op)
