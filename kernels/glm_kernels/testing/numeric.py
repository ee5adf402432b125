"""One comparator per kind of output. A failure names what was compared, where and by how much."""

import torch


def assert_bitwise(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Fail unless dtype, shape and every byte agree.

    Args:
        got: any tensor.
        want: tensor of the same dtype and shape.
        what: op and parameters, for the message.

    Raises:
        AssertionError: with the first differing coordinate and both values.
    """
    head = f"{what}: {got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}"
    assert got.dtype == want.dtype and got.shape == want.shape, head
    got, want = got.detach().cpu().contiguous(), want.detach().cpu().contiguous()
    size = got.element_size()
    differs = (got.view(torch.uint8) != want.view(torch.uint8)).reshape(-1, size).any(1)
    if differs.any():
        flat = int(differs.nonzero()[0])
        at = torch.unravel_index(torch.tensor(flat), got.shape)
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {differs.numel()} elements differ, first at "
            f"{[int(i) for i in at]}: got {got.flatten()[flat]}, expected {want.flatten()[flat]}"
        )


def calc_diff(got: torch.Tensor, want: torch.Tensor) -> float:
    """``1 - 2<x, y> / (<x, x> + <y, y>)`` in fp64: 0 for equal tensors."""
    x, y = got.double().flatten(), want.double().flatten()
    norm = (x * x + y * y).sum()
    return 0.0 if norm == 0 else float(1 - 2 * (x * y).sum() / norm)


def assert_logits(got: torch.Tensor, want: torch.Tensor, what: str, budget: float = 5e-6) -> None:
    """Fail unless ``-inf`` masks are equal and the rest is within ``budget`` by ``calc_diff``.

    Args:
        got: ``[num_tokens, width]``, fp32.
        want: same shape, fp32 or fp64.
        what: op and parameters, for the message.
        budget: bound of ``calc_diff``.

    Raises:
        AssertionError: with the differing coordinate or the measured difference.
    """
    got, want = got.cpu(), want.cpu()
    mask = want == float("-inf")
    wrong = ((got == float("-inf")) != mask).nonzero()
    assert wrong.numel() == 0, f"{what}: -inf mask differs first at {wrong[0].tolist()}"
    got, want = got.masked_fill(mask, 0), want.masked_fill(mask, 0)
    assert not got.isnan().any(), f"{what}: NaN at {got.isnan().nonzero()[0].tolist()}"
    diff = calc_diff(got, want)
    assert diff <= budget, f"{what}: calc_diff {diff:.3e} above {budget:.1e}"


def assert_attention(
    got: torch.Tensor,
    want: torch.Tensor,
    what: str,
    atol: float = 1e-3,
    rtol: float = 2.01 / 128,
    cosine: float = 5e-6,
) -> None:
    """Fail unless every element is within ``atol`` or ``rtol`` and the whole within ``cosine``.

    Args:
        got: attention output, any float dtype.
        want: reference of the same shape, fp32 or fp64.
        what: op and parameters, for the message.
        atol: absolute bound of an element.
        rtol: relative bound of an element, a multiple of a bf16 ulp.
        cosine: bound of ``calc_diff`` over the whole tensor.

    Raises:
        AssertionError: with the worst coordinate and the fraction that failed.
    """
    got, want = got.double().cpu(), want.double().cpu()
    assert got.shape == want.shape, f"{what}: {list(got.shape)}, expected {list(want.shape)}"
    error = (got - want).abs()
    # Written so that NaN fails.
    bad = ~((error <= atol) | (error <= rtol * want.abs()))
    if bad.any():
        flat = int(error.nan_to_num(nan=float("inf")).masked_fill(~bad, -1).argmax())
        at = [int(i) for i in torch.unravel_index(torch.tensor(flat), got.shape)]
        raise AssertionError(
            f"{what}: {float(bad.double().mean()):.2%} of elements out of bounds, worst at {at}: "
            f"got {got.flatten()[flat]:.6g}, expected {want.flatten()[flat]:.6g}"
        )
    diff = calc_diff(got, want)
    assert diff <= cosine, f"{what}: calc_diff {diff:.3e} above {cosine:.1e}"


def assert_lse(got: torch.Tensor, want: torch.Tensor, what: str, atol: float = 1e-5) -> None:
    """Fail unless infinities are equal and the rest is within ``atol`` or a relative 8.01/65536.

    Args:
        got: ``[num_tokens, num_heads]``, fp32.
        want: same shape, fp32 or fp64.
        what: op and parameters, for the message.
        atol: absolute bound.

    Raises:
        AssertionError: with the worst coordinate.
    """
    got, want = got.double().cpu(), want.double().cpu()
    infinite = want.isinf()
    same = got[infinite] == want[infinite]
    assert bool(same.all()), f"{what}: an infinite lse is {got[infinite][~same].tolist()[:4]}"
    got, want = got.masked_fill(infinite, 0), want.masked_fill(infinite, 0)
    error = (got - want).abs()
    bad = ~((error <= atol) | (error <= 8.01 / 65536 * want.abs()))
    assert not bad.any(), (
        f"{what}: lse off by {float(error[bad].max()):.3e} at {bad.nonzero()[0].tolist()}"
    )
