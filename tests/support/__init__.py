"""The test harness on one page: which helper speaks for what, and what checks each call.

::

    a test of             speaks to                          after each call
    ─────────────────     ──────────────────────────────     ──────────────────────────────────────
    cache, indexes        cache.tiny_cache.TinyCache         check() of pool and index; CacheOracle
                          letters as tokens, state as text   predicts plain caches; FakeKV: a slot
                                                             holds the text that it should
    scheduler             cache.tiny_scheduler               StepChecks: what holds of every step;
                          .TinyScheduler                     RefcountOracle recounts references
    calls drawn at        cache.predicted_manager            the oracle predicted it; WholeState is
    random                .PredictedManager, wrong_calls     unchanged by a call that was refused
    bounds of step time   cache.timed_scheduler              simulated seconds, from a price list
    the engine            engines (fixture make_llm)         idle after the test: nothing is held
    models, formats       models.checkpoints, one module     logits and tokens of transformers in
                          per format                         float64
    the server            servers.servers, served_process    usage of each answer, metrics
    attackers             cache.adversary, cache.hard_       bounded harm; nothing of a tenant is
                          traffic, servers.prefix_probe,     left in memory (memory_search)
                          servers.memory_search

Files:

* ``build_modules``: modules of the build, loaded from their files
* ``daily_cases``, ``pairs``: which cases of large tables run by day, and which at night
* ``engines``: engines of tiny checkpoints, idle after each test
* ``instruction_sets``, ``triton``: a test on every instruction set; a test that needs Triton
* ``ledger_talks``: conversations with the ledger of turns, without a model
* ``waiting``: the one place in which a test waits for another thread
* ``cache/``: caches and schedulers for tests, and oracles for both
* ``models/``: checkpoints, tokenizers, templates and answers for tests
* ``servers/``: servers, browsers and attackers for tests
"""
