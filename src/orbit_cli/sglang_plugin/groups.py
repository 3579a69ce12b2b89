"""One prefill for what prompts share.

The samples of a group, and prompts with one system message, arrive together; SGLang would prefill all of them in one
batch, before the first has filled the prefix cache. Here a request whose uncached tokens are about to be computed by
an earlier one waits a scheduling pass, finds them cached, and prefills the rest. Nothing waits twice for the same
tokens, and nobody waits for a saving smaller than the pass costs. Left out: engines without a prefix cache.
"""

from __future__ import annotations

from itertools import takewhile

MIN_SAVED_TOKENS = 8  # of one request
MIN_SAVED_IN_ALL = 64  # of a queue: a pass of its own costs about as much as prefilling this many tokens
LOOK_AHEAD = 256  # requests at the head of the queue that are looked at; no pass admits more


def mark_followers(result, policy, waiting_queue, _running_batch=None):
    """After SchedulePolicy.calc_priority: which requests of the queue wait for one before them."""
    if getattr(policy.tree_cache, "disable", True):
        return result
    queue = waiting_queue[:LOOK_AHEAD]
    if policy._determine_active_policy(waiting_queue) is not policy.policy:
        _match(policy.tree_cache, queue)
    leaders: dict[str | None, list] = {}  # by cache key: prompts that this pass will compute
    saved: dict[int, int] = {}
    for place, request in enumerate(queue):
        request.orbit_follows = False
        tokens, others = request.origin_input_ids, leaders.setdefault(request.extra_key, [])
        # The last token is always computed: its logits are wanted.
        shared = max((_common(tokens, other) for other in others), default=0)
        saving = min(shared, len(tokens) - 1) - request.num_matched_prefix_tokens
        if saving >= MIN_SAVED_TOKENS:
            saved[place] = saving
        else:
            others.append(tokens)
    if sum(saved.values()) >= MIN_SAVED_IN_ALL:
        for place in saved:
            queue[place].orbit_follows = True
    return result


def _match(tree_cache, queue) -> None:
    """Look up what is cached of each request. For a long queue, which it takes first come, first served, SGLang does
    not, and a request's last known match is then of another time."""
    from sglang.srt.managers.schedule_policy import match_prefix_for_req

    for request in queue:
        match_prefix_for_req(tree_cache, request, include_req=True)


def may_run(original, scheduler, request, running_loras) -> bool:
    """Around Scheduler._can_schedule_lora_req, which is asked for every request that may join a prefill."""
    return not getattr(request, "orbit_follows", False) and original(scheduler, request, running_loras)


def _common(first, second) -> int:
    """Length of the common prefix of two token sequences."""
    if first == second:
        return len(first)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
