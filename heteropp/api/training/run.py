"""Starts a run: checks what it was asked for, and trains on this machine's chips or as a rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from heteropp.api.errors import InputError
from heteropp.api.given import allow_code, unused_profile
from heteropp.api.training.checks import (
    check_elastic,
    check_families,
    check_files,
    check_not_elastic,
    check_p2p,
    check_runs,
    check_tracking,
    check_unused,
    choose_chip,
    chosen_hyperparameters,
    cluster_of,
    hold,
    plan_files,
)
from heteropp.api.training.options import TrainingOptions
from heteropp.api.training.place import launched, take_place
from heteropp.api.training.starts import keep_start
from heteropp.api.training.tools import leave_tools_to_ranks
from heteropp.api.training.validation_sets import validation_sets
from heteropp.description.plan import Plan, read_plan, validate
from heteropp.runtime.ranks.launchers import is_torchruns

if TYPE_CHECKING:
    from heteropp.api.training.elastic import Earlier
    from heteropp.description.cluster import Cluster
    from heteropp.description.hyperparameters import Hyperparameters, OptimizerName
    from heteropp.runtime.training_run import TrainingRun
    from heteropp.state.checkpoint.manifest import Checkpoint

HYPERPARAMETERS = (
    *("optimizer", "learning_rate", "learning_rate_schedule", "warmup_steps", "decay_steps"),
    *("cooldown_steps", "minimum_ratio", "gradient_clip", "weight_decay"),
    "expert_bias_update_rate",
    *("most_skipped", "spike_factor", "skip_spikes"),
)


def run_training(options: TrainingOptions, given: Mapping[str, Any]) -> int:
    """Trains, and returns the exit code: 0, or what a shell gives for a signal or a failed rank.

    given: the options that were asked for, which a later start of the run takes over. Raises
    FileError, HyperparameterError, InputError, LockError, PlanError or ProfileError, one sentence
    each, before any rank starts.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the ranks say what there is to say
    with ExitStack() as held:
        return _Start(options, given, held).train()


