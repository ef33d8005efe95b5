"""Play an hour of scripted traffic against a server, in fast motion, and take pictures of its page.

    python scripts/hour_of_traffic.py                      its own server, two minutes in all
    python scripts/hour_of_traffic.py --url http://127.0.0.1:8000 --seconds 60
    python scripts/hour_of_traffic.py --pictures docs/images

Who calls in that hour is drawn with a fixed seed:

* *desk*: a help desk; every question begins with the same long instructions;
* *chat*: conversations of several turns, each of which sends all before it;
* *crowd*: four times in the hour, twenty-four callers ask about one scene at the same moment;
* *batch*: prompts that are asked once, in the second half.

They are told apart by ``cache_salt``, as tenants without keys are.
"""

import argparse
import asyncio
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

HOUR_S = 3600

INSTRUCTIONS = """You answer for the Globe. Speak plainly, and in verse if thou canst.
The yard costs a penny, the gallery two, a cushion three. No ale behind the stage.
The doors are opened at one of the clock; the trumpets are blown thrice. If it rain, it rain.
The bear garden is another house, and its bears are no concern of ours. Say so kindly.
Who asks for the play is told the play, and not the end of it. Who asks for the end is told to come.
A gentleman may sit upon the stage for sixpence, if he leave his sword and his opinions at the door.
Dogs are welcome that do not sing. Children are welcome that do. Nuts are sold by the measure.
Of the players say nothing that their mothers would not. Of the poet say that he is well.
If any ask whether the ghost be real, answer that he is punctual.
If any ask for money back, be deaf, and then be merry, and then fetch the keeper of the door.

"""
SCENE = """ROMEO:
But, soft! what light through yonder window breaks?
It is the east, and Juliet is the sun.
Arise, fair sun, and kill the envious moon,
Who is already sick and pale with grief,
That thou her maid art far more fair than she:

"""
QUESTIONS = ("What play to-day?", "Is there rain?", "A seat for two?", "When are the trumpets?",
             "May I bring my dog?", "Who plays the king?", "Where is the yard?")  # fmt: skip
GREETINGS = ("morrow", "night", "cousin", "my lord", "even", "gentle sir", "nurse", "fellow")
SPEAKERS = ("JULIET", "NURSE", "MERCUTIO", "TYBALT", "BENVOLIO", "CAPULET", "PARIS", "PETER")


@dataclass(frozen=True, slots=True)
class Call:
    """One request of the hour.

    Attributes:
        at_s: When it comes, in seconds of the played hour.
        tenant: Who calls.
        prompt: The text.
        max_tokens: Of the answer.
    """

    at_s: float
    tenant: str
    prompt: str
    max_tokens: int


def hour(seed: int = 1) -> list[Call]:
    """Write the hour down, in the order of arrival."""
    draw = random.Random(seed)
    calls = [*_desk(draw), *_chats(draw), *_crowds(draw), *_batch(draw)]
    return sorted(calls, key=lambda call: call.at_s)


def _desk(draw: random.Random) -> Iterator[Call]:
    at_s = 20.0
    while at_s < HOUR_S:
        question = f"{draw.choice(SPEAKERS)}: {draw.choice(QUESTIONS)}\nAnswer:"
        yield Call(at_s, "desk", INSTRUCTIONS + question, 8)
        at_s += draw.expovariate(1 / 30)


def _chats(draw: random.Random) -> Iterator[Call]:
    for _ in range(16):
        at_s, text = draw.uniform(0, HOUR_S - 600), f"{draw.choice(SPEAKERS)}:\n"
        for _ in range(draw.randrange(2, 7)):
            text += f"Good {draw.choice(GREETINGS)}, {draw.choice(SPEAKERS).lower()}.\n"
            yield Call(at_s, "chat", text, 12)
            text += f"{draw.choice(SPEAKERS)}:\nI know not what to say to thee.\n"
            at_s += draw.uniform(30, 120)


def _crowds(draw: random.Random) -> Iterator[Call]:
    for at_s in (500, 1400, 2300, 3200):
        for number in range(24):
            yield Call(
                at_s, "crowd", f"{SCENE}{SPEAKERS[number % 8]}, {'aye ' * (number // 8)}:\n", 8
            )


