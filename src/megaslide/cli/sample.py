"""`megaslide sample`: clips from a trained checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from megaslide.cli.display import Meter, status
from megaslide.cli.refusals import writes_to


def _checked_bucket(bucket: str | None) -> str | None:
    if bucket is not None:
        from megaslide.config import parse_triple

        try:
            parse_triple(bucket)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return bucket


def sample(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder or a checkpoint.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Caption; repeat for several. Default: the run's.")
    ] = None,
    image: Annotated[
        list[str] | None, typer.Option(help="First frame: one for all prompts, or one each.")
    ] = None,
    second: Annotated[
        Path | None,
        typer.Option(help="Run of the other of two experts. Default: the published one."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Default: samples/checkpoint-N in the run.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps.")] = None,
    guidance: Annotated[float | None, typer.Option(min=0, help="1 turns guidance off.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the initial noise.")] = None,
    bucket: Annotated[
        str | None, typer.Option(callback=_checked_bucket, help="FRAMESxHEIGHTxWIDTH in pixels.")
    ] = None,
    ema: Annotated[
        bool | None, typer.Option("--ema/--no-ema", help="Averaged weights. Default: if saved.")
    ] = None,
) -> None:
    """Generate clips from a trained checkpoint."""
    with status("loading the checkpoint"):
        from megaslide.sampling import sample_run
    settings = {
        "images": tuple(image) if image else None,
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "seed": seed,
        "bucket": bucket,
    }
    given = {key: value for key, value in settings.items() if value is not None}
    with writes_to(out or source), Meter("sample") as meter:
        paths = sample_run(
            source, prompts=tuple(prompt or ()), out=out, settings=given, ema=ema, second=second,
            progress=meter,
        )  # fmt: skip
    for path in paths:
        typer.echo(path)
