"""The command line: thin verbs over the library.

Each verb imports what it needs inside itself, so that `megaslide --help` answers at once and a
machine without the optional packages can still ask for help. Exit codes: 0 done, 2 the input
cannot be used (one message, no traceback), 130 interrupted. Only this folder prints.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from megaslide import runs
from megaslide.cli.convert import convert
from megaslide.cli.display import (
    Meter,
    console,
    count,
    grid,
    machine_grid,
    preset_table,
    print_json,
    rates_grid,
    status,
)
from megaslide.cli.evaluation import evaluate
from megaslide.cli.export import export
from megaslide.cli.model import describe_folder
from megaslide.cli.plan import plan
from megaslide.cli.refusals import Verbs, fail, writes_to
from megaslide.cli.sample import sample
from megaslide.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from megaslide.config import Config, Triple
    from megaslide.data.prepare import PrepareReport
    from megaslide.models.network import Network
    from megaslide.planning.run import RunPlan
    from megaslide.training.loop import TrainResult

STATE_BYTES_PER_PARAMETER = 12
"""Of bf16 training in the default format, for the table of presets."""
SHOWN_SKIPS = 10
SPLITS: tuple[Literal["train", "validation"], ...] = ("train", "validation")
PRESET_CHANNELS = {"in_channels": 16, "text_dim": 4096}
"""What the presets' names count with: the latents and the text of today's large models."""
PRESET_SIZES = ("num_layers", "hidden_size", "num_attention_heads")

app = typer.Typer(
    name="megaslide",
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Fine-tune video diffusion transformers that do not fit the GPU, on one workstation.",
    epilog="Each verb has its own --help. `megaslide demo` shows the whole thing on any machine.",
)
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; see configs/.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Values that replace the file's."),
]


def main() -> None:
    """Entry point of the console script."""
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        from megaslide.planning.hardware import package_version

        typer.echo(f"megaslide {package_version('megaslide') or '(not installed)'}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None: ...


# -- verbs ----------------------------------------------------------------------------------------


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for clips, run, samples and report.")] = Path(
        "demo-out"
    ),
) -> None:
    """See it all on made-up clips: train, sample, report.

    Needs no GPU and no download; takes minutes.
    """
    from megaslide.demo.report import summary_table
    from megaslide.demo.run import run_demo

    with writes_to(out):
        summary = run_demo(out, phase=Meter)
    console().print(summary_table(summary))
    typer.echo(f"report: {out / 'report.html'}")


@app.command()
def prepare(config_path: ConfigPath, overrides: Overrides = None) -> None:
    """Encode a folder of clips and captions into a cache of latents."""
    from megaslide.config import load_config

    config = load_config(config_path, overrides or ())
    with status("loading the codec"):
        patch_size = _resolve(config).patch_size
    _prepare(config, patch_size)


@app.command()
def train(config_path: ConfigPath, overrides: Overrides = None) -> None:
    """Fine-tune all parameters of a model on prepared clips.

    What does not fit this machine is refused first, with the shortfall.

    Prepares the clips where that was not done.

    Ctrl-C saves a checkpoint and stops; train.resume_from_checkpoint=latest continues from it.
    """
    from megaslide.config import load_config

    config = load_config(config_path, overrides or ())
    device = _device(config)
    with status("planning the run"):
        from megaslide.planning.run import plan_run
        from megaslide.training.loop import train_planned
        from megaslide.training.trainer import NonFiniteLossError

        planned = plan_run(config)
        # What this refuses, it refuses before the clips are prepared.
        runs.resume_source(Path(config.output_dir), config.train.resume_from_checkpoint)
    if not _is_prepared(config):
        _prepare(config, planned.network.patch_size)
    console().print(grid(_run_summary(planned, device)))
    try:
        with writes_to(Path(config.output_dir)), Meter("train") as meter:
            result = train_planned(planned, on_progress=meter)
    except NonFiniteLossError as error:
        fail(str(error), code=1)
    _report_training(result, [str(config_path), *(overrides or ())])


app.command()(sample)
app.command("eval")(evaluate)


@app.command()
def info(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="PATH", help="A model's folder; or the file that --json writes."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
    presets: Annotated[bool, typer.Option("--presets", help="Sizes of our own model.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="JSON schema of the config.")] = False,
    rates: Annotated[bool, typer.Option("--probe", help="Measure this machine; seconds.")] = False,
    disk: Annotated[Path, typer.Option(help="Folder whose disk --probe measures.")] = Path(),
) -> None:
    """Show this machine and what can run on it, or describe a model.

    `megaslide info --probe --json rates.json` keeps what was measured for a plan.
    """
    asked = [n for n, on in (("presets", presets), ("schema", schema), ("probe", rates)) if on]
    if len(asked) > 1:
        raise InputError(" and ".join(f"--{name}" for name in asked), "ask for one of them")
    if file is not None and file.is_dir() and not asked:
        return describe_folder(file, as_json)
    if file is not None and not as_json:
        raise InputError(f"{file}: what to do with it?", f"to write there: --json {file}")
    if file is not None and not file.absolute().parent.is_dir():
        raise InputError(f"{file}: its folder does not exist", "make it, or write elsewhere")
    value, shown = _information(asked[0] if asked else "machine", disk)
    if file is not None:
        with writes_to(file):
            file.write_text(json.dumps(value, indent=2) + "\n")
        typer.echo(f"written: {file}")
    elif as_json or shown is None:
        print_json(value)
    else:
        console().print(shown)


def _information(what: str, disk: Path) -> "tuple[Any, Table | None]":
    """The record, and how it looks on a screen, if not as JSON there too."""
    if what == "schema":
        from megaslide.config import Config

        return Config.model_json_schema(), None
    if what == "presets":
        with status("counting parameters"):
            rows = _presets()
        return rows, preset_table(rows)
    if what == "probe":
        with status("loading torch"):
            from megaslide.planning.rates import measure_rates
        with Meter("probe") as meter:
            rates = measure_rates(disk, progress=meter)
        return rates.to_dict(), rates_grid(rates)
    with status("reading the machine"):
        from megaslide.planning.hardware import probe

        machine = probe()
    return machine.to_dict(), machine_grid(machine)


app.command()(convert)
app.command()(export)
app.command()(plan)


# -- data and training ----------------------------------------------------------------------------


def _resolve(config: "Config") -> "Network":
    """The model's sizes: a bad combination is refused here, before hours of preparation."""
    from megaslide.data.codecs import build_codec
    from megaslide.data.first_frames import build_first_frames
    from megaslide.data.text import build_text_encoder
    from megaslide.models.network import network_of

    codec, text = build_codec(config.data.codec), build_text_encoder(config.data.text)
    images = build_first_frames(config.data, codec)
    return network_of(
        config, channels=codec.channels, text_dim=text.dim, pooled_dim=text.pooled_dim,
        image_dim=None if images is None else images.dim,
    )  # fmt: skip