def _batch(draw: random.Random) -> Iterator[Call]:
    at_s = HOUR_S / 2
    while at_s < HOUR_S:
        words = " ".join("".join(draw.choices("aeioubdlmnrst", k=5)) for _ in range(140))
        yield Call(at_s, "batch", words, 4)
        at_s += draw.expovariate(1 / 25)


async def play(url: str, seconds: float) -> int:
    """Send the hour's calls in so many seconds; returns how many were answered."""
    calls, begin = hour(), time.monotonic()
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def send(call: Call) -> bool:
            await asyncio.sleep(max(0.0, begin + call.at_s * seconds / HOUR_S - time.monotonic()))
            body = {"model": model, "prompt": call.prompt, "max_tokens": call.max_tokens,
                    "temperature": 0, "cache_salt": call.tenant}  # fmt: skip
            answer = await client.post("/v1/completions", json=body)
            if answer.status_code != 200:
                print(f"{call.tenant}: {answer.status_code} {answer.text}")
            return answer.status_code == 200

        return sum(await asyncio.gather(*map(send, calls)))


@contextmanager
def own_server() -> Iterator[str]:
    """Serve the embedded model with few enough blocks that some are evicted."""
    import uvicorn

    from ostinato import AsyncLLM
    from ostinato.server.app import create_app
    from ostinato.server.state import ServerState

    llm = AsyncLLM("tiny-shakespeare", num_blocks=1000, block_size=16, max_num_seqs=32)
    config = uvicorn.Config(create_app(ServerState(llm)), port=0, log_level="warning", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        llm.shutdown()


CHROMIUM = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update",
            "--disable-sync")  # fmt: skip


def take_pictures(url: str, folder: Path) -> None:
    """Photograph the page in light and dark, after a chat and two prompts in the playground."""
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path="/usr/bin/chromium", args=list(CHROMIUM))
        for theme in ("light", "dark"):
            view = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=theme)
            view.goto(url)
            for number, text in enumerate(("Good morrow, cousin.", "And whither goest thou?"), 1):
                view.fill("#chat-text", text)
                view.click("#chat-send")
                answered = view.locator(".assistant .note a").nth(number - 1)
                answered.wait_for(timeout=120_000)
            for end in ("ROMEO:\nO, speak again\n", f"ROMEO:\nO, it is my {theme}!\n"):
                view.fill("#prompt", SCENE + end)
                view.click("#run")
                view.wait_for_selector("#run:enabled")
            view.click("#by-tenant" if theme == "light" else "#by-state")
            view.wait_for_timeout(1500)
            picture = folder / f"page-{theme}.png"
            view.screenshot(path=picture, full_page=True)
            make_small(picture)
        browser.close()


def make_small(picture: Path) -> None:
    """Keep the 256 colours that a picture uses most: a third of its size, and it looks the same."""
    from PIL import Image

    with Image.open(picture) as image:
        flat = image.convert("RGB")
    colours: Any = flat.getcolors(flat.width * flat.height)
    used = sorted(colours, reverse=True)[:256]
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _, colour in used for part in colour])
    flat.quantize(palette=palette, dither=Image.Dither.NONE).save(picture, optimize=True)


def main() -> None:
    """Read the options and play."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--url", help="of a server that runs; none starts one")
    options.add_argument("--seconds", type=float, default=120.0, help="how long the hour takes")
    options.add_argument("--pictures", type=Path, help="folder for pictures of the page")
    chosen = options.parse_args()
    if chosen.url is None:
        with own_server() as url:
            run(url, chosen)
    else:
        run(chosen.url.rstrip("/"), chosen)


def run(url: str, chosen: argparse.Namespace) -> None:
    """Play the hour, take the pictures before its end, and say what came of it."""
    photographer = threading.Timer(0.87 * chosen.seconds, take_pictures, (url, chosen.pictures))
    if chosen.pictures is not None:
        photographer.start()
    answered = asyncio.run(play(url, chosen.seconds))
    if chosen.pictures is not None:
        photographer.join()
    totals = httpx.get(f"{url}/ui/state").json()["totals"]
    print(
        f"{answered} of {len(hour())} calls answered; of {totals['prompt']:,} prompt tokens ",
        end="",
    )
    print(f"{totals['saved']:,} were saved ({totals['hit_ratio']:.1%})")


if __name__ == "__main__":
    main()
