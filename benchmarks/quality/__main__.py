"""The command: carry out what is missing of the study, then write the page.

    python -m benchmarks.quality [--out FOLDER] [--parts NAME ...] [--arms NAME ...]
                                 [--seeds N] [--steps N] [--threads N] [--report-only] [--smoke]

Stop it whenever you like: it goes on with the run in which it was stopped.
"""

import argparse
import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.quality.arms import arm
from benchmarks.quality.plan import PARTS, SMOKE, SMOKE_SETTINGS, chosen_parts, keep_arms, runs_of
from benchmarks.quality.report import write_report
from benchmarks.quality.study import Settings, run_study
from megaslide.errors import InputError

RESULTS = Path(__file__).parent.parent / "results" / "quality"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 where the input cannot be used."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(options.threads)
    try:
        print(_study(options))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _study(options: argparse.Namespace) -> Path:
    settings = SMOKE_SETTINGS if options.smoke else Settings()
    if options.steps is not None:
        settings = dataclasses.replace(settings, steps=options.steps)
    parts = SMOKE if options.smoke else chosen_parts(options.parts)
    for name in options.arms:
        arm(name)  # refuses one that does not exist
    parts = tuple(keep_arms(part, options.arms) for part in parts)
    if not options.report_only:
        run_study(
            runs_of(parts, range(1 if options.smoke else options.seeds)), options.out, settings
        )
    return write_report(options.out, settings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--out", type=Path, default=RESULTS, help="folder of the JSONs and the page")
    add("--parts", nargs="*", default=[], help=", ".join(part.name for part in PARTS))
    add("--arms", nargs="*", default=[], help="only these arms of the parts")
    add("--seeds", type=_positive, default=3, help="seeds 0 to N-1 of every run")
    add("--steps", type=_positive, default=None, help="optimizer steps of every run")
    add("--threads", type=_positive, default=1, help="of torch; CPU time is compared at one")
    add("--report-only", action="store_true", help="train nothing")
    add("--smoke", action="store_true", help="two arms, one seed, a few steps")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
