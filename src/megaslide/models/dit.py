"""VideoDiT: the transformer that megaslide trains from scratch, to be read in one sitting.

Its blocks are what the streaming engine needs blocks to be: identical, taking everything that they
share (text, modulation, rotary tables, registers) as plain tensor arguments with the batch in
front, or with a leading 1 where there is no batch. One projection of the timestep serves all
blocks; each adds its own small table to it, which saves 6·D² parameters a block.

Shapes: B batch · C latent channels · T H W latent voxels · (T', H', W') token grid ·
N = T'·H'·W' tokens · D hidden size · L text tokens · E registers · d channels of a head.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaslide.models.attention import Frames, build_attention
from megaslide.models.checkpoint import load_weights, read_config, save_weights
from megaslide.models.chunks import FrameChunk, frame_chunks, rows_of
from megaslide.models.layers import (
    CrossAttention,
    FeedForward,
    FinalLayer,
    Grid,
    PatchEmbed,
    PositionEmbedding,
    Rope,
    TimestepEmbedding,
    ZeroLinear,
    layer_norm,
    modulated_norm,
    rope_tables,
)
from megaslide.models.presets import VideoDiTConfig, resolve_config
from megaslide.weights import MAX_SHARD_BYTES, write_config

if TYPE_CHECKING:
    from megaslide.config import AttentionConfig, ModelConfig

__all__ = ["VideoDiT", "VideoDiTBlock", "VideoDiTConfig", "build_model", "count_parameters"]


class VideoDiTBlock(nn.Module):
    """Self-attention over video, cross-attention to text, MLP.

    The gates start at 1/sqrt(2·layers), which keeps the residual stream's variance whatever the
    depth, and not at zero (adaLN-zero): from zero, Adam needs hundreds of steps to open them, and
    until then no token learns from another. The model predicts zero at init all the same.
    """

    row_arguments = ("hidden", "rope")

    def __init__(self, config: VideoDiTConfig, index: int) -> None:
        super().__init__()
        dim = config.hidden_size
        self.initial_gate = (2 * config.num_layers) ** -0.5
        self.scale_shift_table = nn.Parameter(torch.empty(6, dim))
        self.attn1 = build_attention(config.attention, block_index=index)
        self.attn2 = CrossAttention(dim, config.num_attention_heads)
        self.ffn = FeedForward(dim, round(dim * config.mlp_ratio), dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """This block's own table; its layers have theirs."""
        nn.init.zeros_(self.scale_shift_table)
        for gate in (2, 5):
            nn.init.constant_(self.scale_shift_table[gate], self.initial_gate)

    def forward(
        self,
        hidden: Tensor,
        text: Tensor,
        text_mask: Tensor | None,
        modulation: Tensor,
        rope: Rope,
        registers: Tensor | None,
        grid: Grid,
        own: Frames | None = None,
    ) -> Tensor:
        """One block.

        Args:
            hidden: [B, N, D].
            text: [B, L, D], already projected.
            text_mask: bool [B, L], True where a token is real; None: all are.
            modulation: [B, 6, D] of the timestep: shift, scale, gate of attention, then of the MLP.
            rope: cosines and sines, each fp32 [1, N, 1, d/2].
            registers: [1, E, D] or None.
            grid: (T', H', W').
            own: frames whose tokens are returned; the others are there to be attended to. None:
                all.

        Returns:
            [B, N, D], dtype of `hidden`; N of the frames `own`.
        """
        # One use of what blocks share, so that its gradients add up in the same order whether
        # a block is many autograd nodes or, streamed or checkpointed, one.
        text = text.view_as(text)
        registers = None if registers is None else registers.view_as(registers)
        table = self.scale_shift_table.float() + modulation.float()
        shift1, scale1, gate1, shift2, scale2, gate2 = table.chunk(6, dim=1)  # each [B, 1, D]
        out = self.attn1(
            modulated_norm(hidden, shift1, scale1), rope, registers, grid=grid, own=own
        )
        hidden = hidden if own is None else hidden[:, rows_of(own, grid)]
        hidden = _gated_add(hidden, gate1, out)
        out = self.attn2(layer_norm(hidden), text, text_mask)
        hidden = hidden + out.to(hidden.dtype)
        out = self.ffn(modulated_norm(hidden, shift2, scale2))
        return _gated_add(hidden, gate2, out)

    def why_whole(self) -> str | None:
        """Why a call cannot be computed in chunks of frames, or None where it can."""
        return self.attn1.why_whole()

    def chunks(self, frames: int, arguments: Mapping[str, Any]) -> list[FrameChunk]:
        """A call of `forward` in parts of at most so many frames, for a streaming engine.

        Frames near a border are given to both sides; they cost attention but no MLP.
        """
        return frame_chunks(frames, arguments["grid"], self.attn1.reach)


def _gated_add(hidden: Tensor, gate: Tensor, out: Tensor) -> Tensor:
    return torch.addcmul(hidden, gate.to(hidden.dtype), out.to(hidden.dtype))


