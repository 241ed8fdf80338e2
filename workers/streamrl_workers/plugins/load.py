"""Loads the class of a plug-in and checks its options. Runs the user's code: it is called where that may run."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.errors import UserError, UserErrors
from streamrl.plugins import PROTOCOL
from streamrl.spec import RLJobSpec
from streamrl.spec.base import PluginOptions
from streamrl.spec.parse import DOCUMENT, parse_document
from streamrl_workers.plugins.kinds import Plugin, plugins_of
from streamrl_workers.rewards.base import load_attribute


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPlugin:
    """What a plug-in is made from."""

    made_by: Any  # the class, as its kind calls it
    options: PluginOptions

    def make(self) -> Any:  # noqa: ANN401 - of the kind's base
        """Make the plug-in, of kinds that take nothing but options."""
        return self.made_by(self.options)


def load_plugin(plugin: Plugin, *, directory: Path | None) -> LoadedPlugin:
    """Import the class and check its options.

    Args:
        plugin: which one.
        directory: where the user's modules lie; None: only installed modules are imported, as beside certificates.

    Raises:
        UserError, UserErrors: the class cannot be imported, is no plug-in of its kind, or refuses its options.
    """
    return checked(load_attribute(plugin.place, directory=directory, what="class", field=plugin.field), plugin=plugin)


def checked(made_by: Any, *, plugin: Plugin) -> LoadedPlugin:  # noqa: ANN401 - whatever a module holds
    """Check that a class is a plug-in of its kind, and its options. Raises `UserError`, `UserErrors`: it is none, or refuses them."""
    for rule in _faults(made_by, plugin=plugin):
        raise UserError(field=plugin.field, rule=rule, got=plugin.named.class_)
    return LoadedPlugin(
        made_by=made_by, options=_checked_options(getattr(made_by, "Options", PluginOptions), plugin=plugin)
    )


def load_at(spec: RLJobSpec, at: str, *, directory: Path | None) -> LoadedPlugin | None:
    """Load the plug-in that a job names at `at`, as of `PluginKind`; None: it names none there. Raises as `load_plugin`."""
    named = next((plugin for plugin in plugins_of(spec) if plugin.kind.at == at), None)
    return None if named is None else load_plugin(named, directory=directory)


def check_plugins(spec: RLJobSpec, *, directory: Path | None) -> None:
    """Load each plug-in of a job once. Raises as `load_plugin`."""
    for plugin in plugins_of(spec):
        load_plugin(plugin, directory=directory)


def _faults(made_by: object, *, plugin: Plugin) -> Iterator[str]:
    """Find what keeps a class from being a plug-in of its kind."""
    bases = [load_attribute(base, directory=None, what="class", field=plugin.field) for base in plugin.kind.bases]
    if not isinstance(made_by, type) or not issubclass(made_by, tuple(bases)):
        yield f"must be a class that derives from {' or '.join(base.__name__ for base in bases)} of streamrl.plugins"
        return
    if missing := sorted(getattr(made_by, "__abstractmethods__", ())):
        yield f"must define {', '.join(missing)}"
    written_for = getattr(made_by, "protocol", None)
    if written_for != PROTOCOL:
        said = "does not say" if written_for is None else f"says {written_for!r}"
        yield f"must say `protocol = {PROTOCOL}`, the version of streamrl.plugins that it is written for: it {said}"
    options = getattr(made_by, "Options", PluginOptions)
    if not isinstance(options, type) or not issubclass(options, PluginOptions):
        yield "must have its options in a class Options that derives from PluginOptions of streamrl.plugins"


def _checked_options(model: type[PluginOptions], *, plugin: Plugin) -> PluginOptions:
    field = f"{plugin.kind.field}.options"
    try:
        return parse_document(dict(plugin.named.options), model=model, rule="must be a mapping")
    except UserErrors as found:
        raise UserErrors(
            [
                UserError(
                    field=field if error.field == DOCUMENT else f"{field}.{error.field}",
                    rule=error.rule,
                    got=error.got,
                    fix=error.fix,
                )
                for error in found.errors
            ]
        ) from None
