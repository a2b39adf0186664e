"""Tiny instances of the video transformers that diffusers has, with inputs they accept.

Each is the real class with a config of a few thousand parameters, so that what is tested is the
class's own forward: how it calls its blocks, what they return, and which parameters they share.
Sizes differ from one another and from the batch, so that a mixed-up axis is an error and no chance.

Shapes: B batch, C latent channels, T H W latent voxels, L text tokens.
"""

import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

B, C, T, H, W, L = 2, 4, 3, 8, 10, 5
TEXT, POOLED = 16, 8
TOKENS = T * (H // 2) * (W // 2)

Inputs = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A class name, the arguments it is built from, and arguments of its forward."""

    class_name: str
    config: dict[str, Any]
    inputs: Callable[[], Inputs]
    splits: bool = True
    """Whether the first axis of its blocks' inputs is the batch, which micro-batches cut."""
    blocks: tuple[str, ...] = ("transformer_blocks",)
    """The module lists that stream."""
    found: bool = True
    """Whether they are found, as in real sizes; not where a fixed embedder outweighs them."""


def build(name: str, seed: int = 0) -> nn.Module:
    """A freshly initialised instance in which no parameter is zero, so that all have an effect."""
    import diffusers

    tiny = MODELS[name]
    torch.manual_seed(seed)
    model: nn.Module = getattr(diffusers, tiny.class_name)(**tiny.config)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.02)
    return model


def write_pipeline(
    folder: Path, name: str, *, dtype: torch.dtype = torch.float32, shard_size: str = "5GB"
) -> nn.Module:
    """Save a tiny model as the `transformer` of a pipeline's folder, as diffusers itself does.

    Returns the model as diffusers loads it in `dtype`, which is what the folder holds.
    """
    import diffusers

    source = folder / "source"
    build(name).save_pretrained(source)
    loader = getattr(diffusers, MODELS[name].class_name)
    model = loader.from_pretrained(source, torch_dtype=dtype)
    for file in source.iterdir():
        file.unlink()
    source.rmdir()
    model.save_pretrained(folder / "transformer", max_shard_size=shard_size)
    return model


def install_resize() -> None:
    """Give Cosmos the one function of torchvision that it calls, where torchvision is absent."""
    from diffusers.models.transformers import transformer_cosmos

    if hasattr(transformer_cosmos, "transforms"):
        return

    def resize(mask: Tensor, size: list[int], interpolation: str) -> Tensor:
        return functional.interpolate(mask, size=tuple(size), mode=interpolation)

    transformer_cosmos.transforms = types.SimpleNamespace(
        functional=types.SimpleNamespace(resize=resize),
        InterpolationMode=types.SimpleNamespace(NEAREST="nearest"),
    )


def outputs(result: Any) -> list[Tensor]:
    """The floating-point tensors in what a model returned."""
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    if isinstance(result, dict):
        return [t for value in result.values() for t in outputs(value)]
    if isinstance(result, list | tuple):
        return [t for value in result for t in outputs(value)]
    return []


def loss(model: Callable[..., Any], inputs: Inputs) -> Tensor:
    """A scalar that every output enters with weights of its own."""
    total = torch.zeros(())
    for number, out in enumerate(outputs(model(**inputs, return_dict=False))):
        target = random(*out.shape, seed=100 + number)
        total = total + (out.float() - target).square().mean()
    return total


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def times() -> Tensor:
    return torch.tensor([500.0, 125.0])


def text(length: int = L, width: int = TEXT, seed: int = 1) -> Tensor:
    return random(B, length, width, seed=seed)


def text_mask(length: int = L) -> Tensor:
    """The second caption is two tokens shorter."""
    mask = torch.ones(B, length)
    mask[1, -2:] = 0
    return mask


def video(channels: int = C) -> Tensor:
    return random(B, channels, T, H, W)


