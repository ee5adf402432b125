"""GLM-5.x on SGLang's DeepSeek-V2 stack."""

from sglang.srt.models import glm4_moe


class GlmMoeDsaForCausalLM(glm4_moe.GlmMoeDsaForCausalLM):
    """The target model."""


EntryClass = GlmMoeDsaForCausalLM
