"""The families of pretrained transformers: how each is called, and by what it is told apart.

What a family does is what its diffusers pipeline does around the transformer (diffusers 0.42,
`diffusers/pipelines/<family>`), which is the source of each formula here.

Shapes: B batch, C T H W latents, L text tokens of D channels.
"""

import torch
from torch import Tensor

from megaslide.config import Triple
from megaslide.errors import InputError
from megaslide.models.pretrained.family import NUM_TRAIN_TIMESTEPS, Arguments, Family, padded


class Wan(Family):
    """Wan 2.1, 2.2 (each expert of A14B, and TI2V-5B) and SkyReels-V2.

    Velocity at t = 1000·sigma. Text is zero-padded to 512 tokens, which attend without a mask.
    TI2V-5B takes one timestep per token: that of the token's latent frame, 0 on a frame that is
    given. Image-to-video models (in_channels 2C + 4) take the first frame in channels beside the
    noisy latents: a mask, of the 4 pixel frames in a latent one, that is 1 on the first frame, and
    the latents of a clip that is grey after it; with image_dim (2.1), also a CLIP embedding of it.
    Source: pipelines/wan/pipeline_wan.py, pipeline_wan_i2v.py.
    """

    TEXT_LENGTH, IMAGE_LENGTH, MASK_CHANNELS = 512, 257, 4

    @property
    def takes_first_frame(self) -> bool:
        return self.image == "none"

    @property
    def channels(self) -> int:
        return int(self.config.get("out_channels") or self.config["in_channels"])

    @property
    def image(self) -> str:
        if int(self.config["in_channels"]) != 2 * self.channels + self.MASK_CHANNELS:
            return "none"
        return "latents" if self.image_dim is None else "encoder"

    @property
    def image_dim(self) -> int | None:
        return self.config.get("image_dim")

    def conditions(self, latents: Triple) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        if self.image != "none":
            shapes["image_latents"] = (self.channels, *latents)
        if self.image_dim is not None:
            shapes["encoder_hidden_states_image"] = (self.IMAGE_LENGTH, self.image_dim)
        return shapes

    def with_image(self, latents: Tensor, image_latents: Tensor) -> Tensor:
        b, _, *size = latents.shape
        mask = latents.new_zeros(b, self.MASK_CHANNELS, *size)
        mask[:, :, 0] = 1
        return torch.cat([latents, mask, image_latents], dim=1)

    @property
    def text_dim(self) -> int:
        return int(self.config["text_dim"])

    def arguments(self, latents: Tensor, timestep: Tensor, text: Tensor, mask: Tensor) -> Arguments:
        return {
            "hidden_states": latents,
            "timestep": self._per_token(latents, timestep),
            "encoder_hidden_states": padded(text, self.TEXT_LENGTH),
        }

    def _check(self) -> None:
        if self.config.get("pos_embed_seq_len") is not None:
            raise InputError(
                "Wan with pos_embed_seq_len takes the last frame as well as the first",
                "give the text-to-video or image-to-video model of the family",
            )
        if self.image == "none":
            super()._check()


class LTX(Family):
    """LTX-Video: tokens instead of a volume, positions in seconds and pixels.

    Velocity at t = 1000·sigma. Positions are scaled by (8/fps, 32, 32), the pixels and frames of
    one latent voxel. Image-to-video has one timestep per token, 0 on those of a given frame.
    Source: pipelines/ltx/pipeline_ltx.py, pipeline_ltx_image2video.py.
    """

    FPS = 25.0
    VOXEL = (8, 32, 32)

    @property
    def takes_first_frame(self) -> bool:
        return True

    @property
    def text_dim(self) -> int:
        return int(self.config["caption_channels"])

    def arguments(self, latents: Tensor, timestep: Tensor, text: Tensor, mask: Tensor) -> Arguments:
        t, h, w = self.VOXEL
        return {
            "hidden_states": latents.flatten(2).transpose(1, 2),  # [B, THW, C]
            "timestep": self._per_token(latents, timestep),
            "encoder_hidden_states": text,
            "encoder_attention_mask": mask,
            **dict(zip(("num_frames", "height", "width"), latents.shape[2:], strict=True)),
            "rope_interpolation_scale": (t / (self.fps or self.FPS), h, w),
        }

    def prediction(self, output: Tensor, latents: Tensor) -> Tensor:
        return output.transpose(1, 2).unflatten(2, latents.shape[2:])

    def _check(self) -> None:
        super()._check()
        if self.patch_size != (1, 1, 1):
            raise InputError(f"LTX with patch size {self.patch_size}", "only 1 is known")


