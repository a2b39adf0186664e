"""Where boundary activations wait for the backward pass: on the device, the host, or a disk.

The inputs of a block leave by the D2H lane while the next block computes, and come back by the H2D
lane while backward works on the block behind it. What the next block receives too (the timestep's
embedding, rotary tables) is shared by all blocks and stays, as it would leave once per block and
free nothing; so do the inputs of the last block, which backward needs first.

Autograd holds the handles (`_Kept`) through its own hooks for saved tensors, so that they live
exactly as long as the tensors they stand for would.
"""

import os
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from megaslide.errors import InputError
from megaslide.streaming.calls import BlockCall
from megaslide.streaming.lanes import Event
from megaslide.streaming.memory import host_memory
from megaslide.streaming.transfer import Land, Transfer

Tensor = torch.Tensor
PLACES = ("device", "host", "disk")
PAGE = 4096  # bytes; what disks and their caches read and write


class Place(Protocol):
    """Room for activations away from the device.

    Records are used again as soon as nobody needs their contents; the lanes keep the order.
    """

    def claim(self, nbytes: int) -> "Record":
        """Room that nothing else uses until it is given back."""
        ...

    def give_back(self, record: "Record") -> None: ...


class Record(Protocol):
    """Room for one tensor."""

    target: Tensor
    """What a D2H copy is told to write; empty where `write` knows better."""

    def write(self, arrived: Tensor) -> None:
        """Keep what a copy brought, unless it is in `target`."""
        ...

    def read(self) -> Tensor: ...


class Activations:
    """Keeps the inputs of blocks from forward to backward.

    Args:
        where: one of `PLACES`.
        folder: for "disk": the folder of the file; None takes the system's temporary one.

    Raises:
        ValueError: an unknown place.
    """

    def __init__(self, transfer: Transfer, where: str, folder: Path | None = None) -> None:
        if where not in PLACES:
            raise ValueError(f"activations={where!r}; accepted: {', '.join(PLACES)}")
        self._transfer = transfer
        self._place: Place | None = None
        if where != "device":
            self._place = _HostPlace(transfer) if where == "host" else _DiskPlace(folder)
        self._leaving: list[tuple[weakref.ref[_Kept], Tensor, Event]] = []
        """Device memory that a copy may still be reading, and the event after which it is free."""

    def keeping(self, call: BlockCall) -> AbstractContextManager[Any]:
        """Within, the tensors that autograd saves are the call's boundary activations."""
        if self._place is None:
            return nullcontext()

        def pack(tensor: Tensor) -> "Tensor | _Kept":
            if isinstance(tensor, torch.nn.Parameter) or not _is_dense(tensor):
                return tensor.detach()
            kept = _Kept(tensor)
            call.kept.append(weakref.ref(kept))
            return kept

        return saved_tensors_hooks(pack, self._unpack)

    def leave_before(self, call: BlockCall, inputs: Sequence[Tensor]) -> None:
        """Send the previous call's inputs away, except those that this call receives too."""
        if self._place is None or call.previous is None:
            return
        leaving, self._leaving = self._leaving, []
        for reference, _, left in leaving:  # one block's inputs at a time: bounded memory
            self._transfer.wait(left, "activation left")
            if (kept := reference()) is not None:
                kept.tensor = None
        shared = {t.untyped_storage().data_ptr() for t in inputs}
        for kept in _alive(call.previous):
            tensor = kept.tensor
            if tensor is not None and tensor.untyped_storage().data_ptr() not in shared:
                self._leave(kept, tensor)

    def return_for(self, call: BlockCall) -> None:
        """Start bringing back the call's inputs, and those of the call before it."""
        for needed in (call, call.previous):
            for kept in () if needed is None else _alive(needed):
                self._fetch(kept)

    def _leave(self, kept: "_Kept", tensor: Tensor) -> None:
        assert self._place is not None
        kept.check_unmodified(tensor)
        flat = _flat(tensor)
        record = self._place.claim(flat.nbytes)
        after = {"activation computed": self._transfer.record()}
        kept.hold(self._place, record)
        kept.left = self._transfer.d2h(
            record.target, flat, after, "activation", land=_checked(record, kept.version, tensor)
        )
        self._leaving.append((weakref.ref(kept), tensor, kept.left))

    def _fetch(self, kept: "_Kept") -> None:
        if kept.record is None or kept.tensor is not None or kept.fetched is not None:
            return
        device = self._transfer.device
        flat = torch.empty(kept.nbytes, dtype=torch.uint8, device=device)
        # It is away only since compute waited for it to be, so this waits for that too.
        after = {"activation memory free": self._transfer.record()}
        kept.fetched = flat, self._transfer.h2d(flat, kept.record.read, after, "activation")

    def _unpack(self, kept: "Tensor | _Kept") -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if kept.tensor is not None:
            kept.check_unmodified(kept.tensor)
            self._transfer.wait(kept.left, "activation left")  # its memory is free after backward
            self._leaving = [entry for entry in self._leaving if entry[0]() is not kept]
            return kept.tensor
        self._fetch(kept)
        assert kept.fetched is not None
        (flat, event), kept.fetched = kept.fetched, None
        self._transfer.wait(event, "activation returned")
        return kept.shaped(flat)


