"""`megaslide convert`: a pretrained model with local attention, as a folder."""

import json
from pathlib import Path
from typing import Annotated

import typer

from megaslide.cli.display import count, status
from megaslide.cli.refusals import writes_to
from megaslide.errors import InputError

SETTINGS = ("attention.", "model.subfolder=", "model.revision=")


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A diffusers pipeline's folder, or its hub id.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the converted model.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.KEY=VALUE", help="attention.kind=deformable, and others."),
    ] = None,
) -> None:
    """Replace the attention of a pretrained model by 3D-DSA.

    Or by a baseline of it. Takes attention.* (attention.kind is needed), model.subfolder and
    model.revision.
    """
    from megaslide.config import load_config

    for override in overrides or ():
        if not override.startswith(SETTINGS):
            raise InputError(f"{override}: not a setting of a conversion", "see docs/pretrained.md")
    named = f"model.pretrained_model_name_or_path={json.dumps(source)}"
    config = load_config(None, [named, *(overrides or ())])
    with status("converting"), writes_to(out):
        from megaslide.models.pretrained import find_source
        from megaslide.models.pretrained.converted_folder import write_converted

        subfolder = config.model.subfolder
        found = find_source(source, subfolder=subfolder, revision=config.model.revision)
        written = write_converted(found, out, config.attention, subfolder=subfolder)
    added = count(written.added_parameters)
    typer.echo(f"converted {written.converted} attention modules to {config.attention.kind}")
    typer.echo(f"{count(written.base_parameters)} parameters kept, {added} added")
    typer.echo(f"wrote {written.folder}")
