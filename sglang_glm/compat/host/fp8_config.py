"""SGLang's FP8 scheme as the CPU reads it: weights are dequantised while they load."""

import torch
from sglang.srt.layers.quantization.fp8 import Fp8Config


class HostFp8Config(Fp8Config):
    """Parses the checkpoint's `quantization_config`; no layer ever multiplies in FP8."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """FP32 too, the truth mode."""
        return [*super().get_supported_act_dtypes(), torch.float32]
