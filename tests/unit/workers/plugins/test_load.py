"""A plug-in is found, checked and identified: the class, its protocol, its options, its code."""

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl import keys
from streamrl.errors import UserError, UserErrors
from streamrl.plugins import PROTOCOL
from streamrl.spec import RLJobSpec
from streamrl_workers.models.prepare import prepare
from streamrl_workers.plugins.load import check_plugins
from streamrl_workers.plugins.sources import code_fingerprint, local_modules
from streamrl_workers.scheduler.settings import SchedulerEnvironment
from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.settings import read_settings
from support.certificates import Authority, mount
from support.jobs import simulated_job
from support.trainer_groups import trainer_spec

SOURCE = """
from streamrl.plugins import GroupAlgorithm, PluginOptions, TokenLoss

class Mine(GroupAlgorithm):
    protocol = 1
    aggregation = "TokenMean"

    class Options(PluginOptions):
        tau: float
        most_tokens: int = 8

    def advantages(self, samples):
        return [sample.reward for sample in samples]

    def token_loss(self, batch):
        return TokenLoss.unclipped(-self.tau * batch.logprobs_N)

class Silent(Mine):
    protocol = None

class Newer(Mine):
    protocol = 2

class Half(GroupAlgorithm):
    protocol = 1

class Loose(Mine):
    class Options: ...

def function(): ...
"""


def named(module: str, name: str, **options: Any) -> RLJobSpec:
    return trainer_spec(rule="python", algorithm={"class": f"{module}:{name}" if module else name, "options": options})


def lines(spec: RLJobSpec, directory: Path | None) -> list[str]:
    with pytest.raises((UserError, UserErrors)) as caught:
        check_plugins(spec, directory=directory)
    return caught.value.lines


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of modules with a name that no other test has: they stay imported."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "plug_loaded.py").write_text(SOURCE)
    (folder / "plug_broken.py").write_text("import plug_absent\n")
    return folder


CLASS, OPTIONS = "spec.algorithm.python.class", "spec.algorithm.python.options"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("Minus", f"{CLASS}: module plug_loaded has no class Minus; it has "),
        ("function", f"{CLASS}: must be a class that derives from GroupAlgorithm or BatchAlgorithm of streamrl.plugins, got 'plug_loaded:function'"),
        ("PluginOptions", f"{CLASS}: must be a class that derives from GroupAlgorithm or BatchAlgorithm of streamrl.plugins, got "),
        ("Half", f"{CLASS}: must define advantages, token_loss, got "),
        ("Silent", f"{CLASS}: must say `protocol = {PROTOCOL}`, the version of streamrl.plugins that it is written for: it does not say, got "),
        ("Newer", f"{CLASS}: must say `protocol = {PROTOCOL}`, the version of streamrl.plugins that it is written for: it says 2, got "),
        ("Loose", f"{CLASS}: must have its options in a class Options that derives from PluginOptions of streamrl.plugins, got "),
    ],
)  # fmt: skip
def test_a_class_that_is_no_plug_in_is_one_line(name: str, line: str, directory: Path) -> None:
    [found] = lines(named("plug_loaded", name, tau=1.0), directory)
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [f"{OPTIONS}.tau: is required; give "]),
        ({"tau": "1"}, [f"{OPTIONS}.tau: must be "]),
        ({"tau": 1, "lr": 2}, [f"{OPTIONS}.lr: is not a known field; known: "]),
        ({"tau": 1, "mostTokens": 1.5, "taw": 2}, [f"{OPTIONS}.mostTokens: must be ", f"{OPTIONS}.taw: is not a known field; did you mean tau?"]),
    ],
)  # fmt: skip
def test_each_bad_option_is_a_line_with_its_field(
    options: dict[str, Any], expected: list[str], directory: Path
) -> None:
    found = lines(named("plug_loaded", "Mine", **options), directory)
    assert [line[: len(start)] for line, start in zip(found, expected, strict=True)] == expected


def test_a_module_that_is_not_there_or_fails_is_one_line(directory: Path) -> None:
    [absent] = lines(named("plug_nowhere", "Mine"), directory)
    assert absent == f"{CLASS}: there is no module plug_nowhere in {directory}; put it beside the job file"
    [broken] = lines(named("plug_broken", "Mine"), directory)
    assert broken == f"{CLASS}: importing module plug_broken failed: No module named 'plug_absent'"
    [unknown] = lines(named("", "cispoo"), directory)
    assert unknown.endswith("an installed package, got 'cispoo'; did you mean cispo?")


