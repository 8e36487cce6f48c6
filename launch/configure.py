"""From gin files and command-line bindings to a `Config`, or to one line that says what is wrong.

Only gin's parser is used, not its registry: nothing is global, nothing can be imported or called from a
configuration, and every value keeps the file and line it came from until it has been checked.
"""

import argparse
import dataclasses
import difflib
import pathlib
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gin import config_parser

from k3jax.config import SECTIONS, Config, ConfigError
from k3jax.config_text import config_to_gin

FIELDS = {cls.__name__: [f.name for f in dataclasses.fields(cls)] for cls in SECTIONS.values()}
ALL_FIELDS = [f"{cls}.{field}" for cls, fields in FIELDS.items() for field in fields]
COMMAND_LINE = "command line"


class LoadedConfig(NamedTuple):
    """A checked configuration, and the gin text that gives it back whole."""

    config: Config
    operative: str


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options shared by every verb that takes a configuration (see `from_arguments`)."""
    group = parser.add_argument_group("configuration")
    group.add_argument(
        "--gin_file", action="append", default=[], metavar="F", help="a gin file; repeatable, later ones win"
    )
    group.add_argument(
        "--gin_bindings",
        action="append",
        default=[],
        metavar="'X.y = V'",
        help="one setting on top of the files; repeatable. --gin.X.y=V is the same",
    )
    group.add_argument("--print_config", action="store_true", help="print the whole configuration as gin and stop")


def expand_gin_flags(argv: Sequence[str]) -> list[str]:
    """Rewrites each `--gin.X.y=V` of a command line as `--gin_bindings=X.y = V`.

    Raises:
        ConfigError: such a flag without a value.
    """
    expanded = []
    for argument in argv:
        if argument.startswith("--gin."):
            name, equals, value = argument.removeprefix("--gin.").partition("=")
            if not equals:
                raise ConfigError(f"{argument}: write the value after an equals sign, {argument}=VALUE")
            argument = f"--gin_bindings={name} = {value}"
        expanded.append(argument)
    return expanded


def from_arguments(args: argparse.Namespace) -> LoadedConfig:
    """The configuration of parsed arguments that `add_config_arguments` declared."""
    return load_config(args.gin_file, args.gin_bindings)


def load_config(gin_files: Iterable[str] = (), bindings: Iterable[str] = ()) -> LoadedConfig:
    """Reads and checks a configuration. What nothing binds keeps its default (Kimi K3 for the model).

    Args:
        gin_files: paths; a later file wins over an earlier one, and a file over what it includes before.
        bindings: gin text such as "ModelConfig.kda_per_mla = 7", which wins over all files; text that is
            not a Python literal needs no quotes here.
    Raises:
        ConfigError: one line that names the place, the field, its value and the fix.
    """
    read = [binding for file in gin_files for binding in _read_file(pathlib.Path(file), ())]
    read += [binding for text in bindings for binding in _read_text(_quoted(text), COMMAND_LINE, None, ())]

    values = _resolve_macros(read)
    where = {binding.name: binding.where for binding in read}
    parts: dict[str, dict] = {cls: {} for cls in FIELDS}
    for name, value in values.items():
        cls, field = name.split(".")
        parts[cls][field] = value
    try:
        config = Config(**{section: cls(**parts[cls.__name__]) for section, cls in SECTIONS.items()})
    except ConfigError as error:
        # The field at fault, or the one that made a default impossible.
        named = [name for name in re.findall(r"\w+Config\.\w+", str(error)) if name in where]
        raise ConfigError(f"{where[named[0]]}: {error}" if named else str(error)) from None
    return LoadedConfig(config, config_to_gin(config))


def experiment_files() -> list[pathlib.Path]:
    """The gin files of `experiments/`, in the working directory or else beside the package."""
    beside = pathlib.Path(__file__).resolve().parent.parent / "experiments"
    here = pathlib.Path("experiments")
    return sorted((here if here.is_dir() else beside).glob("*.gin"))


class _Binding(NamedTuple):
    name: str  # ModelConfig.num_layers, or a macro's name
    value: object
    where: str


@dataclasses.dataclass(frozen=True)
class _Macro:
    name: str

    def __repr__(self):
        return f"%{self.name}"


@dataclasses.dataclass(frozen=True)
class _Reference:
    name: str

    def __repr__(self):
        return self.name


class _Values(config_parser.ParserDelegate):
    """Stands in for gin's registry: references and macros stay names."""

    def configurable_reference(self, scoped_configurable_name, evaluate):
        return _Reference(f"@{scoped_configurable_name}" + "()" * evaluate)

    def macro(self, macro_name):
        return _Macro(macro_name)


