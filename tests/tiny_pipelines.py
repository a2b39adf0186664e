"""Tiny pipelines as folders: real autoencoders, text encoders and tokenizers with random weights.

No hub is needed: the tokenizer is made here from a few words, the rest from configs of a few
thousand parameters. Every statistic differs from its neutral value, so that one that is forgotten
shows.
"""

import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tiny_diffusers as tiny
import torch
from torch import Tensor, nn

MEAN, STD = [0.3, -0.2, 0.1, 0.5], [0.7, 1.4, 1.1, 0.4]
WORDS = "a the red blue kite sea over digit moves left right up down fast 0 1 2 3 4 5 6 7 8 9 & <"

VAES: dict[str, dict[str, Any]] = {
    "AutoencoderKLWan": {
        "base_dim": 4, "z_dim": tiny.C, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1,
        "temperal_downsample": [False, True, True], "latents_mean": MEAN, "latents_std": STD,
    },
    "AutoencoderKLLTXVideo": {
        "latent_channels": tiny.C, "block_out_channels": (8, 8, 8, 8),
        "decoder_block_out_channels": (8, 8, 8, 8), "layers_per_block": (1, 1, 1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1, 1, 1),
        "spatio_temporal_scaling": (True, True, False, False),
        "decoder_spatio_temporal_scaling": (True, True, False, False), "patch_size": 2,
        "scaling_factor": 0.8,
    },
    "AutoencoderKLCogVideoX": {
        "down_block_types": ("CogVideoXDownBlock3D",) * 4,
        "up_block_types": ("CogVideoXUpBlock3D",) * 4, "block_out_channels": (8, 8, 8, 8),
        "latent_channels": tiny.C, "layers_per_block": 1, "norm_num_groups": 2,
        "scaling_factor": 0.7,
    },
    "AutoencoderKLHunyuanVideo": {
        "latent_channels": tiny.C, "block_out_channels": (8, 8, 8, 8), "layers_per_block": 1,
        "norm_num_groups": 4, "scaling_factor": 0.476986,
    },
    "AutoencoderKLHunyuanVideo15": {
        "latent_channels": tiny.C, "block_out_channels": (8, 8, 8, 8, 8), "layers_per_block": 1,
        "scaling_factor": 1.03682,
    },
    "AutoencoderKLMochi": {
        "latent_channels": tiny.C, "encoder_block_out_channels": (32, 32, 32, 32),
        "decoder_block_out_channels": (32, 32, 32, 32), "layers_per_block": (1, 1, 1, 1, 1),
        "latents_mean": MEAN, "latents_std": STD, "scaling_factor": 0.9,
    },
}  # fmt: skip
BLOCKS = {
    "AutoencoderKLWan": (4, 8, 8), "AutoencoderKLLTXVideo": (4, 8, 8),
    "AutoencoderKLCogVideoX": (4, 8, 8), "AutoencoderKLHunyuanVideo": (4, 8, 8),
    "AutoencoderKLHunyuanVideo15": (4, 16, 16), "AutoencoderKLMochi": (6, 8, 8),
}  # fmt: skip


def write_vae(root: Path, class_name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """Save a tiny autoencoder as `root/vae`; returns it. `changes` are to its config."""
    import diffusers

    torch.manual_seed(seed)
    vae: nn.Module = getattr(diffusers, class_name)(**{**VAES[class_name], **changes})
    if class_name == "AutoencoderKLLTXVideo":
        vae.latents_mean = torch.tensor(MEAN)
        vae.latents_std = torch.tensor(STD)
    vae.save_pretrained(root / "vae")
    return vae.eval()


def write_text(
    root: Path, *, kind: str = "T5", width: int = tiny.TEXT, inner: int = 16, layers: int = 2
) -> tuple[Any, nn.Module]:
    """Save a tokenizer and a tiny encoder as `root/tokenizer` and `root/text_encoder`."""
    import transformers

    tokenizer = _tokenizer()
    tokenizer.save_pretrained(root / "tokenizer")
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, d_model=width, d_kv=4, d_ff=inner, num_layers=layers, num_heads=2
    )
    encoder: nn.Module = getattr(transformers, f"{kind}EncoderModel")(config)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.normal_(0, 0.3)
    encoder.save_pretrained(root / "text_encoder")
    return tokenizer, encoder.eval()


