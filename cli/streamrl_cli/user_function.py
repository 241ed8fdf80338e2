"""Checks a `module:function` or `module:Class` of the user's own without running it: its source is parsed, not imported."""

import ast
import importlib.util
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic.alias_generators import to_camel

from streamrl.errors import UserError
from streamrl.spec import RLJob
from streamrl.spec.base import PythonFunction
from streamrl.spec.parse import suggest
from streamrl_workers.plugins.kinds import Plugin
from streamrl_workers.plugins.sources import module_file, source_file, syntax_tree

_Function = ast.FunctionDef | ast.AsyncFunctionDef

_FORMAT_ARGUMENTS = ("question", "answer", "metadata")
_ENVIRONMENT_ARGUMENTS = ("question", "answer", "metadata", "seed")
_REWARD_ARGUMENTS = ("prompt", "completion", "answer", "metadata")


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFunction:
    """A function that a job names."""

    field: str
    """Where it is named."""
    name: str
    """`module:function`"""
    arguments: tuple[str, ...]
    """Keywords that it is called with."""

    @property
    def module(self) -> str:
        """Its module, with dots."""
        return self.name.partition(":")[0]


def functions_of(job: RLJob) -> Iterator[UserFunction]:
    """The functions of the user's own that a job names."""
    for task in job.spec.task.tasks:
        named: list[tuple[str, PythonFunction | None, tuple[str, ...]]]
        named = [("format.function", task.format, _FORMAT_ARGUMENTS)]
        if task.environment is not None:
            named.append(("environment.python.function", task.environment.python, _ENVIRONMENT_ARGUMENTS))
        for index, reward in enumerate(task.rewards):
            named.append((f"rewards[{index}].python.function", reward.python, _REWARD_ARGUMENTS))
        for field, function, arguments in named:
            if function is not None:
                yield UserFunction(field=f"{task.field}.{field}", name=function.function, arguments=arguments)


def check_function(name: str, *, field: str, directory: Path, arguments: Sequence[str]) -> Iterator[UserError]:
    """Find what would fail when `name` is imported from `directory` and called with keywords `arguments`."""
    function = name.partition(":")[2]
    found = yield from _parsed(name, field=field, directory=directory, source=_source(name, directory))
    if found is not None:
        source, tree = found
        yield from _check_definition(tree, field=field, function=function, source=source, arguments=arguments)


def check_class(plugin: Plugin, *, directory: Path) -> Iterator[UserError]:
    """Find what would fail when the class of a plug-in is imported from `directory` and given its options, as far as its text says."""
    try:
        place = plugin.place
    except UserError as error:
        yield error
        return
    local, module = _source(place, directory), place.partition(":")[0]
    found = yield from _parsed(place, field=plugin.field, directory=directory, source=local or module_file(module))
    if found is None:
        return
    source, tree = found
    name = place.partition(":")[2]
    definition = next(
        (node for node in reversed(tree.body) if isinstance(node, ast.ClassDef) and node.name == name), None
    )
    if definition is not None:
        yield from _check_options(definition, plugin=plugin)
    elif local is not None and name not in _bound_names(tree):
        yield UserError(field=plugin.field, rule=f"names a class that {source.name} does not define", got=name)


def _check_options(definition: ast.ClassDef, *, plugin: Plugin) -> Iterator[UserError]:
    """Compare the names of options with those that a class `Options` within the class lists; values are checked at the start."""
    options = next(
        (node for node in definition.body if isinstance(node, ast.ClassDef) and node.name == "Options"), None
    )
    if options is None or [ast.unparse(base).rpartition(".")[2] for base in options.bases] != ["PluginOptions"]:
        return  # fields of other bases would have to be imported
    fields = [node.target for node in options.body if isinstance(node, ast.AnnAssign)]
    known = [to_camel(name.id) for name in fields if isinstance(name, ast.Name)]
    given = [word.value for word in ast.walk(options) if isinstance(word, ast.keyword) and word.arg == "alias"]
    known += [str(name.value) for name in given if isinstance(name, ast.Constant)]
    field = f"{plugin.kind.field}.options"
    for name in plugin.named.options:
        if name not in known:
            rule = f"is not an option of {definition.name}"
            yield UserError(field=f"{field}.{name}", rule=rule, fix=suggest(name, known))


def _parsed(
    name: str, *, field: str, directory: Path, source: Path | None
) -> Generator[UserError, None, tuple[Path, ast.Module] | None]:
    """Find what `source`, the file of `module:name`, says; None: there is none that can be read, or an error says why."""
    top = name.partition(":")[0].split(".")[0]
    if top in sys.stdlib_module_names:
        yield UserError(
            field=field,
            rule="must not be in a module named like one of Python's own",
            got=name,
            fix="rename the module",
        )
        return None
    if source is None:
        if importlib.util.find_spec(top) is None:
            yield UserError(
                field=field,
                rule=f"names a module that is not beside the job file ({directory})",
                got=name,
                fix=f"write {top}.py there",
            )
        return None  # an installed module without a source is imported by the worker alone
    try:
        return source, syntax_tree(source.read_bytes(), name=source.name)
    except ValueError as error:
        yield UserError(field=field, rule=f"names a module that is not Python: {error}", got=name)
        return None


def _source(name: str, directory: Path) -> Path | None:
    """File of the module of `module:name` in `directory`."""
    return source_file(directory.joinpath(*name.partition(":")[0].split(".")))


def _check_definition(
    tree: ast.Module, *, field: str, function: str, source: Path, arguments: Sequence[str]
) -> Iterator[UserError]:
    definition = _definition(tree, function)
    if definition is None:
        if function not in _bound_names(tree):
            yield UserError(field=field, rule=f"names a function that {source.name} does not define", got=function)
        return  # bound by an import or an assignment: only running it would tell
    if isinstance(definition, ast.AsyncFunctionDef):
        yield UserError(field=field, rule="must be a plain function, not async", got=function)
    if missing := _not_taken(definition.args, arguments):
        call = f"def {function}(*, {', '.join(arguments)})"
        lists = _taken(definition.args) & {"prompts", "completions"}  # as rewards of TRL take them
        each = ", which is called for each sample" if lists else ""
        yield UserError(
            field=field,
            rule=f"must take the keyword arguments {', '.join(missing)}",
            got=function,
            fix=f"write `{call}`{each}",
        )
    if extra := _required_beyond(definition.args, arguments):
        yield UserError(
            field=field, rule=f"must not need the arguments {', '.join(extra)}", got=function, fix="give them defaults"
        )


def _definition(tree: ast.Module, function: str) -> _Function | None:
    found = [node for node in tree.body if isinstance(node, _Function) and node.name == function]
    return found[-1] if found else None


def _bound_names(tree: ast.Module) -> set[str]:
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    defined = {node.name for node in ast.walk(tree) if isinstance(node, _Function | ast.ClassDef)}
    return stored | imported | defined


def _not_taken(args: ast.arguments, wanted: Sequence[str]) -> list[str]:
    return [] if args.kwarg else [name for name in wanted if name not in _taken(args)]


def _taken(args: ast.arguments) -> set[str]:
    return {arg.arg for arg in (*args.args, *args.kwonlyargs)}


def _required_beyond(args: ast.arguments, given: Sequence[str]) -> list[str]:
    positional = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    required = positional[: len(positional) - len(args.defaults)]
    required += [arg.arg for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None]
    return [name for name in required if name not in given]
