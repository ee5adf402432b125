"""The draft steps of a round on the CPU: one backend a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_glm.attention.host_backend import GlmDsaHostAttnBackend

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class GlmDsaHostMultiStepBackend:
    """A backend for each draft forward; the round's last draft token needs none."""

    needs_cpu_seq_lens = True

    def __init__(
        self,
        model_runner: ModelRunner,
        topk: int,
        speculative_num_steps: int,
        seed_dsa_topk_from_draft_extend: bool = False,
    ) -> None:
        self.topk = topk
        self.speculative_num_steps = speculative_num_steps
        self.attn_backends = [
            GlmDsaHostAttnBackend(
                model_runner,
                speculative_step_id=step,
                topk=topk,
                speculative_num_steps=speculative_num_steps,
                seed_dsa_topk_from_draft_extend=seed_dsa_topk_from_draft_extend,
            )
            for step in range(speculative_num_steps - 1)
        ]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan the rows of every step: they differ in the positions that they see."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)
