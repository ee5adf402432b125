"""Random weights under which attention matters, in place of SGLang's for `--load-format dummy`.

SGLang draws weights and norms from ±1e-3. Every layer is then close to the identity, so two servers
give the same tokens whatever their attention computes. Here norms are one, products keep their size, and
the attention's output is as large as the residual beside it. Each parameter is seeded by its name, so
every server of a shape has the same weights; experts and shares of the LM head also by their rank, so
that no two are alike: two equal halves of a vocabulary would tie in every token.
"""

from __future__ import annotations

import zlib

import torch

#: Standard deviation of FP8 codes, and of the weights that they stand for.
CODE_STD, WEIGHT_STD = 64.0, 1 / 64
#: Attention averages thousands of values; its output is enlarged by this.
OUTPUT_GAIN = 8.0


def initialize(model: torch.nn.Module, *_args: object, **_kwargs: object) -> None:
    """REPLACE hook of SGLang's `initialize_dummy_weights`."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                fill(name, parameter.data, rank if is_share(model, name, parameter) else 0)


def is_share(model: torch.nn.Module, name: str, parameter: torch.Tensor) -> bool:
    """Whether other ranks hold other rows of this parameter, instead of the same."""
    if "lm_head" in name:
        return parameter.shape[0] < model.config.vocab_size
    return ".experts." in name


def fill(name: str, data: torch.Tensor, rank: int = 0) -> None:
    """Draw one parameter; `rank` is that of its holder where ranks hold different ones."""
    gain = OUTPUT_GAIN if ".o_proj." in name else 1.0
    if name.endswith("weight_scale_inv"):
        data.fill_(gain * WEIGHT_STD / CODE_STD)
    elif "scale" in name.rsplit(".", 1)[-1]:
        data.fill_(1.0)
    elif data.ndim < 2:
        data.fill_(0.0 if name.endswith("bias") else 1.0)
    else:
        generator = torch.Generator(device=data.device).manual_seed(
            zlib.crc32(name.encode()) + rank
        )
        if torch.finfo(data.dtype).bits < 16:
            codes = torch.empty(data.shape, dtype=torch.float16, device=data.device)
            data.copy_(codes.normal_(0, CODE_STD, generator=generator).clamp_(-448, 448))
        elif "embed_tokens" in name:
            data.normal_(0, 0.5, generator=generator)
        else:
            data.normal_(0, gain * data.shape[-1] ** -0.5, generator=generator)


def register() -> None:
    """Entry point of a plugin that the test writes beside the server."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.model_loader.loader.initialize_dummy_weights", initialize, HookType.REPLACE
    )
