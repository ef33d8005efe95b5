"""A plan's advice in words."""

from collections.abc import Iterator

from ostinato.lab.plan.plan import GIB, CapacityPlan, Option, ReplicaFleet
from ostinato.lab.size.quantities import count, write_bytes


def in_words(plan: CapacityPlan, currency: str) -> Iterator[str]:
    """Yield the advice, a sentence or two at a time."""
    best = plan.best
    if not plan.seen_ratio:
        yield (
            "No prompt of this trace begins like another one: a cache of any size saves nothing. "
            f"{_serve(plan.without).capitalize()} this traffic."
        )
        return
    if best is None:
        yield (
            "Buy no memory for this cache alone: at these prices none of the sizes pays"
            f"{_why_not(plan)}. Use what the machines have anyway."
        )
    else:
        yield _advice(best, plan, currency)
        yield _without_affinity(best, currency)
    if plan.knee is not best:
        yield _knee(plan, currency)
    yield _ceiling(plan)


def money(amount: float) -> str:
    """Write an amount of money; cents where they matter."""
    if abs(amount) < 10_000:
        return f"{amount:,.2f}"
    return f"{amount:,.0f}" if abs(amount) < 1_000_000 else f"{amount:.3g}"


def _advice(best: Option, plan: CapacityPlan, currency: str) -> str:
    fleet, without = best.affinity, plan.without
    own = plan.setup.own_bytes
    where = ""
    if own and best.memory_bytes <= own:
        where = ", which its GPUs have beside the weights"
    elif own:
        where = f", {write_bytes(best.memory_bytes - own)} more than its GPUs have left"
    return (
        f"Give each replica {write_bytes(best.memory_bytes)} for the cache{where}, and route "
        f"requests by their prefix: {_serve(fleet)} this traffic instead of "
        f"{without.num_replicas:,}, for {money(fleet.money)} instead of {money(without.money)} "
        f"{currency} per hour. The cache finds {fleet.hit_ratio:.1%} of all prompt tokens and "
        f"saves {fleet.saved_share:.1%} of the prefill work; a replica is busy "
        f"{fleet.busy_share:.0%} of the time{_busiest(fleet)}."
    )


def _without_affinity(best: Option, currency: str) -> str:
    """Describe the same memory with round-robin routing."""
    fleet, other = best.affinity, best.round_robin
    if fleet.num_replicas == other.num_replicas == 1:
        return "One replica is enough, so routing makes no difference."
    more = other.num_replicas - fleet.num_replicas
    needs = f"{count(other.num_replicas, 'replica')} for {money(other.money)} {currency} per hour"
    compared = f"which needs {needs}" if more else "with as many replicas"
    return (
        f"If requests are sent to the replicas round robin, the same memory finds "
        f"{other.hit_ratio:.1%}, {compared}."
    )


def _knee(plan: CapacityPlan, currency: str) -> str:
    """Describe the knee, beside the lowest bill."""
    bend, best = plan.knee, plan.best
    fleet = bend.affinity
    where = f"The curve of hits bends at {write_bytes(bend.memory_bytes)} per replica"
    finds = f"{fleet.hit_ratio:.1%} hit, {_serve(fleet)} for {money(fleet.money)} {currency}"
    if best is None:
        return f"{where}: there {finds} per hour."
    side = "less" if bend.memory_bytes < best.memory_bytes else "more"
    return f"{where}, with {side} memory than that: there {finds} per hour."


def _ceiling(plan: CapacityPlan) -> str:
    """Describe the limit of hits."""
    best, seen = plan.ceiling.affinity, plan.seen_ratio
    size = write_bytes(plan.ceiling.memory_bytes)
    on_many = f" on {count(best.num_replicas, 'replica')}" if best.num_replicas > 1 else ""
    one_cache = f", and one cache for all {seen:.1%}" if best.num_replicas > 1 else ""
    first = f"the other {1 - seen:.1%} are seen for the first time."
    if plan.setup.kv.windows or plan.setup.kv.state_bytes:
        still = (
            "windows still evict the ends of prefixes"
            if plan.setup.kv.windows
            else "states are kept at few positions, and are still evicted"
        )
        return (
            f"With {size} per replica full attention evicts nothing and {best.hit_ratio:.1%} "
            f"hit{on_many}; {still}, so more memory finds more, up to {seen:.1%}: {first}"
        )
    return (
        f"No memory finds more than {best.hit_ratio:.1%}{on_many}{one_cache}: {first} From {size} "
        "per replica on, nothing is evicted."
    )


def _why_not(plan: CapacityPlan) -> str:
    """Describe the price of memory below which it would pay."""
    pays = max((_break_even(option, plan) for option in plan.options), default=0.0)
    return f" (memory would pay below {pays:.2g} for a GiB and hour)" if pays > 0 else ""


def _break_even(option: Option, plan: CapacityPlan) -> float:
    setup, fleet = plan.setup, option.affinity
    bought = max(0, option.memory_bytes - setup.own_bytes) * fleet.num_replicas / GIB
    saved = (plan.without.num_replicas - fleet.num_replicas) * setup.num_gpus * setup.prices.gpu
    return saved / bought if bought else 0.0


def _serve(fleet: ReplicaFleet) -> str:
    verb = "serves" if fleet.num_replicas == 1 else "serve"
    return f"{count(fleet.num_replicas, 'replica')} {verb}"


def _busiest(fleet: ReplicaFleet) -> str:
    if fleet.num_replicas == 1:
        return ""
    return f", the busiest {fleet.busiest_share:.0%}"
