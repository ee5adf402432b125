"""GLM-5.x on SGLang's DeepSeek-V2 stack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.models import glm4_moe
from sglang.srt.runtime_context import get_device

from sglang_glm.config import GlmDsaConfig, fields_to_supply
from sglang_glm.models.weights import CheckpointStream, Tensors

if TYPE_CHECKING:
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from transformers import PretrainedConfig


def read_config(config: PretrainedConfig) -> GlmDsaConfig:
    """Validate `config` and complete it with the fields that SGLang reads and transformers drops.

    Raises:
        ValueError: names the field that cannot be served.
    """
    facts = GlmDsaConfig.from_hf(config)
    for name, value in fields_to_supply(config).items():
        setattr(config, name, value)
    return facts


if TYPE_CHECKING:
    # What the mixin stands in front of, so that its calls to super() are checked.
    from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM as _Model
else:
    _Model = object


def runs_on_cpu() -> bool:
    """Whether the CPU serves, on which FP8 weights are dequantised at load."""
    return torch.device(get_device().device).type == "cpu"


class GlmModelMixin(_Model):
    """What target and draft share: the config and the checkpoint are checked before they are used."""

    is_nextn: bool
    facts: GlmDsaConfig
    model: Any
    lm_head: Any

    def __init__(
        self,
        config: PretrainedConfig,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        facts = read_config(config)
        if runs_on_cpu():
            # Layers are built in the model's dtype; the stream below delivers it.
            quant_config = None
        super().__init__(config, quant_config=quant_config, prefix=prefix)
        self.facts = facts
        self._dtype = torch.get_default_dtype()
        self._loaded = False

    def load_weights(self, weights: Tensors) -> None:
        """Load a checkpoint, or later a part of one.

        Raises:
            ValueError: names a tensor that is unknown, missing, of another shape or without scale.
        """
        dequantize_to = self._dtype if runs_on_cpu() else None
        stream = CheckpointStream(self.facts, is_nextn=self.is_nextn, dequantize_to=dequantize_to)
        super().load_weights(stream.check(weights))
        if not self._loaded:
            # Only the first load must be whole: weight updates send single tensors.
            stream.check_complete()
            self._loaded = True

    def set_embed_and_head(self, embed: torch.Tensor, head: torch.Tensor) -> None:
        """Use another model's embedding and head in place of this one's."""
        del self.model.embed_tokens.weight, self.lm_head.weight
        self.model.embed_tokens.weight = embed
        self.lm_head.weight = head
        if embed.is_cuda:
            torch.cuda.empty_cache()


class GlmMoeDsaForCausalLM(GlmModelMixin, glm4_moe.GlmMoeDsaForCausalLM):
    """The target model."""

    is_nextn = False


EntryClass = GlmMoeDsaForCausalLM
