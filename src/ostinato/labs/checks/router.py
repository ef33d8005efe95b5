"""Checks of lab 7: what a prompt costs where, and who gets it."""

from itertools import product
from typing import Any

from ostinato.labs.mistakes import CheckList, Mistake, Story, expect_type

CHECKS = CheckList()


def _drawn(workers: list[Any]) -> list[str]:
    return [
        f"{one.name}: {one.cached} cached, {one.expected} expected, {one.queued} queued, "
        f"{one.recent:g} lately"
        for one in workers
    ]


@CHECKS.add("What a hit saves", 1)
def check_compute(lab: Any, story: Story) -> None:
    """All small counts."""
    for num_tokens, cached, expected in product(range(1, 6), range(6), range(4)):
        worker = lab.Worker("w1", cached, expected)
        call = story.begin(f"to_compute({num_tokens}, w1)", *_drawn([worker]))
        count = expect_type(lab.to_compute(num_tokens, worker), int, call)
        right = max(1, num_tokens - cached - expected)
        if count == right:
            continue
        picture = [*story[:-1], f"{call}  ->  {count}, not {right}"]
        if count < 1:
            what = "A prompt that is cached as a whole costs nothing, or less."
            raise Mistake("computes-nothing", what, picture, "Law 4: the last token is computed.")
        uses_cached = lab.to_compute(10, lab.Worker("w1", cached=4)) != 10
        uses_expected = lab.to_compute(10, lab.Worker("w1", expected=3)) != 10
        if uses_cached and not uses_expected:
            what = "What is being computed there already counts as if it were not."
            why = "A thousand requests that arrive together would go to as many workers."
            raise Mistake("expected-ignored", what, picture, why)
        if not uses_cached:
            raise Mistake("hits-ignored", "Cached tokens are computed again.", picture)
        raise Mistake("compute-wrong", "The tokens that are left are miscounted.", picture)


@CHECKS.add("Above its share", 2)
def check_share(lab: Any, story: Story) -> None:
    """The mean of all, and never below zero."""
    for recents in ((0.0, 0.0), (30.0, 10.0), (60.0, 0.0, 0.0), (5.0,)):
        workers = [lab.Worker(f"w{at}", recent=recent) for at, recent in enumerate(recents, 1)]
        for worker in workers:
            call = story.begin(f"above_share({worker.name})", *_drawn(workers))
            more = expect_type(lab.above_share(worker, workers), (int, float), call, "a number")
            right = max(0.0, worker.recent - sum(recents) / len(recents))
            if abs(more - right) < 1e-9:
                continue
            picture = [*story[:-1], f"{call}  ->  {more:g}, not {right:g}"]
            if more < 0:
                what = "A worker that was sent less than its share gets a bonus."
                raise Mistake("share-below-zero", what, picture, "It draws work from hits.")
            if more == worker.recent:
                what = "All recent work counts, not what is above the mean."
                raise Mistake("mean-not-subtracted", what, picture)
            raise Mistake("share-wrong", "The mean is that of all workers.", picture)


@CHECKS.add("One number", 1, 2, 3)
def check_score(lab: Any, story: Story) -> None:
    """Each part raises it."""
    base = {"name": "w1", "cached": 40, "expected": 0, "queued": 100, "recent": 50.0}
    changes: dict[str, tuple[dict[str, Any], str]] = {
        "load-ignored": ({"queued": 300}, "What is queued there does not matter."),
        "hits-not-scored": ({"cached": 90}, "What is cached there does not matter."),
        "hot-worker-ignored": ({"recent": 950.0}, "What it was sent lately does not matter."),
    }
    other = lab.Worker("w2", recent=50.0)
    for kind, (change, what) in changes.items():
        one, two = lab.Worker(**base), lab.Worker(**{**base, **change})
        scores = [lab.score(100, each, [each, other]) for each in (one, two)]
        for each in scores:
            expect_type(each, (int, float), "score(100, w1, workers)", "a number")
        story[:] = _drawn([one, two])
        picture = [f"{line}  ->  {score:g}" for line, score in zip(story, scores, strict=True)]
        if scores[0] == scores[1]:
            raise Mistake(kind, what, picture, _WHY[kind])
        rises = kind != "hits-not-scored"
        if (scores[1] > scores[0]) != rises:
            raise Mistake("score-falls", "More work has a lower score, or a hit a higher.", picture)
    exact = lab.score(
        100, lab.Worker("w1", 40, 10, 100, 90.0), [lab.Worker("w1", recent=90.0), other]
    )
    if abs(exact - 155) > 1e-9:
        picture = ["w1: 40 cached, 10 expected, 100 queued, 90 lately; w2: 50 lately",
                   f"score(100, w1)  ->  {exact:g}, not 100 + 50 + 20 / 4 = 155"]  # fmt: skip
        raise Mistake("score-wrong", "The parts are not added as the hole says.", picture)


