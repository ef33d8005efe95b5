"""``lint`` finds each of the planted faults, and none where none is."""

import json
from dataclasses import replace
from functools import cache

import pytest
from tokenizers import Tokenizer as BPE
from tokenizers import decoders, models, pre_tokenizers, trainers

from ostinato.lab.lint.keys import KeyOrders, reorder_json
from ostinato.lab.lint.lint import LintReport, lint
from ostinato.lab.lint.templates import canonical, group_requests
from ostinato.lab.log.request_log import render_plainly
from ostinato.lab.replay.explain_log import Tokenizer, explain_log
from ostinato.lab.replay.word_tokens import word_tokenizer
from ostinato.settings import PrefixCacheConfig
from tests.lab.lint.planted_faults import FAULTS, WORDS, Application, at, chat, clean_log, log
from tests.lab.log.logged_requests import parse_request


@cache
def tokenizer() -> Tokenizer:
    """Byte-level BPE that knows the words with a blank before them and without."""
    bpe = BPE(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([" ".join(WORDS), *WORDS] * 3, trainer)
    return Tokenizer(lambda text: bpe.encode(text).ids, render_plainly, bpe.decode)


@cache
def report_of_all() -> LintReport:
    """Fifteen applications, a fault in each."""
    return lint(log(set(FAULTS)), tokenizer())


def requests_of(bodies) -> list:
    return [
        parse_request(f'{{"timestamp": {at(n).timestamp()}, "body": {body}}}', n + 1)
        for n, body in enumerate(map(json.dumps, bodies))
    ]


def test_a_clean_log_has_no_findings():
    report = lint(clean_log(), tokenizer())
    assert report.findings == ()
    assert report.computed_tokens == report.fixed_tokens
    assert report.num_groups == len(FAULTS) >= 12


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_where_it_is_and_nowhere_else(fault):
    """Of its application nothing else is found, and of no other is it."""
    name = f"the {fault} desk"
    report = report_of_all()
    found = [f for f in report.findings if f.kind == fault]
    [finding] = found
    assert finding.saved_tokens > 0
    assert finding.after > finding.before
    alone = lint([r for r in log(set(FAULTS)) if name in render_plainly(r)], tokenizer())
    assert alone.findings == (finding_by_the_hour(finding, report, alone),)
    assert alone.computed_tokens - alone.fixed_tokens == finding.saved_tokens


def finding_by_the_hour(finding, report: LintReport, alone: LintReport):
    """The same finding in a log that covers another time."""
    return replace(finding, saved_tokens_per_hour=finding.saved_tokens / alone.hours)


def test_findings_are_ranked_by_what_they_save_and_add_up():
    report = report_of_all()
    savings = [finding.saved_tokens_per_hour for finding in report.findings]
    assert savings == sorted(savings, reverse=True)
    total = sum(finding.saved_tokens for finding in report.findings)
    assert report.computed_tokens - report.fixed_tokens == total
    assert len(report.findings) == len(FAULTS)


def test_faults_in_one_prompt_are_found_behind_one_another():
    """The second is worth nothing before the first is mended, and is found all the same."""
    app = Application("crowded")
    half = len(app.head) // 2
    bodies = []
    for number in range(16):
        head = f"It is {at(number):%H:%M:%S}. {app.head[:half]} Case #{number}. {app.head[half:]}"
        tools = app.tools()
        app.random.shuffle(tools)
        bodies.append(chat(app, head, tools=tools))
    report = lint(requests_of(bodies), tokenizer())
    assert {f.kind for f in report.findings} == {"timestamp", "tools_order", "counter"}


def test_a_time_that_costs_next_to_nothing_is_no_finding():
    """Behind a long prompt, only the few tokens between it and the question would be saved."""
    app = Application("tidy")
    head = f"{app.head} {app.head[::-1]}"
    bodies = [chat(app, f"{head} It is {at(n):%H:%M:%S}.") for n in range(12)]
    assert lint(requests_of(bodies), tokenizer()).findings == ()


def test_a_log_without_times_counts_as_an_hour():
    requests = [parse_request(json.dumps(chat(Application("a"), f"Now {n}")), n) for n in range(3)]
    report = lint(requests, tokenizer())
    assert (report.hours, report.has_times) == (1.0, False)


def test_keys_in_varying_order_are_found_in_tools_as_well():
    """To Python, objects with their keys in another order are equal; to a tokenizer they differ."""
    app = Application("typed")
    bodies = []
    for _ in range(12):
        tools = app.tools()
        for tool in tools:
            items = list(tool["function"].items())
            app.random.shuffle(items)
            tool["function"] = dict(items)
        bodies.append(chat(app, app.head, tools=tools))
    [finding] = lint(requests_of(bodies), tokenizer()).findings
    assert finding.kind == "json_keys" and finding.after > 0.8


def about_users(app: Application, shuffled: bool) -> list:
    """Requests whose system prompt begins with an object, its keys not in the alphabet's order."""
    bodies = []
    for number in range(24):
        items = [("name", f"{app.random.choice(WORDS)}{number}"), ("age", 20 + number % 9)]
        items.append(("city", app.random.choice(["Rome", "Oslo", "Bonn"])))
        if shuffled:
            app.random.shuffle(items)
        bodies.append(chat(app, f"The user: {json.dumps(dict(items))}\n{app.head}"))
    return requests_of(bodies)


def test_what_changes_inside_json_is_found_whatever_the_order_of_its_keys():
    """The text is cut as it was sent, not as it is compared."""
    [finding] = lint(about_users(Application("typed"), shuffled=False), tokenizer()).findings
    assert finding.kind == "user" and finding.before < 0.3 and finding.after > 0.7

    kinds = [f.kind for f in lint(about_users(Application("typed"), True), tokenizer()).findings]
    assert sorted(kinds) == ["json_keys", "user"]


def test_keys_that_are_always_in_one_order_are_no_finding():
    """Sorting would put what changes behind what stays, and hit; the order is not at fault."""
    app = Application("set up")
    heads = [json.dumps({"zeta": f"v{n}", "alpha": app.head, "mid": 1}) for n in range(16)]
    report = lint(requests_of([chat(app, head) for head in heads]), tokenizer())
    assert "json_keys" not in [finding.kind for finding in report.findings]


def test_keys_are_put_in_the_order_that_was_first_with_all_else_as_written():
    orders = KeyOrders()
    texts = [
        'a {"c":1, "b": [{"y":2,"x":3}]} {',
        '{"b": [{"x": "{", "y":2}],\n"c": 1}',
        '{"d":1,"d":2}',
    ]
    assert [reorder_json(text, orders) for text in texts] == [
        texts[0],
        '{"c": 1,\n"b": [{"y":2, "x": "{"}]}',
        texts[2],
    ]


def test_tools_that_come_and_go_in_one_order_are_not_told_to_keep_it():
    """Whatever came first: an order that no list contradicts is one order."""
    app = Application("seasonal")
    tools = app.tools()
    chosen = [[1, 3, 5], [0, 1, 2], [2, 4, 5], [0, 3], [1, 2, 3, 4], [0, 5]] * 3
    bodies = [chat(app, app.head, tools=[tools[i] for i in places]) for places in chosen]
    [finding] = lint(requests_of(bodies), tokenizer()).findings
    assert finding.kind == "tools_list"


def test_findings_say_what_is_mended_before_them():
    """Ranked by what they save, they do not stand in the order in which they were mended."""
    app = Application("crowd")
    bodies = []
    for number in range(16):
        tools = app.tools()
        app.random.shuffle(tools)
        bodies.append(chat(app, f"Case #{number}. {app.head}", tools=tools))
    found = {f.kind: f for f in lint(requests_of(bodies), tokenizer()).findings}
    assert found["tools_order"].fixed_before == () and found["counter"].fixed_before == (
        "tools_order",
    )
    assert found["counter"].before == found["tools_order"].after


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        ("<time>{epoch}</time>", "timestamp"),
        ("<now>{clock}</now># Role: ", "timestamp"),
        ("現在時刻は{clock}です。", "timestamp"),
        ("trace={nonce};", "nonce"),
        ('<ticket no="{count}"/>', "counter"),
    ],
)
def test_what_changes_is_known_among_tags_and_where_no_blanks_are_written(head, kind):
    app = Application(kind)
    rules = "あなたは親切な助手です。質問に短く答え、資料を引用してください。" * 9
    bodies = [
        chat(
            app,
            head.format(
                epoch=int(at(number).timestamp()),
                clock=f"{at(number):%H:%M:%S}",
                nonce=f"{app.random.getrandbits(64):016x}",
                count=number + 7,
            )
            + (rules if "現" in head else app.head),
        )
        for number in range(12)
    ]
    report = lint(requests_of(bodies), word_tokenizer())
    assert [finding.kind for finding in report.findings] == [kind]
    assert report.num_groups == 1


