"""The registry: agrees with the contract, tells what it knows, loads no torch for the simulated engine."""

import subprocess
import sys

import pytest

from streamrl.spec.generators import GeneratorEngine
from streamrl_workers.generator.engines import ENGINES, engine_creator


def test_the_registry_and_the_contract_agree() -> None:
    assert set(ENGINES) == set(GeneratorEngine.choices())


def test_an_unknown_engine_lists_the_known() -> None:
    with pytest.raises(ValueError, match="'vlm' is unknown, known are: hf, simulated"):
        engine_creator("vlm")


def test_the_simulated_engine_needs_no_torch() -> None:
    code = (
        "import sys; from streamrl.spec.generators import SimulatedEngineSpec as S; from streamrl_workers.generator.engines import EngineOptions, create_simulated;"
        "create_simulated(EngineOptions(spec=S(slots=2))); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
