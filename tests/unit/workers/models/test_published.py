"""Bytes to tensors and back; adapters on top of the base: the formula, what is refused."""

from typing import Any

import pytest
import torch

from streamrl_workers.models.published import LORA_A, LORA_B, LORA_SCALING, as_bytes, as_tensor, merged
from streamrl_workers.weights.hashing import TensorBytes, tensor_bytes


def _version(dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, TensorBytes]:
    torch.manual_seed(0)
    tensors = {
        "norm": torch.ones(4),
        "q": torch.randn(6, 4).to(dtype),
        f"q{LORA_A}": torch.randn(2, 4),
        f"q{LORA_B}": torch.randn(6, 2),
        f"q{LORA_SCALING}": torch.tensor(0.3),
    }
    return {name: as_bytes(tensor) for name, tensor in (tensors | changes).items() if tensor is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_added_in_float32_and_never_rounded_below_it(dtype: torch.dtype) -> None:
    version = _version(dtype)
    whole = merged(version)
    assert whole.keys() == {"norm", "q"} and whole["norm"] is version["norm"]
    base, lora_a, lora_b = (as_tensor(version[name]).double() for name in ("q", "q:lora_A", "q:lora_B"))
    exact = base + 0.3 * lora_b @ lora_a
    torch.testing.assert_close(as_tensor(whole["q"]), exact.float())
    assert merged(version) == whole  # as often as one likes: it starts from the base
    assert as_tensor(version["q"]).double().equal(base)


def test_without_adapters_nothing_is_made() -> None:
    version = {"norm": as_bytes(torch.ones(4))}
    assert merged(version)["norm"] is version["norm"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"q": None}, "tensor q of an adapter is missing"),
        ({f"q{LORA_A}": None}, "tensor q:lora_A of an adapter is missing"),
        ({f"q{LORA_SCALING}": None}, "tensor q:lora_scaling of an adapter is missing"),
        ({"q:lora_magnitude": torch.ones(6)}, "tensor q:lora_magnitude of an adapter is unknown"),
        ({f"q{LORA_A}": torch.ones(2, 5)}, r"the adapter of q is \[6, 2\] times \[2, 5\], the tensor \[6, 4\]"),
        ({f"q{LORA_B}": torch.ones(6, 3)}, "the adapter of q is"),
        ({f"q{LORA_B}": torch.ones(12)}, "the adapter of q is"),
        ({f"q{LORA_SCALING}": torch.ones(2)}, "the adapter of q is"),
        ({"q": torch.ones(24)}, "the adapter of q is"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        merged(_version(**changes))


@pytest.mark.parametrize(
    "published",
    [
        TensorBytes("float32", (3,), memoryview(bytes(8))),
        TensorBytes("nn", (2,), memoryview(bytes(8))),
        TensorBytes("float33", (2,), memoryview(bytes(8))),
    ],
)
def test_bytes_that_are_no_tensor_are_refused(published: TensorBytes) -> None:
    with pytest.raises(ValueError, match="8 bytes are no tensor of"):
        as_tensor(published)


@pytest.mark.parametrize("tensor", [torch.randn(2, 3), torch.tensor(2.0), torch.empty(0, 3), torch.ones(3).bfloat16()])
def test_bytes_and_back(tensor: torch.Tensor) -> None:
    found = as_tensor(as_bytes(tensor))
    assert found.equal(tensor) and found.dtype is tensor.dtype


def test_writable_bytes_are_shared_and_others_copied() -> None:
    data = bytearray(8)
    as_tensor(TensorBytes("float32", (2,), memoryview(data))).fill_(1.0)
    assert data != bytes(8)
    as_tensor(TensorBytes("float32", (2,), memoryview(data).toreadonly())).fill_(2.0)
    assert as_tensor(TensorBytes("float32", (2,), memoryview(data))).tolist() == [1.0, 1.0]


def test_the_bytes_of_each_dtype_that_a_model_can_have_are_those_of_torch() -> None:
    dtypes = {one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    numbers = {one for one in dtypes if one.is_floating_point} | _OTHERS
    assert len(numbers) >= 15
    for dtype in numbers:
        published = as_bytes(torch.empty((3, 2), dtype=dtype))
        assert published.data.nbytes == tensor_bytes(published.dtype, published.shape), dtype


_OTHERS = {
    torch.bool,
    torch.complex64,
    torch.complex128,
    *(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)),
}
