"""What the parts of a block's call give: its outputs, and the gradients of its inputs.

With chunks of rows there is one tensor of the whole size on either side: a chunk's output goes to
its rows of a buffer made once, and a chunk's gradient of the input likewise, which may even be the
buffer of the output's gradient, as the rows of that are used up in the same order.
"""

from collections.abc import Sequence

import torch

from megaslide.streaming.calls import BlockCall
from megaslide.streaming.chunks import Part

Tensor = torch.Tensor


class Outputs:
    """Collects a call's outputs, part by part."""

    def __init__(self, call: BlockCall, name: str) -> None:
        self._call, self._name = call, name
        self._pieces: list[list[Tensor]] = []
        self._passed: list[bool] = []
        """Per output: whether it is a shared input handed on."""
        self._rows: Tensor | None = None
        """The output of a call in chunks."""

    def add(self, part: Part, outputs: list[Tensor], inputs: Sequence[Tensor]) -> None:
        """What the block gave for a part of its inputs."""
        if part.chunk is None:
            self._passed = [_is_passed(o, inputs, self._call.split) for o in outputs]
            self._pieces.append(outputs)
            return
        (output,) = outputs
        if self._rows is None:
            shape = (self._call.batch, self._call.chunks[-1].own.stop, *output.shape[2:])
            self._rows = output.new_empty(shape)
        part.own(self._rows).copy_(output)

    def joined(self) -> tuple[Tensor, ...]:
        """Outputs of the whole batch."""
        call, pieces = self._call, self._pieces
        if self._rows is not None:
            call.out_split = [True]
            return (self._rows,)
        if len(pieces) == 1:
            call.out_split = [False] * len(pieces[0])
            return tuple(pieces[0])
        sizes = [part.batch.stop - part.batch.start for part in call.parts()]
        columns = list(zip(*pieces, strict=True))
        call.out_split = [
            not shared and all(p.dim() > 0 and len(p) == n for p, n in zip(c, sizes, strict=True))
            for c, shared in zip(columns, self._passed, strict=True)
        ]
        for number, column in enumerate(columns):
            if not (call.out_split[number] or self._passed[number]):
                _require_equal(column, number, self._name)
        return tuple(
            torch.cat(c) if split else c[0]
            for c, split in zip(columns, call.out_split, strict=True)
        )


class InputGradients:
    """Gradients of a call's inputs: written per part for batch tensors, summed for shared ones."""

    def __init__(
        self,
        call: BlockCall,
        inputs: Sequence[Tensor],
        needed: Sequence[bool],
        spare: Sequence[Tensor] = (),
    ) -> None:
        """`spare` are gradients of outputs that may be overwritten once a part has used them."""
        self._call, self._inputs, self._needed = call, inputs, needed
        self._sums: list[Tensor | None] = [None] * len(inputs)
        self._spare = list(spare) if call.chunks else []
        self._rows: dict[int, _RowGradients] = {}

    def leaves(self, part: Part) -> list[Tensor]:
        """The part's inputs, detached, requiring grad where the originals need it."""
        cut = self._call.cut(self._inputs, part)
        return [t.detach().requires_grad_(need) for t, need in zip(cut, self._needed, strict=True)]

    def collect(self, part: Part, leaves: Sequence[Tensor]) -> None:
        """Take the gradients that the leaves of a part have received."""
        for i, leaf in enumerate(leaves):
            grad, leaf.grad = leaf.grad, None
            if part.chunk is not None and self._call.rows[i] and self._needed[i]:
                self._rows_of(i).add(part, torch.zeros_like(leaf) if grad is None else grad)
            elif grad is not None:
                self._add(i, part, grad)

    def _add(self, i: int, part: Part, grad: Tensor) -> None:
        held = self._sums[i]
        if self._call.split[i]:
            summed = part.chunk is not None
            if held is None:
                dtype = _exact(grad) if summed else None
                held = torch.zeros_like(self._inputs[i], dtype=dtype)
            held[part.batch] = held[part.batch] + grad if summed else grad
        elif held is None:
            held = grad
        else:
            held = held.to(_exact(grad)) + grad
        self._sums[i] = held

    def _rows_of(self, i: int) -> "_RowGradients":
        if i not in self._rows:
            like = self._inputs[i]
            fits = [t for t in self._spare if _same_memory_layout(t, like)]
            target = fits[0] if fits else torch.empty_like(like)
            self._spare = [t for t in self._spare if t is not target]
            self._rows[i], self._sums[i] = _RowGradients(target, split=self._call.split[i]), target
        return self._rows[i]

    @property
    def result(self) -> list[Tensor | None]:
        return [
            None if grad is None else grad.to(tensor.dtype)
            for grad, tensor in zip(self._sums, self._inputs, strict=True)
        ]


class _RowGradients:
    """Gradient of an input whose rows several chunks reach: each row is written once, when whole.

    Rows before that are carried in fp32. A row is whole when no later chunk reaches it; all chunks
    that own an earlier row, or itself, are done by then, so that `target` may hold the gradient of
    the output where rows are not written yet.
    """

    def __init__(self, target: Tensor, *, split: bool) -> None:
        self._target, self._split = target, split
        self._carried: Tensor | None = None

    def add(self, part: Part, grad: Tensor) -> None:
        """The gradient `[b, rows in reach, ...]` of one chunk."""
        assert part.chunk is not None
        total = grad.to(_exact(grad))
        if self._carried is not None:
            total[:, : self._carried.shape[1]] += self._carried
        first, whole = part.chunk.reach.start, part.reached_again
        target = self._target[part.batch] if self._split else self._target
        target[:, first:whole] = total[:, : whole - first]
        last = part.chunk.reach.stop == whole
        self._carried = None if last else total[:, whole - first :].clone()


def _exact(grad: Tensor) -> torch.dtype:
    """fp32 at least, as sums of many parts in bf16 would lose them."""
    return torch.float32 if grad.itemsize < 4 else grad.dtype


def _same_memory_layout(a: Tensor, b: Tensor) -> bool:
    described = [(t.shape, t.dtype, t.device, t.is_contiguous()) for t in (a, b)]
    return described[0] == described[1] and a.is_contiguous()


def _is_passed(output: Tensor, inputs: Sequence[Tensor], split: Sequence[bool]) -> bool:
    """Whether the block handed a shared input (or a view of one) on as its output."""
    bases = [id(t) for t, cut in zip(inputs, split, strict=True) if not cut]
    return id(output) in bases or id(output._base) in bases


def _require_equal(column: Sequence[Tensor], number: int, name: str) -> None:
    if not all(torch.equal(part, column[0]) for part in column[1:]):
        raise ValueError(
            f"{name}: output {number} of shape {tuple(column[0].shape)} has no batch dimension and "
            f"differs between micro-batches, so that no value stands for the whole batch; "
            f"leave micro_batch_size out, or return one value per sample"
        )
