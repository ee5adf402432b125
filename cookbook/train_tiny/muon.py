"""Muon for matrices and Adam for the rest, over tensors grouped by shape.

Muon (Keller Jordan, 2024) replaces the momentum of a matrix by the nearest orthogonal matrix, found
by five Newton-Schulz steps. Matrices of one shape go through them together.
"""

from __future__ import annotations

import torch

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Push all singular values towards one.

    Args:
        matrices: ``[count, rows, columns]``.
        steps: Newton-Schulz steps.

    Returns:
        The same shape, BF16 on an accelerator.
    """
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


class Optimizer:
    """Muon over linear weights; Adam over embedding, head, router, norms."""

    def __init__(self, parameters: dict[str, torch.Tensor], muon_lr: float, adam_lr: float) -> None:
        """Group the parameters.

        Args:
            parameters: Name to parameter. ``e_score_correction_bias`` is left alone.
            muon_lr: Of matrices; an update has about this root mean square times 0.2.
            adam_lr: Of the others.
        """
        self.parameters = parameters
        self.muon_lr, self.adam_lr = muon_lr, adam_lr
        self.muon: dict[tuple[int, ...], list[str]] = {}
        self.adam: list[str] = []
        for name, value in parameters.items():
            if name.endswith("e_score_correction_bias"):
                continue
            special = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
            if value.ndim == 2 and not name.endswith(special):
                self.muon.setdefault(tuple(value.shape), []).append(name)
            else:
                self.adam.append(name)
        self.state: dict[str, torch.Tensor] = {}
        for name, value in parameters.items():
            self.state[f"m.{name}"] = torch.zeros_like(value)
        for name in self.adam:
            self.state[f"v.{name}"] = torch.zeros_like(parameters[name])
        self.steps = 0

    @torch.no_grad()
    def step(self, factor: float, momentum: float = 0.95) -> None:
        """Apply the gradients and clear them; what has none stays as it is.

        Args:
            factor: Multiplies both learning rates.
            momentum: Of Muon.
        """
        self.steps += 1
        for shape, group in self.muon.items():
            names = [name for name in group if self.parameters[name].grad is not None]
            if not names:
                continue
            values = [self.parameters[name] for name in names]
            grads = [value.grad for value in values]
            moments = [self.state[f"m.{name}"] for name in names]
            torch._foreach_lerp_(moments, grads, 1 - momentum)
            looking_ahead = torch._foreach_lerp(grads, moments, momentum)
            update = orthogonalize(torch.stack(looking_ahead)).float()
            # Moonlight's scale: the root mean square of an update is 0.2 whatever the shape.
            scale = 0.2 * max(shape) ** 0.5
            torch._foreach_add_(values, list(update.unbind()), alpha=-self.muon_lr * factor * scale)
        names = [name for name in self.adam if self.parameters[name].grad is not None]
        values = [self.parameters[name] for name in names]
        grads = [value.grad for value in values]
        first = [self.state[f"m.{name}"] for name in names]
        second = [self.state[f"v.{name}"] for name in names]
        torch._foreach_lerp_(first, grads, 0.1)
        torch._foreach_mul_(second, 0.98)
        torch._foreach_addcmul_(second, grads, grads, 0.02)
        scale = (1 - 0.98**self.steps) ** 0.5 / (1 - 0.9**self.steps)
        roots = torch._foreach_sqrt(second)
        torch._foreach_add_(roots, 1e-10)
        torch._foreach_addcdiv_(values, first, roots, -self.adam_lr * factor * scale)
        for value in self.parameters.values():
            value.grad = None
