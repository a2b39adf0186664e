"""The configuration: what is read, what is refused and how, and that saving loses nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from megaslide.config import Config, load_config, parse_triple, save_config
from megaslide.data.codecs import build_codec
from megaslide.errors import InputError
from megaslide.models.presets import resolve_config

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its field."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def refusal(path: Path | None, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_example_describes_a_model_that_takes_its_clips(path: Path) -> None:
    config = load_config(path)
    codec = build_codec(config.data.codec)
    sizes = {"in_channels": codec.channels, "text_dim": config.data.text.dim}
    patch = resolve_config(config.model, config.attention, **sizes).patch_size
    for bucket in config.data.buckets:
        voxels = codec.latent_shape(parse_triple(bucket))
        assert all(n % p == 0 for n, p in zip(voxels, patch, strict=True)), bucket


def test_there_are_examples() -> None:
    assert {"tiny.yaml", "finetune-folder.yaml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("text", ["", "# only a comment\n", "train: {}\n"])
def test_absent_values_are_the_defaults(text: str, tmp_path: Path) -> None:
    assert load_config(written(tmp_path, text)) == Config()


@pytest.mark.parametrize("key", [key for key, _ in keys()])
def test_every_key_is_explained(key: str) -> None:
    assert dict(keys())[key].description


def test_override_replaces_the_file_and_keeps_its_neighbours(tmp_path: Path) -> None:
    path = written(tmp_path, "optim:\n  learning_rate: 0.1\n  adam_beta1: 0.5\n")
    config = load_config(path, ["optim.learning_rate=0.2"])
    assert (config.optim.learning_rate, config.optim.adam_beta1) == (0.2, 0.5)


def test_later_override_wins() -> None:
    assert load_config(None, ["train.seed=1", "train.seed=2"]).train.seed == 2


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.learning_rate=1e-5", 1e-5),
        ("optim.learning_rate=1E-5", 1e-5),
        ("optim.max_grad_norm=null", None),
        ("data.buckets=[8x64x64, 16x32x32]", ("8x64x64", "16x32x32")),
        ("data.path=a=b", "a=b"),
        ("data.path='2024'", "2024"),
        ("data.codec.name=pixel", "pixel"),
        ("attention.window=[3, 5, 5]", (3, 5, 5)),
        ("train.use_ema=true", True),
        ("train.mixed_precision=no", "no"),
        ("train.mixed_precision=bf16", "bf16"),
    ],
)
def test_override_is_read_as_yaml(override: str, expected: Any) -> None:
    value: Any = load_config(None, [override])
    for part in override.partition("=")[0].split("."):
        value = getattr(value, part)
    assert value == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.learning_rat=1", "did you mean 'optim.learning_rate'?"),
        ("optm.learning_rate=1", "did you mean 'optim'?"),
        ("data.codec.nme=dct", "did you mean 'data.codec.name'?"),
        ("log.zzz=1", "valid keys here: report_to, log_every"),
        ("optim.learning_rate", "has no '='"),
        ("optim.learning_rate=-1", "optim.learning_rate: Input should be greater than 0 (got -1)"),
        ("optim.learning_rate=.inf", "should be a finite number (got inf)"),
        ("train.logit_mean=.nan", "should be a finite number (got nan)"),
        ("attention.offset_range=[1, .inf, 3]", "should be a finite number (got inf)"),
        ("optim.learning_rate=[", "is not valid YAML"),
        ("output_dir.x=1", "output_dir"),
        ("train.max_train_steps=1.5", "train.max_train_steps"),
        ("attention.window=[3, 0, 3]", "has an axis below 1"),
        ("attention.kind=slide", "'deformable', 'neighborhood', 'swin' or 'dense'"),
        ("data.buckets=[8x64]", "'8x64' is not TxHxW"),
        ("data.buckets=[]", "buckets is empty"),
        ("data.codec.block=8x8", "'8x8' is not TxHxW"),
        ("sample.bucket=8x64x0", "'8x64x0' is not TxHxW"),
        ("train.mixed_precision=yes", "'no' or 'bf16' (got True)"),
        ("offload.slots=1", "greater than or equal to 2"),
        ("train.seed=4294967296", "train.seed: Input should be less than"),
        ("train.seed=-1", "train.seed: Input should be greater than or equal to 0"),
    ],
)
def test_refusal_names_the_key_and_what_is_accepted(override: str, message: str) -> None:
    text = refusal(None, override)
    assert message in text
    assert "\n\n" not in text


def test_groups_must_divide_heads() -> None:
    text = refusal(None, "model.num_attention_heads=6", "attention.offset_groups=4")
    assert "attention.offset_groups=4 does not divide model.num_attention_heads=6" in text


def test_all_faults_of_a_file_come_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, "train: {max_train_steps: 0}\nlog: {log_evry: 3}\n")
    text = refusal(path)
    assert text.startswith(f"{path}: ")
    assert "train.max_train_steps" in text
    assert "did you mean 'log.log_every'?" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "not valid YAML"),
        (b"- 1\n- 2\n", "the top level is a list, not sections"),
        (b"\xff\xfe\x00\x81", "not a text file"),
    ],
)
def test_damaged_file_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    text = refusal(path)
    assert str(path) in text
    assert message in text


def test_folder_instead_of_a_file_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith(f"{tmp_path}: Is a directory\n  fix: ")


def test_sections_cannot_be_changed_later() -> None:
    with pytest.raises(ValidationError):
        Config().train.seed = 3


OVERRIDES = st.fixed_dictionaries(
    {},
    optional={
        "output_dir": st.text(max_size=20),
        "optim": st.fixed_dictionaries(
            {"learning_rate": st.floats(1e-12, 1e3), "max_grad_norm": st.none() | st.just(0.5)}
        ),
        "sample": st.fixed_dictionaries({"prompts": st.lists(st.text(max_size=30), max_size=3)}),
        "attention": st.fixed_dictionaries(
            {"window": st.lists(st.integers(1, 9), min_size=3, max_size=3)}
        ),
    },
)


@settings(max_examples=30, deadline=None)
@given(values=OVERRIDES)
def test_saved_config_reads_back_unchanged(
    values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = Config.model_validate(values)
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    save_config(config, path)
    assert load_config(path) == config


def test_saved_config_is_plain_yaml(tmp_path: Path) -> None:
    save_config(Config(), tmp_path / "c.yaml")
    values = yaml.safe_load((tmp_path / "c.yaml").read_text())
    assert values["attention"]["window"] == [3, 3, 3]
    assert list(values) == list(Config.model_fields)


@pytest.mark.parametrize("text", ["8x64", "8x64x64x1", "0x8x8", "8X8X8", "8x-8x8", " 8x8x8", ""])
def test_triple_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not TxHxW"):
        parse_triple(text)


@settings(deadline=None)
@given(st.tuples(*[st.integers(1, 10_000)] * 3))
def test_triple_reads_back(triple: tuple[int, int, int]) -> None:
    assert parse_triple("x".join(map(str, triple))) == triple