_WHY = {
    "load-ignored": "Every request of a hot prefix would wait behind the others, on one worker.",
    "hits-not-scored": "Each worker would compute every prefix: memory and work are lost.",
    "hot-worker-ignored": "A worker between two turns looks idle, and is sent still more.",
}


@CHECKS.add("The lowest score", 1, 2, 3, 4)
def check_choice(lab: Any, story: Story) -> None:
    """All pairs and triples of a few workers, against the scores themselves."""
    kinds = [(0, 0, 0, 0.0), (90, 0, 0, 0.0), (90, 0, 400, 0.0), (0, 80, 0, 0.0), (0, 0, 0, 2.0),
             (0, 0, 0, 16.0)]  # fmt: skip
    for count in (1, 2, 3):
        for chosen in product(kinds, repeat=count):
            workers = [lab.Worker(f"w{at}", *kind) for at, kind in enumerate(chosen, 1)]
            before = _drawn(workers)
            story[:] = [*before, "choose(100, workers)"]
            place = expect_type(lab.Policy().choose(100, workers), int, "choose(100, workers)")
            if _drawn(workers) != before:
                what = "A choice changes the workers."
                raise Mistake(
                    "choice-has-effects", what, [*before, "afterwards:", *_drawn(workers)]
                )
            if not 0 <= place < count:
                picture = [*before, f"choose(100, workers)  ->  {place}"]
                raise Mistake("no-such-worker", "There is no worker at that place.", picture)
            _check_place(lab, workers, place)


def _check_place(lab: Any, workers: list[Any], place: int) -> None:
    scores = [lab.score(100, one, workers) for one in workers]
    pairs = zip(_drawn(workers), scores, strict=True)
    picture = [*(f"{line}  score {score:g}" for line, score in pairs),
               f"choose(100, workers)  ->  {place}"]  # fmt: skip
    if scores[place] == min(scores):
        ties = [at for at, score in enumerate(scores) if score == min(scores)]
        lowest = min(workers[at].recent for at in ties)
        if workers[place].recent > lowest:
            what = "Of workers with equal scores, one that was sent more lately is chosen."
            raise Mistake("ties-not-spread", what, picture, "New prefixes all go to one.")
        return
    far = [lab.Worker("w1", 0, 0, 300), lab.Worker("w2", 90)]
    near = [lab.Worker("w1", 0, 0, 10), lab.Worker("w2", 90, 0, 20)]
    if lab.Policy().choose(100, far) == 0:
        raise Mistake("highest-score", "The worker with the highest score is chosen.", picture)
    if lab.Policy().choose(100, near) == 0:
        what = "The least loaded worker is chosen, whatever its score."
        raise Mistake("chooses-by-load-alone", what, picture)
    raise Mistake("not-the-lowest", "Another worker than the one with the lowest score.", picture)


@CHECKS.add("Say why", 1, 5)
def check_reason(lab: Any, story: Story) -> None:
    """Numbers that add up to the prompt."""
    worker = lab.Worker("w1", 60, 30, 40)
    call = story.begin("reason(100, w1)", *_drawn([worker]))
    text = expect_type(lab.reason(100, worker), str, call)
    right = "w1: 90 of 100 tokens cached, 10 to compute, 40 queued"
    picture = [*_drawn([worker]), f"{call}  ->", f"  {text!r:.70}", f"not {right!r}"]
    if text == right:
        return
    if "90" not in text or "10" not in text:
        what = "The reason's tokens do not add up to the prompt: hits and the rest make 100."
        raise Mistake("reason-does-not-add-up", what, picture)
    raise Mistake("reason-unclear", "The reason is in another form.", picture)
