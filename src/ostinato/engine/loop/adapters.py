"""The LoRA adapters of an engine: loaded and unloaded at run time, by name.

A name is what requests use; the cache's key is the digest of the content. Two names of one content
share blocks; new content under an old name misses. When an adapter is unloaded or replaced, the
requests that have it finish and publish nothing more; its weights are freed with the last of them.
"""

import hashlib
import time
from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISREG

from ostinato.cache.block_table import BlockTable
from ostinato.cache.observer import CacheObserver
from ostinato.core.errors import RequestError
from ostinato.core.request import RequestContext
from ostinato.engine.settings.config import EngineConfig
from ostinato.runner.adapters.lora import LoraAdapter
from ostinato.runner.adapters.lora_config import CONFIG_FILE, WEIGHTS_FILE
from ostinato.runner.adapters.lora_files import LoraLimits, read_adapter
from ostinato.runner.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for a request, as in vLLM; loaded when it is first used.

    Attributes:
        lora_name: What it is called.
        lora_int_id: Its number, at least 1; each loaded adapter has its own.
        lora_path: Directory with ``adapter_config.json`` and ``adapter_model.safetensors``.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | Path

    def __post_init__(self) -> None:
        """Raise RequestError where a field is of the wrong type."""
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise RequestError(f"lora_name={self.lora_name!r:.80}: must be a name")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise RequestError(f"lora_int_id={self.lora_int_id!r:.80}: must be at least 1")
        if not isinstance(self.lora_path, (str, Path)) or not str(self.lora_path):
            raise RequestError(f"lora_path={self.lora_path!r:.80}: must be a directory")


_TICK_NS = 2 * 10**9
"""Time in which a file may be written again without a new time: file systems round it."""


@dataclass(slots=True)
class FileStamp:
    """Whether an adapter's files are those that were read.

    Attributes:
        status: Inode, size, and times of modification and change of each file.
        digest: SHA-256 of their contents.
        checked_ns: When they last had these contents, since 1970.
    """

    status: tuple[tuple[int, ...], ...]
    digest: bytes
    checked_ns: int

    @classmethod
    def of(cls, request: LoRARequest) -> "FileStamp":
        """Read the files of an adapter; raises ``RequestError`` if that is impossible."""
        checked_ns, status = time.time_ns(), _status(request)
        return cls(status, _digest(request), checked_ns)

    def is_current(self, request: LoRARequest) -> bool:
        """Whether the files are the same.

        Cost: reads them only if they changed about when they were last read; a program can set a
        file's time of modification, but not that of its change.
        """
        now_ns, status = time.time_ns(), _status(request)
        if status != self.status:
            return False
        if all(change_ns + _TICK_NS < self.checked_ns for *_, change_ns in status):
            return True
        if _digest(request) != self.digest:
            return False
        self.checked_ns = now_ns
        return True


@dataclass(frozen=True, slots=True, eq=False)
class NamedAdapter:
    """An adapter under its name."""

    request: LoRARequest  # its name, number and path
    adapter: LoraAdapter
    stamp: FileStamp


