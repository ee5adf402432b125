"""GLM's MTP layer as SGLang's NextN draft model."""

from sglang.srt.models import glm4_moe

from sglang_glm.models.glm_moe_dsa import GlmModelMixin


class GlmMoeDsaForCausalLMNextN(GlmModelMixin, glm4_moe.GlmMoeDsaForCausalLMNextN):
    """The draft model; takes the target's embedding and head."""

    is_nextn = True


EntryClass = GlmMoeDsaForCausalLMNextN
