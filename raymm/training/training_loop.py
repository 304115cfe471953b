"""Training loop: submits steps ahead, reads results in order, evaluates and saves checkpoints."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raymm.actors.recovery.observed_ranks import LISTEN_S
from raymm.callbacks.callback import SavedCheckpoint
from raymm.callbacks.handler import CallbackHandler
from raymm.config.sections import RunConfig
from raymm.data import Skipped
from raymm.errors import Loss, NotFiniteError, RankFailedError, RunFailedError, RunFileError
from raymm.evaluation.heldout import HeldoutLoss
from raymm.evaluation.text_evaluation import TextEvaluation
from raymm.monitor.balance import step_balance
from raymm.monitor.drift_observer import DriftObserver
from raymm.monitor.metrics import MetricsLog, SampleLog
from raymm.monitor.observed_run import ObservedRun, ObservedStep
from raymm.monitor.progress import (
    RunProgress,
    heldout_line,
    skipped_line,
    step_line,
    texts_line,
)
from raymm.monitor.report import RunReport
from raymm.monitor.stragglers import StragglerObserver
from raymm.monitor.throughput import Throughput
from raymm.packages import import_object
from raymm.recovery.recovery import Recovery
from raymm.recovery.run_controller import RunState
from raymm.runtime.parallel_module import ParallelModule, PendingOutput, StepOutput
from raymm.runtime.skipped_step import SkippedStep
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedule.compiled.machine_code import compiling_behind
from raymm.storage.checkpoint import CheckpointStore, Saved
from raymm.training.result import steps_not_applied
from raymm.training.run_batches import Batch, Batches, ReplayedBatches, timed
from raymm.training.stop_request import StopRequest

# Maximum number of skipped samples that a run reports one by one; all are counted.
SKIPPED_SHOWN = 20
# Feature that is imported when a run starts.
REBALANCING = "raymm.monitor.rebalancing:rebalancing"
EXPECTED_STEPS = "raymm.training.step_orders:ExpectedSteps"
# Consecutive failed background writes after which the run ends, and seconds since the first of them
# that must have passed: a run that saves every few seconds survives a short shortage, too. A full
# disk may be freed in time; a lost disk does not return by itself.
MOST_UNWRITTEN = 3
SHORTAGE_S = 60.0


@dataclass(eq=False)
class TrainingLoop:
    """Steps of one attempt.

    A checkpoint that is due after a step that was not applied is saved after the next applied step.
    It would have the same parameters as the checkpoint before, and an older one would be dropped
    for it.

    Args:
        callbacks: called after each metrics row and each committed checkpoint.
        enter: called on every :class:`RunState` transition.
        recovered: called after each recovery with the step to continue after and the error.
        saved: called after each checkpoint except the last.

    Attributes:
        exhausted: why the run ends early because evaluations stopped improving; None otherwise.
    """

    config: RunConfig
    batches: Batches
    parallel: ParallelModule
    store: CheckpointStore
    metrics: MetricsLog
    samples: SampleLog | None
    observer: StepObserver
    throughput: Throughput
    callbacks: CallbackHandler
    progress: RunProgress
    stop: StopRequest
    recovery: Recovery
    enter: Callable[[RunState], None] = lambda state: None
    recovered: Callable[[int, RunFailedError], None] = lambda step, error: None
    saved: Callable[[], None] = lambda: None
    texts: TextEvaluation | None = None

    def __post_init__(self) -> None:
        self._last = self.config.steps
        self._pending: deque[tuple[int, Batch, PendingOutput, float]] = deque()
        self._clock = StepClock()
        self._reported: set[str] = set()
        self._in_a_row = steps_not_applied(self.metrics.rows, at_the_end=True)
        self._owed = False  # True if a checkpoint is overdue
        self._first = self.parallel.steps_taken
        self._checkpoints = RunCheckpoints(
            self.store, self.parallel, self.callbacks, self.progress.line,
            self.config.asynchronous_checkpoints,
        )
        self._read = self._first  # number of steps whose results were read
        self._position: Any = None
        self._unevaluated: int | None = None  # step whose evaluation a stop request skipped
        self.exhausted: str | None = None

    def run(self, state: Any) -> str | None:
        """Take the remaining steps with data from a position.

        Returns:
            None if all steps were taken. After a stop request, a sentence about the last step and
            what is saved.

        Raises:
            NotFiniteError: too many steps in a row were not applied, or a checkpoint would not be
                finite.
            RunFileError: a log or a checkpoint cannot be written at the end.
        """
        with self.stop.deferred(), compiling_behind():
            steps = self.config.steps
            source = ReplayedBatches(
                lambda position, step: self.batches.train(
                    position, steps - step, self.parallel, step
                ),
                self._first, state, self.recovery.enabled,
            )
            try:
                self.enter(RunState.RUNNING)
                self._take_all_steps(source, state)
                stopped = self._stopped()
                for log in (self.metrics, self.samples):
                    if log is not None:
                        log.finish()
                return stopped
            except Exception:
                self._checkpoints.settle()
                raise
            except BaseException:
                self._checkpoints.abandon()
                raise
            finally:
                source.close()

    @property
    def unsaved_steps(self) -> int:
        """Number of steps after the last checkpoint, including steps in flight."""
        return self.parallel.steps_taken - self._checkpoints.saved

    @property
    def step_under_way(self) -> int:
        """Number, from 1, of the first step whose result was not read; the last step if all were
        read."""
        return min(self._read + 1, self.config.steps)

    def _take_all_steps(self, source: ReplayedBatches, state: Any) -> None:
        self._position = state
        self.recovery.after_step(self._first, state, first=True)
        while True:
            try:
                return self._take_steps(source)
            except RunFailedError as error:
                self._recover(error, source)

    def _recover(self, error: RunFailedError, source: ReplayedBatches) -> None:
        if error.lost is Loss.DATA_WORKER:
            try:
                self.parallel.group.look_at_nodes()
            except RunFailedError as lost_node:
                error = lost_node
        snapshot = self.recovery.recover(error)
        if error.lost is Loss.DATA_WORKER:
            source.load_anew()
        if snapshot is None:
            return self.recovered(self._read, error)
        step, self._position = snapshot.step, snapshot.kept
        source.rewind(step, self._position, anew=self.recovery.lost_node)
        self.recovery.forget([pending for _, _, pending, _ in self._pending])
        self._pending.clear()
        self._checkpoints.drop()
        self.metrics.rewind(step)
        self.callbacks.rewind(step)
        if self.samples is not None:
            self.samples.rewind(step)
        self.progress.rewind(step)
        self._in_a_row = steps_not_applied(self.metrics.rows, at_the_end=True)
        self._read, self._owed = step, False
        self.recovered(step, error)

    def _take_steps(self, source: ReplayedBatches) -> None:
        first = self.parallel.steps_taken
        # A failure may have prevented the evaluation and checkpoint after this step.
        if first == 0 or first > self._first and self._stops_at(first):
            self._pause_after(first)
        self._clock.restart()
        for batch, waited in timed(self.stop.until_asked(source)):
            self.callbacks.before_step(self.parallel.steps_taken + 1)
            pending = self.parallel.submit(
                (batch.parts, batch.meta), update=True, keep=batch.owner,
                schedule=None if batch.choice is None else batch.choice.schedule,
            )
            step, self._position = self.parallel.steps_taken, batch.state_after
            self._pending.append((step, batch, pending, waited))
            self.recovery.after_step(step, self._position)
            if (newest := self.recovery.newest) is not None:
                source.forget(newest)
                self.callbacks.forget(newest)
            elif not self.recovery.enabled:
                self.callbacks.forget(self._read)
            if self._stops_at(step):
                self._pause_after(step)
            else:
                self._drain(self.config.steps_in_flight - 1)
            if self._checkpoints.look() and step < self._last:
                self.saved()
            if step >= self._last:
                break
        self._drain(0)
        self._checkpoints.finish()

    def _pause_after(self, step: int) -> None:
        """Drain the pipeline, then evaluate and save if due and not done yet."""
        self._drain(0)
        is_best = False
        with self.parallel.evaluated_weights():
            if not step or self._is_due(step, self.config.eval_every) or step == self._last:
                self._evaluate(step)
            if self.texts is not None and self.texts.is_due(step, self._last):
                is_best = self._evaluate_texts(step, self.texts)
        last = self._last
        if step and self._checkpoints.saved < step:
            self._owed |= step % self.config.checkpoint_every == 0
            if step == last or is_best or self._owed and not self._in_a_row:
                self.enter(RunState.SAVING)
                save = self._checkpoints.take if step < last else self._checkpoints.take_now
                save(self._position)
                self._owed = False
                self.enter(RunState.RUNNING)
        self._clock.restart()

    def _stopped(self) -> str | None:
        """Save unsaved steps after a stop request. Return a sentence about the stop, if any."""
        step, last, reason = self.parallel.steps_taken, self.config.steps, self.stop.reason
        if reason is None or step == last and self._unevaluated is None:
            return None
        if self.unsaved_steps:
            self._checkpoints.take_now(self._position)
        latest = self.store.current
        if step == self._first:
            saved = f"the last checkpoint is {latest}" if latest else "there is nothing to save"
            return f"stopped by {reason.why}: no step was taken, {saved}"
        text = f"stopped by {reason.why} after step {step} of {last}: saved in {latest}"
        if self._unevaluated is not None:
            text += f". The held-out evaluation after step {self._unevaluated} was skipped"
        if step == last or reason.cause is not None:
            return text
        return f"{text}. Run the same command again to resume"

    def _is_due(self, step: int, every: int | None) -> bool:
        return every is not None and step % every == 0

    def _is_printed(self, step: int) -> bool:
        return step % self.config.log_every == 0 or step == self.config.steps

    def _stops_at(self, step: int) -> bool:
        """Return True if the pipeline must be drained after this step."""
        return (
            self._owed
            or step == self.config.steps
            or step % self.config.checkpoint_every == 0
            or self._is_due(step, self.config.eval_every)
            or self.texts is not None and self.texts.is_due(step, self._last)
        )

    def _drain(self, leave: int) -> None:
        while len(self._pending) > leave:
            step, batch, pending, waited = self._pending[0]
            self.throughput.count()
            output = pending.result()
            self._pending.popleft()
            self._read = step
            tokens = sum(microbatch.tokens for microbatch in batch.meta)
            busiest = max(output.timeline.stage_busy().values(), default=0.0)
            seconds = self._clock.read(tokens, busiest)
            self.store.check_owner()  # the logs are also in the run folder
            row = self._row(step, batch, output, seconds, waited)
            self.callbacks.after_step(row)
            self.metrics.add(row)
            self.callbacks.step(self.metrics.rows[-1])
            if self.samples is not None:
                self.samples.add(
                    step, [m.sample_ids for m in batch.meta], [s.id for s in batch.skipped]
                )
            self.progress.advance(output.loss)
            self._count_skipped(output.skipped)
            self._report_skipped(step, batch.skipped)
            if self._is_printed(step) or self.progress.is_silent:
                self.progress.line(step_line(row, self.config.steps, self._clock.speed()))
            self._replace_straggler()

    def _replace_straggler(self) -> None:
        """Raise RankFailedError for a slow rank if a spare process is ready to replace it."""
        stragglers, group = self.observer.stragglers, self.parallel.group
        if not self.config.replace_stragglers or (slow := stragglers.replaceable()) is None:
            return
        if group.has_spare() and self.recovery.for_stragglers:
            stragglers.replaced()
            group.give_up(*slow)

    def _count_skipped(self, skipped: SkippedStep | None) -> None:
        if skipped is None:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        self.progress.not_applied(str(skipped))
        if self._in_a_row >= self.config.max_skipped_steps:
            raise NotFiniteError(
                f"{self._in_a_row} steps in a row were not applied, as their loss or gradients "
                f"were not finite (run.max_skipped_steps is {self.config.max_skipped_steps}). "
                f"Last: {skipped}. The last checkpoint is {self.store.latest() or 'none'}. Look at "
                "these samples; a lower optimizer.lr, or optimizer.max_grad_norm, may help"
            )

    def _report_skipped(self, step: int, skipped: Sequence[Skipped]) -> None:
        """Report each skipped sample once, up to :data:`SKIPPED_SHOWN` samples."""
        for sample in skipped:
            if sample.id not in self._reported and len(self._reported) < SKIPPED_SHOWN:
                self._reported.add(sample.id)
                self.progress.line(skipped_line(step, sample))

    def _row(
        self, step: int, batch: Batch, output: StepOutput, seconds: float, waited: float
    ) -> dict[str, Any]:
        span = output.timeline.makespan or 1.0
        tokens = sum(microbatch.tokens for microbatch in batch.meta)
        observed = self.observer.after_step(ObservedStep(
            step, batch.meta, batch.state_after, not batch.skipped, output.timeline,
            self._is_printed(step), batch.choice,
        ))
        return {
            "step": step,
            "loss": output.loss,
            "label_tokens": output.label_tokens,
            "grad_norm": output.grad_norm,
            "learning_rate": output.learning_rate,
            "seconds": round(seconds, 4),
            "tokens": tokens,
            "tokens_per_s": round(tokens / seconds, 1),
            "stage_busy": {
                str(stage): round(busy / span, 4)
                for stage, busy in output.timeline.stage_busy().items()
            },
            "skipped": len(batch.skipped),
            "truncated": sum(microbatch.truncated for microbatch in batch.meta),
            "peak_memory_bytes": list(output.peak_bytes),
            # With steps in flight, ranks were busy with the previous step during this wait.
            "data_wait_s": round(waited, 4),
            **self.throughput.after_step(batch.meta, seconds), **output.rewards,
            **observed, **output.expert_metrics, **self.batches.by_source(output.source_losses),
            **({} if output.skipped is None else {"not_applied": output.skipped.to_dict()}),
        }

    def _evaluate(self, step: int) -> None:
        if self.config.eval_every is None or self.batches.modalities is None:
            return
        if any(row["step"] == step and "heldout_loss" in row for row in self.metrics.rows):
            return
        right = self._heldout_loss()
        self._report_skipped(step, right.skipped)
        row: dict[str, Any] = {"step": step, **right.row}
        for name in self.batches.modalities if self.config.eval_shuffled else ():
            wrong = self._heldout_loss((name,))
            row[f"heldout_loss_shuffled_{name}"] = wrong.loss
            row[f"heldout_gap_{name}"] = wrong.loss - right.loss
        if self.stop.reason is not None:
            self._unevaluated = step
            return
        right.check()
        self.metrics.add(row)
        self.callbacks.evaluation(self.metrics.rows[-1])
        self.progress.line(heldout_line(row))

    def _evaluate_texts(self, step: int, texts: TextEvaluation) -> bool:
        """Evaluate generated text. Return True if this is the best state so far."""
        if not any(row["step"] == step and "texts" in row for row in self.metrics.rows):
            row = texts.run(step)
            self.metrics.add(row)
            self.callbacks.evaluation(self.metrics.rows[-1])
            self.progress.line(texts_line(row))
        rows = self.metrics.rows
        if (reason := texts.best.exhausted(rows)) is not None:
            self.exhausted = reason
            if step < self._last:
                self.progress.line(f"step {step:>5}  the run ends: {reason}")
                self._last = max(step, 1)
        return texts.best.improved(rows)

    def _heldout_loss(self, shuffled: Sequence[str] = ()) -> HeldoutLoss:
        check, steps = self.parallel.group.check_cluster, self.config.eval_steps
        text = "held-out data" + (f" with shuffled {shuffled[0]}" if shuffled else "")
        with self.batches.heldout(steps, shuffled, check) as loader:
            return HeldoutLoss.of(
                self.parallel.submit, self.progress.over(self.stop.until_asked(loader), text),
                self.config.steps_in_flight, loader.names,
            )


class StepObserver:
    """Observer of steps: balance, rebalancing, plan drift, stragglers and the final report."""

    def __init__(self, run: ObservedRun, plan: Plan) -> None:
        self._run, self._plan = run, plan
        self._report = RunReport(
            run.folder, plan, run.parallel.step_program, run.parallel.options.device
        )
        self._rebalancing = import_object(REBALANCING)(run, plan)
        self._drift = DriftObserver(plan, run.folder, run.say)
        self.expected = import_object(EXPECTED_STEPS)(
            plan, run.model, run.flops, run.orders
        )
        self.stragglers = StragglerObserver(plan, run.say)

    def after_step(self, step: ObservedStep) -> dict[str, Any]:
        """Return the step's ``balance``, ``straggler`` if there is one, and ``plan_drift`` and
        ``expected_step_s`` if the plan has a profile, for ``metrics.jsonl``."""
        run, timeline = self._run, step.timeline
        schedule = self._plan.schedule if step.choice is None else step.choice.schedule
        self._report.add(step.number, step.meta, timeline, schedule)
        fitted = self._rebalancing and self._rebalancing.after_step(
            step.number, step.state_after, len(step.meta), step.complete, timeline
        )
        return {
            "balance": step_balance(
                step.meta, run.model.encoder_names, run.model.packing, run.training.tokens,
                self._plan, timeline,
            ) | (fitted or {}),
            **self._drift.after_step(step.number, step.meta, timeline),
            **self.stragglers.after_step(step.number, timeline),
            **self.expected.after_step(step.meta, step.choice, step.due),
        }

    def write(self, history: Sequence[Mapping[str, Any]]) -> dict[str, Path]:
        """Write plan, pictures and trace; return the files by description."""
        return self._report.write(history)


class StepClock:
    """Measures steps by the times at which their results are read.

    With several steps in flight, a result may be ready long before it is read: the driver was busy,
    or the run pauses and reads all results at once. The time between two reads is then a fraction
    of the step. A step takes at least as long as its busiest stage computes, and speeds are means
    over all steps since the last printed line.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last_read = now()
        self._steps = 0
        self._forget()

    def _forget(self) -> None:
        self._tokens, self._elapsed, self._busiest = 0, 0.0, 0.0

    def restart(self) -> None:
        """Restart the clock with no step in flight, at the start of a run or after a pause."""
        self._last_read = self._now()

    def read(self, tokens: int, busiest: float) -> float:
        """Return the seconds of the step whose result was just read.

        Args:
            busiest: seconds that its busiest stage computed.
        """
        now = self._now()
        elapsed, self._last_read = now - self._last_read, now
        if self._steps == 1:  # the first step waited for data and built what later steps reuse
            self._forget()
        self._steps += 1
        self._tokens += tokens
        self._elapsed += elapsed
        self._busiest += busiest
        return max(elapsed, busiest)

    def speed(self) -> float:
        """Return tokens per second since the last call. The run's first step counts only if no
        other step was read."""
        speed = self._tokens / max(self._elapsed, self._busiest, 1e-9)
        self._forget()
        return speed


