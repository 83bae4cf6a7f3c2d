"""Storage (L3) of one rank: a folder of files, one a page and cache (laws H3, H5).

A file is named by the key of its page, the rank and the cache, and begins with a digest of its name and
bytes. A missing, short or altered file is a miss with a warning, and never data.
"""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

from refmodel.errors import FallbackWarning

_DIGEST_BYTES = hashlib.sha256().digest_size


class Shelf:
    """Files of one rank; :meth:`put` writes them, :meth:`close` removes all."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._directory = TemporaryDirectory(prefix=f"cpkv-storage-{rank}-")
        self.folder = Path(self._directory.name)

    def close(self) -> None:
        self._directory.cleanup()

    def path(self, key: int, cache: str) -> Path:
        """Where the file of a page lies, if there is one."""
        return self.folder / f"{key:016x}-{self.rank}-{cache}.page"

    def put(self, key: int, cache: str, data: bytes) -> None:
        """Write a file whole: whoever reads it finds the old one or the new one."""
        path = self.path(key, cache)
        part = path.with_suffix(".part")
        part.write_bytes(_digest(path, data) + data)
        part.replace(path)

    def get(self, key: int, cache: str, size: int) -> bytes | None:
        """The bytes of a page, ``size`` of them; None, with a warning, for a file that is not sound."""
        path = self.path(key, cache)
        try:
            content = path.read_bytes()
        except OSError:
            content = b""
        digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if len(data) == size and digest == _digest(path, data):
            return data
        reason = f"it has {len(data)} bytes of {size}" if len(data) != size else "its digest is another"
        warnings.warn(f"storage file {path.name} is a miss: {reason}", FallbackWarning, stacklevel=2)
        return None

    def spoil(self, key: int, cache: str, how: str) -> None:
        """Lose, truncate or corrupt a file, if this rank has it."""
        path = self.path(key, cache)
        if not path.exists():
            return
        content = path.read_bytes()
        if how == "lose":
            path.unlink()
        elif how == "truncate":
            path.write_bytes(content[: len(content) // 2])
        else:
            last = sum(content[-1:])  # 0 if nothing is left
            path.write_bytes(content[:-1] + bytes([(last + 1) % 256]))


def _digest(path: Path, data: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + data).digest()