def _read_file(path: pathlib.Path, including: tuple[pathlib.Path, ...]) -> Iterator[_Binding]:
    if path.resolve() in [p.resolve() for p in including]:
        raise ConfigError(f"{including[-1]}: include '{path}': the file includes itself; remove one include")
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        near = {str(p): p.name for p in [*path.parent.glob("*.gin"), *experiment_files()]}
        hint = _nearest(path.name, near.values())
        hint = next((f"; did you mean {p}?" for p, name in near.items() if hint and name in hint), "")
        raise ConfigError(f"{path}: no such gin file{hint}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8; give a gin file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give a gin file") from None
    yield from _read_text(text, str(path), path, including)


def _read_text(
    text: str, source: str, path: pathlib.Path | None, including: tuple[pathlib.Path, ...]
) -> Iterator[_Binding]:
    """The bindings of one text in order, those of included files in their place."""
    first: dict[str, str] = {}  # where this text bound a name before
    for statement in _statements(text, source):
        location = getattr(statement, "location", None)
        where = source if path is None else f"{source}:{location.line_num}"
        if isinstance(statement, config_parser.ImportStatement):
            raise ConfigError(f"{where}: {statement.format()}: a gin file cannot import here; remove the line")
        if isinstance(statement, config_parser.IncludeStatement):
            target = pathlib.Path(statement.filename)
            if path is not None and (path.parent / target).exists():
                target = path.parent / target
            try:
                yield from _read_file(target, (*including, path) if path else ())
            except ConfigError as error:
                missing = str(error).startswith(f"{target}: ")
                raise ConfigError(f"{where}: include {error}" if missing else str(error)) from None
        if isinstance(statement, config_parser.BindingStatement):
            binding = _check_name(statement, where)
            if path is not None and binding.name in first:
                earlier = first[binding.name]
                raise ConfigError(f"{where}: {binding.name} = {binding.value!r}: already set at {earlier}; keep one")
            first[binding.name] = where
            yield binding


def _statements(text: str, source: str) -> Iterator:
    """gin's statements of a text, its syntax errors as one line."""
    line_number, problem = 0, ""
    try:
        parser = config_parser.ConfigParser(text, _Values())
        while (statement := parser.parse_statement()) is not None:
            yield statement
    except SyntaxError as error:
        line_number, problem = error.lineno, str(error.msg).splitlines()[0]
    except tokenize.TokenError as error:
        problem, (line_number, _) = error.args
    if not line_number:
        return
    where = source if source == COMMAND_LINE else f"{source}:{line_number}"
    lines = text.splitlines()
    line = lines[line_number - 1].strip() if line_number <= len(lines) else ""
    bare = re.match(r"([\w./]+)\s*=\s*([^\s\d\[({%@=#'\"+-][^#'\"]*?)\s*(#.*)?$", line)
    if bare:
        python = {"none": "None", "null": "None", "true": "True", "false": "False"}.get(bare[2].lower())
        meant = repr(bare[2]) + (f" or {python}" if python else "")
        raise ConfigError(f"{where}: {line}: text needs quotes; write {bare[1]} = {meant}")
    if "malformed node" in problem:
        problem = "a word that is no Python literal; text needs quotes"
    raise ConfigError(f"{where}: {line}: not valid gin ({problem.rstrip('.')}); write NAME = VALUE")