class Adapters(CacheObserver):
    """All adapters of one engine; changed between steps, read in any thread."""

    def __init__(self, config: EngineConfig, held: dict[bytes, LoraAdapter]) -> None:
        """Start with ``held``, the runner's adapters by digest, which is changed here alone."""
        self.by_name: dict[str, NamedAdapter] = {}  # those that requests may use
        self._config, self._held = config, held
        self.ending: set[bytes] = set()  # unloaded, with requests that have not ended

    @property
    def num_bytes(self) -> int:
        """Memory of all weights, including those of unloaded adapters that requests still use."""
        return sum(adapter.num_bytes for adapter in self._held.values())

    def of(self, name: str) -> LoraAdapter:
        """Return the adapter of a name; raises ``RequestError`` if it is not loaded."""
        named = self.by_name.get(name)
        if named is None:
            known = ", ".join(sorted(self.by_name)) or "none"
            raise RequestError(
                f"adapter {name!r:.200} is not loaded; loaded are: {known}. Load it with "
                "add_lora() or POST /v1/load_lora_adapter"
            )
        return named.adapter

    def is_current(self, request: LoRARequest) -> bool:
        """Whether it is loaded as it is on disk now."""
        named = self.by_name.get(request.lora_name)
        return named is not None and named.request == request and named.stamp.is_current(request)

    def read(self, request: LoRARequest, loaded: LoadedModel) -> NamedAdapter:
        """Read and check an adapter, in any thread; nothing changes yet.

        Raises:
            RequestError: It cannot be served.
        """
        self._check(request)
        stamp, config = FileStamp.of(request), self._config
        old = self.by_name.get(request.lora_name)
        num_bytes = self.num_bytes - (0 if old is None else old.adapter.num_bytes)
        left = max(0, config.max_lora_bytes - num_bytes)
        limits = LoraLimits(config.max_lora_rank, left, config.max_lora_bytes)
        return NamedAdapter(request, read_adapter(request.lora_path, loaded.model, limits), stamp)

    def add(self, named: NamedAdapter) -> LoraAdapter | None:
        """Let requests use an adapter; returns the one that it replaces.

        Raises:
            RequestError: There are too many, or its number is another one's.
        """
        self._check(named.request)
        name, digest = named.request.lora_name, named.adapter.digest
        old = self.by_name.get(name)
        if digest in self._held:  # weights of one content are kept once
            named = replace(named, adapter=self._held[digest])
        self._held[digest] = named.adapter
        self.ending.discard(digest)
        self.by_name[name] = named
        return None if old is None else old.adapter

    def remove(self, name: str) -> LoraAdapter:
        """Let no new request use an adapter, and return it."""
        return self.by_name.pop(name).adapter

    def end(self, adapter: LoraAdapter, tables: Iterable[BlockTable]) -> bool:
        """Publish nothing more of an adapter whose name was removed, unless it has another one.

        Args:
            adapter: The adapter.
            tables: Those of running sequences.

        Returns:
            Whether it has no other name.
        """
        if self.is_usable(adapter.digest):
            return False
        self.ending.add(adapter.digest)
        for table in tables:
            self._stop_writing(table)
        return True

    def free(self, live: Collection[bytes]) -> None:
        """Free the weights of unloaded adapters that no live request has."""
        for digest in self.ending.difference(live):
            self.ending.remove(digest)
            del self._held[digest]

    def is_usable(self, digest: bytes) -> bool:
        """Whether new requests may use an adapter."""
        return any(named.adapter.digest == digest for named in list(self.by_name.values()))

    @property
    def numbers(self) -> set[int]:
        """The ``lora_int_id`` of each loaded adapter."""
        return {named.request.lora_int_id for named in list(self.by_name.values())}

    @property
    def names(self) -> dict[bytes, str]:
        """Names by digest, the last of several."""
        return {named.adapter.digest: name for name, named in list(self.by_name.items())}

    def digest_and_start(self, name: str, tokens: "array[int]") -> tuple[bytes, int]:
        """Return the digest of a prompt's adapter, and the first token that it computes.

        An activated adapter computes from the last occurrence of its invocation on, as in
        ``peft``; without one it computes nothing, and the digest is empty.
        """
        adapter = self.of(name)
        if not adapter.invocation:
            return adapter.digest, 0
        start = _last_occurrence(tokens, array("I", adapter.invocation))
        return (b"", len(tokens)) if start is None else (adapter.digest, start)

    def on_admit(self, table: BlockTable, context: RequestContext) -> None:
        """Publish nothing of a request that waited while its adapter was unloaded."""
        self._stop_writing(table)

    def on_fork(self, parent: BlockTable, child: BlockTable) -> None:
        """Treat a fork as its parent."""
        self._stop_writing(child)

    def _stop_writing(self, table: BlockTable) -> None:
        if table.key.identity.adapter in self.ending:
            table.writes = False

    def _check(self, request: LoRARequest) -> None:
        """Refuse what is not enabled, is one too many, or has another one's number."""
        config = self._config
        if not config.enable_lora:
            raise RequestError(
                f"adapter {request.lora_name!r:.200}: enable_lora is off; start with "
                "enable_lora=True (--enable-lora)"
            )
        others = [it for name, it in self.by_name.items() if name != request.lora_name]
        if len(others) >= config.max_loras:
            raise RequestError(
                f"adapter {request.lora_name!r:.200} would be number {len(others) + 1}, above "
                f"max_loras={config.max_loras}: unload one, or raise max_loras"
            )
        for other in others:
            if other.request.lora_int_id == request.lora_int_id:
                raise RequestError(
                    f"lora_int_id={request.lora_int_id} is that of {other.request.lora_name!r}: "
                    "give each adapter a number of its own"
                )


def _status(request: LoRARequest) -> tuple[tuple[int, ...], ...]:
    """Return what the file system says of an adapter's files."""
    files = []
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        path = Path(request.lora_path) / name
        try:
            status = path.stat()
        except (OSError, ValueError) as error:
            raise _unreadable(request, path, error) from None
        if not S_ISREG(status.st_mode):  # reading a pipe could block forever
            raise RequestError(f"adapter {request.lora_name!r:.200}: {path} is no file")
        files.append((status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return tuple(files)


def _digest(request: LoRARequest) -> bytes:
    contents = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        path = Path(request.lora_path) / name
        try:
            with path.open("rb") as file:
                contents.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise _unreadable(request, path, error) from None
    return contents.digest()


def _unreadable(request: LoRARequest, path: Path, error: Exception) -> RequestError:
    return RequestError(f"adapter {request.lora_name!r:.200}: {path} cannot be read: {error}")


def _last_occurrence(tokens: "array[int]", run: "array[int]") -> int | None:
    """Return where a run of tokens begins for the last time; None if it does not occur."""
    packed, pattern = tokens.tobytes(), run.tobytes()
    place = packed.rfind(pattern)
    while place % 4 and place >= 0:
        place = packed.rfind(pattern, 0, place + len(pattern) - 1)
    return place // 4 if place >= 0 else None
