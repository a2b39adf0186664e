"""Names of tensors as the models' own repositories have them, which ComfyUI and others read.

The tensors are the same; only names differ. Each rule below undoes one of the renamings with which
diffusers imports such files (diffusers 0.42, `loaders/single_file_utils.py`,
`convert_wan_transformer_to_diffusers` and `convert_ltx_transformer_checkpoint_to_diffusers`).
"""

import re
from collections.abc import Iterable, Mapping

from megaslide.errors import InputError

_SWAPPED = {".norm2.": ".norm3.", ".norm3.": ".norm2."}
WAN = {
    r"^condition_embedder\.(time|text)_embedder\.linear_1\.": r"\1_embedding.0.",
    r"^condition_embedder\.(time|text)_embedder\.linear_2\.": r"\1_embedding.2.",
    r"^condition_embedder\.time_proj\.": "time_projection.1.",
    r"^condition_embedder\.image_embedder\.norm1\.": "img_emb.proj.0.",
    r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj\.": "img_emb.proj.1.",
    r"^condition_embedder\.image_embedder\.ff\.net\.2\.": "img_emb.proj.3.",
    r"^condition_embedder\.image_embedder\.norm2\.": "img_emb.proj.4.",
    r"^scale_shift_table$": "head.modulation",
    r"^proj_out\.": "head.head.",
    r"\.scale_shift_table$": ".modulation",
    r"\.ffn\.net\.0\.proj\.": ".ffn.0.",
    r"\.ffn\.net\.2\.": ".ffn.2.",
    r"\.attn1\.": ".self_attn.",
    r"\.attn2\.": ".cross_attn.",
    r"\.to_([qkv])\.": r".\1.",
    r"\.to_out\.0\.": ".o.",
    r"\.add_([kv])_proj\.": r".\1_img.",
    r"\.norm_added_k\.": ".norm_k_img.",
}
LTX = {
    r"^proj_in\.": "patchify_proj.",
    r"^time_embed\.": "adaln_single.",
    r"\.norm_([qk])\.": r".\1_norm.",
    "^": "model.diffusion_model.",  # last, as the others are anchored
}
LAYOUTS = {"WanTransformer3DModel": WAN, "LTXVideoTransformer3DModel": LTX}
"""By the class that config.json names."""


def original_keys(class_name: str, names: Iterable[str]) -> dict[str, str]:
    """Each tensor's name in diffusers to that in the original repository.

    Raises:
        InputError: a family whose names are not known, or converted attention, which the original
            code does not have.
    """
    if class_name not in LAYOUTS:
        raise InputError(
            f"{class_name}: the names of its original repository are not known here",
            f"known are {', '.join(sorted(LAYOUTS))}; export without --layout for diffusers",
        )
    found = {name: _renamed(name, LAYOUTS[class_name]) for name in names}
    if foreign := next((name for name in found if ".dsa." in name), None):
        raise InputError(
            f"{foreign}: converted attention has no name in the original repository",
            "export without --layout, and load it with megaslide.load",
        )
    return found


def _renamed(name: str, rules: Mapping[str, str]) -> str:
    if rules is WAN and name.startswith("blocks."):
        # The repositories count a block's norms in different orders.
        name = re.sub(r"\.norm[23]\.", lambda match: _SWAPPED[match.group()], name)
    for pattern, replacement in rules.items():
        name = re.sub(pattern, replacement, name)
    return name
