"""What cannot read a history in stripes on CUDA is refused; `test_parallel_flags.py` has the other refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_glm.compat.topology_refusals import check_stripe_backends


def view(dcp_size: int, prefill: str, decode: str) -> SimpleNamespace:
    return SimpleNamespace(
        dcp_size=dcp_size, dsa_prefill_backend=prefill, dsa_decode_backend=decode
    )


@pytest.mark.parametrize(
    "served", [view(1, "flashmla_kv", "flashmla_kv"), view(2, "trtllm", "trtllm")]
)
def test_served(served: SimpleNamespace) -> None:
    check_stripe_backends(served)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (view(2, "flashmla_kv", "flashmla_kv"), "--dsa-prefill-backend flashmla_kv"),
        (view(4, "trtllm", "fa3"), "--dcp-size 4 with --dsa-decode-backend fa3"),
    ],
)
def test_refused(refused: SimpleNamespace, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        check_stripe_backends(refused)
    assert ". " not in str(error.value)
