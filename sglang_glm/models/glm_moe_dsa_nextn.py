"""GLM's MTP layer as SGLang's NextN draft model."""

from sglang.srt.models import glm4_moe


class GlmMoeDsaForCausalLMNextN(glm4_moe.GlmMoeDsaForCausalLMNextN):
    """The draft model."""


EntryClass = GlmMoeDsaForCausalLMNextN
