"""Original names are those that diffusers' own importers turn into the names of diffusers."""

import pytest
import tiny_diffusers as tiny
from diffusers.loaders import single_file_utils

from megaslide.models.pretrained.original_keys import original_keys

IMPORTERS = {
    "wan": "convert_wan_transformer_to_diffusers",
    "wan-i2v": "convert_wan_transformer_to_diffusers",
    "ltx": "convert_ltx_transformer_checkpoint_to_diffusers",
}
PUBLISHED = {
    "wan": {
        "blocks.1.norm2.weight": "blocks.1.norm3.weight",
        "blocks.0.attn1.to_q.weight": "blocks.0.self_attn.q.weight",
        "blocks.0.attn2.to_out.0.bias": "blocks.0.cross_attn.o.bias",
        "blocks.0.ffn.net.0.proj.weight": "blocks.0.ffn.0.weight",
        "blocks.0.scale_shift_table": "blocks.0.modulation",
        "scale_shift_table": "head.modulation",
        "proj_out.weight": "head.head.weight",
        "condition_embedder.time_proj.weight": "time_projection.1.weight",
        "patch_embedding.weight": "patch_embedding.weight",
    },
    "wan-i2v": {
        "blocks.0.attn2.add_k_proj.weight": "blocks.0.cross_attn.k_img.weight",
        "condition_embedder.image_embedder.norm2.weight": "img_emb.proj.4.weight",
    },
    "ltx": {
        "proj_in.weight": "model.diffusion_model.patchify_proj.weight",
        "time_embed.linear.weight": "model.diffusion_model.adaln_single.linear.weight",
        "transformer_blocks.0.attn1.norm_q.weight":
            "model.diffusion_model.transformer_blocks.0.attn1.q_norm.weight",
    },
}  # fmt: skip
"""Some names as the published files have them, among them all that several rules could give."""


@pytest.mark.parametrize("name", IMPORTERS)
def test_diffusers_imports_them_as_its_own(name: str) -> None:
    model = tiny.build(name)
    state = model.state_dict()
    names = original_keys(type(model).__name__, state)
    assert len(set(names.values())) == len(state)
    importer = getattr(single_file_utils, IMPORTERS[name])
    imported = importer({names[key]: tensor for key, tensor in state.items()})
    assert imported.keys() == state.keys()
    for key, tensor in imported.items():
        assert tensor.data_ptr() == state[key].data_ptr(), key
    assert PUBLISHED[name].items() <= names.items()