class _Start:
    """What is found out about a run before it starts."""

    def __init__(self, options: TrainingOptions, given: Mapping[str, Any], held: ExitStack) -> None:
        self.options, self.given, self.held = options, given, held
        self.launched = launched()  # by torchrun or another, which started every rank itself
        self.keeps = False  # whether this is the process that has the run's folder
        self.by_length: tuple[Plan, ...] = ()
        self.earlier: Earlier | None = None
        self.saved: Checkpoint | None = None

    def train(self) -> int:
        options = self.options
        files = self._read_plans()
        if self.launched and options.elastic and not is_torchruns():
            raise InputError(
                "--elastic needs torchrun, which starts processes again; srun or mpirun may start "
                "one torchrun on each node"
            )
        if self.launched and not take_place(options.cluster, self.plan):
            return 0
        self.keeps = int(os.environ.get("RANK", "0")) == 0
        run = self._checked(files)
        if self.launched:
            return self._train_launched(run)
        if options.elastic:
            return self._train_elastically(run)
        from heteropp.runtime.ranks.launch import launch
        from heteropp.runtime.train import train_rank  # torch is a second's import
        from heteropp.simulator.expectation import expected_step
        from heteropp.state.checkpoint.writer import remove_partial

        code = launch(
            train_rank, run, options.json, partial(expected_step, profile=options.profile),
            labels=run.labels, logs=run.logs, restarts=options.restarts,
        )  # fmt: skip
        remove_partial(run.checkpoints)  # a full disk has room again
        return code

    def _train_launched(self, run: TrainingRun) -> int:
        """Trains as a process of a launcher's: a rank, or an agent. Raises FileError."""
        from heteropp.runtime.ranks.secret import forget_secret, share_secret

        share_secret(run.output)
        if self.options.elastic:
            code = self._train_elastically(run)
        else:
            from heteropp.runtime.train import train_rank
            from heteropp.simulator.expectation import expected_step

            expectation = partial(expected_step, profile=self.options.profile)
            train_rank(run, self.options.json, expectation)
            code = 0
        if self.keeps and code == 0:  # no start of this job follows
            forget_secret(run.output)
        return code

    def _checked(self, files: list[Any]) -> TrainingRun:
        """Checks all that was asked for, takes the run's folder, and keeps how it began there.

        files: of the plans.
        """
        options = self.options
        begun = self._begun()
        there = options.output.exists()
        if self.keeps and there:  # who has it is said before what is in it
            hold(self.held, options.output, begun)
        if options.elastic:
            from heteropp.api.training.elastic import earlier_job

            self.earlier = earlier_job(options.output, options.resume)
        hyperparameters = self._hyperparameters()
        self._plan_for(hyperparameters.optimizer)
        plans = self.by_length or (self.plan,)
        if self.launched and self.keeps:  # before this rank's chip is open
            check_families(plans, options.elastic)
        machines = self._open_chips()
        if self.keeps and machines and (said := unused_profile(self.plan, options.profile)):
            print(said, file=sys.stderr)
        for file in files:
            check_runs(self.plan, file, self.launched and not options.elastic)
        self._check_data(machines, hyperparameters)
        if not self.launched:
            check_families(plans, options.elastic)
        if self.keeps and not there:
            hold(self.held, options.output, begun)
        if self.keeps and not begun:
            read = options.cluster if machines or options.elastic else None
            keep_start(options.output, self.given, plans, read, options.seed, hyperparameters)
        return self._run(machines, hyperparameters)

    def _read_plans(self) -> list[Any]:
        """Reads the plan, or those of the buckets; returns their files."""
        options = self.options
        self.validation = validation_sets(options.validation)
        if options.validate_every and not self.validation:
            raise InputError("--validate-every needs --validation, the data to try the model on")
        files = plan_files(options.plan, options.bucket, options.documents)
        if options.bucket:
            from heteropp.api.training.mixed_lengths import read_buckets

            self.by_length = read_buckets(options.bucket)
        self.plan = self.by_length[0] if self.by_length else read_plan(files[0])
        for plan in self.by_length or (self.plan,):
            allow_code(plan.model, options.trust_remote_code)
        return files

    def _begun(self) -> bool:
        """Returns whether the run has begun before, and was started again by torchrun."""
        options = self.options
        self.restarted = 0
        if options.elastic:
            from heteropp.api.training.elastic import job_goes_on

            check_elastic(
                options.cluster,
                options.profile,
                options.bucket,
                options.resume_from,
                options.restarts,
                options.force,
            )
            return job_goes_on(options.output)
        check_not_elastic(self.given)
        if self.launched:
            # before torch is imported
            choose_chip(self.plan, options.cluster, int(os.environ["RANK"]))
            from heteropp.runtime.ranks.attempt import attempt
            from heteropp.runtime.ranks.store import StoreSilentError

            try:
                self.restarted = attempt(options.deadline)
            except StoreSilentError as error:
                raise InputError(
                    f"rank {os.environ['RANK']} stopped while starting: {error}"
                ) from None
        return self.restarted > 0

    def _open_chips(self) -> Cluster | None:
        """Opens this rank's chip, if this is a rank; returns the cluster that the plan is for."""
        options = self.options
        if self.launched and options.restarts:
            raise InputError(
                "--restarts is for ranks that heteropp-train starts; torchrun has --max-restarts"
            )
        check_p2p(options.p2p, options.device)
        check_tracking(options.tracking(), here=not self.launched)
        if options.elastic:  # this process has no chip
            return None
        if options.device == "chip":
            if self.launched:
                open_chip()
            else:
                leave_tools_to_ranks()
        plans = self.by_length or (self.plan,)
        return cluster_of(plans, options.cluster, options.profile, options.device, options.force)

    def _hyperparameters(self) -> Hyperparameters:
        """Returns those that were asked for, over those of the run that goes on."""
        options = self.options
        if not self.earlier and (options.resume or options.resume_from is not None):
            from heteropp.api.training.resume import checkpoint_to_resume

            # ranks that start again take the newest
            step = None if self.restarted else options.resume_from
            folder = options.output / "checkpoints"
            self.saved = checkpoint_to_resume(folder, step, whole=not self.launched)
        base = self.earlier or (self.saved.manifest if self.saved else None)
        asked = {name: getattr(options, name) for name in HYPERPARAMETERS}
        asked["groups"] = tuple(options.group) if options.group else None
        before = base.hyperparameters if base else None
        rate = options.expert_bias_update_rate
        if rate is None and before is not None:
            rate = before.expert_bias_update_rate
        if rate and self.by_length:
            raise InputError(
                f"--expert-bias-update-rate is {rate:g}, and --bucket "
                "pads documents; expected 0, as padding would count as load"
            )
        return chosen_hyperparameters(before, options.steps, asked, self.plan)

    def _plan_for(self, optimizer: OptimizerName) -> None:
        """Makes the plan one for an optimizer that may not be its own. Raises PlanError."""
        self.plan = replace(self.plan, optimizer=optimizer)
        self.by_length = tuple(replace(plan, optimizer=optimizer) for plan in self.by_length)
        validate(self.plan)

    def _check_data(self, machines: Cluster | None, hyperparameters: Hyperparameters) -> None:
        from heteropp.api.training.documents import chosen_attention, say_cut

        options = self.options
        self.attention_within = chosen_attention(
            options.attention_within, options.data, self.plan, self.by_length
        )
        apart = self.attention_within == "document" and not self.by_length
        if apart and machines and not options.force:
            from heteropp.cost.capacity import check_memory

            check_memory(self.plan, machines, documents_apart=True)
        if not self.launched:
            if not (self.saved or self.earlier):
                check_unused(options.output)
            tokens = check_files(
                self.plan,
                self.by_length,
                options.documents,
                options.output,
                self.saved,
                options.data,
                self.validation,
                self.attention_within,
                hyperparameters,
                options.seed,
            )
            if self.by_length:
                from heteropp.api.training.mixed_lengths import say_documents

                print(say_documents(tokens, self.by_length), file=sys.stderr)
            elif apart and (said := say_cut(tokens, self.plan)):
                print(said, file=sys.stderr)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:  # one process of each node
            from heteropp.api.training.verifying import verify_data

            verify_data(options.data, self.validation.values())
        if not self.saved:
            self._check_weights()

    def _check_weights(self) -> None:
        if self.options.weights:
            from heteropp.state.hugging_face.weights import check_from

            check_from(self.options.weights, self.plan.model)
        elif self.plan.model.base() is not self.plan.model:
            raise InputError(
                "the plan's model has LoRA beside weights that stay as they are; "
                "--from is missing: it says which Hugging Face folder they are in"
            )

    def _run(self, machines: Cluster | None, hyperparameters: Hyperparameters) -> TrainingRun:
        from heteropp.runtime.training_run import RankChip, TrainingRun

        options, plan = self.options, self.plan
        on_chips = options.elastic and options.device == "chip"
        return TrainingRun(
            plan=plan,
            cluster=options.cluster if machines or on_chips else None,
            chips=tuple(
                RankChip(str(machines.chip(rank).path), machines.chip(rank).chip_type)
                if machines
                else RankChip(plan.chip(rank), plan.chip(rank))
                for rank in range(plan.world_size)
            ),
            steps=options.steps,
            output=options.output,
            data=options.data,
            validation=self.validation,
            validate_every=options.validate_every,
            attention_within=self.attention_within,
            weights=options.weights,
            trust_remote_code=options.trust_remote_code,
            resume=self.saved is not None,
            resume_from=options.resume_from,
            checkpoint_every=options.checkpoint_every,
            keep=options.keep,
            deadline_s=options.deadline,
            seed=options.seed,
            hyperparameters=hyperparameters,
            device=options.device,  # type: ignore[arg-type]
            p2p=options.p2p,  # type: ignore[arg-type]
            tracking=options.tracking(),
            by_length=self.by_length,
            documents=options.documents or 0,
        )

    def _train_elastically(self, run: TrainingRun) -> int:
        from heteropp.api.training.elastic import Elastic, train_elastically

        options = self.options
        assert options.cluster is not None
        elastic = Elastic(
            cluster=options.cluster,
            node_name=options.node_name,
            availability=options.availability,
            notice_s=options.notice,
            disk=options.disk,
            remote=options.remote,
            keep_memory_every=options.keep_memory_every,
            keep_disk_every=options.keep_disk_every,
            keep_remote_every=options.keep_remote_every,
        )
        return train_elastically(run, elastic, self.earlier, quiet=options.json)


def open_chip() -> None:
    """Imports ditorch before the first backward, when autograd counts devices once for all.

    Raises InputError.
    """
    try:
        import ditorch  # noqa: F401
    except ImportError as error:
        raise InputError(str(error)) from None