CHANGING = {
    "message_timestamp": lambda n: f"Now it is {at(n):%Y-%m-%d %H:%M:%S}.",
    "message_date": lambda n: f"Today is {at(40 * n):%d %B %Y}.",
    "message_id": lambda n: f"Trace {n:08x}-0000-4000-8000-{n * 7919:012x}:",
    "message_counter": lambda n: f"This is request #{100 + n}.",
}
"""What does not stay the same, by the finding that it is to make."""


def asked(app: Application, before: str, behind: str, shared: str, role: str) -> dict:
    """A request whose user, or tool, sends a text that all share, between two that change."""
    question = {"role": "user", "content": app.sentence(6)}
    content = f"{before} {shared} {behind}"
    if role == "user":
        question["content"] = f"{before} {shared} {question['content']} {behind}"
        return {"messages": [{"role": "system", "content": "You are a clerk."}, question]}
    call = {"role": "assistant", "content": "Let me look it up."}
    result = {"role": "tool", "content": content}
    start = {"role": "user", "content": "What do the rules say?"}
    return {"messages": [start, call, result, question]}


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("kind", CHANGING)
def test_what_changes_inside_a_message_before_shared_text_is_found(kind, role):
    app = Application(f"{kind} {role}")
    write = CHANGING[kind]
    bodies = [asked(app, write(n), "", app.head, role) for n in range(12)]
    [finding] = lint(requests_of(bodies), tokenizer()).findings
    assert finding.kind == kind and finding.after > 0.7 > finding.before
    assert finding.where == ("messages[1] (user)" if role == "user" else "messages[2] (tool)")
    assert len(finding.examples) == 3


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("kind", CHANGING)
def test_what_changes_at_the_end_is_no_finding(kind, role):
    """Nothing that requests share stands behind it."""
    app = Application(f"{kind} {role}")
    bodies = [asked(app, "", "", app.head, role) for _ in range(12)]
    for n, body in enumerate(bodies):
        body["messages"][-1]["content"] += " " + CHANGING[kind](n)
    assert lint(requests_of(bodies), tokenizer()).findings == ()


