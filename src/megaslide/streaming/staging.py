"""RAM through which the disk tier's state passes, with read-ahead and write-behind in threads.

Three kinds of buffers, all of fixed size and allocated once:

- weights: one region each, filled ahead of the H2D copies that will want them;
- pieces: AdamW's view of a part of a unit, one being read, one updated, one written;
- gradients: where a D2H copy lands before it is written (only if gradients are kept on disk).

A read always waits for the writes of the same unit that were handed over before it, so a unit whose
update is done can be read whether or not its bytes have reached the disk.
"""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import torch

from megaslide.streaming.disk import RecordFile
from megaslide.streaming.lanes import Event, Lanes
from megaslide.streaming.layout import PAGE, round_up
from megaslide.streaming.memory import host_memory
from megaslide.streaming.records import Piece, Record

WEIGHTS_LANE, READ_LANE, WRITE_LANE = "disk_weights", "disk_read", "disk_write"
READ_AHEAD = 2
"""Weight regions read before they are asked for."""
COUNTS = {"weights": READ_AHEAD + 1, "pieces": 3, "gradients": 2}
"""Buffers: of weights one more is being copied; a piece is being read, updated or written."""

Memory = dict[str, torch.Tensor]
Pieces = Generator[tuple[Piece, Memory], None, None]
Updated = Callable[[int], Event]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A buffer and the end of what is being done to it."""

    buffer: torch.Tensor
    done: Event


class Pool:
    """Equal page-aligned buffers; `get` waits until one is free."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.members = [host_memory(nbytes) for _ in range(count)]
        self._free: SimpleQueue[_Loaded] = SimpleQueue()
        for buffer in self.members:
            self.put(buffer)

    def get(self) -> torch.Tensor:
        free = self._free.get()
        free.done.settle("buffer written")
        return free.buffer

    def put(self, buffer: torch.Tensor, after: Event | None = None) -> None:
        """Give a buffer back, free once `after` has ended, well or not."""
        self._free.put(_Loaded(buffer, after or Event.completed()))


class WeightsAhead:
    """Weight regions on their way to the device.

    Buffers read ahead serve whoever asks for their unit; what was not foreseen is read at once
    into a buffer of its own, so that a wrong guess costs time and never blocks.
    """

    def __init__(
        self, sizes: Sequence[int], names: Sequence[str], read: Callable[[int, torch.Tensor], None],
        lanes: Lanes,
    ) -> None:  # fmt: skip
        self._sizes, self._names, self._read, self._trace = sizes, names, read, lanes.trace
        self._free = [host_memory(max(sizes)) for _ in range(READ_AHEAD)]
        self._unforeseen = host_memory(max(sizes))
        self.buffers = [*self._free, self._unforeseen]
        self._staged: dict[int, _Loaded] = {}
        self._in_use: torch.Tensor | None = None
        self._lock = threading.Lock()
        self._lane = lanes.open(WEIGHTS_LANE)

    def want(self, units: Sequence[int], updated: Updated) -> None:
        """Begin to read the next units, soonest first, as far as there are buffers.

        What was read for an earlier guess stays: either a copy that is under way will take it, or
        the next pass.
        """
        with self._lock:
            for unit in list(units)[:READ_AHEAD]:
                if unit not in self._staged and self._free:
                    self._staged[unit] = self._begin(unit, self._free.pop(), updated(unit))

    def take(self, unit: int) -> torch.Tensor:
        """The unit's region; the one given out before is free again."""
        with self._lock:
            if self._in_use is not None and self._in_use is not self._unforeseen:
                self._free.append(self._in_use)
            staged = self._staged.pop(unit, None)
            self._in_use = self._unforeseen if staged is None else staged.buffer
        region = self._in_use[: self._sizes[unit]]
        if staged is not None:
            staged.done.wait("weights read ahead")
        else:
            with self._trace.span(WEIGHTS_LANE, self._names[unit], region.nbytes):
                self._read(unit, region)
        return region

    def forget(self, unit: int) -> None:
        """What was read ahead of this unit will not be given out."""
        with self._lock:
            if unit in self._staged:
                # At once, even in mid-read: the next read into the buffer is behind it on the lane.
                self._free.append(self._staged.pop(unit).buffer)

    def close(self) -> None:
        self._lane.close()

    def _begin(self, unit: int, buffer: torch.Tensor, updated: Event) -> _Loaded:
        region = buffer[: self._sizes[unit]]
        done = self._lane.submit(
            lambda: self._read(unit, region), self._names[unit],
            after={"unit updated": updated}, nbytes=region.nbytes,
        )  # fmt: skip
        return _Loaded(buffer, done)


