"""Local attention inside somebody else's block: our operator answers the block's own SDPA call.

A pretrained attention module projects, normalises and rotates as its family does, and then calls
`torch.nn.functional.scaled_dot_product_attention`. While a converted module runs, that one call is
answered by 3D-DSA or a baseline of it. Nothing of the family is written a second time, so nothing
can drift from it, and projections, norms and rotary positions keep their weights and names. What is
new is one submodule, `dsa`, beside the projections.

Where video and text attend to each other in one softmax, video queries see their window and all
text, text queries see everything, as before.

An attention module sees N tokens and not their grid. The model's input tells it: a hook on the
model reads it, a hook on each block hands it to the block as one more argument, and there it is
part of the call. The streaming engine, which recomputes the block later, therefore gets the grid
of that call, whatever ran in between.

Shapes: B batch · T H W token grid · N = T·H·W tokens, t-major · L text tokens in the same softmax ·
S = N + L · D channels of a token · d channels of a head.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megaslide.config import AttentionConfig
from megaslide.models.attention import Extra, shifted_window_attention
from megaslide.models.layers import Grid, ZeroDepthwiseConv3d
from megaslide.models.offsets import OffsetNet
from megaslide.ops.deformable_attention import deformable_attention

GridReader = Callable[[nn.Module, Mapping[str, Any]], Grid]
"""The token grid of a call, from the model and its forward's arguments by name."""
TextPlace = Literal["before", "after"] | None
"""Where text tokens are beside those of the video; None where there are none."""
_SDPA = F.scaled_dot_product_attention