def _quoted(text: str) -> str:
    """A command-line binding with its value quoted if it is neither a literal nor a macro or reference."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals and not text.startswith("include"):
        raise ConfigError(f"{COMMAND_LINE}: {text}: write NAME = VALUE, such as ModelConfig.kda_per_mla = 7")
    try:
        list(_statements(text, COMMAND_LINE))
    except ConfigError:
        if value and value[0] not in "'\"([{%@=" and "\n" not in value:
            return f"{name} = {value!r}"
    return text


def _check_name(statement: config_parser.BindingStatement, where: str) -> _Binding:
    scope, cls, field, value = statement[:4]
    if scope:
        name = ".".join(filter(None, (cls, field)))
        raise ConfigError(f"{where}: {scope}/{name} = {value!r}: scopes have no use here; write {name}")
    if not field:  # a macro's definition
        return _Binding(cls, value, where)
    name = f"{cls}.{field}"
    if cls not in FIELDS:
        hint = _nearest(cls, FIELDS) or "; there are " + ", ".join(FIELDS)
        raise ConfigError(f"{where}: {name} = {value!r}: no such configurable as {cls}{hint}")
    if field not in FIELDS[cls]:
        raise ConfigError(f"{where}: {name} = {value!r}: {cls} has no such field{_nearest_field(cls, field)}")
    return _Binding(name, value, where)


def _resolve_macros(read: list[_Binding]) -> dict[str, object]:
    """The final value of every bound field; macros take their last definition, wherever it stands."""
    macros = {binding.name: binding for binding in read if "." not in binding.name}
    used: set[str] = set()

    def resolve(value: object, name: str, where: str, open_macros: tuple[str, ...]) -> object:
        if isinstance(value, _Reference):
            raise ConfigError(f"{where}: {name} = {value}: a field takes a value, not a reference; write it out")
        if isinstance(value, _Macro):
            if value.name not in macros:
                hint = _nearest(value.name, macros, mark="%") or f"; define {value.name} = VALUE"
                raise ConfigError(f"{where}: {name} = {value}: no such macro{hint}")
            if value.name in open_macros:
                raise ConfigError(f"{where}: {name} = {value}: the macro is defined by itself; give a value")
            used.add(value.name)
            macro = macros[value.name]
            return resolve(macro.value, macro.name, macro.where, (*open_macros, value.name))
        if isinstance(value, (tuple, list)):
            return tuple(resolve(v, name, where, open_macros) for v in value)
        if isinstance(value, dict):
            return {k: resolve(v, name, where, open_macros) for k, v in value.items()}
        return value

    fields = {b.name: resolve(b.value, b.name, b.where, ()) for b in read if "." in b.name}
    for name, macro in macros.items():
        if name not in used:
            meant = [field for field in ALL_FIELDS if field.endswith(f".{name}")]
            hint = f"; did you mean {meant[0]}?" if meant else _nearest(name, used, mark="%")
            hint = hint or f"; write %{name} where it is meant, or remove it"
            raise ConfigError(f"{macro.where}: {name} = {macro.value!r}: a macro that nothing uses{hint}")
    return fields


def _nearest(name: str, candidates: Iterable[str], mark: str = "") -> str:
    """ "; did you mean X?" with the nearest of the candidates, or nothing if none is near."""
    folded = {candidate.lower(): candidate for candidate in candidates}
    near = difflib.get_close_matches(name.lower(), folded, n=1)
    return f"; did you mean {mark}{folded[near[0]]}?" if near else ""


def _nearest_field(cls: str, field: str) -> str:
    """The same name in another section, else the nearest name in this one, else in another."""
    same = [name for name in ALL_FIELDS if name.endswith(f".{field}")]
    if same:
        return f"; did you mean {same[0]}?"
    others = {other: name for name in ALL_FIELDS for other in [name.split(".")[1]]}
    return _nearest(field, FIELDS[cls], f"{cls}.") or next(
        (f"; did you mean {others[near]}?" for near in difflib.get_close_matches(field, others, n=1)), ""
    )