class DiskRecords:
    """All units' regions of the given kinds in one file, and every way in and out of it."""

    def __init__(self, file: RecordFile, records: Sequence[Record], kinds: frozenset[str],
                 lanes: Lanes) -> None:  # fmt: skip
        self._file, self._records, self._kinds = file, records, kinds
        self._starts = _starts(records, kinds)
        self._writes: list[list[Event]] = [[] for _ in records]
        """Per unit: writes handed over and perhaps still under way."""
        self._read_lane, self._write_lane = lanes.open(READ_LANE), lanes.open(WRITE_LANE)
        self._ahead = WeightsAhead(
            _sizes(records, "weights"), [r.layout.name for r in records],
            lambda unit, target: self.read(unit, "weights", target), lanes,
        )  # fmt: skip
        sizes = staging_sizes(records, kinds)
        self._pieces = Pool(COUNTS["pieces"], sizes["pieces"])
        self._gradients = Pool(COUNTS["gradients"], sizes["gradients"])
        self._next: dict[tuple[int, int], _Loaded] = {}

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes on the disk by kind."""
        return {kind: sum(_sizes(self._records, kind)) for kind in self._kinds}

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Every staging buffer, uint8."""
        return [*self._ahead.buffers, *self._pieces.members, *self._gradients.members]

    # Whole regions ----------------------------------------------------------------------------

    def read(self, unit: int, kind: str, target: torch.Tensor) -> None:
        """Fill page-aligned `target` with a region once its writes are done."""
        self.settle(unit)
        if target.nbytes:  # a unit without parameters has no regions
            self._file.read(target, self._offset(unit, kind))

    def write(self, unit: int, kind: str, source: torch.Tensor) -> None:
        """Write a region from page-aligned memory, before returning."""
        self._forget_pieces()
        self._ahead.forget(unit)
        self.settle(unit)
        self._file.write(source, self._offset(unit, kind))

    def settle(self, unit: int) -> None:
        """Wait until the unit's bytes are on the disk; RuntimeError if a write failed."""
        for event in list(self._writes[unit]):
            event.wait("unit written")

    def finish(self) -> None:
        """Wait until everything is written."""
        for unit in range(len(self._records)):
            self.settle(unit)

    def close(self) -> None:
        self._ahead.close()
        self._read_lane.close()
        self._write_lane.close()
        self._file.close()

    # Weights, for H2D -------------------------------------------------------------------------

    def weights(self, unit: int) -> torch.Tensor:
        """The unit's weight region, page-rounded; valid until the next call."""
        return self._ahead.take(unit)

    def read_ahead(self, units: Sequence[int], updated: Updated) -> None:
        self._ahead.want(units, updated)

    def forget(self, unit: int) -> None:
        """The unit's weights are about to change: what was read ahead is void."""
        self._ahead.forget(unit)

    # Pieces, for AdamW ------------------------------------------------------------------------

    def pieces(self, unit: int, following: int | None) -> Pieces:
        """Each piece of the unit, read, to be changed in place; written behind.

        The memory is valid until the iterator advances. The first piece of `following` is read
        while the last one of this unit is in use.
        """
        pieces = self._records[unit].pieces()
        for number, piece in enumerate(pieces):
            loaded = self._next.pop((unit, number), None) or self._load_piece(unit, piece)
            try:
                if number + 1 < len(pieces):
                    self._next[unit, number + 1] = self._load_piece(unit, pieces[number + 1])
                elif following is not None and (first := self._records[following].pieces()):
                    self._next[following, 0] = self._load_piece(following, first[0])
                loaded.done.wait("piece read")
                yield piece, self._views(unit, piece, loaded.buffer)
            except BaseException:
                self._pieces.put(loaded.buffer)
                self._forget_pieces()
                raise
            self._store_piece(unit, piece, loaded.buffer)

    def _forget_pieces(self) -> None:
        """Give up pieces that were read for an update that did not come."""
        for loaded in self._next.values():
            self._pieces.put(loaded.buffer, loaded.done)
        self._next.clear()

    def _load_piece(self, unit: int, piece: Piece) -> _Loaded:
        buffer = self._pieces.get()
        spans = self._spans(unit, piece)

        def read() -> None:
            self.settle(unit)
            for _, at, offset, nbytes in spans:
                self._file.read(buffer[at : at + nbytes], offset)

        name, total = self._records[unit].layout.name, sum(span[3] for span in spans)
        return _Loaded(buffer, self._read_lane.submit(read, name, nbytes=total))

    def _store_piece(self, unit: int, piece: Piece, buffer: torch.Tensor) -> None:
        spans = [span for span in self._spans(unit, piece) if span[0] != "gradients"]

        def write() -> None:
            for _, at, offset, nbytes in spans:
                self._file.write(buffer[at : at + nbytes], offset)

        nbytes, name = sum(span[3] for span in spans), self._records[unit].layout.name
        self._pieces.put(buffer, self._write_behind(unit, write, name, nbytes))

    def _spans(self, unit: int, piece: Piece) -> list[tuple[str, int, int, int]]:
        """(kind, place in a piece buffer, place in the file, bytes) of a piece's pages."""
        spans = _piece_spans(self._records[unit], self._kinds, piece)
        return [(k, at, self._offset(unit, k) + start, n) for k, at, start, n in spans]

    def _views(self, unit: int, piece: Piece, buffer: torch.Tensor) -> Memory:
        views: Memory = {}
        for kind, at, _, _ in self._spans(unit, piece):
            region = self._records[unit].regions[kind]
            span = region.span(piece.segment, piece.start, piece.stop)
            part = region.parts[piece.segment]
            assert span is not None
            assert part is not None
            views[kind] = buffer[at:][: span[1] - span[0]].view(part.dtype)
        return views

    # Gradients --------------------------------------------------------------------------------

    @contextmanager
    def landing(self, unit: int, *, keep: bool) -> Iterator[torch.Tensor]:
        """A buffer for the unit's gradients, written behind; with `keep` it holds them already."""
        nbytes = self._records[unit].regions["gradients"].nbytes
        buffer = self._gradients.get()
        try:
            if keep:
                self.read(unit, "gradients", buffer[:nbytes])
            yield buffer[:nbytes]
        except BaseException:
            self._gradients.put(buffer)
            raise
        offset = self._offset(unit, "gradients")
        write = partial(self._file.write, buffer[:nbytes], offset)
        name = f"gradients {self._records[unit].layout.name}"
        self._gradients.put(buffer, self._write_behind(unit, write, name, nbytes))

    def _write_behind(self, unit: int, write: Callable[[], None], name: str, nbytes: int) -> Event:
        # Writes that have failed stay in the list: whoever reads the unit must hear of it.
        pending = [e for e in self._writes[unit] if not _succeeded(e)]
        event = self._write_lane.submit(write, name, nbytes=nbytes)
        self._writes[unit] = [*pending, event]
        return event

    # Places -----------------------------------------------------------------------------------

    def _offset(self, unit: int, kind: str) -> int:
        return self._starts[unit][kind]