def test_beside_certificates_only_installed_modules_are_imported(tmp_path: Path) -> None:
    (tmp_path / "plug_config_map.py").write_text(SOURCE)
    [line] = lines(named("plug_config_map", "Mine", tau=1.0), None)
    assert line == f"{CLASS}: there is no module plug_config_map installed; put it into the image"
    check_plugins(named("", "sapo"), directory=None)


def test_processes_of_a_pod_look_for_no_code_beside_the_job(tmp_path: Path) -> None:
    (tmp_path / "plug_config_map.py").write_text(SOURCE)
    (tmp_path / keys.FILE_JOB).write_text(json.dumps(simulated_job()))
    local = {
        keys.ENV_RUN_DIR: str(tmp_path),
        keys.ENV_CODE_DIR: str(tmp_path),
        keys.ENV_SCHEDULER_ADDRESS: "localhost:1",
        keys.ENV_TOKEN: "token",
    }
    authority = Authority()
    tls = mount(tmp_path / "tls", trusted=(authority,), leaf=authority.leaf("trainer"))
    pod = {**local, keys.ENV_TLS_DIR: str(tls)}
    found = [(read_settings(environ), SchedulerEnvironment.read(environ)) for environ in (local, pod)]
    assert [(trainer.plugin_dir, scheduler.plugin_dir) for trainer, scheduler in found] == [
        (tmp_path, tmp_path),
        (None, None),
    ]
    folders = {"cache_dir": tmp_path, "base_dir": tmp_path, "store_dir": tmp_path}
    with pytest.raises(UserError, match="there is no module plug_config_map installed"):
        prepare(named("plug_config_map", "Mine", tau=1.0), report=lambda _: None, **folders)


def test_options_reach_the_class_with_their_defaults(directory: Path) -> None:
    algorithm = create_algorithm(named("plug_loaded", "Mine", tau=3), plugin_dir=directory)
    assert type(algorithm).__name__ == "Mine"
    assert algorithm.reference_kl is None
    check_plugins(trainer_spec(), directory=None)


def test_the_fingerprint_is_of_the_class_and_of_what_it_imports_beside_it(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text("from second import x\nimport torch\n")
    (tmp_path / "second").mkdir()
    (tmp_path / "second/__init__.py").write_text("")
    (tmp_path / "second/deep.py").write_text("x = 1\n")
    (tmp_path / "unrelated.py").write_text("")
    spec = named("first", "Mine")
    seen = [code_fingerprint(spec, directory=tmp_path)]
    assert seen[0][CLASS].startswith("code of first, second, sha256 ")
    for file in ("unrelated.py", "first.py", "second/deep.py"):
        path = tmp_path / file
        path.write_text(path.read_text() + "# another\n")
        seen.append(code_fingerprint(spec, directory=tmp_path))
    assert seen[0] == seen[1]
    assert len({code[CLASS] for code in seen}) == 3


@pytest.mark.parametrize("changed", ["parts/deep/loss.py", "helpers.py"])
def test_the_fingerprint_sees_packages_without_a_file_of_their_own_and_what_they_import(
    changed: str, tmp_path: Path
) -> None:
    (tmp_path / "parts/deep").mkdir(parents=True)
    (tmp_path / "parts/deep/loss.py").write_text("import helpers\n")
    (tmp_path / "helpers.py").write_text("x = 1\n")
    spec = named("parts.deep.loss", "Mine")
    before = code_fingerprint(spec, directory=tmp_path)
    (tmp_path / changed).write_text("import helpers\nx = 2\n")
    assert code_fingerprint(spec, directory=tmp_path) != before


def test_a_folder_named_like_an_installed_package_is_no_module(tmp_path: Path) -> None:
    (tmp_path / "torch/scripts").mkdir(parents=True)
    (tmp_path / "torch/scripts/make.py").write_text("")
    (tmp_path / "loss.py").write_text("import torch\n")
    assert list(local_modules(["loss"], tmp_path)) == ["loss"]


def test_code_of_an_installed_namespace_package_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nothing_of_its_own").mkdir()
    (tmp_path / "nothing_of_its_own/loss.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec = named("nothing_of_its_own.loss", "Mine")
    before = code_fingerprint(spec, directory=None)
    (tmp_path / "nothing_of_its_own/loss.py").write_text("x = 2\n")
    assert code_fingerprint(spec, directory=None) != before


def test_code_of_an_installed_package_is_seen_and_our_own_is_the_releases() -> None:
    found = code_fingerprint(named("safetensors.torch", "Mine"), directory=None)
    assert found[CLASS].startswith("code of safetensors.torch, sha256 ")
    assert code_fingerprint(named("", "cispo"), directory=None) == {}
    assert code_fingerprint(trainer_spec(), directory=None) == {}