class _Kept:
    """One boundary activation: on the device, away, or on its way back."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()
        """The device copy, until it has left."""
        self.version = tensor._version
        self.nbytes = tensor.nbytes
        self.left = Event.completed()
        self.record: Record | None = None
        self.fetched: tuple[Tensor, Event] | None = None
        """Bytes on their way back and the event of their arrival."""
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()

    def check_unmodified(self, tensor: Tensor) -> None:
        _require_version(tensor, self.version)

    def hold(self, place: Place, record: Record) -> None:
        """Use the record until this handle is gone."""
        self.record = record
        weakref.finalize(self, place.give_back, record).atexit = False

    def shaped(self, flat: Tensor) -> Tensor:
        return torch.as_strided(flat.view(self._dtype), self._shape, self._stride)


class _HostRecord:
    def __init__(self, region: Tensor) -> None:
        self.target = region

    def write(self, arrived: Tensor) -> None: ...

    def read(self) -> Tensor:
        return self.target


class _HostPlace:
    """Host buffers by size, used again from step to step."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._unused: defaultdict[int, list[Record]] = defaultdict(list)

    def claim(self, nbytes: int) -> Record:
        unused = self._unused[nbytes]
        return unused.pop() if unused else _HostRecord(self._transfer.host(nbytes))

    def give_back(self, record: Record) -> None:
        self._unused[record.target.nbytes].append(record)


class _DiskRecord:
    def __init__(self, file: int, where: str, offset: int, nbytes: int) -> None:
        self.target = torch.empty(0, dtype=torch.uint8)
        self.offset, self.nbytes = offset, nbytes
        self._file, self._where = file, where

    def write(self, arrived: Tensor) -> None:
        with self._named("writing"):
            data, done = arrived.numpy().data, 0
            while done < self.nbytes:
                done += os.pwrite(self._file, data[done:], self.offset + done)

    def read(self) -> Tensor:
        region = host_memory(self.nbytes)
        with self._named("reading"):
            data, done = region.numpy().data, 0
            while done < self.nbytes:
                count = os.preadv(self._file, [data[done:]], self.offset + done)
                if count == 0:
                    raise OSError("the file ends early")
                done += count
        return region

    @contextmanager
    def _named(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RuntimeError(f"{action} activations in {self._where}: {error}") from error


class _DiskPlace:
    """Records of one file that has no name, so that nothing is left behind however a run ends."""

    def __init__(self, folder: Path | None) -> None:
        self._where = str(folder or tempfile.gettempdir())
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise InputError(
                f"{self._where}: {error.strerror}",
                "set offload.activation_dir to a folder on a local disk",
            ) from error
        weakref.finalize(self, self._file.close)
        self._end = 0
        self._unused: defaultdict[int, list[Record]] = defaultdict(list)

    def claim(self, nbytes: int) -> Record:
        if self._unused[nbytes]:
            return self._unused[nbytes].pop()
        record = _DiskRecord(self._file.fileno(), self._where, self._end, nbytes)
        self._end += -(-nbytes // PAGE) * PAGE
        return record

    def give_back(self, record: Record) -> None:
        assert isinstance(record, _DiskRecord)
        self._unused[record.nbytes].append(record)


def _alive(call: BlockCall) -> list[_Kept]:
    return [kept for reference in call.kept if (kept := reference()) is not None]


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements are all of its storage, in some order of its dimensions."""
    if not 0 < tensor.nbytes == tensor.untyped_storage().nbytes():
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _flat(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor in the order of its storage, uint8 `[nbytes]`."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8)


def _checked(record: Record, version: int, tensor: Tensor) -> Land:
    def land(arrived: Tensor) -> None:
        record.write(arrived)
        _require_version(tensor, version)

    return land


def _require_version(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            f"an input of a block, {tuple(tensor.shape)}, was modified in place after the block "
            f"(version {tensor._version}, expected {version}); its gradient would be wrong"
        )