class Registers(nn.Module):
    """Learned keys and values that every query sees, in a softmax of their own behind a gate.

    The gate of each head starts at zero. In the window's softmax they would take weight from the
    video from the first step on, whatever their values.

    Args:
        count: E, number of registers.
        num_heads: heads of the attention.
        channels: heads·d.
    """

    def __init__(self, count: int, num_heads: int, channels: int) -> None:
        super().__init__()
        shape = count, num_heads, channels // num_heads
        self.keys, self.values = (nn.Parameter(torch.empty(shape)) for _ in range(2))
        self.gate = nn.Parameter(torch.empty(num_heads, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Keys and values of about the size that normalised ones have; a closed gate."""
        nn.init.normal_(self.keys)
        nn.init.normal_(self.values)
        nn.init.zeros_(self.gate)

    def forward(self, q: Tensor) -> Tensor:
        """q [B, T, H, W, heads, d] to what is added to the attention's output, same shape."""
        k, v = (p.to(q.dtype).transpose(0, 1).unsqueeze(0) for p in (self.keys, self.values))
        rows = q.flatten(0, 3).transpose(0, 1).unsqueeze(0)  # [1, heads, B·N, d]
        out = _SDPA(rows, k, v)[0].transpose(0, 1).unflatten(0, q.shape[:4])
        return out * self.gate.to(q.dtype)


class VideoAttention(nn.Module):
    """The operator that takes the place of dense attention, with its parameters.

    At init offsets, convolution branch and the registers' gates are zero, so that the deformable
    kind begins as neighbourhood attention, and any kind as dense attention where one window is the
    whole grid.

    Args:
        settings: kind, window and offsets.
        channels: D of the attention module's input, from which the offsets come.
        num_heads: heads of the attention.
        value_channels: heads·d.
        shifted: whether the windows of the `swin` kind are displaced.
    """

    def __init__(
        self,
        settings: AttentionConfig,
        *,
        channels: int,
        num_heads: int,
        value_channels: int,
        shifted: bool,
    ) -> None:
        super().__init__()
        self.settings, self.shifted = settings, shifted
        self.offsets: OffsetNet | None = None
        if settings.kind == "deformable":
            self.offsets = OffsetNet(
                channels,
                window=settings.window,
                kind=settings.offset_kind,
                offset_range=settings.offset_range,
                groups=settings.offset_groups,
            )
        self.conv_branch = ZeroDepthwiseConv3d(value_channels) if settings.conv_branch else None
        count = settings.num_register_tokens
        self.registers = Registers(count, num_heads, value_channels) if count else None

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, extra: Extra = None) -> Tensor:
        """Attend within windows.

        Args:
            x: [B, T, H, W, D].
            q, k, v: [B, T, H, W, heads, d].
            extra: keys and values that every query also sees, [B, L, heads, d].

        Returns:
            [B, T, H, W, heads, d].
        """
        settings, window = self.settings, self.settings.window
        if settings.kind == "swin":
            out = shifted_window_attention(q, k, v, extra, window=window, shifted=self.shifted)
        else:
            offsets = None if self.offsets is None else self.offsets(x)
            extra_k, extra_v = (None, None) if extra is None else extra
            out = deformable_attention(
                q, k, v, offsets, window=window, kind=settings.offset_kind,
                extra_k=extra_k, extra_v=extra_v, backend=settings.backend,
            )  # fmt: skip
        if self.conv_branch is not None:
            out = out + self.conv_branch(v.flatten(-2)).unflatten(-1, v.shape[-2:]).to(out.dtype)
        if self.registers is not None:
            out = out + self.registers(q)
        return out


def localize(
    model: nn.Module, blocks: Mapping[nn.Module, tuple[nn.Module, VideoAttention]],
    read_grid: GridReader, text: TextPlace = None,
) -> None:  # fmt: skip
    """Make attention modules of `model` local, in place.

    Args:
        model: called with what `read_grid` reads.
        blocks: for each block its attention module and what answers in it.
        read_grid: finds the token grid of a call.
        text: where SDPA's arguments have text tokens besides.
    """
    grid = _GridOfInput(read_grid)
    model.register_forward_pre_hook(grid, with_kwargs=True)
    for block, (attention, operator) in blocks.items():
        attention.add_module("dsa", operator)
        local: Any = _LocalForward(attention.forward, operator, text)
        attention.forward = local
        whole: Any = _BlockForward(block.forward, local)
        block.forward = whole
        block.register_forward_pre_hook(_PassGrid(grid), with_kwargs=True)


# Callable objects instead of closures: copy.deepcopy of a model copies them along with it, whereas
# a closure would go on calling the modules of the original.


class _GridOfInput:
    """A hook on the model: remembers the grid of its latest input."""

    def __init__(self, read: GridReader) -> None:
        self.read = read
        self.grid: Grid | None = None

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        bound = inspect.signature(type(model).forward).bind(model, *args, **kwargs)
        self.grid = self.read(model, bound.arguments)


class _PassGrid:
    """A hook on a block: adds the grid to the arguments of its call.

    torch's own checkpointing calls the block, and so this hook, once more in the backward pass; it
    then gets the grid of the model's latest input.
    """

    def __init__(self, source: _GridOfInput) -> None:
        self.source = source

    def __call__(self, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, {"token_grid": self.source.grid, **kwargs}


class _BlockForward:
    """A block's forward with one more argument, which its attention is told."""

    def __init__(self, forward: Callable[..., Any], attention: "_LocalForward") -> None:
        self.forward, self.attention = forward, attention
        own = inspect.signature(forward)
        added = inspect.Parameter("token_grid", inspect.Parameter.KEYWORD_ONLY, default=None)
        named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        rest = [p for p in own.parameters.values() if p.kind is p.VAR_KEYWORD]
        self.__signature__ = own.replace(parameters=[*named, added, *rest])

    def __call__(self, *args: Any, token_grid: Grid | None = None, **kwargs: Any) -> Any:
        self.attention.grid = token_grid
        try:
            return self.forward(*args, **kwargs)
        finally:
            self.attention.grid = None


class _LocalForward:
    """An attention module's forward in which the operator answers for SDPA."""

    def __init__(
        self, forward: Callable[..., Any], operator: VideoAttention, text: TextPlace
    ) -> None:
        self.forward, self.operator, self.text = forward, operator, text
        self.grid: Grid | None = None

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = _on_grid(hidden_states, self.grid)
        with _Answer(self.operator, x, self.text) as answer:
            out = self.forward(hidden_states, *args, **kwargs)
        # Perturbed guidance (LTX-2) may pass values on without any attention.
        if answer.rows != len(x) and kwargs.get("perturbation_mask") is None:
            raise RuntimeError(
                "a converted attention did not call torch's scaled_dot_product_attention; "
                "undo set_attention_backend(...) and DIFFUSERS_ATTN_BACKEND, and do not replace "
                "the processors of a converted model by others"
            )
        return out


class _Answer(TorchFunctionMode):
    """Within, the operator answers `scaled_dot_product_attention`; everything else is as ever."""

    def __init__(self, operator: VideoAttention, x: Tensor, text: TextPlace) -> None:
        super().__init__()
        self.operator, self.x, self.text = operator, x, text
        self.rows = 0
        """Samples answered for: some families go through the batch one by one (Mochi)."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (self.attend if func is _SDPA else func)(*args, **(kwargs or {}))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """What SDPA is called with, [B, heads, S, d], and returns."""
        if is_causal or (attn_mask is not None and self.text is None):
            raise ValueError(
                "a converted attention sees its window and takes no mask; call the model without "
                "attention_mask (and without sparse or causal attention)"
            )
        if dropout_p or scale is not None or enable_gqa:
            raise ValueError(f"dropout_p={dropout_p}, scale={scale}, enable_gqa={enable_gqa}")
        x = self.x[self.rows : self.rows + len(query)]
        self.rows += len(query)
        q, k, v = (_as_autocast(t).transpose(1, 2) for t in (query, key, value))
        if self.text is None:
            out = _of_video(self.operator, x, (q, k, v))
        else:
            out = _of_both(self.operator, x, (q, k, v), attn_mask, self.text)
        return out.transpose(1, 2)


def _of_video(
    operator: VideoAttention, x: Tensor, qkv: Sequence[Tensor], text: Sequence[Tensor] = ()
) -> Tensor:
    """x [B, T, H, W, D]; q, k, v [B, N, heads, d]; k, v of text [B, L, heads, d]. Returns as q."""
    q, k, v = (tensor.unflatten(1, x.shape[1:4]) for tensor in qkv)
    extra = (text[0], text[1]) if text and text[0].shape[1] else None
    return operator(x, q, k, v, extra).flatten(1, 3)


def _of_both(
    operator: VideoAttention,
    x: Tensor,
    qkv: Sequence[Tensor],
    mask: Tensor | None,
    place: Literal["before", "after"],
) -> Tensor:
    """Joint attention: q, k, v [B, S, heads, d] to the same shape; mask as for SDPA."""
    size, count = qkv[0].shape[1], x[0, ..., 0].numel()
    first = size - count if place == "before" else 0
    video = slice(first, first + count)
    text = slice(0, first) if place == "before" else slice(count, size)
    of_video, of_text = [t[:, video] for t in qkv], [t[:, text] for t in qkv]
    if mask is None:
        local = _of_video(operator, x, of_video, of_text[1:])
    else:
        real, mask = _read_mask(mask, len(x), first, text)
        local = _one_by_one(operator, x, of_video, of_text[1:], real)
    q, k, v = (tensor.transpose(1, 2) for tensor in (of_text[0], *qkv[1:]))
    whole = _SDPA(q, k, v, attn_mask=mask).transpose(1, 2)
    return torch.cat([whole, local] if place == "before" else [local, whole], dim=1)


def _read_mask(mask: Tensor, batch: int, first: int, text: slice) -> tuple[Tensor, Tensor]:
    """Which text tokens are real, bool [B, L], and the mask of text queries.

    A family's mask is bool, [B, 1, 1 | S, S]. It hides text that is padding, from all video queries
    alike, and no video.
    """
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1] != 1:
        raise ValueError(
            f"a converted attention takes no mask of {mask.dtype} {list(mask.shape)}, but that of "
            "text tokens alone; call the model without attention_mask"
        )
    mask = mask.expand(batch, -1, -1, -1)
    if mask.shape[2] == 1:
        return mask[:, 0, 0, text], mask
    return mask[:, 0, first, text], mask[:, :, text]


def _one_by_one(
    operator: VideoAttention,
    x: Tensor,
    qkv: Sequence[Tensor],
    text: Sequence[Tensor],
    real: Tensor,
) -> Tensor:
    """`_of_video` where samples differ in how much text is real: the operator takes no mask."""
    each = []
    for i, keep in enumerate(real):
        kept = keep.nonzero().flatten()
        of_video = [t[i : i + 1] for t in qkv]
        of_text = [t[i : i + 1, kept] for t in text]
        each.append(_of_video(operator, x[i : i + 1], of_video, of_text))
    return torch.cat(each)


def _as_autocast(tensor: Tensor) -> Tensor:
    """The dtype that autocast would have given SDPA."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


def _on_grid(hidden_states: Tensor, grid: Grid | None) -> Tensor:
    """[B, N, D] to [B, T, H, W, D].

    Raises:
        RuntimeError: the block was called by itself.
        ValueError: the tokens are not such a grid.
    """
    if grid is None:
        raise RuntimeError("a converted block knows its token grid only within its model's forward")
    t, h, w = grid
    if hidden_states.ndim != 3 or hidden_states.shape[1] != t * h * w:
        raise ValueError(
            f"converted attention over {list(hidden_states.shape)}: needs {t}·{h}·{w} tokens, the "
            "grid of the model's input; tokens of other inputs cannot be among them"
        )
    return hidden_states.unflatten(1, grid)
