"""`streamrl models [FOLDER|NAME]`: what works with a model's family, from its configuration alone."""

import argparse
from pathlib import Path

from streamrl.errors import EXIT_DONE, UserError
from streamrl_cli import console
from streamrl_cli.model_table import PROBED, families_of, folder_shape, row_lines, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="FOLDER|NAME",
        help="folder of a model, a model of the hub that is on this machine, or a family; absent = the families",
    )


def run(args: argparse.Namespace) -> int:
    """Print the row, or the names of all rows."""
    found = table()
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    console.out(f"measured {found['date']} with {versions}")
    if args.model is None:
        console.out(*found["families"])
    elif args.model in found["families"]:
        console.out(*row_lines(args.model))
    else:
        shape = folder_shape(_folder(args.model))
        rows = families_of(shape)
        console.out(*(line for name in rows for line in row_lines(name)))
        if not rows:
            console.out(f"{shape} {PROBED}")
    return EXIT_DONE


def _folder(model: str) -> Path:
    """Return where a model's configuration is; nothing is downloaded."""
    if (Path(model) / "config.json").is_file():
        return Path(model)
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json")
    except (ImportError, ValueError):  # also names that are none
        cached = None
    if isinstance(cached, str):
        return Path(cached).parent
    raise UserError(
        field="models",
        rule="must be a folder with config.json, a model of the hub that is on this machine, or a family",
        got=model,
        fix="download it first, or see `streamrl models` for the families",
    )
