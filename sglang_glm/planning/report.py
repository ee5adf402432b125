"""A plan as a dictionary for machines and as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_glm.planning import flags, kv_cache, memory, roofline, weights
from sglang_glm.planning.collectives import lm_head_gather_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_glm.planning.plan import Phase, Plan

_CAPACITY_LENGTHS_TOKENS = (8_192, 32_768, 131_072, 262_144, 1_048_576)

NOT_MODELLED = (
    "activations, norms, quantisation and the write of new cache rows",
    "host time between steps, sampling, tokenisation and HTTP",
    "overlap of communication with computation (SGLang's two-batch overlap)",
    "efficiency of the dense and grouped matrix kernels: they count at the ceiling",
    "the kernels that score and select for a prefill chunk: they count at the rates of the decode kernels",
    "imbalance between ranks beyond the given expert histogram",
    "the exchange of queries and partial attention under decode context parallelism",
)


def phase_to_dict(plan: Plan, phase: Phase) -> dict[str, object]:
    """Terms, collectives and times of one pass of a phase."""
    rates = roofline.known_rates(plan.gpu)
    ideal = plan.timed(phase, roofline.IDEAL_RATES)
    expected = None if rates is None else plan.timed(phase, rates)
    gpus_per_node = plan.setup.layout.gpus_per_node
    return {
        "name": phase.name,
        "repeats": phase.repeats,
        "hbm_bytes_per_gpu": phase.hbm_bytes,
        "flops_per_gpu": phase.flops,
        "roofline_us": roofline.total_us(ideal),
        "expected_us": None if expected is None else roofline.total_us(expected),
        "bounded_by": roofline.slowest(ideal).name,
        "terms": [
            {
                "name": term.name,
                "hbm_bytes": term.hbm_bytes,
                "flops": term.flops,
                "math": term.math,
                "roofline_us": timed.time_us,
                "bound": timed.bound,
            }
            for term, timed in zip(phase.terms, ideal)
        ],
        "collectives": [
            {
                "name": item.name,
                "layers": item.layer_kind,
                "count": item.count,
                "message_bytes": item.message_bytes,
                "total_message_bytes": item.total_message_bytes,
                "sent_bytes_per_gpu": item.sent_bytes_per_gpu,
                "group_size": item.group_size,
                "time_us": item.time_us(plan.gpu, gpus_per_node),
            }
            for item in phase.collectives
        ],
        "expected_terms_us": None
        if expected is None
        else [{"name": term.name, "time_us": term.time_us} for term in expected],
    }


def plan_to_dict(plan: Plan, model: str) -> dict[str, object]:
    """Everything, units in the names, plain types only."""
    setup, workload = plan.setup, plan.workload
    config, layout = setup.config, setup.layout
    with_mtp = workload.mtp is not None
    groups = weights.parameters_by_group(config, with_mtp=with_mtp)
    mtp = workload.mtp
    fits = plan.requests_that_fit()
    return {
        "model": model,
        "gpu": {"name": plan.gpu.name, "source": plan.gpu.source},
        "layout": {
            "tp_size": layout.tp_size,
            "attn_dp_size": layout.attn_dp_size,
            "ep_size": layout.ep_size,
            "dcp_size": layout.dcp_size,
            "moe_dispatch": layout.moe_dispatch,
            "num_nodes": layout.num_nodes,
        },
        "workload": {
            "context_tokens": workload.context_tokens,
            "concurrency": workload.concurrency,
            "chunk_tokens": workload.chunk_tokens,
            "mtp_steps": mtp.num_steps if mtp is not None else 0,
        },
        "formats": {"weights": setup.precision, "kv_cache": setup.kv_dtype},
        "routing": setup.routing.describe(),
        "parameters": {
            "total": sum(groups.values()),
            "active": weights.active_parameters(config),
            "by_group": groups,
        },
        "kv": {
            "latent_row_bytes": kv_cache.latent_row_bytes(config, setup.kv_dtype),
            "index_key_bytes": kv_cache.index_key_bytes(config),
            "latent_bytes_per_token": kv_cache.latent_bytes_per_token(config, setup.kv_dtype),
            "index_bytes_per_token": kv_cache.index_bytes_per_token(config),
            "mtp_bytes_per_token": kv_cache.mtp_bytes_per_token(config, setup.kv_dtype)
            if with_mtp
            else 0,
            "bytes_per_token_per_gpu": plan.memory.kv_bytes_per_token,
        },
        "memory_per_gpu_bytes": {
            "capacity": plan.memory.gpu_bytes,
            "weights": plan.memory.weights_bytes,
            "weights_by_group": plan.memory.weights,
            "absorbed": plan.memory.absorbed_bytes,
            "driver": plan.memory.driver_bytes,
            "reserve": plan.memory.reserve_bytes,
            "reserve_by_part": plan.memory.reserve,
            "kv_pool": plan.memory.kv_pool_bytes,
        },
        "transient_bytes": transient_bytes(plan),
        "capacity": {
            "tokens_per_attention_group": plan.memory.tokens_per_group,
            "attention_groups": plan.memory.num_groups,
            "requests_that_fit": fits,
            "requests_by_length": {
                str(length): plan.memory.requests_that_fit(length)
                for length in capacity_lengths(plan)
            },
            "mem_fraction_static": plan.memory.mem_fraction_static,
        },
        "decode": phase_to_dict(plan, plan.decode),
        "mtp_round": [phase_to_dict(plan, phase) for phase in plan.mtp_round],
        "prefill": {
            "first_chunk": [phase_to_dict(plan, phase) for phase in plan.first_chunk],
            "last_chunk": [phase_to_dict(plan, phase) for phase in plan.last_chunk],
            "whole_prompt_us": times_us(plan)["prefill"],
        },
        "times_us": times_us(plan),
        "break_even_accept_length": break_even(plan),
        "not_modelled": list(NOT_MODELLED),
        "launch": launch(plan, model),
    }


def capacity_lengths(plan: Plan) -> list[int]:
    """Lengths for the capacity table: the usual ones within the model's positions, and its own."""
    longest = plan.setup.config.max_position_embeddings
    lengths = {length for length in _CAPACITY_LENGTHS_TOKENS if length <= longest}
    return sorted(lengths | {plan.workload.context_tokens})


