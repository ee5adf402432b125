"""GLM's MTP layer as SGLang's NextN draft model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.models import glm4_moe

from sglang_glm.models.glm_moe_dsa import GlmModelMixin, runs_on_cpu

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from transformers import PretrainedConfig

    from sglang_glm.models.weights import Tensors


class GlmMoeDsaForCausalLMNextN(GlmModelMixin, glm4_moe.GlmMoeDsaForCausalLMNextN):
    """The draft model.

    Row i takes the embedding of token i + 1 and a hidden state of position i that has passed the
    final norm: the target's, and from the second draft step on this model's own. Embedding and head
    are the target's, except where the checkpoint has others under the MTP layer.
    """

    is_nextn = True

    def __init__(
        self,
        config: PretrainedConfig,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(config, quant_config=quant_config, prefix=prefix)
        self._own: set[str] = set()
        if runs_on_cpu():
            # SGLang leaves the indexer out of steps that reuse a selection, and with it the index
            # key that later rounds search. Ours writes the key and reuses the selection itself.
            self.model.decoder.self_attn.skip_topk = False

    def load_weights(self, weights: Tensors) -> None:
        """Load the MTP layer, its own embedding and head included where there are any.

        Raises:
            ValueError: names a tensor that cannot be served.
        """
        super().load_weights(self._load_own(weights))

    def _load_own(self, weights: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        layer = f"model.layers.{self.config.num_hidden_layers}"
        modules = {
            f"{layer}.embed_tokens.weight": self.model.embed_tokens,
            f"{layer}.shared_head.head.weight": self.lm_head,
        }
        for name, tensor in weights:
            # Whoever reads this stream checks the tensor before asking for the next.
            yield name, tensor
            if name in modules:
                modules[name].weight_loader(modules[name].weight, tensor)
                self._own.add(name.rsplit(".", 2)[-2])

    def set_embed_and_head(self, embed: torch.Tensor, head: torch.Tensor) -> None:
        """Use the target's embedding and head in place of those that this model has not loaded.

        A loaded copy of the target's makes way too, so that it does not take memory twice.
        """
        own_embed, own_head = self.model.embed_tokens.weight, self.lm_head.weight
        keeps_embed = "embed_tokens" in self._own and not torch.equal(own_embed, embed)
        keeps_head = "head" in self._own and not torch.equal(own_head, head)
        super().set_embed_and_head(
            own_embed if keeps_embed else embed, own_head if keeps_head else head
        )


EntryClass = GlmMoeDsaForCausalLMNextN