@pytest.mark.parametrize("kind", CHANGING)
def test_stamps_that_stay_what_they_were_are_no_finding(kind):
    """Each message of a conversation has its own, and is sent again as it was."""
    app, bodies = Application(kind), []
    for _ in range(3):
        messages = [{"role": "system", "content": app.head}]
        for _turn in range(5):
            stamp = CHANGING[kind](app.random.randrange(90))
            messages.append({"role": "user", "content": f"{stamp} {app.sentence(20)}"})
            bodies.append({"messages": messages[:]})
            messages.append({"role": "assistant", "content": app.sentence(20)})
    assert lint(requests_of(bodies), tokenizer()).findings == ()


def test_history_that_is_stamped_anew_with_each_request_is_found():
    """What a tool answered is fetched once, and written with the time of each request."""
    app, bodies = Application("stamped"), []
    messages = [{"role": "system", "content": "You are a clerk."}]
    result = {"role": "tool", "content": ""}
    messages += [{"role": "user", "content": "Look it up."}, result]
    for n in range(12):
        fresh = {"role": "tool", "content": f"{at(n):%H:%M} {app.head}"}
        bodies.append({"messages": [fresh if m is result else m for m in messages]})
        messages.append({"role": "assistant", "content": app.sentence(8)})
        messages.append({"role": "user", "content": app.sentence(8)})
        bodies[-1]["messages"].append({"role": "user", "content": app.sentence(5)})
    [finding] = lint(requests_of(bodies), tokenizer()).findings
    assert finding.kind == "message_timestamp"


