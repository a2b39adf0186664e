"""What a user mistakes for a pretrained model is refused by the command, by name and with a fix.

Each case is one mistake in an otherwise sound run, given to `megaslide train` as a user would.
"""

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_diffusers as tiny
import tiny_pipelines
from typer.testing import CliRunner, Result

from megaslide.cli import app
from megaslide.data.sprites import write_sprites

pytestmark = pytest.mark.filterwarnings("ignore:.*smaller than the batch.*")
SCHEDULER = {"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True}
WEIGHTS = "diffusion_pytorch_model"
MODEL = "model.pretrained_model_name_or_path"
COLUMNS, MOST_LINES = 80, 6


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "clips"
    write_sprites(root, count=3, frames=9, size=(64, 80), seed=3)
    return root


def write_pipeline(folder: Path, name: str = "wan") -> Path:
    tiny.write_pipeline(folder, name, shard_size="20KB")
    tiny_pipelines.write_scheduler(folder, SCHEDULER)
    return folder


def run(root: Path, clips: Path, *overrides: str, verb: str = "train") -> Result:
    values = {
        "output_dir": root / "run", MODEL: root / "pipeline", "data.path": clips,
        "data.cache_dir": root / "cache", "data.buckets": "[9x64x80]",
        "data.codec.channels": tiny.C, "data.text.dim": tiny.TEXT, "data.text.max_length": 8,
        "train.max_train_steps": 1, "log.report_to": "none",
    }  # fmt: skip
    (root / "config.yaml").write_text("{}")
    given = [f"{key}={value}" for key, value in values.items()]
    return CliRunner().invoke(app, [verb, str(root / "config.yaml"), *given, *overrides])


def refusal(root: Path, clips: Path, *overrides: str) -> str:
    """The message, as one line; that it is short where folders have short names is checked."""
    result = run(root, clips, *overrides)
    assert result.exit_code == 2, result.output
    message = result.output[result.output.index("error: ") :]
    assert "\n  fix: " in message
    shown = message.replace(str(root), "runs/wan")
    lines = [row for line in shown.splitlines() for row in textwrap.wrap(line, COLUMNS)]
    assert len(lines) <= MOST_LINES, shown
    return " ".join(message.split())


def a_missing_shard(folder: Path) -> str:
    shard = sorted((folder / "transformer").glob(f"{WEIGHTS}-00002-of-*.safetensors"))[0]
    shard.unlink()
    return f"{folder / 'transformer'}: files ['{shard.name}'] of the index are missing"


def a_missing_tensor(folder: Path) -> str:
    from safetensors.torch import load_file, save_file

    index = json.loads((folder / "transformer" / f"{WEIGHTS}.safetensors.index.json").read_text())
    name = "blocks.1.attn1.to_q.weight"
    shard = folder / "transformer" / index["weight_map"][name]
    tensors = load_file(shard)
    del tensors[name]
    save_file(tensors, shard)
    return name


def a_lora(folder: Path) -> str:
    adapter = folder / "pytorch_lora_weights.safetensors"
    adapter.write_bytes(b"")
    return f"{adapter}: a LoRA"


def an_unknown_family(folder: Path) -> str:
    file = folder / "transformer" / "config.json"
    values = json.loads(file.read_text()) | {"_class_name": "Kandinsky5Transformer3DModel"}
    file.write_text(json.dumps(values))
    return (
        f"{file.parent}: Kandinsky5Transformer3DModel: how this family is trained is not known here"
    )


def no_scheduler(folder: Path) -> str:
    file = folder / "scheduler" / "scheduler_config.json"
    file.unlink()
    return f"{file}: no such file"


@pytest.mark.parametrize(
    "damage", [a_missing_shard, a_missing_tensor, a_lora, an_unknown_family, no_scheduler]
)
def test_a_damaged_pipeline(damage: Callable[[Path], str], clips: Path, tmp_path: Path) -> None:
    words = damage(write_pipeline(tmp_path / "pipeline"))
    assert words in refusal(tmp_path, clips)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.subfolder=unet", "unet/config.json: no such file"),
        (f"{MODEL}=some-owner/some-model", "and the hub cannot be reached"),
        ("data.buckets=[9x8x8]", "data.buckets 9x8x8: size (9, 8, 8) is smaller than one patch"),
        ("data.text.name=encoder", "text_encoder: no such folder"),
        ("data.codec.name=vae", "vae: no such folder"),
    ],
)
def test_a_sound_pipeline_used_wrongly(
    override: str, words: str, clips: Path, tmp_path: Path
) -> None:
    write_pipeline(tmp_path / "pipeline")
    given = [override]
    if "name=encoder" in override:
        given += ["data.text.max_length=null", "data.text.dim=128"]
    if "name=vae" in override:
        given.append("data.codec.channels=48")
    assert words in refusal(tmp_path, clips, *given)


def test_a_single_file(clips: Path, tmp_path: Path) -> None:
    file = tmp_path / "wan2.1.safetensors"
    file.write_bytes(b"")
    message = refusal(tmp_path, clips, f"{MODEL}={file}")
    assert f"{file}: a single file, not a folder" in message


def test_latents_of_another_autoencoder(clips: Path, tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "pipeline")
    tiny_pipelines.write_vae(folder, "AutoencoderKLWan")
    own = ("data.codec.name=vae", "data.codec.channels=48")
    assert run(tmp_path, clips, *own, verb="prepare").exit_code == 0
    tiny_pipelines.write_vae(folder, "AutoencoderKLWan", seed=5)
    message = refusal(tmp_path, clips, *own)
    assert f"cache {tmp_path / 'cache'} was made with other settings: codec.files is" in message
