"""The ledger: every place of SGLang that this package enters, in the order of application."""

from functools import partial

from sglang_glm.compat import probes
from sglang_glm.compat.host import dp_attention, forward_batch_info, parallel_state, pool_host
from sglang_glm.compat.model_package import check_model_package
from sglang_glm.compat.moe_a2a import check_backend
from sglang_glm.compat.seams import Scope, Seam

_HOST = "sglang_glm.compat.host"
_CUDA = "sglang_glm.compat.cuda"


def _resolution_hook(
    step: str, implementation: str, *, scope: Scope, why: str, remove_when: str
) -> Seam:
    return Seam(
        target=step,
        kind="resolution_hook",
        scope=scope,
        implementation=implementation,
        why=why,
        remove_when=remove_when,
        probe=partial(probes.check_resolution_hook, step, implementation),
    )


def _replacement(target: str, implementation: str, *, why: str, remove_when: str) -> Seam:
    return Seam(
        target=target,
        kind="replace",
        scope="host",
        implementation=implementation,
        why=why,
        remove_when=remove_when,
    )


SEAMS: tuple[Seam, ...] = (
    Seam(
        target="sglang.srt.models.registry.ModelRegistry",
        kind="registry",
        scope="everywhere",
        implementation="sglang_glm.compat.model_package:select_model_package",
        why="SGLang's GlmMoeDsaForCausalLM checks neither the config nor the checkpoint's tensors",
        remove_when="never: this is SGLang's way to add a model",
        probe=check_model_package,
    ),
    Seam(
        target="sglang.srt.server_args.ServerArgs.add_cli_args",
        kind="after",
        scope="everywhere",
        implementation="sglang_glm.compat.cli_choices:add_choices",
        why="the DSA and all-to-all backend flags accept only the stock names, and SGLang has no registry for them",
        remove_when="SGLang registers these backends by name",
    ),
    Seam(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        kind="around",
        scope="everywhere",
        implementation="sglang_glm.compat.request_checks:validate_one_request",
        why="an empty prompt, ids beyond the vocabulary, more log-probabilities than there are, or a top_k "
        "beyond int32 end the scheduler, and every request with it",
        remove_when="SGLang checks these as it checks token_ids_logprob",
    ),
    Seam(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        kind="around",
        scope="everywhere",
        implementation="sglang_glm.compat.request_checks:generate_request",
        why="a request is copied for each of its n answers before anything is checked: the HTTP server "
        "stands still over a large n, and runs out of memory",
        remove_when="SGLang bounds n",
    ),
    *(
        Seam(
            target=f"sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.{step}"
            "_expert_distribution_record",
            kind="around",
            scope="everywhere",
            implementation="sglang_glm.compat.control_checks:record_experts",
            why="without a recorder a scheduler raises, which ends the server",
            remove_when="SGLang answers that there is no recorder",
        )
        for step in ("start", "stop", "dump")
    ),
    Seam(
        target="sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin._execute_profile",
        kind="around",
        scope="everywhere",
        implementation="sglang_glm.compat.control_checks:execute_profile",
        why="a profile that a scheduler can neither take nor write ends the server, and what it refuses "
        "is answered with 500 and no word",
        remove_when="SGLang checks a profile's request",
    ),
    Seam(
        target="sglang.srt.managers.scheduler_components.profiler_manager.SchedulerProfilerManager._profile",
        kind="around",
        scope="everywhere",
        implementation="sglang_glm.compat.control_checks:profile",
        why="a second profile is started over the first, which ends the server at the next start",
        remove_when="SGLang heeds its own answer that a profile is in progress",
    ),
    Seam(
        target="sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.release_memory_occupation",
        kind="around",
        scope="everywhere",
        implementation="sglang_glm.compat.control_checks:release_memory_occupation",
        why="a scheduler that still serves requests raises, which ends the server",
        remove_when="SGLang answers that the server is busy",
    ),
    Seam(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weights_from_disk",
        kind="around",
        scope="everywhere",
        implementation="sglang_glm.compat.weight_checks:update_weights_from_disk",
        why="weights that do not fit are seen after some have been replaced, and the way back reads them "
        "again, which ends the server",
        remove_when="SGLang goes back to the weights that it had",
    ),
    Seam(
        target="sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
        "update_weights_from_tensor",
        kind="around",
        scope="everywhere",
        implementation="sglang_glm.compat.weight_checks:update_weights_from_tensor",
        why="tensors that cannot be unpacked end the server",
        remove_when="SGLang answers that they cannot",
    ),
    *(
        Seam(
            target=f"sglang.srt.managers.{method}",
            kind="around",
            scope="everywhere",
            implementation=f"sglang_glm.compat.weight_checks:{ours}",
            why="a group of processes that cannot be formed, or was not, ends the server",
            remove_when="SGLang answers that there is no such group",
        )
        for method, ours in (
            (
                "scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
                ".init_weights_update_group",
                "init_weights_update_group",
            ),
            (
                "scheduler.Scheduler.init_weights_send_group_for_remote_instance",
                "init_weights_send_group",
            ),
            ("scheduler.Scheduler.send_weights_to_remote_instance", "send_weights"),
        )
    ),
    Seam(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager.configure_logging",
        kind="around",
        scope="everywhere",
        implementation="sglang_glm.compat.control_checks:configure_logging",
        why="a level that does not exist is kept, and every request after it is answered with 500",
        remove_when="SGLang checks the level before it keeps it",
    ),
    Seam(
        target="sglang.srt.session.session_controller.Session.create_req",
        kind="around",
        scope="everywhere",
        implementation="sglang_glm.compat.session_tree:create_req",
        why="a request that replaces a session's others deletes from a table while iterating over it, "
        "which ends the server",
        remove_when="SGLang iterates over a copy",
    ),
    Seam(
        target="sglang.srt.session.session_controller.SessionReqNode.clear",
        kind="before",
        scope="everywhere",
        implementation="sglang_glm.compat.session_tree:clear_node",
        why="a request id that is used again in a session is deleted twice, which ends the server",
        remove_when="SGLang keeps a node for each request",
    ),
    Seam(
        target="sglang.srt.layers.moe.utils.MoeA2ABackend",
        kind="setting",
        scope="everywhere",
        implementation="sglang_glm.compat.moe_a2a:add_backend",
        why="an enumeration without registry: another name of --moe-a2a-backend raises",
        remove_when="SGLang registers all-to-all backends by name",
        probe=check_backend,
    ),
    Seam(
        target="sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher",
        kind="around",
        scope="everywhere",
        implementation="sglang_glm.compat.moe_a2a:create_moe_dispatcher",
        why="a chain of names without registry: another backend's name raises at the first MoE layer",
        remove_when="SGLang registers all-to-all backends by name",
    ),
    _resolution_hook(
        "handle_a2a_moe",
        "sglang_glm.compat.moe_a2a:handle_a2a_moe",
        scope="everywhere",
        why="expert parallelism is widened to all ranks for the stock all-to-all backends only",
        remove_when="SGLang registers all-to-all backends by name",
    ),
    _resolution_hook(
        "validate_deepep_v2_dispatch_token_budget",
        "sglang_glm.compat.deepep_budget:refuse_small_buffers",
        scope="everywhere",
        why="a batch larger than DeepEP's low-latency buffers stops at graph capture, in a kernel's assertion",
        remove_when="SGLang checks the capacity of --moe-a2a-backend deepep at start",
    ),
    _resolution_hook(
        "validate_deepep_v2_dispatch_token_budget",
        "sglang_glm.compat.topology_refusals:refuse_unread_stripes",
        scope="cuda",
        why="decode context parallelism starts with DSA backends that cannot attend to a part of a "
        "history, and fails at the first request",
        remove_when="SGLang checks DSA backends against --dcp-size",
    ),
    Seam(
        target="sglang.srt.platforms.current_platform.get_kv_pool_cls",
        kind="platform",
        scope="host",
        implementation="sglang_glm.memory.kv_pool:GlmDsaTokenToKVPool",
        why="the stock pool writes and reads through Triton kernels",
        remove_when="never: this is SGLang's way to bring a pool",
        probe=probes.check_host_pool,
    ),
    _resolution_hook(
        "handle_model_specific_adjustments",
        "sglang_glm.compat.refusals:refuse_unserved",
        scope="everywhere",
        why="SGLang serves a GLM config that it misreads, and ignores flags that this model cannot honour",
        remove_when="never: this is SGLang's way to check arguments",
    ),
    _resolution_hook(
        "handle_cpu_backends",
        f"{_HOST}.arg_groups:handle_cpu_backends",
        scope="host",
        why="the stock step picks intel_amx before the model has asked for dsa",
        remove_when="the step asks the platform first",
    ),
    _resolution_hook(
        "handle_model_specific_adjustments",
        f"{_HOST}.arg_groups:handle_model_specific_adjustments",
        scope="host",
        why="the DSA branch asks CUDA for its capability and fails without a device",
        remove_when="the branch asks the platform",
    ),
    _resolution_hook(
        "handle_speculative_decoding",
        f"{_HOST}.speculative_hook:handle_speculative_decoding",
        scope="host",
        why="SGLang accepts draft settings that fail here at the first request",
        remove_when="never: this is SGLang's way to check arguments",
    ),
    _resolution_hook(
        "handle_kv_cache_sharding",
        f"{_HOST}.kv_shard_hook:handle_kv_cache_sharding",
        scope="host",
        why="a sharded cache is accepted with drafts, a host tier and pipelines, which need CUDA or in-tree pools",
        remove_when="never: this is SGLang's way to check arguments",
    ),
    Seam(
        target="sglang.srt.arg_groups.kv_shard_hook.validate_kv_shard_attention_backend",
        kind="around",
        scope="host",
        implementation=f"{_HOST}.kv_shard_hook:validate_kv_shard_attention_backend",
        why="a sharded DSA cache is tied to CUDA, its TRTLLM kernels and Mooncake, in the middle of a step whose "
        "other refusals hold here too",
        remove_when="SGLang asks the DSA backend whether it reads a sharded cache",
    ),
    Seam(
        target="sglang.srt.platforms.interface.reject_out_of_tree_path",
        kind="around",
        scope="host",
        implementation=f"{_HOST}.platform_interface:reject_out_of_tree_path",
        why="a sharded cache is refused on every out-of-tree platform",
        remove_when="SGLang asks the platform for its sharded pool",
    ),
    _replacement(
        "sglang.srt.mem_cache.page_interleave_pool.PageInterleaveDSATokenToKVPool",
        "sglang_glm.memory.sharded_pool:GlmDsaShardedTokenToKVPool",
        why="it gathers with PyNccl and CUDA streams, and SGLang builds it by name",
        remove_when="SGLang asks the platform for its sharded pool",
    ),
    _resolution_hook(
        "handle_hicache",
        f"{_HOST}.hicache_hook:handle_hicache",
        scope="host",
        why="the host tier's default copies are CUDA kernels, and layouts of other accelerators are accepted",
        remove_when="SGLang asks the platform for its host tier's copies",
    ),
    Seam(
        target="sglang.srt.mem_cache.pool_host.mla",
        kind="setting",
        scope="host",
        implementation=f"{_HOST}.pool_host:supply_transfers",
        why="the host pools import their copies from a CUDA library by name, and have none elsewhere",
        remove_when="SGLang has torch forms of the direct copies",
        probe=pool_host.check_transfers,
    ),
    Seam(
        target="sglang.srt.mem_cache.pool_host.common.ALLOC_MEMORY_FUNCS",
        kind="setting",
        scope="host",
        implementation=f"{_HOST}.pool_host:use_pageable_memory",
        why="host pools are pinned, which needs a CUDA driver",
        remove_when="SGLang pins for CUDA devices only",
        probe=pool_host.check_pageable_memory,
    ),
    Seam(
        target="sglang.srt.mem_cache.pool_host.dsa.make_dsa_indexer_pool_decl",
        kind="after",
        scope="host",
        implementation=f"{_HOST}.pool_host:index_pool_decl",
        why="it counts an FP8 key's bytes for every pool, and ours may hold plain keys",
        remove_when="SGLang takes the bytes from the pool's index buffer",
    ),
    _resolution_hook(
        "handle_pd_disaggregation",
        f"{_HOST}.pd_disaggregation_hook:handle_pd_disaggregation",
        scope="host",
        why="transfer backends that need RDMA or a device are accepted and fail in a scheduler process",
        remove_when="never: this is SGLang's way to check arguments",
    ),
    Seam(
        target="sglang.srt.disaggregation.utils.get_kv_class",
        kind="after",
        scope="host",
        implementation=f"{_HOST}.disaggregation:kv_class",
        why="NIXL is told that every cache is device memory, and Mooncake's page numbers wait for a CUDA event",
        remove_when="SGLang tells a transfer backend which memory a pool is in",
    ),
    _replacement(
        "sglang.srt.arg_groups.overrides._dsa_kv_cache_dtype_default",
        f"{_HOST}.arg_groups:dsa_kv_cache_dtype_default",
        why="it forces BF16 or FP8 by CUDA capability and refuses FP32; it is no overridable step",
        remove_when="SGLang lets a platform choose DSA's KV dtype",
    ),
    _replacement(
        "sglang.srt.arg_groups.overrides._dsa_split_backend_resolution",
        f"{_HOST}.arg_groups:dsa_split_backend_resolution",
        why="it picks CUDA backends by capability; it is no overridable step",
        remove_when="SGLang lets a platform choose DSA backends",
    ),
    _replacement(
        "sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper",
        f"{_HOST}.rotary_embedding:get_rope_wrapper",
        why="on device 'cpu' it builds a module that needs AMX kernels",
        remove_when="get_rope_wrapper asks the platform",
    ),
    _replacement(
        "sglang.srt.distributed.bootstrap._init_cpu_threads_env",
        f"{_HOST}.bootstrap:init_cpu_threads_env",
        why="it needs AMX or ARM kernels that the PyPI wheel lacks; without them each rank starts a thread for every core",
        remove_when="SGLang sets the thread count of its ranks with torch",
    ),
    Seam(
        target="sglang.srt.distributed.parallel_state._is_cpu",
        kind="setting",
        scope="host",
        implementation=f"{_HOST}.parallel_state:call_collectives_directly",
        why="all-gather and reduce-scatter go through custom operators that have no CPU form",
        remove_when="the flag asks the platform",
        probe=parallel_state.check_direct_collectives,
    ),
    Seam(
        target="sglang.srt.distributed.parallel_state.initialize_model_parallel",
        kind="around",
        scope="host",
        implementation=f"{_HOST}.parallel_state:initialize_model_parallel",
        why="decode context parallelism is refused on every device that is not in a list",
        remove_when="SGLang asks the platform",
    ),
    Seam(
        target="sglang.srt.model_executor.runner.eager_runner.EagerRunner._execute_extend_cp",
        kind="around",
        scope="host",
        implementation=f"{_HOST}.eager_runner:execute_extend_cp",
        why="prefill context parallelism asks CUDA for its current stream, in the middle of its functions",
        remove_when="the stream is asked for where it is used",
    ),
    _replacement(
        "sglang.srt.distributed.parallel_state.inplace_all_reduce",
        f"{_HOST}.parallel_state:inplace_all_reduce",
        why="a custom operator without a CPU form; integer rows are gathered through it",
        remove_when="SGLang registers it for CPU tensors",
    ),
    _replacement(
        "sglang.srt.distributed.parallel_state.GroupCoordinator.all_to_all_single",
        f"{_HOST}.parallel_state:all_to_all_single",
        why="a custom operator without a CPU form",
        remove_when="SGLang registers it for CPU tensors",
    ),
    _replacement(
        "sglang.srt.distributed.parallel_state.GroupCoordinator.all_gatherv",
        f"{_HOST}.parallel_state:all_gatherv",
        why="it calls PyNccl, which needs CUDA, by name",
        remove_when="SGLang gathers variable lengths over torch.distributed",
    ),
    _replacement(
        "sglang.srt.distributed.parallel_state.GroupCoordinator.reduce_scatterv",
        f"{_HOST}.parallel_state:reduce_scatterv",
        why="it calls PyNccl, which needs CUDA, by name",
        remove_when="SGLang scatters variable lengths over torch.distributed",
    ),
    Seam(
        target="sglang.srt.layers.dp_attention.memcpy_func",
        kind="setting",
        scope="host",
        implementation=f"{_HOST}.dp_attention:copy_with_torch",
        why="rows are copied by a Triton kernel, although SGLang has a torch form",
        remove_when="the choice asks the platform",
        probe=dp_attention.check_copy,
    ),
    Seam(
        target="sglang.srt.model_executor.forward_batch_info._is_cpu",
        kind="setting",
        scope="host",
        implementation=f"{_HOST}.forward_batch_info:use_pageable_memory",
        why="token counts of the other ranks are built in pinned memory, which needs a CUDA driver",
        remove_when="the flag asks the platform",
        probe=forward_batch_info.check_pageable_memory,
    ),
    _replacement(
        "sglang.srt.utils.device_timer._TimingInterval",
        f"{_HOST}.device_timer:HostInterval",
        why="it times forward passes (SGLANG_ENABLE_METRICS_DEVICE_TIMER) with events, which the CPU "
        "has none of",
        remove_when="SGLang times forward passes of the CPU engine",
    ),
    Seam(
        target="sglang.srt.managers.scheduler.Scheduler.maybe_sleep_on_idle",
        kind="after",
        scope="host",
        implementation=f"{_HOST}.scheduler:pause_when_idle",
        why="idle attention-DP ranks spin on the cores that busy ranks compute with",
        remove_when="--sleep-on-idle serves attention DP",
    ),
    Seam(
        target="sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
        "release_memory_occupation",
        kind="around",
        scope="host",
        implementation=f"{_HOST}.weight_updater:release_memory_occupation",
        why="/release_memory_occupation waits for CUDA, which ends the server",
        remove_when="SGLang waits for the platform's device",
    ),
    Seam(
        target="sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
        "resume_memory_occupation",
        kind="around",
        scope="host",
        implementation=f"{_HOST}.weight_updater:resume_memory_occupation",
        why="/resume_memory_occupation of what was not released ends the server",
        remove_when="SGLang leaves alone what is not released",
    ),
    Seam(
        target="sglang.srt.layers.sampler.Sampler._preprocess_logits",
        kind="around",
        scope="host",
        implementation=f"{_HOST}.sampler:preprocess_logits",
        why="a grammar that leaves no token makes a row of NaN, on which torch.multinomial raises: the "
        "server ends",
        remove_when="SGLang ends a request whose grammar allows nothing",
    ),
    _replacement(
        "sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop",
        f"{_HOST}.data_parallel_controller:event_loop",
        why="it polls without waiting: one core is lost to it; the loop has no part that could be hooked",
        remove_when="the controller waits for its socket",
    ),
    _replacement(
        "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend",
        "sglang_glm.attention.host_backend:GlmDsaHostAttnBackend",
        why="every form of the stock backend is a CUDA kernel; a new backend name would have to be "
        "added to five more tables",
        remove_when="SGLang's DSA forms can be registered one by one",
    ),
    Seam(
        target="sglang.srt.layers.attention.dsa.dsa_indexer.Indexer",
        kind="oot_forward",
        scope="host",
        implementation=f"{_HOST}.fused_ops:register_indexer",
        why="the stock indexer calls DeepGEMM, which needs CUDA",
        remove_when="never: this is SGLang's way to bring a forward",
        probe=probes.check_indexer,
    ),
    _replacement(
        "sglang.srt.state_capturer.indexer_topk.create_indexer_capturer",
        f"{_HOST}.indexer_topk:create_indexer_capturer",
        why="it keeps no selections on another device than CUDA and NPU, and pins its memory through CUDA",
        remove_when="SGLang asks the platform for it",
    ),
    Seam(
        target="sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod",
        kind="oot_forward",
        scope="host",
        implementation=f"{_HOST}.fused_ops:register_experts",
        why="the native form fails on expert id -1, which expert parallelism gives to experts of other ranks",
        remove_when="never: this is SGLang's way to bring a forward",
        probe=probes.check_experts,
    ),
    Seam(
        target="sglang.srt.eplb.expert_distribution._ExpertDistributionRecorderReal._on_hook",
        kind="around",
        scope="host",
        implementation=f"{_HOST}.expert_distribution:on_hook",
        why="--expert-distribution-recorder-mode asks CUDA at every MoE layer whether a graph is captured, "
        "which ends the server",
        remove_when="the recorder asks the platform",
    ),
    _replacement(
        "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnMultiStepBackend",
        "sglang_glm.attention.host_multi_step:GlmDsaHostMultiStepBackend",
        why="it plans the draft steps for CUDA graphs; a new backend name would have to be added to "
        "five more tables",
        remove_when="SGLang's DSA forms can be registered one by one",
    ),
    _replacement(
        "sglang.srt.mem_cache.allocation.get_last_loc",
        "sglang.srt.mem_cache.allocation:get_last_loc_torch",
        why="it runs a Triton kernel for every backend but ascend and torch_native; SGLang's own "
        "torch form takes its place",
        remove_when="get_last_loc asks the device",
    ),
    _replacement(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        f"{_HOST}.allocation:assign_req_to_token_pool_func",
        why="it runs a Triton kernel, or a CPU kernel that SGLang's wheel does not carry",
        remove_when="SGLang asks the platform, as it does for assign_extend_cache_locs_func",
    ),
    _replacement(
        "sglang.srt.mem_cache.allocation._alloc_page_size",
        f"{_HOST}.allocation:alloc_page_size",
        why="with decode context parallelism an allocator's page spans all ranks, and only known "
        "devices ask the allocator",
        remove_when="it asks the allocator on every device",
    ),
    _replacement(
        "sglang.srt.layers.dcp.comm.cp_lse_ag_out_rs_mla",
        f"{_HOST}.dcp_comm:cp_lse_ag_out_rs_mla",
        why="the parts of a history are joined by a Triton kernel",
        remove_when="SGLang has a torch form of it",
    ),
    _replacement(
        "sglang.kernels.ops.speculative.cache_locs.assign_draft_cache_locs_contiguous_func",
        f"{_HOST}.cache_locs:assign_draft_cache_locs_contiguous_func",
        why="it runs a Triton kernel, or a CPU kernel that SGLang's wheel does not carry",
        remove_when="SGLang asks the platform, as it does for assign_extend_cache_locs_func",
    ),
    Seam(
        target="sglang.srt.platforms.current_platform.get_speculative_cache_locs_fn",
        kind="platform",
        scope="host",
        implementation=f"{_HOST}.cache_locs:assign_extend_cache_locs",
        why="SGLang has no form of it for an unknown platform",
        remove_when="never: this is SGLang's way to bring one",
        probe=probes.check_speculative_cache_locs,
    ),
    _replacement(
        "sglang.kernels.ops.speculative.spec_tree.build_tree_kernel_efficient_func",
        f"{_HOST}.spec_tree:build_tree_kernel_efficient_func",
        why="it is a CUDA kernel and refuses a platform that it does not know",
        remove_when="SGLang asks the platform, as it does for assign_extend_cache_locs_func",
    ),
    _replacement(
        "sglang.kernels.ops.speculative.spec_tree.verify_tree_greedy_func",
        f"{_HOST}.spec_tree:verify_tree_greedy_func",
        why="it is a CUDA kernel and refuses a platform that it does not know",
        remove_when="SGLang asks the platform, as it does for assign_extend_cache_locs_func",
    ),
    _replacement(
        "sglang.kernels.ops.speculative.eagle.fill_bonus_tokens_func",
        f"{_HOST}.eagle:fill_bonus_tokens_func",
        why="it runs a Triton kernel, or a CPU kernel that SGLang's wheel does not carry",
        remove_when="SGLang asks the platform, as it does for assign_extend_cache_locs_func",
    ),
    Seam(
        target="sglang.srt.speculative.eagle_utils",
        kind="setting",
        scope="host",
        implementation=f"{_HOST}.eagle_utils:supply_sampling",
        why="the functions that verify sampled output are None off CUDA, and a hook cannot wrap None",
        remove_when="SGLang has torch forms of them, or asks the platform",
        probe=probes.check_spec_sampling,
    ),
    Seam(
        target="sglang.srt.arg_groups.overrides._dsa_split_backend_resolution",
        kind="around",
        scope="cuda",
        implementation=f"{_CUDA}.arg_groups:dsa_split_backend_resolution",
        why="with no flag, the decode backend comes from a fixed chain of names",
        remove_when="SGLang asks registered DSA backends whether they serve",
    ),
    Seam(
        target="sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend",
        kind="replace",
        scope="cuda",
        implementation=f"{_CUDA}.dsa_backend:GlmDsaCudaAttnBackend",
        why="its implementations are a chain of names; ours is a subclass, so that every stock name stays",
        remove_when="SGLang's DSA forms can be registered one by one",
    ),
    Seam(
        target="sglang.srt.layers.attention.dsa.dsa_topk_backend.DSATopKBackend.resolve",
        kind="around",
        scope="cuda",
        implementation=f"{_CUDA}.dsa_topk_backend:resolve",
        why="an enumeration without registry: another name of --dsa-topk-backend raises",
        remove_when="SGLang registers top-k backends by name",
    ),
    Seam(
        target="sglang.srt.layers.attention.dsa.dsa_indexer.Indexer._get_topk_paged",
        kind="around",
        scope="cuda",
        implementation=f"{_CUDA}.dsa_indexer:get_topk_paged",
        why="on Hopper each verify token is scored as a request of its own: every key is read once a token",
        remove_when="DeepGEMM scores several tokens a request on Hopper, or paged scoring can be registered",
    ),
    Seam(
        target="sglang.srt.layers.attention.dsa.dsa_indexer.Indexer._get_topk_ragged",
        kind="around",
        scope="cuda",
        implementation=f"{_CUDA}.dsa_indexer:get_topk_ragged",
        why="every rank of an attention group selects for all rows of a prompt; a method, so no subclass is asked",
        remove_when="SGLang divides the rows over the ranks",
    ),
    Seam(
        target="sglang.srt.models.deepseek_nextn.fused_eh_norm",
        kind="around",
        scope="cuda",
        implementation=f"{_CUDA}.eh_norm:fused_eh_norm",
        why="the kernel takes 16-bit rows of 512 to 8,192 columns, so a small checkpoint's drafts, or FP32, "
        "end the server at graph capture",
        remove_when="SGLang norms other rows apart",
    ),
)
