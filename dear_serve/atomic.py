"""Replace a whole folder at once: a killed process leaves the old folder or the new one, never a mixture.

How a folder NAME is replaced, and what a kill leaves behind at each step:

1. the new content is written to the sibling `.NAME.tmp-<pid>-<random>` and synced   NAME is the old folder
2. the old folder is renamed to `.NAME.old-<pid>-<random>`                           NAME is missing
3. the new folder is renamed to NAME, the parent is synced                           NAME is the new folder
4. `.NAME.old-*` is deleted                                                          NAME is the new folder

`recover_folder` mends the state after step 2 by renaming the old folder back; readers call it. What else
a kill leaves (`.NAME.tmp-*`, `.NAME.old-*`) harms nobody and is deleted by the next writer. Steps 2 and
3, and the mending, hold an advisory lock on the parent folder, and a writer holds one on its temporary
folder: so neither a reader nor another writer takes a living writer's folders for a dead one's. Windows
has no such locks; there, one writer at a time is the caller's business.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

if sys.platform != "win32":
    import fcntl

__all__ = ["FolderWriter", "recover_folder"]

# Between creating its folder and locking it a writer looks dead: folders younger than this many seconds stay.
_GRACE = 60.0


def _lock(folder: Path, *, wait: bool) -> int | None:
    """Descriptor holding an exclusive lock on `folder`; None when somebody else has it and not `wait`."""
    if sys.platform == "win32":
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


@contextmanager
def _parent_locked(folder: Path) -> Iterator[None]:
    descriptor = _lock(folder.parent, wait=True)
    try:
        yield
    finally:
        _unlock(descriptor)


def _siblings(folder: Path, kind: str) -> list[Path]:
    """The `.NAME.kind-*` folders beside `folder`, newest last."""
    prefix = f".{folder.name}.{kind}-"
    if not folder.parent.is_dir():
        return []
    return sorted((p for p in folder.parent.iterdir() if p.name.startswith(prefix)), key=_modified)


def _modified(path: Path) -> float:
    """Modification time in seconds; that of a folder which its owner has just deleted is now."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()


def recover_folder(folder: Path) -> bool:
    """Put the old folder back if a writer was killed between steps 2 and 3.

    Returns True when something was mended. Raises OSError when the parent folder cannot be written.
    """
    if folder.exists() or not _siblings(folder, "old"):
        return False
    with _parent_locked(folder):
        old = _siblings(folder, "old")
        if folder.exists() or not old:
            return False
        old[-1].rename(folder)
        return True


def _remove_leftovers(folder: Path) -> None:
    """Delete what killed writers left beside a folder that exists."""
    for path in _siblings(folder, "old"):
        shutil.rmtree(path, ignore_errors=True)
    for path in _siblings(folder, "tmp"):
        if time.time() - _modified(path) < _GRACE:
            continue
        try:
            descriptor = _lock(path, wait=False)
        except FileNotFoundError:
            continue
        if descriptor is not None:
            shutil.rmtree(path, ignore_errors=True)
            _unlock(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            _sync(Path(root) / name)
        _sync(Path(root))


class FolderWriter:
    """Context manager: fill `self.temporary`, then call `commit`; without it the temporary folder is deleted.

    Args:
        folder: what to create or replace; its parent is created if need be.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.temporary = self._sibling("tmp")
        self._descriptor: int | None = None
        self._committed = False

    def _sibling(self, kind: str) -> Path:
        return self.folder.with_name(f".{self.folder.name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}")

    def __enter__(self) -> FolderWriter:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        recover_folder(self.folder)
        # Not tempfile.mkdtemp: its mode 0700 would lock out a server that runs as another user.
        self.temporary.mkdir()
        self._descriptor = _lock(self.temporary, wait=False)
        return self

    def commit(self) -> None:
        """Sync everything, then put the temporary folder in the place of the old one."""
        _sync_tree(self.temporary)
        with _parent_locked(self.folder):
            aside = self._sibling("old")
            if self.folder.exists():
                self.folder.rename(aside)
            self.temporary.rename(self.folder)
            _sync(self.folder.parent)
            self._committed = True
            _remove_leftovers(self.folder)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._committed:
            shutil.rmtree(self.temporary, ignore_errors=True)
        _unlock(self._descriptor)
        self._descriptor = None