def transient_bytes(plan: Plan) -> dict[str, float]:
    """Buffers that live in the reserve during a step, the ones that grow with the workload."""
    setup, workload = plan.setup, plan.workload
    rows_per_request = workload.mtp.num_draft_tokens if workload.mtp is not None else 1
    rows = workload.concurrency / setup.layout.attn_dp_size * rows_per_request
    head_rows = rows
    if not setup.layout.lm_head_per_attn_group:
        head_rows = workload.concurrency * rows_per_request
    free = plan.memory.gpu_bytes * (1.0 - plan.memory.mem_fraction_static)
    return {
        "decode_index_scores": memory.index_score_bytes(rows, workload.context_tokens),
        "prefill_index_scores_budget": memory.PREFILL_SCORE_SHARE * free,
        "lm_head_logits": memory.logits_bytes(setup.config, head_rows),
        "lm_head_gather_message": lm_head_gather_bytes(setup.config, head_rows),
    }


def times_us(plan: Plan) -> dict[str, dict[str, float | None]]:
    """Decode step, MTP round and prefill of one prompt: roofline and expected."""
    rates = roofline.known_rates(plan.gpu)
    ideal = roofline.IDEAL_RATES
    return {
        "decode": {
            "roofline": plan.phases_us([plan.decode], ideal),
            "expected": None if rates is None else plan.phases_us([plan.decode], rates),
        },
        "mtp_round": {
            "roofline": plan.phases_us(plan.mtp_round, ideal) if plan.mtp_round else None,
            "expected": plan.phases_us(plan.mtp_round, rates)
            if plan.mtp_round and rates is not None
            else None,
        },
        "prefill": {
            "roofline": plan.prefill_us(ideal),
            "expected": None if rates is None else plan.prefill_us(rates),
        },
    }


def break_even(plan: Plan) -> dict[str, float | None]:
    """Accept length from which MTP pays, by roofline and with known kernel rates."""
    rates = roofline.known_rates(plan.gpu)
    return {
        "roofline": plan.break_even_accept_length(roofline.IDEAL_RATES),
        "expected": None if rates is None else plan.break_even_accept_length(rates),
    }


def launch(plan: Plan, model: str) -> dict[str, object]:
    """Recommended flags, or why there are none."""
    try:
        words = flags.launch_flags(plan, model)
    except ValueError as error:
        return {"refused": str(error)}
    return {"flags": words, "environment": flags.environment(plan)}


