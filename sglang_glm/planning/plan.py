"""One plan: memory, traffic and time of a model on a layout under a workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_glm.planning import collectives, memory, roofline, speculation, traffic, weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_glm.planning.collectives import Collective
    from sglang_glm.planning.hardware import Gpu
    from sglang_glm.planning.memory import MemoryPlan
    from sglang_glm.planning.roofline import KernelRates, TimedTerm
    from sglang_glm.planning.speculation import MtpShape
    from sglang_glm.planning.traffic import ModelSetup, RowLoad, Term

DEFAULT_ACCEPT_LENGTH = 3.5
"""Tokens per round of a 5-1-6 chain pinned by published GLM-5 benchmarks; agents reach 4 to 4.5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the operator asks for.

    Attributes:
        context_tokens: Length of every request, prompt and answer.
        concurrency: Requests that decode at once, over the whole replica.
        chunk_tokens: `--chunked-prefill-size`, over all attention groups.
        mtp: Draft chain, `None` for plain decoding.
        rows_share_index_keys: The scoring kernel reads keys once for all rows of a request.
    """

    context_tokens: int
    concurrency: int
    chunk_tokens: int
    mtp: MtpShape | None = None
    rows_share_index_keys: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One forward pass, or several equal ones.

    Attributes:
        repeats: How often the pass runs; all other figures are of one pass.
        num_layers: Decoder or MTP layers of the pass.
    """

    name: str
    repeats: int
    num_layers: int
    terms: list[Term]
    collectives: list[Collective]

    @property
    def hbm_bytes(self) -> float:
        """Traffic of one pass on one GPU."""
        return sum(term.hbm_bytes for term in self.terms)

    @property
    def flops(self) -> float:
        """Matrix arithmetic of one pass on one GPU."""
        return sum(term.flops for term in self.terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The whole bill. `decode` is one token a request; `mtp_round` yields several."""

    setup: ModelSetup
    gpu: Gpu
    workload: Workload
    memory: MemoryPlan
    decode: Phase
    mtp_round: list[Phase]
    first_chunk: list[Phase]
    last_chunk: list[Phase]

    def timed(self, phase: Phase, rates: KernelRates) -> list[TimedTerm]:
        """Times of one pass of a phase."""
        layout = self.setup.layout
        return roofline.time_step(
            phase.terms,
            phase.collectives,
            self.gpu,
            rates,
            local_heads=self.setup.config.num_attention_heads // layout.attn_tp_size,
            num_layers=phase.num_layers,
            gpus_per_node=layout.gpus_per_node,
        )

    def phases_us(self, phases: Sequence[Phase], rates: KernelRates) -> float:
        """Time of phases with their repeats."""
        return sum(phase.repeats * roofline.total_us(self.timed(phase, rates)) for phase in phases)

    def break_even_accept_length(self, rates: KernelRates) -> float | None:
        """Accept length from which the MTP round pays, `None` without MTP."""
        if not self.mtp_round:
            return None
        return speculation.break_even_accept_length(
            self.phases_us(self.mtp_round, rates), self.phases_us([self.decode], rates)
        )

    def prefill_us(self, rates: KernelRates) -> float:
        """Time to prefill one request per attention group, chunk by chunk, cold cache."""
        chunk = chunk_tokens_per_group(self.setup, self.workload)
        total = 0.0
        for prefix in range(0, self.workload.context_tokens, chunk):
            new_tokens = min(chunk, self.workload.context_tokens - prefix)
            phases = prefill_phases(self.setup, self.workload, prefix, new_tokens)
            total += self.phases_us(phases, rates)
        return total

    def requests_that_fit(self) -> int:
        """Requests of the workload's length that the replica can hold."""
        mtp = self.workload.mtp
        return self.memory.requests_that_fit(
            self.workload.context_tokens,
            overhang_tokens=mtp.num_draft_tokens if mtp is not None else 0,
        )


def build_plan(setup: ModelSetup, gpu: Gpu, workload: Workload) -> Plan:
    """Compute all parts.

    Args:
        setup: Model, layout, formats and routing.
        gpu: Ceilings.
        workload: Lengths and concurrency.

    Raises:
        ValueError: For a layout the model cannot be split into, a context beyond the model's
            positions, a workload that is not positive, or weights that do not fit.
    """
    _check_workload(setup, workload)
    setup.layout.check(setup.config)
    if setup.precision == "fp8":
        weights.check_fp8_blocks(setup.config, setup.layout)
    if workload.mtp is not None and setup.config.mtp_layer_id is None:
        raise ValueError(
            "plan: the model has no MTP layer (num_nextn_predict_layers is 0); drop the MTP options"
        )
    groups = setup.layout.attn_dp_size
    memory_plan = memory.plan_memory(
        setup.config,
        setup.layout,
        gpu,
        precision=setup.precision,
        kv_dtype=setup.kv_dtype,
        with_mtp=workload.mtp is not None,
        reserve=memory.ReserveInputs(
            chunk_tokens=workload.chunk_tokens,
            max_graph_batch=-(-workload.concurrency // groups),
        ),
    )
    chunk = chunk_tokens_per_group(setup, workload)
    last_prefix = max(0, workload.context_tokens - chunk)
    return Plan(
        setup=setup,
        gpu=gpu,
        workload=workload,
        memory=memory_plan,
        decode=decode_phase(setup, workload),
        mtp_round=mtp_phases(setup, workload),
        first_chunk=prefill_phases(setup, workload, 0, min(chunk, workload.context_tokens)),
        last_chunk=prefill_phases(
            setup, workload, last_prefix, workload.context_tokens - last_prefix
        ),
    )


def _check_workload(setup: ModelSetup, workload: Workload) -> None:
    for name in ("context_tokens", "concurrency", "chunk_tokens"):
        if getattr(workload, name) < 1:
            raise ValueError(f"plan: {name} is {getattr(workload, name)}, expected at least 1")
    if workload.context_tokens > setup.config.max_position_embeddings:
        raise ValueError(
            f"plan: context_tokens is {workload.context_tokens}, expected at most "
            f"max_position_embeddings={setup.config.max_position_embeddings}; shorten the context"
        )


def chunk_tokens_per_group(setup: ModelSetup, workload: Workload) -> int:
    """Prefill tokens of one attention group: SGLang divides the chunk among the groups."""
    return max(1, workload.chunk_tokens // setup.layout.attn_dp_size)


def decode_phase(setup: ModelSetup, workload: Workload) -> Phase:
    """One token of every request, without drafts."""
    load = traffic.decode_load(
        setup, context_tokens=workload.context_tokens, concurrency=workload.concurrency
    )
    return _target_phase("decode step", setup, load)


def prefill_phases(
    setup: ModelSetup, workload: Workload, prefix_tokens: int, chunk_tokens: int
) -> list[Phase]:
    """One chunk on every attention group; with MTP the draft layer reads the prompt too."""
    load = traffic.prefill_load(setup, prefix_tokens=prefix_tokens, chunk_tokens=chunk_tokens)
    name = f"prefill of {chunk_tokens:,} tokens after {prefix_tokens:,}"
    phases = [_target_phase(name, setup, load)]
    if workload.mtp is not None:
        phases.append(_mtp_phase(f"draft {name}", setup, load, repeats=1, scores_index=True))
    return phases


def mtp_phases(setup: ModelSetup, workload: Workload) -> list[Phase]:
    """Verify, draft-extend and draft steps of one round; empty without MTP."""
    mtp = workload.mtp
    if mtp is None:
        return []
    wide, narrow = (
        traffic.decode_load(
            setup,
            context_tokens=workload.context_tokens,
            concurrency=workload.concurrency,
            rows_per_request=rows,
            rows_share_index_keys=workload.rows_share_index_keys,
        )
        for rows in (mtp.num_draft_tokens, 1)
    )
    phases = [
        _target_phase("verify", setup, wide),
        _mtp_phase("draft extend", setup, wide, repeats=1, scores_index=True),
    ]
    if mtp.num_steps > 1:
        scores_index = not setup.config.index_share_for_mtp_iteration
        phases.append(
            _mtp_phase(
                "draft step", setup, narrow, repeats=mtp.num_steps - 1, scores_index=scores_index
            )
        )
    return phases


def _target_phase(name: str, setup: ModelSetup, load: RowLoad) -> Phase:
    return Phase(
        name=name,
        repeats=1,
        num_layers=setup.config.num_hidden_layers,
        terms=traffic.target_terms(setup, load),
        collectives=collectives.forward_collectives(
            setup.config,
            setup.layout,
            num_tokens=load.rows_total,
            num_logit_rows=load.logit_rows_total,
        ),
    )


def _mtp_phase(
    name: str, setup: ModelSetup, load: RowLoad, *, repeats: int, scores_index: bool
) -> Phase:
    return Phase(
        name=name,
        repeats=repeats,
        num_layers=1,
        terms=traffic.mtp_terms(setup, load, scores_index=scores_index),
        collectives=collectives.forward_collectives(
            setup.config,
            setup.layout,
            num_tokens=load.rows_total,
            num_logit_rows=load.logit_rows_total,
            num_dense_layers=0,
            num_moe_layers=1,
        ),
    )
