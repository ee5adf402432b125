"""SGLang's model runner in this process, without scheduler or server: a rank, or a pipeline in one."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class Engine:
    """One rank that prefills and decodes batches.

    SGLang keeps its configuration and groups in globals: make one per process, in a process that
    does nothing else (`tests.support.ranks.run_ranks`).
    """

    def __init__(self, model: str, *args: str, rank: int = 0) -> None:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.benchmark import one_batch
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, prepare_server_args

        self._one_batch = one_batch
        self.server_args = prepare_server_args(["--model", model, *args])
        self.server_args.resolve_once()
        publish(self.server_args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
        one_batch._init_process_global_configs()
        ports = PortArgs.init_new(self.server_args)
        self.runner = one_batch.load_model(self.server_args, ports, rank, rank)[0].torch_runner

    @torch.no_grad()
    def logits(self, prompts: list[list[int]], steps: int) -> list[torch.Tensor]:
        """Prefill `prompts` as one batch, then decode greedily.

        Returns:
            Logits `[num_prompts, vocab]` of the prefill's last rows and of each of `steps` steps.
        """
        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()
        requests = self._one_batch.prepare_synthetic_inputs_for_latency_test(
            len(prompts), 0, custom_inputs=prompts
        )
        next_ids, logits, batch = self._one_batch.extend(requests, self.runner)
        found = [logits.clone()]
        for _ in range(steps):
            next_ids, logits = self._one_batch.decode(next_ids, batch, self.runner)
            found.append(logits.clone())
        return found

    @torch.no_grad()
    def chunked_logits(self, prompts: list[list[int]], cut: int) -> torch.Tensor:
        """Prefill the first `cut` tokens of all prompts as one batch, then the rest as another.

        Returns:
            Logits `[num_prompts, vocab]` of the last rows.
        """
        # The benchmark's stand-in for a prefix cache leaves out what a sharded allocator asks it.
        self._one_batch.TreeCacheNamespace.rotation_base_of = lambda cache, node: None
        requests = self._one_batch.prepare_synthetic_inputs_for_latency_test(
            len(prompts), 0, custom_inputs=[ids[:cut] for ids in prompts]
        )
        self._one_batch.extend(requests, self.runner)
        requests = self._one_batch.prepare_extend_inputs_for_correctness_test(
            SimpleNamespace(cut_len=cut), prompts, requests, self.runner
        )
        return self._one_batch.extend(requests, self.runner)[1].clone()

    def stage(self, rank: int, partition: tuple[int, ...]) -> torch.nn.Module:
        """Build and load one pipeline stage as its rank would.

        Args:
            rank: The stage.
            partition: Layers of each stage (`SGLANG_PP_LAYER_PARTITION`).
        """
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader import get_model
        from sglang.srt.runtime_context import get_parallel

        group = SimpleNamespace(
            rank_in_group=rank,
            world_size=len(partition),
            is_first_rank=rank == 0,
            is_last_rank=rank == len(partition) - 1,
        )
        places = {"pp_rank": rank, "pp_size": len(partition), "pp_group": group}
        with (
            _environment("SGLANG_PP_LAYER_PARTITION", ",".join(map(str, partition))),
            get_parallel().override(**places),
        ):
            return get_model(
                model_config=self.runner.model_config,
                load_config=LoadConfig(),
                device_config=DeviceConfig("cpu"),
            )

    @contextlib.contextmanager
    def serving(self, model: torch.nn.Module) -> Iterator[None]:
        """Forward through another model, over the same cache, for a while."""
        self.runner.model.forward = model.forward
        try:
            yield
        finally:
            del self.runner.model.forward


class Stages(torch.nn.Module):
    """Pipeline stages in one process; what a stage sends is copied, as over a wire.

    Attributes:
        sent: Names of the tensors that each stage sent in the last forward.
    """

    def __init__(self, *stages: torch.nn.Module) -> None:
        super().__init__()
        self.stages = torch.nn.ModuleList(stages)
        self.sent: list[list[str]] = []

    def forward(self, input_ids, positions, forward_batch, **kwargs: Any) -> Any:
        from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

        self.sent = []
        result = self.stages[0](input_ids, positions, forward_batch, **kwargs)
        for stage in self.stages[1:]:
            self.sent.append(sorted(result.tensors))
            wire = {name: tensor.clone() for name, tensor in result.tensors.items()}
            result = stage(
                input_ids,
                positions,
                forward_batch,
                **{**kwargs, "pp_proxy_tensors": PPProxyTensors(wire)},
            )
        return result


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
