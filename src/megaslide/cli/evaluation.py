"""The verb `eval`."""

from pathlib import Path
from typing import Annotated

import typer

from megaslide.cli.display import Meter, console, status
from megaslide.cli.refusals import require_no_folder, writes_to


def evaluate(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PATH", help="Clips or folders; not needed with --checkpoint."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON, JSONL or CSV. Default: what lies beside the clips.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Folder of clips of the same names, with known motion.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Run or checkpoint; its loss on held-out latents.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures.")] = None,
    html_path: Annotated[Path | None, typer.Option("--html", help="Write a page.")] = None,
) -> None:
    """Measure clips, or the loss of a checkpoint.

    Of clips: consistency, motion, sharpness. Every figure comes with its definition; what cannot
    be measured says why.
    """
    require_no_folder(json_path, "eval.json")
    require_no_folder(html_path, "eval.html")
    with status("loading the measures"):
        from megaslide.evaluation.page import write_html
        from megaslide.evaluation.results import write_json
        from megaslide.evaluation.run import evaluate as run_evaluation
        from megaslide.evaluation.tables import render
    with Meter("eval") as meter:
        found = run_evaluation(
            paths or [], prompts=prompts, reference=reference, checkpoint=checkpoint, progress=meter
        )
    console().print(render(found))
    for path, write in ((json_path, write_json), (html_path, write_html)):
        if path is not None:
            with writes_to(path.parent):
                write(path, found)
            typer.echo(f"wrote {path}")
