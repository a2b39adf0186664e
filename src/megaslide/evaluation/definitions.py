"""What every number of `megaslide eval` means and where its definition comes from.

One table serves the terminal, the JSON and the page, so that no figure is ever shown without them.
A name that begins with `vbench.` is what the official code computes; a stand-in has a name of its
own (`proxy.`), because two different computations under one name cannot be compared.
"""

from dataclasses import dataclass

VBENCH = "VBench (Huang et al. 2024)"
LAI = "Lai et al. 2018, Learning Blind Video Temporal Consistency"
OURS = "megaslide"
STILL = ("frozen", "static", "blurred")
"""Flags of clips that measures of consistency would reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One figure: what it is, in words and symbols, and who defined it."""

    text: str
    source: str
    better: str = ""
    """`high`, `low`, or empty where neither is better by itself."""
    left_out: tuple[str, ...] = ()
    """Flags whose clips are not in the mean, since they win by what the flag says."""
    digits: int = 4
    """Decimals shown; the JSON has them all."""


DEFINITIONS: dict[str, Definition] = {
    "vbench.temporal_flickering": Definition(
        text="(255 - mean |f_t - f_(t+1)|) / 255 over 8-bit frames, fp32 means; without the "
        "official protocol's removal of moving clips",
        source=f"{VBENCH}, temporal_flickering.py",
        better="high",
        left_out=STILL,
        digits=7,
    ),
    "vbench.subject_consistency": Definition(
        text="mean of the cosines of DINO ViT-B/16 features to the previous and first frame",
        source=f"{VBENCH}, official package",
        better="high",
        left_out=STILL,
    ),
    "vbench.background_consistency": Definition(
        text="mean of the cosines of CLIP ViT-B/32 features to the previous and first frame",
        source=f"{VBENCH}, official package",
        better="high",
        left_out=STILL,
    ),
    "vbench.motion_smoothness": Definition(
        text="(255 - mean |f_t - g_t|) / 255, g the odd frames as AMT-S interpolates them",
        source=f"{VBENCH}, official package",
        better="high",
        left_out=STILL,
    ),
    "vbench.dynamic_degree": Definition(
        text="share of clips that move: RAFT, top 5 % of flow above 6 min(H, W) / 256",
        source=f"{VBENCH}, official package",
    ),
    "vbench.aesthetic_quality": Definition(
        text="LAION aesthetic head on CLIP ViT-L/14 features, mean over frames, / 10",
        source=f"{VBENCH}, official package",
        better="high",
    ),
    "vbench.imaging_quality": Definition(
        text="MUSIQ (SPAQ), mean over frames, / 100",
        source=f"{VBENCH}, official package",
        better="high",
    ),
    "vbench.overall_consistency": Definition(
        text="cosine of the ViCLIP features of clip and prompt",
        source=f"{VBENCH}, official package",
        better="high",
    ),
    **{
        f"vbench.{dimension}": Definition(text=text, source=f"{VBENCH}, official package")
        for dimension, text in {
            "object_class": "share of frames in which GRiT finds the object of the prompt",
            "multiple_objects": "share of frames in which GRiT finds both objects",
            "color": "share of frames in which GRiT's caption has the colour",
            "spatial_relationship": "score of the relative position of two objects by GRiT",
            "scene": "share of clips whose Tag2Text caption has the words of the scene",
            "appearance_style": "CLIP ViT-B/32 similarity of frames and the style's name",
            "temporal_style": "as overall_consistency, on VBench's prompts of camera and style",
            "human_action": "share of clips in which UMT recognises the action of the file name",
        }.items()
    },
    "temporal_consistency": Definition(
        text="mean of vbench.subject_consistency, background_consistency, temporal_flickering and "
        "motion_smoothness, raw; read it beside vbench.dynamic_degree",
        source=f"{OURS}: VBench's temporal quality without dynamic_degree",
        better="high",
        left_out=STILL,
    ),
    "text_video_alignment": Definition(
        text="vbench.overall_consistency",
        source=f"{OURS}: another name, as papers use it",
        better="high",
    ),
    "flow.warp_error": Definition(
        text="mean over pairs of mean_M (f_t - warp(f_(t+1), F))^2, f in [0, 1], M the visible "
        "pixels, F by OpenCV DIS (medium) at a shorter side of 256 at most",
        source=f"{LAI}; there F is FlowNet2",
        better="low",
        left_out=(*STILL, "occluded"),
        digits=6,
    ),
    "flow.visible_fraction": Definition(
        text="mean share of pixels in M: inside, and |F + B(x+F)|^2 < 0.01 (|F|^2 + |B|^2) + 0.5, "
        "B the flow backwards; hiding pixels lowers warp_error",
        source=f"Sundaram et al. 2010, as used in {LAI}",
    ),
    "flow.magnitude": Definition(
        text="mean length of the flow between successive frames, in pixels of the clip",
        source=f"{OURS}, OpenCV DIS",
        digits=3,
    ),
    "proxy.dynamic_degree_dis": Definition(
        text="share of clips that move by VBench's rule at 8 fps (top 5 % of flow above "
        "6 min(H, W) / 256 in round(N / 4) of N frames, at least 1), DIS in place of RAFT",
        source=f"{OURS}, after {VBENCH}",
        digits=2,
    ),
    "image.sharpness": Definition(
        text="variance of the 4-neighbour Laplacian of luma (0 to 255), mean over frames at "
        "about 8 fps",
        source="Pech-Pacheco et al. 2000",
        digits=1,
    ),
    "image.blur": Definition(
        text="blur effect: 1 - the share of neighbour differences that a 9-pixel mean removes, "
        "the larger of the two axes, mean over frames at about 8 fps; 0 sharp, 1 blurred",
        source="Crete et al. 2007, The Blur Effect",
        better="low",
    ),
    "motion.path_residual": Definition(
        text="rms distance in pixels of the tracked digit from the best path of constant velocity "
        "with reflections at the walls",
        source=f"{OURS}, moving digits",
        better="low",
        left_out=STILL,
        digits=3,
    ),
    "motion.speed": Definition(
        text="speed of that path, pixels per frame",
        source=f"{OURS}, moving digits",
        digits=3,
    ),
    "motion.direction_cos": Definition(
        text="cosine between the path's first velocity and the caption's direction; 0 below "
        "0.25 pixels per frame",
        source=f"{OURS}, moving digits",
        better="high",
        digits=3,
    ),
    "motion.direction_agrees": Definition(
        text="share of clips whose first velocity is within 22.5 degrees of the caption's "
        "direction, at 0.25 pixels per frame or more",
        source=f"{OURS}, moving digits",
        better="high",
        digits=2,
    ),
    "motion.presence": Definition(
        text="share of frames in which a digit is seen at all",
        source=f"{OURS}, moving digits",
        better="high",
        digits=3,
    ),
    "motion.ident": Definition(
        text="share of frames in which 3 nearest neighbours among scikit-learn's digits give the "
        "digit of the caption or the reference",
        source=f"{OURS}, moving digits",
        better="high",
        digits=3,
    ),
    "motion.pos_err": Definition(
        text="mean |Q - P|: tracked against known position, pixels",
        source=f"{OURS}, known motion of --reference",
        better="low",
        digits=3,
    ),
    "motion.vel_err": Definition(
        text="mean |dQ - dP|: tracked against known velocity, pixels per frame",
        source=f"{OURS}, known motion of --reference",
        better="low",
        digits=3,
    ),
    "motion.vel_rel": Definition(
        text="vel_err / mean |dP|; a frozen clip has 1",
        source=f"{OURS}, known motion of --reference",
        better="low",
        digits=3,
    ),
    "motion.ncc": Definition(
        text="normalised cross-correlation of each frame with the reference's digit at the tracked "
        "position, mean over frames",
        source=f"{OURS}, known motion of --reference",
        better="high",
        digits=3,
    ),
}  # fmt: skip

OF_CHECKPOINT: dict[str, Definition] = {
    "eval/loss": Definition(
        text="the training objective on held-out latents, at fixed timesteps with fixed noise; of "
        "averaged weights where the checkpoint has them",
        source=f"{OURS}: as training logs it",
        better="low",
    ),
    "eval/loss_of_zero": Definition(
        text="the same loss of predicting zero, to compare with",
        source=OURS,
    ),
    "eval/samples": Definition(
        text="held-out samples in both; the last batch is filled with some of them again",
        source=f"{OURS}: train.validation_batches",
        digits=0,
    ),
}
"""Figures of a model rather than of clips."""

FLAGS: dict[str, str] = {
    "frozen": "at least half of the successive frames differ by less than 0.1 of 255 on average",
    "static": "hardly moves: VBench's filter for static clips, DIS in place of RAFT (top 2 % of "
    "flow above 3 min(H, W) / 256 in at most round(N / 8) of N frames at 8 fps)",
    "blurred": "image.blur above 0.65, or image.sharpness below half of the reference clip's",
    "occluded": "flow.visible_fraction below 0.7: cuts or flow that fails make warp_error too low",
}
"""Why a clip's good figures are not believed."""