def rotary(dim: int, frames: int = T, **options: Any) -> tuple[Tensor, Tensor]:
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    grid = (H // 2, W // 2)
    crops = None if options else ((0, 0), grid)
    return get_3d_rotary_pos_embed(dim, crops, grid, frames, **options)


# -- inputs ---------------------------------------------------------------------------------------


def plain(channels: int = C, **more: Any) -> Inputs:
    """What most classes take."""
    return {
        "hidden_states": video(channels),
        "timestep": times(),
        "encoder_hidden_states": text(),
        **more,
    }


def wan_first_frame() -> Inputs:
    """Wan 2.2 TI2V: one timestep per token, zero on the first frame's."""
    per_token = times()[:, None].repeat(1, TOKENS)
    per_token[:, : TOKENS // T] = 0
    return plain(timestep=per_token)


def wan_image() -> Inputs:
    """Wan 2.1 I2V splits image from text tokens by the fixed text length 512."""
    image = random(B, L, TEXT, seed=2)
    return plain(3 * C, encoder_hidden_states=text(512), encoder_hidden_states_image=image)


def packed() -> Inputs:
    return {
        "hidden_states": random(B, T * H * W, C),
        "timestep": times(),
        "encoder_hidden_states": text(),
        "encoder_attention_mask": text_mask(),
        "num_frames": T, "height": H, "width": W,
    }  # fmt: skip


def ltx() -> Inputs:
    return {**packed(), "rope_interpolation_scale": (8 / 25, 32, 32)}


def ltx2() -> Inputs:
    audio = {
        "audio_hidden_states": random(B, 9, C, seed=3),
        "audio_encoder_hidden_states": text(seed=2),
        "audio_num_frames": 9,
        "fps": 25.0,
    }
    return {**packed(), **audio}


def cosmos(condition: bool = False) -> Inputs:
    inputs = plain(fps=30, padding_mask=torch.zeros(1, 1, H, W))
    if condition:
        inputs["condition_mask"] = torch.zeros(B, 1, T, H, W)
        inputs["timestep"] = torch.full((B, 1, T, 1, 1), 0.7)
        inputs["timestep"][:, :, 0] = 1e-4
    return inputs


def frames_first(frames: int = T, rope: tuple[Tensor, Tensor] | None = None) -> Inputs:
    """CogVideoX: [B, T, C, H, W], and the rotary table as an argument."""
    inputs: Inputs = {
        "hidden_states": random(B, frames, C, H, W),
        "timestep": times().long(),
        "encoder_hidden_states": text(8, 8),
    }
    return inputs if rope is None else {**inputs, "image_rotary_emb": rope}


def hunyuan(channels: int = C, guided: bool = True, **more: Any) -> Inputs:
    guidance = {"guidance": torch.full((B,), 6000.0)} if guided else {}
    return plain(
        channels,
        encoder_attention_mask=text_mask(),
        pooled_projections=random(B, POOLED, seed=2),
        **guidance,
        **more,
    )


def hunyuan15() -> Inputs:
    return plain(
        2 * C + 1,
        encoder_attention_mask=text_mask(),
        encoder_hidden_states_2=random(B, 4, 8, seed=2),
        encoder_attention_mask_2=torch.ones(B, 4),
        image_embeds=torch.zeros(B, 3, 12),
    )


def framepack() -> Inputs:
    """History at three scales; the long one has at least as many frames as its kernel."""
    scales = {"clean": 2, "history_2x": 2, "history_4x": 8}
    more: Inputs = {"image_embeds": text(seed=4), "indices_latents": torch.arange(T).float()}
    for number, (scale, frames) in enumerate(scales.items()):
        more[f"latents_{scale}"] = random(B, C, frames, H, W, seed=5 + number)
        more[f"indices_latents_{scale}"] = torch.ones(frames)
    return hunyuan(**more)


def helios() -> Inputs:
    history = {"short": 1, "mid": 2, "long": 4}
    more: Inputs = {"indices_hidden_states": torch.arange(T).float().expand(B, T)}
    for number, (scale, frames) in enumerate(history.items()):
        more[f"latents_history_{scale}"] = random(B, C, frames, H, W, seed=2 + number)
        more[f"indices_latents_history_{scale}"] = torch.ones(B, frames)
    return plain(**more)


def anyflow() -> Inputs:
    return plain(
        hidden_states=random(B, T, C, H, W),
        timestep=torch.full((B, T), 500.0),
        r_timestep=torch.full((B, T), 250.0),
    )


def kandinsky() -> Inputs:
    return plain(
        hidden_states=random(B, T, H, W, C),
        pooled_projections=random(B, POOLED, seed=2),
        visual_rope_pos=[torch.arange(T), torch.arange(H // 2), torch.arange(W // 2)],
        text_rope_pos=torch.arange(L),
    )


def allegro() -> Inputs:
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    grid = (H // 2, W // 2)
    *frequencies, t, h, w = get_3d_rotary_pos_embed_allegro(24, ((0, 0), grid), grid, T)
    axes = torch.meshgrid(t.long(), h.long(), w.long(), indexing="ij")
    positions = tuple(axis.reshape(1, -1) for axis in axes)
    return plain(
        encoder_hidden_states=text(width=8),
        attention_mask=torch.ones(B, T, H, W),
        encoder_attention_mask=torch.ones(B, L),
        image_rotary_emb=(tuple(frequencies), positions),
    )


def latte() -> Inputs:
    return plain(hidden_states=random(B, C, T, 6, 6), encoder_hidden_states=text(width=8))


def vace() -> Inputs:
    return plain(control_hidden_states=random(B, 3 * C, T, H, W, seed=2))


def animate() -> Inputs:
    """A reference frame before those of the clip; a face every quarter of a latent frame."""
    image = random(B, 3, TEXT, seed=2)
    return plain(
        hidden_states=random(B, 2 * C + 4, T + 1, H, W),
        encoder_hidden_states_image=image,
        pose_hidden_states=random(B, C, T, H, W, seed=3),
        face_pixel_values=random(B, 3, 4 * (T - 1) + 1, 16, 16, seed=4),
    )


def minimax() -> Inputs:
    """One sequence of text, audio and video tokens, told apart by index tensors."""
    sizes = {"text": 4, "audio": 7, "video": TOKENS}
    total = sum(sizes.values())
    ends = torch.tensor(list(sizes.values())).cumsum(0).tolist()
    places = [torch.arange(end - n, end) for n, end in zip(sizes.values(), ends, strict=True)]
    tags, steps = torch.zeros(total, dtype=torch.long), torch.zeros(total, dtype=torch.long)
    tags[places[0]], tags[places[1]], steps[places[1]] = 1, 2, 1
    positions = torch.zeros(total, 3)
    positions[:, 0] = torch.arange(total)
    return {
        "hidden_states": random(B, sizes["video"], 16),
        "audio_hidden_states": random(B, sizes["audio"], 6, seed=1),
        "encoder_hidden_states": random(B, sizes["text"], 8, seed=2),
        "timestep": torch.tensor([0.7, 0.3]), "timestep_indices": steps, "token_tags": tags,
        "position_ids": positions, "text_indices": places[0], "audio_indices": places[1],
        "video_indices": places[2],
    }  # fmt: skip


def cosmos3() -> Inputs:
    """Text tokens understood and image tokens generated, packed without a batch axis."""
    side = 4
    count = 2 + side * side
    vision = torch.arange(2, count)
    return {
        "input_ids": torch.tensor([1, 2]),
        "text_indexes": torch.tensor([0, 1]),
        "position_ids": torch.zeros(3, count, dtype=torch.long),
        "und_len": 2, "sequence_length": count,
        "vision_tokens": [random(1, 2, 1, side, side)],
        "vision_token_shapes": [(1, side, side)],
        "vision_sequence_indexes": vision, "vision_mse_loss_indexes": vision,
        "vision_timesteps": torch.ones(side * side),
        "vision_noisy_frame_indexes": [torch.tensor([0])],
    }  # fmt: skip


# -- configs --------------------------------------------------------------------------------------

HEADS = {"num_attention_heads": 2, "attention_head_dim": 12}
LATENT = {"in_channels": C, "out_channels": C}
WAN = {
    **HEADS, **LATENT, "num_layers": 2, "patch_size": (1, 2, 2), "text_dim": TEXT, "freq_dim": 32,
    "ffn_dim": 32, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 32,
}  # fmt: skip
COSMOS = {
    **HEADS, **LATENT, "num_layers": 2, "mlp_ratio": 2, "text_embed_dim": TEXT,
    "adaln_lora_dim": 4, "max_size": (4, 32, 32), "patch_size": (1, 2, 2),
}  # fmt: skip
LTX = {
    **LATENT, **HEADS, "num_layers": 2, "cross_attention_dim": math.prod(HEADS.values()),
    "qk_norm": "rms_norm_across_heads", "caption_channels": TEXT,
}  # fmt: skip
COGVIDEOX = {
    **LATENT, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2,
    "time_embed_dim": 2, "text_embed_dim": 8, "max_text_seq_length": 8, "sample_width": W,
    "sample_height": H, "sample_frames": 9, "patch_size": 2, "temporal_compression_ratio": 4,
}  # fmt: skip
ROPE = {**COGVIDEOX, "use_rotary_positional_embeddings": True}
HUNYUAN = {
    **LATENT, "num_attention_heads": 2, "attention_head_dim": 10, "num_layers": 2,
    "num_single_layers": 2, "num_refiner_layers": 1, "patch_size": 2, "patch_size_t": 1,
    "guidance_embeds": True, "text_embed_dim": TEXT, "pooled_projection_dim": POOLED,
    "rope_axes_dim": (2, 4, 4), "image_condition_type": None,
}  # fmt: skip
BOTH = ("transformer_blocks", "single_transformer_blocks")


def without(config: dict[str, Any], *keys: str, **changes: Any) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in keys} | changes


def wan(class_name: str = "WanTransformer3DModel", inputs: Any = plain, **changes: Any) -> Tiny:
    return Tiny(class_name=class_name, config={**WAN, **changes}, inputs=inputs, blocks=("blocks",))


MODELS: dict[str, Tiny] = {
    "wan": wan(),
    "wan-ti2v": wan(inputs=wan_first_frame),
    "wan-i2v": wan(inputs=wan_image, in_channels=3 * C, image_dim=TEXT, added_kv_proj_dim=24),
    "wan-a14b-i2v": wan(inputs=lambda: plain(3 * C), in_channels=3 * C),
    "wan-vace": Tiny(
        class_name="WanVACETransformer3DModel", inputs=vace, blocks=("vace_blocks", "blocks"),
        config={**WAN, "num_layers": 3, "vace_layers": [0, 2], "vace_in_channels": 3 * C},
    ),
    "wan-animate": wan(
        "WanAnimateTransformer3DModel", animate, in_channels=2 * C + 4, latent_channels=C,
        image_dim=TEXT, motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16},
        motion_encoder_size=16, motion_style_dim=8, motion_dim=4, motion_encoder_dim=16,
        face_encoder_hidden_dim=16, face_encoder_num_heads=2, inject_face_latents_blocks=2,
    ),
    "skyreels": wan("SkyReelsV2Transformer3DModel"),
    "chronoedit": wan("ChronoEditTransformer3DModel", rope_temporal_skip_len=8),
    "anyflow": Tiny(
        class_name="AnyFlowTransformer3DModel", config=without(WAN, "qk_norm"), inputs=anyflow,
        blocks=("blocks",),
    ),
    "helios": Tiny(
        class_name="HeliosTransformer3DModel", inputs=helios, blocks=("blocks",),
        config=without(WAN, "rope_max_seq_len", rope_dim=(4, 4, 4)),
    ),
    "ltx": Tiny(class_name="LTXVideoTransformer3DModel", config=LTX, inputs=ltx),
    "ltx2": Tiny(
        class_name="LTX2VideoTransformer3DModel", inputs=ltx2,
        config={
            **without(LTX, "qk_norm"), "audio_in_channels": C, "audio_out_channels": C,
            "audio_num_attention_heads": 2, "audio_attention_head_dim": 4,
            "audio_cross_attention_dim": 8, "rope_double_precision": False,
        },
    ),
    "cosmos": Tiny(
        class_name="CosmosTransformer3DModel", inputs=cosmos,
        config={**COSMOS, "concat_padding_mask": True, "extra_pos_embed_type": "learnable"},
    ),
    "cosmos2": Tiny(
        class_name="CosmosTransformer3DModel",
        inputs=cosmos,
        config={**COSMOS, "extra_pos_embed_type": None},
    ),
    "cosmos2-v2w": Tiny(
        class_name="CosmosTransformer3DModel",
        inputs=lambda: cosmos(condition=True),
        config={**COSMOS, "in_channels": C + 1, "extra_pos_embed_type": None},
    ),
    "hunyuan": Tiny(
        class_name="HunyuanVideoTransformer3DModel", config=HUNYUAN, inputs=hunyuan, blocks=BOTH
    ),
    "hunyuan-i2v": Tiny(
        class_name="HunyuanVideoTransformer3DModel", inputs=lambda: hunyuan(2 * C + 1, False),
        config={
            **HUNYUAN, "in_channels": 2 * C + 1, "guidance_embeds": False,
            "image_condition_type": "latent_concat",
        },
        blocks=BOTH,
    ),
    "hunyuan-token-replace": Tiny(
        class_name="HunyuanVideoTransformer3DModel", inputs=hunyuan, blocks=BOTH,
        config={**HUNYUAN, "image_condition_type": "token_replace"},
    ),
    "hunyuan1.5": Tiny(
        class_name="HunyuanVideo15Transformer3DModel", inputs=hunyuan15,
        config={
            **without(HUNYUAN, "num_single_layers", "guidance_embeds", "pooled_projection_dim",
                      "image_condition_type"),
            # Wide enough for its blocks to be found beside an embedder of fixed width.
            "in_channels": 2 * C + 1, "attention_head_dim": 64, "mlp_ratio": 2.0, "patch_size": 1,
            "text_embed_2_dim": 8, "image_embed_dim": 12, "rope_axes_dim": (16, 24, 24),
            "target_size": 16, "task_type": "t2v", "num_layers": 2,
        },
    ),
    "framepack": Tiny(
        class_name="HunyuanVideoFramepackTransformer3DModel", inputs=framepack, blocks=BOTH,
        config={
            **HUNYUAN, "has_image_proj": True, "image_proj_dim": TEXT, "has_clean_x_embedder": True
        },
    ),
    "cogvideox": Tiny(
        class_name="CogVideoXTransformer3DModel", config=COGVIDEOX, inputs=frames_first
    ),
    "cogvideox-rope": Tiny(
        class_name="CogVideoXTransformer3DModel", config=ROPE,
        inputs=lambda: frames_first(rope=rotary(16)),
    ),
    "cogvideox-learned": Tiny(
        class_name="CogVideoXTransformer3DModel", inputs=lambda: frames_first(rope=rotary(16)),
        config={**ROPE, "use_learned_positional_embeddings": True},
    ),
    "cogvideox1.5": Tiny(
        class_name="CogVideoXTransformer3DModel",
        config={**ROPE, "patch_size_t": 2, "patch_bias": False, "sample_frames": 13},
        inputs=lambda: frames_first(
            4, rotary(16, 2, grid_type="slice", max_size=(H // 2, W // 2))
        ),
    ),
    "consisid": Tiny(
        class_name="ConsisIDTransformer3DModel", config={**COGVIDEOX, "is_train_face": False},
        inputs=frames_first,
    ),
    "mochi": Tiny(
        class_name="MochiTransformer3DModel",
        inputs=lambda: plain(
            encoder_hidden_states=text(16), encoder_attention_mask=text_mask(16).bool()
        ),
        config={
            "in_channels": C, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2,
            "patch_size": 2, "pooled_projection_dim": TEXT, "text_embed_dim": TEXT,
            "time_embed_dim": 4, "max_sequence_length": 16,
        },
    ),
    "allegro": Tiny(
        class_name="AllegroTransformer3DModel", inputs=allegro,
        config={
            **LATENT, "num_attention_heads": 2, "attention_head_dim": 24, "num_layers": 2,
            "cross_attention_dim": 48, "sample_width": W, "sample_height": H, "sample_frames": T,
            "caption_channels": 8,
        },
    ),
    "kandinsky5": Tiny(
        class_name="Kandinsky5Transformer3DModel", inputs=kandinsky,
        blocks=("text_transformer_blocks", "visual_transformer_blocks"),
        config={
            "in_visual_dim": C, "out_visual_dim": C, "in_text_dim": TEXT, "in_text_dim2": POOLED,
            "time_dim": 16, "patch_size": (1, 2, 2), "model_dim": 24, "ff_dim": 32,
            "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 4, 4),
        },
    ),
    "sana": Tiny(
        class_name="SanaVideoTransformer3DModel", inputs=plain,
        config={
            **LATENT, **HEADS, "num_layers": 2, "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 12, "cross_attention_dim": 24, "caption_channels": TEXT,
            "sample_size": 8, "rope_max_seq_len": 32,
        },
    ),
    "latte": Tiny(
        class_name="LatteTransformer3DModel", inputs=latte,
        blocks=("transformer_blocks", "temporal_transformer_blocks"), splits=False,
        config={
            **HEADS, "in_channels": C, "out_channels": 2 * C, "sample_size": 6, "num_layers": 2,
            "patch_size": 2, "caption_channels": 8, "cross_attention_dim": 24,
            "attention_bias": True, "activation_fn": "gelu-approximate",
            "num_embeds_ada_norm": 1000, "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False, "video_length": T,
        },
    ),
    "easyanimate": Tiny(
        class_name="EasyAnimateTransformer3DModel", inputs=plain,
        config={
            **LATENT, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2,
            "mmdit_layers": 2, "patch_size": 2, "text_embed_dim": TEXT, "time_embed_dim": 8,
        },
    ),
    "motif": Tiny(
        class_name="MotifVideoTransformer3DModel", blocks=BOTH,
        inputs=lambda: plain(33, encoder_hidden_states=text(width=32)),
        config={
            **HEADS, "in_channels": 33, "out_channels": 16, "num_layers": 1,
            "num_single_layers": 2, "patch_size": 2, "patch_size_t": 1, "text_embed_dim": 32,
            "image_embed_dim": 4, "rope_axes_dim": (4, 4, 4),
        },
    ),
    "minimax": Tiny(
        class_name="MiniMaxH3Transformer3DModel", inputs=minimax, splits=False,
        config={
            "num_attention_heads": 2, "attention_head_dim": 16, "hidden_size": 24,
            "num_layers": 2, "num_refiner_layers": 2, "ffn_dim": 32, "in_channels": C,
            "audio_in_channels": 6, "patch_size": (1, 2, 2), "text_dim": 8, "freq_dim": 8,
            "time_embed_hidden_dim": 24, "time_embed_dim": 16, "rope_freq_dim": 2,
        },
    ),
    "cosmos3": Tiny(
        class_name="Cosmos3OmniTransformer", inputs=cosmos3, blocks=("layers",), splits=False,
        config={
            "head_dim": 6, "hidden_act": "relu2", "hidden_size": 12, "intermediate_size": 24,
            "latent_channel": 2, "latent_patch_size": 1, "num_attention_heads": 2,
            "num_hidden_layers": 2, "num_key_value_heads": 1, "patch_latent_dim": 2,
            "qk_norm_for_text": False, "rms_norm_eps": 1e-5, "rope_axes_dim": [1, 1, 1],
            "rope_theta": 1e8, "vocab_size": 32,
        },
    ),
}  # fmt: skip
