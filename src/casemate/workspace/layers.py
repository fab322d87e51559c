"""The layers of sessions: frozen tops that several sessions may share, one live top for each, and records.

::

    DIRECTORY/NAME.json         a session: its frozen layers, oldest first, and its live one
    DIRECTORY/layers/ID/up0…    the top of the first view of that layer, and so on
    DIRECTORY/layers/ID/home    HOME
    DIRECTORY/trash/            what nobody refers to any more

The record is the session: whatever it does not name is garbage, and what it names is there before it is
written. It is written new, synced and renamed, so a crash at any point leaves the old state or the new one.
Snapshot, branch and roll-back write records and make an empty directory, however large the tree is.

What is kept here has been written by hostile commands. Nothing in it is followed, and the store is closed to
everybody else.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager, suppress

import msgspec

from casemate.errors import WorkspaceError
from casemate.sys.trees import make_directory, remove_tree
from casemate.workspace import survey
from casemate.workspace.names import printable
from casemate.workspace.records import HOME, START, VERSION, Layer, Record, check_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

__all__ = ["MOST_LAYERS", "Store"]

#: More than these make each lookup slow, and kernels refuse some hundreds.
MOST_LAYERS = 32
_MOST_SPENT = 8  # of which nothing but HOME is left
_RECORD, _TRASH = ".json", "trash"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


class Store:
    """The sessions of one workspace. ``rootless`` says whose attributes the overlays use.

    Methods that take a record want its session's lock to be held by the caller; they return the new record.
    They raise WorkspaceError (``session-…``) and OSError, and change nothing then.
    """

    def __init__(self, directory: str, *, rootless: bool) -> None:
        self.directory = directory
        self.layers = f"{directory}/layers"
        self.prefix = "user.overlay." if rootless else "trusted.overlay."
        self.redirects = not rootless

    @contextmanager
    def _locked(self) -> Generator[int, None, None]:
        """The store's own lock, for a moment; gives its directory. The kernel drops it with its holder."""
        handle = self._lock()
        try:
            os.fchmod(handle, 0o700)
            yield handle
        finally:
            os.close(handle)

    def _lock(self) -> int:
        while True:
            make_directory(self.layers)
            # Whoever discards the last session removes the directory, perhaps just now.
            try:
                handle = os.open(self.directory, _FLAGS)
            except FileNotFoundError:
                continue
            fcntl.flock(handle, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.isdir(self.layers) and os.path.samestat(os.fstat(handle), os.stat(self.directory)):
                    return handle
            os.close(handle)

    # -- records -------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The sessions that there are."""
        try:
            found = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        records = [name for name in found if name.endswith(_RECORD) and not name.startswith(".")]
        return sorted(name.removesuffix(_RECORD) for name in records)

    def load(self, name: str) -> Record | None:
        """A session's record; None if there is none. Raises WorkspaceError (``session-broken``)."""
        try:
            with open(f"{self.directory}/{check_name(name)}{_RECORD}", "rb") as file:
                record = msgspec.json.decode(file.read(), type=Record)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise WorkspaceError(
                f"the record of the session {name} cannot be read: {error}",
                code="session-broken",
                hint=f"casemate session discard {name}",
            ) from error
        if record.version != VERSION:
            raise WorkspaceError(
                f"the session {name} is of another version of Casemate", code="session-broken",
                hint=f"use that version, or casemate session discard {name}",
            )  # fmt: skip
        return record

    def create(self, name: str, workspace: str, now_ns: int) -> Record:
        """A new session. Raises WorkspaceError (``session-exists``)."""
        with self._locked() as handle:
            self._refuse_existing(name)
            record = Record(
                version=VERSION, name=name, workspace=workspace, live=self._new_layer(), started_ns=now_ns,
                made_ns=now_ns, layers=(Layer(id=START, made_ns=now_ns),),
            )  # fmt: skip
            self._write(handle, record)
        return record

    def save(self, record: Record) -> None:
        """Write a record that has other facts now, but no other layers."""
        with self._locked() as handle:
            self._write(handle, record)

    def _refuse_existing(self, name: str) -> None:
        if os.path.lexists(f"{self.directory}/{check_name(name)}{_RECORD}"):
            raise WorkspaceError(
                f"there is a session {name} already", code="session-exists", hint="choose another name"
            )

    def _write(self, directory: int, record: Record) -> None:
        new = f".{record.name}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(new, flags, 0o600, dir_fd=directory)
        try:
            data = memoryview(msgspec.json.encode(record))
            while data:
                data = data[os.write(handle, data) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        os.rename(new, f"{record.name}{_RECORD}", src_dir_fd=directory, dst_dir_fd=directory)
        os.fsync(directory)

    def _new_layer(self) -> str:
        """An empty layer. ``Preconditions:`` the store is locked until a record names it."""
        name = os.urandom(5).hex()
        os.mkdir(f"{self.layers}/{name}", 0o700)
        return name

    # -- operations ----------------------------------------------------------------------------------

    def changed(self, record: Record) -> bool:
        """Whether the live top holds anything."""
        return self.holds(record.live, (*record.tops, HOME))

    def holds(self, directory: str, tops: Sequence[str]) -> bool:
        """Whether a layer has something in one of these tops."""
        return any(_entries(f"{self.layers}/{directory}/{top}") for top in tops)

    def snapshot(self, record: Record, now_ns: int) -> tuple[Record, str]:
        """Freeze the live top and start an empty one; returns the snapshot's name.

        Raises WorkspaceError (``too-many-layers``).
        """
        self.refuse_applying(record)
        name = os.urandom(4).hex()
        with self._locked() as handle:
            if not self.changed(record):
                layer = Layer(id=name, made_ns=now_ns)
                record = msgspec.structs.replace(record, layers=(*record.layers, layer))
            else:
                self._refuse_many(record)
                record = self._freeze(record, name, now_ns)
            self._write(handle, record)
        return record, name

    def _freeze(self, record: Record, name: str, now_ns: int) -> Record:
        layer = Layer(id=name, directory=record.live, made_ns=now_ns)
        return msgspec.structs.replace(record, layers=(*record.layers, layer), live=self._new_layer())

    def _refuse_many(self, record: Record) -> None:
        count = len(record.directories()) - 1
        if count >= MOST_LAYERS:
            raise WorkspaceError(
                f"the session {record.name} has {count} layers, and each makes it slower",
                code="too-many-layers",
                hint=f"casemate session flatten {record.name}",
                layers=count,
            )

    def refuse_applying(self, record: Record) -> None:
        """Raise WorkspaceError (``session-applying``) where an apply step has begun and not ended."""
        if record.applying:
            import shlex

            words = [word for glob in record.globs for word in ("--only", glob)]
            words += ["--", *record.paths] if record.paths else []
            part = "".join(f" {shlex.quote(word)}" for word in words)
            raise WorkspaceError(
                f"an apply step of the session {record.name} did not end",
                code="session-applying",
                hint=f"casemate apply --session {record.name}{part} goes on with it",
            )

    def branch(self, record: Record, name: str, now_ns: int, at: str = "") -> tuple[Record, Record]:
        """A new session with the same layers; ``at`` a snapshot, or as it is now. Returns both records."""
        self.refuse_applying(record)
        self._refuse_existing(name)
        if not at and self.changed(record):
            record, _ = self.snapshot(record, now_ns)
        layers = record.layers if not at else record.layers[: self._index(record, at) + 1]
        with self._locked() as handle:
            self._refuse_existing(name)
            twin = self._cut(record, layers, now_ns)
            twin = msgspec.structs.replace(twin, name=name, made_ns=now_ns)
            self._write(handle, twin)
        return record, twin

    def roll_back(self, record: Record, snapshot: str, now_ns: int) -> Record:
        """Drop the live top and all layers above a snapshot. Raises WorkspaceError (``no-snapshot``)."""
        self.refuse_applying(record)
        layers = record.layers[: self._index(record, snapshot) + 1]
        with self._locked() as handle:
            record = self._cut(record, layers, now_ns)
            self._write(handle, record)
        return record

    def _cut(self, record: Record, layers: Sequence[Layer], now_ns: int) -> Record:
        """A record with the first of its layers only, and an empty live one. The store is locked."""
        # Where nothing of the views is left, it is as new: all that the host has by now is below.
        bare = not any(layer.directory and not layer.spent for layer in layers)
        return msgspec.structs.replace(
            record, layers=tuple(layers), live=self._new_layer(),
            started_ns=now_ns if bare else record.started_ns, resumed=record.resumed and not bare,
        )  # fmt: skip

    def _index(self, record: Record, snapshot: str) -> int:
        for number, layer in enumerate(record.layers):
            if layer.id == snapshot and not layer.spent:
                return number
        raise WorkspaceError(
            f"the session {record.name} has no snapshot {snapshot}",
            code="no-snapshot",
            hint=f"casemate session list shows them: {', '.join(item.id for item in record.snapshots)}",
        )

    def flatten(self, record: Record, snapshot: str = "") -> Record:
        """Merge the layers up to a snapshot (the newest) into one; the snapshots before it are gone, but for
        the first. What has been applied is merged by itself: only HOME is left of it.
        """
        self.refuse_applying(record)
        upto = self._index(record, snapshot or record.layers[-1].id) + 1
        spent = [layer for layer in record.layers if layer.spent]
        first = record.layers[len(spent)]
        merged, above = record.layers[len(spent) + 1 : upto], record.layers[upto:]
        with self._as_one(record, spent) as below, self._as_one(record, merged) as middle:
            record = msgspec.structs.replace(record, layers=(*below, first, *middle, *above))
            self.save(record)
        return record

    @contextmanager
    def _as_one(self, record: Record, layers: Sequence[Layer]) -> Generator[Sequence[Layer], None, None]:
        """One layer in the place of several; their last snapshot is its."""
        full = [layer for layer in layers if layer.directory]
        if len(full) > 1:
            names = [layer.directory for layer in full if not layer.spent]
            with self.merging(record, names, [layer.directory for layer in full]) as name:
                yield [msgspec.structs.replace(layers[-1], directory=name)]
        else:
            yield [msgspec.structs.replace(layers[-1], directory=full[0].directory)] if full else layers[-1:]

    @contextmanager
    def merging(
        self, record: Record, views: Sequence[str], homes: Sequence[str]
    ) -> Generator[str, None, None]:
        """A new layer that is what others (oldest first) are together, of the views and of HOME: its name.

        Nobody removes it within the block; afterwards it is garbage unless a record names it.
        """
        with self._locked():
            name = self._new_layer()
            handle = os.open(f"{self.layers}/{name}", _FLAGS)
            fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            for top in record.tops:
                self._merge(name, views, top)
            self._merge(name, homes, HOME)
            self.write_firsts(name, self.firsts(record, views))
            yield name
        finally:
            os.close(handle)

    def _merge(self, target: str, layers: Sequence[str], top: str) -> None:
        from casemate.workspace.flatten import flatten  # a command has no use for it

        opened: list[int] = []
        try:
            for layer in reversed(layers):
                with suppress(FileNotFoundError):
                    opened.append(os.open(f"{self.layers}/{layer}/{top}", _FLAGS))
            if not opened:
                return
            os.mkdir(f"{self.layers}/{target}/{top}", 0o700)
            new = os.open(f"{self.layers}/{target}/{top}", _FLAGS)
            try:
                flatten(opened, new, prefix=self.prefix, redirects=self.redirects)
            finally:
                os.close(new)
        finally:
            for handle in opened:
                os.close(handle)

    def write_firsts(self, directory: str, firsts: Sequence[survey.Firsts]) -> None:
        """Note, for a layer, since when the paths of each view are the session's own."""
        survey.write_firsts(f"{self.layers}/{directory}", firsts)

    def firsts(self, record: Record, directories: Sequence[str]) -> list[survey.Firsts]:
        """Since when the paths of each view are the session's own, by what was noted of these layers."""
        found = [survey.Firsts() for _ in record.views]
        for directory in directories:
            if not self.holds(directory, record.tops):
                continue
            noted = survey.firsts_of(f"{self.layers}/{directory}", record.tops)
            for one, other in zip(found, noted, strict=True):
                one.merge(other)
        return found

    # -- applying --------------------------------------------------------------------------------------

    def gather(self, record: Record, now_ns: int) -> Record:
        """Make all changes one frozen layer, the last one, that no other session has, to be applied. The
        snapshots before it are gone; else the session is what it was.
        """
        if record.applying:
            return record
        if self.changed(record):
            with self._locked() as handle:
                record = self._freeze(record, os.urandom(4).hex(), now_ns)
                self._write(handle, record)
        spent = [layer for layer in record.layers if layer.spent]
        pending = [layer for layer in record.layers if layer.directory and not layer.spent]
        first = record.layers[len(spent)]
        if len(pending) > 1 or any(self._is_shared(layer.directory, record.name) for layer in pending):
            names = [layer.directory for layer in pending]
            with self.merging(record, names, names) as name:
                last = msgspec.structs.replace(pending[-1], directory=name)
                record = msgspec.structs.replace(record, layers=(*spent, first, last))
                self.save(record)
        else:
            record = msgspec.structs.replace(record, layers=(*spent, first, *pending))
            self.save(record)
        return record

    def begin_apply(self, record: Record, globs: Sequence[str] = (), paths: Sequence[str] = ()) -> Record:
        """The first change to a workspace is about to be made, of what these words name or, without any, of
        all; until ``end_apply`` nothing else may be done with the session. Preconditions: ``gather``.
        """
        shown = [tuple(w if w.isprintable() else printable(w) for w in words) for words in (globs, paths)]
        record = msgspec.structs.replace(record, applying=True, globs=shown[0], paths=shown[1])
        self.save(record)
        return record

    def end_apply(self, record: Record, now_ns: int, *, complete: bool) -> Record:
        """Start anew over the changed workspace; or, where something is left in the layer, go on with it."""
        record = msgspec.structs.replace(record, globs=(), paths=())
        if not complete:
            record = msgspec.structs.replace(record, applying=False, resumed=True)
        else:
            spent = [msgspec.structs.replace(layer, spent=True) for layer in record.layers if layer.directory]
            record = msgspec.structs.replace(
                record, layers=(*spent, Layer(id=START, made_ns=now_ns)), started_ns=now_ns, applying=False,
                resumed=False,
            )  # fmt: skip
        self.save(record)
        if len(record.layers) > _MOST_SPENT and complete:
            record = self.flatten(record, START)
        return record

    def _is_shared(self, directory: str, name: str) -> bool:
        """Whether another session than ``name`` has a layer; one that cannot be read may."""
        for other in self.names():
            try:
                record = self.load(other) if other != name else None
            except WorkspaceError:
                return True
            if record is not None and directory in record.directories():
                return True
        return False

    def discard(self, name: str) -> None:
        """Remove a session; its layers are garbage where no other has them."""
        with self._locked() as handle:
            with suppress(FileNotFoundError):
                os.unlink(f"{check_name(name)}{_RECORD}", dir_fd=handle)
            os.fsync(handle)

    # -- sizes and garbage -----------------------------------------------------------------------------

    def size(self, directory: str, *, exact: bool = False) -> int:
        """Bytes of a layer, as noted; measured where nothing was, or (``exact``) not all of it."""
        path = f"{self.layers}/{directory}"
        known = survey.measured(path)
        if known is None or (exact and not known.exact):
            known = survey.measure(path, sorted(self._parts(path)))
        return known.bytes

    def _parts(self, path: str) -> list[str]:
        with suppress(FileNotFoundError):
            return [name for name in os.listdir(path) if name == HOME or name.startswith("up")]
        return []

    def collect(self) -> int:
        """Remove the layers that no session refers to, and what killed commands left; returns how many.

        Raises WorkspaceError (``session-broken``): while one record cannot be read, nothing is garbage.
        """
        if not os.path.isdir(self.directory):
            return 0
        with self._locked() as handle:
            needed: dict[str, bool] = {}  # whether more than HOME is
            for record in filter(None, map(self.load, self.names())):
                needed[record.live] = True
                for layer in record.layers:
                    needed[layer.directory] = needed.get(layer.directory, False) or not layer.spent
            for name in os.listdir(self.directory):
                if name.startswith(".") and name.endswith(".new"):
                    os.unlink(name, dir_fd=handle)
            count = 0
            for name in os.listdir(self.layers):
                if name not in needed:
                    count += self._throw_away(name)
                elif not needed[name]:
                    self._keep_home(name)
        trash = f"{self.directory}/{_TRASH}"
        for name in os.listdir(trash) if os.path.isdir(trash) else ():
            remove_tree(f"{trash}/{name}")
        self._remove_if_empty()
        return count

    def _throw_away(self, path: str) -> bool:
        """Take a layer, or a part of one, out of the store, unless somebody is just making it."""
        with suppress(FileNotFoundError):
            handle = os.open(f"{self.layers}/{path}", _FLAGS)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                make_directory(f"{self.directory}/{_TRASH}")
                os.rename(f"{self.layers}/{path}", f"{self.directory}/{_TRASH}/{os.urandom(5).hex()}")
                return True
            except BlockingIOError:
                pass
            finally:
                os.close(handle)
        return False

    def _keep_home(self, name: str) -> None:
        """Remove all but HOME of a layer whose changes were applied."""
        path = f"{self.layers}/{name}"
        for part in os.listdir(path):
            if part == HOME:
                continue
            if os.path.isdir(f"{path}/{part}"):
                self._throw_away(f"{name}/{part}")
            else:
                os.unlink(f"{path}/{part}")

    def _remove_if_empty(self) -> None:
        with self._locked() as handle:
            for name in (_TRASH, "layers"):
                with suppress(OSError):
                    os.rmdir(name, dir_fd=handle)
            with suppress(OSError):
                os.rmdir(self.directory)
                os.rmdir(os.path.dirname(self.directory))


def _entries(directory: str) -> bool:
    try:
        with os.scandir(directory) as listing:
            return next(listing, None) is not None
    except FileNotFoundError:
        return False