def staging_sizes(records: Sequence[Record], kinds: frozenset[str]) -> dict[str, int]:
    """Bytes of one staging buffer of each sort when `kinds` are on disk; `COUNTS` says how many."""
    return {
        "weights": max(_sizes(records, "weights")),
        "pieces": max((_piece_bytes(r, kinds, p) for r in records for p in r.pieces()), default=0),
        "gradients": max(_sizes(records, "gradients")) if "gradients" in kinds else 0,
    }


def _piece_spans(
    record: Record, kinds: frozenset[str], piece: Piece
) -> list[tuple[str, int, int, int]]:
    """(kind, place in a piece buffer, place in the kind's region, bytes) of a piece's pages."""
    spans, at = [], 0
    for kind, region in record.regions.items():
        span = region.span(piece.segment, piece.start, piece.stop)
        if kind in kinds and span is not None:
            nbytes = round_up(span[1] - span[0], PAGE)
            spans.append((kind, at, span[0], nbytes))
            at += nbytes
    return spans


def _piece_bytes(record: Record, kinds: frozenset[str], piece: Piece) -> int:
    return sum(nbytes for *_, nbytes in _piece_spans(record, kinds, piece))


def _succeeded(event: Event) -> bool:
    if not event.done():
        return False
    try:
        event.wait("whether it failed")
    except RuntimeError:
        return False
    return True


def _sizes(records: Sequence[Record], kind: str) -> list[int]:
    regions = [record.regions.get(kind) for record in records]
    return [region.nbytes if region is not None else 0 for region in regions]


def _starts(records: Sequence[Record], kinds: frozenset[str]) -> list[dict[str, int]]:
    """Per unit, where each region begins in the file: one record after the other."""
    starts: list[dict[str, int]] = []
    at = 0
    for record in records:
        starts.append({})
        for kind, region in record.regions.items():
            if kind in kinds:
                starts[-1][kind] = at
                at += region.nbytes
    return starts
