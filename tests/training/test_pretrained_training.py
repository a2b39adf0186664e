"""`megaslide train` on a diffusers folder: streamed, it is plain PyTorch training of that folder.

The oracle trains the model that diffusers loads, resident, with torch's AdamW on the same batches.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_diffusers as tiny
import tiny_pipelines
import torch
from plain_adamw import PlainAdamW
from torch import nn

import megaslide
from megaslide.config import AttentionConfig, Config, load_config, save_config
from megaslide.data.prepare import prepare
from megaslide.data.sprites import write_sprites
from megaslide.errors import InputError
from megaslide.models.network import FamilyDenoiser, network_of, pretrained_network
from megaslide.models.pretrained import find_source
from megaslide.models.pretrained.converted_folder import write_converted
from megaslide.planning.run import plan_run
from megaslide.sampling import sample_run
from megaslide.training.loop import train
from megaslide.training.trainer import Trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*smaller than the batch.*"),
    pytest.mark.filterwarnings("ignore:In CPU autocast"),
]
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "wan": {"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True, "flow_shift": 5.0},
    "ltx": {**FLOW, "use_dynamic_shifting": True},
    "cosmos2": FLOW,
    "cogvideox-rope": {
        "_class_name": "CogVideoXDDIMScheduler", "prediction_type": "v_prediction",
        "snr_shift_scale": 1.0, "rescale_betas_zero_snr": True,
    },
    "mochi": {**FLOW, "invert_sigmas": True},
    "skyreels": {"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True},
    "hunyuan": {**FLOW, "shift": 7.0},
    "hunyuan1.5": {**FLOW, "shift": 5.0},
    "wan-a14b-i2v": {"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True},
}  # fmt: skip
TEXT_DIMS = {"cogvideox-rope": 8}
CACHES = {
    "cogvideox-rope": "cache-of-other-text", "ltx": "cache-of-other-patches",
    "hunyuan": "cache-of-encoded-text", "wan-a14b-i2v": "cache-with-first-frames",
    "hunyuan1.5": "cache-of-single-voxels",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _resize() -> None:
    tiny.install_resize()


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "clips"
    write_sprites(root, count=8, frames=3, size=(64, 80), seed=3)
    return root


def pipeline(folder: Path, name: str) -> Path:
    tiny.write_pipeline(folder, name)
    (folder / "scheduler").mkdir()
    if name == "hunyuan":  # pooled embeddings come from pretrained encoders only
        tiny_pipelines.write_hunyuan_text(folder)
    values = SCHEDULERS.get(name, FLOW)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(values))
    return folder


def configure(root: Path, clips: Path, name: str, **changes: Any) -> Config:
    values = {
        "output_dir": root / "run",
        "model.pretrained_model_name_or_path": root / "pipeline",
        "data.path": clips,
        "data.cache_dir": clips.parent / CACHES.get(name, "cache"),
        "data.buckets": "[3x64x80]",
        "data.validation_split": 0.3,
        "data.codec.channels": tiny.C,
        **text_of(name),
        **({"data.image.name": "latents"} if name.endswith("i2v") else {}),
        "optim.learning_rate": 1e-3,
        "optim.adam_epsilon": 1e-2,
        "train.max_train_steps": 3,
        "train.train_batch_size": 2,
        "train.weighting_scheme": "none",
        "log.log_every": 1,
        "log.report_to": "none",
    }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    config = load_config(None, [f"{key}={value}" for key, value in values.items()])
    prepare(config.data, patch_size=pretrained_network(config).patch_size)
    return config


def text_of(name: str) -> dict[str, Any]:
    if name == "hunyuan":
        return {"data.text.name": "encoder"}
    return {"data.text.dim": TEXT_DIMS.get(name, tiny.TEXT), "data.text.max_length": 8}


def train_resident(config: Config, model: nn.Module) -> tuple[list[float], dict[str, Any]]:
    """The trainer's batches, noise and timesteps, but a resident model and torch's optimizer."""
    trainer = Trainer(plan_run(config))
    denoiser = FamilyDenoiser(
        family=trainer.network.family,
        model=model,
        dtype=torch.float32,  # type: ignore[union-attr]
    )
    optim = config.optim
    optimizer = PlainAdamW(
        model.parameters(), lr=optim.learning_rate, eps=optim.adam_epsilon,
        weight_decay=optim.adam_weight_decay,
    )  # fmt: skip
    losses = []
    for _ in range(config.train.max_train_steps):
        batch = trainer._next_batch()
        noise = torch.randn(batch.latents.shape, generator=trainer.generator)
        objective = trainer.objective(batch.latents)
        sigmas = objective.sample_sigmas(len(noise), trainer.generator)
        loss, _ = objective.loss(
            denoiser, batch.latents, noise, sigmas, **trainer._conditioning(batch)
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm or torch.inf)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    trainer.close()
    return losses, model.state_dict()


def logged(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_training_is_resident_training_and_diffusers_loads_the_result(
    name: str, clips: Path, tmp_path: Path
) -> None:
    import diffusers

    folder = pipeline(tmp_path / "pipeline", name)
    config = configure(tmp_path, clips, name)
    loader = getattr(diffusers, tiny.MODELS[name].class_name)
    model = loader.from_pretrained(folder, subfolder="transformer").train()
    losses, weights = train_resident(config, model)
    result = train(config)
    assert logged(tmp_path / "run") == pytest.approx(losses, rel=1e-6)
    saved = loader.from_pretrained(result.checkpoint, subfolder="transformer").state_dict()
    assert saved.keys() == weights.keys()
    for key, expected in weights.items():
        error = (saved[key] - expected).abs().max() / expected.abs().max()
        assert error <= 1e-6, f"{key}: {error:.1e}"
    assert json.loads((result.checkpoint / "scheduler/scheduler_config.json").read_text())


@pytest.mark.parametrize("name", ["wan", "ltx", "cosmos2"])
def test_a_converted_model_trains_as_it_does_resident(
    name: str, clips: Path, tmp_path: Path
) -> None:
    pipeline(tmp_path / "dense", name)
    settings = AttentionConfig(kind="deformable", window=(2, 3, 3))
    write_converted(find_source(str(tmp_path / "dense")), tmp_path / "pipeline", settings)
    config = configure(tmp_path, clips, name)
    model = megaslide.load(tmp_path / "pipeline").train()
    losses, weights = train_resident(config, model)
    result = train(config)
    assert logged(tmp_path / "run") == pytest.approx(losses, rel=1e-6)
    saved = megaslide.load(result.checkpoint).state_dict()
    assert saved.keys() == weights.keys()
    assert any(".dsa.offsets.proj" in key and t.any() for key, t in saved.items())
    for key, expected in weights.items():
        error = (saved[key] - expected).abs().max() / expected.abs().max()
        assert error <= 1e-5, f"{key}: {error:.1e}"


def test_a_run_that_converts_resumes_and_samples(clips: Path, tmp_path: Path) -> None:
    pipeline(tmp_path / "pipeline", "wan")
    options = {"attention__kind": "deformable", "attention__window": "[1,3,3]"}
    whole = train(configure(tmp_path, clips, "wan", train__checkpointing_steps=1, **options))
    again = {**options, "output_dir": tmp_path / "again"}
    first = whole.checkpoint.parent / "checkpoint-1"
    resumed = train(configure(tmp_path, clips, "wan", train__resume_from_checkpoint=first, **again))
    want, got = (megaslide.load(r.checkpoint).state_dict() for r in (whole, resumed))
    assert any(".dsa." in key for key in want)
    assert all(torch.equal(got[key], tensor) for key, tensor in want.items())
    fast = {"num_inference_steps": 2}
    assert sample_run(whole.checkpoint, prompts=("digit 3",), out=tmp_path / "a", settings=fast)
    other = {**again, "output_dir": tmp_path / "other", "attention__window": "[3,3,3]"}
    config = configure(tmp_path, clips, "wan", train__resume_from_checkpoint=first, **other)
    with pytest.raises(InputError, match=r"attention\.window=\(1, 3, 3\), this run has"):
        train(config)


@pytest.mark.parametrize("name", ["wan", "ltx", "cosmos2-v2w"])
def test_a_given_first_frame_and_bf16(name: str, clips: Path, tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "pipeline", name)
    options = {"train__first_frame": "given", "train__mixed_precision": "bf16"}
    result = train(configure(tmp_path, clips, name, **options))
    assert all(torch.isfinite(torch.tensor(logged(folder.parent / "run"))))
    assert result.validation is not None


def test_a_trained_run_samples(clips: Path, tmp_path: Path) -> None:
    pipeline(tmp_path / "pipeline", "wan")
    result = train(configure(tmp_path, clips, "wan"))
    fast = {"num_inference_steps": 2}
    paths = sample_run(result.checkpoint, prompts=("digit 3",), out=tmp_path / "a", settings=fast)
    assert [path.name for path in paths] == ["00_digit-3.mp4"]


def test_a_model_with_one_time_for_all_frames_takes_no_image(clips: Path, tmp_path: Path) -> None:
    pipeline(tmp_path / "pipeline", "mochi")
    result = train(configure(tmp_path, clips, "mochi", train__max_train_steps=1))
    with pytest.raises(InputError, match=r"images: Mochi.* has one timestep"):
        sample_run(result.checkpoint, prompts=("x",), settings={"images": ("a.png",)})


def test_an_expert_trains_on_its_noise_levels_and_does_not_sample(
    clips: Path, tmp_path: Path
) -> None:
    folder = pipeline(tmp_path / "pipeline", "wan")
    (folder / "transformer").rename(folder / "transformer_2")
    (folder / "model_index.json").write_text(json.dumps({"boundary_ratio": 0.875}))
    config = configure(tmp_path, clips, "wan", model__subfolder="transformer_2")
    result = train(config)
    state = json.loads((result.checkpoint / "trainer_state.json").read_text())
    assert state["sigma_range"] == [0.0, 0.875]
    with pytest.raises(InputError, match=r"expert for noise levels 0 to 0\.875"):
        sample_run(result.checkpoint, prompts=("x",), out=tmp_path / "samples")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data.codec.channels": 5}, "takes 4 latent channels, data.codec makes 5"),
        ({"data.text.dim": 5}, "takes text of 16 channels, data.text makes 5"),
        ({"train.first_frame": "given"}, "has one timestep for all frames"),
    ],
)
def test_inputs_of_another_model_are_refused(
    change: dict[str, Any], words: str, clips: Path, tmp_path: Path
) -> None:
    pipeline(tmp_path / "pipeline", "mochi")
    base = configure(tmp_path, clips, "mochi")
    overrides = [f"{key}={value}" for key, value in change.items()]
    save_config(base, tmp_path / "config.yaml")
    with pytest.raises(InputError, match=words):
        train(load_config(tmp_path / "config.yaml", overrides))


def test_a_model_without_its_scheduler_is_refused(clips: Path, tmp_path: Path) -> None:
    tiny.write_pipeline(tmp_path / "pipeline", "wan")
    with pytest.raises(InputError, match=r"scheduler_config\.json: no such file"):
        train(configure(tmp_path, clips, "wan"))


@pytest.mark.parametrize(
    ("name", "words"),
    [("kandinsky5", "not known here"), ("hunyuan-i2v", "condition on images"),
     ("wan-i2v", "as latents and as an image encoder's embedding"), ("cosmos", "Cosmos 1"),
     ("hunyuan", "pooled text embedding: one of 8 channels; data.text makes none")],
)  # fmt: skip
def test_models_that_need_more_are_refused(name: str, words: str, tmp_path: Path) -> None:
    tiny.write_pipeline(tmp_path, name)
    config = load_config(None, [f"model.pretrained_model_name_or_path={tmp_path}"])
    with pytest.raises(InputError, match=words):
        network_of(config, channels=tiny.C, text_dim=tiny.TEXT)
