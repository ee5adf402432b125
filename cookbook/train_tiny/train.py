"""Trains the tiny model: ``python -m cookbook.train_tiny.train --plan PLAN --out DIR``.

Runs for a given time, writes its state every minute and resumes from it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cookbook.train_tiny.index_scores import check_kernel
from cookbook.train_tiny.indexer import index_inputs
from cookbook.train_tiny.losses import compute_losses
from cookbook.train_tiny.model import Model
from cookbook.train_tiny.muon import Optimizer
from cookbook.train_tiny.parameters import init_parameters
from cookbook.train_tiny.plan import Phase, Plan, read_plan
from cookbook.train_tiny.profiling import profile_steps
from cookbook.train_tiny.sequences import batches
from cookbook.train_tiny.spec import TINY
from cookbook.train_tiny.state import LOG, MODEL, STATE, Log, load, save
from cookbook.train_tiny.validate import HeldOut, held_out, validate, validate_wrong_layout

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPILE_LIMIT_S = 170
"""If the first steps take longer, training goes on without compilation."""


def _too_long(_signal: int, _frame: object) -> None:
    raise TimeoutError(f"the first steps took longer than {COMPILE_LIMIT_S} s")


class Trainer:
    """One run."""

    def __init__(self, plan: Plan, out: Path, args: argparse.Namespace, log: Log) -> None:
        """Load or draw the parameters.

        Args:
            plan: What to do.
            out: Where to write.
            args: Of the command line.
            log: The log.
        """
        self.plan, self.out, self.args, self.log = plan, out, args, log
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)
            torch.backends.cuda.matmul.allow_tf32 = True
        if args.resume and (Path(args.resume) / MODEL).is_file():
            parameters = load(Path(args.resume), self.device)
            log.write(event="resumed", directory=Path(args.resume).name)
        else:
            parameters = init_parameters(TINY, args.seed, self.device)
        count = sum(value.numel() for value in parameters.values())
        log.write(event="start", parameters=count, device=self.device, torch=torch.__version__)
        self.model = Model(TINY, parameters)
        self.eager = Model(TINY, parameters)
        for model in (self.model, self.eager):
            model.index_inputs = functools.partial(index_inputs, rounded=True)
        self.optimizer = Optimizer(parameters, plan.muon_lr, plan.adam_lr)
        self.data: HeldOut | None = None
        self.steps = 0
        self.steps_before = self.tokens = 0
        if args.resume and (Path(args.resume) / STATE).is_file():
            state = json.loads((Path(args.resume) / STATE).read_text())
            self.steps_before, self.tokens = state["steps"], state["tokens"]
        self.smooth = 0.0
        self.training_began = time.time()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """BF16 on an accelerator."""
        if self.device == "cuda":
            # A weight first cast where no gradient is wanted would stay without one in the cache.
            return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)
        return contextlib.nullcontext()

    def factor(self) -> float:
        """The learning rate's share of its peak."""
        plan = self.plan
        begun = self.training_began
        part = (time.time() - begun) / max(1.0, self.args.deadline - begun)
        falling = min(1.0, max(0.0, (1 - part) / plan.cool_down))
        return min(1.0, (self.steps + 1) / plan.warm_up) * max(plan.final, falling)

    def step(self, batch: tuple[torch.Tensor, torch.Tensor], phase: Phase) -> dict[str, Any]:
        """Train on one batch."""
        ids = batch[0].to(self.device, non_blocking=True).long()
        weights = batch[1].to(self.device, non_blocking=True)
        with self.autocast():
            scale = phase.losses.at(self.steps + 1)
            losses = compute_losses(self.model, ids, weights, phase.sparse, scale)
        losses.total.backward()
        factor = self.factor()
        self.optimizer.step(factor)
        with torch.no_grad():
            for layer, load in losses.loads.items():
                name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
                bias = self.model.parameters[name]
                bias += self.plan.bias_speed * (load.mean() - load).sign()
        self.steps += 1
        self.tokens += ids.numel()
        return {
            "loss": losses.token,
            "codes": losses.code_accuracy,
            "nextn": losses.nextn,
            "chain": losses.chain,
            "index": losses.index,
            "factor": factor,
        }

    def run(self) -> None:
        """Go through the phases until the time is over."""
        phases = list(self.plan.phases)
        seed = self.args.seed * 100 + int(time.time()) % 97 * 10_000
        streams = [batches(phases[0].mix, seed, self.args.workers)]
        self.data = held_out(self.args.lengths, self.args.validation_tokens, self.device)
        if self.device == "cuda":
            self.log.write(event="index kernel", **check_kernel())
        if self.args.compile:
            self.model.compile_parts()
            signal.signal(signal.SIGALRM, _too_long)
            signal.alarm(COMPILE_LIMIT_S)
        signal.signal(signal.SIGTERM, self._end_now)
        self.training_began = time.time()
        for number, phase in enumerate(phases):
            if number + 1 < len(phases):
                following = phases[number + 1].mix
                streams.append(batches(following, seed + number + 1, self.args.workers))
            self._phase(phase, streams[number], last=number + 1 == len(phases))
            streams[number] = iter(())
            if time.time() >= self.args.deadline:
                break
        self.finish()

    def _end_now(self, _signal: int, _frame: object) -> None:
        self.args.deadline = 0.0

    def _phase(
        self, phase: Phase, stream: Iterator[tuple[torch.Tensor, torch.Tensor]], *, last: bool
    ) -> None:
        began = reported = time.time()
        saved = began
        self.smooth = 0.0
        tokens = self.tokens
        self.model.index_topk = phase.index_topk
        failures = done = 0
        waiting = 0.0
        self.log.write(event="phase", phase=phase.name, step=self.steps_before + self.steps)
        while True:
            now = time.time()
            lasted = now - began
            if now >= self.args.deadline or (not last and lasted >= phase.at_most):
                return
            if not last and lasted >= phase.at_least and self.smooth >= phase.until:
                return
            try:
                if done == self.args.profile_at:
                    done += 1
                    self._profile(stream, phase)
                waited = time.time()
                batch = next(stream)
                waiting += time.time() - waited
                values = self.step(batch, phase)
                done += 1
                if self.steps == 2:
                    signal.alarm(0)
                    began = reported = self.training_began = time.time()
                    self.log.write(event="compiled")
            except Exception as problem:
                failures += 1
                self.log.write(event="step failed", phase=phase.name, problem=repr(problem)[:1500])
                for value in self.model.parameters.values():
                    value.grad = None
                if failures == 1 and self.model.parts != self.eager.parts:
                    self.model.parts = dict(self.eager.parts)
                    self.log.write(event="compilation given up")
                elif failures > 3:
                    return
                continue
            if self.steps % 10 == 0:
                codes = float(values["codes"])
                self.smooth += 0.3 * (codes - self.smooth)
            if self.steps % self.args.report == 0:
                now = time.time()
                speed = (self.tokens - tokens) / (now - reported)
                reported, tokens = now, self.tokens
                self.log.write(
                    phase=phase.name,
                    step=self.steps_before + self.steps,
                    tokens=self.tokens,
                    speed=round(speed),
                    waiting=waiting,
                    **{name: float(value) for name, value in values.items()},
                )
            if time.time() - saved > self.args.save_every:
                self.checkpoint(phase.name)
                saved = time.time()

    def _profile(self, stream: Iterator[tuple[torch.Tensor, torch.Tensor]], phase: Phase) -> None:
        if self.device != "cuda":
            return
        try:
            found = profile_steps(lambda: self.step(next(stream), phase))
            self.log.write(event="profile", phase=phase.name, **found)
        except Exception as problem:
            self.log.write(event="profile failed", problem=repr(problem)[:500])

    def checkpoint(self, phase: str) -> None:
        """Validate, sparse and dense, and write the state."""
        assert self.data is not None
        if not all(bool(value.isfinite().all()) for value in self.model.parameters.values()):
            self._return_to_last_state()
            return
        for event, measure in (
            ("validation", functools.partial(validate, sparse=True)),
            ("validation", functools.partial(validate, sparse=False)),
            ("wrong layout", validate_wrong_layout),
        ):
            began = time.time()
            try:
                with self.autocast():
                    found = measure(self.eager, self.data)
                self.log.write(
                    event=event,
                    phase=phase,
                    step=self.steps_before + self.steps,
                    **({"sparse": measure.keywords["sparse"]} if event == "validation" else {}),
                    took=time.time() - began,
                    **found,
                )
            except Exception as problem:
                self.log.write(event="validation failed", problem=repr(problem)[:1500])
        save(self.eager, self.out, {"steps": self.steps_before + self.steps, "tokens": self.tokens})

    def _return_to_last_state(self) -> None:
        """Forget an explosion: what was saved last, and an empty optimizer at half its rates."""
        self.log.write(event="not finite", step=self.steps_before + self.steps)
        with torch.no_grad():
            for name, value in load(self.out, self.device).items():
                self.model.parameters[name].copy_(value)
        old = self.optimizer
        self.optimizer = Optimizer(self.model.parameters, old.muon_lr / 2, old.adam_lr / 2)

    def finish(self) -> None:
        """Write the last state."""
        self.checkpoint("end")
        self.log.write(event="end", step=self.steps_before + self.steps, tokens=self.tokens)


def main() -> None:
    """Parse the command line and train."""
    started = time.time()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="JSON file; see plans/")
    parser.add_argument("--out", type=Path, required=True, help="directory for state and log")
    parser.add_argument("--seconds", type=float, required=True, help="to run, start-up included")
    parser.add_argument("--resume", default="", help="directory of an earlier run's state")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=6, help="processes that draw batches")
    parser.add_argument("--report", type=int, default=50, help="steps between lines of the log")
    parser.add_argument("--profile-at", type=int, default=80, help="step of each phase to profile")
    parser.add_argument("--save-every", type=float, default=60, help="seconds between checkpoints")
    parser.add_argument("--validation-tokens", type=int, default=65536)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    args.deadline = started + args.seconds - 15
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / LOG, started)
    Trainer(read_plan(args.plan), args.out, args, log).run()
    os._exit(0)  # the workers of streams that are over need not be waited for


if __name__ == "__main__":
    main()
