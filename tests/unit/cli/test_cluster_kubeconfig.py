"""Which cluster is meant, and what is said if none can be."""

import json
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl_cli.cluster.kubeconfig import choose
from streamrl_operator.kube.credentials import Plugin, TokenFile
from streamrl_operator.kube.kubeconfig import from_kubeconfig


def config(*names: str, current: str = "", user: dict | None = None) -> str:
    return json.dumps(
        {
            "current-context": current,
            "clusters": [{"name": name, "cluster": {"server": f"http://{name}:1"}} for name in names],
            "contexts": [
                {"name": name, "context": {"cluster": name, "user": name, "namespace": f"of-{name}"}} for name in names
            ],
            "users": [{"name": name, "user": user or {"token": f"t-{name}"}} for name in names],
        }
    )


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_flag_comes_before_the_variable_and_that_before_the_home(tmp_path: Path) -> None:
    flag, variable = (written(tmp_path / name, config(name, current=name)) for name in ("flag", "variable"))
    home = written(tmp_path / ".kube/config", config("home", current="home"))
    environ = {"HOME": str(tmp_path), "KUBECONFIG": str(variable)}
    assert choose(kubeconfig=flag, context=None, environ=environ).context == "flag"
    assert choose(kubeconfig=None, context=None, environ=environ).context == "variable"
    assert choose(kubeconfig=None, context=None, environ={"HOME": str(tmp_path)}).source == str(home)


def test_several_files_are_merged_and_the_first_counts(tmp_path: Path) -> None:
    first = written(tmp_path / "one/config", config("a", user={"tokenFile": "token"}))
    second = written(tmp_path / "two/config", config("a", "b", current="b"))
    environ = {"KUBECONFIG": f"{first}:{tmp_path / 'absent'}:{second}"}
    assert choose(kubeconfig=None, context=None, environ=environ).context == "b"
    chosen = choose(kubeconfig=None, context="a", environ=environ)
    access = from_kubeconfig(chosen.text, source=chosen.source, context=chosen.context)
    assert (access.server, access.namespace) == ("http://a:1", "of-a")
    assert isinstance(access.source, TokenFile)
    assert access.source.path == tmp_path / "one/token"


@pytest.mark.parametrize(("command", "expected"), [("./who", "{}/who"), ("/bin/who", "/bin/who"), ("who", "who")])
def test_a_plug_in_with_a_slash_lies_beside_the_file_that_names_it(tmp_path: Path, command: str, expected: str) -> None:
    path = written(
        tmp_path / "one/config", config("a", current="a", user={"exec": {"apiVersion": "v1", "command": command}})
    )
    access = from_kubeconfig(choose(kubeconfig=path, context=None, environ={}).text)
    assert isinstance(access.source, Plugin)
    assert access.source.command == expected.format(tmp_path / "one")


@pytest.mark.parametrize("entry", [["x"], "x/y", {"apiVersion": "v1", "command": ["a/b"]}, {"command": None}])
def test_a_plug_in_that_is_none_is_refused_where_it_is_used(tmp_path: Path, entry: object) -> None:
    path = written(tmp_path / "config", config("a", current="a", user={"exec": entry}))
    with pytest.raises(UserError, match="must be a kubeconfig"):
        from_kubeconfig(choose(kubeconfig=path, context=None, environ={}).text)


@pytest.mark.parametrize(
    ("text", "context", "expected"),
    [
        (None, None, "kubeconfig: there is none at {path}; give --kubeconfig, or set KUBECONFIG"),
        (config("prod", "test"), None, "{path}: has no current context; give --context; known: prod, test"),
        (config("prod", "test", current="test"), "prd", "{path}: has no such context, got 'prd'; did you mean prod?"),
        ("[1, 2]", None, "{path}: is not a kubeconfig; give one that kubectl can use"),
        ('{"contexts": [3]}', None, "{path}: is not a kubeconfig; give one that kubectl can use"),
        ('{"clusters": [{"name": "a", "cluster": "b"}]}', None, "{path}: is not a kubeconfig"),
        ('{"users": [{"name": "a", "user": {"client-key": 3}}]}', None, "{path}: is not a kubeconfig"),
        ('{"users": [{"name": ["a"]}]}', None, "{path}: is not a kubeconfig"),
        ("a: 1\n---\na: 1", None, "{path}: is not a kubeconfig"),
        ("a: [", None, "{path}:1: is not YAML"),
        ("[" * 100_000, None, "{path}:1: is nested more than 64 deep"),
        ("a: " + "9" * 5000, None, "{path}:1: "),
        ("a: &a " + "x" * 900_000 + f"\nb: [{','.join(['*a'] * 40)}]", None, "{path}:2: holds more than"),
        ("#" * 2_000_000, None, "{path}: must be at most 1048576 bytes"),
    ],
)
def test_mistakes_are_one_line(text: str | None, context: str | None, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as caught:
        choose(kubeconfig=path, context=context, environ={})
    assert str(caught.value).startswith(expected.format(path=path))
    assert "\n" not in str(caught.value)
