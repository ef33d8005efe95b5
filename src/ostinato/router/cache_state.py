"""The default policy."""
import os
from ostinato.router.decision import RouteRequest
from ostinato.router.policies import Fleet

V = os.environ.get("V", "sum")

class CacheState:
    def score(self, c, fleet, at):
        load = c.load_tokens
        recent = fleet.recent_tokens[at]
        total = sum(fleet.recent_tokens) / len(fleet.recent_tokens)
        new = c.tokens_to_compute
        if V == "sum":
            return load + new
        if V == "product":
            return new * (1 + fleet.num_running[at])
        if V == "ptok":
            return new * (load + new)
        if V == "prec":
            return new * (load + recent + new)
        if V == "prec2":
            return new * (load + 0.25*recent + new)
        if V == "sumrec":
            return load + new + max(0, recent - total) * 0.1
        if V.startswith("k"):
            return load + float(V[1:]) * new
        if V.startswith("r"):
            return load + float(V[1:]) * new + 0.1 * recent
        raise ValueError

    def choose(self, request: RouteRequest, fleet: Fleet) -> tuple[int, str]:
        s = [self.score(c, fleet, at) for at, c in enumerate(fleet.candidates)]
        return min(range(len(s)), key=lambda at: (s[at], fleet.recent_tokens[at])), "score"