def write_hunyuan_text(root: Path, *, inner: int = 16, layers: int = 4) -> tuple[Any, ...]:
    """Save a tiny Llama and a tiny CLIP with tokenizers; returns (tokenizer, encoder) of each."""
    import transformers

    tokenizers = _llama_tokenizer(), _tokenizer()
    torch.manual_seed(2)
    sizes = {"intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 2}
    llama = transformers.LlamaModel(
        transformers.LlamaConfig(vocab_size=128, hidden_size=tiny.TEXT, **sizes)
    )
    clip = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=64, hidden_size=tiny.POOLED, bos_token_id=0, eos_token_id=1, **sizes
        )
    )
    for model, tokenizer, suffix in zip((llama, clip), tokenizers, ("", "_2"), strict=True):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
        model.save_pretrained(root / f"text_encoder{suffix}")
        tokenizer.save_pretrained(root / f"tokenizer{suffix}")
    return tokenizers[0], llama.eval(), tokenizers[1], clip.eval()


def write_hunyuan15_text(root: Path) -> tuple[Any, nn.Module]:
    """Save a tiny Qwen with its tokenizer, as `write_text` does."""
    import transformers

    tokenizer = _qwen_tokenizer()
    tokenizer.save_pretrained(root / "tokenizer")
    torch.manual_seed(3)
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 256, "hidden_size": tiny.TEXT, "intermediate_size": 16,
            "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
            "bos_token_id": 1, "eos_token_id": 1,
            "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]},
        },
    ).text_config  # fmt: skip
    encoder: nn.Module = transformers.Qwen2_5_VLTextModel(config)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.normal_(0, 0.3)
    encoder.save_pretrained(root / "text_encoder")
    return tokenizer, encoder.eval()


def write_image_encoder(root: Path) -> tuple[Any, nn.Module]:
    """Save a tiny CLIP vision model and its processor; returns (processor, encoder)."""
    import transformers

    side = {"height": 8, "width": 8}
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=side)
    processor.save_pretrained(root / "image_processor")
    torch.manual_seed(4)
    encoder: nn.Module = transformers.CLIPVisionModel(
        transformers.CLIPVisionConfig(
            hidden_size=tiny.TEXT, intermediate_size=16, num_hidden_layers=3, patch_size=4,
            num_attention_heads=2, image_size=8,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.normal_(0, 0.3)
    encoder.save_pretrained(root / "image_encoder")
    return processor, encoder.eval()


def write_scheduler(root: Path, values: dict[str, Any]) -> None:
    (root / "scheduler").mkdir(parents=True)
    (root / "scheduler" / "scheduler_config.json").write_text(json.dumps(values))


def frames(count: int, height: int, width: int, *, batch: int = 1, seed: int = 0) -> Tensor:
    """Smooth pixels `[B, 3, T, H, W]` in [-1, 1]."""
    coarse = tiny.random(batch, 3, max(2, count // 2), height // 8, width // 8, seed=seed)
    return nn.functional.interpolate(coarse, (count, height, width), mode="trilinear").tanh()


def _tokenizer() -> Any:
    from tokenizers import pre_tokenizers, processors

    ending = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return _of_words(WORDS.split(), pre_tokenizers.WhitespaceSplit(), ending)


def _llama_tokenizer() -> Any:
    """Cuts HunyuanVideo's template such that a caption begins where the pipeline expects it."""
    from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video
    from tokenizers import Regex, pre_tokenizers

    template = pipeline_hunyuan_video.DEFAULT_PROMPT_TEMPLATE
    pattern = r"<\|\w+\|>|\n\n|\w{1,12}|[^\w\s]"
    split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    beginning, _, end = template["template"].partition("{}")
    words, rest = ([w for w, _ in split.pre_tokenize_str(part)] for part in (beginning, end))
    assert len(words) == template["crop_start"]
    return _of_words(dict.fromkeys([*words, *rest, *WORDS.split()]), split)


def _qwen_tokenizer() -> Any:
    """Its conversations have as many tokens before a caption as the pipeline cuts off."""
    from diffusers import HunyuanVideo15Pipeline
    from tokenizers import Regex, pre_tokenizers

    method = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters
    message, crop = method["system_message"].default, method["crop_start"].default
    split = pre_tokenizers.Split(Regex(r"<\|\w+\|>|\w+|[^\w\s]"), "removed", invert=True)
    words = [word for word, _ in split.pre_tokenize_str(message)]
    tokenizer = _of_words(dict.fromkeys(["<|s|>", "<|e|>", *words, *WORDS.split()]), split)
    tokenizer.chat_template = (
        "<|s|>" * (crop - len(words)) + "{{ messages[0].content }}{{ messages[1].content }}"
        "<|e|>{% if add_generation_prompt %}<|s|>{% endif %}"
    )
    return tokenizer


def _of_words(words: Iterable[str], split: Any, ending: Any = None) -> Any:
    import transformers
    from tokenizers import Tokenizer, models

    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2}
    vocabulary |= {word: 3 + number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = split
    if ending is not None:
        tokenizer.post_processor = ending
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
