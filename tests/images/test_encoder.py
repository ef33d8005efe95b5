"""The encoder runs beside the steps: who waits for it, and what becomes of its work."""

import threading

import pytest
from torch import Tensor

from ostinato import LLM, RequestOutput, SamplingParams
from ostinato.core.request import FinishReason
from ostinato.engine.requests.prompts import parse_prompt
from ostinato.runner.images.store import ImageStore
from ostinato.runner.images.vision import Pixels, Vision
from tests.images.conftest import MakeImageLLM
from tests.support.models.images import IMAGE, picture

ONE, TWO = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 2))
CATS, DOGS = picture(1), picture(2)
PATIENCE_S = 60


class Gate:
    """Lets images through to the encoder one by one, or raises in its place."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.begun, self._open = threading.Semaphore(0), threading.Semaphore(0)

    def open(self, number: int = 1) -> None:
        self._open.release(number)

    def await_begun(self) -> None:
        assert self.begun.acquire(timeout=PATIENCE_S)

    def pass_through(self) -> None:
        self.begun.release()
        assert self._open.acquire(timeout=PATIENCE_S)
        if self.error is not None:
            raise self.error


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate, encode = Gate(), Vision.encode

    def gated(vision: Vision, pixels: Pixels) -> Tensor:
        gate.pass_through()
        return encode(vision, pixels)

    monkeypatch.setattr(Vision, "encode", gated)
    return gate


@pytest.fixture
def llm(gate: Gate, make_image_llm: MakeImageLLM) -> LLM:
    gate.open()  # the encoder is tried when the model is loaded
    llm = make_image_llm(max_num_seqs=4)
    gate.__init__()  # type: ignore[misc]  # the model may have been loaded before
    return llm


def add(llm: LLM, text: str, *images: object, salt: str = "", params: SamplingParams = TWO) -> str:
    """Add a request and return its name."""
    prompt = {"prompt": text, "multi_modal_data": {"image": list(images)}, "cache_salt": salt}
    made = llm.engine.make_request(parse_prompt(prompt), params)
    llm.engine.add(made)
    return made.request.request_id


def until(llm: LLM, *names: str) -> list[RequestOutput]:
    """Step until requests have ended; returns their outputs."""
    outputs: dict[str, RequestOutput] = {}
    while not outputs.keys() >= set(names):
        ended = [state for state in llm.engine.step() if state.finished]
        outputs.update((state.request.request_id, state.output()) for state in ended)
    return [outputs[name] for name in names]


def images_of(llm: LLM) -> ImageStore:
    assert llm.engine.runner.images is not None
    return llm.engine.runner.images


def test_other_requests_do_not_wait_for_an_image(llm: LLM, gate: Gate):
    seen = add(llm, f"Look: {IMAGE}", CATS)
    llm.engine.step()
    gate.await_begun()

    until(llm, add(llm, "Text alone is served meanwhile"))

    gate.open()
    assert until(llm, seen)[0].error is None


def test_a_request_that_is_ready_waits_for_no_image(
    llm: LLM, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    """Four seats, and answers of one token: after the first step nothing runs, and one is ready."""
    seen = add(llm, f"Look: {IMAGE}", CATS)
    llm.engine.step()
    gate.await_begun()
    waits: list[int] = []
    encoder = llm.engine.image_encoder
    assert encoder is not None
    with monkeypatch.context() as patch:
        patch.setattr(encoder, "wait", lambda _: waits.append(len(llm.engine.request_ids)))
        until(llm, *(add(llm, f"Text {number}", params=ONE) for number in range(5)))
    assert all(number == 1 for number in waits), "only once the image's request waits alone"

    gate.open()
    assert until(llm, seen)[0].error is None


def test_an_image_is_encoded_once_for_all_that_wait_for_it(llm: LLM, gate: Gate):
    names = [add(llm, f"{text}{IMAGE}", CATS) for text in ("a", "b", "c")]
    gate.open()

    until(llm, *names)

    assert images_of(llm).num_encoded == 1


def test_the_work_for_a_cancelled_request_is_dropped(llm: LLM, gate: Gate):
    """One of its images is being encoded; the other one is never begun."""
    name = add(llm, f"{IMAGE}{IMAGE}", CATS, DOGS, salt="alice")
    llm.engine.step()
    gate.await_begun()

    llm.engine.cancel(name)
    gate.open(2)
    llm.erase("alice")

    assert len(images_of(llm)) == 0 and not gate.begun.acquire(blocking=False)
    assert not llm.engine.has_work


def test_an_image_that_cannot_be_encoded_ends_its_own_request_alone(llm: LLM, gate: Gate):
    gate.error = RuntimeError("a kernel is missing")
    name, other = add(llm, f"Look: {IMAGE}", CATS), add(llm, "Text goes on")
    gate.open()

    broken, whole = until(llm, name, other)

    assert broken.error == "an image cannot be encoded: RuntimeError: a kernel is missing"
    assert broken.outputs[0].finish_reason == FinishReason.ERROR
    assert whole.error is None and len(whole.outputs[0].token_ids) == 2


def test_tenants_take_turns_at_the_encoder(llm: LLM, gate: Gate):
    """Two requests are with the thread; bob's comes before all others of alice."""
    alices = [add(llm, f"{n}{IMAGE}", picture(n), salt="alice") for n in range(5)]
    bobs = add(llm, IMAGE, DOGS, salt="bob")

    gate.open(3)
    until(llm, bobs)
    gate.open(3)
    until(llm, alices[-1])


def test_new_weights_encode_anew_what_waits(llm: LLM, gate: Gate):
    name = add(llm, f"Look: {IMAGE}", CATS)
    llm.engine.step()
    gate.await_begun()

    gate.open(2)
    llm.engine.image_encoder.remove_outputs(None)

    until(llm, name)
    gate.await_begun()
    assert images_of(llm).num_encoded == 1
