"""A process that compiles grammars, which may never end.

Run as ``python -m ostinato.engine.grammar.grammar_worker``. A question is a grammar; the answer
is empty if it compiles, and else says why it does not.
"""

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ostinato.engine.worker_process import answer_questions

CPU_LIMIT_S = 2.0
"""Processor time of one grammar. One of 3,000 properties takes 0.2 s."""

MEMORY_LIMIT_BYTES = 2**30
"""Address space that all grammars of one process may take, on top of its initial size."""


def main() -> None:
    """Compile grammars from standard input until its end."""
    tokenizer = LLTokenizer("byte")  # whether a grammar compiles does not depend on the vocabulary

    def compile_one(grammar: bytearray) -> list[bytes]:
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(tokenizer, grammar.decode(), log_level=0, limits=limits)
        return [matcher.get_error().encode()] if matcher.is_error() else []

    answer_questions(compile_one, CPU_LIMIT_S, MEMORY_LIMIT_BYTES)


if __name__ == "__main__":
    main()