def test_progress_is_told_of_each_request_twice():
    told: list[int] = []
    lint(requests_of([chat(Application("a"), f"Now {n}") for n in range(5)]), tokenizer(),
         progress=told.append)  # fmt: skip
    assert sum(told) == 10


def test_requests_are_grouped_by_template():
    app, other = Application("one"), Application("other")
    heads = [f"It is {n}. {app.head}" for n in range(3)] + [other.head]
    groups = group_requests(requests_of([chat(app, head) for head in heads]))
    assert [len(group.requests) for group in groups] == [3, 1]
    assert groups[0].title.startswith("It is … You are the one desk.")
    [slot] = groups[0].slots()
    assert (slot.kind, slot.values[2], slot.before) == ("counter", "2.", "It is")


def test_white_space_and_keys_are_no_template():
    assert canonical(' a\n {"b": 1,\n "a": 2} ') == 'a {"a": 2, "b": 1}'
    assert reorder_json("a { b } c {", sorted) == "a { b } c {"


def test_every_request_of_the_planted_log_is_explained():
    """The same log, asked the other way round: where does each prompt part, and in which field?"""
    [*explanations] = explain_log(
        [r for r in log({"timestamp"}) if "timestamp desk" in render_plainly(r)],
        tokenizer(),
        PrefixCacheConfig(4096),
    )
    assert explanations[0].reasons == ("never seen",)
    for explanation in explanations[1:]:
        assert explanation.reasons == ("differs",)
        assert explanation.difference is not None
        assert explanation.difference.place.startswith("messages[0] (system), line 1")


def test_without_a_model_tokens_are_pieces_of_words():
    words = word_tokenizer()
    text = "It is 10:42, and incomprehensibilities\n\n abound — naïvely."
    assert words.decode is not None
    assert words.decode(words.encode(text)) == text
    assert 10 < len(words.encode(text)) < 24
    assert {f.kind for f in lint(log({"timestamp", "user"}), words).findings} == {
        "timestamp",
        "user",
    }


def turn(messages: list, prompt_ids: list, answer: str, token_ids: list) -> str:
    """A record of a log that carries token ids."""
    choice = {"message": {"role": "assistant", "content": answer}, "token_ids": token_ids}
    response = {"choices": [choice], "prompt_token_ids": prompt_ids}
    body = {"model": "m", "messages": messages}
    return json.dumps({"body": body, "response": response})


def test_answers_that_came_back_as_other_tokens_are_found_where_the_log_has_token_ids():
    """The second turn has 40 tokens of the first, then two others for one generated token."""
    first = [{"role": "user", "content": "hi"}]
    then = [*first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "so?"}]
    prompt, answer = list(range(100, 132)), [*range(8), 9, *range(20, 40)]
    drifted = [*prompt, *range(8), 7, 7, *range(20, 40), 50, 51]
    records = [turn(first, prompt, "yes", answer), turn(then, drifted, "ok", [1])]
    log = [parse_request(record, n) for n, record in enumerate(records, 1)]
    [finding] = lint(log, word_tokenizer()).findings
    assert (finding.kind, finding.examples) == ("drift", ("yes",))
    assert finding.saved_tokens == 20  # behind the 40, but for the last, which was not computed
    kept = [*prompt, *answer, 50, 51]
    records[1] = turn(then, kept, "ok", [1])
    assert not lint(
        [parse_request(r, n) for n, r in enumerate(records, 1)], word_tokenizer()
    ).findings
