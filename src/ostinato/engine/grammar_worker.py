"""A process that compiles grammars which may never end, so that it can be killed and replaced.

Run as ``python -m ostinato.engine.grammar_worker``. Each line of standard input is a grammar, as a
JSON string; each line of standard output says whether it compiles: an empty JSON string, or why it
does not. A grammar that takes too much memory or processor time ends the process, by the limits
that it sets on itself; so does the end of its input, and with it the end of its parent.
"""

import json
import math
import resource
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CPU_LIMIT_S = 2.0
"""Processor time of one grammar. One of 3,000 properties takes 0.2 s."""

MEMORY_LIMIT_BYTES = 2**30
"""Address space that all grammars of one process may take, on top of its initial size."""


def main() -> None:
    """Compile grammars from standard input until its end."""
    _limit(resource.RLIMIT_AS, _address_space_bytes() + MEMORY_LIMIT_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    tokenizer = LLTokenizer("byte")  # whether a grammar compiles does not depend on the vocabulary
    for line in sys.stdin:
        _limit(resource.RLIMIT_CPU, math.ceil(_cpu_s() + CPU_LIMIT_S))
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(tokenizer, json.loads(line), log_level=0, limits=limits)
        print(json.dumps(matcher.get_error() if matcher.is_error() else ""), flush=True)


def _limit(kind: int, most: int) -> None:
    """Lower a soft limit as far as the hard one allows."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _cpu_s() -> float:
    """Processor time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _address_space_bytes() -> int:
    """Address space of this process; 0 where /proc does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    main()
