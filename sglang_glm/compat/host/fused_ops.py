"""Forwards of SGLang's fused ops on the CPU, registered the way that out-of-tree platforms do."""

from sglang.kernels.fused_op import BaseFusedOp

_KEY = "native"


def register_indexer() -> None:
    """The lightning indexer in plain torch."""
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer

    from sglang_glm.layers.indexer import indexer_forward

    BaseFusedOp.register_oot_forward(Indexer, indexer_forward, _KEY)


def register_experts() -> None:
    """Routed experts in plain torch."""
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    from sglang_glm.layers.experts import experts_forward

    BaseFusedOp.register_oot_forward(UnquantizedFusedMoEMethod, experts_forward, _KEY)