class Cosmos(Family):
    """Cosmos-Predict2: EDM written as flow matching.

    The pipeline keeps x = x0 + s·e and, with t = s/(1 + s), gives the transformer (1 − t)·x and the
    time t, and reads x0 = (1 − t)·x − t·F. Since (1 − t)·x = (1 − t)·x0 + t·e, that is flow
    matching at sigma = t: the input is x_sigma, and F = (x_sigma − x0)/t = e − x0 the velocity. The
    time is sigma itself, without a factor of 1000. Text is zero-padded to 512 tokens.

    Video2World has one more input channel, which says which latent frames are given; a given frame
    has the time 1e-4/(1 + 1e-4). Source: pipelines/cosmos/pipeline_cosmos2_text2image.py and
    pipeline_cosmos2_video2world.py.
    """

    FPS = 16.0
    TEXT_LENGTH = 512
    GIVEN_TIME = 1e-4 / (1 + 1e-4)

    @property
    def takes_first_frame(self) -> bool:
        return int(self.config["in_channels"]) == self.channels + 1

    @property
    def channels(self) -> int:
        return int(self.config["out_channels"])

    def arguments(self, latents: Tensor, timestep: Tensor, text: Tensor, mask: Tensor) -> Arguments:
        time, given = self._time(latents, timestep / NUM_TRAIN_TIMESTEPS)
        condition = {"condition_mask": given.to(latents.dtype)} if self.takes_first_frame else {}
        return {
            "hidden_states": latents,
            "timestep": time,
            "encoder_hidden_states": padded(text, self.TEXT_LENGTH),
            "fps": self.fps or self.FPS,
            "padding_mask": latents.new_zeros(1, 1, *latents.shape[3:]),
            **condition,
        }

    def _time(self, latents: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Time [B] or [B, 1, T, 1, 1], and the mask [B, 1, T, H, W] of given frames."""
        mask = latents.new_zeros(len(latents), 1, *latents.shape[2:], dtype=torch.bool)
        if sigma.ndim == 1:
            return sigma, mask
        sigma = sigma[:, None, :, None, None]  # [B, 1, T, 1, 1]
        return sigma.clamp_min(self.GIVEN_TIME), mask | (sigma == 0)

    def _check(self) -> None:
        if self.config.get("extra_pos_embed_type") is not None:
            raise InputError(
                "Cosmos with learned positions is Cosmos 1, which is trained as EDM",
                "give a model of Cosmos-Predict2",
            )
        if not self.takes_first_frame:
            super()._check()
        if self.config.get("concat_padding_mask", True):
            from diffusers.models.transformers import transformer_cosmos

            if not hasattr(transformer_cosmos, "transforms"):
                raise ImportError("Cosmos needs torchvision: pip install torchvision")


class HunyuanVideo(Family):
    """HunyuanVideo: velocity at t = 1000·sigma; the guidance scale is an input, times 1000.

    Besides the tokens of one text encoder it takes the pooled embedding of another, as
    `pooled_projections`. Source: pipelines/hunyuan_video/pipeline_hunyuan_video.py.
    """

    @property
    def pooled_dim(self) -> int | None:
        return int(self.config["pooled_projection_dim"])

    def conditions(self, latents: Triple) -> dict[str, tuple[int, ...]]:
        return {"pooled_projections": (int(self.config["pooled_projection_dim"]),)}

    def arguments(self, latents: Tensor, timestep: Tensor, text: Tensor, mask: Tensor) -> Arguments:
        guided = bool(self.config.get("guidance_embeds"))
        scale = 1000.0 * self.guidance
        return {
            "hidden_states": latents,
            "timestep": timestep,
            "encoder_hidden_states": text,
            "encoder_attention_mask": mask.to(latents.dtype),
            "guidance": latents.new_full((len(latents),), scale) if guided else None,
        }

    def _check(self) -> None:
        super()._check()
        if (condition := self.config.get("image_condition_type")) is not None:
            raise InputError(
                f"HunyuanVideo with image_condition_type={condition!r} is image-to-video",
                "give the text-to-video model of the family",
            )


class HunyuanVideo15(Family):
    """HunyuanVideo 1.5, text to video: velocity at t = 1000·sigma.

    Beside the latents stand as many channels of a condition on an image and one that says where it
    is given: zero here. Embeddings of an image, zero, and of text in quotation marks (by ByT5; no
    caption has any here) are masked in every attention, so one token of each stands for the
    pipeline's 729 and 256. Source: pipelines/hunyuan_video1_5/pipeline_hunyuan_video1_5.py.
    """

    @property
    def channels(self) -> int:
        return int(self.config["out_channels"])

    def arguments(self, latents: Tensor, timestep: Tensor, text: Tensor, mask: Tensor) -> Arguments:
        count, absent = len(latents), torch.zeros_like(latents)
        return {
            "hidden_states": torch.cat([latents, absent, absent[:, :1]], dim=1),
            "timestep": timestep,
            "encoder_hidden_states": text,
            "encoder_attention_mask": mask.to(latents.dtype),
            "encoder_hidden_states_2": text.new_zeros(count, 1, self.config["text_embed_2_dim"]),
            "encoder_attention_mask_2": latents.new_zeros(count, 1),
            "image_embeds": latents.new_zeros(count, 1, self.config["image_embed_dim"]),
        }

    def _check(self) -> None:
        given, wanted = int(self.config["in_channels"]), 2 * self.channels + 1
        if given != wanted:
            raise InputError(
                f"HunyuanVideo 1.5 with in_channels={given}, out_channels={self.channels}; "
                f"{wanted} are known",
                "give the text-to-video model of the family",
            )
        if self.config.get("use_meanflow"):
            raise InputError(
                "HunyuanVideo 1.5 with use_meanflow is trained on pairs of times",
                "give the text-to-video model that is not distilled",
            )
        if (task := self.config.get("task_type")) != "t2v":
            raise InputError(
                f"HunyuanVideo 1.5 with task_type={task!r} takes embeddings of an image",
                "give the text-to-video model of the family",
            )


class CogVideoX(Family):
    """CogVideoX 1.0 and 1.5: frames before channels, whole timesteps, v of a DDPM schedule.

    The rotary table is an argument, made for this size: 1.0 resizes the grid of its training size
    to it, 1.5 takes a slice. Text has exactly `max_text_seq_length` tokens. Source:
    pipelines/cogvideo/pipeline_cogvideox.py.
    """

    def arguments(self, latents: Tensor, timestep: Tensor, text: Tensor, mask: Tensor) -> Arguments:
        rotary = bool(self.config.get("use_rotary_positional_embeddings"))
        return {
            "hidden_states": latents.transpose(1, 2),  # [B, T, C, H, W]
            "timestep": timestep.round().long(),
            "encoder_hidden_states": padded(text, int(self.config["max_text_seq_length"])),
            "image_rotary_emb": self._rotary(latents) if rotary else None,
        }

    def prediction(self, output: Tensor, latents: Tensor) -> Tensor:
        return output.transpose(1, 2)

    def _rotary(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        from diffusers.models.embeddings import get_3d_rotary_pos_embed

        t, h, w = (n // p for n, p in zip(latents.shape[2:], self.patch_size, strict=True))
        base = [
            int(self.config[f"sample_{axis}"]) // self.patch_size[1] for axis in ("height", "width")
        ]
        options: Arguments = {"crops_coords": centred((h, w), (base[0], base[1]))}
        if self.config.get("patch_size_t") is not None:
            options = {"crops_coords": None, "grid_type": "slice", "max_size": tuple(base)}
        cos, sin = get_3d_rotary_pos_embed(
            embed_dim=int(self.config["attention_head_dim"]), grid_size=(h, w), temporal_size=t,
            device=latents.device, **options,
        )  # fmt: skip
        return cos, sin


class Mochi(Family):
    """Mochi 1: time runs backwards, from 0 at the noise to 1000 at the data.

    It is given 1000·(1 − sigma), and its scheduler (`invert_sigmas`) adds its output on the way to
    the data: the output is x0 − e, minus the velocity. Text has exactly `max_sequence_length`
    tokens, masked. Source: pipelines/mochi/pipeline_mochi.py.
    """

    def arguments(self, latents: Tensor, timestep: Tensor, text: Tensor, mask: Tensor) -> Arguments:
        length = int(self.config["max_sequence_length"])
        return {
            "hidden_states": latents,
            "timestep": NUM_TRAIN_TIMESTEPS - timestep,
            "encoder_hidden_states": padded(text, length),
            "encoder_attention_mask": padded(mask[..., None], length)[..., 0],
        }

    def prediction(self, output: Tensor, latents: Tensor) -> Tensor:
        return -output


FAMILIES: dict[str, type[Family]] = {
    "WanTransformer3DModel": Wan,
    "SkyReelsV2Transformer3DModel": Wan,
    "LTXVideoTransformer3DModel": LTX,
    "CosmosTransformer3DModel": Cosmos,
    "HunyuanVideoTransformer3DModel": HunyuanVideo,
    "HunyuanVideo15Transformer3DModel": HunyuanVideo15,
    "CogVideoXTransformer3DModel": CogVideoX,
    "MochiTransformer3DModel": Mochi,
}
"""By the class that config.json names."""


def family_of(class_name: str) -> type[Family]:
    """The family of a transformer's class.

    Raises:
        InputError: none is known; the class still streams from Python, in a loop of one's own.
    """
    if class_name in FAMILIES:
        return FAMILIES[class_name]
    known = (name.removesuffix("Transformer3DModel") for name in FAMILIES)
    raise InputError(
        f"{class_name}: how this family is trained is not known here",
        f"known are {', '.join(sorted(known))}; any other model trains in a loop of your own "
        "with megaslide.stream",
    )


def centred(
    size: tuple[int, int], base: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Corners of the largest centred rectangle of the aspect of `size` in a grid of `base`."""
    (h, w), (height, width) = size, base
    if h / w > height / width:
        inner = height, round(height / h * w)
    else:
        inner = round(width / w * h), width
    top, left = round((height - inner[0]) / 2), round((width - inner[1]) / 2)
    return (top, left), (top + inner[0], left + inner[1])
