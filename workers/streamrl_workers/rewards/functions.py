"""Loads a function of the user's own (`module:function`) from the job file's directory.

Every mistake found here is a `UserError`: no such module or function, an error while it is imported,
a signature that cannot take the keywords it will be called with.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamrl.errors import UserError


def load_function(name: str, *, base_dir: Path, keywords: tuple[str, ...], field: str) -> Callable[..., Any]:
    """Import `module:function` with `base_dir` first on the path; it will be called with `keywords`."""
    module_name, _, function_name = name.partition(":")
    _put_on_path(base_dir)
    module = _import_module(module_name, base_dir=base_dir, field=field)
    function = getattr(module, function_name, None)
    if function is None:
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(
            field=field,
            rule=f"module {module_name} has no function {function_name}",
            fix=f"it has {', '.join(sorted(known)) or 'none'}",
        )
    if not callable(function):
        raise UserError(field=field, rule="must name a function", got=function)
    _check_signature(function, keywords=keywords, field=field)
    return function  # type: ignore[no-any-return] # getattr gives Any


def _put_on_path(base_dir: Path) -> None:
    entry = str(base_dir.resolve())
    if entry not in sys.path:
        sys.path.insert(0, entry)
        importlib.invalidate_caches()


def _import_module(module_name: str, *, base_dir: Path, field: str) -> object:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise UserError(field=field, rule=f"importing module {module_name} failed: {error}") from error
        raise UserError(
            field=field, rule=f"there is no module {module_name} in {base_dir}", fix="put it beside the job file"
        ) from error
    except (Exception, SystemExit) as error:
        text = f"importing module {module_name} failed: {type(error).__name__}: {error}"
        raise UserError(field=field, rule=" ".join(text.split())) from error


def _check_signature(function: Callable[..., Any], *, keywords: tuple[str, ...], field: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a function in C may not tell; a wrong call then shows as a failure of the sample
    try:
        signature.bind(**dict.fromkeys(keywords))
    except TypeError as error:
        raise UserError(
            field=field, rule=f"is called with the keywords {', '.join(keywords)}, but {error}", got=str(signature)
        ) from error
