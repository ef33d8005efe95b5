"""Fetches the bytes of an image from a data URI, a file or a URL.

A URL in a prompt is a request that a client makes from inside the operator's network. So nothing
is fetched unless the operator names domains, and then only from public addresses: each is checked
when its socket is made, which redirects, other notations and second DNS answers cannot avoid.
"""

import asyncio
import base64
import binascii
import errno
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from yarl import URL

from ostinato.core.errors import RequestError
from ostinato.core.setting import setting

if TYPE_CHECKING:
    from aiohttp.abc import AbstractResolver

MAX_REDIRECTS = 3  # that are followed; each is checked as the first URL is
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

_SPECIAL = [
    ipaddress.ip_network(text)
    for text in (
        "192.0.0.0/24", "192.88.99.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.175.48.0/24",
        "2001::/23", "2620:4f:8000::/48", "3fff::/20",
    )
]  # fmt: skip
"""Special-purpose ranges that ``ipaddress`` takes for global, in some version of Python: the relay
of 6to4, AMT and AS112, protocol assignments of IPv6, and documentation.

Source: IANA, IPv4 and IPv6 Special-Purpose Address Registries (RFC 6890); RFC 7526, RFC 9637.
"""

_UNICAST = ipaddress.ip_network("2000::/3")
"""All that IANA has given out of IPv6; site-local addresses and those of SRv6 are outside."""


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What may be fetched, and how much of it."""

    max_image_pixels: int = setting(2**25, minimum=1)
    """Maximum pixels of an image, refused before it is decoded."""
    max_prompt_pixels: int = setting(2**26, minimum=1)
    """Maximum pixels of all images of a conversation."""
    max_image_bytes: int = setting(20 * 2**20, minimum=1)
    """Maximum size of an image file."""
    media_timeout_s: float = setting(5.0, above=0)
    """Seconds to fetch an image, redirects included."""
    allowed_local_media_path: str = setting("")
    """Directory below which ``file://`` URLs may be read; else none."""
    allowed_media_domains: Sequence[str] = setting((), kind="a list of hosts")
    """Hosts that images may be fetched from; ``*`` is every host with a public address, and by
    default there is none. Subdomains are other hosts, and data URIs are always read."""