def _is_prepared(config: "Config") -> bool:
    """Whether a cache was finished; whether it fits the configuration is the data set's to say."""
    from megaslide.data.cache import INDEX, read_index

    folder = Path(config.data.cache_dir)
    if not config.data.cache_dir or not (folder / INDEX).exists():
        return False
    return bool(read_index(folder).get("complete"))


def _prepare(config: "Config", patch_size: "Triple") -> None:
    from megaslide.data.prepare import prepare as prepare_data
    from megaslide.streaming.placement import encoder_placement

    place = encoder_placement(config.offload)
    with writes_to(Path(config.data.cache_dir)), Meter("prepare") as meter:
        report = prepare_data(config.data, patch_size=patch_size, place=place, progress=meter)
    _print_preparation(report)


def _print_preparation(report: "PrepareReport") -> None:
    buckets = ", ".join(f"{n} of {bucket}" for bucket, n in report.buckets.items())
    typer.echo(f"prepared {report.clips} clips, {report.reused} of them known: {buckets}")
    typer.echo(f"{report.train_samples} for training, {report.validation_samples} held out")
    for note in report.notes:
        typer.echo(f"note: {note}")
    for skip in report.skipped[:SHOWN_SKIPS]:
        typer.echo(f"skipped {skip.path}: {skip.reason}")
    if len(report.skipped) > SHOWN_SKIPS:
        more = len(report.skipped) - SHOWN_SKIPS
        typer.echo(f"skipped {more} more: see `skipped` in {report.cache_dir / 'index.json'}")


def _run_summary(planned: "RunPlan", device: str) -> dict[str, str]:
    from megaslide.data.latents import LatentDataset

    config, model = planned.config, planned.network
    folder, patch_size = Path(config.data.cache_dir), model.patch_size
    samples, held_out = (
        len(LatentDataset(folder, split, config.data, patch_size=patch_size)) for split in SPLITS
    )
    batch = config.train.train_batch_size * config.train.gradient_accumulation_steps
    at_once = config.offload.micro_batch_size or config.train.train_batch_size
    return {
        "model": f"{model.name}, {count(model.count_parameters())} parameters",
        "device": device,
        "batch": f"{batch} clips per step, micro-batches of {at_once}",
        "plan": str(planned),
        "data": f"{samples} samples, {held_out} held out",
        "length": f"{config.train.max_train_steps} steps",
        "output": config.output_dir,
    }


def _device(config: "Config") -> str:
    import torch

    from megaslide.streaming.placement import chosen_device

    device = chosen_device(config.offload)
    if device == "cuda":
        return f"cuda, {torch.cuda.get_device_name()}"
    return f"cpu, {torch.get_num_threads()} threads"


def _report_training(result: "TrainResult", arguments: list[str]) -> None:
    if not result.interrupted:
        typer.echo(f"finished at step {result.step}; checkpoint {result.checkpoint}")
        return
    resume = shlex.join(["megaslide", "train", *arguments, "train.resume_from_checkpoint=latest"])
    message = f"interrupted at step {result.step}; saved {result.checkpoint}\n  continue: {resume}"
    typer.echo(message, err=True)
    raise typer.Exit(130)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            help="adamw, adaptation, attention, disk, loading, memory, plan, streaming."
        ),
    ],
) -> None:
    """Measure this machine with a benchmark of the repository."""
    folder = Path(__file__).parents[3] / "benchmarks"
    known = sorted(path.stem.removeprefix("bench_") for path in folder.glob("bench_*.py"))
    if not known:
        raise InputError(f"{folder}: no benchmarks here", "run it from a clone of the repository")
    if name not in known:
        raise InputError(f"no benchmark {name!r}", f"choose one of {', '.join(known)}")
    command = [sys.executable, str(folder / f"bench_{name}.py"), *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def _presets() -> list[dict[str, Any]]:
    """Each preset's sizes, counted on the meta device."""
    from megaslide.config import AttentionConfig, ModelConfig
    from megaslide.models.dit import count_parameters
    from megaslide.models.presets import PRESETS, resolve_config

    rows = []
    for name in PRESETS:
        model = resolve_config(ModelConfig(preset=name), AttentionConfig(), **PRESET_CHANNELS)
        parameters = count_parameters(model)
        sizes = {key: getattr(model, key) for key in PRESET_SIZES}
        state = parameters * STATE_BYTES_PER_PARAMETER
        rows.append({"preset": name, "parameters": parameters, "state_bytes": state, **sizes})
    return rows
