"""One prefill for the samples of one prompt.

A group's samples arrive together, and SGLang would prefill all of them in one batch, before the first has filled the
prefix cache. Here the first of a set of equal prompts (same tokens, same version) goes ahead; the others wait one
scheduling pass, find its prefix cached, and prefill their last token only. Left out: prompts that share less than
everything, and engines without a prefix cache (nothing waits there).
"""

from __future__ import annotations

MIN_SAVED_TOKENS = 8  # a shorter uncached prompt is not worth a pass of its own


def mark_followers(result, policy, waiting_queue, _running_batch=None):
    """After SchedulePolicy.calc_priority: which requests of the queue wait for an equal one before them."""
    if getattr(policy.tree_cache, "disable", True):
        return result
    leaders = set()
    for request in waiting_queue:
        tokens = request.origin_input_ids
        request.orbit_follows = False
        if len(tokens) - 1 - request.num_matched_prefix_tokens < MIN_SAVED_TOKENS:
            continue
        key = (request.extra_key, tuple(tokens))
        request.orbit_follows = key in leaders
        leaders.add(key)
    return result


def may_run(original, scheduler, request, running_loras) -> bool:
    """Around Scheduler._can_schedule_lora_req, which is asked for every request that may join a prefill."""
    return not getattr(request, "orbit_follows", False) and original(scheduler, request, running_loras)
