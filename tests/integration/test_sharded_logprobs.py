"""Log-probs by chunks in rows of documents, with a model that two ranks share (FSDP2 over gloo), against whole logits of padded rows on one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import sharded_logprobs as ranks

pytestmark = pytest.mark.timeout(600)  # both processes load torch

TESTS = Path(__file__).parents[1]


def test_gradients_of_sharded_heads_are_those_of_whole_logits(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(TESTS), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "error", "-m", "support.sharded_logprobs"]
    processes = [subprocess.Popen([*command, str(rank), str(tmp_path)], env=environ) for rank in (0, 1)]
    assert [process.wait() for process in processes] == [0, 0]
    for name, model in ranks.models().items():
        for share in ranks.shares():
            for samples in share:
                batch = ranks.batch_of(samples, packed=False)
                logits = model(input_ids=batch.inputs_BL).logits.flatten(0, 1)[batch.rows_N]
                rows = torch.log_softmax(logits / ranks.TEMPERATURE, -1)
                ranks.loss_of(rows.gather(1, batch.targets_N[:, None]).squeeze(1)).backward()
        found = torch.load(tmp_path / f"{name}.pt")
        assert found.keys() == {key for key, _ in model.named_parameters()}
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(found[key], parameter.grad, rtol=1e-5, atol=1e-5)