def render_text(plan: Plan, model: str, *, accept_length: float) -> str:
    """The plan for a terminal.

    Args:
        plan: The plan.
        model: Name for the heading and the flags.
        accept_length: Tokens per MTP round to show speeds for.
    """
    sections = [
        f"{_heading(plan, model)}\n{_summary(plan, accept_length)}",
        _memory_section(plan),
        _capacity_section(plan),
        *(_phase_section(plan, phase) for phase in _shown_phases(plan)),
        _speed_section(plan, accept_length),
        _launch_section(plan, model),
        "Not modelled: " + "; ".join(NOT_MODELLED) + ".",
    ]
    return "\n\n".join(sections)


def _shown_phases(plan: Plan) -> list[Phase]:
    return [plan.decode, *plan.mtp_round, *plan.last_chunk]


def _heading(plan: Plan, model: str) -> str:
    setup = plan.setup
    layout = setup.layout
    total = sum(weights.parameters_by_group(setup.config).values())
    with_mtp = " with MTP" if setup.config.mtp_layer_id is not None else ""
    lines = [
        f"{model}: {total / 1e9:.1f} B parameters{with_mtp}, "
        f"{weights.active_parameters(setup.config) / 1e9:.1f} B active a token",
        f"{layout.tp_size} x {plan.gpu.name}: attention TP {layout.attn_tp_size} x DP "
        f"{layout.attn_dp_size}, experts EP {layout.ep_size} x TP {layout.moe_tp_size}, "
        f"dispatch {layout.moe_dispatch}, DCP {layout.dcp_size}",
        f"weights {setup.precision}, KV rows {setup.kv_dtype}; experts hit: "
        f"{setup.routing.describe()}",
        f"ceilings: {plan.gpu.source}",
    ]
    return "\n".join(lines)


def _summary(plan: Plan, accept_length: float) -> str:
    """The answer in a sentence; the sections below say how it comes about."""
    kind = "roofline" if roofline.known_rates(plan.gpu) is None else "expected"
    times, even = times_us(plan), break_even(plan)[kind]
    requests, length = plan.workload.concurrency, plan.workload.context_tokens
    step, mtp_round = times["decode"][kind], times["mtp_round"][kind]
    assert step is not None, "every plan has a decode step"
    text = (
        f"=> {plan.requests_that_fit():,} requests of {length:,} tokens fit; {kind} with "
        f"{requests:,}: {step / 1e3:.1f} ms a step, {1e6 * requests / step:,.0f} token/s"
    )
    if mtp_round is None or even is None:
        return text
    rate = 1e6 * requests * accept_length / mtp_round
    return (
        f"{text}; MTP {mtp_round / 1e3:.1f} ms a round, {rate:,.0f} token/s at {accept_length:g} "
        f"tokens a round, pays from {even:.2f}"
    )


def _memory_section(plan: Plan) -> str:
    plan_memory = plan.memory
    rows: list[Sequence[str]] = [
        (f"weights: {name.replace('_', ' ')}", _gb(size))
        for name, size in plan_memory.weights.items()
        if size
    ]
    rows.append(("weights: absorbed kv_b (BF16 copies)", _gb(plan_memory.absorbed_bytes)))
    rows.append(("driver and communicators (assumed)", _gb(plan_memory.driver_bytes)))
    rows += [(f"reserve: {name}", _gb(size)) for name, size in plan_memory.reserve.items() if size]
    rows.append(("KV cache", _gb(plan_memory.kv_pool_bytes)))
    rows.append(("total", _gb(plan_memory.gpu_bytes)))
    table = _table(("memory of one GPU", "GB"), rows)
    transient = transient_bytes(plan)
    return (
        f"{table}\n"
        f"inside the reserve: index scores of a decode step "
        f"{_gb(transient['decode_index_scores'])} GB, of prefill at most "
        f"{_gb(transient['prefill_index_scores_budget'])} GB; LM-head logits "
        f"{_gb(transient['lm_head_logits'])} GB"
    )