class RunCheckpoints:
    """Saves the state of a run and calls the callbacks once a checkpoint is committed.

    Args:
        asynchronous: True to continue with steps while a checkpoint is written. At most one write
            is in flight.

    Attributes:
        saved: number of steps taken by the last saved state.
    """

    def __init__(
        self, store: CheckpointStore, parallel: ParallelModule, callbacks: CallbackHandler,
        say: Callable[[str], None], asynchronous: bool,
    ) -> None:
        self._store, self._parallel, self._callbacks = store, parallel, callbacks
        self._say, self._asynchronous = say, asynchronous
        self.saved = parallel.steps_taken
        self._stood_still = 0.0
        self._committed = False
        self._unwritten, self._unwritten_since = 0, 0.0

    def take(self, position: Any) -> None:
        """Save the current state. No step may be in flight; steps may continue when this returns.

        Raises:
            RunFileError: the checkpoint cannot be written, or :data:`MOST_UNWRITTEN` writes in a
                row, over :data:`SHORTAGE_S`, have failed.
            NotFiniteError: the state, or the previously written one, has non-finite values.
        """
        self.finish()
        if not self._asynchronous:
            self.take_now(position)
            return
        start = time.perf_counter()
        self._store.start(self._parallel, self._trainer_state(position))
        self._stood_still = time.perf_counter() - start

    def take_now(self, position: Any) -> None:
        """Save the current state and wait until it is committed. Raises as :meth:`take`."""
        self.finish()
        start = time.perf_counter()
        folder = self._store.save(self._parallel, self._trainer_state(position))
        self._stood_still = time.perf_counter() - start
        self._tell(Saved(self._parallel.steps_taken, folder, self._stood_still))

    def _trainer_state(self, position: Any) -> dict[str, Any]:
        hooks = self._callbacks.at_checkpoint(self._parallel.steps_taken)
        return {"data": position} | ({"hooks": hooks} if hooks else {})

    def look(self) -> bool:
        """Return True if a checkpoint was committed since the last call. Does not wait; raises as
        :meth:`take`."""
        self._tell(self._asked(self._store.ended))
        committed, self._committed = self._committed, False
        return committed

    def finish(self) -> None:
        """Wait for the write in flight. Raises as :meth:`take`."""
        if (step := self._store.under_way) is not None:
            self._say(f"waiting for the checkpoint of step {step}, which is still being written")
        start, group = time.perf_counter(), self._parallel.group
        while not self._store.wait(LISTEN_S):
            group.look_after()  # detect dead ranks while waiting
        saved = self._asked(self._store.finish)
        self._stood_still += time.perf_counter() - start
        self._tell(saved)

    def settle(self) -> None:
        """Wait for the write in flight when the run ends with an error. Log a failed write instead
        of raising."""
        try:
            self.finish()
        except Exception as error:  # the error that ends the run takes precedence
            if self._parallel.group.ended is None:
                self._say(str(error))

    def abandon(self) -> None:
        """Abandon the write in flight, because the run must end immediately."""
        self._store.abandon()

    def drop(self) -> None:
        """Discard the write in flight, because the run goes back to an earlier step and saves
        again."""
        self._store.abandon()
        self._store.remove_leftovers()

    def _asked(self, ask: Callable[[], Saved | None]) -> Saved | None:
        try:
            return ask()
        except RunFileError as error:
            now = time.monotonic()
            if not self._unwritten:
                self._unwritten_since = now
            self._unwritten += 1
            if self._unwritten >= MOST_UNWRITTEN and now - self._unwritten_since >= SHORTAGE_S:
                raise
            self._say(f"{error}. The run continues and saves at the next checkpoint")
            return None
        except RankFailedError:
            self._parallel.group.pids()  # raises an error that names the dead rank and the cause
            raise

    def _tell(self, saved: Saved | None) -> None:
        if saved is None:
            return
        self._committed, self._unwritten = True, 0
        if (why := self._store.unremoved) is not None:
            self._say(why)
        self.saved = saved.step
        self._callbacks.checkpoint(
            SavedCheckpoint(saved.step, saved.folder, self._stood_still, saved.seconds)
        )
