"""What is decoded and fetched, and what is refused before anything is read."""

import asyncio
import base64
import gzip
import io
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from aiohttp import ClientError, web
from aiohttp.abc import AbstractResolver, ResolveResult
from PIL import Image

from ostinato.core.errors import ConfigError, RequestError
from ostinato.engine.settings.config import EngineConfig
from ostinato.images import media
from ostinato.images.media import MediaLimits, fetch, is_public
from ostinato.images.picture import as_picture, decode
from tests.support.models.images import picture, png, repeated_scans

FILE = png(picture(1))
BOMB = png(picture(1, 2000, 2000))[:5000]


def get(url: str, limits: MediaLimits) -> bytes:
    return asyncio.run(fetch(url, limits))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be decoded"),
        (b"no image", "cannot be decoded"),
        (FILE[: len(FILE) // 2], "cannot be decoded"),
        (BOMB, "2000 x 2000 = 4000000 pixels: at most max_image_pixels=1000000"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be decoded"),
        (png(Image.new("1", (1, 50_000))), "1 x 50000 pixels: it may be at most 100 times"),
        (repeated_scans(picture(1), 101), "has 1.. scans: at most 100 are decoded"),
    ],
)
def test_what_is_no_whole_image_of_an_allowed_size_is_refused(content: bytes, said: str):
    with pytest.raises(RequestError, match=said):
        decode(content, 10**6)


@pytest.mark.parametrize("given", [None, 5, "a.png", [1, 2]])
def test_what_stands_for_no_image_is_refused(given: object):
    with pytest.raises(RequestError, match=r"give a PIL\.Image"):
        as_picture(given, 10**6)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_pictures_of_every_mode_become_rgb(mode: str):
    """Gray of 16 bits is brought to 8, where Pillow would cut it off."""
    gray = Image.new("L", (8, 8), 255).convert(mode.replace("I;16", "L"))
    if mode == "I;16":
        gray = Image.fromarray(np.full((8, 8), 0x7F00, dtype=np.uint16))
    content = io.BytesIO()
    gray.save(content, "JPEG" if mode == "CMYK" else "PNG")

    pixels = decode(content.getvalue(), 64).pixels

    assert pixels.shape == (8, 8, 3) and (pixels == (0x7F if mode == "I;16" else 255)).all()


def test_a_picture_is_turned_upright_as_its_file_says():
    content, turned = io.BytesIO(), Image.Exif()
    turned[0x0112] = 6  # orientation: a quarter to the right
    picture(1, 40, 60).save(content, "JPEG", exif=turned)
    assert decode(content.getvalue(), 10**6).pixels.shape == (40, 60, 3)


def test_of_an_animation_the_first_frame_is_taken():
    content, frames = io.BytesIO(), [picture(number) for number in range(3)]
    frames[0].save(content, "WEBP", lossless=True, save_all=True, append_images=frames[1:])
    assert decode(content.getvalue(), 10**6).digest == as_picture(frames[0], 10**6).digest


def test_a_data_uri_is_read_up_to_the_limit():
    url = "data:image/png;base64," + base64.b64encode(FILE).decode()
    assert get(url, MediaLimits()) == FILE
    with pytest.raises(RequestError, match="longer than max_image_bytes=99"):
        get(url, MediaLimits(max_image_bytes=99))
    with pytest.raises(RequestError, match="base64 is broken"):
        get("data:image/png;base64,%%%%", MediaLimits())
    with pytest.raises(RequestError, match="must be 'data:image"):
        get("data:image/png,abc", MediaLimits())


def test_files_are_read_below_the_allowed_directory_alone(tmp_path: Path):
    inside, outside = tmp_path / "in", tmp_path / "secret.png"
    inside.mkdir()
    (inside / "a.png").write_bytes(FILE)
    outside.write_bytes(FILE)
    (inside / "link.png").symlink_to(outside)
    limits = MediaLimits(allowed_local_media_path=str(inside))

    assert get(f"file://{inside}/a.png", limits) == FILE
    for url in (f"{inside}/../secret.png", f"{inside}/link.png", outside, f"{inside}/none.png"):
        with pytest.raises(RequestError, match="no such file in allowed_local_media_path"):
            get(f"file://{url}", limits)
    with pytest.raises(RequestError, match="--allowed-local-media-path"):
        get(f"file://{inside}/a.png", MediaLimits())


PRIVATE = """127.0.0.1 10.1.2.3 192.168.0.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 ::1
255.255.255.255 fe80::1%eth0 fd00::1 ::ffff:127.0.0.1 64:ff9b::a00:1 2002:7f00:1:: ff02::1
fec0::1 192.88.99.1 3fff::1 ::7f00:1 64:ff9b:1::1 100::1 100:0:0:1::1 2001:2::1 2001:20::1
2001:db8::1 2620:4f:8000::1 5f00::1 192.0.0.8 192.0.2.1 192.31.196.1 192.52.193.1 192.175.48.1
198.18.0.1 198.51.100.1 203.0.113.1 240.0.0.1"""


def test_addresses_inside_a_network_are_not_public_in_any_notation():
    assert [address for address in PRIVATE.split() if is_public(address)] == []


def test_open_addresses_are_public():
    open_ones = "93.184.216.34 2606:2800:220:1:248:1893:25c8:1946 2001:4860:4860::8888 2a00:1450::1"
    assert all(map(is_public, open_ones.split()))


class Answers(AbstractResolver):
    """A resolver that gives one answer after the other."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = list(addresses)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        address = self._addresses.pop(0)
        return [ResolveResult(hostname=host, host=address, port=port, family=socket.AF_INET,
                              proto=0, flags=0)]  # fmt: skip

    async def close(self) -> None:
        pass


class Website:
    """Serves images at 127.0.0.1, which counts as public here; the other loopbacks are private."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.port = 0

    def at(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    async def image(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(f"{request.host.rpartition(':')[0]}{request.path}")
        return web.Response(body=FILE)

    async def moved(self, request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(request.query["to"], headers={"Connection": "close"})

    async def packed(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=gzip.compress(FILE), headers={"Content-Encoding": "gzip"})

    async def endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(2**16))

    async def slow(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.Event().wait()
        return response


@asynccontextmanager
async def website(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Website]:
    """Listen at all addresses of this machine."""
    site, app = Website(), web.Application()
    for name in ("moved", "packed", "endless", "slow"):
        app.add_routes([web.get(f"/{name}", getattr(site, name))])
    app.add_routes([web.get("/{name}.png", site.image)])
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0).start()
    site.port = runner.addresses[0][1]
    monkeypatch.setattr(media, "is_public", lambda address: address == "127.0.0.1")
    try:
        yield site
    finally:
        await runner.cleanup()


async def test_urls_are_fetched_from_allowed_hosts_up_to_the_limits(
    monkeypatch: pytest.MonkeyPatch,
):
    async with website(monkeypatch) as site:
        at, allowed = site.at, MediaLimits(allowed_media_domains=("127.0.0.1",))
        assert await fetch(at("/a.png"), allowed) == FILE
        assert await fetch(at("/moved?to=/a.png"), allowed) == FILE
        assert await fetch(at("/packed"), allowed) == gzip.compress(FILE), "it is not unpacked"
        for url, limits, said in (
            (at("/a.png"), MediaLimits(), "--allowed-media-domains"),
            (at("/a.png"), MediaLimits(allowed_media_domains=("example.org",)), "not fetched from"),
            (at("/moved?to=http://other.example/"), allowed, "not fetched from 'other"),
            (at("/moved?to=file:///etc/passwd"), allowed, "only http and https"),
            (at("/moved?to=/moved?to=/moved"), allowed, "HTTP status|redirects"),
            (at("/none"), allowed, "HTTP status 404"),
            (
                at("/a.png"),
                MediaLimits(allowed_media_domains=("*",), max_image_bytes=9),
                "longer than",
            ),
            (
                at("/endless"),
                MediaLimits(allowed_media_domains=("*",), max_image_bytes=2**20),
                "longer than",
            ),
            (
                at("/slow"),
                MediaLimits(allowed_media_domains=("*",), media_timeout_s=0.05),
                "media_timeout_s=0.05",
            ),
        ):
            with pytest.raises(RequestError, match=said):
                await fetch(url, limits)


PLACES = "127.0.0.2 [::1] [::ffff:127.0.0.1] 169.254.169.254 ①②⑦.0.0.2 2130706434 0x7f000002 127.2"


async def test_no_private_address_is_connected_to_in_any_notation(monkeypatch: pytest.MonkeyPatch):
    """Neither at once nor after a redirect; it would answer."""
    async with website(monkeypatch) as site:
        for host in PLACES.split():
            url = site.at("/private.png", host)
            for asked in (url, site.at(f"/moved?to={url}")):
                with pytest.raises(RequestError, match=r"public address|canonical|fetched"):
                    await fetch(asked, MediaLimits(allowed_media_domains=("*",)))
        assert site.seen == []


async def test_a_second_answer_of_the_dns_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    """A redirect to the same host, which is private by then."""
    async with website(monkeypatch) as site:
        resolver = Answers("127.0.0.1", "127.0.0.2")
        again = site.at("/private.png", "rebinding.example")
        asked = site.at(f"/moved?to={again}", "rebinding.example")
        limits = MediaLimits(allowed_media_domains=("rebinding.example",))
        with pytest.raises(ClientError, match=r"127\.0\.0\.2 is not a public address"):
            await media.read_web(asked, limits, resolver)
        assert site.seen == []
        assert await media.read_web(again, limits, Answers("127.0.0.1")) == FILE


@pytest.mark.parametrize(
    "settings",
    [
        {"limit_mm_per_prompt": {"image": -1}},
        {"limit_mm_per_prompt": {"video": 1}},
        {"limit_mm_per_prompt": 3},
        {"mm_encoder_cache_bytes": -1},
        {"max_image_pixels": 0},
        {"media_timeout_s": 0},
        {"allowed_media_domains": "example.org"},
        {"allowed_local_media_path": "/no/such/directory"},
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings: dict[str, object]):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        EngineConfig(**settings)
