"""For which reason a prompt may be refunded, and when; knows no prompt but the one it is asked about."""

from tools.audit.clock import Clock

ANY_TIME = frozenset({"sampling_error", "prompt_too_long", "poison", "lost_timeline"})


def why_not(reason: str, *, born: int, failed: str, clock: Clock) -> tuple[str, str] | None:
    """The invariant that this refund breaks, and the rule; None when it may be. `failed`: its bad verdict."""
    setup, u = clock.setup, clock.u
    if failed:
        if reason == f"reward_{failed}":
            return None
        return "I10", f"a {failed} refunds its group as reward_{failed}: {reason}"
    if reason in ("reward_timeout", "reward_error"):
        return "I10", f"a group is refunded as {reason} after such a verdict: it had none"
    if reason == "too_old":
        if setup.policy not in (None, "drop"):
            return "I3", f"only under drop is a group too old: the policy is {setup.policy}"
        if setup.eta is not None and u - born <= setup.eta:
            return "I3", f"a group is too old when u - born > eta = {setup.eta}: {u} - {born} = {u - born}"
    elif reason == "end_of_run":
        if setup.total_steps is not None and u < setup.total_steps and u not in setup.earlier_totals:
            return "I3", f"the run ends with update {setup.total_steps}: this is the end at update {u}"
    elif reason != "end_of_data" and reason not in ANY_TIME:
        return "I3", f"a prompt is refunded for a reason of docs/journal.md: {reason!r}"
    return None