def _capacity_section(plan: Plan) -> str:
    config, setup = plan.setup.config, plan.setup
    latent = kv_cache.latent_bytes_per_token(config, setup.kv_dtype)
    index = kv_cache.index_bytes_per_token(config)
    draft = kv_cache.mtp_bytes_per_token(config, setup.kv_dtype) if plan.mtp_round else 0
    rows = [
        (f"{length:,}", f"{plan.memory.requests_that_fit(length):,}")
        for length in capacity_lengths(plan)
    ]
    fits, asked = plan.requests_that_fit(), plan.workload.concurrency
    too_many = f"\nonly {fits:,} of the {asked:,} requests fit at once; the times below are of all {asked:,}"
    return (
        f"{_table(('tokens of a request', 'requests that fit'), rows)}\n"
        f"a token costs {plan.memory.kv_bytes_per_token:,.0f} B on each GPU that holds its request "
        f"({latent:,} latent, {index:,} index, {draft:,} draft before any split); each of "
        f"{plan.memory.num_groups} attention groups caches {plan.memory.tokens_per_group:,} tokens"
        f"{too_many if fits < asked else ''}"
    )


def _phase_section(plan: Plan, phase: Phase) -> str:
    rates = roofline.known_rates(plan.gpu)
    ideal = plan.timed(phase, roofline.IDEAL_RATES)
    expected = plan.timed(phase, rates) if rates is not None else []
    expected_by_name = {term.name: f"{term.time_us:,.0f}" for term in expected}
    rows: list[Sequence[str]] = [
        (
            term.name,
            _gb(term.hbm_bytes),
            f"{term.flops / 1e9:,.1f}",
            f"{timed.time_us:,.0f}",
            timed.bound,
            expected_by_name.get(term.name, "-"),
        )
        for term, timed in zip(phase.terms, ideal)
    ]
    rows += [
        (
            f"{item.name}, {item.layer_kind}, {item.count} x {item.message_bytes / 1e6:,.3f} MB",
            "",
            "",
            f"{timed.time_us:,.0f}",
            timed.bound,
            expected_by_name.get(item.name, "-"),
        )
        for item, timed in zip(phase.collectives, ideal[len(phase.terms) :])
    ]
    if rates is not None:
        fixed_us = expected_by_name[roofline.FIXED_TERM]
        rows.append((roofline.FIXED_TERM, "", "", "", "fixed", fixed_us))
    totals = (
        f"sum, bounded by {roofline.slowest(ideal).name}",
        _gb(phase.hbm_bytes),
        f"{phase.flops / 1e9:,.1f}",
        f"{roofline.total_us(ideal):,.0f}",
        "",
        f"{roofline.total_us(expected):,.0f}" if expected else "-",
    )
    repeats = f", {phase.repeats} times a round" if phase.repeats > 1 else ""
    header = (
        f"{phase.name}{repeats}, one GPU",
        "GB",
        "GFLOP",
        "roofline us",
        "bound",
        "expected us",
    )
    return _table(header, [*rows, totals])


def _speed_section(plan: Plan, accept_length: float) -> str:
    rows: list[Sequence[str]] = []
    times = times_us(plan)
    concurrency = plan.workload.concurrency
    for kind in ("roofline", "expected"):
        decode, mtp_round = times["decode"][kind], times["mtp_round"][kind]
        prefill, even = times["prefill"][kind], break_even(plan)[kind]
        if decode is None or prefill is None:
            continue
        rows.append(
            (
                kind,
                f"{decode / 1e3:.2f}",
                f"{1e6 * concurrency / decode:,.0f}",
                f"{mtp_round / 1e3:.2f}" if mtp_round is not None else "-",
                f"{even:.2f}" if even is not None else "-",
                f"{1e6 * concurrency * accept_length / mtp_round:,.0f}"
                if mtp_round is not None
                else "-",
                f"{prefill / 1e6:.2f}",
            )
        )
    header = (
        f"{concurrency} requests of {plan.workload.context_tokens:,}",
        "step ms",
        "token/s",
        "MTP round ms",
        "break-even accept",
        f"token/s at {accept_length:g}",
        "prompt s",
    )
    return _table(header, rows)


def _launch_section(plan: Plan, model: str) -> str:
    try:
        words = flags.launch_flags(plan, model)
    except ValueError as error:
        return f"No launch flags: {error}"
    variables = "".join(f"{name}={value} " for name, value in flags.environment(plan).items())
    lines = [f"{variables}python -m sglang.launch_server"]
    for word in words:
        if word.startswith("--"):
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}"
    return "Launch:\n" + " \\\n".join(lines)


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:,.3f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        return "  ".join(cells).rstrip()

    ruler = "  ".join("-" * width for width in widths)
    return "\n".join([line(header), ruler, *(line(row) for row in rows)])
