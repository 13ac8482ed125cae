"""How long a sub-call is waited for, and from when on its silence is the shard's fault.

The theory. All attempts share one deadline. While another rank could still serve the pairs, a wait
ends early: when silence has lasted many times as long as such calls take, and at the latest when
half of the time is gone, so that the next attempt has as much. Work that is known to wait at the
rank is no silence and counts on top; where the queues of all ranks are longer than the deadline
allows, giving up half-way would only add to them. The last attempt, and one that no other rank
could repeat, has the time that is left.

A caller's short deadline is no fault of a shard: silence counts only where it lasted much longer
than calls of this size take.

Responsible for these two numbers. Must never hold state. Called by `placement.roles.router`.
"""

from __future__ import annotations

from placement.roles.router_records import RouterRules


def waits(
    rules: RouterRules,
    *,
    left_s: float,
    backlog_s: float,
    usual_s: float | None,
    last: bool,
    alone: bool,
) -> tuple[float, float]:
    """(longest wait for a sub-call, silence below which nothing is said of the shard).

    left_s: until the deadline. usual_s: p95 of calls of its size, None where it is not known. last:
    nobody would be asked after it. alone: no other rank could be.

    >>> waits(RouterRules(), left_s=2.0, backlog_s=0.0, usual_s=0.02, last=False, alone=False)
    (1.0, 0.2)
    """
    # Comparisons in place of min and max: this runs once a sub-call.
    longest_s = rules.attempt_timeout_s
    many_s = 0.0 if usual_s is None else rules.silence_factor * usual_s
    patience_s = rules.silence_s if usual_s is None else rules.fault_silence_s
    patience_s = patience_s if patience_s > many_s else many_s
    patience_s = backlog_s + (patience_s if patience_s < longest_s else longest_s)
    if last:
        return left_s, patience_s
    if not alone:
        if usual_s is not None:
            silence_s = rules.silence_s if rules.silence_s > many_s else many_s
            longest_s = silence_s if silence_s < longest_s else longest_s
        # Half of the time, unless the work that waits needs more of it.
        half_s = left_s / 2 if left_s > 4.0 * backlog_s else 2.0 * backlog_s
        left_s = half_s if half_s < left_s else left_s
    longest_s += backlog_s
    return longest_s if longest_s < left_s else left_s, patience_s
