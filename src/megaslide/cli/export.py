"""`megaslide export`: a checkpoint as a folder that diffusers loads."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from megaslide.cli.display import count, size, status
from megaslide.cli.refusals import writes_to


def export(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder or a checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the model.")],
    weights: Annotated[
        Literal["ema", "raw"] | None,
        typer.Option(help="Averaged or not. Default: averaged where they were saved."),
    ] = None,
    dtype: Annotated[
        Literal["bf16", "fp32"] | None, typer.Option(help="Default: as each tensor was saved.")
    ] = None,
    layout: Annotated[
        Literal["diffusers", "original"],
        typer.Option(help="original: one file with the names of Wan's and LTX's own code."),
    ] = "diffusers",
) -> None:
    """Write a checkpoint's transformer as diffusers loads it.

    Or, with --layout original, as the model's own repository names its tensors.
    """
    with status("exporting"), writes_to(out):
        from megaslide.exporting import export as export_checkpoint

        done = export_checkpoint(source, out, weights=weights, dtype=dtype, layout=layout)
    typer.echo(f"exported the {done.weights} weights of {done.checkpoint}")
    typer.echo(f"{count(done.parameters)} parameters, {size(done.nbytes)}")
    if done.from_masters:
        typer.echo("values are the fp32 ones of the optimizer state")
    if done.converted:
        typer.echo("attention is converted: load it with megaslide.load")
    typer.echo(f"wrote {done.path} ({done.class_name})")