class VideoDiT(nn.Module):
    """Video diffusion transformer with a choice of self-attention (3D-DSA by default).

    Predicts zero at init, which is the right first guess for a velocity of unknown sign, and so
    makes the first loss equal to that of predicting zero.
    """

    def __init__(self, config: VideoDiTConfig) -> None:
        super().__init__()
        self.config = config
        dim, registers = config.hidden_size, config.num_register_tokens
        self.patch_embed = PatchEmbed(config.in_channels, config.patch_size, dim)
        self.position_embed = PositionEmbedding(dim)
        self.time_embed = TimestepEmbedding(config.freq_dim, dim)
        self.time_proj = ZeroLinear(dim, 6 * dim)
        self.text_embed = FeedForward(config.text_dim, dim, dim)
        self.registers = nn.Parameter(torch.empty(1, registers, dim)) if registers else None
        self.blocks = nn.ModuleList(VideoDiTBlock(config, i) for i in range(config.num_layers))
        self.final = FinalLayer(dim, config.patch_size, config.in_channels)
        self._reset_registers()

    def reset_parameters(self) -> None:
        """Initialise every parameter, as construction does; for a model built on `meta`."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and reset is not None:
                reset()
        self._reset_registers()

    def _reset_registers(self) -> None:
        # Small values: qk-norm makes full keys of them, so a register begins as a place where a
        # query may attend to almost nothing.
        if self.registers is not None:
            nn.init.normal_(self.registers, std=0.02)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Predict the velocity (or what the objective asks for) of noisy latents.

        Args:
            hidden_states: latents [B, C, T, H, W]; each of T, H, W a multiple of its patch.
            timestep: t = 1000·sigma, float [B], or one number for all.
            encoder_hidden_states: text [B, L, text_dim].
            encoder_attention_mask: [B, L], nonzero where a text token is real; None: all are.

        Returns:
            [B, C, T, H, W], dtype of `hidden_states`.

        Raises:
            ValueError: a shape that does not fit; names the number and what fits.
        """
        grid = self._token_grid(hidden_states, encoder_hidden_states)
        hidden = self.patch_embed(hidden_states) + self.position_embed(grid)
        embedded_timestep = self.time_embed(timestep.expand(len(hidden_states)))
        modulation = self.time_proj(F.silu(embedded_timestep)).unflatten(-1, (6, -1))
        text = self.text_embed(encoder_hidden_states.to(hidden.dtype))
        mask = None if encoder_attention_mask is None else encoder_attention_mask.bool()
        rope = self._rope(grid, hidden.device)
        for block in self.blocks:
            hidden = block(hidden, text, mask, modulation, rope, self.registers, grid=grid)
        velocity = self.final(hidden, embedded_timestep, hidden_states, grid)
        return velocity.to(hidden_states.dtype)

    def _rope(self, grid: Grid, device: torch.device) -> Rope:
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        return rope_tables(grid, head_dim, theta=self.config.rope_theta, device=device)

    def _token_grid(self, latents: Tensor, text: Tensor) -> Grid:
        config = self.config
        if latents.ndim != 5 or latents.shape[1] != config.in_channels:
            expected = f"[B, {config.in_channels}, T, H, W]"
            raise ValueError(f"hidden_states is {list(latents.shape)}, expected {expected}")
        if text.ndim != 3 or text.shape[-1] != config.text_dim or len(text) != len(latents):
            expected = f"[{len(latents)}, L, {config.text_dim}]"
            raise ValueError(f"encoder_hidden_states is {list(text.shape)}, expected {expected}")
        for axis, size, patch in zip("THW", latents.shape[2:], config.patch_size, strict=True):
            if size % patch:
                raise ValueError(
                    f"{axis}={size} latent voxels is not a multiple of the patch size {patch}; "
                    f"use {size - size % patch or patch} or {size - size % patch + patch}"
                )
        t, h, w = (n // p for n, p in zip(latents.shape[2:], config.patch_size, strict=True))
        return t, h, w

    def save_pretrained(
        self, folder: str | Path, *, max_shard_bytes: int = MAX_SHARD_BYTES
    ) -> None:
        """Write config.json and safetensors in the diffusers layout, values bit for bit.

        Args:
            folder: made if it does not exist.
            max_shard_bytes: larger models are written as several files and an index.
        """
        self.save_config(folder)
        save_weights(self, Path(folder), max_shard_bytes)

    def save_config(self, folder: str | Path) -> None:
        """Write config.json alone, as diffusers' models do."""
        write_config(Path(folder), type(self).__name__, self.config.to_dict())

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "VideoDiT":
        """Read what `save_pretrained` wrote, in the dtypes it was saved in, onto the CPU.

        Raises:
            InputError: not a folder of this model, or a damaged one; names the file and the keys.
        """
        folder = Path(folder)
        config = read_config(folder, class_name=cls.__name__, parse=VideoDiTConfig.from_dict)
        with torch.device("meta"):
            model = cls(config)
        load_weights(model, folder)
        return model


def build_model(
    model: "ModelConfig", attention: "AttentionConfig", *, in_channels: int, text_dim: int
) -> VideoDiT:
    """The VideoDiT that a run's config describes; works under `torch.device("meta")`.

    Args:
        model: preset and overrides.
        attention: kind of self-attention and its options.
        in_channels: channels of the latents.
        text_dim: channels of the text embeddings.

    Raises:
        InputError: a combination that cannot be built; names the key, the number and the fix.
    """
    config = resolve_config(model, attention, in_channels=in_channels, text_dim=text_dim)
    return VideoDiT(config)


def count_parameters(config: VideoDiTConfig) -> int:
    """Number of parameters, without allocating any."""
    with torch.device("meta"):
        model = VideoDiT(config)
    return sum(parameter.numel() for parameter in model.parameters())