async def fetch(url: str, limits: MediaLimits) -> bytes:
    """Return the content of an image's URL: ``data:``, ``file://``, ``http://`` or ``https://``.

    Raises:
        RequestError: It is not allowed, does not exist, is too long or takes too long.
    """
    scheme = url.partition(":")[0].lower()
    if scheme == "data":
        return await asyncio.to_thread(_of_data, url, limits)
    if scheme == "file":
        return await asyncio.to_thread(_of_file, url, limits)
    if scheme in ("http", "https"):
        import aiohttp  # every start would wait for it

        try:
            async with asyncio.timeout(limits.media_timeout_s):
                return await read_web(url, limits)
        except RequestError:
            raise
        except TimeoutError as error:
            raise RequestError(
                f"image {url!r:.120} took more than media_timeout_s={limits.media_timeout_s:g} "
                "seconds"
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise RequestError(f"image {url!r:.120} cannot be fetched: {error!s:.120}") from error
    raise RequestError(
        f"image {url!r:.80}: must be a data URI such as 'data:image/png;base64,...'"
        + (", a file:// URL" if limits.allowed_local_media_path else "")
        + (", an http(s):// URL" if limits.allowed_media_domains else "")
    )


def is_public(address: str) -> bool:
    """Whether an IP address is one of the open internet, under every notation of it."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo or (None, None))[1]
        if inner is not None:
            return is_public(str(inner))
        if parsed in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)))
        if parsed not in _UNICAST:
            return False
    is_special = any(parsed in network for network in _SPECIAL if network.version == parsed.version)
    return not is_special and parsed.is_global and not (parsed.is_multicast or parsed.is_reserved)


def _public_socket(address: Any) -> socket.socket:
    """Make the socket that is connected to this address; raise OSError unless it is public."""
    family, kind, protocol, _, (host, *_) = address
    if not is_public(host):
        raise OSError(errno.EACCES, f"{host} is not a public address")
    return socket.socket(family, kind, protocol)


def _of_data(url: str, limits: MediaLimits) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise RequestError(f"image {head!r:.80}: a data URI must be 'data:image/...;base64,...'")
    if len(body) * 3 // 4 > limits.max_image_bytes + 2:
        raise _too_long("of a data URI", limits)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"image {head!r:.80}: its base64 is broken ({error})") from error


def _of_file(url: str, limits: MediaLimits) -> bytes:
    """Read a file below the directory that the operator allows, links resolved."""
    if not limits.allowed_local_media_path:
        raise RequestError(
            f"image {url!r:.120}: files are not read here; start with allowed_local_media_path "
            "(--allowed-local-media-path), or send a data URI"
        )
    parts = urlsplit(url)
    content = None
    if parts.netloc in ("", "localhost"):
        content = _read_below(
            Path(limits.allowed_local_media_path), unquote(parts.path), limits.max_image_bytes + 1
        )
    if content is None:
        raise RequestError(f"image {url!r:.120}: no such file in allowed_local_media_path")
    if len(content) > limits.max_image_bytes:
        raise _too_long(f"{url!r:.120}", limits)
    return content


def _read_below(root: Path, name: str, max_bytes: int) -> bytes | None:
    """Read a file up to ``max_bytes`` bytes; None if it is elsewhere or cannot be read.

    Which of the two is not for a client to know.
    """
    try:
        path = Path(name).resolve()
        if not path.is_relative_to(root.resolve()) or not path.is_file():
            return None
        with path.open("rb") as file:
            return file.read(max_bytes)
    except (OSError, ValueError):
        return None


async def read_web(
    url: str, limits: MediaLimits, resolver: "AbstractResolver | None" = None
) -> bytes:
    """Get a URL; redirects are followed by hand, so that the host of each target is checked."""
    import aiohttp

    connector = aiohttp.TCPConnector(
        resolver=resolver, use_dns_cache=False, socket_factory=_public_socket
    )
    target = URL(url)
    # Images are packed already; unpacking a body could fill the memory from a few bytes.
    async with aiohttp.ClientSession(
        connector=connector, auto_decompress=False, headers={"Accept-Encoding": "identity"}
    ) as session:
        for _ in range(MAX_REDIRECTS + 1):
            _check_host(target, limits)
            async with session.get(target, allow_redirects=False) as response:
                if response.status in _REDIRECTS:
                    target = target.join(URL(response.headers.get("Location", "")))
                    continue
                if response.status != 200:
                    raise RequestError(
                        f"image {target!s:.120} cannot be fetched: HTTP status {response.status}"
                    )
                return await _body(response, target, limits)
    raise RequestError(f"image {url!r:.120}: more than {MAX_REDIRECTS} redirects")


def _check_host(target: URL, limits: MediaLimits) -> None:
    """Refuse a URL whose host the operator did not name."""
    host = (target.raw_host or "").rstrip(".").lower()
    allowed = {domain.rstrip(".").lower() for domain in limits.allowed_media_domains}
    if target.scheme not in ("http", "https") or not host:
        raise RequestError(f"image {target!s:.120}: only http and https are fetched")
    if host not in allowed and "*" not in allowed:
        raise RequestError(
            f"image {target!s:.120}: images are not fetched from {host!r}; start with "
            "allowed_media_domains (--allowed-media-domains) naming it, or send a data URI"
        )


async def _body(response: Any, url: URL, limits: MediaLimits) -> bytes:
    """Read a body up to the limit."""
    body = bytearray()
    async for piece in response.content.iter_chunked(2**16):
        body += piece
        if len(body) > limits.max_image_bytes:
            raise _too_long(f"{url!s:.120}", limits)
    return bytes(body)


def _too_long(what: str, limits: MediaLimits) -> RequestError:
    return RequestError(
        f"image {what} is longer than max_image_bytes={limits.max_image_bytes}: send a smaller one"
    )
